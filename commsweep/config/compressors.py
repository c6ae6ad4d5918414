"""The compressors a Run can name, with their parameters, and what kind of thing each is
(`Compression`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from commsweep.config.base import Spec, by_kind, settle

Ratio = Annotated[
    float, Field(gt=0, le=1, description="share of the entries that is kept, 0 < ratio <= 1")
]
Bits = Annotated[int, Field(ge=1, le=8, description="bits per code, 1 to 8")]
ScaleScope = Literal["tensor", "sample", "channel", "last", "group"]
Rank = Annotated[int, Field(ge=1, le=2**16, description="columns of the factors")]
Width = Annotated[int, Field(ge=1, le=2**16, description="features of the code")]
Rounding = Literal["nearest", "stochastic"]
IndexCoding = Annotated[
    Literal["rice"] | None,
    Field(
        description=(
            "how kept places travel: as Rice-coded gaps where these are shorter; absent: as "
            "indices or a bitmask"
        )
    ),
]


class Compression(Spec):
    """A compressor's settings. What kind of thing it is stands here once, for the rules of a Run,
    ledgers and tables.

    The first line of a subclass's docstring says what is sent; the docs' tables show it beside
    `cost`.
    """

    label: ClassVar[str] = ""  # in tables and figures; its kind where it has none
    cost: ClassVar[str] = ""  # bytes of a message
    use: ClassVar[str] = ""  # when to use it
    # keeps some entries of a message, says which, and can do with half the ratio
    sparsifier: ClassVar[bool] = False
    # every learner keeps places of its own choice, and a ledger counts them
    own_places: ClassVar[bool] = False
    # of a kept entry, where the bytes at the entropy bound are asked for
    value_bits: ClassVar[int] = 32
    shared_draw: ClassVar[bool] = False  # all learners draw alike
    summable: ClassVar[bool] = False  # the learners' messages can be added up on the way
    # needs whole layers, in their order
    layerwise: ClassVar[bool] = False
    joint: ClassVar[bool] = False  # the learners make their messages together
    # part of the model: a code crosses forward and, as its gradient, backward
    coder: ClassVar[bool] = False

    # stands in for the message, so that feedback would have nothing to correct
    control: ClassVar[bool] = False

    # reuses the mask of the forward message
    shares_mask: ClassVar[bool] = False

    kind: str


class NoCompressorSpec(Compression):
    """The dense message: every value as it is."""

    label: ClassVar[str] = "dense"
    cost: ClassVar[str] = "elements x itemsize"
    summable: ClassVar[bool] = True
    use: ClassVar[str] = "As the reference, and for vectors, which are small."
    kind: Literal["none"] = "none"


class ZeroSpec(Compression):
    """Send nothing: zeros arrive. The floor beside which a compressor is judged."""

    label: ClassVar[str] = "nothing"
    cost: ClassVar[str] = "0"
    summable: ClassVar[bool] = True
    use: ClassVar[str] = "As the control: what training reaches without the message."
    control: ClassVar[bool] = True
    kind: Literal["zero"] = "zero"


class MeanSpec(Compression):
    """Send one number a feature: its running mean over messages, which arrives at all positions.

    After n messages the newest one weighs 1 / n, and at least `rate`. Features are an image's
    channels, a weight's output channels (convolutions), else the last axis.
    """

    label: ClassVar[str] = "mean"
    cost: ClassVar[str] = "4 a feature"
    use: ClassVar[str] = "As the control: what the average says without the message."
    control: ClassVar[bool] = True
    kind: Literal["mean"] = "mean"
    rate: Annotated[
        float, Field(gt=0, le=1, description="least weight of the newest message in the mean")
    ] = 0.1


class LiveSpec(Compression):
    """Send the weights' gradients that masks leave (a Run with sparsity), as they are; the others
    all learners know.
    """

    label: ClassVar[str] = "live"
    cost: ClassVar[str] = "itemsize x live elements"
    summable: ClassVar[bool] = True
    use: ClassVar[str] = "With `sparsity`: a learner's other gradients are known to be zero."
    kind: Literal["live"] = "live"


class CastSpec(Compression):
    """Send the values in a 16-bit floating-point type."""

    cost: ClassVar[str] = "2 x elements"
    use: ClassVar[str] = "When half the bytes are enough and nothing may be tuned."
    kind: Literal["cast"] = "cast"
    to: Literal["float16", "bfloat16"] = "bfloat16"


class CodeSpec(Compression):
    """A compressor with a code of at most 8 bits for every entry."""

    coding: Annotated[
        Literal["rans"] | None,
        Field(
            description=(
                "how codes travel: rANS by their frequencies in the message, where that is "
                "shorter; absent: in packed bits"
            )
        ),
    ] = None


class QuantizerSpec(CodeSpec):
    """What the two b-bit quantizers have in common."""

    bits: Bits = 4
    scale: ScaleScope = "tensor"
    group: Annotated[
        int, Field(ge=2, le=2**20, description="elements per scale when scale is 'group'")
    ] = 128
    rounding: Rounding = "nearest"


class UniformSpec(QuantizerSpec):
    """Min-max b-bit codes: q = round((x - min) / (max - min) * (2^b - 1))."""

    label: ClassVar[str] = "min-max"
    cost: ClassVar[str] = "packed codes + 8 a scale"
    use: ClassVar[str] = "First choice for activations: 4 bits under a scale a group."
    kind: Literal["uniform"] = "uniform"


class FixedPointSpec(QuantizerSpec):
    """Symmetric b-bit codes around zero: q = clip(round(x / absmax * 2^(b-1)), -2^(b-1), 2^(b-1) -
    1).
    """

    label: ClassVar[str] = "fixed-point"
    cost: ClassVar[str] = "packed codes + 4 a scale"
    use: ClassVar[str] = "For values around zero, at half the scale bytes of `uniform`."
    kind: Literal["fixed"] = "fixed"

    @model_validator(mode="after")
    def _has_codes_above_zero(self) -> FixedPointSpec:
        if self.bits == 1 and self.rounding == "stochastic":
            raise ValueError(
                "fixed: one bit has no code above zero, so stochastic rounding cannot be "
                "without bias; use bits=2 or more, or kind=sign"
            )
        return self


class MXSpec(CodeSpec):
    """Floats of 4 to 8 bits under a scale for every 32 elements (MX), or 16 (NVFP4)."""

    label: ClassVar[str] = "MX"
    cost: ClassVar[str] = "packed codes + 1 a block (NVFP4: + 4)"
    use: ClassVar[str] = (
        "When the hardware reads these formats, or outliers spoil a range of whole numbers."
    )
    kind: Literal["mx"] = "mx"
    format: Annotated[
        Literal["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6", "mxfp4", "nvfp4"],
        Field(description="of the elements and their scales (mxfp6: e2m3, fp4: e2m1)"),
    ] = "mxfp4"
    rounding: Rounding = "nearest"

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return 16 if self.format == "nvfp4" else 32


RotationBlock = Annotated[
    Literal[32, 64, 128, 256, 512, 1024],
    Field(description="elements that are rotated together"),
]


class EdenSpec(CodeSpec):
    """Levels of a normal distribution behind a random rotation, scaled to be without bias (EDEN;
    one bit is DRIVE).
    """

    label: ClassVar[str] = "EDEN"
    cost: ClassVar[str] = "packed codes + 4 a block + 8"
    use: ClassVar[str] = (
        "For gradients in 1 to 4 bits: without bias, at a smaller error than drawn rounding."
    )
    kind: Literal["eden"] = "eden"
    bits: Bits = 2
    block: RotationBlock = 128


class MSEdenSpec(Compression):
    """NVFP4 behind a random rotation, its scales corrected to be without bias (MS-EDEN)."""

    label: ClassVar[str] = "MS-EDEN"
    cost: ClassVar[str] = "4 bits a value + 1 a block of 16 + 12"
    use: ClassVar[str] = "As `eden`, when the receiver computes in NVFP4."
    kind: Literal["ms_eden"] = "ms_eden"
    block: RotationBlock = 128


class FixedBatchSpec(Compression):
    """The authors' fixed point (from AC-SGD): one float16 absmax per feature, over the batch,
    rounded before use.
    """

    label: ClassVar[str] = "batch fixed-point"
    cost: ClassVar[str] = "packed codes + 2 a feature"
    use: ClassVar[str] = "To repeat AC-SGD's numbers; elsewhere `fixed`."
    kind: Literal["fixed_batch"] = "fixed_batch"
    bits: Bits = 4


class TAHSpec(Compression):
    """Tiles with a scale each, outlier tiles rotated, and more bits for the tokens that carry more
    (TAH-Quant).
    """

    label: ClassVar[str] = "TAH"
    cost: ClassVar[str] = "packed codes + 2 a tile + flags"
    use: ClassVar[str] = "To compare with TAH-Quant as published."
    kind: Literal["tah"] = "tah"
    tile: Literal[8, 16, 32, 64, 128] = 32
    high_bits: Bits = 4
    low_bits: Bits = 3
    high_share: Annotated[
        float, Field(ge=0, le=1, description="share of the tokens that get the high bits")
    ] = 0.8
    tau: Annotated[
        float, Field(ge=1, description="a tile is rotated if its largest entry > tau * the second")
    ] = 2.0


class TAHCodeSpec(Compression):
    """TAH-Quant as its authors coded it: tiles between their minimum and maximum, outliers swapped
    to the front and rotated, fewer bits for tokens of low entropy.
    """

    label: ClassVar[str] = "TAH (code)"
    cost: ClassVar[str] = "packed codes + 4 a tile + places + flags"
    use: ClassVar[str] = "To compare with TAH-Quant as its authors run it."
    kind: Literal["tah_code"] = "tah_code"
    tile: Annotated[
        Literal[8, 16, 32, 64, 128], Field(description="the authors: 64 forward, 32 backward")
    ] = 64
    high_bits: Annotated[Bits, Field(description="the authors: 4 forward, 6 backward")] = 4
    low_bits: Bits = 3
    high_share: Annotated[
        float, Field(ge=0, le=1, description="share of the tokens that get the high bits")
    ] = 0.8


class LowRankSpec(Compression):
    """A rank-`rank` product found by one power iteration, begun from the last message's factor when
    `warm`.
    """

    label: ClassVar[str] = "low rank"
    cost: ClassVar[str] = "(positions + features) x rank values"
    use: ClassVar[str] = (
        "For messages whose features are dependent; look at the error first (`--diagnose`)."
    )
    kind: Literal["lowrank"] = "lowrank"
    rank: Rank = 4
    warm: bool = True


class BottleneckSpec(Compression):
    """Forward only: a linear encoder to `width` features and a decoder, both trained with the
    model.
    """

    cost: ClassVar[str] = "code"
    coder: ClassVar[bool] = True
    use: ClassVar[str] = "When the model may be trained with a narrower crossing from the start."
    kind: Literal["bottleneck"] = "bottleneck"
    width: Width = 16


class SubspaceSpec(Compression):
    """Forward only: the coordinates of (activation - embedding) in a fixed random subspace of
    `width` dimensions.

    `constrain` keeps what the blocks before the last boundary add inside the subspace, so that
    nothing is lost. With `frozen` the embedding is that of the start, of which every stage has a
    copy, and a token's number goes along as one more feature; so it can be executed as processes.
    Embeddings then move inside the subspace only, if constrained.
    """

    cost: ClassVar[str] = "code"
    coder: ClassVar[bool] = True
    use: ClassVar[str] = "As `bottleneck`, with nothing to train and gradients of the same width."
    kind: Literal["subspace"] = "subspace"
    width: Width = 16
    constrain: bool = True
    frozen: Annotated[
        bool | None,
        Field(description="measure from the first embeddings; absent: from those of now"),
    ] = None

    @model_validator(mode="after")
    def _absent_if_not(self) -> SubspaceSpec:
        if self.frozen is False:
            settle(self, "frozen", None)  # one way to say it, one id
        return self


class SignSpec(CodeSpec):
    """Signs, with one scale a sample: mean |x| (EF-signSGD), |x|_2 / sqrt(n) (1-bit Adam) or one
    (signSGD).
    """

    cost: ClassVar[str] = "1 bit a value + 4 a sample"
    use: ClassVar[str] = "For gradients at one bit, with error feedback."
    kind: Literal["sign"] = "sign"
    scale: Literal["mean", "l2", "one"] = "mean"


class OneBitSpec(CodeSpec):
    """Signs with two scales a sample: the mean of the negative and of the other entries (1-bit
    SGD).
    """

    label: ClassVar[str] = "1-bit"
    cost: ClassVar[str] = "1 bit a value + 8 a sample"
    use: ClassVar[str] = "As `sign`, when positive and negative entries differ in size."
    kind: Literal["onebit"] = "onebit"


class TernSpec(CodeSpec):
    """Three values, drawn without bias; entries are clipped at `clip` standard deviations first
    (TernGrad).

    The clip is TernGrad's, for values around zero: of a message whose entries are all alike it
    leaves nothing, because they do not deviate. clip=0 sends such a message.
    """

    label: ClassVar[str] = "TernGrad"
    cost: ClassVar[str] = "2 bits a value + 4 a sample"
    use: ClassVar[str] = "For gradients at two bits, without bias and without memory."
    kind: Literal["tern"] = "tern"
    clip: Annotated[float, Field(ge=0, description="standard deviations; 0: no clipping")] = 2.5


class QSGDSpec(Compression):
    """`levels` levels of a norm over `bucket` elements, drawn without bias, Elias-coded (QSGD)."""

    label: ClassVar[str] = "QSGD"
    cost: ClassVar[str] = "by the data: Elias codes + 4 a bucket"
    use: ClassVar[str] = (
        "For unbiased gradients whose levels are mostly zero: Elias codes then pay."
    )
    kind: Literal["qsgd"] = "qsgd"
    levels: Annotated[int, Field(ge=1, le=2**15)] = 4
    bucket: Annotated[int, Field(ge=1, le=2**20, description="elements that share a norm")] = 512
    norm: Literal["l2", "max"] = "l2"
    coding: Literal["elias", "fixed"] = "elias"


class StatisticalSpec(CodeSpec):
    """2^`bits` levels around the mean of all values, `range` deviations wide, each the mean of its
    values (SparseLoCo).
    """

    cost: ClassVar[str] = "packed codes + 4 a level"
    use: ClassVar[str] = "For the values that a sparsifier keeps (SparseLoCo)."
    kind: Literal["statistical"] = "statistical"
    bits: Bits = 2
    range: Annotated[
        float, Field(gt=0, description="width of all levels, in standard deviations")
    ] = 6.0


class E3M0Spec(CodeSpec):
    """A sample's largest magnitude times 1, 1/2, ... 1/64, or zero: the nearest by its logarithm
    (Streaming DiLoCo).

    What its codes are scaled by is not published, so this reading is ours.
    """

    label: ClassVar[str] = "E3M0"
    cost: ClassVar[str] = "4 bits a value + 4 a sample"
    use: ClassVar[str] = "For pseudo-gradients at four bits (Streaming DiLoCo)."
    kind: Literal["e3m0"] = "e3m0"


class NaturalSpec(Compression):
    """Powers of two, drawn without bias: 9 bits a value (natural compression)."""

    cost: ClassVar[str] = "9 bits a value"
    use: ClassVar[str] = "For unbiased gradients at little more than a byte."
    kind: Literal["natural"] = "natural"


ValueSpec = (
    CastSpec
    | UniformSpec
    | FixedPointSpec
    | SignSpec
    | OneBitSpec
    | TernSpec
    | NaturalSpec
    | StatisticalSpec
    | E3M0Spec
    | MXSpec
)


class RotatedSpec(Compression):
    """A code of the message behind a random rotation, which spreads outliers over a block."""

    label: ClassVar[str] = "rotated"
    cost: ClassVar[str] = "those of the code + 8"
    use: ClassVar[str] = "When outliers spoil a scale: activations at 2 or 3 bits."
    kind: Literal["rotated"] = "rotated"
    block: RotationBlock = 128
    code: Annotated[
        ValueSpec, Field(discriminator="kind", description="how the rotated message travels")
    ] = UniformSpec()


class Selection(Compression):
    """A compressor that keeps the same number of entries of every message; `values` codes those."""

    values: Annotated[
        ValueSpec | None,
        Field(discriminator="kind", description="how the kept values travel; absent: as they are"),
    ] = None


class TopKSpec(Selection):
    """Keep the `ratio` largest magnitudes of every sample, tile, last-dimension row, or of the
    tensor.

    Tiles are `tile` x `tile` entries of a sample as a matrix (its first dimension by all others),
    of fewer where sides do not divide; a vector is cut into runs of tile^2 (SparseLoCo).
    per_tile=number: smaller tiles keep as many entries as a whole one, and a vector is cut into
    runs of `tile` (DeMo). index_coding: Rice codes of the gaps between kept places, where they are
    shorter than indices and a bitmask.
    """

    label: ClassVar[str] = "TopK"
    cost: ClassVar[str] = "values + the smaller of packed indices and a bitmask"
    sparsifier: ClassVar[bool] = True
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = (
        "Forward, with the same compressor at inference; for gradients, with error feedback."
    )
    kind: Literal["topk"] = "topk"
    ratio: Ratio = 0.1
    scope: Literal["sample", "tensor", "last", "tile"] = "sample"
    tile: Annotated[int | None, Field(ge=2, le=256, description="side of a tile; absent: 64")] = (
        None
    )
    per_tile: Annotated[
        Literal["number"] | None,
        Field(
            description=(
                "what a tile keeps: ratio x tile^2 entries, however small it is; absent: the "
                "share ratio"
            )
        ),
    ] = None
    index_coding: IndexCoding = None

    @model_validator(mode="after")
    def _tiled(self) -> TopKSpec:
        for name in ("tile", "per_tile"):
            if getattr(self, name) is not None and self.scope != "tile":
                raise ValueError(f"{name}={getattr(self, name)} has no effect unless scope=tile")
        return self


class Chosen(Compression):
    """Keeps entries of which the data say how many there are."""

    index_coding: IndexCoding = None


class TopKStrictSpec(Chosen):
    """The authors' TopK: drop the int(d*(1-ratio)) smallest and every entry equal to that
    threshold.
    """

    label: ClassVar[str] = "TopK"
    cost: ClassVar[str] = "as `topk`, by what is left"
    sparsifier: ClassVar[bool] = True
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = (
        "To repeat the authors' numbers; elsewhere `topk`, whose bytes are known beforehand."
    )
    kind: Literal["topk_strict"] = "topk_strict"
    ratio: Ratio = 0.1


class RandomKSpec(Selection):
    """Keep `ratio` of the positions, drawn anew for every message; `scaled` multiplies by d/k
    (unbiased).
    """

    label: ClassVar[str] = "RandomK"
    cost: ClassVar[str] = "values + 8"
    sparsifier: ClassVar[bool] = True
    shared_draw: ClassVar[bool] = True
    summable: ClassVar[bool] = True
    use: ClassVar[str] = (
        "When learners' messages must add up on the way; `scaled` is unbiased, and noisy."
    )
    kind: Literal["randomk"] = "randomk"
    ratio: Ratio = 0.1
    scaled: bool = False


class RandTopKSpec(Selection):
    """TopK in which every kept place is, with probability `alpha`, a random one outside the top k
    instead.
    """

    label: ClassVar[str] = "RandTopK"
    cost: ClassVar[str] = "as `topk`"
    sparsifier: ClassVar[bool] = True
    use: ClassVar[str] = "When TopK leaves features unheard: some places are drawn from the rest."
    kind: Literal["randtopk"] = "randtopk"
    ratio: Ratio = 0.1
    alpha: Annotated[
        float, Field(ge=0, lt=1, description="chance that a kept place is not a top one")
    ] = 0.1
    scope: Literal["sample", "last"] = "sample"


class ForwardMaskSpec(Selection):
    """Backward only: keep the gradient where the forward sparsifier kept the activation; values
    travel alone.
    """

    label: ClassVar[str] = "forward's mask"
    cost: ClassVar[str] = "values only"
    shares_mask: ClassVar[bool] = True
    use: ClassVar[str] = "Backward beside a sparsifier forward: places cost nothing."
    kind: Literal["forward_mask"] = "forward_mask"


class ThresholdSpec(Chosen):
    """Keep the entries whose size exceeds `value`."""

    cost: ClassVar[str] = "as `topk`, by what is left"
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = "When a size is known below which nothing matters."
    kind: Literal["threshold"] = "threshold"
    value: Annotated[float, Field(ge=0)] = 0.01


class PeriodicSpec(Chosen):
    """The entries above a threshold that leaves the top `ratio`, looked for anew every `every`
    messages (DCT).

    Each learner has its own for each layer; how many entries stay in between depends on the data.
    """

    label: ClassVar[str] = "periodic threshold"
    cost: ClassVar[str] = "as `topk`, by what is left"
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = "As `topk` for large layers, when choosing takes too long."
    kind: Literal["periodic"] = "periodic"
    ratio: Ratio = 0.01
    every: Annotated[
        int, Field(ge=1, description="messages of a layer between two looks for the threshold")
    ] = 1000


class DrydenSpec(Chosen):
    """Keep the top `ratio` of the positive and of the negative entries, each as its group's
    mean.
    """

    label: ClassVar[str] = "Dryden"
    cost: ClassVar[str] = "1 bit a value, places, two means"
    own_places: ClassVar[bool] = True
    value_bits: ClassVar[int] = 1
    use: ClassVar[str] = (
        "For gradients with feedback, when values may be shared by all kept entries."
    )
    kind: Literal["dryden"] = "dryden"
    ratio: Ratio = 0.01


class SIDCoSpec(Chosen):
    """Keep about `ratio`: a threshold from a distribution fitted to the sizes, in `stages` stages
    (SIDCo).
    """

    label: ClassVar[str] = "SIDCo"
    cost: ClassVar[str] = "as `topk`, by what is left"
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = "As `topk` for large layers, when about `ratio` is enough."
    kind: Literal["sidco"] = "sidco"
    ratio: Ratio = 0.01
    fit: Literal["exponential", "gpareto"] = "exponential"
    stages: Annotated[int, Field(ge=1, le=8)] = 2


class AdaCompSpec(Compression):
    """The residues whose look-ahead reaches their bin's maximum, as one of three values (AdaComp).

    Bins of `conv` elements in convolutions, `fc` in all other layers. Go with feedback "adacomp".
    """

    label: ClassVar[str] = "AdaComp"
    cost: ClassVar[str] = "1 or 2 a kept entry + 5"
    own_places: ClassVar[bool] = True
    value_bits: ClassVar[int] = 1
    layerwise: ClassVar[bool] = True
    use: ClassVar[str] = "For convolutional gradients without a ratio to tune."
    kind: Literal["adacomp"] = "adacomp"
    conv: Annotated[int, Field(ge=1, le=2**15, description="elements of a bin in convolutions")] = (
        50
    )
    fc: Annotated[int, Field(ge=1, le=2**15, description="elements of a bin in other layers")] = 500


class CLTKSpec(Compression):
    """The top `ratio` of one learner's message, another one each step, at all learners (ScaleCom's
    CLT-k).
    """

    label: ClassVar[str] = "CLT-k"
    cost: ClassVar[str] = "values + the places, shared among the learners"
    summable: ClassVar[bool] = True
    joint: ClassVar[bool] = True
    use: ClassVar[str] = "As `topk` with many learners: one choice of places for all."
    kind: Literal["cltk"] = "cltk"
    ratio: Ratio = 0.01


class PowerSGDSpec(Compression):
    """Rank-`rank` product of the mean gradient by one power iteration that begins from the last one
    (PowerSGD).
    """

    label: ClassVar[str] = "PowerSGD"
    cost: ClassVar[str] = "4 x rank x (rows + columns)"
    summable: ClassVar[bool] = True
    joint: ClassVar[bool] = True
    use: ClassVar[str] = "For gradients of large matrices, when messages must add up on the way."
    kind: Literal["powersgd"] = "powersgd"
    rank: Rank = 2


class DionFactorsSpec(Compression):
    """Both factors of the mean momentum's orthonormal step, of rank `fraction` of its shorter side
    (Dion).
    """

    label: ClassVar[str] = "Dion"
    cost: ClassVar[str] = "4 x rank x (rows + columns)"
    summable: ClassVar[bool] = True
    joint: ClassVar[bool] = True
    use: ClassVar[str] = "When the optimizer is to be orthonormal (Muon's step) at a rank's bytes."
    kind: Literal["dion"] = "dion"
    rows: Annotated[
        Literal["outputs", "memory"],
        Field(
            description=(
                "of a matrix: the layer's outputs; or as it lies in memory, in transformers' "
                "Conv1D its inputs"
            )
        ),
    ] = "outputs"
    fraction: Annotated[
        float, Field(gt=0, le=1, description="of a matrix's shorter side: the rank")
    ] = 0.25


CompressorSpec = Annotated[
    NoCompressorSpec
    | ZeroSpec
    | MeanSpec
    | CastSpec
    | TopKSpec
    | TopKStrictSpec
    | RandomKSpec
    | RandTopKSpec
    | ForwardMaskSpec
    | UniformSpec
    | FixedPointSpec
    | FixedBatchSpec
    | TAHSpec
    | TAHCodeSpec
    | LowRankSpec
    | SignSpec
    | OneBitSpec
    | TernSpec
    | QSGDSpec
    | NaturalSpec
    | StatisticalSpec
    | E3M0Spec
    | MXSpec
    | EdenSpec
    | MSEdenSpec
    | RotatedSpec
    | ThresholdSpec
    | DrydenSpec
    | SIDCoSpec
    | BottleneckSpec
    | SubspaceSpec,
    Field(discriminator="kind"),
]

GradientCompressor = Annotated[
    NoCompressorSpec
    | ZeroSpec
    | MeanSpec
    | LiveSpec
    | CastSpec
    | TopKSpec
    | TopKStrictSpec
    | RandomKSpec
    | UniformSpec
    | FixedPointSpec
    | SignSpec
    | OneBitSpec
    | TernSpec
    | QSGDSpec
    | NaturalSpec
    | StatisticalSpec
    | E3M0Spec
    | MXSpec
    | EdenSpec
    | MSEdenSpec
    | RotatedSpec
    | ThresholdSpec
    | DrydenSpec
    | PeriodicSpec
    | SIDCoSpec
    | AdaCompSpec
    | CLTKSpec
    | PowerSGDSpec
    | DionFactorsSpec,
    Field(discriminator="kind"),
]


def values_fit(name: str, compressor: Spec) -> None:
    """Refuse a code of kept values, or of a rotated message, that means nothing for them."""
    for part, what in (("values", "kept values have"), ("code", "a rotated message has")):
        code = getattr(compressor, part, None)
        if code is None:
            continue
        group_fits(f"{name}.compressor.{part}", code)
        if part == "values" and getattr(code, "coding", None):
            raise ValueError(
                f"{name}.compressor.values.coding={code.coding}: the bytes of kept values must "
                "follow from their number; leave it out"
            )
        if getattr(code, "scale", "") in ("channel", "last"):
            raise ValueError(
                f"{name}.compressor.{part}.scale={code.scale}: {what} no channels; "
                "use tensor, sample or group"
            )


def control_fits(compressor: str, spec: Compression, feedback: str, kind: str) -> None:
    """Refuse a feedback of a control; compressor, feedback: their dotted names."""
    if spec.control and kind != "none":
        raise ValueError(
            f"{feedback}.kind={kind} does not go with the control {compressor}.kind={spec.kind}, "
            "which sends no message to correct"
        )


def group_fits(name: str, compressor: Any) -> None:
    """Refuse a size of groups where nothing is grouped."""
    if getattr(compressor, "group", 128) != 128 and compressor.scale != "group":
        raise ValueError(f"{name}.group has no effect unless {name}.scale=group")


def kinds(union: Any, trait: str) -> str:
    """The kinds of a union's members that have a trait, for people."""
    return ", ".join(kind for kind, one in by_kind(union).items() if getattr(one, trait))

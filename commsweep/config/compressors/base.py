"""The settings that every compressor has (`Compression`), and the search for the compressors: each
module of this package defines some, and nothing else lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from commsweep.config.base import Spec

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

RotationBlock = Annotated[
    Literal[32, 64, 128, 256, 512, 1024],
    Field(description="elements that are rotated together"),
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
    # where it may stand: at a boundary, between learners, and as a code of kept values
    crosses: ClassVar[bool] = True
    exchanged: ClassVar[bool] = True
    codes_values: ClassVar[bool] = False
    draws: ClassVar[bool] = False  # another seed may give another message
    blind: ClassVar[bool] = False  # may leave an entry out whatever its value is
    # settings, beside the defaults, with which tests hold it to the laws of all compressors
    example: ClassVar[dict[str, Any]] = {}

    # reuses the mask of the forward message
    shares_mask: ClassVar[bool] = False

    kind: str

    @property
    def entry_type(self) -> str | None:
        """The type of torch's in which every entry travels by itself; None: not so."""
        return None


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
    """The settings that the two b-bit quantizers have in common."""

    bits: Bits = 4
    scale: ScaleScope = "tensor"
    group: Annotated[
        int, Field(ge=2, le=2**20, description="elements per scale when scale is 'group'")
    ] = 128
    rounding: Rounding = "nearest"


def group_fits(name: str, compressor: Any) -> None:
    """Refuse a size of groups where nothing is grouped."""
    if getattr(compressor, "group", 128) != 128 and compressor.scale != "group":
        raise ValueError(f"{name}.group has no effect unless {name}.scale=group")


def control_fits(compressor: str, spec: Compression, feedback: str, kind: str) -> None:
    """Refuse a feedback of a control; compressor, feedback: their dotted names."""
    if spec.control and kind != "none":
        raise ValueError(
            f"{feedback}.kind={kind} does not go with the control {compressor}.kind={spec.kind}, "
            "which sends no message to correct"
        )

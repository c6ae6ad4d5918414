"""Messages that learners make together, or that a residue adapts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import Compression, Ratio


class AdaCompSpec(Compression):
    """The residues whose look-ahead reaches their bin's maximum, as one of three values (AdaComp).

    Bins of `conv` elements in convolutions, `fc` in all other layers. Needs
    grad.feedback.kind=adacomp.
    """

    label: ClassVar[str] = "AdaComp"
    cost: ClassVar[str] = "1 or 2 a kept entry + 5"
    own_places: ClassVar[bool] = True
    value_bits: ClassVar[int] = 1
    layerwise: ClassVar[bool] = True
    use: ClassVar[str] = "For convolutional gradients without a ratio to tune."
    crosses: ClassVar[bool] = False
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
    crosses: ClassVar[bool] = False
    kind: Literal["cltk"] = "cltk"
    ratio: Ratio = 0.01

"""Few levels: signs, ternary values, powers of two and the like."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import Bits, CodeSpec, Compression


class SignSpec(CodeSpec):
    """Signs, with one scale a sample: mean |x| (EF-signSGD), |x|_2 / sqrt(n) (1-bit Adam) or one
    (signSGD).
    """

    cost: ClassVar[str] = "1 bit a value + 4 a sample"
    use: ClassVar[str] = "For gradients at one bit, with error feedback."
    codes_values: ClassVar[bool] = True
    kind: Literal["sign"] = "sign"
    scale: Literal["mean", "l2", "one"] = "mean"


class OneBitSpec(CodeSpec):
    """Signs with two scales a sample: the mean of the negative and of the other entries (1-bit
    SGD).
    """

    label: ClassVar[str] = "1-bit"
    cost: ClassVar[str] = "1 bit a value + 8 a sample"
    use: ClassVar[str] = "As `sign`, when positive and negative entries differ in size."
    codes_values: ClassVar[bool] = True
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
    codes_values: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    kind: Literal["tern"] = "tern"
    clip: Annotated[float, Field(ge=0, description="standard deviations; 0: no clipping")] = 2.5


class NaturalSpec(Compression):
    """Powers of two, drawn without bias: 9 bits a value (natural compression)."""

    cost: ClassVar[str] = "9 bits a value"
    use: ClassVar[str] = "For unbiased gradients at little more than a byte."
    codes_values: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    kind: Literal["natural"] = "natural"


class StatisticalSpec(CodeSpec):
    """2^`bits` levels around the mean of all values, `range` deviations wide, each the mean of its
    values (SparseLoCo).
    """

    cost: ClassVar[str] = "packed codes + 4 a level"
    use: ClassVar[str] = "For the values that a sparsifier keeps (SparseLoCo)."
    codes_values: ClassVar[bool] = True
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
    codes_values: ClassVar[bool] = True
    kind: Literal["e3m0"] = "e3m0"

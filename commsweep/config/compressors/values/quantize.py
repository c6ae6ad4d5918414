"""Min-max codes and fixed-point codes."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from commsweep.config.compressors.base import QuantizerSpec


class UniformSpec(QuantizerSpec):
    """Min-max b-bit codes: q = round((x - min) / (max - min) * (2^b - 1))."""

    label: ClassVar[str] = "min-max"
    cost: ClassVar[str] = "packed codes + 8 a scale"
    use: ClassVar[str] = "First choice for activations: 4 bits under a scale a group."
    codes_values: ClassVar[bool] = True
    kind: Literal["uniform"] = "uniform"


class FixedPointSpec(QuantizerSpec):
    """Symmetric b-bit codes around zero: q = clip(round(x / absmax * 2^(b-1)), -2^(b-1), 2^(b-1) -
    1).
    """

    label: ClassVar[str] = "fixed-point"
    cost: ClassVar[str] = "packed codes + 4 a scale"
    use: ClassVar[str] = "For values around zero, at half the scale bytes of `uniform`."
    codes_values: ClassVar[bool] = True
    kind: Literal["fixed"] = "fixed"

    @model_validator(mode="after")
    def _has_codes_above_zero(self) -> FixedPointSpec:
        if self.bits == 1 and self.rounding == "stochastic":
            raise ValueError(
                "fixed: one bit has no code above zero, so stochastic rounding cannot be "
                "without bias; use bits=2 or more, or kind=sign"
            )
        return self

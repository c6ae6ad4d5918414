"""The formats of Open Compute (MX) and NVFP4."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import CodeSpec, Rounding


class MXSpec(CodeSpec):
    """Floats of 4 to 8 bits under a scale for every 32 elements (MX), or 16 (NVFP4)."""

    label: ClassVar[str] = "MX"
    cost: ClassVar[str] = "packed codes + 1 a block (NVFP4: + 4)"
    use: ClassVar[str] = (
        "When the hardware reads these formats, or outliers spoil a range of whole numbers."
    )
    codes_values: ClassVar[bool] = True
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

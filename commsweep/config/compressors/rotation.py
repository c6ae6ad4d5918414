"""Codes behind a random rotation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import Bits, CodeSpec, Compression, RotationBlock
from commsweep.config.compressors.values import ValueSpec
from commsweep.config.compressors.values.quantize import UniformSpec


class EdenSpec(CodeSpec):
    """Levels of a normal distribution behind a random rotation, scaled to be without bias (EDEN;
    one bit is DRIVE).
    """

    label: ClassVar[str] = "EDEN"
    cost: ClassVar[str] = "packed codes + 4 a block + 8"
    use: ClassVar[str] = (
        "For gradients in 1 to 4 bits: without bias, at a smaller error than drawn rounding."
    )
    draws: ClassVar[bool] = True
    kind: Literal["eden"] = "eden"
    bits: Bits = 2
    block: RotationBlock = 128


class MSEdenSpec(Compression):
    """NVFP4 behind a random rotation, its scales corrected to be without bias (MS-EDEN)."""

    label: ClassVar[str] = "MS-EDEN"
    cost: ClassVar[str] = "4 bits a value + 1 a block of 16 + 12"
    use: ClassVar[str] = "As `eden`, when the receiver computes in NVFP4."
    draws: ClassVar[bool] = True
    kind: Literal["ms_eden"] = "ms_eden"
    block: RotationBlock = 128


class RotatedSpec(Compression):
    """A code of the message behind a random rotation, which spreads outliers over a block."""

    label: ClassVar[str] = "rotated"
    cost: ClassVar[str] = "those of the code + 8"
    use: ClassVar[str] = "When outliers spoil a scale: activations at 2 or 3 bits."
    draws: ClassVar[bool] = True
    kind: Literal["rotated"] = "rotated"
    block: RotationBlock = 128
    code: Annotated[
        ValueSpec, Field(discriminator="kind", description="how the rotated message travels")
    ] = UniformSpec()

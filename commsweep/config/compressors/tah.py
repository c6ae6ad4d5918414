"""Tiles of high and low bits, and a code for each tile."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import Bits, Compression


class TAHSpec(Compression):
    """Tiles with a scale each, outlier tiles rotated, and more bits for the tokens that carry more
    (TAH-Quant).
    """

    label: ClassVar[str] = "TAH"
    cost: ClassVar[str] = "packed codes + 2 a tile + flags"
    use: ClassVar[str] = "To compare with TAH-Quant as published."
    exchanged: ClassVar[bool] = False
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
    exchanged: ClassVar[bool] = False
    kind: Literal["tah_code"] = "tah_code"
    tile: Annotated[
        Literal[8, 16, 32, 64, 128], Field(description="the authors: 64 forward, 32 backward")
    ] = 64
    high_bits: Annotated[Bits, Field(description="the authors: 4 forward, 6 backward")] = 4
    low_bits: Bits = 3
    high_share: Annotated[
        float, Field(ge=0, le=1, description="share of the tokens that get the high bits")
    ] = 0.8

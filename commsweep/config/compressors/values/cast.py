"""A 16-bit floating-point type."""

from __future__ import annotations

from typing import ClassVar, Literal

from commsweep.config.compressors.base import Compression


class CastSpec(Compression):
    """Send the values in a 16-bit floating-point type."""

    cost: ClassVar[str] = "2 x elements"
    use: ClassVar[str] = "When half the bytes are enough and nothing may be tuned."
    codes_values: ClassVar[bool] = True
    kind: Literal["cast"] = "cast"
    to: Literal["float16", "bfloat16"] = "bfloat16"

    @property
    def entry_type(self) -> str:
        return self.to

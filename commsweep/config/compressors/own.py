"""A compressor of one's own."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from commsweep.config import own
from commsweep.config.compressors.base import Compression

Option = bool | int | float | str


class OwnCodeSpec(Compression):
    """Send what the class that `code` names encodes ("mine.py:RowSigns"), made with `options`.

    Its `encode(x, seed)` returns a dict of tensors, exactly what travels; `decode(parts, like)`
    returns a tensor of like's shape and type. The Run is known by a hash of the class's file.
    """

    label: ClassVar[str] = "own"
    cost: ClassVar[str] = "the tensors that `encode` returns"
    use: ClassVar[str] = "To try a compressor without a change of the library."
    draws: ClassVar[bool] = True
    example: ClassVar[dict[str, Any]] = {"code": "commsweep.template.codec:RowSigns"}
    kind: Literal["own"] = "own"
    code: str = Field("", description="module:class or file.py:class")
    source: str = Field("", description="hash of that file; filled in")
    options: dict[str, Option] = Field({}, description="arguments of the class, by name")

    @model_validator(mode="after")
    def _is_known(self) -> OwnCodeSpec:
        own.fill_in(self, "code", self.code)
        return self

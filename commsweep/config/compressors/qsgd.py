"""Levels of a norm, Elias-coded."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import Compression


class QSGDSpec(Compression):
    """`levels` levels of a norm over `bucket` elements, drawn without bias, Elias-coded (QSGD)."""

    label: ClassVar[str] = "QSGD"
    cost: ClassVar[str] = "by the data: Elias codes + 4 a bucket"
    use: ClassVar[str] = (
        "For unbiased gradients whose levels are mostly zero: Elias codes then pay."
    )
    draws: ClassVar[bool] = True
    kind: Literal["qsgd"] = "qsgd"
    levels: Annotated[int, Field(ge=1, le=2**15)] = 4
    bucket: Annotated[int, Field(ge=1, le=2**20, description="elements that share a norm")] = 512
    norm: Literal["l2", "max"] = "l2"
    coding: Literal["elias", "fixed"] = "elias"

"""Factors of a message."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import Compression, Rank


class LowRankSpec(Compression):
    """A rank-`rank` product found by one power iteration, begun from the last message's factor when
    `warm`.
    """

    label: ClassVar[str] = "low rank"
    cost: ClassVar[str] = "(positions + features) x rank values"
    use: ClassVar[str] = (
        "For messages whose features are dependent; look at the error first (`--diagnose`)."
    )
    exchanged: ClassVar[bool] = False
    draws: ClassVar[bool] = True
    kind: Literal["lowrank"] = "lowrank"
    rank: Rank = 4
    warm: bool = True


class PowerSGDSpec(Compression):
    """Rank-`rank` product of the mean gradient by one power iteration that begins from the last one
    (PowerSGD).
    """

    label: ClassVar[str] = "PowerSGD"
    cost: ClassVar[str] = "4 x rank x (rows + columns)"
    summable: ClassVar[bool] = True
    joint: ClassVar[bool] = True
    use: ClassVar[str] = "For gradients of large matrices, when messages must add up on the way."
    crosses: ClassVar[bool] = False
    kind: Literal["powersgd"] = "powersgd"
    rank: Rank = 2


class DionFactorsSpec(Compression):
    """Both factors of the mean momentum's orthonormal step, of rank `fraction` of its shorter side
    (Dion).
    """

    label: ClassVar[str] = "Dion"
    cost: ClassVar[str] = "4 x rank x (rows + columns)"
    summable: ClassVar[bool] = True
    joint: ClassVar[bool] = True
    use: ClassVar[str] = "When the optimizer is to be orthonormal (Muon's step) at a rank's bytes."
    crosses: ClassVar[bool] = False
    kind: Literal["dion"] = "dion"
    rows: Annotated[
        Literal["outputs", "memory"],
        Field(
            description=(
                "of a matrix: the layer's outputs; or as it lies in memory, in transformers' "
                "Conv1D its inputs"
            )
        ),
    ] = "outputs"
    fraction: Annotated[
        float, Field(gt=0, le=1, description="of a matrix's shorter side: the rank")
    ] = 0.25

"""Codes that are part of the model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from commsweep.config.base import settle
from commsweep.config.compressors.base import Compression, Width


class BottleneckSpec(Compression):
    """Forward only: a linear encoder to `width` features and a decoder, both trained with the
    model.
    """

    cost: ClassVar[str] = "code"
    coder: ClassVar[bool] = True
    use: ClassVar[str] = "When the model may be trained with a narrower crossing from the start."
    exchanged: ClassVar[bool] = False
    kind: Literal["bottleneck"] = "bottleneck"
    width: Width = 16


class SubspaceSpec(Compression):
    """Forward only: the coordinates of (activation - embedding) in a fixed random subspace of
    `width` dimensions.

    `constrain` keeps what the blocks before the last boundary add inside the subspace, so that
    nothing is lost. With `frozen` the embedding is that of the start, of which every stage has a
    copy, and a token's number goes along as one more feature; so it can be executed as processes.
    Embeddings then move inside the subspace only, if constrained.
    """

    cost: ClassVar[str] = "code"
    coder: ClassVar[bool] = True
    use: ClassVar[str] = "As `bottleneck`, with nothing to train and gradients of the same width."
    exchanged: ClassVar[bool] = False
    kind: Literal["subspace"] = "subspace"
    width: Width = 16
    constrain: bool = True
    frozen: Annotated[
        bool | None,
        Field(description="measure from the first embeddings; absent: from those of now"),
    ] = None

    @model_validator(mode="after")
    def _absent_if_not(self) -> SubspaceSpec:
        if self.frozen is False:
            settle(self, "frozen", None)  # one way to say it, one id
        return self

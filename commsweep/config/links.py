"""One direction of a boundary's compression, and both."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from commsweep.config.base import Spec
from commsweep.config.compressors import CompressorSpec, NoCompressor
from commsweep.config.feedback import FeedbackSpec, NoFeedback


class Link(Spec):
    """One direction of a boundary: how its messages are compressed, remembered, and from which
    epoch on.
    """

    compressor: CompressorSpec = NoCompressor()
    feedback: FeedbackSpec = NoFeedback()
    start_epoch: Annotated[
        int, Field(ge=0, description="first compressed epoch; earlier ones travel dense")
    ] = 0


class Links(Spec):
    """Both directions of one boundary."""

    fwd: Link = Link()
    bwd: Link = Link()

"""The compression of one direction of a boundary, and of both."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from commsweep.config.base import Spec
from commsweep.config.compressors import CompressorSpec
from commsweep.config.compressors.dense import NoCompressorSpec
from commsweep.config.feedback import FeedbackSpec, NoFeedbackSpec


class Link(Spec):
    """The compression of one direction of a boundary: how its messages are compressed, remembered,
    and from which epoch on.
    """

    compressor: CompressorSpec = NoCompressorSpec()
    feedback: FeedbackSpec = NoFeedbackSpec()
    start_epoch: Annotated[
        int, Field(ge=0, description="first compressed epoch; earlier ones travel dense")
    ] = 0


class Links(Spec):
    """Both directions of one boundary."""

    fwd: Link = Link()
    bwd: Link = Link()

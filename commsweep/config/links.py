"""The compression of one direction of a boundary, and of both."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from commsweep.config.base import Spec
from commsweep.config.compressors import CompressorSpec
from commsweep.config.compressors.dense import NoCompressorSpec
from commsweep.config.compressors.spelling import codec, in_words
from commsweep.config.feedback import FeedbackSpec, NoFeedbackSpec


class Link(Spec):
    """The compression of one direction of a boundary: how its messages are compressed, remembered,
    and from which epoch on. A codec in one word, "ef+topk:0.1", is compressor and feedback.
    """

    compressor: CompressorSpec = NoCompressorSpec()
    feedback: FeedbackSpec = NoFeedbackSpec()
    start_epoch: Annotated[
        int, Field(ge=0, description="first compressed epoch; earlier ones travel dense")
    ] = 0
    start_step: Annotated[
        int | None,
        Field(
            ge=1,
            description="optimizer steps that travel dense before the first compressed one; "
            "absent: none",
        ),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _word_is_a_codec(cls, values: Any) -> Any:
        return codec(values) if isinstance(values, str) else values

    @property
    def word(self) -> str:
        """The codec in one word."""
        return in_words(self.compressor, self.feedback)


class Links(Spec):
    """Both directions of one boundary."""

    fwd: Link = Link()
    bwd: Link = Link()

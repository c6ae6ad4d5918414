"""The controls, which stand in for a message: nothing, or a running mean."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import Compression


class ZeroSpec(Compression):
    """Send nothing: zeros arrive. The floor beside which a compressor is judged."""

    label: ClassVar[str] = "nothing"
    cost: ClassVar[str] = "0"
    summable: ClassVar[bool] = True
    use: ClassVar[str] = "As the control: what training reaches without the message."
    control: ClassVar[bool] = True
    blind: ClassVar[bool] = True
    kind: Literal["zero"] = "zero"


class MeanSpec(Compression):
    """Send one number a feature: its running mean over messages, which arrives at all positions.

    After n messages the newest one weighs 1 / n, and at least `rate`. Features are an image's
    channels, a weight's output channels (convolutions), else the last axis.
    """

    label: ClassVar[str] = "mean"
    cost: ClassVar[str] = "4 a feature"
    use: ClassVar[str] = "As the control: what the average says without the message."
    control: ClassVar[bool] = True
    kind: Literal["mean"] = "mean"
    rate: Annotated[
        float, Field(gt=0, le=1, description="least weight of the newest message in the mean")
    ] = 0.1

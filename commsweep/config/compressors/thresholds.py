"""Kept entries above a threshold, or in their turn."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.compressors.base import Ratio
from commsweep.config.compressors.sparse import Chosen


class ThresholdSpec(Chosen):
    """Keep the entries whose size exceeds `value`."""

    cost: ClassVar[str] = "as `topk`, by what is left"
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = "When a size is known below which nothing matters."
    kind: Literal["threshold"] = "threshold"
    value: Annotated[float, Field(ge=0)] = 0.01


class PeriodicSpec(Chosen):
    """The entries above a threshold that leaves the top `ratio`, looked for anew every `every`
    messages (DCT).

    Each learner has its own for each layer; how many entries stay in between depends on the data.
    """

    label: ClassVar[str] = "periodic threshold"
    cost: ClassVar[str] = "as `topk`, by what is left"
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = "As `topk` for large layers, when choosing takes too long."
    crosses: ClassVar[bool] = False
    kind: Literal["periodic"] = "periodic"
    ratio: Ratio = 0.01
    every: Annotated[
        int, Field(ge=1, description="messages of a layer between two looks for the threshold")
    ] = 1000


class DrydenSpec(Chosen):
    """Keep the top `ratio` of the positive and of the negative entries, each as its group's
    mean.
    """

    label: ClassVar[str] = "Dryden"
    cost: ClassVar[str] = "1 bit a value, places, two means"
    own_places: ClassVar[bool] = True
    value_bits: ClassVar[int] = 1
    use: ClassVar[str] = (
        "For gradients with feedback, when values may be shared by all kept entries."
    )
    kind: Literal["dryden"] = "dryden"
    ratio: Ratio = 0.01


class SIDCoSpec(Chosen):
    """Keep about `ratio`: a threshold from a distribution fitted to the sizes, in `stages` stages
    (SIDCo).
    """

    label: ClassVar[str] = "SIDCo"
    cost: ClassVar[str] = "as `topk`, by what is left"
    own_places: ClassVar[bool] = True
    use: ClassVar[str] = "As `topk` for large layers, when about `ratio` is enough."
    kind: Literal["sidco"] = "sidco"
    ratio: Ratio = 0.01
    fit: Literal["exponential", "gpareto"] = "exponential"
    stages: Annotated[int, Field(ge=1, le=8)] = 2

"""Fixed-point codes with a batch's range."""

from __future__ import annotations

from typing import ClassVar, Literal

from commsweep.config.compressors.base import Bits, Compression


class FixedBatchSpec(Compression):
    """The authors' fixed point (from AC-SGD): one float16 absmax per feature, over the batch,
    rounded before use.
    """

    label: ClassVar[str] = "batch fixed-point"
    cost: ClassVar[str] = "packed codes + 2 a feature"
    use: ClassVar[str] = "To repeat AC-SGD's numbers; elsewhere `fixed`."
    exchanged: ClassVar[bool] = False
    kind: Literal["fixed_batch"] = "fixed_batch"
    bits: Bits = 4

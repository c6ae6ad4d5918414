"""Messages as they are."""

from __future__ import annotations

from typing import ClassVar, Literal

from commsweep.config.compressors.base import Compression


class NoCompressorSpec(Compression):
    """The dense message: every value as it is."""

    label: ClassVar[str] = "dense"
    cost: ClassVar[str] = "elements x itemsize"
    summable: ClassVar[bool] = True
    use: ClassVar[str] = "As the reference, and for vectors, which are small."
    kind: Literal["none"] = "none"


class LiveSpec(Compression):
    """Send the weights' gradients that masks leave (a Run with sparsity), as they are; the others
    all learners know.
    """

    label: ClassVar[str] = "live"
    cost: ClassVar[str] = "itemsize x live elements"
    summable: ClassVar[bool] = True
    use: ClassVar[str] = "With `sparsity`: a learner's other gradients are known to be zero."
    crosses: ClassVar[bool] = False
    kind: Literal["live"] = "live"

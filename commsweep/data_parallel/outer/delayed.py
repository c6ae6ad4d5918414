"""Delayed averaging (DaSGD, arXiv 2006.00441): while a fragment travels, a learner goes on; what it
did in the meantime is added to the common weights: theta <- ref + (theta - sent).
"""

from __future__ import annotations

from torch import Tensor

from commsweep.data_parallel.outer.roles import UPDATES, TakeCommon


@UPDATES.when(lambda outer: outer.local_update == "add")
class AddMeanwhile(TakeCommon):
    """The addition of a learner's steps since it sent to the common weights."""

    keeps_sent = True

    def apply(self, weights: Tensor, common: Tensor, arrived: Tensor, sent: Tensor) -> None:
        if sent.numel():
            weights.add_(common - sent)
        else:
            weights.copy_(common)

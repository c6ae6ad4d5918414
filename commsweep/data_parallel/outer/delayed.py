"""Delayed averaging (DaSGD, arXiv 2006.00441): while a fragment travels, a learner goes on; what it
did in the meantime is added to the common weights: theta <- ref + (theta - sent).
"""

from __future__ import annotations

from torch import Tensor

from commsweep.data_parallel.outer.diloco import TakeCommon


class AddMeanwhile(TakeCommon):
    """A learner's steps since it sent are added to the common weights."""

    keeps_sent = True

    def apply(self, own: Tensor, common: Tensor, arrived: Tensor, sent: Tensor) -> None:
        if sent.numel():
            own.add_(common - sent)
        else:
            own.copy_(common)

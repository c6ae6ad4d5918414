"""SPARTA: a small random part of the weights is averaged every step; the others stay as each
learner has them. With rate 1, no momentum and `randomk`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.data_parallel.outer.roles import UPDATES, TakeCommon


@UPDATES.when(lambda outer: outer.local_update == "sent")
class TakeSent(TakeCommon):
    """The common weights at places that were sent; the learner's elsewhere."""

    weights_differ = True

    def apply(self, weights: Tensor, common: Tensor, arrived: Tensor, sent: Tensor) -> None:
        weights.copy_(torch.where(arrived != 0, common, weights))

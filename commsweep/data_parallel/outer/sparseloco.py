"""SparseLoCo (arXiv 2508.15706): pseudo-gradients of a few percent of the places, coded in two
bits.

Its code divides the sum at a place by the number of learners that sent it, its paper by all; and a
message for a layer that is longer than the median over learners is scaled to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commsweep.data_parallel.exchange import Merge
from commsweep.data_parallel.outer.roles import MERGES


@MERGES.when(lambda outer: outer.clip)
class Clip(Merge):
    """The scaling of messages longer than the median norm to that norm."""

    def messages(self, arrived: list[Tensor]) -> list[Tensor]:
        norms = torch.stack([torch.linalg.vector_norm(y) for y in arrived])
        middle = slice((len(arrived) - 1) // 2, len(arrived) // 2 + 1)
        median = norms.sort().values[middle].mean()
        factors = [(median / norm.clamp(min=1e-30)).clamp(max=1.0) for norm in norms]
        return [y * factor for y, factor in zip(arrived, factors, strict=True)]


@MERGES.when(lambda outer: outer.aggregate == "senders")
class MeanOverSenders(Merge):
    """The mean over those that sent something, place by place, instead of all learners."""

    def mean(self, mean: Tensor, arrived: list[Tensor]) -> Tensor:
        senders: Any = sum((y != 0).to(y.dtype) for y in arrived)
        return mean * len(arrived) / senders.clamp(min=1)

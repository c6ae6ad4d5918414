"""SparseLoCo (arXiv 2508.15706): pseudo-gradients of a few percent of the places, coded in two
bits.

Its code divides the sum at a place by the number of learners that sent it, its paper by all; and a
message for a layer that is longer than the median over learners is scaled to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def over_senders(mean: Tensor, arrived: list[Tensor]) -> Tensor:
    """The mean over all learners as the mean over those that sent something, place by place."""
    senders: Any = sum((y != 0).to(y.dtype) for y in arrived)
    return mean * len(arrived) / senders.clamp(min=1)


def clipped(arrived: list[Tensor]) -> list[Tensor]:
    """Messages for a layer, those longer than the median norm scaled to it."""
    norms = torch.stack([torch.linalg.vector_norm(y) for y in arrived])
    middle = slice((len(arrived) - 1) // 2, len(arrived) // 2 + 1)
    median = norms.sort().values[middle].mean()
    factors = [(median / norm.clamp(min=1e-30)).clamp(max=1.0) for norm in norms]
    return [y * factor for y, factor in zip(arrived, factors, strict=True)]

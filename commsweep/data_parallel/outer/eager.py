"""Eager updates (arXiv 2502.12996): a learner uses its own pseudo-gradient at once, and those of
the others an exchange later, when they have had a whole interval to travel.

D_m(t) = d_m(t) / M + (mean_j y_j(t-1) - d_m(t-1) / M), with d_m the pseudo-gradient and y_m what
arrives of it: in the end a learner's share of everything is y / M. After the last exchange nothing
is left for later: D_m = mean_j y_j(t) + (mean_j y_j(t-1) - d_m(t-1) / M).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commsweep.data_parallel.exchange import Exchange
from commsweep.data_parallel.outer.roles import PEERS, Arrival, Everybody, Fragment, Layers


@PEERS.when(lambda outer: outer.eager)
class Eager(Everybody):
    """The exchange among all learners, whose result is used when the next one begins."""

    separate = True
    remembered = remembered_each = 1  # of the last exchange: its mean, and each learner's share

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        # by fragment: what waits for the mean, or the mean; each learner's share
        self.pending: dict[int, tuple[Any, list[Layers]]] = {}

    def send(self, fragment: Fragment) -> Arrival:
        # What was remembered of the last exchange is settled before the next one goes on from it.
        before = self.late(fragment.number)
        arrival = self.begin(fragment)
        if fragment.last:
            return lambda: merged([arrival()] * len(fragment.moved), before)
        shares = [self._share(tensors, fragment.layers) for tensors in fragment.moved]
        self.pending[fragment.number] = arrival, shares
        return lambda: merged(shares, before)

    def _share(self, tensors: list[Tensor | None], layers: list[int]) -> Layers:
        share = {}
        for index in layers:
            tensor = tensors[index]
            assert tensor is not None, "a fragment's layers have moved"
            share[index] = tensor / self.exchange.spec.learners
        return share

    def late(self, number: int) -> tuple[Layers, list[Layers]] | None:
        pending = self.pending.pop(number, None)
        if pending is None:
            return None
        mean, shares = pending
        return mean if isinstance(mean, dict) else mean(), shares

    def state(self) -> dict[int, Any]:
        for number in tuple(self.pending):
            late = self.late(number)
            assert late is not None
            self.pending[number] = late
        return dict(self.pending)

    def load(self, state: dict[int, Any], device: torch.device) -> None:
        for number, (mean, shares) in state.items():
            first, *later = (
                {index: tensor.to(device) for index, tensor in tensors.items()}
                for tensors in (mean, *shares)
            )
            self.pending[number] = first, later


def merged(shares: list[Layers], before: tuple[Layers, list[Layers]] | None) -> list[Layers]:
    """Return D of each learner here.

    shares: what each uses at once. before: the mean that arrived of the last exchange, and what
    each used of it at once.
    """
    result = [dict(layers) for layers in shares]
    if before is not None:
        mean, used = before
        for layers, early in zip(result, used, strict=True):
            for index in layers:
                layers[index] = layers[index] + (mean[index] - early[index])
    return result

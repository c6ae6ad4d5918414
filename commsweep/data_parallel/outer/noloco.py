"""NoLoCo (arXiv 2506.10911): nobody waits for all. Each learner has common weights ref and an outer
momentum of its own, and exchanges both ref and pseudo-gradient with one drawn partner: D = mean of
both pseudo-gradients, plus ref - mean of both refs. Here without Nesterov.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep import seeds
from commsweep.collectives import mean
from commsweep.data_parallel.exchange import WHAT, Exchange
from commsweep.data_parallel.outer.roles import PEERS, Arrival, Everybody, Fragment, Layers


def pairs(learners: int, seed: int) -> list[int]:
    """Return every learner's partner, drawn; an even number of them."""
    order = torch.randperm(learners, generator=torch.Generator().manual_seed(seed)).tolist()
    partner = dict(zip(order[::2], order[1::2], strict=True))
    partner |= {b: a for a, b in partner.items()}
    return [partner[learner] for learner in range(learners)]


@PEERS.when(lambda outer: outer.peers == "pairs")
class Pairs(Everybody):
    """The exchange of weights and pseudo-gradients in drawn pairs."""

    separate = True

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        exchange.ledger.direct = True

    def send(self, fragment: Fragment) -> Arrival:
        exchange, layers = self.exchange, fragment.layers
        draw = seeds.draw(seeds.PAIRS, exchange.seed, fragment.moment.step)
        partners = pairs(exchange.spec.learners, draw)
        messages: list[list[Tensor]] = []
        for tensors, reference in zip(fragment.moved, fragment.references, strict=True):
            slow = [reference[index].data.clone() for index in layers]
            fast = [tensor for tensor in tensors if tensor is not None]
            messages.append(slow + fast)
        under_way = exchange.collectives.swap(messages, partners, WHAT)
        for index in layers:
            exchange.ledger.dense(index, 2 * len(messages))

        def arrived() -> list[Layers]:
            results = []
            received = under_way.wait()
            for learner, mine, theirs in zip(
                exchange.collectives.here, messages, received, strict=True
            ):
                # sums depend on their order
                both = (mine, theirs) if learner < partners[learner] else (theirs, mine)
                results.append(_step(mine, [mean(list(pair)) for pair in zip(*both, strict=True)]))
            return results

        def _step(mine: list[Tensor], common: list[Tensor]) -> Layers:
            return {
                index: common[len(layers) + at] + (mine[at] - common[at])
                for at, index in enumerate(layers)
            }

        return arrived

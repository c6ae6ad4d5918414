"""NoLoCo (arXiv 2506.10911): nobody waits for all. Each learner has common weights ref and an outer
momentum of its own, and exchanges both ref and pseudo-gradient with one drawn partner: D = mean of
both pseudo-gradients, plus ref - mean of both refs. Here without Nesterov.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from commsweep import seeds
from commsweep.collectives import mean
from commsweep.data_parallel.exchange import WHAT, Exchange


def pairs(learners: int, seed: int) -> list[int]:
    """Every learner's partner, drawn; an even number of them."""
    order = torch.randperm(learners, generator=torch.Generator().manual_seed(seed)).tolist()
    partner = dict(zip(order[::2], order[1::2], strict=True))
    partner |= {b: a for a, b in partner.items()}
    return [partner[learner] for learner in range(learners)]


def exchange_with_partner(
    exchange: Exchange,
    among: Sequence[int],
    references: list[list[Tensor]],
    moved: list[list[Tensor]],
    step: int,
) -> Callable[[], list[dict[int, Tensor]]]:
    """Send ref and pseudo-gradient, [learner here][turn] of the layers `among`, to the partner of
    this step. What is waited for: D of each learner here, by layer.
    """
    here = exchange.collectives.here
    partners = pairs(exchange.spec.learners, seeds.draw(seeds.PAIRS, exchange.seed, step))
    told = [refs + steps for refs, steps in zip(references, moved, strict=True)]
    under_way = exchange.collectives.swap(told, partners, WHAT)
    for index in among:
        exchange.ledger.dense(index, 2 * len(here))

    def arrived() -> list[dict[int, Tensor]]:
        every = []
        for learner, mine, theirs in zip(here, told, under_way.wait(), strict=True):
            # sums depend on their order
            both = (mine, theirs) if learner < partners[learner] else (theirs, mine)
            common = [mean(list(pair)) for pair in zip(*both, strict=True)]
            every.append(
                {
                    index: common[len(among) + place] + (mine[place] - common[place])
                    for place, index in enumerate(among)
                }
            )
        return every

    return arrived

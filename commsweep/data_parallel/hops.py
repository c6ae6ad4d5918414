"""Sums of gradients that are rounded on the way: a ring, a tree, or all-to-all, in codes.

Every learner divides its gradient by the number of learners n first, so that no partial sum is
larger than a gradient. Layers are cut into n equal parts, padded with zeros, where a learner owns
one.

    ring      n - 1 hops: a part goes round, and each learner adds its own to what it decodes and
              encodes the sum again (requantization); the last one's code goes to all
    tree      the same up a binomial tree, with whole layers in log2 n hops; the root's code goes
              to all
    alltoall  every learner sends the owner of each part its code; owners add in float32, and the
              code of the sum goes to all: two roundings, whatever n is (ZeRO++, arXiv 2306.10209)

The code of a final sum reaches all learners unchanged, so that they stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commsweep.collectives import Collectives, Message, sliced, summed
from commsweep.compressors import Compressor, message

WHAT = "gradients"
EXACT, RING, TREE, ALL_TO_ALL = "exact", "ring", "tree", "alltoall"

# The seed of a message: of a layer, by the learner that encodes it and the number of its hop.
Draw = Callable[[int, int, int], int]


@dataclass
class Summed:
    """The mean of the learners' gradients, a layer each, and what the learners here have sent: of
    each layer by hop, one message after the other, in n-ths of a byte for n learners (of a tree
    every learner counts the mean, which is no whole number of bytes).
    """

    means: list[Tensor]
    sent: list[list[int | Tensor]] = field(default_factory=list)


class Hops:
    """Sums some layers over all learners, hop by hop."""

    def __init__(
        self,
        collectives: Collectives,
        codes: Sequence[Compressor],
        draw: Draw,
        address: message.Address,
    ) -> None:
        """codes: of each layer. draw: the seed of a message by layer, learner and hop."""
        self.collectives, self.codes, self.draw, self.address = collectives, codes, draw, address
        self.hop = 0
        self.sent: list[list[int | Tensor]] = [[] for _ in codes]

    def reduce(self, collective: str, grads: list[list[Tensor]]) -> Summed:
        """Return the mean of the gradients [learner here][layer], as all learners have it."""
        n = self.collectives.learners
        reducer = {RING: self._ring, TREE: self._tree, ALL_TO_ALL: self._all_to_all}[collective]
        shares = [[grad / n for grad in tensors] for tensors in grads]
        means = reducer(shares)
        shapes = [grad.shape for grad in grads[0]]
        back = [
            mean.reshape(-1)[: s.numel()].view(s) for mean, s in zip(means, shapes, strict=True)
        ]
        return Summed(back, self.sent)

    def _ring(self, shares: list[list[Tensor]]) -> list[Tensor]:
        n, learners_here = self.collectives.learners, self.collectives.here
        layer_parts = [[sliced(x, n) for x in row] for row in shares]
        sums = [
            [cut[learner] for cut in row]
            for learner, row in zip(learners_here, layer_parts, strict=True)
        ]
        following = [[(learner + 1) % n] for learner in range(n)]
        for hop in range(n - 1):
            arrived = self._pass_on(sums, following, n)
            sums = []
            for learner, row, came in zip(learners_here, layer_parts, arrived, strict=True):
                at = (learner - 1 - hop) % n
                sums.append([y + cut[at] for y, cut in zip(came, row, strict=True)])
        # learner k ends with the sum of part k + 1
        rows = self._to_all(sums)
        ordered = [rows[(index - 1) % n] for index in range(n)]
        return [torch.stack(list(column)) for column in zip(*ordered, strict=True)]

    def _all_to_all(self, shares: list[list[Tensor]]) -> list[Tensor]:
        n, learners_here = self.collectives.learners, self.collectives.here
        outboxes: list[dict[int, list[Message]]] = []
        for learner, row in zip(learners_here, shares, strict=True):
            layer_parts = [sliced(x, n) for x in row]
            outboxes.append(
                {to: self._messages(learner, [cut[to] for cut in layer_parts]) for to in range(n)}
            )
        arrived = self.collectives.scatter(outboxes, self.address, WHAT).wait()
        self.hop += 1
        for learner, outbox in zip(learners_here, outboxes, strict=True):
            for to, messages in outbox.items():
                if to != learner:
                    self._count(messages, n)
        rows = self._to_all(
            [[summed(column) for column in zip(*rows, strict=True)] for rows in arrived]
        )
        return [torch.stack(list(column)) for column in zip(*rows, strict=True)]

    def _tree(self, shares: list[list[Tensor]]) -> list[Tensor]:
        # Each learner sends one message, all of one length; n - 1 travel up and n - 1 down. So each
        # counts 2 (n - 1) / n of its own.
        n, learners_here = self.collectives.learners, self.collectives.here
        sums, distance = [list(row) for row in shares], 1
        while distance < n:
            to: list[list[int]] = [[] for _ in range(n)]
            for learner in range(distance, n, 2 * distance):
                to[learner] = [learner - distance]
            arrived = self._pass_on(sums, to, 2 * (n - 1))
            for at, _ in enumerate(learners_here):
                if arrived[at]:
                    sums[at] = [v + y for v, y in zip(sums[at], arrived[at], strict=True)]
            distance *= 2
        return self._from_root(sums)

    # Messages.

    def _messages(self, learner: int, tensors: Sequence[Tensor]) -> list[Message]:
        return [
            Message(code, x, self.draw(at, learner, self.hop))
            for at, (code, x) in enumerate(zip(self.codes, tensors, strict=True))
        ]

    def _pass_on(
        self, tensors: list[list[Tensor]], to: Sequence[Sequence[int]], times: int
    ) -> list[list[Tensor]]:
        """Send the tensors of each learner to some others or none; what arrives at the learners
        here. times: what a message counts, in n-ths of it.
        """
        learners_here = self.collectives.here
        outboxes = [self._messages(k, row) for k, row in zip(learners_here, tensors, strict=True)]
        arrived = self.collectives.pass_on(outboxes, to, self.address, WHAT).wait()
        self.hop += 1
        for learner, messages in zip(learners_here, outboxes, strict=True):
            if to[learner]:
                self._count(messages, times)
        return arrived

    def _to_all(self, tensors: list[list[Tensor]]) -> list[list[Tensor]]:
        """Send the tensors of every learner to all; what arrives, [learner][layer]."""
        learners_here, receivers = self.collectives.here, self.collectives.learners - 1
        messages = [self._messages(k, row) for k, row in zip(learners_here, tensors, strict=True)]
        arrived = self.collectives.share(messages, self.address, WHAT, even=True).wait()
        self.hop += 1
        for row in messages:
            self._count(row, receivers * self.collectives.learners)
        return arrived

    def _from_root(self, tensors: list[list[Tensor]]) -> list[Tensor]:
        """Send the first learner's tensors to all."""
        learners_here, n = self.collectives.here, self.collectives.learners
        messages = [self._messages(k, row) for k, row in zip(learners_here, tensors, strict=True)]
        to = [list(range(1, n)), *([] for _ in range(1, n))]
        received = self.collectives.pass_on(messages, to, self.address, WHAT).wait()
        self.hop += 1
        arrived = next((row for row in received if row), None)
        if arrived is None:  # at the root
            arrived = [sent.arrive() for sent in messages[0]]
        if 0 in learners_here:
            self._count(messages[0], 2 * (n - 1))
        return arrived

    def _count(self, messages: list[Message], times: int) -> None:
        """Count messages, `times` n-ths of each."""
        for row, sent in zip(self.sent, messages, strict=True):
            row.append(sent.nbytes * times)

"""A batch shared out among learners within one process; one learner without compression is plain training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from commsweep.experiments.data_parallel import feedback
from commsweep.experiments.data_parallel.exchange import Exchange
from commsweep.experiments.errors import UserError
from commsweep.experiments.specs import Gradients, NoCompressor


@dataclass(frozen=True)
class Share:
    """The rows of a batch that a learner works on in one pass."""

    learner: int
    rows: slice
    size: int
    weight: float  # the learner's share of the batch, times n
    settles: bool  # whether it is the learner's last pass before the exchange
    last: bool  # whether Lightning makes its backward
    turn: int = 0  # place among all passes of the batch, those of learners in other processes included
    slot: int = 0  # of its first row, in memories that have one a batch slot: a learner keeps its own


class Learners(nn.Module):
    """Shares out batches, and exchanges gradients once all learners have theirs.

    Each learner's pass uses its own batch statistics; of the running statistics the first learner's are kept, which
    is what DistributedDataParallel does (it broadcasts rank 0's buffers).
    """

    def __init__(self, spec: Gradients, model: nn.Module, seed: int, batch: int, rank: int | None = None) -> None:
        """batch: rows of a full batch. rank: the only learner of this process, when each has one of its own."""
        super().__init__()
        self.spec, self.rank, self.batch, self.turns = spec, rank, batch, 1
        alone = spec.learners == spec.local_steps == 1 and isinstance(spec.compressor, NoCompressor)
        self.exchange = None if alone else Exchange(spec, model, seed, rank)
        self._norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
        self._kept: list[Tensor] = []
        self.weight, self._begun = 1.0, False
        self.passes = 0  # that all learners should have made in all steps so far
        self.crossed = 0  # of these, in this process

    def shares(self, batch: int) -> list[Share]:
        """Contiguous equal shares; of a short last batch the first learners get one row more, or all there is."""
        n = self.spec.learners
        sizes = [batch // n + (learner < batch % n) for learner in range(n)]
        starts = [sum(sizes[:learner]) for learner in range(n)]
        busy = [learner for learner in range(n) if sizes[learner]]
        every = []
        for learner in busy:
            edges = [starts[learner] + sizes[learner] * step // self.spec.local_steps
                     for step in range(self.spec.local_steps + 1)]
            parts = [slice(a, b) for a, b in pairwise(edges) if b > a]
            first = learner * (self.batch // n) - starts[learner]
            every += [Share(learner, rows, rows.stop - rows.start, sizes[learner] * n / batch, rows is parts[-1],
                            rows is parts[-1] and learner == busy[-1], len(every) + turn, first + rows.start)
                      for turn, rows in enumerate(parts)]
        self.turns = len(every)
        if self.rank is None:
            return every
        if len(busy) < n:
            raise UserError(f"a batch of {batch} has no row for learner {self.rank} of {n}: set data.drop_last=true or "
                            "another data.batch_size")
        return [replace(every[self.rank], settles=True, last=True)]

    @contextmanager
    def turn(self, share: Share, rate: float = 0.0) -> Iterator[None]:
        """Within it a learner passes its share forward and, unless it is the last, backward; `rate` of local steps."""
        if share.last:
            self.weight = share.weight
        if share.learner == 0 and not self._begun and self.exchange is not None and self.rank is None:
            self._begun = True
            self.exchange.clear()  # the last step's mean; Lightning clears it only before the last learner's backward
        yield
        if self.exchange is None or self.rank is not None:
            return
        if share.learner == 0 and share.settles:
            self._kept = [buffer.clone() for buffer in self._statistics()]
        if not share.settles:
            self.exchange.step_locally(rate)
        elif not share.last:
            self.exchange.collect(share.weight)

    def exchange_gradients(self, step: int, epoch: int) -> None:
        """After the last learner's backward: its gradients join the others', and the mean takes their place."""
        if self.exchange is None:
            return
        if self.rank is not None:  # the hook of real.py has done it
            self.exchange.ledger.steps += 1
            return
        self.exchange.collect(self.weight)
        self._begun = False
        while len(self.exchange.collected) < self.spec.learners:  # the batch had fewer rows than there are learners
            self.exchange.collect(0.0)
        self.exchange.reduce(step, epoch)
        for buffer, kept in zip(self._statistics(), self._kept, strict=False):
            buffer.copy_(kept)

    def _statistics(self) -> list[Tensor]:
        """Running statistics as they are now: a module's buffers are other tensors once it has moved."""
        return [buffer for norm in self._norms for buffer in norm.buffers(recurse=False)]

    def epoch_ended(self, epoch: int) -> None:
        """Let schedules decide."""
        if self.exchange is not None:
            self.exchange.epoch_ended(epoch)

    @property
    def installed(self) -> Gradients:
        """The settings as installed."""
        return Gradients(exchange=self.spec.exchange) if self.exchange is None else self.exchange.installed

    def totals(self) -> dict[str, Any]:
        """Bytes of the exchange; empty without one."""
        return {} if self.exchange is None else self.exchange.ledger.totals()

    def evaluation(self) -> dict[str, Any]:
        """For the record of an evaluation: the layers' rates since the last one."""
        return {} if self.exchange is None else {"rates": self.exchange.ledger.rates()}

    def passed(self, shares: list[Share]) -> None:
        """A batch is done; these were its passes here."""
        self.crossed += len(shares)
        self.passes += len(shares) if self.rank is None else self.turns

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "crossed": self.crossed}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.passes, self.crossed = state["passes"], state["crossed"]


def memory_bytes(spec: Gradients, model: nn.Module) -> int:
    """Bytes of all learners' gradients and of what they remember; 0 for plain training."""
    if spec.learners == spec.local_steps == 1 and isinstance(spec.compressor, NoCompressor):
        return 0
    tensors = 1 + feedback.TENSORS[spec.feedback.kind]
    return spec.learners * tensors * sum(4 * p.numel() for p in model.parameters() if p.requires_grad)

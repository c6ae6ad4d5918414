"""A batch shared out among learners; one learner without compression is plain training."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from commsweep import seeds
from commsweep.collectives import Collectives
from commsweep.component import Component, Moment, Pass
from commsweep.config.compressors.dense import NoCompressorSpec
from commsweep.config.gradients import Gradients
from commsweep.data_parallel.exchange import Exchange
from commsweep.data_parallel.layers import Layer
from commsweep.errors import UserError


class Learners(Component):
    """Shares out batches, and exchanges gradients once all learners have theirs.

    Each learner's pass uses its own batch statistics; of the running statistics the first learner's
    are kept.
    """

    def __init__(
        self,
        spec: Gradients,
        model: nn.Module,
        seed: int,
        batch: int,
        collectives: Collectives | None = None,
        microbatches: int = 1,
        network_layers: dict[int, Layer] | None = None,
    ) -> None:
        """batch: rows of a full batch. collectives: between processes; None: all learners are here.
        microbatches: parts of a learner's rows that cross the boundaries one by one.
        network_layers: the layers of the network that the model is one stage of, by the identity of
        their parameters.
        """
        super().__init__()
        self.spec, self.batch, self.microbatches = spec, batch, microbatches
        self.exchange = (
            None
            if exchanges_nothing(spec)
            else Exchange(spec, model, seed, collectives, network_layers)
        )
        self.here = (0,) if self.exchange is None else self.exchange.collectives.here
        self._norms = [
            module
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        self._first: list[Tensor] = []  # running statistics as the first learner here left them

    def passes(self, batch: int) -> list[Pass]:
        """The passes of the learners here over contiguous equal shares; of a short last batch the
        first learners get one row more, or all there is. Raises UserError when a process would have
        nothing to do.
        """
        n, steps = self.spec.learners, self.spec.local_steps
        sizes = [batch // n + (learner < batch % n) for learner in range(n)]
        passes = []
        for learner in range(n):
            start = sum(sizes[:learner])
            edges = [start + sizes[learner] * step // steps for step in range(steps + 1)]
            slices = [slice(a, b) for a, b in pairwise(edges) if b > a]
            first = learner * (self.batch // n) - start
            for slice_ in slices:
                cuts = [
                    slice_.start + (slice_.stop - slice_.start) * cut // self.microbatches
                    for cut in range(self.microbatches + 1)
                ]
                passes += [
                    Pass(
                        slice(a, b),
                        b - a,
                        sizes[learner] * n / batch,
                        learner,
                        slice_ is slices[-1] and b == slice_.stop,
                        slot=first + a,
                        share=(b - a) / (slice_.stop - slice_.start),
                        whole=b == slice_.stop,
                        batch=batch,
                    )
                    for a, b in pairwise(cuts)
                    if b > a
                ]
        own_passes = [
            replace(pass_, turn=index, of=len(passes))
            for index, pass_ in enumerate(passes)
            if pass_.learner in self.here
        ]
        if not own_passes:
            raise UserError(
                f"a batch of {batch} has no row for learner {self.here[0]} of {n}: set "
                "data.drop_last=true or another data.batch_size"
            )
        return own_passes

    def before_pass(
        self, moment: Moment, pass_: Pass, samples: Tensor, device: torch.device
    ) -> None:
        if self.exchange is not None:  # dropout of a pass is the same whichever process it is in
            torch.manual_seed(
                seeds.draw(seeds.DROPOUT, self.exchange.seed, moment.passed + pass_.turn)
            )

    def after_pass(self, moment: Moment, pass_: Pass) -> None:
        if self.exchange is None or not pass_.whole:
            return
        if not pass_.settles:
            self.exchange.step_locally(moment.rate)
            return
        if pass_.learner == self.here[0]:
            self._first = [buffer.clone() for buffer in self._statistics()]
        self.exchange.collect(pass_.weight)

    def after_backward(self, moment: Moment) -> None:
        """All learners have their gradients: the mean of what arrives of them takes their place."""
        if self.exchange is None:
            return
        # the batch had fewer rows than there are learners
        while len(self.exchange.collected) < len(self.here):
            self.exchange.collect(0.0)
        # Statistics travel beside the gradients: begun after them they would cost latencies of
        # their own.
        first = (
            self.exchange.collectives.broadcast(lambda _: self._first, 0, "statistics")
            if self._first
            else None
        )
        self.reduce(moment)
        if first is not None:
            for buffer, common in zip(self._statistics(), first.wait(), strict=True):
                buffer.copy_(common)

    def reduce(self, moment: Moment) -> None:
        """Let the collected gradients become what the optimizer sees."""
        assert self.exchange is not None
        self.exchange.reduce(moment.step, moment.epoch)

    def _statistics(self) -> list[Tensor]:
        """Running statistics as they are now: a module's buffers are other tensors once it has
        moved.
        """
        return [buffer for norm in self._norms for buffer in norm.buffers(recurse=False)]

    def settle(self) -> None:
        """Leave the model with the weights that all learners share."""

    def epoch_ended(self, epoch: int) -> None:
        if self.exchange is not None:
            self.exchange.epoch_ended(epoch)

    def installed(self) -> dict[str, Gradients]:
        return {
            "grad": Gradients(exchange=self.spec.exchange)
            if self.exchange is None
            else self.exchange.installed
        }

    def totals(self) -> dict[str, Any]:
        """Bytes of the exchange; empty without one."""
        return {"gradients": {} if self.exchange is None else self.exchange.ledger.totals()}

    def sent_bytes(self) -> dict[str, float]:
        """Bytes that the learners here have sent up so far; nothing without an exchange."""
        if self.exchange is None:
            return {}
        return {"gradient_bytes": self.exchange.ledger.up_bytes}

    def evaluation(self) -> dict[str, Any]:
        """The layers' rates since the last evaluation."""
        return {} if self.exchange is None else {"rates": self.exchange.ledger.rates()}


def exchanges_nothing(spec: Gradients) -> bool:
    """Return whether one learner has nothing to exchange."""
    return (
        spec.learners == spec.local_steps == 1
        and isinstance(spec.compressor, NoCompressorSpec)
        and spec.outer is None
        and spec.sharded is None
    )

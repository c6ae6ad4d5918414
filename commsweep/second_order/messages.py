"""The learners' new factors on their way to each other: packed, compressed, fused, sent as soon as
they may be.

Whoever computes a factor hands it in; a message leaves when all its factors are there, between
processes while the passes still go on. Factors are known by their place: A and G of the first
layer, of the second, ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from commsweep import seeds
from commsweep.collectives import Collectives, Handle, Message, mean
from commsweep.compressors import build, message
from commsweep.config.execution import LearnerWiring
from commsweep.config.second_order import KFAC
from commsweep.feedback import gradient_memories as feedback
from commsweep.modules import Modules
from commsweep.second_order import fusion

WHAT = "factors"
PROFILED = 5  # exchanges whose times decide what is fused


class FactorMessages(nn.Module):
    """The factors of the learners here: offered, sent, and averaged on arrival."""

    def __init__(
        self,
        spec: KFAC,
        elements: list[int],
        seed: int,
        collectives: Collectives,
        wiring: LearnerWiring | None = None,
        cost: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        """elements: of every factor's triangle. cost: measures (alpha, beta) of a message, for
        pipelined fusion.
        """
        super().__init__()
        self.spec, self.elements, self.seed, self.collectives = spec, elements, seed, collectives
        self.fusion, self.buffer = (wiring.fusion, wiring.buffer) if wiring else ("after", 1)
        self.compressor, self.dense = build(spec.compressor), spec.compressor.kind == "none"
        self.memories: Modules[Any] = Modules(
            nn.ModuleList(
                feedback.build(spec.feedback, torch.Size([n]), collectives.learners, self.dense)
                for n in elements
            )
            for _ in collectives.here
        )
        self.digest = message.digest(str(spec))
        self.cost = cost
        self.nbytes: Any = 0  # handed in by all learners here
        self.order: list[int] = []  # of the places, as the first exchange had them
        self.groups: list[list[int]] | None = None
        self._ready: list[list[float]] = []
        self._began = 0.0
        self.begin(0)

    def begin(self, step: int) -> None:
        """A step's factors follow."""
        self.step = step
        self._parts: dict[int, list[Tensor]] = {}
        self._under_way: list[tuple[list[int], Callable[[], list[Tensor]]]] = []
        self._times: dict[int, float] = {}
        self._began = time.perf_counter()

    def offer(self, number: int, elements: Tensor) -> None:
        """The next learner's triangle of a factor."""
        learners_factors = self._parts.setdefault(number, [])
        learners_factors.append(elements)
        if len(learners_factors) < len(self.collectives.here):
            return
        self._times[number] = time.perf_counter() - self._began
        if self.groups is not None:
            group = self.groups[self._group_of[number]]
            if all(
                len(self._parts.get(number, ())) == len(self.collectives.here) for number in group
            ):
                self._under_way.append((group, self._start(group)))

    def finish(self) -> dict[int, Tensor]:
        """The means of what arrived, by place. Learners that had no rows in this step count as
        zero.
        """
        if not self._parts:
            return {}
        for learners_factors in self._parts.values():
            learners_factors += [torch.zeros_like(learners_factors[0])] * (
                len(self.collectives.here) - len(learners_factors)
            )
        if self.groups is None:
            self._under_way.append((list(self._parts), self._start(list(self._parts))))
        else:  # of messages that a learner without rows kept back
            sent = {number for group, _ in self._under_way for number in group}
            self._under_way += [
                (group, self._start(group)) for group in self.groups if group[0] not in sent
            ]
        merged = {
            number: factor
            for group, arrive in self._under_way
            for number, factor in zip(group, arrive(), strict=True)
        }
        self._fuse()
        self._parts, self._under_way = {}, []
        return merged

    def _start(self, group: list[int]) -> Callable[[], list[Tensor]]:
        offered_all = [
            [self._parts[number][index] for number in group]
            for index in range(len(self.collectives.here))
        ]
        if self.dense:
            self.nbytes = self.nbytes + sum(
                4 * tensor.numel() for tensors in offered_all for tensor in tensors
            )
            return self.collectives.all_reduce(offered_all, WHAT).wait
        offered = [
            [
                self.memories[at][number].offer(tensor)
                for number, tensor in zip(group, tensors, strict=True)
            ]
            for at, tensors in enumerate(offered_all)
        ]
        messages = [
            [
                Message(
                    self.compressor,
                    m,
                    seeds.draw(seeds.KRONECKER, self.seed, number, learner, self.step),
                )
                for number, m in zip(group, tensors, strict=True)
            ]
            for learner, tensors in zip(self.collectives.here, offered, strict=True)
        ]
        under_way = self.collectives.share(
            messages, message.Address(self.digest, self.step), WHAT, even=True
        )
        return lambda: self._arrived(group, offered, messages, under_way)

    def _arrived(
        self,
        group: list[int],
        offered: list[list[Tensor]],
        messages: list[list[Message]],
        under_way: Handle,
    ) -> list[Tensor]:
        received = under_way.wait()
        self.nbytes = self.nbytes + sum(tensor.nbytes for message in messages for tensor in message)
        for at, learner in enumerate(self.collectives.here):
            for number, m, y in zip(group, offered[at], received[learner], strict=True):
                self.memories[at][number].settle(m, y)
        return [mean(list(column)) for column in zip(*received, strict=True)]

    def _fuse(self) -> None:
        """Decide what travels together, once it is known in which order factors come, and when."""
        if len(self._ready) < PROFILED:
            self.order = self.order or list(self._times)
            self._ready.append([self._times.get(number, 0.0) for number in self.order])
        if (
            self.groups is not None
            or self.fusion == "after"
            or (self.fusion == "pipelined" and len(self._ready) < PROFILED)
        ):
            return
        ready = self.ready()
        alpha, beta = self.cost() if self.fusion == "pipelined" and self.cost else (0.0, 0.0)
        elements = [self.elements[number] for number in self.order]
        decided = fusion.groups(self.fusion, elements, ready, alpha, beta, self.buffer)
        self.groups = self.collectives.agree(
            [[self.order[at] for at in group] for group in decided]
        )
        self._group_of = {number: at for at, group in enumerate(self.groups) for number in group}

    def ready(self) -> list[float]:
        """Seconds into a step at which each factor was there, in order; medians of the first
        exchanges.
        """
        return [median(column) for column in zip(*self._ready, strict=True)]

    def get_extra_state(self) -> dict[str, Any]:
        return {"nbytes": int(self.nbytes)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.nbytes = state["nbytes"]

"""The weights of a real pipeline's stage while the passes of several steps are under way.

Step t computes with the weights of step t - d, as `training/delay.py` simulates it. A stage keeps
the present weights and those of the steps that passes under way, or later ones, ask for: with one
step of delay two copies, which is the double buffering of PipeDream-2BW (arXiv 2006.09503).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.config.training import Delay


class Versions:
    """Past weights of the parameters that have a delay."""

    def __init__(self, spec: Delay, delays: Mapping[nn.Parameter, int]) -> None:
        """delays: steps, by the parameter, of those that have one."""
        self.spec = spec
        self.parameters, self.delays = list(delays), list(delays.values())
        self.updates = 0  # optimizer steps before the present weights
        # of each parameter: past weights, by the optimizer steps before them
        self._past: list[dict[int, Tensor]] = [{} for _ in self.parameters]
        self._present = [parameter.data for parameter in self.parameters]
        # by step whose passes are under way: the weights that it computes with
        self._used: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def use(self, step: int) -> None:
        """Forward passes of this step come next."""
        if step not in self._used:
            numbers = range(len(self.parameters))
            self._used[step] = [self._weights(number, step) for number in numbers]
        for parameter, used in zip(self.parameters, self._used[step], strict=True):
            parameter.data = used

    def _weights(self, number: int, step: int) -> Tensor:
        earlier = self._version(number, step - self.delays[number])
        if not self.spec.lookahead:
            return earlier
        before = self._version(number, step - self.delays[number] - 1)
        return (before * -self.spec.lookahead).add_(earlier, alpha=1 + self.spec.lookahead)

    def _version(self, number: int, updates: int) -> Tensor:
        updates = max(0, updates)
        return self._present[number] if updates == self.updates else self._past[number][updates]

    @torch.no_grad()
    def before_update(self, step: int) -> None:
        """All passes of this step are done: the optimizer writes into a copy of the weights."""
        self._used.pop(step, None)
        for number, (parameter, delay) in enumerate(zip(self.parameters, self.delays, strict=True)):
            past, present = self._past[number], self._present[number]
            past[self.updates] = present
            oldest = step + 1 - delay - (self.spec.lookahead > 0)
            free = [past.pop(version) for version in list(past) if version < max(0, oldest)]
            copy = free[0] if free else torch.empty_like(present)
            parameter.data = self._present[number] = copy.copy_(present)
        self.updates += 1

    def show_present(self) -> None:
        """No pass is under way: an evaluation or a checkpoint comes."""
        for parameter, present in zip(self.parameters, self._present, strict=True):
            parameter.data = present

    def stored(self) -> AbstractContextManager:
        """A forward in which autograd keeps the weights that are used, whatever the parameters
        hold when its backward comes.
        """
        return torch.autograd.graph.saved_tensors_hooks(_separate, _as_it_is)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the parameters; no pass is under way."""
        return {"updates": self.updates, "past": self._past}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the parameters hold the present weights."""
        self.updates, self._past = state["updates"], state["past"]
        self._present = [parameter.data for parameter in self.parameters]


def memory_bytes(spec: Delay, delays: Mapping[nn.Parameter, int]) -> int:
    """Bytes of the past weights; looking ahead takes those of one step more, and what is made of
    them for two steps under way.
    """
    return sum(
        (delay + 3 * (spec.lookahead > 0)) * parameter.numel() * parameter.element_size()
        for parameter, delay in delays.items()
    )


def _separate(state: Tensor) -> Tensor:
    # a parameter itself would show what it holds later
    return state.detach() if isinstance(state, nn.Parameter) else state


def _as_it_is(state: Tensor) -> Tensor:
    return state

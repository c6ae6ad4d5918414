"""When masks move, and how sparse they are then: a Sparsity laid over the steps of a run. No torch:
plans need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from commsweep.config.sparsity import Phase, Sparsity
from commsweep.errors import UserError


@dataclass(frozen=True)
class Stretch:
    """A phase in steps: from `start` up to `end`."""

    name: str
    phase: Phase
    start: int
    end: int
    before: float  # sparsity where it begins
    updates: int  # the last one's number, counted from 0 at `start`


class Schedule:
    """Targets, updates and drop fractions of a run of `steps` steps. Raises UserError where a phase
    is too short.
    """

    def __init__(self, spec: Sparsity, steps: int) -> None:
        self.spec, self.steps, self.stretches = spec, steps, []
        start, before = 0, spec.initial_sparsity
        for name, phase in spec.ordered:
            end = round(phase.until * steps)
            stretch = Stretch(name, phase, start, end, before, (end - start - 1) // spec.interval)
            if end <= start:
                raise UserError(
                    f"sparsity.phases.{name}: of {steps} steps none is left for it; let it end "
                    f"later than {phase.until:g}, or train longer"
                )
            if self._moves(stretch) and end - start <= spec.interval:
                raise UserError(
                    f"sparsity.interval={spec.interval}: no shorter than phase {name}, which "
                    f"has {end - start} of the run's {steps} steps; choose a smaller one, or "
                    "end it later"
                )
            self.stretches.append(stretch)
            start, before = end, phase.sparsity

    def _moves(self, stretch: Stretch) -> bool:
        """Return whether masks move within a phase, after its first step."""
        gradual = stretch.phase.shape != "step" and stretch.phase.sparsity != stretch.before
        return gradual or bool(
            self.spec.drop_fraction
            and stretch.phase.sparsity
            and self._fraction(stretch, stretch.start) > 0
        )

    def at(self, step: int) -> Stretch:
        """The phase that a step is in; a step after the last one is in the last."""
        return next(
            (stretch for stretch in self.stretches if step < stretch.end), self.stretches[-1]
        )

    def target(self, step: int) -> float:
        """The sparsity that masks have after the update of this step, or of the last one before
        it.
        """
        stretch = self.at(step)
        if stretch.phase.shape == "step" or not stretch.updates:
            return stretch.phase.sparsity
        x = min(1.0, (step - stretch.start) // self.spec.interval / stretch.updates)
        left = 1 - x if stretch.phase.shape == "linear" else (1 - x) ** 3
        return stretch.phase.sparsity + (stretch.before - stretch.phase.sparsity) * left

    def updates(self, step: int) -> bool:
        """Return whether masks may move in this step (the first masks, of step 0, are no
        update).
        """
        stretch = self.at(step)
        return 0 < step < stretch.end and (step - stretch.start) % self.spec.interval == 0

    def drop(self, step: int) -> float:
        """Share of the live weights that an update in this step moves: drop / 2 (1 + cos(pi x))."""
        return self._fraction(self.at(step), step)

    def _fraction(self, stretch: Stretch, step: int) -> float:
        start, end = (
            (stretch.start, stretch.end)
            if self.spec.restart
            else (0, self.spec.drop_until * self.steps)
        )
        if step >= end:
            return 0.0
        return (
            self.spec.drop_fraction / 2 * (1 + math.cos(math.pi * (step - start) / (end - start)))
        )


def moved(live: int, target: int, numel: int, drop: float, regrow: bool) -> tuple[int, int]:
    """(weights pruned, weights grown) in a layer of `numel` weights that goes from `live` to
    `target` live ones.

    At least int(drop live) move where there is room: what grows was dead before, unless it may be
    what was pruned.
    """
    if live == target == numel:
        return 0, 0  # dense, and to stay so
    pruned = max(int(drop * live), live - target)
    pruned = min(pruned, live if regrow else max(numel - target, live - target))
    return pruned, pruned + target - live

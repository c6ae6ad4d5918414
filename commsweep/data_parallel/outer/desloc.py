"""DES-LOC (arXiv 2505.22549): the moments of the inner optimizers are averaged, too, each at an
interval of its own.

The paper averages weights every K steps, first moments every 3 K, second moments every 6 K.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from commsweep.data_parallel.outer.roles import EXTRAS, Extra, Layers
from commsweep.errors import UserError

# what optimizers call them
FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq",)


@EXTRAS.when(lambda outer: outer.first_moment or outer.second_moment)
class Moments(Extra):
    """The mean of the learners' inner moments."""

    def _names(self, step: int) -> list[tuple[str, ...]]:
        intervals = ((self.outer.first_moment, FIRST), (self.outer.second_moment, SECOND))
        return [names for interval, names in intervals if interval and step % interval == 0]

    def due(self, step: int) -> bool:
        return bool(self._names(step))

    def send(self, optimizers: list[torch.optim.Optimizer], step: int) -> None:
        for names in self._names(step):
            trained = self.exchange.trained
            self._average([moments(optimizer, trained, names) for optimizer in optimizers])

    def _average(self, learners: list[Layers]) -> None:
        tensors = [list(layers.values()) for layers in learners]
        means = self.exchange.collectives.all_reduce(tensors, "moments").wait()
        for index, mean in zip(learners[0], means, strict=True):
            self.exchange.ledger.dense(index, len(learners), mean.element_size())
        for row in tensors:
            for moment, mean in zip(row, means, strict=True):
                moment.copy_(mean)


def moments(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], names: tuple[str, ...]
) -> Layers:
    """Return a moment of each parameter by its number. Raises UserError where there is none."""
    optimizers = getattr(optimizer, "parts", (optimizer,))
    states = {
        p: state for optimizer_part in optimizers for p, state in optimizer_part.state.items()
    }
    layers = {}
    for number, parameter in enumerate(parameters):
        for name in names:
            moment = states.get(parameter, {}).get(name)
            if isinstance(moment, Tensor):
                layers[number] = moment
    if not layers:
        raise UserError(
            f"{type(optimizer).__name__} keeps no {' or '.join(names)}: leave out "
            f"grad.outer.{'second' if names == SECOND else 'first'}_moment"
        )
    return layers

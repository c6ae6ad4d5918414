"""DES-LOC (arXiv 2505.22549): the moments of the inner optimizers are averaged, too, each at an
interval of its own.

The paper averages weights every K steps, first moments every 3 K, second moments every 6 K.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from commsweep.config.gradients import Outer
from commsweep.errors import UserError

# what optimizers call them
FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq",)


def due(outer: Outer, step: int) -> list[tuple[str, ...]]:
    """The moments that are averaged after so many steps."""
    found = []
    for interval, names in ((outer.first_moment, FIRST), (outer.second_moment, SECOND)):
        if interval is not None and step % interval == 0:
            found.append(names)
    return found


def moments(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], names: tuple[str, ...]
) -> dict[int, Tensor]:
    """A moment of each parameter by its place. Raises UserError where the optimizer keeps none."""
    parts = getattr(optimizer, "parts", (optimizer,))
    states = {p: state for part in parts for p, state in part.state.items()}
    found = {}
    for place, parameter in enumerate(parameters):
        for name in names:
            kept = states.get(parameter, {}).get(name)
            if isinstance(kept, Tensor):
                found[place] = kept
    if not found:
        raise UserError(
            f"{type(optimizer).__name__} keeps no {' or '.join(names)}: leave out "
            f"grad.outer.{'second' if names == SECOND else 'first'}_moment"
        )
    return found

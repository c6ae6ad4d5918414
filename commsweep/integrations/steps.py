"""The end of a training step, as torch.optim says it: an optimizer begins to step."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Watcher(Protocol):
    """Whoever wants to know when the gradients of a step are complete."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to step."""
        ...


def watch(watcher: Watcher) -> Any:
    """Call `watcher.stepping` before each step of any optimizer; returns a handle with remove().

    The watcher is not kept alive.
    """
    reference = weakref.ref(watcher)

    def stepping(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if (alive := reference()) is not None:
            alive.stepping(optimizer)

    handle = register_optimizer_step_pre_hook(stepping)
    weakref.finalize(watcher, handle.remove)
    return handle


def held(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the identities of the parameters that an optimizer holds."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}

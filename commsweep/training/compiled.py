"""torch.compile for the parts of a network between its boundaries; crossings, and all other hooks,
stay outside.

How a run executes, never what it computes: results equal eager ones up to rounding (the order of
sums in a kernel).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn

from commsweep.config.execution import GRAPHS
from commsweep.errors import UserError
from commsweep.models import layout

LIMIT = 64  # variants of one piece of code: a block for each shape, also that of a short last batch


def install(model: nn.Module, mode: str, device: torch.device) -> list[str]:
    """Compile the forward that every block of the model has in training; their names.

    A block is a module with parts of its own, none of which anybody watches. Raises UserError where
    none can compile.
    """
    if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise UserError(
            f"--compile {mode}: no C++ compiler (g++, or the one that CXX names) is here; "
            "install one, or leave --compile out"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        raise UserError(
            f"--compile {mode}: {torch.cuda.get_device_name(device)} is older than Triton "
            "compiles for; leave --compile out"
        )
    if mode in GRAPHS and device.type != "cuda":
        raise UserError(f"--compile {mode}: CUDA graphs need a GPU; use --compile default")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, LIMIT)
    layout.thin(model)  # the compiler lays images out as it likes
    blocks_ = dict(blocks(model))
    for block in blocks_.values():
        block.forward = _in_training(block, torch.compile(block.forward, mode=mode, dynamic=False))
    return list(blocks_)


def blocks(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the largest parts that can be compiled, in the model's order."""
    runs = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if (
        runs
        and name
        and any(True for _ in module.children())
        and not any(_watched(inner) for inner in module.modules() if inner is not module)
    ):
        yield name, module
        return
    for key, child in module.named_children():
        yield from blocks(child, f"{name}.{key}" if name else key)


def _watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _in_training(block: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """An evaluation is too short to compile for, and its batches are of other sizes."""
    plain = block.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (function if block.training else plain)(*args, **kwargs)

    return forward

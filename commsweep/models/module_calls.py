"""A look at what a model does in training, which leaves it as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[nn.Module]:
    """The model in training mode; buffers, gradients, random state and mode are afterwards what
    they were.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted(
        {
            parameter.device.index or 0
            for parameter in model.parameters()
            if parameter.device.type == "cuda"
        }
    )
    with torch.random.fork_rng(devices):
        try:
            yield model.train()
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])


def calls(model: nn.Module, sample: Tensor) -> Counter[int]:
    """Return how often each module (by identity) runs in a training forward of a sample [1, ...],
    taken twice: a BatchNorm needs two.
    """
    calls: Counter[int] = Counter()

    def note(module: nn.Module, _inputs: Any, _output: Any) -> None:
        calls[id(module)] += 1

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with undisturbed(model), torch.enable_grad():
            model(sample.repeat_interleave(2, 0))
    finally:
        for hook in hooks:
            hook.remove()
    return calls

"""Optimizers, and how the learning rate goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commsweep.experiments.config import Run


class LinearRamp:
    """Factor of the learning rate at a step: up from zero over `warmup` steps, then down to zero at `total`."""

    def __init__(self, warmup: int, total: int, epochs: float) -> None:
        self.warmup, self.total, self.epochs = warmup, total, epochs

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        return max(0.0, (self.total - step) / max(1, self.total - self.warmup))


def optimizer(run: Run, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a run, for these of its parameters."""
    optim = run.optim
    if optim.kind == "adamw":
        return torch.optim.AdamW(parameters, optim.lr, (optim.beta1, optim.beta2), optim.eps, optim.weight_decay,
                                 fused=True)
    return torch.optim.SGD(parameters, optim.lr, optim.momentum, weight_decay=optim.weight_decay, fused=True)


def rates(run: Run, optimizer: torch.optim.Optimizer, steps: int) -> tuple[Any, str]:
    """(the learning rate's scheduler, whether it advances each "step" or "epoch") of a training of `steps` steps."""
    spec, kinds = run.schedule, torch.optim.lr_scheduler
    if spec.kind == "linear":
        ramp = LinearRamp(round(spec.warmup * steps / run.epochs), steps, spec.warmup)
        return kinds.LambdaLR(optimizer, ramp), "step"
    if spec.kind == "cosine":
        return kinds.CosineAnnealingLR(optimizer, spec.t_max), "epoch"
    return kinds.ConstantLR(optimizer, factor=1.0, total_iters=0), "epoch"

"""Law 1: what is logged is what ran. Settings are read back from the objects that carried them
out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from commsweep.compressors.base import channels_last
from commsweep.config import Run, flatten, record
from commsweep.config.base import Spec
from commsweep.config.training import (
    AdamWSpec,
    ConstantSpec,
    CosineSpec,
    DionSpec,
    ImageModel,
    LinearSpec,
    MuonSpec,
    OwnModel,
    SGDSpec,
    TextModel,
)
from commsweep.models import causal_lm
from commsweep.training.optim import MatricesAndRest


@dataclass(frozen=True)
class Installed:
    """The objects that a training consisted of, in one process."""

    run: Run
    model: Spec  # `model_of` the network, before a stage takes it apart
    module: nn.Module  # what was trained here
    data: Any
    optimizer: torch.optim.Optimizer
    clip: float
    scheduler: Any
    sections: dict[str, Any]  # what the components carried out
    microbatches: int
    epochs: int
    eval_every: int
    precision: str  # float32 or bfloat16

    def settings(self) -> dict[str, Any]:
        """The settings that really ran, sections of the Run by name."""
        run = self.run
        return {
            "model": self.model,
            "data": self.data.installed,
            "optim": _optim(self.optimizer, self.clip),
            "schedule": _schedule(self.scheduler),
            "fwd": run.fwd,
            "bwd": run.bwd,
            "at": {},  # where there is no boundary
            **self.sections,
            "microbatches": self.microbatches,
            "epochs": self.epochs,
            "eval_every": self.eval_every,
            "precision": self.precision,
            "channels_last": any(channels_last(p) for p in self.module.parameters()),
            "seed": self.data.train.seed,
        }

    def record(self) -> dict[str, Any]:
        """Return the installed settings as a Run would be stored; not validated, for a lost setting
        may be no valid one.
        """
        return _plain(self.settings())


def nothing_lost(
    run: Run, *ran: dict[str, Any], only: Callable[[str], bool] = lambda key: True
) -> None:
    """Raise RuntimeError when a setting did not reach the objects (`ran`: a record of each
    process).
    """
    settings = flatten(record(run))
    for installed in map(flatten, ran):
        lost = [
            f"{key}: asked {settings.get(key)}, installed {installed.get(key)}"
            for key in sorted(settings.keys() | installed.keys())
            if only(key) and settings.get(key) != installed.get(key)
        ]
        if lost:
            raise RuntimeError(
                "settings lost on the way to the run: " + "; ".join(lost) + " (what a component "
                "installed is what its installed() says)"
            )


def model_of(run: Run, model: Any, cuts: tuple[str, ...]) -> Spec:
    """A network's settings, read from it and from where it is cut."""
    if isinstance(run.model, OwnModel):
        return model.made_by.model_copy(update={"cuts": cuts})
    if isinstance(run.model, ImageModel):
        width = model.fc.in_features if run.model.name == "mlp" else model.conv1.out_channels
        return ImageModel(name=run.model.name, width=width, cuts=cuts)
    wrapped = any(
        isinstance(inspect.unwrap(block.forward), partial) for block in causal_lm.blocks(model)
    )
    return TextModel(
        name=run.model.name,
        weights=run.model.weights,
        stages=len(cuts) + 1,
        dropout=causal_lm.dropout(model),
        gradient_checkpointing=wrapped,
        width=None if run.model.width is None else model.config.hidden_size,
        tied=None if run.model.tied is None or causal_lm.is_tied(model) else False,
    )


def _plain(ran: dict[str, Any]) -> dict[str, Any]:
    return {
        key: section.model_dump(mode="json", exclude_none=True)
        if isinstance(section, Spec)
        else _plain(section)
        if isinstance(section, dict)
        else section
        for key, section in ran.items()
        if section is not None
    }


def _optim(optimizer: torch.optim.Optimizer, clip: float) -> Spec:
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.AdamW):
        return AdamWSpec(
            lr=group["initial_lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            clip=clip,
        )
    if isinstance(optimizer, MatricesAndRest):
        last_group = optimizer.param_groups[-1]
        betas = last_group.get("betas", (0.9, 0.95))
        if isinstance(optimizer.parts[0], torch.optim.SGD):
            return DionSpec(
                lr=group["initial_lr"],
                rest_lr=last_group["initial_lr"],
                beta1=betas[0],
                beta2=betas[1],
                weight_decay=group["weight_decay"],
            )
        return MuonSpec(
            lr=group["initial_lr"],
            momentum=group["momentum"],
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=group["weight_decay"],
            clip=clip,
        )
    return SGDSpec(
        lr=group["initial_lr"], momentum=group["momentum"], weight_decay=group["weight_decay"]
    )


def _schedule(scheduler: Any) -> Spec:
    if isinstance(scheduler, torch.optim.lr_scheduler.CosineAnnealingLR):
        return CosineSpec(t_max=scheduler.T_max)
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        return LinearSpec(warmup=scheduler.lr_lambdas[0].epochs)  # pyright: ignore[reportFunctionMemberAccess]
    return ConstantSpec()

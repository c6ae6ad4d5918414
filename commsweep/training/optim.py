"""Optimizers, and how the learning rate goes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from commsweep.config import Run
from commsweep.config.training import DionSpec, MuonSpec
from commsweep.errors import UserError


class LinearRamp:
    """Factor of the learning rate at a step: up from zero over `warmup` steps, then down to zero at
    `total`.
    """

    def __init__(self, warmup: int, total: int, epochs: float) -> None:
        self.warmup, self.total, self.epochs = warmup, total, epochs

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        return max(0.0, (self.total - step) / max(1, self.total - self.warmup))


class MatricesAndRest(torch.optim.Optimizer):
    """torch's Muon for matrices, or plain steps along what Dion has made of them, and AdamW for the
    rest, as one optimizer with a group for each.
    """

    def __init__(
        self,
        optim: MuonSpec | DionSpec,
        matrices: list[nn.Parameter],
        others_params: list[nn.Parameter],
    ) -> None:
        super().__init__([{"params": [*matrices, *others_params]}], {"lr": optim.lr})
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                optim.lr,
                optim.weight_decay,
                optim.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
            if optim.kind == "muon"
            else torch.optim.SGD(matrices, optim.lr, weight_decay=optim.weight_decay, fused=True)
        ]
        if others_params:
            rate = optim.lr if optim.kind == "muon" else optim.rest_lr
            optimizers.append(
                torch.optim.AdamW(
                    others_params,
                    rate,
                    (optim.beta1, optim.beta2),
                    weight_decay=optim.weight_decay,
                    fused=True,
                )
            )
        self.parts = optimizers
        self._grouped()

    def _grouped(self) -> None:
        """Schedules set the rate in the parts' own groups."""
        self.param_groups = [
            group for part_optimizer in self.parts for group in part_optimizer.param_groups
        ]

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for part_optimizer in self.parts:
            part_optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part_optimizer.state_dict() for part_optimizer in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part_optimizer, state in zip(self.parts, state_dict["parts"], strict=True):
            part_optimizer.load_state_dict(state)
        self._grouped()


def embedded(model: nn.Module) -> set[int]:
    """The identities of embeddings, and of heads that are tied to one."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def optimizer(
    run: Run, parameters: list[nn.Parameter], embeddings: Collection[int] = ()
) -> torch.optim.Optimizer:
    """The optimizer of a run, for these of its parameters. Raises UserError when Muon or Dion has
    no matrix.
    """
    optim = run.optim
    if isinstance(optim, MuonSpec | DionSpec):
        matrices = [p for p in parameters if p.dim() == 2 and id(p) not in embeddings]
        if not matrices:
            raise UserError(
                f"optim.kind={optim.kind}: the model has no matrix beside embeddings; set "
                "optim.kind=adamw"
            )
        chosen = {id(p) for p in matrices}
        return MatricesAndRest(optim, matrices, [p for p in parameters if id(p) not in chosen])
    if optim.kind == "adamw":
        return torch.optim.AdamW(
            parameters,
            optim.lr,
            (optim.beta1, optim.beta2),
            optim.eps,
            optim.weight_decay,
            fused=True,
        )
    optimizer = torch.optim.SGD(
        parameters,
        optim.lr,
        optim.momentum,
        weight_decay=optim.weight_decay,
        fused=True,
    )
    if optim.momentum:
        optimizer.register_step_pre_hook(_begin_late)
    return optimizer


def _begin_late(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Momentum of parameters that get their first gradient after others did (layer drop): torch's
    fused SGD takes it of all, or of none.
    """
    for group in optimizer.param_groups:
        moved = [p for p in group["params"] if p.grad is not None]
        late = [p for p in moved if "momentum_buffer" not in optimizer.state[p]]
        for p in late if len(late) < len(moved) else ():
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def states(run: Run) -> int:
    """Tensors that the optimizer keeps of each weight."""
    states_by_kind = {"adamw": 2, "muon": 1, "dion": 0}  # matrices'
    if run.optim.kind == "sgd":
        return int(run.optim.momentum > 0)
    return states_by_kind[run.optim.kind]


def rates(run: Run, optimizer: torch.optim.Optimizer, steps: int) -> tuple[Any, str]:
    """(the learning rate's scheduler, whether it advances each "step" or "epoch") of a training of
    `steps` steps.
    """
    spec, kinds = run.schedule, torch.optim.lr_scheduler
    if spec.kind == "linear":
        ramp = LinearRamp(round(spec.warmup * steps / run.epochs), steps, spec.warmup)
        return kinds.LambdaLR(optimizer, ramp), "step"
    if spec.kind == "cosine":
        return kinds.CosineAnnealingLR(optimizer, spec.t_max), "epoch"
    return kinds.ConstantLR(optimizer, factor=1.0, total_iters=0), "epoch"

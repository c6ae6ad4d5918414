"""Rare exchange in a training of one's own: DiLoCo and after, as a wrapper of the optimizer.

    optimizer = OuterOptimizer(model, torch.optim.AdamW(model.parameters()), interval=16)
    for x, y in batches:
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()

Every 16th step exchanges what the weights have moved by. The model is not wrapped in
DistributedDataParallel: between exchanges every process trains alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commsweep.collectives import Processes, gathered, needs_group
from commsweep.component import Moment, Pass
from commsweep.config.override import parse_gradients
from commsweep.data_parallel.outer.training import LocalTraining
from commsweep.errors import UserError

NEVER = 2**62  # the last step of a training whose length is not known


class OuterOptimizer(torch.optim.Optimizer):
    """An optimizer whose process trains alone for `interval` steps, then exchanges its
    pseudo-gradient; the mean is applied by an outer SGD (arXiv 2311.08105).

    Learning rate schedulers take it as they take the optimizer inside.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        interval: int = 16,
        compressor: dict[str, Any] | None = None,
        feedback: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        **outer: Any,
    ) -> None:
        """interval, outer: as the settings of `grad.outer` (rate, momentum, nesterov, fragments,
        overlap, ...). compressor, feedback: of the pseudo-gradient. All processes take the weights
        of the first one.

        Raises UserError on settings that do not go together, on a wrapped model, and without a
        process group.
        """
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise UserError(
                f"OuterOptimizer takes the model itself, not {type(model).__name__}: give it "
                "model.module, and train that one (processes exchange every interval only)"
            )
        needs_group("an OuterOptimizer")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UserError(
                f"{type(optimizer).__name__} computes gradients inside of its step (a closure), "
                "which an OuterOptimizer does not pass on: use an optimizer such as AdamW"
            )
        settings: dict[str, Any] = {
            "learners": dist.get_world_size(group),
            "compressor": compressor or {"kind": "none"},
            "outer": {"interval": interval, **outer},
        }
        if settings["learners"] > 1:
            settings["exchange"] = "allgather"
        spec = parse_gradients(settings | ({"feedback": feedback} if feedback else {}))
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [
            name for name, p in model.named_parameters() if p.requires_grad and id(p) not in owned
        ]
        if left:
            raise UserError(
                f"the optimizer does not hold the model's {left[0]}: make it of "
                "model.parameters(), of the same model"
            )
        first = dist.get_global_rank(group, 0) if group is not None else 0
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), first, group)
        self.model, self.inner, self.group, self.steps = model, optimizer, group, 0
        self.training = LocalTraining(
            spec,
            model,
            seed,
            batch=spec.learners,
            inner=lambda params: optimizer,
            clip=None,
            steps=NEVER,
            collectives=Processes(group=group),
        )
        self._begin()

    def _begin(self) -> None:
        self.training.configured(self.inner)
        self.training.take(0)

    # The optimizer inside, as others see it.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """The inner step; after every `interval` of them the exchange and the outer step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        self.training.take(0)  # the model may hold the common weights since `finish`
        pass_ = Pass(slice(0), 1, 1.0, learner=self.training.here[0])
        self.training.after_pass(self._moment(), pass_)
        if self.training.meets(self.steps + 1):
            self._agree(self.steps + 1, finishes=False)
        self.training.after_backward(self._moment())
        self.training.take(0)
        self.steps += 1
        return loss

    def _moment(self) -> Moment:
        return Moment(self.steps, 0, self.param_groups[0]["lr"], 0, 0)

    def _check_parameters(self) -> None:
        """Raise UserError on a parameter that began to train after this optimizer was made."""
        exchanged = {id(p) for p in self.training.trained}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in exchanged:
                raise UserError(
                    f"'{name}' began to train after the OuterOptimizer was made, so processes "
                    "would not exchange it: call finish() and make a new OuterOptimizer"
                )

    def _agree(self, step: int, finishes: bool) -> int | None:
        """Return the step whose exchange some process has reached; None where all finish.

        Raises UserError on every process where two have reached different ones, and where one does
        not come within the group's timeout.
        """
        try:
            reached = gathered([step, finishes], self.group)
        except RuntimeError as error:
            raise UserError(
                f"a process did not come to the exchange after step {step} ({error}): let every "
                "process call step() as often, or finish() when its data end"
            ) from None
        going_on = sorted({steps for steps, done in reached if not done})
        if len(going_on) > 1:
            steps_text = ", ".join(f"process {rank}: {n}" for rank, (n, _) in enumerate(reached))
            raise UserError(
                f"the processes exchange after different numbers of steps ({steps_text}): "
                "resume all "
                "from checkpoints of one step, with the same settings"
            )
        if going_on:
            return going_on[0]
        self.steps = max(steps for steps, _ in reached)
        return None

    def finish(self) -> None:
        """Exchange what has moved since the last exchange; the model has the common weights.

        A process that has taken fewer steps than others takes part in their exchanges until all
        finish.
        """
        self.training.take(0)
        ledger = self.training.exchange.ledger
        while (step := self._agree(self.steps, finishes=True)) is not None:
            ledger.steps += step - self.steps - 1
            self.steps = step - 1
            self.training.after_backward(self._moment())
            self.steps = step
        ledger.steps = max(ledger.steps, self.steps)
        if self.steps:
            self.training.finish(Moment(self.steps - 1, 0, self._moment().rate, 0, 0))
        self.training.settle()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UserError: what is exchanged is settled when an OuterOptimizer is made."""
        raise UserError(
            "an OuterOptimizer takes no further parameters, because processes would not exchange "
            "them: call finish() and make a new OuterOptimizer"
        )

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register the hook with the optimizer inside, which `hook` is called with."""
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register the hook with the optimizer inside, which `hook` is called with."""
        return self.inner.register_step_post_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> OuterOptimizer:
        raise UserError(
            "an OuterOptimizer holds a process group and cannot be copied: copy its state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "an OuterOptimizer holds a process group and cannot be saved whole: save its "
            "state_dict()"
        )

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Inside, the model has the common weights, for an evaluation or a checkpoint."""
        self.training.settle()
        try:
            yield
        finally:
            self.training.take(0)

    def totals(self) -> dict[str, Any]:
        """Bytes a step, by name, as in a run's row."""
        return self.training.exchange.ledger.totals()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer, this process's weights, the common ones and what is remembered;
        every process saves its own.
        """
        learners = self.training.spec.learners
        return {"steps": self.steps, "learners": learners, "training": self.training.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UserError on the state of another number of processes."""
        learners = self.training.spec.learners
        if state_dict["learners"] != learners:
            raise UserError(
                f"the state is one of {state_dict['learners']} processes, and the process group "
                f"has {learners}: resume with as many"
            )
        self.training.load_state_dict(state_dict["training"])
        self.steps = state_dict["steps"]
        self._begin()

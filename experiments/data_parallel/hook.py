"""Compressed gradients in a training loop of one's own: a communication hook for DistributedDataParallel.

    from commsweep.experiments.data_parallel.hook import CompressionHook

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    hook = CompressionHook(model, compressor={"kind": "topk", "ratio": 0.01}, feedback={"kind": "ef"})
    hook.attach(ddp)
    ...                              # the loop as it was; then hook.totals()["up"] is the bytes a learner sent a step
    torch.save(hook.state_dict(), path)      # what was remembered, with the model's and the optimizer's states
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commsweep.experiments.collectives import Processes
from commsweep.experiments.config import parse_gradients
from commsweep.experiments.data_parallel.exchange import Exchange
from commsweep.experiments.errors import UserError


class CompressionHook(nn.Module):
    """What the learners of a process group send each other instead of DistributedDataParallel's all-reduce.

    A hook of a model for each process, made after the process group. Its `state_dict` holds what this process
    remembers; every process keeps its own.
    """

    def __init__(self, model: nn.Module, compressor: dict[str, Any], feedback: dict[str, Any] | None = None,
                 seed: int = 0, **more: Any) -> None:
        """compressor, feedback, more: as the settings of a Run's `grad`, for instance exchange="server".

        Raises UserError on settings that do not go together.
        """
        super().__init__()
        settings = {"exchange": "allgather", "compressor": compressor, **more} | (
            {"feedback": feedback} if feedback else {})
        spec = parse_gradients({"learners": 2} | settings)  # what is misspelt is said whatever else is missing
        if spec.outer is not None or spec.sharded is not None:
            raise UserError(f"{'outer' if spec.outer else 'sharded'}: a hook sees gradients only; leave it out, or "
                            "train with commsweep ddp")
        if not (dist.is_available() and dist.is_initialized()):
            raise UserError("a CompressionHook belongs to a process group, and there is none: call "
                            "torch.distributed.init_process_group first")
        spec = parse_gradients({"learners": dist.get_world_size()} | settings)
        self.exchange = Exchange(spec, model, seed, Processes())
        self.places = {id(p): index for index, p in enumerate(self.exchange.trained)}
        self.step = self.epoch = 0  # the epoch is the loop's to say, where a schedule asks for it

    def attach(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Have it take the place of the all-reduce. Raises UserError on a model that is not wrapped in it."""
        if not isinstance(ddp, nn.parallel.DistributedDataParallel):
            raise UserError(f"attach takes a torch.nn.parallel.DistributedDataParallel, not {type(ddp).__name__}: "
                            "other wrappers (FSDP2's fully_shard, DataParallel) have no hook for compressed gradients")
        ddp.register_comm_hook(self, _exchanged)

    def totals(self) -> dict[str, Any]:
        """Bytes a step, by name, as in a run's row."""
        return self.exchange.ledger.totals()

    def get_extra_state(self) -> dict[str, int]:
        return {"step": self.step, "epoch": self.epoch}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.step, self.epoch = state["step"], state["epoch"]


@torch.no_grad()
def _exchanged(hook: CompressionHook, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations as types
    """A future of a dist.GradBucket's buffer, with the mean of what arrives in the gradients' place."""
    own: list[Tensor | None] = [None] * len(hook.exchange.trained)
    views = {hook.places[id(p)]: grad for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    for index, grad in views.items():
        own[index] = grad.clone()
    for index, merged in hook.exchange.begin([own], hook.step, hook.epoch, views.keys())().items():
        views[index].copy_(merged)
    if bucket.is_last():
        hook.step += 1
        hook.exchange.ledger.steps += 1
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done

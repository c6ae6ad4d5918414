"""FSDP2 whose gradients travel in codes, and its weights where asked.

    fully_shard(model)
    wire = compress_fsdp(model, {"kind": "uniform", "bits": 8}, weights="uniform:8,scale=group")
    ...
    wire.totals()["bytes"]


Train as before; the last line is what this process sent a step. In the reduce-scatter of a module
every process sends each other process its part of the gradients as one message, encodes it once,
and adds up what arrives (as ZeRO++'s qgZ without its second hop). In its all-gather every process
sends the others its part of the weights as one message (ZeRO++'s qwZ, arXiv 2306.10209). Forward
and backward use the decoded weights, one's own part among them; the optimizer steps on the float32
shards that the owners keep.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from commsweep import compressors, seeds
from commsweep.collectives import Message, Processes
from commsweep.compressors import message
from commsweep.compressors.own import Own
from commsweep.config.base import by_kind
from commsweep.config.compressors.spelling import in_full
from commsweep.config.gradients import ShardCode
from commsweep.errors import UserError
from commsweep.integrations import steps

WHAT = "gradients"
MEANS, SUMS = dist.ReduceOp.AVG, dist.ReduceOp.SUM


class Allocating:
    """Base: what FSDP2 asks of each of its collectives besides the call."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class CodedReduceScatter(Allocating):
    """The reduce-scatter of one FSDP2 module: torch calls it with all of a step's gradients."""

    def __init__(self, wire: Wire, number: int) -> None:
        self.wire, self.place, self.calls = wire, number, 0
        self.error: Tensor | None = None  # of each part, with error feedback

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """output_tensor [n] becomes the sum, or mean, of all processes' parts of input_tensor
        [processes * n] for this one.
        """
        if op not in (MEANS, SUMS):
            raise UserError(
                f"FSDP reduces gradients by {op}, and codes are only summed up or averaged: leave "
                "out set_gradient_divide_factor"
            )
        collectives, code = self.wire.collectives(group), self.wire.code
        n, me, scale = collectives.learners, collectives.here[0], self.wire.scale
        shards = input_tensor.float().view(n, -1)
        if scale != 1:
            shards = shards / scale
        # Where a gradient is not finite a scaler skips the step: nothing may be remembered of it.
        # The answer stays on the device, so that nobody waits for it.
        finite = shards.isfinite().all().float()
        dist.all_reduce(finite, dist.ReduceOp.MIN, group)
        shards = torch.where(finite > 0, shards, 0.0)
        if self.error is not None:
            shards = shards + self.error
        drawn = [
            seeds.draw(seeds.SHARDS, self.wire.seed, self.place, me, self.calls, 0, to)
            for to in range(n)
        ]
        address = message.Address(message.digest(f"fsdp {code.spec}"), self.calls)
        messages = {to: [Message(code, shards[to], drawn[to])] for to in range(n)}
        arrived = collectives.scatter([messages], address, WHAT).wait()[0]
        if self.wire.remembers:
            decoded = [code.roundtrip(shards[to], seed) for to, seed in enumerate(drawn)]
            before = torch.zeros_like(shards) if self.error is None else self.error
            self.error = torch.where(finite > 0, shards - torch.stack(decoded), before)
        total = torch.stack([shard[0].view(-1) for shard in arrived]).sum(0) * scale
        total = torch.where(finite > 0, total, torch.inf)
        output_tensor.copy_(total / n if op == MEANS else total)
        sent = sum(messages[to][0].nbytes for to in range(n) if to != me)
        self.wire.sent += sent
        self.wire.dense += input_tensor.element_size() * shards[0].numel() * (n - 1)
        self.calls += 1


class CodedAllGather(Allocating):
    """The all-gather of one FSDP2 module: torch calls it before its forward, and before its
    backward where the weights were given back.
    """

    def __init__(self, wire: Wire, number: int, code: compressors.Compressor) -> None:
        self.wire, self.place, self.code, self.calls = wire, number, code, 0

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """output_tensor [processes * n] becomes the decoded weights of all processes; input_tensor
        [n] are this one's.
        """
        if not input_tensor.is_floating_point():
            raise UserError(
                "weights: FSDP gathers parameters of several types as bytes, which no code "
                "takes; give the module parameters of one type"
            )
        collectives = self.wire.collectives(group)
        # the same draws in forward and backward of a step, so that both have the same weights
        me, at = collectives.here[0], self.wire.steps
        seed = seeds.draw(seeds.SHARDS, self.wire.seed, self.place, me, at, 1, 0)
        sent = Message(self.code, input_tensor.float(), seed)
        address = message.Address(message.digest(f"fsdp weights {self.code.spec}"), self.calls)
        arrived = collectives.share([[sent]], address, "weights", even=True).wait()
        output_tensor.copy_(torch.cat([row[0].view(-1) for row in arrived]))
        receivers = collectives.learners - 1
        self.wire.weights_sent += sent.nbytes * receivers
        self.wire.weights_dense += input_tensor.element_size() * input_tensor.numel() * receivers
        self.calls += 1


class Wire:
    """The state that the reduce-scatters and all-gathers of one model share, and their counts."""

    def __init__(
        self,
        compressor: dict[str, Any],
        feedback: str,
        seed: int,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.code = compressors.build(compressor)
        self.remembers, self.seed, self.scaler = feedback == "ef", seed, scaler
        self.steps = 0  # that optimizers took after a backward
        self._sent_before = 0  # reduce-scatters until the last of them
        self.sent: Any = 0  # a count that waits on a device stays there until it is asked for
        self.dense = 0
        self.weights_sent: Any = 0
        self.weights_dense = 0
        self.parts: list[CodedReduceScatter] = []
        self.gathers: list[CodedAllGather] = []
        self._collectives: dict[Any, Processes] = {}
        self._loaded = False  # whether counts are those of an earlier process, too
        steps.watch(self)

    def collectives(self, group: dist.ProcessGroup) -> Processes:
        """The exchange among the processes of a shard group."""
        if group not in self._collectives:
            self._collectives[group] = Processes(group=group)
        return self._collectives[group]

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step; several that follow one backward are one step."""
        sent = sum(scatter.calls for scatter in self.parts)
        if sent > self._sent_before:
            self.steps, self._sent_before = self.steps + 1, sent

    @property
    def scale(self) -> float:
        """Return what the scaler has multiplied the loss by."""
        return self.scaler.get_scale() if self.scaler is not None else 1.0

    def totals(self) -> dict[str, float]:
        """bytes, dense: what this process sent of gradients a step of the optimizer, and the type
        that FSDP reduces in would have; rate: how many times fewer. weights.bytes, weights.dense,
        weights.rate: the same of weights, where these travel in codes. Raises RuntimeError where
        the transport moved other bytes than the codes have.
        """
        self._check()
        # a loop without an optimizer of torch steps once a backward
        count = self.steps or max(1, max((scatter.calls for scatter in self.parts), default=0))
        out = {
            "bytes": float(self.sent) / count,
            "dense": self.dense / count,
            "rate": self.dense / max(1.0, float(self.sent)),
        }
        if self.gathers:
            sent = float(self.weights_sent)
            out |= {
                "weights.bytes": sent / count,
                "weights.dense": self.weights_dense / count,
                "weights.rate": self.weights_dense / max(1.0, sent),
            }
        return out

    def _check(self) -> None:
        """Raise RuntimeError unless the transport was handed what the codes have, and frames.

        A gather hands its message to the transport once, for all others.
        """
        if self._loaded or len(self._collectives) != 1:
            return
        (collectives,) = self._collectives.values()
        receivers = max(1, collectives.learners - 1)
        counts = {WHAT: float(self.sent), "weights": float(self.weights_sent) / receivers}
        for label, count in counts.items():
            nbytes = collectives.sent[label] - collectives.framing[label]
            if nbytes != count:
                raise RuntimeError(
                    f"the transport moved {nbytes} bytes of {label}, and their codes have "
                    f"{count:.0f}; please report this"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return what this process remembers."""
        return {
            "calls": [scatter.calls for scatter in self.parts],
            "errors": [scatter.error for scatter in self.parts],
            "sent": float(self.sent),
            "dense": self.dense,
            "weights": [float(self.weights_sent), self.weights_dense],
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was remembered. Raises UserError on the state of another model."""
        if len(state["calls"]) != len(self.parts):
            raise UserError(
                f"the state is one of {len(state['calls'])} sharded modules, and this model has "
                f"{len(self.parts)}"
            )
        for scatter, calls, error in zip(self.parts, state["calls"], state["errors"], strict=True):
            scatter.calls, scatter.error = calls, error
        self.sent, self.dense = state.get("sent", 0), state.get("dense", 0)
        self.weights_sent, self.weights_dense = state.get("weights", (0, 0))
        self.steps, self._sent_before = state.get("steps", 0), sum(state["calls"])
        self._loaded = True


def compress_fsdp(
    model: nn.Module,
    compressor: dict[str, Any] | str,
    feedback: str = "none",
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
    weights: dict[str, Any] | str | None = None,
) -> Wire:
    """Have the gradients of every fully_shard module of the model travel in codes.

    compressor: a code whose length its shape says (those of `grad.sharded`, or a class of your own
    without a state), as settings or in a word ("uniform:4", "mine.py:RowSigns,k=4"). feedback:
    "none" or "ef" (error feedback, one memory a part). scaler: of the loss, if there is one; a step
    in which a gradient is not finite changes no memory. weights: a code of the same kinds for the
    all-gather of the weights (None: as they are). Raises UserError on a model that fully_shard has
    not touched, and where a process would send weights to nobody.
    """
    if feedback not in ("none", "ef"):
        raise UserError(f"feedback='{feedback}': choose none or ef")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UserError(
            "this model is wrapped in FullyShardedDataParallel (FSDP1), which has no hook for "
            "codes: use torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise UserError(
            "no module of this model is sharded: call torch.distributed.fsdp.fully_shard first"
        )
    wire = Wire(_settings(compressor), feedback, seed, scaler)
    if isinstance(wire.code, Own) and (wire.code.keeps or wire.code.remembers):
        raise UserError(f"compressor '{compressor}' keeps a state, which a reduce-scatter does not")
    code = None if weights is None else compressors.build(_settings(weights, "weights"))
    if code is not None:
        if code.spec.kind == "none":
            raise UserError("weights='none' has no effect; leave it out")
        if dist.get_world_size() == 1:
            raise UserError(f"weights='{weights}' has no effect with one process; leave it out")
    for index, module in enumerate(sharded):
        if code is not None:
            wire.gathers.append(CodedAllGather(wire, index, code))
            module.set_custom_all_gather(wire.gathers[-1])  # pyright: ignore[reportArgumentType]
        scatter = CodedReduceScatter(wire, index)
        module.set_custom_reduce_scatter(scatter)  # pyright: ignore[reportArgumentType]
        wire.parts.append(scatter)
    return wire


def _settings(compressor: dict[str, Any] | str, name: str = "compressor") -> dict[str, Any]:
    """Return a code's settings. Raises UserError on one whose length its shape does not say."""
    try:
        settings = in_full(compressor)
    except ValueError as error:
        raise UserError(f"{name} {error}") from None
    kind = settings.get("kind") if isinstance(settings, dict) else settings
    kinds_known = [*by_kind(ShardCode), "own"]
    if kind not in kinds_known:
        raise UserError(
            f"{name} kind '{kind}': sharded messages need codes whose length their shape "
            f"says: {', '.join(kinds_known)}"
        )
    return settings

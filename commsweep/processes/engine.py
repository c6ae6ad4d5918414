"""Packed payloads on the sends and receives of torch.distributed.pipelining.

The engine passes tensors between stages whose shape is fixed before training, and gradients of
exactly that shape. A packed message has neither: a gradient is packed with other settings than its
activation, and a length may depend on the data or the epoch (tests/test_pipelining.py shows both
refusals). So what the engine sees between stages is a ticket of one number, which carries autograd
and the schedule; whenever it asks a stage for its sends and receives, the stage hands it those of
the message instead. All of that goes through public methods of PipelineStage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from commsweep.boundary.channel import Boundary, Channel, Step, crossing
from commsweep.compressors import message
from commsweep.compressors.base import Payload
from commsweep.compressors.features import columns
from commsweep.feedback.memory import Keys
from commsweep.training import arithmetic

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass
class Side:
    """A boundary as one of its two stages sees it: what a sample's message is, and what both ends
    agreed on.
    """

    boundary: Boundary
    sample: torch.Size
    digest: bytes


@dataclass(frozen=True)
class Turn:
    """The facts that the boundaries need while one microbatch is worked on."""

    number: int
    rows: int
    keys: Keys | None


class Stage(PipelineStage):
    """A stage of the engine; between its neighbours travel packed messages."""

    def __init__(
        self,
        body: nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        step: Step,
        left: Side | None,
        right: Side | None,
        precision: Callable[[], AbstractContextManager],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """group: of this pipeline's processes, where there are more."""
        ticket = torch.zeros(1, device=device, requires_grad=True)
        super().__init__(
            _Ends(self, body, precision),
            index,
            stages,
            device,
            input_args=ticket,
            output_args=ticket,
            group=group,
        )
        self.step, self.left, self.right = step, left, right
        self.turns: dict[int, Turn] = {}  # by the microbatch's number
        self.inbox: dict[tuple[str, int], Tensor] = {}
        self.outbox: dict[tuple[str, int], Tensor] = {}
        self.sent = {"fwd": 0, "bwd": 0}  # bytes handed to send
        self.framing = {"fwd": 0, "bwd": 0}  # of these, what is not payload
        # what, microbatch, from, to, CPU seconds
        self.spans: list[tuple[str, int, float, float, float]] = []
        self.passages: list[tuple[str, str, int, float]] = []  # sent or came, way, microbatch, when
        self._exact = str(dist.get_backend()) == "gloo"  # takes a message shorter than the buffer
        self._chunk = 0

    def begin(self, turns: Sequence[Turn], first: int = 0) -> None:
        """Set what the microbatches of the next step are. first: the number of the first of
        them.
        """
        self.turns.update(enumerate(turns, first))

    # What the engine asks for.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The message of an activation instead of the ticket."""
        if not super().get_fwd_recv_ops(fwd_chunk_id):
            return []
        return [self._receive("fwd", fwd_chunk_id)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The message of a gradient instead of the ticket's."""
        if not super().get_bwd_recv_ops(bwd_chunk_id):
            return []
        return [self._receive("bwd", bwd_chunk_id)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See `get_fwd_recv_ops`."""
        if not super().get_fwd_send_ops(fwd_chunk_id):
            return []
        return [self._send(("fwd", fwd_chunk_id), self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See `get_bwd_recv_ops`."""
        if not super().get_bwd_send_ops(bwd_chunk_id):
            return []
        return [self._send(("bwd", bwd_chunk_id), self.stage_index - 1)]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The engine's, timed, at this microbatch's place in the training."""
        self._enter(fwd_chunk_id)
        with self._timed("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The engine's, timed, at this microbatch's place in the training."""
        self._enter(bwd_chunk_id)
        with self._timed("B", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    # The two ends of a message.

    def arrive(self, ticket: Tensor) -> Tensor:
        """The activation that has come, for the ticket that stands for it; its gradient is packed
        and left to send.
        """
        side, chunk = self._side("fwd"), self._chunk
        boundary, dense = side.boundary, self._message(side)
        shape = self._crossing(side)
        boundary.bwd.stretch = dense.numel() / shape.numel()

        def arrive_now(_: Tensor) -> tuple[Tensor, Tensor | None]:
            reader = self._open(("fwd", chunk), side)
            return boundary.fwd.arrive(reader, shape, want_mask=boundary.shares_mask)

        def back(grad: Tensor, mask: Tensor | None) -> Tensor:
            self._post(("bwd", chunk), side, boundary.bwd, grad, mask=mask)
            return torch.zeros_like(ticket)

        y = crossing(ticket, arrive_now, back)
        if boundary.coder is None or not boundary.codes:
            return y
        return boundary.decode(y, Payload({}, dense, y.dtype, y.device, self.channels_last))

    def depart(self, y: Tensor) -> Tensor:
        """A ticket for the activation y, which is packed and left to send; its gradient is the
        message that comes.
        """
        side, chunk = self._side("bwd"), self._chunk
        boundary = side.boundary
        if boundary.coder is not None and boundary.codes:
            y = boundary.encode(y)
        shape = y.shape

        def depart_now(y: Tensor) -> tuple[Tensor, Tensor | None]:
            mask = self._post(("fwd", chunk), side, boundary.fwd, y, want_mask=boundary.shares_mask)
            return torch.zeros(1, device=y.device), mask

        def back(_: Tensor, mask: Tensor | None) -> Tensor:
            reader = self._open(("bwd", chunk), side)
            return boundary.bwd.arrive(reader, shape, mask=mask)[0]

        return crossing(y, depart_now, back)

    channels_last = False  # the layout of images, for what a coder decodes to
    precision = "float32"  # that the stage has computed in

    def _enter(self, chunk: int) -> None:
        state = self.turns[chunk]
        self._chunk, self.step.number = chunk, state.number
        if state.keys is not None:  # none in an evaluation, which changes no memory
            self.step.keys = state.keys

    def _message(self, side: Side) -> torch.Size:
        return torch.Size([self.turns[self._chunk].rows, *side.sample])

    def _crossing(self, side: Side) -> torch.Size:
        """The shape of what crosses: an activation, or its code."""
        shape, coder = self._message(side), side.boundary.coder
        if coder is None or not side.boundary.codes:
            return shape
        width = coder.encoder.shape[1] + side.boundary.extra
        return torch.Size(
            [shape.numel() // columns(shape), width] if len(shape) == 4 else [*shape[:-1], width]
        )

    def _address(self, side: Side, direction: str) -> message.Address:
        return message.Address(
            message.digest(
                f"{side.digest.hex()} {direction} {self.step.training} {self.step.compress}"
            ),
            self.step.number,
            self._chunk,
        )

    def _open(self, chunk_address: tuple[str, int], side: Side) -> message.Reader:
        """The message that has come."""
        self.passages.append(("came", *chunk_address, time.monotonic()))
        return message.Reader(self.inbox.pop(chunk_address), self._address(side, chunk_address[0]))

    def _post(
        self, chunk_address: tuple[str, int], side: Side, channel: Channel, x: Tensor, **how: Any
    ) -> Tensor | None:
        """Pack what the channel makes of x for `_send`; returns its mask."""
        most = channel.most_bytes(x.shape, torch.float32)
        payloads, mask = channel.post(x, **how)
        packed = message.pack(payloads, self._address(side, chunk_address[0]))
        # the receiver's buffer ends there, and gloo would end the receiver
        if packed.numel() > most:
            raise RuntimeError(
                f"a message of {packed.numel()} bytes at boundary {side.boundary.name}, where "
                f"{channel.link.compressor.kind} makes {most} at most"
            )
        if not self._exact:  # a receiver's buffer must be filled to its end; the rest is framing
            packed = nn.functional.pad(packed, (0, most - packed.numel()))
        self.framing[chunk_address[0]] += packed.numel() - sum(
            payload.nbytes for payload in payloads
        )
        self.outbox[chunk_address] = packed
        return mask

    def _side(self, direction: str) -> Side:
        """Return the boundary that messages of a direction come from."""
        side = self.left if direction == "fwd" else self.right
        assert side is not None  # the engine asks for no message of an end of the pipeline
        return side

    def _receive(self, direction: str, chunk: int) -> dist.P2POp:
        self._enter(chunk)
        side = self._side(direction)
        if direction == "fwd":
            channel, source = side.boundary.fwd, self.stage_index - 1
        else:
            channel, source = side.boundary.bwd, self.stage_index + 1
        chunk_address = direction, chunk
        most = channel.most_bytes(self._crossing(side), torch.float32)
        self.inbox[chunk_address] = torch.empty(most, dtype=torch.uint8, device=self.device)
        return dist.P2POp(dist.irecv, self.inbox[chunk_address], self._rank(source), self.group)

    def _send(self, chunk_address: tuple[str, int], target: int) -> dist.P2POp:
        packed = self.outbox.pop(chunk_address)
        self.sent[chunk_address[0]] += packed.numel()
        self.passages.append(("sent", *chunk_address, time.monotonic()))
        return dist.P2POp(dist.isend, packed, self._rank(target), self.group)

    def _rank(self, stage: int) -> int:
        rank = self.stage_index_to_group_rank[stage]
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _timed(self, kind: str, chunk: int) -> _Span:
        return _Span(self.spans, kind, chunk)


class _Span:
    """Notes when something began and ended, and the CPU seconds of this thread in between."""

    def __init__(
        self, spans: list[tuple[str, int, float, float, float]], kind: str, chunk: int
    ) -> None:
        self.spans, self.what, self.chunk = spans, kind, chunk

    def __enter__(self) -> None:
        self.began, self.busy = time.monotonic(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.spans.append(
            (self.what, self.chunk, self.began, time.monotonic(), time.thread_time() - self.busy)
        )


class _Ends(nn.Module):
    """A stage's computation between the message that comes and the one that goes."""

    def __init__(
        self, stage: Stage, body: nn.Module, precision: Callable[[], AbstractContextManager]
    ) -> None:
        super().__init__()
        self.body = body
        self._stage, self._precision = (
            [stage],
            precision,
        )  # in a list: the stage owns this module, not the reverse

    def forward(self, x: Tensor) -> Tensor:
        """A ticket, or the first stage's input -> a ticket, or the last stage's output."""
        stage = self._stage[0]
        if stage.left is not None:
            x = stage.arrive(x)
        elif not x.is_floating_point():
            stage.step.tokens = x
        with self._precision():
            stage.precision = arithmetic.installed(
                torch.bfloat16 if torch.is_autocast_enabled(stage.device.type) else torch.float32
            )
            y = self.body(x)
        return stage.depart(y) if stage.right is not None else y

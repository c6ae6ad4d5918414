"""The feedbacks of boundaries, which remember between steps. One message goes out per call, and
only training changes a memory.

Notation: x the tensor at the boundary, C the compressor, y what the receiver uses. Every feedback
gets a `sender` (its `send` compresses, counts and returns what arrives; `send_dense` does not
compress) and `keys`, the rows of the memory that belong to this batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from commsweep.compressors import Compressor, message
from commsweep.compressors.base import channels_last
from commsweep.compressors.kernels import gpu
from commsweep.config.base import Implementations
from commsweep.config.feedback import (
    AQSGDSpec,
    EF21Spec,
    EFMixedSpec,
    EFSpec,
    FeedbackSpec,
    sample_keyed,
)
from commsweep.feedback.memory import AnyMemory, Keys, MappedMemory, Memory

FEEDBACKS = Implementations()


class Sender(Protocol):
    """The sender's side of a feedback."""

    def send(self, x: Tensor) -> Tensor: ...
    def send_remembered(self, x: Tensor, memory: Tensor, kind: int) -> Tensor | None: ...
    def send_halves(self, x: Tensor, e: Tensor) -> Tensor: ...
    def send_dense(self, x: Tensor) -> Tensor: ...
    def sent_rows(self, rows: Tensor, batch: int) -> None: ...


class Receiver(Protocol):
    """The receiver's side of a feedback."""

    def receive(self, shape: torch.Size) -> Tensor: ...
    def receive_halves(self, shape: torch.Size) -> Tensor: ...
    def receive_dense(self, shape: torch.Size) -> Tensor: ...
    def sent_rows(self, rows: Tensor, batch: int) -> None: ...


class Feedback(nn.Module):
    """No memory: y = C(x). Base of the others.

    Where sender and receiver are processes, each has the feedback, and `send` at one end goes with
    `receive` at the other: both leave the same memory behind, where the receiver has any.
    """

    needs_arrival = True  # whether the sender needs what arrives

    def __init__(self, spec: FeedbackSpec) -> None:
        super().__init__()
        self.spec = spec

    def send(self, sender: Sender, x: Tensor, keys: Keys) -> Tensor:
        """Send one training message and remember what the method remembers. Returns what the
        receiver uses.
        """
        return sender.send(x)

    def receive(self, receiver: Receiver, shape: torch.Size, keys: Keys) -> Tensor:
        """Return what the receiver uses, of this shape; `keys`: as the sender's."""
        return receiver.receive(shape)

    def most_bytes(
        self, compressor: Compressor, shape: torch.Size, dtype: torch.dtype, keys: Keys
    ) -> int:
        """Bytes of a training message at most, its framing included."""
        return message.most_bytes(compressor, shape, dtype)

    def saw_dense(self, x: Tensor, keys: Keys) -> None:
        """x travelled uncompressed (a warm-start epoch)."""


class Remembering(Feedback):
    """A feedback with a memory: one row a batch slot, or a training sample."""

    memory: AnyMemory

    def __init__(self, spec: FeedbackSpec, memory: AnyMemory) -> None:
        super().__init__(spec)
        self.memory = memory


@FEEDBACKS.of(EFSpec)
class EF(Remembering):
    """y = C(x + e); e <- x + e - y, so that sum(y) + e == sum(x) at any time (Seide 2014, Stich
    2018).
    """

    def send(self, sender: Sender, x: Tensor, keys: Keys) -> Tensor:
        e = self.memory.read(keys)
        y = sender.send_remembered(x, e, gpu.EF)
        if y is not None:
            self.memory.write(keys, e)
            return y
        e.add_(x)
        y = sender.send(e.to(x.dtype))
        # everything was kept, and what arrives must outlive the memory
        if y.data_ptr() == e.data_ptr():
            y = y.clone()
        self.memory.write(keys, e.sub_(y))
        return y


@FEEDBACKS.of(EFMixedSpec)
class EFMixed(Remembering):
    """y = C_half(x) + C_half(e); e <- x + e - y. It telescopes like EF. The reading of "mixed" is
    ours.
    """

    def send(self, sender: Sender, x: Tensor, keys: Keys) -> Tensor:
        e = self.memory.read(keys)
        y = sender.send_halves(x, e.to(x.dtype))
        self.memory.write(keys, e.add_(x).sub_(y))
        return y

    def receive(self, receiver: Receiver, shape: torch.Size, keys: Keys) -> Tensor:
        return receiver.receive_halves(shape)

    def most_bytes(
        self, compressor: Compressor, shape: torch.Size, dtype: torch.dtype, keys: Keys
    ) -> int:
        return message.most_bytes(compressor.halved(), shape, dtype, payloads=2)


@FEEDBACKS.of(EF21Spec)
class EF21(Remembering):
    """y = A <- A + C(x - A): the state is the sum of all messages (Richtarik 2021)."""

    def send(self, sender: Sender, x: Tensor, keys: Keys) -> Tensor:
        a = self.memory.read(keys)
        if sender.send_remembered(x, a, gpu.EF21) is not None:
            self.memory.write(keys, a)
            return a.clone()
        return self._moved(a, sender.send((x - a).to(x.dtype)), keys)

    def receive(self, receiver: Receiver, shape: torch.Size, keys: Keys) -> Tensor:
        a = self.memory.read(keys)
        return self._moved(a, receiver.receive(shape), keys)

    def _moved(self, a: Tensor, m: Tensor, keys: Keys) -> Tensor:
        a += m
        self.memory.write(keys, a)
        return a.to(m.dtype, copy=not self.memory.by_sample)  # never hand out the memory itself

    def saw_dense(self, x: Tensor, keys: Keys) -> None:
        self.memory.write(keys, x)


@FEEDBACKS.of(AQSGDSpec)
class AQSGD(Remembering):
    """Per sample i: first visit y = m_i <- x, sent dense; later y = m_i <- m_i + C(x - m_i) (Wang
    2022, Alg. 1).

    Both ends hold m in the buffer's type, so what is used downstream is what is stored.
    """

    def __init__(self, spec: FeedbackSpec, memory: AnyMemory) -> None:
        super().__init__(spec, memory)
        self.visited = Visited(memory.slots)

    def send(self, sender: Sender, x: Tensor, keys: Keys) -> Tensor:
        visited = self.visited.state[keys.samples]
        if visited.all():  # a host tensor: no device is waited for
            return self._difference(lambda m: sender.send(x - m.to(x.dtype)), keys)
        if not visited.any():
            self.saw_dense(x, keys)
            return sender.send_dense(x)
        y = torch.empty_like(x)
        old, new = (
            rows.nonzero()[:, 0].to(x.device, non_blocking=True) for rows in (visited, ~visited)
        )
        y[old] = self._difference(
            lambda m: sender.send(x[old] - m.to(x.dtype)), keys.subset(visited)
        )
        sender.sent_rows(old, len(x))
        y[new] = sender.send_dense(x[new])
        self.saw_dense(x[new], keys.subset(~visited))
        return y

    def receive(self, receiver: Receiver, shape: torch.Size, keys: Keys) -> Tensor:
        visited = self.visited.state[keys.samples]
        n = int(visited.sum())
        if n == len(visited):
            return self._difference(lambda m: receiver.receive(shape), keys)
        arrived_by = {}
        if n:
            size = torch.Size([n, *shape[1:]])
            arrived_by[True] = self._difference(
                lambda m: receiver.receive(size), keys.subset(visited)
            )
            if n < len(visited):
                receiver.sent_rows(visited.nonzero()[:, 0], len(visited))
        first = receiver.receive_dense(torch.Size([len(visited) - n, *shape[1:]]))
        self.saw_dense(first, keys.subset(~visited))
        if not n:
            return first
        y = torch.empty(
            shape,
            dtype=first.dtype,
            device=first.device,
            memory_format=torch.channels_last if channels_last(first) else torch.contiguous_format,
        )
        for rows, rows_arrived in ((visited, arrived_by[True]), (~visited, first)):
            y[rows.nonzero()[:, 0].to(y.device, non_blocking=True)] = rows_arrived
        return y

    def most_bytes(
        self, compressor: Compressor, shape: torch.Size, dtype: torch.dtype, keys: Keys
    ) -> int:
        visited = int(self.visited.state[keys.samples].sum())
        dense = message.most_framing(2) + (shape[0] - visited) * shape[1:].numel() * dtype.itemsize
        return dense + (
            compressor.most_bytes(torch.Size([visited, *shape[1:]]), dtype) if visited else 0
        )

    def saw_dense(self, x: Tensor, keys: Keys) -> None:
        self.memory.write(keys, x)
        self.visited.state[keys.samples] = True

    def _difference(self, transmit: Callable[[Tensor], Tensor], keys: Keys) -> Tensor:
        m = self.memory.read(keys)
        d = transmit(m)
        m = (m + d).to(self.memory.dtype)
        self.memory.write(keys, m)
        return m.to(d.dtype)


class Visited(nn.Module):
    """The samples that have been sent once; a host buffer, because the decision is taken on the
    host.
    """

    state: Tensor

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(samples, dtype=torch.bool))

    def _apply(self, fn, recurse: bool = True):
        return self


def buffer_dtype(spec: FeedbackSpec) -> torch.dtype:
    """The type a feedback's memory is stored in."""
    return getattr(torch, getattr(spec, "buffer", "float32"))


def memory_bytes(spec: FeedbackSpec, sample: torch.Size, batch_size: int, n_samples: int) -> int:
    """Bytes of a feedback's memory for messages of this sample shape."""
    if spec.kind == "none":
        return 0
    slots = n_samples if sample_keyed(spec) else batch_size
    return slots * sample.numel() * buffer_dtype(spec).itemsize


def build(
    spec: FeedbackSpec,
    sample: torch.Size,
    batch_size: int,
    n_samples: int,
    channels_last: bool = False,
    file: Path | None = None,
    device: torch.device | None = None,
) -> Feedback:
    """The feedback of a spec, its memory allocated on the device; a sample-keyed one lies in `file`
    if that is given.
    """
    if spec.kind == "none":
        plain = Feedback(spec)
        plain.needs_arrival = False
        return plain
    by_sample = sample_keyed(spec)
    slots = n_samples if by_sample else batch_size
    memory = (
        MappedMemory(slots, sample, buffer_dtype(spec), file)
        if by_sample and file is not None
        else Memory(slots, sample, buffer_dtype(spec), by_sample, channels_last, device)
    )
    return FEEDBACKS[spec.kind](spec, memory)

"""What is remembered between steps. One message goes out per call, and only training changes a memory.

Notation: x the tensor at the boundary, C the compressor, y what the receiver uses. Every feedback gets a
`wire` (its `send` compresses, counts and returns what arrives; `send_dense` does not compress) and
`keys`, the rows of the memory that belong to this batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from experiments.memory import AnyMemory, Keys, MappedMemory, Memory
from experiments.specs import Spec


class Wire(Protocol):
    """How a feedback puts messages on the wire."""

    def send(self, x: Tensor) -> Tensor: ...
    def send_halves(self, x: Tensor, e: Tensor) -> Tensor: ...
    def send_dense(self, x: Tensor) -> Tensor: ...


class Feedback(nn.Module):
    """No memory: y = C(x). Base of the others."""

    def __init__(self, spec: Spec, memory: AnyMemory | None = None) -> None:
        super().__init__()
        self.spec, self.memory = spec, memory

    def send(self, wire: Wire, x: Tensor, keys: Keys) -> Tensor:
        """Send one training message and remember what the method remembers. Returns what the receiver uses."""
        return wire.send(x)

    def saw_dense(self, x: Tensor, keys: Keys) -> None:
        """x travelled uncompressed (a warm-start epoch)."""


class EF(Feedback):
    """y = C(x + e); e <- x + e - y, so that sum(y) + e == sum(x) at any time (Seide 2014, Stich 2018)."""

    def send(self, wire: Wire, x: Tensor, keys: Keys) -> Tensor:
        e = self.memory.read(keys).add_(x)
        y = wire.send(e.to(x.dtype))
        if y.data_ptr() == e.data_ptr():  # everything was kept, and what arrives must outlive the memory
            y = y.clone()
        self.memory.write(keys, e.sub_(y))
        return y


class EFMixed(Feedback):
    """y = C_half(x) + C_half(e); e <- x + e - y. It telescopes like EF. The reading of "mixed" is ours."""

    def send(self, wire: Wire, x: Tensor, keys: Keys) -> Tensor:
        e = self.memory.read(keys)
        y = wire.send_halves(x, e.to(x.dtype))
        self.memory.write(keys, e.add_(x).sub_(y))
        return y


class EF21(Feedback):
    """y = A <- A + C(x - A): the state is the sum of all messages (Richtarik 2021)."""

    def send(self, wire: Wire, x: Tensor, keys: Keys) -> Tensor:
        a = self.memory.read(keys)
        a += wire.send((x - a).to(x.dtype))
        self.memory.write(keys, a)
        return a.to(x.dtype, copy=not self.memory.by_sample)  # never hand out the memory itself

    def saw_dense(self, x: Tensor, keys: Keys) -> None:
        self.memory.write(keys, x)


class AQSGD(Feedback):
    """Per sample i: first visit y = m_i <- x, sent dense; later y = m_i <- m_i + C(x - m_i) (Wang 2022, Alg. 1).

    Both ends hold m in the buffer's type, so what is used downstream is what is stored.
    """

    def __init__(self, spec: Spec, memory: AnyMemory) -> None:
        super().__init__(spec, memory)
        self.visited = Visited(memory.slots)

    def send(self, wire: Wire, x: Tensor, keys: Keys) -> Tensor:
        seen = self.visited.state[keys.samples]
        if seen.all():  # a host tensor: no device is waited for
            return self._difference(wire, x, keys)
        if not seen.any():
            self.saw_dense(x, keys)
            return wire.send_dense(x)
        y = torch.empty_like(x)
        for rows, part in ((seen, self._difference), (~seen, self._first)):
            where = rows.nonzero()[:, 0].to(x.device, non_blocking=True)
            y[where] = part(wire, x[where], keys.subset(rows))
        return y

    def saw_dense(self, x: Tensor, keys: Keys) -> None:
        self.memory.write(keys, x)
        self.visited.state[keys.samples] = True

    def _first(self, wire: Wire, x: Tensor, keys: Keys) -> Tensor:
        self.saw_dense(x, keys)
        return wire.send_dense(x)

    def _difference(self, wire: Wire, x: Tensor, keys: Keys) -> Tensor:
        m = self.memory.read(keys)
        m = (m + wire.send(x - m.to(x.dtype))).to(self.memory.dtype)
        self.memory.write(keys, m)
        return m.to(x.dtype)


class Visited(nn.Module):
    """Which samples have been sent once; a host buffer, because the decision is taken on the host."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(samples, dtype=torch.bool))

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        return self


KINDS: dict[str, type[Feedback]] = {"none": Feedback, "ef": EF, "ef_mixed": EFMixed, "ef21": EF21, "aqsgd": AQSGD}


def sample_keyed(spec: Spec) -> bool:
    """Whether the memory holds one row a training sample (else one a batch slot)."""
    return spec.kind == "aqsgd" or getattr(spec, "key", "slot") == "sample"


def buffer_dtype(spec: Spec) -> torch.dtype:
    """The type a feedback's memory is stored in."""
    return getattr(torch, getattr(spec, "buffer", "float32"))


def memory_bytes(spec: Spec, sample: torch.Size, batch_size: int, n_samples: int) -> int:
    """Bytes of a feedback's memory for messages of this sample shape."""
    if spec.kind == "none":
        return 0
    slots = n_samples if sample_keyed(spec) else batch_size
    return slots * sample.numel() * buffer_dtype(spec).itemsize


def build(spec: Spec, sample: torch.Size, batch_size: int, n_samples: int, channels_last: bool = False,
          file: Path | None = None) -> Feedback:
    """The feedback of a spec, its memory allocated; a sample-keyed one lies in `file` if that is given."""
    if spec.kind == "none":
        return Feedback(spec)
    by_sample = sample_keyed(spec)
    slots = n_samples if by_sample else batch_size
    memory = (MappedMemory(slots, sample, buffer_dtype(spec), file) if by_sample and file is not None else
              Memory(slots, sample, buffer_dtype(spec), by_sample, channels_last))
    return KINDS[spec.kind](spec, memory)

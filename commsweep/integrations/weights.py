"""Weights as messages: a trainer publishes each step's weights to any number of receivers, without
loss.

An update holds the places that changed and their bits, exclusive-or of old and new. Places travel
as Rice codes of gaps or as a bit mask, bits as byte planes under rANS, each in the shorter form. A
full snapshot stands at the start and every so many updates, for receivers that come late or lost a
message. Nothing is pickled. Sparse lossless updates for reinforcement learning: PULSE, arXiv
2602.03839.

    sender = WeightSender(model, Folder("weights"), dtype=torch.bfloat16)
    sender.publish(step)                       # after the optimizer's step
    receiver = WeightReceiver(Folder("weights"), generator)
    receiver.update()                          # the newest step that was published
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from commsweep.compressors import rans, rice
from commsweep.compressors.kernels.changes import change, changes, complement
from commsweep.errors import UserError

# magic, 1 for a full snapshot, step, step before, digest of the message before, bytes of the body
HEADER = struct.Struct("<4sBqq16sQ")
MAGIC, DIGEST = b"CSW1", 16
SECTION = struct.Struct("<BBQQ")  # form, parameter, count, bytes
RAW, CODED, CONSTANT, MASK, CHANGED, UNCHANGED, ALL = range(7)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FULL_EVERY = 64


@dataclass(frozen=True)
class Published:
    """A message of weights: its step, whether it is a full snapshot, its bytes, the share of
    entries that changed, and the bytes of all weights.
    """

    step: int
    full: bool
    nbytes: int
    changed: float
    dense: int
    data: bytes


@dataclass(frozen=True)
class Head:
    """The fields of a message that its receiver needs before it reads the body."""

    full: bool
    step: int
    base: int
    chain: bytes  # digest of the message before; zeros of a full one
    digest: bytes
    body: memoryview


class Transport(Protocol):
    """The way of messages from a sender to its receivers."""

    def send(self, message: Published) -> None:
        """Send a message."""
        ...

    def after(self, step: int | None) -> Iterable[bytes]:
        """Return the messages that lead from a step (None: from nothing) to the newest one."""
        ...


class Folder:
    """Messages as files of a folder, whole or not there; the updates before the last `keep` full
    snapshots are removed.
    """

    def __init__(self, path: str | Path, keep: int = 2) -> None:
        self.path, self.keep = Path(path), keep

    def send(self, message: Published) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        kind = "full" if message.full else "update"
        partial = self.path / ".part"
        partial.write_bytes(message.data)
        partial.replace(self.path / f"{message.step:012}.{kind}")
        snapshots = sorted(self.path.glob("*.full"))
        if len(snapshots) > self.keep:
            oldest = snapshots[-self.keep].name
            for path in (*self.path.glob("*.full"), *self.path.glob("*.update")):
                if path.name < oldest:
                    path.unlink()

    def after(self, step: int | None) -> Iterator[bytes]:
        """Raises UserError where a late receiver finds no full snapshot."""
        files = {int(path.stem): path for path in sorted(self.path.glob("*.update"))}
        snapshots = {int(path.stem): path for path in self.path.glob("*.full")}
        newer = [number for number in files if step is not None and number > step]
        if step is None or (newer and not self._follows(files[min(newer)], step)):
            later = [number for number in snapshots if step is None or number > step]
            if not later:
                if step is None and not files:
                    return
                raise UserError(
                    f"'{self.path}': no full snapshot after step {step}, and a message between is "
                    "missing; wait for the next full snapshot"
                )
            step = max(later)
            yield snapshots[step].read_bytes()
        for number in sorted(files.keys() | snapshots.keys()):
            if number > step:
                yield (files.get(number) or snapshots[number]).read_bytes()

    def _follows(self, path: Path, step: int) -> bool:
        with open(path, "rb") as handle:
            return HEADER.unpack(handle.read(HEADER.size))[3] == step


class Broadcast:
    """Messages by torch.distributed, from one process of a group to all others, which must all
    take part: each `publish` there is one `update` here.
    """

    def __init__(self, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.source, self.group = source, group

    def send(self, message: Published) -> None:
        self._send(torch.tensor([len(message.data)]))
        self._send(torch.frombuffer(bytearray(message.data), dtype=torch.uint8))

    def after(self, step: int | None) -> Iterator[bytes]:
        length = torch.zeros(1, dtype=torch.int64)
        self._send(length)
        data = torch.zeros(int(length), dtype=torch.uint8)
        self._send(data)
        yield data.numpy().tobytes()

    def _send(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, self.source, self.group)


class WeightSender:
    """Publishes the weights of a model, or of tensors by name.

    dtype: what floating-point weights are rounded to before they travel; None: as they are.
    full_every: messages from one full snapshot to the next. Memory: one copy of what travels.
    """

    def __init__(
        self,
        weights: nn.Module | Mapping[str, Tensor],
        transport: Transport | None = None,
        dtype: torch.dtype | None = None,
        full_every: int = FULL_EVERY,
    ) -> None:
        """Raises UserError on weights of a type without bits."""
        self.weights, self.transport, self.dtype = weights, transport, dtype
        self.full_every, self._since_full = full_every, 0
        self._sent: dict[str, Tensor] = {}
        self._step, self._chain = -1, bytes(DIGEST)

    def publish(self, step: int) -> Published:
        """Send what has changed since the step before. Raises UserError on a step that is not
        later.
        """
        message = self.encode(step)
        if self.transport is not None:
            self.transport.send(message)
        return message

    def encode(self, step: int) -> Published:
        """Return the message of a step, for a transport of your own: `data` is what travels."""
        if step <= self._step:
            raise UserError(f"step {step} was published already, or step {self._step} after it")
        tensors = _host(self.weights, self.dtype)
        full = not self._sent or self._since_full >= self.full_every
        dense = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        entries = sum(tensor.numel() for tensor in tensors.values())
        if full:
            body, changed = _snapshot(tensors), entries
        else:
            body, changed = _update(self._sent, tensors)
        chain = bytes(DIGEST) if full else self._chain
        head = HEADER.pack(MAGIC, full, step, self._step, chain, len(body))
        digest = _digest(head, body)
        self._sent, self._step, self._chain = tensors, step, digest
        self._since_full = 1 if full else self._since_full + 1
        data = head + body + digest
        return Published(step, full, len(data), changed / max(1, entries), dense, data)


class WeightReceiver:
    """Follows a sender; its tensors are the sender's, bit for bit, and change in place.

    model: whose weights are set, by name, in its own types; None: `tensors` alone.
    """

    def __init__(self, transport: Transport | None = None, model: nn.Module | None = None) -> None:
        self.transport, self.model = transport, model
        self.tensors: dict[str, Tensor] = {}
        self.step: int | None = None
        self._chain = bytes(DIGEST)

    def update(self) -> int | None:
        """Take all messages that the transport has, and return the step reached; None while nothing
        was published. Raises UserError on a lost or damaged message; the weights are then those of
        the step before.
        """
        assert self.transport is not None
        for data in self.transport.after(self.step):
            self.apply(data)
        return self.step

    def apply(self, data: bytes) -> int:
        """Take one message. Raises UserError as `update` does."""
        head = read_head(data)
        if head.full:
            tensors = _from_snapshot(head.body)
        elif self.step is None or head.chain != self._chain:
            where = "nothing" if self.step is None else f"step {self.step}"
            raise UserError(
                f"the update of step {head.step} follows step {head.base}, and this receiver has "
                f"{where}: a message was lost; the next full snapshot mends it"
            )
        else:
            tensors = self.tensors
            _updated(tensors, head.body)
        if self.model is not None:
            _load(self.model, tensors)
        self.tensors, self.step, self._chain = tensors, head.step, head.digest
        return head.step


def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own_tensors = _named(model)
    for name, tensor in tensors.items():
        if name not in own_tensors or own_tensors[name].shape != tensor.shape:
            raise UserError(
                f"the model has no weight '{name}' of shape {list(tensor.shape)}, which the sender "
                "publishes"
            )
    for name, tensor in tensors.items():
        own_tensors[name].detach().copy_(tensor)


def read_head(data: bytes) -> Head:
    """Return what a message says of itself. Raises UserError on bytes that are none, or damaged."""
    if len(data) < HEADER.size + DIGEST or data[:4] != MAGIC:
        raise UserError(f"{len(data)} bytes are no message of weights")
    _, full, step, base, chain, length = HEADER.unpack(data[: HEADER.size])
    body = memoryview(data)[HEADER.size : -DIGEST]
    digest = data[-DIGEST:]
    if len(body) != length or _digest(data[: HEADER.size], body) != digest:
        raise UserError(f"the message of step {step} is damaged: its digest does not match")
    return Head(bool(full), step, base, chain, digest, body)


@dataclass(frozen=True)
class Changes:
    """The size of one weight update: entries, how many changed, and bytes of the update without
    loss and by its entropy.
    """

    entries: int
    changed: int
    nbytes: int
    entropy: float


def changes_of(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Changes:
    """Return the size of the update from some weights to others, which have the same names and
    shapes; dtype: that they travel in (None: their own).
    """
    tensors = [_host(weights, dtype) for weights in (before, after)]
    body, changed = _update(*tensors)
    entries = sum(tensor.numel() for tensor in tensors[1].values())
    return Changes(entries, changed, len(body), entropy(*tensors))


def entropy(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Return the bytes that an update has by its entropy: of changed places, tensor by tensor, and
    of the byte planes of changed bits.
    """
    total = 0.0
    bits_by_size: dict[int, list[np.ndarray]] = {}
    for name, tensor in after.items():
        positions, bits = changes(_bits(before[name]).numpy(), _bits(tensor).numpy())
        n, k = tensor.numel(), len(positions)
        total += _entropy(np.array([k, n - k]))
        bits_by_size.setdefault(tensor.element_size(), []).append(bits)
    for size, values in bits_by_size.items():
        for plane in _planes(np.concatenate(values), size):
            total += _entropy(np.bincount(plane, minlength=256))
    return total / 8


def _entropy(counts: np.ndarray) -> float:
    """Return the bits of so many symbols by their frequencies."""
    present = counts[counts > 0].astype(float)
    return float((present * np.log2(present.sum() / present)).sum())


def _named(weights: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name; of tied ones the first name."""
    tensors = weights.state_dict() if isinstance(weights, nn.Module) else weights
    named: dict[str, Tensor] = {}
    seen_at: set[tuple[int, torch.Size]] = set()
    for name, tensor in tensors.items():
        address = tensor.data_ptr(), tensor.shape
        if tensor.numel() and address in seen_at:
            continue
        seen_at.add(address)
        named[name] = tensor
    return named


def _host(
    weights: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return copies in host memory of what travels."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in _named(weights).items():
        if tensor.is_complex() or tensor.element_size() not in BITS:
            raise UserError(f"weight '{name}' is of {tensor.dtype}, which no message holds")
        rounded = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", rounded, copy=True).contiguous()
    return tensors


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as whole numbers [n], a view."""
    return tensor.reshape(-1).view(BITS[tensor.element_size()])


def _planes(bits: np.ndarray, size: int) -> list[np.ndarray]:
    """Return the bytes of whole numbers [n], plane by plane, lowest first."""
    octets = bits.view(np.uint8).reshape(-1, size)
    return [np.ascontiguousarray(octets[:, plane]) for plane in range(size)]


def _snapshot(tensors: Mapping[str, Tensor]) -> bytes:
    manifest = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in tensors.items()
    ]
    text = json.dumps(manifest).encode()
    sections = [_section(RAW, 0, len(text), text)]
    for size in BITS:
        values = [
            _bits(tensor).numpy() for tensor in tensors.values() if tensor.element_size() == size
        ]
        if values:
            sections += [_coded(plane) for plane in _planes(np.concatenate(values), size)]
    return b"".join(sections)


def _from_snapshot(body: memoryview) -> dict[str, Tensor]:
    reader = _Reader(body)
    manifest = json.loads(bytes(reader.section()[3]))
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in manifest
    }
    for size in BITS:
        group = [tensor for tensor in tensors.values() if tensor.element_size() == size]
        if not group:
            continue
        counts = [tensor.numel() for tensor in group]
        bits = torch.from_numpy(reader.whole_numbers(size, sum(counts)))
        for tensor, values in zip(group, bits.split(counts), strict=True):
            _bits(tensor).copy_(values)
    reader.finish()
    return tensors


def _update(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """Return (body, entries that changed). Raises UserError where the tensors are others."""
    sections: list[bytes] = []
    values: dict[int, list[np.ndarray]] = {}
    count = 0
    for name, tensor in after.items():
        if name not in before or before[name].shape != tensor.shape:
            raise UserError(f"weight '{name}' was not published before; make another WeightSender")
        positions, bits = changes(_bits(before[name]).numpy(), _bits(tensor).numpy())
        sections.append(_positions_section(positions, tensor.numel()))
        values.setdefault(tensor.element_size(), []).append(bits)
        count += len(positions)
    for size in sorted(values):
        sections += [_coded(plane) for plane in _planes(np.concatenate(values[size]), size)]
    return b"".join(sections), count


def _updated(tensors: Mapping[str, Tensor], body: memoryview) -> None:
    """Change tensors in place, once the whole body was read."""
    reader = _Reader(body)
    positions = {name: reader.positions(tensor.numel()) for name, tensor in tensors.items()}
    values: dict[str, np.ndarray] = {}
    for size in BITS:
        group = [name for name, tensor in tensors.items() if tensor.element_size() == size]
        if group:
            counts = [len(positions[name]) for name in group]
            bits = reader.whole_numbers(size, sum(counts))
            values |= zip(group, np.split(bits, np.cumsum(counts)[:-1]), strict=True)
    reader.finish()
    for name, tensor in tensors.items():
        change(_bits(tensor).numpy(), positions[name], values[name])


def _section(form: int, parameter: int, count: int, data: bytes) -> bytes:
    return SECTION.pack(form, parameter, count, len(data)) + data


def _positions_section(positions: np.ndarray, n: int) -> bytes:
    """Return the section of ascending places among n, in its shortest form."""
    k = len(positions)
    if k in (0, n):
        return _section(ALL, 0, k, b"")
    form, written = CHANGED, positions
    if 2 * k > n:
        form, written = UNCHANGED, np.empty(n - k, np.int64)
        complement(positions, written)
    b = rice.parameter(len(written), n)
    code = rice.encode(written, b).tobytes()
    if len(code) < (n + 7) // 8:
        return _section(form, b, k, code)
    mask = np.zeros(n, np.bool_)
    mask[positions] = True
    return _section(MASK, 0, k, np.packbits(mask, bitorder="little").tobytes())


def _coded(plane: np.ndarray) -> bytes:
    """Return the section of a byte plane: one byte where all are equal, else under rANS with its
    table, or as it is.
    """
    counts = rans.counted(torch.from_numpy(plane), 8, len(plane))
    if len(plane) and int(counts.max()) == len(plane):
        return _section(CONSTANT, int(plane[0]), len(plane), b"")
    if len(plane) and int(rans.coded_bytes(counts)) < len(plane):
        table = rans.frequencies(counts).numpy()
        stream = rans.encode(plane, table).tobytes()
        return _section(CODED, 0, len(plane), table.astype("<u2").tobytes() + stream)
    return _section(RAW, 0, len(plane), plane.tobytes())


class _Reader:
    """Takes a body apart. Raises UserError on bytes that are no body."""

    def __init__(self, body: memoryview) -> None:
        self.body, self.position = body, 0

    def section(self) -> tuple[int, int, int, memoryview]:
        """Return (form, parameter, count, data) of the next section."""
        start = self.position + SECTION.size
        if start > len(self.body):
            raise UserError("a message of weights ends too early")
        form, parameter, count, length = SECTION.unpack(self.body[self.position : start])
        self.position = start + length
        if self.position > len(self.body):
            raise UserError("a message of weights ends too early")
        return form, parameter, count, self.body[start : self.position]

    def positions(self, n: int) -> np.ndarray:
        """Return the next places among n, ascending, int64."""
        form, parameter, k, data = self.section()
        octets = np.frombuffer(data, np.uint8)
        if form == ALL and k in (0, n):
            return np.arange(k)
        if form == CHANGED and k <= n:
            return _within(rice.decode(octets, k, parameter), n)
        if form == UNCHANGED and k <= n:
            unchanged = _within(rice.decode(octets, n - k, parameter), n)
            positions = np.empty(k, np.int64)
            complement(unchanged, positions)
            return positions
        if form == MASK and len(octets) == (n + 7) // 8:
            return np.flatnonzero(np.unpackbits(octets, count=n, bitorder="little"))
        raise UserError("a message of weights has places that are none of this model's")

    def whole_numbers(self, size: int, count: int) -> np.ndarray:
        """Return the next `count` whole numbers of so many bytes."""
        octets = np.empty((count, size), np.uint8)
        for plane in range(size):
            form, parameter, length, data = self.section()
            if length != count:
                raise UserError(f"a message of weights has {length} values for {count} places")
            raw = np.frombuffer(data, np.uint8)
            if form == CONSTANT:
                octets[:, plane] = parameter
            elif form == CODED:
                table = raw[:512].view("<u2").astype(np.int64)
                octets[:, plane] = rans.decode(raw[512:], table, count)
            elif len(raw) == count:
                octets[:, plane] = raw
            else:
                raise UserError(f"a message of weights has {len(raw)} bytes for {count} values")
        return octets.reshape(-1).view(f"<i{size}" if size > 1 else np.uint8)

    def finish(self) -> None:
        """Refuse what is left over."""
        if self.position != len(self.body):
            raise UserError("a message of weights has bytes behind its end")


def _within(positions: np.ndarray, n: int) -> np.ndarray:
    if len(positions) and int(positions[-1]) >= n:
        raise UserError("a message of weights has places that are none of this model's")
    return positions


def _digest(head: bytes, body: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(head, digest_size=DIGEST)
    digest.update(body)
    return digest.digest()

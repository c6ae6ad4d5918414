"""Weights as messages: a trainer publishes each step's weights to any number of receivers, without
loss.

An update holds the places that changed and their bits, exclusive-or of old and new. Places travel
as Rice codes of gaps or as a bit mask, bits as byte planes under rANS, each in the shorter form. A
full snapshot stands at the start and every so many updates, for receivers that come late or lost a
message. A sender that begins anew, from an older checkpoint for instance, is another run: its first
message is a full snapshot, and receivers follow it, backwards too. Nothing is pickled. Sparse
lossless updates for reinforcement learning: PULSE, arXiv 2602.03839.

    sender = WeightSender(model, Folder("weights"), dtype=torch.bfloat16)
    sender.publish(step)                       # after the optimizer's step
    receiver = WeightReceiver(Folder("weights"), generator)
    receiver.update()                          # the newest step that was published
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
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

# magic, 1 for a full snapshot, run of the sender, step, step before, digest of the message before,
# bytes of the body
HEADER = struct.Struct("<4sB8sqq16sQ")
MAGIC, DIGEST, RUN = b"CSW2", 16, 8
EARLIER = b"CSW1"
FILE = re.compile(r"(?:(\d+)-)?(\d+)\.(full|update)")
SECTION = struct.Struct("<BBQQ")  # form, parameter, count, bytes
RAW, CODED, CONSTANT, MASK, CHANGED, UNCHANGED, ALL = range(7)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FULL_EVERY = 64
TRIES = 20  # to read messages that their sender removes meanwhile


@dataclass(frozen=True)
class Published:
    """A message of weights: the run of its sender, its step, whether it is a full snapshot, its
    bytes, the share of entries that changed, and the bytes of all weights.
    """

    run: bytes
    step: int
    full: bool
    nbytes: int
    changed: float
    dense: int
    data: bytes


@dataclass(frozen=True)
class Position:
    """The message that a receiver has last taken: the run of its sender, and its step."""

    run: bytes
    step: int


@dataclass(frozen=True)
class Head:
    """The fields of a message that its receiver needs before it reads the body."""

    full: bool
    run: bytes
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

    def after(self, position: Position | None) -> Iterable[bytes]:
        """Return the messages that lead from a position (None: from nothing) to the newest one."""
        ...


@dataclass(frozen=True)
class _File:
    """A message in a folder."""

    generation: int
    step: int
    full: bool
    path: Path


class Folder:
    """Messages as files of a folder, whole or not there: GENERATION-STEP.full or .update.

    Each run of a sender is a generation, whose first snapshot replaces all earlier ones. The
    updates before the last `keep` full snapshots are removed.
    """

    def __init__(self, path: str | Path, keep: int = 2) -> None:
        self.path, self.keep = Path(path), keep
        self._run, self._generation = b"", 0  # of the sender that sends here

    def send(self, message: Published) -> None:
        """Raises UserError where another sender has begun in this folder since."""
        self.path.mkdir(parents=True, exist_ok=True)
        files = self._files()
        if message.run != self._run:
            self._run = message.run
            self._generation = files[-1].generation + 1 if files else 0
        elif files and self._head(files[-1]).run != self._run:
            raise UserError(
                f"'{self.path}': another sender has begun there since; give each a folder"
            )
        kind = "full" if message.full else "update"
        partial = self.path / f".part-{self._run.hex()}"
        partial.write_bytes(message.data)
        partial.replace(self.path / f"{self._generation:04}-{message.step:012}.{kind}")
        self._prune()

    def _prune(self) -> None:
        """Remove earlier generations, and what lies before the last snapshots of this one."""
        files = [file for file in self._files() if file.generation <= self._generation]
        ours = [f.step for f in files if f.full and f.generation == self._generation]
        for file in files:
            if file.generation < self._generation or file.step < ours[-self.keep :][0]:
                file.path.unlink(missing_ok=True)

    def after(self, position: Position | None) -> Iterator[bytes]:
        """Raises UserError where a late receiver finds no full snapshot."""
        for _ in range(TRIES):
            try:
                for file in self._path_from(position):
                    data = file.path.read_bytes()
                    position = Position(read_head(data, header_only=True).run, file.step)
                    yield data
                return
            except FileNotFoundError:  # the sender has removed it meanwhile
                continue
        raise UserError(
            f"'{self.path}': messages are removed before they are read; keep more of them: "
            f"Folder(..., keep={2 * self.keep})"
        )

    def _path_from(self, position: Position | None) -> list[_File]:
        """The files that lead from a position to the newest message."""
        files = self._files()
        files = [file for file in files if file.generation == files[-1].generation]
        if not files:
            return []
        step = None
        if position is not None and self._head(files[-1]).run == position.run:
            step = position.step
            later = [file for file in files if file.step > step]
            if self._unbroken(later, step):
                return later
        snapshots = [file for file in files if file.full and (step is None or file.step > step)]
        if not snapshots:
            raise UserError(
                f"'{self.path}': no full snapshot after step {step}, and a message between is "
                "missing; wait for the next full snapshot"
            )
        return [file for file in files if file.step >= snapshots[-1].step]

    def _unbroken(self, files: list[_File], step: int) -> bool:
        """Return whether each of these messages follows the one before, the first one `step`."""
        for file in files:
            if not file.full and self._head(file).base != step:
                return False
            step = file.step
        return True

    def _files(self) -> list[_File]:
        """The messages of the folder, by generation and step."""
        files = []
        for path in self.path.glob("*.*"):
            if match := FILE.fullmatch(path.name):
                generation, step, kind = match.groups()
                files.append(_File(int(generation or 0), int(step), kind == "full", path))
        return sorted(files, key=lambda file: (file.generation, file.step, file.full))

    def _head(self, file: _File) -> Head:
        with open(file.path, "rb") as handle:
            return read_head(handle.read(HEADER.size + DIGEST), header_only=True)


class Broadcast:
    """Messages by torch.distributed, from one process of a group to all others, which must all
    take part: each `publish` there is one `update` here.
    """

    def __init__(self, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.source, self.group = source, group

    def send(self, message: Published) -> None:
        self._send(torch.tensor([len(message.data)]))
        self._send(torch.frombuffer(bytearray(message.data), dtype=torch.uint8))

    def after(self, position: Position | None) -> Iterator[bytes]:
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
        self.run = secrets.token_bytes(RUN)  # each sender is another one
        self._sent: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
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
        """Return the message of a step, for a transport of your own: `data` is what travels. Raises
        UserError as `publish` does, and where names, types or ties of the weights have changed.
        """
        if step <= self._step:
            raise UserError(f"step {step} was published already, or step {self._step} after it")
        tensors, aliases = _host(self.weights, self.dtype)
        full = not self._sent or self._since_full >= self.full_every
        dense = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        entries = sum(tensor.numel() for tensor in tensors.values())
        if full:
            body, changed = _snapshot(tensors, aliases), entries
        else:
            if aliases != self._aliases:
                raise UserError("other weights are tied than before; make another WeightSender")
            body, changed = _update(self._sent, tensors)
        chain = bytes(DIGEST) if full else self._chain
        head = HEADER.pack(MAGIC, full, self.run, step, self._step, chain, len(body))
        digest = _digest(head, body)
        self._sent, self._aliases, self._step, self._chain = tensors, aliases, step, digest
        self._since_full = 1 if full else self._since_full + 1
        data = head + body + digest
        return Published(self.run, step, full, len(data), changed / max(1, entries), dense, data)


class WeightReceiver:
    """Follows a sender; its tensors are the sender's, bit for bit, and change in place.

    model: whose weights are set, by name, in its own types; None: `tensors` alone.
    """

    def __init__(self, transport: Transport | None = None, model: nn.Module | None = None) -> None:
        self.transport, self.model = transport, model
        self.tensors: dict[str, Tensor] = {}
        self.position: Position | None = None
        self._chain = bytes(DIGEST)
        self._aliases: dict[str, str] = {}  # of tied weights: other names, and the one in `tensors`
        self._loaded = True  # whether the model has the tensors

    @property
    def step(self) -> int | None:
        """The step reached; None while nothing was published."""
        return None if self.position is None else self.position.step

    def update(self) -> int | None:
        """Take all messages that the transport has, and return the step reached; None while nothing
        was published. Raises UserError on a lost or damaged message that no later full snapshot
        makes up for; the weights are then those of the step before.
        """
        assert self.transport is not None
        if not self._loaded:
            self._load(self.tensors, self._aliases)
        try:
            for data in self.transport.after(self.position):
                self.apply(data)
        except UserError:
            if not isinstance(self.transport, Folder) or not self._jumped(self.transport):
                raise
        return self.step

    def _jumped(self, folder: Folder) -> bool:
        """Return whether a full snapshot further on made up for a message."""
        try:
            messages = folder.after(None)
            first = next(messages)
            head = read_head(first)
            position = self.position
            if position is not None and head.run == position.run and head.step <= position.step:
                return False
            self.apply(first)
            for data in messages:
                self.apply(data)
        except (UserError, StopIteration):
            return False
        return True

    def apply(self, data: bytes) -> int:
        """Take one message. Raises UserError as `update` does."""
        head, position = read_head(data), self.position
        if head.full:
            if position is not None and head.run == position.run and head.step < position.step:
                raise UserError(
                    f"the snapshot of step {head.step} comes after the message of step "
                    f"{position.step}"
                )
            tensors, aliases = _from_snapshot(head.body)
            self._check(tensors, aliases)
        elif position is None or head.chain != self._chain:
            where = "nothing" if position is None else f"step {position.step}"
            text = f"the update of step {head.step} follows step {head.base}"
            if position is not None and head.run != position.run:
                text += " of another run of the sender"
            raise UserError(
                f"{text}, and this receiver has {where}: a message was lost, or came twice; the "
                "next full snapshot mends it"
            )
        else:
            tensors, aliases = self.tensors, self._aliases
            self._check(tensors, aliases)
            _updated(tensors, head.body)
        self.tensors, self._aliases, self._chain = tensors, aliases, head.digest
        self.position, self._loaded = Position(head.run, head.step), False
        self._load(tensors, aliases)
        return head.step

    def _check(self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        """Raise UserError unless the model has all of these weights."""
        if self.model is None:
            return
        weights = self.model.state_dict()
        for name in (*tensors, *aliases):
            tensor = tensors[aliases.get(name, name)]
            if name not in weights or weights[name].shape != tensor.shape:
                raise UserError(
                    f"the model has no weight '{name}' of shape {list(tensor.shape)}, which the "
                    "sender publishes"
                )

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        """Set the model's weights. Raises UserError where some share memory that the sender has
        apart, with other values.
        """
        if self.model is not None:
            weights = self.model.state_dict()
            for name in (*tensors, *aliases):
                _set(name, weights[name].detach(), tensors[aliases.get(name, name)])
            for names in _sharing(weights):
                self._check_shared(weights, tensors, [name for name in names if name in tensors])
        self._loaded = True

    def _check_shared(
        self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: list[str]
    ) -> None:
        for name in names:
            sent = tensors[name].to(weights[name].dtype)
            if len(names) > 1 and not torch.equal(_bits(weights[name].cpu()), _bits(sent)):
                sharing = ", ".join(f"'{name_}'" for name_ in names if name_ != name)
                raise UserError(
                    f"the model's '{name}' shares memory with {sharing}, and the sender's does "
                    "not: tie them there, too, or untie them here"
                )


def _set(name: str, weight: Tensor, sent: Tensor) -> None:
    """Set a weight; one that repeats itself along a dimension (stride 0) is set once there."""
    repeated = [
        dim for dim in range(weight.dim()) if weight.stride(dim) == 0 and weight.shape[dim] > 1
    ]
    once = weight
    for dim in repeated:
        once, first = once.narrow(dim, 0, 1), sent.narrow(dim, 0, 1)
        if not torch.equal(_bits(first.expand_as(sent)), _bits(sent)):
            raise UserError(f"the model's '{name}' is one row repeated, and the sender's is not")
        sent = first
    once.copy_(sent)


def _sharing(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of tensors that lie in the same memory, for each such memory."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def read_head(data: bytes, header_only: bool = False) -> Head:
    """Return the head of a message. Raises UserError on bytes that are none, or damaged.

    header_only: the first bytes of a message suffice; else the digest of the body is checked, too.
    """
    if data[:4] == EARLIER:
        raise UserError("the message of weights is of an earlier commsweep; publish anew")
    if len(data) < HEADER.size + DIGEST or data[:4] != MAGIC:
        raise UserError(f"{len(data)} bytes are no message of weights")
    _, full, run, step, base, chain, length = HEADER.unpack(data[: HEADER.size])
    body = memoryview(data)[HEADER.size : -DIGEST]
    digest = data[-DIGEST:]
    if not header_only and (len(body) != length or _digest(data[: HEADER.size], body) != digest):
        raise UserError(f"the message of step {step} is damaged: its digest does not match")
    return Head(bool(full), run, step, base, chain, digest, body)


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
    tensors = [_host(weights, dtype)[0] for weights in (before, after)]
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


def _named(
    weights: nn.Module | Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (the tensors by name, of tied ones under the first name; the other names of tied ones,
    with the first one). Tied tensors are equal views: memory, offset, type, shape and strides.
    """
    tensors = weights.state_dict() if isinstance(weights, nn.Module) else weights
    named: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[tuple, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise UserError(f"weight '{name}' is sparse or has no values, which no message holds")
        view = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        first = first_names.setdefault(view, name) if tensor.numel() else name
        if first == name:
            named[name] = tensor
        else:
            aliases[name] = first
    return named, aliases


def _host(
    weights: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (copies in host memory of what travels, further names of tied weights)."""
    tensors: dict[str, Tensor] = {}
    named, aliases = _named(weights)
    for name, tensor in named.items():
        if tensor.is_complex() or tensor.element_size() not in BITS:
            raise UserError(f"weight '{name}' is of {tensor.dtype}, which no message holds")
        rounded = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", rounded, copy=True).contiguous()
    return tensors, aliases


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as whole numbers [n], a view."""
    return tensor.reshape(-1).view(BITS[tensor.element_size()])


def _planes(bits: np.ndarray, size: int) -> list[np.ndarray]:
    """Return the bytes of whole numbers [n], plane by plane, lowest first."""
    octets = bits.view(np.uint8).reshape(-1, size)
    return [np.ascontiguousarray(octets[:, plane]) for plane in range(size)]


def _snapshot(tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> bytes:
    manifest = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in tensors.items()
    ]
    text = json.dumps({"tensors": manifest, "aliases": aliases}).encode()
    sections = [_section(RAW, 0, len(text), text)]
    for size in BITS:
        values = [
            _bits(tensor).numpy() for tensor in tensors.values() if tensor.element_size() == size
        ]
        if values:
            sections += [_coded(plane) for plane in _planes(np.concatenate(values), size)]
    return b"".join(sections)


def _from_snapshot(body: memoryview) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (the tensors by name, further names of tied ones)."""
    reader = _Reader(body)
    manifest = json.loads(bytes(reader.section()[3]))
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, kind))
        for name, kind, shape in manifest["tensors"]
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
    return tensors, manifest["aliases"]


def _update(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """Return (body, entries that changed). Raises UserError where the tensors are others."""
    sections: list[bytes] = []
    values: dict[int, list[np.ndarray]] = {}
    count = 0
    for name, tensor in after.items():
        if name not in before:
            raise UserError(f"weight '{name}' was not published before; make another WeightSender")
        old = before[name]
        if (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            raise UserError(
                f"weight '{name}' was published as {old.dtype} {list(old.shape)}, and is now "
                f"{tensor.dtype} {list(tensor.shape)}; make another WeightSender"
            )
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

"""Payloads as the bytes of one message: a header, then each payload as a frame and its parts.

    header  32 bytes: magic "CS", version, type of the values, layout, number of payloads, step,
            microbatch,
            digest of what both ends agreed on, length of all, checksum of all
    payload  1 byte: number of parts; 5 bytes a part: type and elements; then the parts' own bytes

Reading validates version, digest, place in the training, lengths and types before a part is
touched, and `decode` of a compressor checks every place that a part names. What does not fit raises
UserError, whatever the bytes are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from commsweep.compressors.base import Compressor, Payload
from commsweep.compressors.kernels import packing
from commsweep.errors import UserError

VERSION = 2
_HEADER = struct.Struct("<2sBBBBIH8sIq")
_SUM = slice(_HEADER.size - 8, _HEADER.size)  # where the checksum lies
_PART = struct.Struct("<BI")
HEADER = _HEADER.size
# By their numbers in a message: a new one comes last.
TYPES = (
    torch.uint8,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.int16,
    torch.bool,
    torch.float64,
)


@dataclass(frozen=True)
class Address:
    """The place of a message in a training: both ends must be there. digest: 8 bytes of what they
    agreed on.
    """

    digest: bytes
    step: int = 0
    microbatch: int = 0


def digest(text: str) -> bytes:
    """8 bytes that stand for a configuration."""
    return sha256(text.encode()).digest()[:8]


def framing(payloads: list[Payload]) -> int:
    """Bytes of a message that are not its payloads'."""
    return HEADER + sum(1 + _PART.size * len(payload.parts) for payload in payloads)


def most_framing(payloads: int, fields: int = 6) -> int:
    """Framing of at most so many payloads of at most so many parts."""
    return HEADER + payloads * (1 + _PART.size * fields)


def pack(payloads: list[Payload], address: Address) -> Tensor:
    """Return the bytes of a message of at least one payload, uint8 [n] on the payloads' device."""
    first = payloads[0]
    n = framing(payloads) + sum(payload.nbytes for payload in payloads)
    if n >= 1 << 32:
        raise UserError(
            f"a message of {n:,} bytes; the format ends at 4 GiB: use a smaller "
            "data.batch_size, or microbatches"
        )
    message = torch.empty(n, dtype=torch.uint8, device=first.device)
    head = _HEADER.pack(
        b"CS",
        VERSION,
        TYPES.index(first.dtype),
        first.channels_last,
        len(payloads),
        address.step & 0xFFFFFFFF,
        address.microbatch,
        address.digest,
        n,
        0,
    )
    at = 0
    for payload in payloads:
        head += bytes([len(payload.parts)])
        for tensor in payload.parts.values():
            head += _PART.pack(TYPES.index(tensor.dtype), tensor.numel())
        at = _write(message, at, torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for tensor in payload.parts.values():
            at = _write(message, at, _bytes_of(tensor))
        head = b""
    message[_SUM] = _checksum(message).view(torch.uint8)
    return message


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    if flat.numel() and flat.stride(0) != 1:  # one element of a strided tensor counts as contiguous
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8) if flat.numel() else flat


def _checksum(message: Tensor) -> Tensor:
    """int64 [1] of a message but its checksum; the last word is filled up with zeros."""
    aligned = message.numel() // 4 * 4
    if message.data_ptr() % 4:  # a view must be aligned
        message = message.clone()
    tail = torch.nn.functional.pad(message[aligned:], (0, aligned + 4 - message.numel()))
    head, body, tail = (
        packing.checksum(piece.view(torch.int32))
        for piece in (message[: _SUM.start], message[HEADER:aligned], tail)
    )
    # so that equal words at equal places of two parts do not change places unseen
    return head + 3 * body + 5 * tail


def _write(message: Tensor, at: int, data: Tensor) -> int:
    message[at : at + data.numel()].copy_(data, non_blocking=True)
    return at + data.numel()


class Reader:
    """A received message, read payload by payload."""

    def __init__(self, message: Tensor, address: Address) -> None:
        """message: uint8 [at least the message's length]. Raises UserError when its header does not
        belong here.
        """
        head = _bytes(message, 0, HEADER)
        magic, version, kind, layout, count, step, microbatch, key, n, check = _HEADER.unpack(head)
        if magic != b"CS":
            raise UserError("these bytes are no message of commsweep's")
        if version != VERSION:
            raise UserError(
                f"a message of version {version}; this commsweep speaks {VERSION}: update the "
                "older end"
            )
        if key != address.digest:
            raise UserError(
                "a message from another configuration; start all stages with the same settings"
            )
        if (step, microbatch) != (address.step & 0xFFFFFFFF, address.microbatch):
            raise UserError(
                f"a message of step {step}, microbatch {microbatch}, where step {address.step}, "
                f"microbatch {address.microbatch} was due"
            )
        if (
            not HEADER <= n <= message.numel()
            or kind >= len(TYPES)
            or not TYPES[kind].is_floating_point
        ):
            raise UserError(
                f"a damaged message: it says it has {n} bytes and {message.numel()} are there"
            )
        message = message[:n].clone()
        if int(_checksum(message[:n])) != check:
            raise UserError(
                "a damaged message: its checksum is another one; check the link, and start "
                "again to continue from the last checkpoint"
            )
        self.message, self.at, self.left = message[:n], HEADER, count
        self.dtype, self.channels_last = TYPES[kind], bool(layout & 1)

    def take(self, compressor: Compressor, shape: torch.Size) -> Payload:
        """The next payload, of a message of this shape. Raises UserError when the bytes cannot be
        one.
        """
        if not self.left:
            raise UserError("a message with fewer payloads than its compression makes")
        self.left -= 1
        count = _bytes(self.message, self.at, 1)[0]
        heads = _bytes(self.message, self.at + 1, _PART.size * count)
        heads = [_PART.unpack_from(heads, _PART.size * i) for i in range(count)]
        if any(kind >= len(TYPES) for kind, _ in heads):
            raise UserError("a damaged message: a part of unknown type")
        layouts = [(TYPES[kind], n) for kind, n in heads]
        form = next(
            (
                form
                for form in compressor.layouts(shape, self.dtype)
                if len(form) == count
                and all(
                    field.fits(*layout)
                    for field, layout in zip(form.values(), layouts, strict=True)
                )
            ),
            None,
        )
        if form is None:
            raise UserError(
                f"a payload that {compressor.spec.kind} of {tuple(shape)} cannot have made"
            )
        at = self.at + 1 + _PART.size * count
        fields = {}
        for (name, field), (dtype, n) in zip(form.items(), layouts, strict=True):
            stop = at + n * dtype.itemsize
            if stop > self.message.numel():
                raise UserError("a damaged message: it ends within a payload")
            raw = self.message[at:stop]
            # a view must be aligned
            if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
                raw = raw.clone()
            fields[name] = raw.view(dtype).reshape((n,) if field.shape is None else field.shape)
            at = stop
        self.at = at
        layout = self.channels_last and len(shape) == 4
        return Payload(fields, shape, self.dtype, self.message.device, layout)

    def finish(self) -> None:
        """Raise UserError when something is left."""
        if self.left or self.at != self.message.numel():
            raise UserError("a message with more in it than its compression makes")


def _bytes(message: Tensor, at: int, n: int) -> bytes:
    if at + n > message.numel():
        raise UserError(
            f"a damaged message: {message.numel()} bytes, too short for what it says it holds"
        )
    return message[at : at + n].cpu().numpy().tobytes()


def most_bytes(
    compressor: Compressor, shape: torch.Size, dtype: torch.dtype, payloads: int = 1
) -> int:
    """Bytes that a message of `payloads` payloads has at most."""
    return most_framing(payloads) + payloads * compressor.most_bytes(shape, dtype)

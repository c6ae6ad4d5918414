"""The interface of every compressor: a pure function of a tensor (and a seed), with an exact byte
count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from commsweep.config.base import Implementations
from commsweep.config.compressors.base import Compression
from commsweep.errors import UserError

S = TypeVar("S", bound=Compression)


@dataclass(frozen=True)
class Payload:
    """Exactly what would travel for one message, plus what both ends know beforehand.

    `parts` are the tensors on the wire (values, packed indices, packed codes, scales). Shape, dtype
    and layout are fixed by the model and the Run, so they cost nothing.
    """

    parts: dict[str, Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    channels_last: bool = field(default=False)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: the sizes of the parts, nothing else."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.parts.values())


@dataclass(frozen=True)
class Field:
    """The type and length of a part of a payload, known to a receiver beforehand: its type, and its
    shape or only its greatest length.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None
    most: int = 0  # elements, where the shape depends on the data

    @property
    def most_bytes(self) -> int:
        """Bytes the part has at most."""
        return (self.most if self.shape is None else math.prod(self.shape)) * self.dtype.itemsize

    def fits(self, dtype: torch.dtype, elements: int) -> bool:
        """Return whether a part of this type and length may be it."""
        return dtype == self.dtype and (
            elements <= self.most if self.shape is None else elements == math.prod(self.shape)
        )


COMPRESSORS = Implementations()


class Compressor(Generic[S]):
    """Base of all compressors; subclasses implement `_encode`, `_decode`, `formula_bytes`, maybe
    `apply`.

    Stateless: what is random is a function of `seed`, so a message can be repeated bit for bit.
    """

    # of the code that every entry has in the part `codes` of a payload; None: there is none
    code_bits: int | None = None

    def __init__(self, spec: S) -> None:
        self.spec = spec

    @property
    def seeded(self) -> bool:
        """Return whether another seed may give another message."""
        for spec in (self.spec, getattr(self.spec, "values", None)):
            if spec is not None and (spec.draws or getattr(spec, "rounding", "") == "stochastic"):
                return True
        return False

    def encode(self, x: Tensor, seed: int = 0) -> Payload:
        """Return what would travel for `x` (any shape, floating point). Raises UserError if x is
        not finite.
        """
        _check(x)
        return self._encode(x, seed)

    def decode(self, payload: Payload) -> Tensor:
        """The tensor the receiver sees: shape, dtype, device and layout of the one encoded.

        Raises UserError when the parts cannot be a payload of this compressor, whatever bytes they
        hold.
        """
        return self._decode(payload)

    def roundtrip(self, x: Tensor, seed: int = 0) -> Tensor:
        """decode(encode(x)) bit for bit, without building the payload. Raises UserError if x is not
        finite.
        """
        _check(x)
        return self.apply(x, seed)

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        """`roundtrip` without the finiteness check: the hot path. Non-finite input stays visible in
        the output.
        """
        return self._decode(self._encode(x, seed))

    def remembered(self, x: Tensor, memory: Tensor, kind: int) -> Tensor | None:
        """`apply` with its feedback (`gpu.EF`, `gpu.EF21`), memory changed, in one pass; None where
        none does it.
        """
        return None

    def at_inference(self) -> Compressor:
        """Return what the messages of an evaluation are compressed with."""
        return self

    def halved(self) -> Compressor:
        """The same compressor with half its budget (EF-mixed sends two messages). Only sparsifiers
        have one.
        """
        raise NotImplementedError

    def given(self, mask: Tensor) -> Compressor:
        """This compressor for messages whose forward twin kept `mask` (boolean, the message's
        shape).
        """
        return self

    def begin(self, shape: torch.Size, seed: int) -> Tensor | None:
        """Return what both ends of a channel keep between messages of this shape ([1, *sample],
        whatever the batch), before the first one; None: nothing. A compressor that keeps something
        implements the next methods, `decode_from` where it decodes with the memory.
        """
        return None

    def apply_from(self, x: Tensor, memory: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """(what arrives, what is kept for the next message)."""
        raise NotImplementedError

    def encode_from(self, x: Tensor, memory: Tensor, seed: int) -> Payload:
        """The payload of `apply_from`."""
        raise NotImplementedError

    def decode_from(self, payload: Payload, memory: Tensor | None) -> Tensor:
        """Return what arrives of a payload; memory: what both ends kept before it, or None."""
        return self.decode(payload)

    def next_kept(self, payload: Payload, memory: Tensor) -> Tensor:
        """Return what both ends keep once a payload has been sent, of the shape of `begin`."""
        raise NotImplementedError

    def sender_state(self, shape: torch.Size) -> Tensor | None:
        """Return what the sender of a layer's gradient keeps between messages of this shape, before
        the first one; None: nothing. A compressor that keeps something implements `for_message`.
        """
        return None

    def for_message(self, x: Tensor, state: Tensor, number: int) -> Compressor:
        """The compressor of message x [1, *layer], with so many sent before it. Changes `state` in
        place to what the next message needs.
        """
        raise NotImplementedError

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Bytes of a payload by formula. Raises NotImplementedError where they depend on the
        data.
        """
        raise NotImplementedError

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        """Bytes of the message whose receiver saw `y`; a 0-dim tensor on y's device where they
        depend on data.
        """
        return self.formula_bytes(y.shape, y.dtype)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        """The parts that a payload of such a message has, in order; several where its coding
        depends on the data.
        """
        raise NotImplementedError

    def most_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Bytes that a payload of such a message has at most."""
        return max(
            sum(field.most_bytes for field in form.values()) for form in self.layouts(shape, dtype)
        )

    def _encode(self, x: Tensor, seed: int) -> Payload:
        raise NotImplementedError

    def _decode(self, payload: Payload) -> Tensor:
        raise NotImplementedError


def payload(x: Tensor, /, **fields: Tensor) -> Payload:
    """A Payload of `fields` for the message `x`."""
    return Payload(fields, x.shape, x.dtype, x.device, channels_last(x))


def replaced(payload_: Payload, fields: dict[str, Tensor]) -> Payload:
    """The payload of the same message with these parts."""
    return replace(payload_, parts=fields)


def channels_last(x: Tensor) -> bool:
    """Return whether x lies in memory as batch, height, width, channel (and not also in plain
    order).
    """
    return (
        x.dim() == 4
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def divided(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once on every device: CUDA multiplies by the reciprocal of a number."""
    return x / torch.full_like(x, by)


def rows(x: Tensor) -> Tensor:
    """x as [samples, elements of a sample], in memory order: a view wherever x is dense in memory.

    A channels-last image keeps its order in memory, so nothing is copied; `unrows` undoes it. A
    tensor with fewer than two dimensions is one sample.
    """
    if x.dim() < 2:
        return x.reshape(1, -1)
    if channels_last(x):
        x = x.permute(0, 2, 3, 1)
    return x.reshape(x.shape[0], -1)


def unrows(flat: Tensor, like: Tensor | Payload) -> Tensor:
    """Inverse of `rows`: the tensor of `like`'s shape and memory layout."""
    last = like.channels_last if isinstance(like, Payload) else channels_last(like)
    if not last:
        return flat.reshape(like.shape)
    n, c, h, w = like.shape
    return flat.reshape(n, h, w, c).permute(0, 3, 1, 2)


def laid_out(values: Tensor, like: Tensor | Payload) -> Tensor:
    """Values of the message's shape, in its memory layout: the next convolution's sums depend on
    that.
    """
    last = like.channels_last if isinstance(like, Payload) else channels_last(like)
    return values.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def row_shape(shape: torch.Size) -> tuple[int, int]:
    """(samples, elements of a sample) of a tensor of this shape."""
    numel = shape.numel()
    return (shape[0], numel // shape[0]) if len(shape) > 1 and shape[0] else (1, numel)


def all_finite(x: Tensor) -> bool:
    """Return whether no entry is infinite or not a number. Waits for the device."""
    # Where one is, the sum is. Where only the sum is too large, each entry is looked at.
    return bool(x.sum(dtype=torch.float32).isfinite()) or bool(x.isfinite().all())


def _check(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise UserError(
            "cannot compress a tensor that requires a gradient: what arrives would carry none. "
            "Pass x.detach(), or cross a Boundary, whose backward is defined"
        )
    if not x.is_floating_point():
        raise UserError(f"cannot compress a tensor of {x.dtype}; pass a floating-point tensor")
    if not x.numel():
        raise UserError(f"cannot compress an empty tensor of shape {tuple(x.shape)}")
    if not all_finite(x):
        bad = int((~torch.isfinite(x)).sum())
        raise UserError(
            f"cannot compress non-finite values: {bad} of {x.numel()} entries are NaN or infinite"
        )


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite float32 values in another type, those beyond its range as its largest; what is not
    finite stays so.
    """
    if dtype is not torch.float16:  # the others reach as far as float32
        return values.to(dtype)
    most = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-most, most), values).to(dtype)

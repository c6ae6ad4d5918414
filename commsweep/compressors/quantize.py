"""Quantizers: b-bit codes and the scales they are relative to. All arithmetic is float32."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from commsweep import seeds
from commsweep.compressors import draws
from commsweep.compressors.base import (
    COMPRESSORS,
    Compressor,
    Field,
    Payload,
    divided,
    laid_out,
    payload,
    row_shape,
    rows,
    unrows,
)
from commsweep.compressors.bits import pack, packed_bytes, unpack
from commsweep.compressors.kernels import cpu, gpu, packing
from commsweep.config.compressors.base import QuantizerSpec
from commsweep.config.compressors.batch import FixedBatchSpec
from commsweep.config.compressors.values.quantize import FixedPointSpec, UniformSpec

QuantizerT = TypeVar("QuantizerT", bound=QuantizerSpec)


class Quantizer(Compressor[QuantizerT]):
    """Codes per group of elements; a group shares its scale numbers (`per_group` float32 each).

    The group is the tensor, a sample, a channel (axis 1 of images, else the last axis; over the
    whole batch), a last-axis row (a token), or `group` consecutive elements of a sample. nbytes =
    ceil(elements * bits / 8) + 4 * per_group * groups.
    """

    per_group = 1

    def __init__(self, spec: QuantizerT) -> None:
        super().__init__(spec)
        self.code_bits = spec.bits

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return packed_bytes(shape.numel(), self.spec.bits) + 4 * self.per_group * self._groups(
            shape
        )

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        groups = self._split(x)
        if gpu.usable(groups):
            return self._join(
                gpu.grouped(groups, self.spec.bits, self._lowest != 0, self._start(seed)), x
            )
        groups = _wide(groups)
        return self._join(self._nearby(groups, self._scales(groups), seed), x)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [
            {
                "codes": Field(torch.uint8, (packed_bytes(shape.numel(), self.spec.bits),)),
                "scales": Field(torch.float32, (self.per_group, self._groups(shape))),
            }
        ]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        """Codes travel group after group; what fills up the last group of a sample does not."""
        groups = self._split(x)
        if (
            gpu.usable(groups)
            and gpu.whole_bytes(groups.shape[1], self.spec.bits)
            and (groups.numel() == x.numel())
        ):
            codes, scales = gpu.quantize(
                groups, self.spec.bits, self._lowest != 0, self._start(seed)
            )
            return payload(x, codes=codes, scales=scales)
        groups = _wide(groups)
        scales = self._scales(groups)
        if self.spec.rounding == "nearest" and cpu.usable(groups) and groups.numel() == x.numel():
            codes = packing.quantize(
                groups, *self._shift_gain(scales), self.spec.bits, self._lowest != 0
            )
        else:
            whole_codes = self._codes(groups, scales, seed).nan_to_num(0.0).long() - self._lowest
            codes = pack(self._trim(whole_codes, x.shape).reshape(-1), self.spec.bits)
        return payload(x, codes=codes, scales=torch.stack(scales))

    def _decode(self, payload: Payload) -> Tensor:
        packed, scales, shape = (
            payload.parts["codes"],
            tuple(payload.parts["scales"]),
            payload.shape,
        )
        n_groups, size = self._groups(shape), self._group_size(shape)
        if n_groups * size == shape.numel() and cpu.usable(scales[0]):
            values = packing.dequantize(
                packed,
                (n_groups, size),
                *self._shift_step(scales),
                self.spec.bits,
                self._lowest != 0,
            )
        else:
            codes = unpack(packed, self.spec.bits, shape.numel()) + self._lowest
            if n_groups * size != shape.numel():
                codes = codes.reshape(row_shape(shape))
                codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % size))
            values = self._values(codes.reshape(n_groups, size).float(), scales)
        return self._join(values, payload)

    def _shift_gain(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return what `packing.quantize` takes, each [G]."""
        raise NotImplementedError

    def _shift_step(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return what `packing.dequantize` takes, each [G]."""
        raise NotImplementedError

    def _start(self, seed: int) -> int | None:
        """Return the start of the stream that rounding draws from; None where it draws nothing."""
        return seeds.start(seed) if self.spec.rounding == "stochastic" else None

    @property
    def _lowest(self) -> int:
        return 0

    def _nearby(self, groups: Tensor, scales: tuple[Tensor, ...], seed: int) -> Tensor:
        return self._values(self._codes(groups, scales, seed), scales)

    def _scales(self, groups: Tensor) -> tuple[Tensor, ...]:
        """Scale numbers of groups [G, n] float32: `per_group` tensors [G]."""
        raise NotImplementedError

    def _codes(self, groups: Tensor, scales: tuple[Tensor, ...], seed: int) -> Tensor:
        """Codes [G, n] as whole float32 numbers."""
        raise NotImplementedError

    def _values(self, codes: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
        """Decoded values [G, n] of codes [G, n]."""
        raise NotImplementedError

    def _round(self, x: Tensor, seed: int) -> Tensor:
        """To the nearest code, or up with the probability that makes the expectation exact."""
        if self.spec.rounding == "nearest":
            return x.round_()
        return x.add_(draws.uniform(x.shape, seed, x.device)).floor_()

    # Between a message and its [groups, elements] matrix.

    def _groups(self, shape: torch.Size) -> int:
        n_rows, row = row_shape(shape)
        scale = self.spec.scale
        by_scope = {
            "tensor": 1,
            "sample": n_rows,
            "last": shape[:-1].numel(),
            "group": n_rows * -(-row // self.spec.group),
        }
        return (
            by_scope[scale] if scale in by_scope else (shape[channel_axis(shape)] if shape else 1)
        )

    def _split(self, x: Tensor) -> Tensor:
        scale = self.spec.scale
        if scale == "channel":
            return (
                x.movedim(channel_axis(x.shape), 0).flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
            )
        if scale == "group":  # consecutive elements in logical order, whatever the memory layout
            flat = x.reshape(row_shape(x.shape))
            short = -flat.shape[1] % self.spec.group
            # the last element fills up the last group: it changes neither its range nor its bytes
            if short:
                flat = torch.cat([flat, flat[:, -1:].expand(-1, short)], dim=1)
            return flat.reshape(-1, self.spec.group)
        if scale == "last":
            return x.reshape(self._groups(x.shape), -1)
        return rows(x).reshape(self._groups(x.shape), -1)

    def _group_size(self, shape: torch.Size) -> int:
        return (
            self.spec.group if self.spec.scale == "group" else shape.numel() // self._groups(shape)
        )

    def _trim(self, groups: Tensor, shape: torch.Size) -> Tensor:
        """Without what fills up the last group of a sample."""
        if groups.numel() == shape.numel():
            return groups
        n_rows, row = row_shape(shape)
        return groups.reshape(n_rows, -1)[:, :row]

    def _join(self, groups: Tensor, like: Tensor | Payload) -> Tensor:
        groups = self._trim(groups.to(like.dtype), like.shape)
        shape, scale = like.shape, self.spec.scale
        if scale == "channel":
            axis = channel_axis(shape)
            moved = (
                [shape[axis], *(size for i, size in enumerate(shape) if i != axis)]
                if shape
                else [1]
            )
            return laid_out(groups.reshape(moved).movedim(0, axis).reshape(shape), like)
        return (
            groups.reshape(shape)
            if scale in ("group", "last")
            else unrows(groups.reshape(row_shape(shape)), like)
        )


@COMPRESSORS.of(UniformSpec)
class Uniform(Quantizer[UniformSpec]):
    """Min-max codes: q = round((x - lo) / (hi - lo) * (2^b - 1)), decoded lo + q (hi - lo) / (2^b -
    1).

    A constant group decodes exactly. With scale "tensor" this is the authors' `quantize_custom`:
    one range for the whole batch (theirs is undefined on constant tensors).
    """

    per_group = 2

    def _nearby(self, groups: Tensor, scales: tuple[Tensor, ...], seed: int) -> Tensor:
        if self.spec.rounding == "nearest" and cpu.usable(groups):
            return cpu.uniform_rows(groups, *self._affine(scales))
        return super()._nearby(groups, scales, seed)

    def _shift_gain(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        lo, gain, _ = self._affine(scales)
        return lo, gain

    def _shift_step(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        lo, _, step = self._affine(scales)
        return lo, step

    @property
    def _levels(self) -> int:
        return 2**self.spec.bits - 1

    def _scales(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        return _range(groups)

    def _affine(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """(lo, codes per unit, units per code), each [G]; a constant group gets code 0 for every
        element.
        """
        lo, hi = scales
        spread = hi - lo
        gain = self._levels / spread
        # Also where the spread is so small (subnormal) that its reciprocal overflows.
        # a GPU multiplies by a number's reciprocal instead
        step = divided(spread, self._levels)
        return lo, gain.masked_fill(gain.isinf() & (spread < 1), 0), step

    def _codes(self, groups: Tensor, scales: tuple[Tensor, ...], seed: int) -> Tensor:
        lo, gain, _ = (scale[:, None] for scale in self._affine(scales))
        return self._round((groups - lo).mul_(gain), seed).clamp_(max=self._levels)

    def _values(self, codes: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
        lo, _, step = (scale[:, None] for scale in self._affine(scales))
        return codes.mul_(step).add_(lo)


@COMPRESSORS.of(FixedPointSpec)
class FixedPoint(Quantizer[FixedPointSpec]):
    """Symmetric codes: s = max|x|, q = clip(round(x / s * 2^(b-1)), -2^(b-1), 2^(b-1) - 1), decoded
    q / 2^(b-1) * s.

    Zero has a code of its own; the largest positive value decodes one step low. Stochastic
    rounding, to be without bias, needs codes on both sides of every value: there s = max(-min x,
    max x * 2^(b-1) / (2^(b-1) - 1)). Source: AC-SGD's quantizer, with float32 scales and no
    epsilon.
    """

    def _shift_gain(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return scales[0], torch.full_like(scales[0], -self._lowest)

    def _shift_step(self, scales: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return scales[0], scales[0]

    @property
    def _lowest(self) -> int:
        return -(2 ** (self.spec.bits - 1))

    def _scales(self, groups: Tensor) -> tuple[Tensor]:
        lo, hi = _range(groups)
        if self.spec.rounding == "stochastic":
            hi = hi * (-self._lowest / (-self._lowest - 1))
        # 0.0 also of a group of zeros with and without signs
        return (torch.maximum(hi, -lo).add_(0.0),)

    def _codes(self, groups: Tensor, scales: tuple[Tensor, ...], seed: int) -> Tensor:
        s = scales[0][:, None]
        safe = s.where(s != 0, s.new_ones(()))
        half = -self._lowest
        # + 0.0 turns -0.0, which no code stands for, into 0.0.
        return self._round((groups / safe).mul_(half), seed).clamp_(-half, half - 1).add_(0.0)

    def _values(self, codes: Tensor, scales: tuple[Tensor, ...]) -> Tensor:
        return codes.div_(-self._lowest).mul_(scales[0][:, None])


@COMPRESSORS.of(FixedBatchSpec)
class FixedBatch(Compressor[FixedBatchSpec]):
    """The authors' fixed point: s_j = float16(max over the batch of |x_ij|).

    q = clip(round(2^(b-1) x / (s + 1e-6)), -2^(b-1), 2^(b-1) - 1), decoded q / 2^(b-1) * s; the
    scale is rounded first, so codes are relative to what travels. nbytes = ceil(elements * bits /
    8) + 2 * (elements of a sample). Kept as it is: gradients below 1e-6 vanish, and |x| > 65504
    overflows the scale. Source: authors' ResNet notebook, after AC-SGD.
    """

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return packed_bytes(shape.numel(), self.spec.bits) + 2 * row_shape(shape)[1]

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        codes, scale = self._codes(x)
        return unrows(self._values(codes, scale).to(x.dtype), x)

    def _codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = rows(x).float()
        s = flat.abs().amax(0).half()
        half = 2 ** (self.spec.bits - 1)
        return (flat * half / (s.float() + 1e-6)).round_().clamp_(-half, half - 1).add_(0.0), s

    def _values(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes / 2 ** (self.spec.bits - 1) * scale.float()

    def _encode(self, x: Tensor, seed: int) -> Payload:
        codes, scale = self._codes(x)
        codes = codes.flatten().long() + 2 ** (self.spec.bits - 1)
        return payload(x, codes=pack(codes, self.spec.bits), scales=scale)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [
            {
                "codes": Field(torch.uint8, (packed_bytes(shape.numel(), self.spec.bits),)),
                "scales": Field(torch.float16, (row_shape(shape)[1],)),
            }
        ]

    def _decode(self, payload: Payload) -> Tensor:
        codes = unpack(payload.parts["codes"], self.spec.bits, payload.shape.numel())
        codes = (codes - 2 ** (self.spec.bits - 1)).float().reshape(row_shape(payload.shape))
        return unrows(self._values(codes, payload.parts["scales"]).to(payload.dtype), payload)


def _wide(groups: Tensor) -> Tensor:
    return groups.float() if groups.is_floating_point() else groups


def _range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each group, [G] each."""
    # the reduction over everything is several times faster than over one axis
    if groups.shape[0] == 1:
        lo, hi = torch.aminmax(groups)
        return lo.reshape(1), hi.reshape(1)
    return groups.amin(1), groups.amax(1)


def channel_axis(shape: torch.Size) -> int:
    """Return where the features are: images [B, C, H, W] have their channels on axis 1, sequences
    and vectors on the last.
    """
    return 1 if len(shape) == 4 else len(shape) - 1

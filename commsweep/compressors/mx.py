"""Microscaling formats: small floating-point numbers, one scale for every short block.

An element is a float of few bits (OCP Microscaling Formats MX v1.0): fp8 e4m3 and e5m2, fp6 e2m3,
fp4 e2m1. MX blocks have 32 elements and a power of two as their scale (E8M0). NVFP4 blocks have 16
elements, an e4m3 scale, and one float32 scale a message. Blocks are runs of a message in its order
in memory; the last one may be shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commsweep.compressors import draws
from commsweep.compressors.base import (
    COMPRESSORS,
    Compressor,
    Field,
    Payload,
    divided,
    payload,
    rows,
    saturated,
    unrows,
)
from commsweep.compressors.bits import check_length, pack, packed_bytes, unpack
from commsweep.compressors.kernels import cpu, floats, packing
from commsweep.config.compressors.values.mx import MXSpec
from commsweep.errors import UserError


@dataclass(frozen=True)
class Float:
    """A floating-point type without infinities: sign, exponent and mantissa bits."""

    exponent: int
    mantissa: int
    most: float  # the largest finite value

    @property
    def bits(self) -> int:
        """Return the bits of an element, its sign included."""
        return 1 + self.exponent + self.mantissa

    @property
    def form(self) -> floats.Element:
        """Return the format as the kernels take it."""
        return floats.Element(self.bits, self.mantissa, self.least, self.most)

    @property
    def least(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent - 1)

    @property
    def top(self) -> int:
        """Exponent of the largest number."""
        return int(torch.frexp(torch.tensor(self.most))[1]) - 1

    @property
    def codes(self) -> int:
        """Return how many magnitudes it has."""
        return int(self.encode(torch.tensor([self.most]))[0]) + 1

    def rounded(self, sizes: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Magnitudes on this type's grid, saturated: the nearest, ties to even, or the one below or
        above by `drawn` in [0, 1).
        """
        if cpu.usable(sizes):
            unit = torch.ones(1)
            drawn = None if drawn is None else drawn.reshape(1, -1)
            return floats.values(sizes.reshape(1, -1), unit, drawn, self.form).view(sizes.shape)
        step = self._step(sizes)
        scaled = torch.ldexp(sizes, -step)
        rounded = scaled.round() if drawn is None else (scaled + drawn).floor()
        return torch.ldexp(rounded, step).clamp(max=self.most)

    def _step(self, sizes: Tensor) -> Tensor:
        """Exponent of the distance to the next number."""
        return (torch.frexp(sizes)[1] - 1).clamp(min=self.least) - self.mantissa

    def encode(self, sizes: Tensor) -> Tensor:
        """Magnitudes of this type -> the bits of exponent and mantissa, as int64."""
        if cpu.usable(sizes):
            coded = floats.codes(sizes.reshape(1, -1), torch.ones(1), None, self.form)
            return coded.view(sizes.shape).long()
        exponent = (torch.frexp(sizes)[1] - 1).clamp(min=self.least)
        fraction = torch.ldexp(sizes, self.mantissa - exponent).long()
        # A subnormal number's exponent field is zero, and its mantissa has no leading one.
        codes = fraction + (exponent - self.least).long() * 2**self.mantissa
        return torch.where(sizes > 0, codes, 0)  # frexp says 0 of the exponent of zero

    def decode(self, codes: Tensor) -> Tensor:
        """The magnitudes that bits of exponent and mantissa stand for, float32."""
        field, mantissa = codes >> self.mantissa, codes & (2**self.mantissa - 1)
        significand = mantissa + torch.where(field > 0, 2**self.mantissa, 0)
        exponent = field.clamp(min=1) - 1 + self.least - self.mantissa
        return torch.ldexp(significand.float(), exponent)


E4M3, E5M2 = Float(4, 3, 448.0), Float(5, 2, 57344.0)
E2M3, E2M1 = Float(2, 3, 7.5), Float(2, 1, 6.0)
ELEMENTS = {
    "mxfp8_e4m3": E4M3,
    "mxfp8_e5m2": E5M2,
    "mxfp6": E2M3,
    "mxfp4": E2M1,
    "nvfp4": E2M1,
}
BIAS = 127  # of an E8M0 scale
LOWEST, HIGHEST = -127, 127  # its exponents


@COMPRESSORS.of(MXSpec)
class MX(Compressor[MXSpec]):
    """Blocks of small floats under a scale.

    MX: X = 2^(floor(log2 max|x|) - top), top the exponent of the type's largest number; q = the
    nearest to x / X, saturated. Stochastic rounding, to be without bias, must not saturate: there X
    is the smallest power of two with max|x| / X within the type. nbytes = ceil(elements * bits / 8)
    + ceil(elements / 32). NVFP4: T = max|x| of the message / (448 * 6), block scale s = e4m3(max|x|
    / 6 / T), rounded up under stochastic rounding; q = x / (s T). nbytes = ceil(elements / 2) +
    ceil(elements / 16) + 4. Source: OCP MX v1.0, section 6.3; NVFP4 as in torchao's prototype.
    """

    def __init__(self, spec: MXSpec) -> None:
        super().__init__(spec)
        self.code_bits = self._element.bits

    @property
    def _element(self) -> Float:
        return ELEMENTS[self.spec.format]

    @property
    def _two_scales(self) -> bool:
        return self.spec.format == "nvfp4"

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        n = shape.numel()
        extra = 4 if self._two_scales else 0
        return packed_bytes(n, self._element.bits) + -(-n // self.spec.block) + extra

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        n = shape.numel()
        form = {
            "codes": Field(torch.uint8, (packed_bytes(n, self._element.bits),)),
            "scales": Field(torch.uint8, (-(-n // self.spec.block),)),
        }
        if self._two_scales:
            form["whole"] = Field(torch.float32, (1,))
        return [form]

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        blocks = self.blocks(x)
        scales = self._scales(blocks)[-1]
        if cpu.usable(blocks):
            values = floats.values(blocks, scales, self._drawn(blocks, seed), self._element.form)
        else:
            sizes, negative = self._sizes(blocks, scales, seed)
            values = sizes * scales[:, None]
            values = torch.where(negative, -values, values)
            # What is not finite spoils its block, and NVFP4's message, and is seen.
            values = values.where(torch.isfinite(scales)[:, None], torch.nan)
        return unrows(saturated(values.view(-1)[: x.numel()], x.dtype), x)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        blocks = self.blocks(x)
        exponents, tensor_scale, scales = self._scales(blocks)
        if tensor_scale is None:
            fields = {"scales": (exponents + BIAS).to(torch.uint8)}
        else:
            fields = {"scales": E4M3.encode(exponents).to(torch.uint8), "whole": tensor_scale}
        if cpu.usable(blocks):
            codes = floats.codes(blocks, scales, self._drawn(blocks, seed), self._element.form)
        else:
            sizes, negative = self._sizes(blocks, scales, seed)
            codes = self._element.encode(sizes)
            codes = codes + torch.where(negative, 2 ** (self._element.bits - 1), 0)
        codes = codes.view(-1)[: x.numel()]
        return payload(x, codes=pack(codes, self._element.bits), **fields)

    def _decode(self, payload: Payload) -> Tensor:
        element, n, packed = self._element, payload.shape.numel(), payload.parts["codes"]
        scales = self._scales_of(payload.parts, -(-n // self.spec.block))
        if packing.usable(packed):
            check_length(packed, element.bits, n)
            values = floats.decoded(packed, scales, self.spec.block, n, element.form)
        else:
            values = self._values(unpack(packed, element.bits, n), scales)
        if values is None:
            raise UserError(f"a code of {self.spec.format} stands for no number")
        return unrows(saturated(values, payload.dtype), payload)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor | None:
        """Return the numbers of codes [n]; None where one stands for none."""
        sign = 2 ** (self._element.bits - 1)
        magnitudes = codes % sign
        if bool((magnitudes >= self._element.codes).any()):
            return None
        sizes = self._element.decode(magnitudes)
        values = sizes * scales.repeat_interleave(self.spec.block)[: len(codes)]
        return torch.where(codes >= sign, -values, values)

    def blocks(self, x: Tensor) -> Tensor:
        """float32 [blocks, elements of a block], zeros behind the last element."""
        flat = rows(x).float().reshape(-1)
        if short := -flat.numel() % self.spec.block:
            flat = torch.nn.functional.pad(flat, (0, short))
        return flat.view(-1, self.spec.block).detach()

    def _scales(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """(exponents, or NVFP4's scales of blocks; NVFP4's scale of the message; the factor of each
        block, float32 [blocks]).
        """
        largest = floats.tops(blocks) if cpu.usable(blocks) else blocks.abs().amax(1)
        stochastic, element = self.spec.rounding == "stochastic", self._element
        if not self._two_scales:
            exponent = torch.frexp(largest)[1] - 1 - element.top
            if stochastic:  # one more where the largest would saturate
                exponent = exponent + (torch.ldexp(largest, -exponent) > element.most)
            exponent = exponent.clamp(LOWEST, HIGHEST)
            scales = torch.ldexp(torch.ones_like(largest), exponent)
            return exponent, None, scales.where(torch.isfinite(largest), torch.nan)
        tensor_scale = divided(largest.amax().reshape(1), E4M3.most * element.most)
        safe = torch.where(tensor_scale > 0, tensor_scale, 1.0)
        exact = divided(largest, element.most) / safe
        scale = E4M3.rounded(exact)
        if stochastic:
            above = torch.ldexp(scale, -E4M3._step(scale)) + 1
            scale = torch.where(scale < exact, torch.ldexp(above, E4M3._step(scale)), scale)
            scale = scale.clamp(max=E4M3.most)
        return scale, tensor_scale, scale * tensor_scale

    def _scales_of(self, fields: dict[str, Tensor], blocks: int) -> Tensor:
        """The factors that a payload names. Raises UserError where one is no scale."""
        codes = fields["scales"].long()
        if not self._two_scales:
            if bool((codes > HIGHEST + BIAS).any()):
                raise UserError("a scale of MX is no power of two")
            return torch.ldexp(torch.ones(blocks, device=codes.device), (codes - BIAS).int())
        tensor_scale = fields["whole"]
        if bool((codes >= E4M3.codes).any()) or not bool(
            (torch.isfinite(tensor_scale) & (tensor_scale >= 0)).all()
        ):
            raise UserError("a scale of NVFP4 is no positive number")
        return E4M3.decode(codes) * tensor_scale

    def _drawn(self, blocks: Tensor, seed: int) -> Tensor | None:
        if self.spec.rounding == "nearest":
            return None
        return draws.uniform(blocks.shape, seed, blocks.device)

    def _sizes(self, blocks: Tensor, scales: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """(magnitudes of the element type, where they are negative; zeros are not)."""
        drawn = self._drawn(blocks, seed)
        safe = torch.where(scales > 0, scales, 1.0)[:, None]
        sizes = self._element.rounded((blocks.abs() / safe).clamp(max=2.0**20), drawn)
        sizes = sizes.where(scales[:, None] > 0, 0.0)
        return sizes, (blocks < 0) & (sizes > 0)

"""Few levels a value: signs, two means, three values, powers of two, and QSGD's levels with Elias
codes.

All take each sample of a message by itself; arithmetic is float32. The stochastic ones are
unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.compressors import draws
from commsweep.compressors.base import (
    COMPRESSORS,
    Compressor,
    Field,
    Payload,
    S,
    divided,
    laid_out,
    payload,
    row_shape,
    rows,
    saturated,
    unrows,
)
from commsweep.compressors.bits import pack, packed_bytes, unpack, unpack_flags
from commsweep.compressors.kernels import cpu, elias
from commsweep.compressors.kernels import levels as kernels
from commsweep.config.compressors.qsgd import QSGDSpec
from commsweep.config.compressors.values.levels import (
    E3M0Spec,
    NaturalSpec,
    OneBitSpec,
    SignSpec,
    StatisticalSpec,
    TernSpec,
)
from commsweep.errors import UserError


class Levels(Compressor[S]):
    """Base: a message's codes and scales, and the values they stand for."""

    code_bits: int = 1
    scales = 1  # float32 numbers a sample

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        flat = rows(x).float()
        codes, scales = self._codes(flat, seed)
        return unrows(self._values(codes, scales).to(x.dtype), x)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return packed_bytes(shape.numel(), self.code_bits) + 4 * self.scales * row_shape(shape)[0]

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [
            {
                "codes": Field(torch.uint8, (packed_bytes(shape.numel(), self.code_bits),)),
                "scales": Field(torch.float32, (row_shape(shape)[0], self.scales)),
            }
        ]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        codes, scales = self._codes(rows(x).float(), seed)
        return payload(x, codes=pack(codes.flatten(), self.code_bits), scales=scales)

    def _decode(self, payload: Payload) -> Tensor:
        n_rows, row = row_shape(payload.shape)
        packed = payload.parts["codes"]
        if self.code_bits == 1:
            codes = unpack_flags(packed, n_rows * row)
        else:
            codes = unpack(packed, self.code_bits, n_rows * row)
        codes = codes.reshape(n_rows, row)
        return unrows(self._values(codes, payload.parts["scales"]).to(payload.dtype), payload)

    def _codes(self, flat: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Whole codes [rows, n] and scales [rows, `scales`] of float32 flat [rows, n]."""
        raise NotImplementedError

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        """float32 values [rows, n]."""
        raise NotImplementedError


@COMPRESSORS.of(SignSpec)
class Sign(Levels[SignSpec]):
    """The sign (of zero: +) times a scale: mean |x| (EF-signSGD), |x|_2 / sqrt(n) (1-bit Adam), or
    1 (signSGD).

    nbytes = ceil(elements / 8) + 4 * samples. The 1 of signSGD travels, too, so that a bad value
    stays visible. Source: Bernstein 2018; Karimireddy 2019; Tang 2021.
    """

    def _codes(self, flat: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        size = flat.abs().mean(1, keepdim=True)
        if self.spec.scale == "l2":
            size = divided(_norm(flat, 2, 1), flat.shape[1] ** 0.5)
        elif self.spec.scale == "one":
            size = 1 + (size - size)  # NaN where a value is not finite
        return flat >= 0, size

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return _chosen(codes, -scales, scales)


@COMPRESSORS.of(OneBitSpec)
class OneBit(Levels[OneBitSpec]):
    """Values below zero become their mean, the others theirs (1-bit SGD, Seide 2014).

    nbytes = ceil(elements / 8) + 8 * samples.
    """

    scales = 2

    def _codes(self, flat: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        up = flat >= 0
        n = up.sum(1, keepdim=True)
        high = flat.where(up, 0.0).sum(1, keepdim=True) / n.clamp(min=1)
        low = flat.where(~up, 0.0).sum(1, keepdim=True) / (flat.shape[1] - n).clamp(min=1)
        return up, torch.cat([low, high], dim=1)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return _chosen(codes, scales[:, :1], scales[:, 1:])


@COMPRESSORS.of(TernSpec)
class Tern(Levels[TernSpec]):
    """s * sign(x) with probability |x| / s, else zero; s = max |x|, entries clipped at `clip`
    deviations first.

    nbytes = ceil(2 * elements / 8) + 4 * samples. Unbiased without clipping. Source: TernGrad, Wen
    2017 (clip 2.5).
    """

    code_bits = 2

    def _codes(self, flat: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        if self.spec.clip:
            edge = self.spec.clip * flat.std(1, correction=0, keepdim=True)
            flat = flat.clamp(-edge, edge)
        s = torch.linalg.vector_norm(flat, torch.inf, 1, keepdim=True)
        drawn = draws.uniform(flat.shape, seed, flat.device)
        if cpu.usable(flat):
            return kernels.tern_codes(flat, drawn, s), s
        sent = drawn * s < flat.abs()
        return sent.byte() << (~(flat > 0)).byte(), s

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        if cpu.usable(scales):
            return kernels.tern_values(codes, scales)
        return torch.where(codes == 1, scales, torch.where(codes == 2, -scales, scales - scales))


@COMPRESSORS.of(E3M0Spec)
class E3M0(Levels[E3M0Spec]):
    """Sign and exponent: s 2^-j for j = 0 .. 6, or zero; s = max |x| of a sample.

    The nearest in the logarithm (a mantissa below sqrt(1/2) rounds down); zero below s / 128, half
    of the least value. nbytes = ceil(elements / 2) + 4 * samples. Source: the format of arXiv
    2501.18512, whose scale is not published.
    """

    code_bits = 4

    def _codes(self, flat: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        s = flat.abs().amax(1, keepdim=True)
        # mantissa 2^exponent, mantissa in [1/2, 1)
        mantissa, exponent = torch.frexp((flat.abs() / s).nan_to_num(0.0))
        j = torch.where(mantissa >= 0.5**0.5, -exponent, 1 - exponent)
        j = torch.where(flat.abs() * 128 < s, 7, j.clamp(0, 6))
        return torch.where(flat < 0, 8, 0) + torch.where(s > 0, j, 7), s

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        j = (codes % 8).to(torch.int32)
        sizes = ((127 - j) << 23).view(torch.float32).where(j < 7, 0.0) * scales  # the bits of 2^-j
        return torch.where(codes >= 8, -sizes, sizes)


@COMPRESSORS.of(StatisticalSpec)
class Statistical(Compressor[StatisticalSpec]):
    """2^bits levels over all values: code = round(c / scale + bins / 2) of c = x - mean(x), scale =
    range std / bins, bins = 2^bits; a level stands for the mean of the values that it takes.

    Sums are float64, all else float32. nbytes = ceil(elements * bits / 8) + 4 * bins: the mean is
    added to the levels before they travel. Source: SparseLoCo, arXiv 2508.15706, whose code sends
    it apart.
    """

    def __init__(self, spec: StatisticalSpec) -> None:
        super().__init__(spec)
        self.code_bits = spec.bits

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        codes, book = self._codes(x)
        return laid_out(book[codes].reshape(x.shape).to(x.dtype), x)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return packed_bytes(shape.numel(), self.spec.bits) + 4 * 2**self.spec.bits

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [
            {
                "codes": Field(torch.uint8, (packed_bytes(shape.numel(), self.spec.bits),)),
                "book": Field(torch.float32, (2**self.spec.bits,)),
            }
        ]

    def _codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """int64 codes [elements] in the order of the message's dimensions, and what they stand for
        [bins].
        """
        flat, bins = x.reshape(-1).float(), 2**self.spec.bits
        if cpu.usable(flat):
            return cpu.level_means(flat, bins, self.spec.range)
        shift = flat.mean(dtype=torch.float64).float()
        c = flat - shift
        scale = self.spec.range * (c.double().square().sum() / max(1, c.numel() - 1)).sqrt() / bins
        codes = (
            (c / scale.float().clamp(min=1e-30) + bins / 2)
            .round()
            .clamp(0, bins - 1)
            .nan_to_num(0.0)
            .long()
        )
        taken = torch.stack([codes == j for j in range(bins)])
        means = (c * taken).sum(1, dtype=torch.float64) / taken.sum(1).clamp(min=1)
        return codes, means.float() + shift

    def _encode(self, x: Tensor, seed: int) -> Payload:
        codes, book = self._codes(x)
        return payload(x, codes=pack(codes, self.spec.bits), book=book)

    def _decode(self, payload: Payload) -> Tensor:
        codes = unpack(payload.parts["codes"], self.spec.bits, payload.shape.numel())
        return laid_out(
            payload.parts["book"][codes].reshape(payload.shape).to(payload.dtype), payload
        )


@COMPRESSORS.of(NaturalSpec)
class Natural(Compressor[NaturalSpec]):
    """To a power of two, up or down so that the expectation is x: sign and exponent travel (Horvath
    2019).

    nbytes = ceil(9 * elements / 8). The exponent stops at float32's largest, and 0 stands for zero.
    """

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return unrows(saturated(self._floats(self._bits(rows(x), seed)), x.dtype), x)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return packed_bytes(shape.numel(), 9)

    def _bits(self, flat: Tensor, seed: int) -> Tensor:
        """int32: the float32 pattern with its mantissa rounded away, up with probability mantissa /
        2^23.
        """
        pattern = flat.float().contiguous().view(torch.int32)
        size = pattern & 0x7FFFFFFF
        size = size + (draws.uniform(size.shape, seed, size.device) * 2**23).to(torch.int32)
        size = torch.where(
            (pattern & 0x7FFFFFFF) < 0x7F800000,
            size.clamp(max=0x7F000000 + (1 << 23) - 1),
            0x7F800000,
        )
        return (size & 0x7F800000) | (pattern & -0x80000000).where(size >= 1 << 23, 0)

    def _floats(self, bits: Tensor) -> Tensor:
        return bits.view(torch.float32)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [{"codes": Field(torch.uint8, (packed_bytes(shape.numel(), 9),))}]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        bits = self._bits(rows(x), seed).flatten()
        return payload(x, codes=pack((bits >> 23) & 511, 9))

    def _decode(self, payload: Payload) -> Tensor:
        codes = unpack(payload.parts["codes"], 9, payload.shape.numel())
        bits = codes.to(torch.int32) << 23  # the ninth bit of a code becomes the sign
        return unrows(
            saturated(self._floats(bits).reshape(row_shape(payload.shape)), payload.dtype), payload
        )


@COMPRESSORS.of(QSGDSpec)
class QSGD(Compressor[QSGDSpec]):
    """norm * sign(x) * level / s, the level drawn around |x| s / norm; norm over `bucket` elements
    (Alistarh 2017).

    Elias coding (Sec. 3.2): for every non-zero the run since the last one and the level as Elias
    gamma codes, and a sign bit; nbytes = ceil(code bits / 8) + 4 a bucket, which depends on the
    data. Fixed coding: ceil(elements * (1 + bits of s) / 8) + 4 a bucket. Buckets of L2 norm:
    unbiased; `norm` "max": tighter levels.
    """

    _sent: Tensor | int = 0  # bytes of the last message

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        flat = rows(x).float()
        levels, norms = self._levels(flat, seed)
        self._sent = self._code_bytes(levels) + 4 * norms.numel()
        return unrows(self._values(levels, norms).to(x.dtype), x)

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        return self._sent

    def _levels(self, flat: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Signed whole levels int32 [rows, n] and norms [rows, buckets]."""
        n_rows, n = flat.shape
        short = -n % self.spec.bucket if n > self.spec.bucket else 0
        groups = torch.nn.functional.pad(flat, (0, short)).reshape(
            n_rows, -1, min(self.spec.bucket, n + short)
        )
        order = torch.inf if self.spec.norm == "max" else 2
        norms = _norm(groups, order, 2)
        gain = self.spec.levels / norms
        gain = torch.where(norms > 0, gain.clamp(max=torch.finfo(torch.float32).max), 0.0)
        drawn = draws.uniform(groups.shape, seed, groups.device)
        if cpu.usable(groups):
            levels = kernels.drawn_levels(
                groups.flatten(0, 1), gain.flatten(), drawn, self.spec.levels
            )
            return levels.reshape(n_rows, -1)[:, :n], norms[:, :, 0]
        drawn = (groups.abs() * gain + drawn).floor_().clamp_(max=self.spec.levels)
        levels = torch.where(groups < 0, -drawn, drawn).nan_to_num(0.0).to(torch.int32)
        return levels.reshape(n_rows, -1)[:, :n], norms[:, :, 0]

    def _values(self, levels: Tensor, norms: Tensor) -> Tensor:
        n = levels.shape[1]
        step = divided(norms, self.spec.levels)
        if cpu.usable(step):
            return kernels.level_values(levels, step, min(self.spec.bucket, n))
        return levels * step.repeat_interleave(min(self.spec.bucket, n), dim=1)[:, :n] + 0.0

    def _code_bytes(self, levels: Tensor) -> Tensor | int:
        if self.spec.coding == "fixed":
            return packed_bytes(levels.numel(), 1 + self.spec.levels.bit_length())
        if cpu.numba is not None and levels.device.type == "cpu":
            return kernels.elias_bytes(levels)
        flat = torch.nn.functional.pad(levels.flatten(), (0, -levels.numel() % 1024)).view(-1, 1024)
        nonzero, positions = (
            flat != 0,
            torch.arange(1, flat.numel() + 1, device=flat.device).view(flat.shape),
        )
        # in parts: a GPU takes one long row entry by entry
        previous = positions.where(nonzero, 0).cummax(1).values
        before = previous[:, -1].cummax(0).values.roll(1)
        before[0] = 0
        # the last non-zero's place before this one
        last = torch.maximum(previous, before[:, None]).flatten().roll(1)
        last[0] = 0
        bits = (
            1
            + _gamma_bits(positions - last.view(flat.shape))
            + _gamma_bits(flat.abs().clamp(min=1))
        )
        return (bits.where(nonzero, 0).sum() + 7) // 8

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        n_rows, row = row_shape(shape)
        norms = Field(torch.float32, (n_rows, -(-row // self.spec.bucket)))
        width = self.spec.levels.bit_length()
        if self.spec.coding == "fixed":
            return [
                {
                    "codes": Field(torch.uint8, (packed_bytes(shape.numel(), 1 + width),)),
                    "norms": norms,
                }
            ]
        # The longest code: every entry at a run of one, its sign, and the largest level.
        return [
            {
                "codes": Field(torch.uint8, None, packed_bytes(shape.numel(), 1 + 2 * width)),
                "norms": norms,
            }
        ]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        levels, norms = self._levels(rows(x).float(), seed)
        flat = levels.flatten()
        if self.spec.coding == "fixed":
            bare = cpu.numba is None or flat.device.type != "cpu"
            codes = (2 * flat.abs()).add_(flat < 0) if bare else kernels.folded(flat)
            return payload(
                x, codes=pack(codes, 1 + self.spec.levels.bit_length()), norms=norms.contiguous()
            )
        codes = torch.from_numpy(elias.elias_encode(flat.cpu().numpy())).to(x.device)
        return payload(x, codes=codes, norms=norms.contiguous())

    def _decode(self, payload: Payload) -> Tensor:
        n_rows, row = row_shape(payload.shape)
        codes, norms = payload.parts["codes"], payload.parts["norms"]
        if self.spec.coding == "fixed":
            packed = unpack(codes, 1 + self.spec.levels.bit_length(), n_rows * row)
            if cpu.numba is not None and packed.device.type == "cpu":
                flat = kernels.unfolded(packed)
            else:
                size = (packed >> 1).to(torch.int32)
                flat = torch.where((packed & 1).bool(), -size, size)
        else:
            flat = torch.from_numpy(elias.elias_decode(codes.cpu().numpy(), n_rows * row)).to(
                codes.device
            )
        if flat.numel():
            lowest, highest = torch.aminmax(flat)
            if int(highest) > self.spec.levels or int(lowest) < -self.spec.levels:
                raise UserError(f"a code names a level beyond {self.spec.levels}")
        return unrows(self._values(flat.reshape(n_rows, row), norms).to(payload.dtype), payload)


def _chosen(codes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`high` [rows, 1] where codes [rows, n] are true, else `low` [rows, 1]."""
    if cpu.usable(low) and codes.dtype is torch.bool:
        return kernels.two_values(codes, low, high)
    return torch.where(codes.bool(), high, low)


def _norm(x: Tensor, order: float, axis: int) -> Tensor:
    """float32, summed in float64: a square of 1e20 is no float32."""
    return torch.linalg.vector_norm(
        x, ord=order, dim=axis, keepdim=True, dtype=torch.float64
    ).float()


def _gamma_bits(value: Tensor) -> Tensor:
    """Length of Elias gamma codes of whole numbers of at least 1: 2 floor(log2 v) + 1."""
    return 2 * torch.frexp(value.double()).exponent - 1

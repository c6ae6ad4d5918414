"""Random rotations before a code: signs drawn from the message's seed, then Hadamard blocks.

A rotation spreads what is large over its block, so that a code with one scale a block wastes less
of its range; and over many draws of the signs its errors average out. A sample is cut into blocks
of `block` elements in its order in memory, its rest into blocks of falling powers of two, so that
any shape works without padding. The seed travels: 8 bytes a message.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
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
    row_shape,
    rows,
    unrows,
)
from commsweep.compressors.bits import pack, packed_bytes, unpack_small
from commsweep.compressors.kernels import rotation as kernels
from commsweep.compressors.mx import E2M1, E4M3, MX
from commsweep.compressors.transform import matrix_on
from commsweep.config.compressors.rotation import EdenSpec, MSEdenSpec, RotatedSpec
from commsweep.config.compressors.values.mx import MXSpec
from commsweep.errors import UserError

APART = 1 << 61
# Of EDEN. After one round the entries of a message with outliers are not normal enough for its
# scale to remove the bias: 9 % of the message remain at one bit. After two rounds none is seen.
ROUNDS = 2
# Blocks from this size on are rotated evenly enough by signs and Hadamard: in blocks of 2 entries
# 57 % of a message would remain as bias at one bit, in blocks of 128 half a percent does.
SURE = 128
PREFIX = "code."  # of the parts of the code behind a rotation


@lru_cache(maxsize=256)
def blocks(row: int, block: int) -> tuple[tuple[int, int], ...]:
    """(first element, size) of each run of equal blocks of a sample: all whole blocks together,
    then falling powers of two.
    """
    cuts, start, size = [], 0, block
    while start < row:
        full = (row - start) // size * size
        if full:
            cuts.append((start, size))
            start += full
        size //= 2
    return tuple(cuts)


def counted(row: int, block: int) -> int:
    """Scales of a sample of EDEN, one a block."""
    return sum((end - start) // size for start, end, size in cuts(row, block))


def sign_words(row: int, seed: int, device: torch.device) -> Tensor:
    """int64 [ceil(row / 64)]: the signs of a sample's elements, a bit each, lowest first."""
    # Another stream than the one that stochastic rounding behind the rotation draws from.
    return draws.words(-(-row // 64), seed ^ APART, device)


def signs(row: int, seed: int, device: torch.device) -> Tensor:
    """float32 [row] of 1 and -1, the same for every sample of a message."""
    return unpacked(sign_words(row, seed, device), row)


def unpacked(words: Tensor, count: int) -> Tensor:
    """float32 [count] of 1 and -1: the first signs of words, int64."""
    bits = words[:, None] >> torch.arange(64, device=words.device) & 1
    return 1.0 - 2.0 * bits.view(-1)[:count].float()


def hadamard(flat: Tensor, block: int) -> Tensor:
    """float32 [samples, row] with every block multiplied by the orthonormal Hadamard matrix, which
    is its own inverse; a new tensor.
    """
    n, row = flat.shape
    cuts = blocks(row, block)
    ends = [start for start, _ in cuts] + [row]
    pieces = []
    for (start, size), end in zip(cuts, ends[1:], strict=True):
        piece = flat[:, start:end].reshape(n, -1, size)
        pieces.append((piece @ matrix_on("hadamard", size, flat.device)).view(n, -1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def rotated(x: Tensor, block: int, seed: int) -> Tensor:
    """float32 [samples, row]: signs, then Hadamard blocks."""
    flat = rows(x).float()
    return hadamard(flat * signs(flat.shape[1], seed, x.device), block)


def back(flat: Tensor, block: int, seed: int) -> Tensor:
    """The inverse of `rotated`, as [samples, row]."""
    return hadamard(flat, block) * signs(flat.shape[1], seed, flat.device)


@lru_cache(maxsize=256)
def cuts(row: int, block: int) -> tuple[tuple[int, int, int], ...]:
    """(first element, end, size) of each run of equal blocks of a sample that is rotated without
    bias: whole blocks, falling powers of two down to `SURE`, and one block of what is left.
    """
    runs, start, size = [], 0, block
    while start < row:
        full = (row - start) // size * size
        if full:
            runs.append((start, start + full, size))
            start += full
        if 0 < row - start < SURE:
            runs.append((start, row, row - start))
            break
        size //= 2
    return tuple(runs)


def orthogonal(size: int, seed: int) -> Tensor:
    """float32 [size, size]: a random rotation or reflection, uniform over all of them (Haar)."""
    generator = torch.Generator().manual_seed((seed ^ APART) & (2**63 - 1))
    gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float()


def uniform(x: Tensor, block: int, seed: int) -> Tensor:
    """float32 [samples, row], rotated so that EDEN's scale leaves no bias: two rounds of signs and
    Hadamard in blocks of `SURE` and more, a uniform rotation in smaller ones.
    """
    flat = rows(x).float()
    for round_ in range(ROUNDS):
        flat = flat * signs(flat.shape[1], seed ^ round_ << 60, x.device)
        flat = _spun(flat, block, seed, round_, inverse=False)
    return flat


def uniform_back(flat: Tensor, block: int, seed: int) -> Tensor:
    """The inverse of `uniform`, as [samples, row]."""
    for round_ in reversed(range(ROUNDS)):
        flat = _spun(flat, block, seed, round_, inverse=True)
        flat = flat * signs(flat.shape[1], seed ^ round_ << 60, flat.device)
    return flat


def _spun(flat: Tensor, block: int, seed: int, round_: int, inverse: bool) -> Tensor:
    n, pieces = len(flat), []
    for start, end, size in cuts(flat.shape[1], block):
        piece = flat[:, start:end].reshape(n, -1, size)
        if size >= SURE:
            piece = piece @ matrix_on("hadamard", size, flat.device)
        elif round_ == 0:  # once is enough
            matrix = orthogonal(size, seed).to(flat.device, non_blocking=True)
            piece = piece @ (matrix.mT if inverse else matrix)
        pieces.append(piece.reshape(n, -1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


class Rotation:
    """EDEN's rotation of a message: two rounds of signs and butterflies in blocks of `SURE` and
    more, signs and a uniform rotation in smaller ones. Butterflies add in one order on the CPU,
    compiled or not; a GPU multiplies by a matrix.
    """

    def __init__(self, row: int, seed: int, device: torch.device) -> None:
        """row: elements of a sample."""
        self.seed, self.device = seed, device
        first, second = (sign_words(row, seed ^ n << 60, device) for n in range(ROUNDS))
        self.words = first, second

    def signs(self, round_: int, cut: tuple[int, int, int]) -> Tensor:
        """float32 [blocks, size] of 1 and -1 in a round, of a cut, which begins at a whole word."""
        start, end, size = cut
        return unpacked(self.words[round_][start >> 6 :], end - start).view(-1, size)

    def forward(self, piece: Tensor, cut: tuple[int, int, int]) -> Tensor:
        """float32 [samples, blocks, size], rotated."""
        size = cut[2]
        first, second = self.signs(0, cut), self.signs(1, cut)
        if size < SURE:
            return piece * first @ self._small(size) * second
        unit = torch.tensor(size**-0.5, device=self.device)
        return butterflies(butterflies(piece * first) * (second * unit)) * unit

    def back(self, piece: Tensor, cut: tuple[int, int, int]) -> Tensor:
        """The inverse of `forward`."""
        size = cut[2]
        first, second = self.signs(0, cut), self.signs(1, cut)
        if size < SURE:
            return piece * second @ self._small(size).mT * first
        unit = torch.tensor(size**-0.5, device=self.device)
        return butterflies(butterflies(piece) * (second * unit)) * (first * unit)

    def _small(self, size: int) -> Tensor:
        return orthogonal(size, self.seed).to(self.device, non_blocking=True)


def butterflies(piece: Tensor) -> Tensor:
    """The Hadamard transform of the last axis [..., size], a power of two, without its factor: sums
    and differences at strides 1, 2, 4, ...
    """
    size = piece.shape[-1]
    if piece.is_cuda:
        return piece @ matrix_on("hadamard", size, piece.device) * size**0.5
    stride = 1
    while stride < size:
        pairs = piece.unflatten(-1, (-1, 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        piece = torch.stack([a + b, a - b], -2).flatten(-3)
        stride *= 2
    return piece


def halved(x: Tensor) -> Tensor:
    """Sums over the last axis: halves of a power of two are added until one entry is left."""
    size = x.shape[-1]
    if size & (size - 1):
        return x.sum(-1)
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def _unit(x: Tensor) -> Tensor:
    """A power of two that brings the largest magnitude of x near 1 where squares or sums of it
    could leave the range of float32; else 1.
    """
    most = x.abs().amax() if x.numel() else x.new_ones(())
    exponent = torch.frexp(most.float()).exponent.clamp(-120, 120)
    extreme = (exponent.abs() > 96) & (most > 0)
    return torch.where(extreme, torch.ldexp(torch.ones_like(most), -exponent), 1.0)


def scaled(x: Tensor, unit: Tensor) -> Tensor:
    """x times a power of two; on the CPU x itself where that is 1, as it nearly always is."""
    return x if x.device.type == "cpu" and float(unit) == 1 else x * unit


@COMPRESSORS.of(RotatedSpec)
class Rotated(Compressor[RotatedSpec]):
    """A code behind a random rotation.

    y = R^T decode(encode(R x)), R = blocks of H diag(signs). The code sees [samples, elements] in
    float32. nbytes = those of the code + 8.
    """

    def __init__(self, spec: RotatedSpec, code: Compressor) -> None:
        super().__init__(spec)
        self.code = code

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        y = self.code.apply(rotated(x, self.spec.block, seed), seed)
        return unrows(self._back(y, seed).to(x.dtype), x)

    def _back(self, flat: Tensor, seed: int) -> Tensor:
        """Undo the rotation of [samples, row]."""
        return back(flat, self.spec.block, seed)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.code.formula_bytes(torch.Size(row_shape(shape)), torch.float32) + 8

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        return self.code.bytes_sent(torch.empty(row_shape(y.shape), device="meta")) + 8

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        layouts = self.code.layouts(torch.Size(row_shape(shape)), torch.float32)
        return [
            {PREFIX + name: field for name, field in form.items()}
            | {"seed": Field(torch.int64, (1,))}
            for form in layouts
        ]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        inner = self.code._encode(rotated(x, self.spec.block, seed), seed)
        fields = {PREFIX + name: tensor for name, tensor in inner.parts.items()}
        return payload(x, **fields, seed=torch.tensor([seed], dtype=torch.int64))

    def _decode(self, payload: Payload) -> Tensor:
        fields = {
            name[len(PREFIX) :]: tensor
            for name, tensor in payload.parts.items()
            if name.startswith(PREFIX)
        }
        shape = torch.Size(row_shape(payload.shape))
        inner = replace(
            payload, parts=fields, shape=shape, dtype=torch.float32, channels_last=False
        )
        seed = int(payload.parts["seed"])
        y = self._back(self.code._decode(inner), seed)
        return unrows(y.to(payload.dtype), payload)


@lru_cache
def centroids(bits: int) -> Tensor:
    """float32 [2^(bits - 1)]: the positive levels of the Lloyd-Max quantizer of N(0, 1), rising."""
    from scipy.special import ndtr

    levels = np.linspace(0, 4.5, 2**bits + 1)[1::2]
    for _ in range(100 * 2**bits):
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density, below = np.exp(-edges * edges / 2) / math.sqrt(2 * math.pi), ndtr(edges)
        moved = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
        still = np.abs(moved - levels).max() < 1e-10
        levels = moved
        if still:
            break
    # Rounded, so that senders and receivers whose libraries differ in the last bits agree.
    return torch.tensor(np.round(levels, 5), dtype=torch.float32)


@lru_cache
def levels_on(bits: int, device: torch.device) -> Tensor:
    """`centroids` on a device, where they stay."""
    return centroids(bits).to(device)


@COMPRESSORS.of(EdenSpec)
class Eden(Compressor[EdenSpec]):
    """Lloyd-Max levels behind a random rotation, scaled so that the mean of what arrives is x.

    z = sqrt(d) R x / |x| of a block of d elements; c = the nearest centroid of N(0, 1) to each;
    y = R^T s c with s = |x| sqrt(d) / <c, z>. One bit is DRIVE. nbytes = ceil(elements * bits / 8)
    + 4 a block + 8. Sources: EDEN (Vargaftik et al., arXiv 2108.08842), DRIVE (arXiv 2105.08339).
    """

    def __init__(self, spec: EdenSpec) -> None:
        super().__init__(spec)
        self.code_bits = spec.bits

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        n_rows, row = row_shape(shape)
        codes = packed_bytes(shape.numel(), self.spec.bits)
        return codes + 4 * n_rows * counted(row, self.spec.block) + 8

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        n_rows, row = row_shape(shape)
        return [
            {
                "codes": Field(torch.uint8, (packed_bytes(shape.numel(), self.spec.bits),)),
                "scales": Field(torch.float32, (n_rows, counted(row, self.spec.block))),
                "seed": Field(torch.int64, (1,)),
            }
        ]

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        codes, scales = self._codes(x, seed)
        return unrows(self._values(codes, scales, seed).to(x.dtype), x)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        codes, scales = self._codes(x, seed)
        packed = pack(codes.view(-1), self.spec.bits)
        seed_tensor = torch.tensor([seed], dtype=torch.int64)
        return payload(x, codes=packed, scales=scales, seed=seed_tensor)

    def _decode(self, payload: Payload) -> Tensor:
        n_rows, row = row_shape(payload.shape)
        scales = payload.parts["scales"].view(n_rows, -1)
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise UserError("a scale of EDEN is no positive number")
        codes = unpack_small(payload.parts["codes"], self.spec.bits, n_rows * row)
        y = self._values(codes.view(n_rows, row), scales, int(payload.parts["seed"]))
        return unrows(y.to(payload.dtype), payload)

    def _codes(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """(codes uint8 [samples, row], scales [samples, blocks])."""
        unit = _unit(x)
        flat = scaled(rows(x).float(), unit).contiguous()
        levels = levels_on(self.spec.bits, x.device)
        rotation = Rotation(flat.shape[1], seed, x.device)
        codes = torch.empty(flat.shape, dtype=torch.uint8, device=x.device)
        scales = []
        for cut in cuts(flat.shape[1], self.spec.block):
            start, end, size = cut
            if size >= SURE and kernels.usable(flat):
                scales.append(kernels.codes_of(flat, rotation.words, cut, levels, codes))
                continue
            piece = rotation.forward(flat[:, start:end].reshape(len(flat), -1, size), cut)
            # The largest magnitude first: squares of large numbers would not be finite.
            most = piece.abs().amax(2, keepdim=True)
            safe = torch.where(most > 0, most, 1.0)
            norm = halved((piece / safe).square()).double().sqrt().float() * safe[..., 0]
            # A block so small beside the message that its reciprocal is infinite arrives as zero.
            is_small = norm <= size * torch.finfo(torch.float32).tiny
            root = torch.tensor(size**0.5, device=x.device)
            z = piece * (root / torch.where(is_small, 1.0, norm))[..., None]
            level = torch.bucketize(z.abs(), (levels[1:] + levels[:-1]) / 2)
            product = halved(levels[level] * z.abs())
            scales.append((norm * root / product).where(~is_small, 0.0))
            half = len(levels)
            signed = torch.where(z < 0, half - 1 - level, half + level)
            codes[:, start:end] = signed.view(len(flat), -1)
        return codes, (torch.cat(scales, 1) if len(scales) > 1 else scales[0]) / unit

    def _values(self, codes: Tensor, scales: Tensor, seed: int) -> Tensor:
        """Return what arrives, [samples, row]."""
        positive = levels_on(self.spec.bits, codes.device)
        levels = torch.cat([-positive.flip(0), positive])
        unit = _unit(scales)
        rotation = Rotation(codes.shape[1], seed, codes.device)
        out, at = torch.empty(codes.shape, device=codes.device), 0
        for cut in cuts(codes.shape[1], self.spec.block):
            start, end, size = cut
            count = (end - start) // size
            scale = scales[:, at : at + count] * unit
            at += count
            if size >= SURE and kernels.usable(out):
                kernels.values_of(codes, scale, rotation.words, cut, levels, out)
                continue
            piece = levels[codes[:, start:end].long()].view(len(codes), count, size)
            out[:, start:end] = rotation.back(piece * scale[..., None], cut).view(len(codes), -1)
        return scaled(out, 1 / unit)


@COMPRESSORS.of(MSEdenSpec)
class MSEden(Rotated):
    """NVFP4 behind a random rotation, without bias: the scale of each block of 16 is corrected by
    S = sum x^2 / sum x q and rounded stochastically to e4m3.

    T = max|x| / (256 * 6) leaves room for the correction. nbytes = ceil(elements / 2) +
    ceil(elements / 16) + 4 + 8. Source: MS-EDEN (Quartet II, arXiv 2601.22813).
    """

    def __init__(self, spec: MSEdenSpec) -> None:
        super().__init__(spec, MX(MXSpec(format="nvfp4")))  # pyright: ignore[reportArgumentType]

    def _back(self, flat: Tensor, seed: int) -> Tensor:
        return uniform_back(flat, self.spec.block, seed)

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        sizes, negative, scales, tensor_scale = self._coded(x, seed)
        values = sizes * (scales * tensor_scale)[:, None]
        values = torch.where(negative, -values, values).view(-1)[: x.numel()]
        values = values.where(torch.isfinite(tensor_scale), torch.nan)  # what is not finite is seen
        flat = values.view(row_shape(x.shape))
        return unrows(self._back(flat, seed).to(x.dtype), x)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        sizes, negative, scales, tensor_scale = self._coded(x, seed)
        codes = E2M1.encode(sizes) + torch.where(negative, 8, 0)
        sent = {
            "codes": pack(codes.view(-1)[: x.numel()], 4),
            "scales": E4M3.encode(scales).to(torch.uint8),
            "whole": tensor_scale,
        }
        fields = {PREFIX + name: tensor for name, tensor in sent.items()}
        return payload(x, **fields, seed=torch.tensor([seed], dtype=torch.int64))

    def _coded(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(magnitudes [blocks, 16], where they are negative, scales [blocks], T [1])."""
        code = self.code
        assert isinstance(code, MX)
        tiles = code.blocks(uniform(x, self.spec.block, seed))
        most = tiles.abs().amax(1)
        tensor_scale = divided(most.amax().reshape(1), 256 * E2M1.most)
        safe = torch.where(tensor_scale > 0, tensor_scale, 1.0)
        scale = E4M3.rounded(divided(most, E2M1.most) / safe).clamp(min=2.0**-9)
        sizes = E2M1.rounded((tiles.abs() / (scale * safe)[:, None]).clamp(max=2.0**20))
        # In units of T, in which no square overflows.
        levels, exact = tiles.abs() / safe, sizes * scale[:, None]
        product = (levels * exact).sum(1)
        correction = levels.square().sum(1) / torch.where(product > 0, product, 1.0)
        drawn = draws.uniform(scale.shape, seed ^ APART, x.device)
        scales = E4M3.rounded((scale * correction).clamp(max=E4M3.most), drawn)
        return sizes, (tiles < 0) & (sizes > 0), scales.nan_to_num(0.0), tensor_scale

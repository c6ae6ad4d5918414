"""Compiled CPU kernels between tensors and packed bytes, at memory speed; absent numba, or off the CPU, torch does it.

Everything that reads bytes checks them first: a code that names no place is reported, never followed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from experiments.compressors import kernels
from experiments.compressors.kernels import _compiled, _over_rows, _rank

_BLOCK = 512  # codes made at once: a block stays in the first cache, and 512 codes of any width end at a whole byte


def usable(x: Tensor) -> bool:
    """Whether the kernels serve codes x: on the CPU, and numba installed."""
    return kernels.numba is not None and x.device.type == "cpu"


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Whole codes [n] below 2**bits, of any integer type -> uint8 [ceil(n * bits / 8)]."""
    source, out = codes.detach().contiguous().numpy(), np.empty(-(-codes.numel() * bits // 8), np.uint8)
    if bits == 1:
        return torch.from_numpy(np.packbits(source, bitorder="little")) if source.size else torch.from_numpy(out)
    if source.dtype == np.bool_:
        source = source.view(np.uint8)
    _over_blocks(lambda a, b: _pack(source, bits, out, a, b), source.size)
    return torch.from_numpy(out)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack_codes`: int64 codes [count]."""
    source, out = packed.contiguous().numpy(), np.empty(count, np.int64)
    _over_blocks(lambda a, b: _unpack(source, bits, out, a, b), count)
    return torch.from_numpy(out)


def unpack_flags(packed: Tensor, count: int) -> Tensor:
    """One-bit codes as booleans [count]."""
    return torch.from_numpy(np.unpackbits(packed.contiguous().numpy(), count=count, bitorder="little").view(np.bool_))


def quantize(x: Tensor, shift: Tensor, gain: Tensor, bits: int, signed: bool) -> Tensor:
    """Packed codes of float32 x [groups, n], with shift and gain [groups].

    Not signed: rint((x - shift) * gain) in [0, 2^b - 1]. Signed: rint(x / shift * gain) in [-2^(b-1), 2^(b-1) - 1],
    plus 2^(b-1); a shift of zero counts as one.
    """
    source = x.detach().contiguous().numpy()
    out = np.empty(-(-x.numel() * bits // 8), np.uint8)
    args = source, shift.contiguous().numpy(), gain.contiguous().numpy(), bits, signed, out
    _over_blocks(lambda a, b: _quantize(*args, a, b), source.size)
    return torch.from_numpy(out)


def dequantize(packed: Tensor, shape: tuple[int, int], shift: Tensor, step: Tensor, bits: int,
               signed: bool) -> Tensor:
    """float32 [groups, n] of packed codes q: q * step + shift; signed: (q - 2^(b-1)) / 2^(b-1) * step."""
    out = np.empty(shape, np.float32)
    args = packed.contiguous().numpy(), shift.contiguous().numpy(), step.contiguous().numpy(), bits, signed, out
    _over_blocks(lambda a, b: _dequantize(*args, a, b), out.size)
    return torch.from_numpy(out)


def select(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest magnitudes of each row of float32 x [rows, n], of ties the first: values and columns [rows, k]."""
    source = x.detach().contiguous()
    values, columns = torch.empty(x.shape[0], k), np.empty((x.shape[0], k), np.int32)
    arrays = source.view(torch.int32).numpy(), values.view(torch.int32).numpy(), columns
    _over_rows(lambda a, b: _select(arrays[0], k, arrays[1], arrays[2], a, b), *source.shape)
    return values, torch.from_numpy(columns)


def place(values: Tensor, columns: Tensor, row: int) -> Tensor | None:
    """Zeros [rows, row] with values [rows, k] at columns [rows, k]; None unless each row's columns ascend within it."""
    out, good = torch.zeros(columns.shape[0], row), np.ones(columns.shape[0], np.bool_)
    args = values.reshape(columns.shape).contiguous().numpy(), columns.contiguous().numpy(), out.numpy(), good
    _over_rows(lambda a, b: _place(*args, a, b), columns.shape[0], row)
    return out if good.all() else None


def spread(values: Tensor, mask: Tensor) -> Tensor | None:
    """Zeros of mask's shape [rows, row] with values [m] at its true entries in order; None unless m are true."""
    source, places = values.contiguous().numpy(), mask.contiguous().view(torch.uint8).numpy().reshape(-1)
    out = np.empty(places.size, np.float32)
    return torch.from_numpy(out).view(mask.shape) if _spread(source, places, out) else None


def _over_blocks(task, n: int) -> None:  # type: ignore[no-untyped-def]
    """task(a, b) over the blocks [a, b) of n codes, on torch's threads."""
    _over_rows(task, -(-n // _BLOCK), _BLOCK)


@_compiled
def _pack(codes, bits, out, block_from, block_to):  # pragma: no cover (compiled)
    start, stop = block_from * _BLOCK, min(codes.size, block_to * _BLOCK)
    place, held, fill = start * bits // 8, np.uint64(0), np.uint64(0)
    for i in range(start, stop):
        held |= np.uint64(codes[i]) << fill
        fill += np.uint64(bits)
        while fill >= np.uint64(8):
            out[place] = np.uint8(held & np.uint64(255))
            place += 1
            held >>= np.uint64(8)
            fill -= np.uint64(8)
    if fill > np.uint64(0):
        out[place] = np.uint8(held & np.uint64(255))


@_compiled
def _unpack(packed, bits, out, block_from, block_to):  # pragma: no cover (compiled)
    start, stop = block_from * _BLOCK, min(out.size, block_to * _BLOCK)
    place, held, fill = start * bits // 8, np.uint64(0), np.uint64(0)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(start, stop):
        while fill < np.uint64(bits):
            held |= np.uint64(packed[place]) << fill
            place += 1
            fill += np.uint64(8)
        out[i] = np.int64(held & mask)
        held >>= np.uint64(bits)
        fill -= np.uint64(bits)


@_compiled
def _quantize(x, shift, gain, bits, signed, out, block_from, block_to):  # pragma: no cover (compiled)
    n = x.shape[1]
    flat = x.reshape(-1)
    codes = np.empty(_BLOCK, np.int32)
    half = np.int32(1 << (bits - 1))
    top = np.int32((1 << bits) - 1)
    for block in range(block_from, block_to):
        start = block * _BLOCK
        stop = min(flat.size, start + _BLOCK)
        here = start
        while here < stop:  # the parts of the block that lie in one group each
            g = here // n
            end = min(stop, (g + 1) * n)
            low, scale = shift[g], gain[g]
            source, made = flat[here:end], codes[here - start : end - start]
            if signed:
                low = low if low != 0 else np.float32(1)
                for i in range(source.size):  # clipped as whole numbers, which vectorises and leaves no NaN
                    made[i] = min(max(np.int32(np.rint(source[i] / low * scale)), -half), half - np.int32(1)) + half
            else:
                for i in range(source.size):
                    made[i] = min(max(np.int32(np.rint((source[i] - low) * scale)), np.int32(0)), top)
            here = end
        place = start * bits // 8
        _pack_block(codes[: stop - start], bits, out[place : place + -(-(stop - start) * bits // 8)])


@_compiled
def _pack_block(codes, bits, out):  # pragma: no cover (compiled)
    """Codes below 2**bits, bits <= 8, into exactly as many bytes as they need."""
    n = codes.size
    if bits == 8:
        for i in range(n):
            out[i] = np.uint8(codes[i])
    elif bits == 4:
        for i in range(n // 2):
            out[i] = np.uint8(codes[2 * i] | codes[2 * i + 1] << 4)
        if n % 2:
            out[n // 2] = np.uint8(codes[n - 1])
    elif bits == 2:
        for i in range(n // 4):
            out[i] = np.uint8(codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6)
        if n % 4:
            byte = np.int32(0)
            for i in range(n % 4):
                byte |= codes[n - n % 4 + i] << 2 * i
            out[n // 4] = np.uint8(byte)
    else:
        held, fill, place = np.uint32(0), np.uint32(0), 0
        for i in range(n):
            held |= np.uint32(codes[i]) << fill
            fill += np.uint32(bits)
            if fill >= np.uint32(8):  # bits < 8: at most one byte is ready
                out[place] = np.uint8(held & np.uint32(255))
                place += 1
                held >>= np.uint32(8)
                fill -= np.uint32(8)
        if fill > np.uint32(0):
            out[place] = np.uint8(held & np.uint32(255))


@_compiled
def _unpack_block(packed, bits, codes):  # pragma: no cover (compiled)
    """Inverse of `_pack_block`."""
    n = codes.size
    if bits == 8:
        for i in range(n):
            codes[i] = packed[i]
    elif bits == 4:
        for i in range(n // 2):
            byte = np.int32(packed[i])
            codes[2 * i] = byte & np.int32(15)
            codes[2 * i + 1] = byte >> np.int32(4)
        if n % 2:
            codes[n - 1] = packed[n // 2] & np.uint8(15)
    elif bits == 2:
        for i in range(n):
            codes[i] = np.int32(packed[i // 4] >> np.uint8(2 * (i % 4))) & np.int32(3)
    else:
        held, fill, mask, place = np.uint32(0), np.uint32(0), np.uint32((1 << bits) - 1), 0
        for i in range(n):
            if fill < np.uint32(bits):
                held |= np.uint32(packed[place]) << fill
                place += 1
                fill += np.uint32(8)
            codes[i] = np.int32(held & mask)
            held >>= np.uint32(bits)
            fill -= np.uint32(bits)


@_compiled
def _dequantize(packed, shift, step, bits, signed, out, block_from, block_to):  # pragma: no cover (compiled)
    n = out.shape[1]
    flat = out.reshape(-1)
    codes = np.empty(_BLOCK, np.int32)
    half = np.float32(2 ** (bits - 1))
    for block in range(block_from, block_to):
        start = block * _BLOCK
        stop = min(flat.size, start + _BLOCK)
        place = start * bits // 8
        _unpack_block(packed[place : place + -(-(stop - start) * bits // 8)], bits, codes[: stop - start])
        here = start
        while here < stop:
            g = here // n
            end = min(stop, (g + 1) * n)
            low, scale = shift[g], step[g]
            values, made = flat[here:end], codes[here - start : end - start]
            if signed:
                for i in range(values.size):
                    values[i] = (np.float32(made[i]) - half) / half * scale
            else:
                for i in range(values.size):
                    values[i] = np.float32(made[i]) * scale + low
            here = end


@_compiled
def _select(x, k, values, columns, row_from, row_to):  # pragma: no cover (compiled)
    n = x.shape[1]
    magnitude = np.int32(0x7FFFFFFF)
    counts = np.zeros((4, 2048), np.int32)
    pool = np.empty(n, np.int32)
    kept, where = np.empty(n + 1, np.int32), np.empty(n + 1, np.int32)
    for r in range(row_from, row_to):
        row = x[r]
        threshold, need, ties = _rank(row, k, False, counts, pool)
        m = 0
        if need == ties:  # every tie stays: no branch, one entry after the other is written and counted if it is kept
            for i in range(n):
                kept[m] = row[i]
                where[m] = i
                m += np.int32(row[i] & magnitude >= threshold)
        else:
            for i in range(n):
                value = row[i] & magnitude
                tied = value == threshold
                kept[m] = row[i]
                where[m] = i
                m += np.int32(value > threshold or (tied and need > 0))
                need -= np.int32(tied)
        values[r, :] = kept[:k]
        columns[r, :] = where[:k]


@_compiled
def _place(values, columns, out, good, row_from, row_to):  # pragma: no cover (compiled)
    row = out.shape[1]
    for r in range(row_from, row_to):
        last = -1
        for i in range(columns.shape[1]):
            column = columns[r, i]
            if column <= last or column >= row:
                good[r] = False
                break
            out[r, column] = values[r, i]
            last = column


@_compiled
def _spread(values, mask, out):  # pragma: no cover (compiled)
    m = 0
    for i in range(mask.size):
        m += mask[i]
    if m != values.size:
        return False
    p = 0
    for i in range(mask.size):
        if mask[i]:
            out[i] = values[p]
            p += 1
        else:
            out[i] = np.float32(0)
    return True

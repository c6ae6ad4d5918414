"""Compiled CPU kernels between tensors and packed bytes, at memory speed; absent numba, or off the
CPU, torch does it.

Everything that reads bytes checks them first: a code that names no place is reported, never
followed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.kernels import cpu
from commsweep.compressors.kernels.cpu import _compiled, _over_rows, _ranked

# codes made at once: a block stays in the first cache, and 512 codes of any width end at a whole
# byte
_BLOCK = 512
# The place of the lowest bit of a word, found by a product: the upper six bits of this sequence,
# shifted by each place, differ (Leiserson, Prokop and Randall 1998).
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_LOWEST = np.zeros(64, np.int64)
for _bit in range(64):
    _LOWEST[(int(_DE_BRUIJN) << _bit) % 2**64 >> 58] = _bit


def usable(x: Tensor) -> bool:
    """Return whether the kernels serve codes x: on the CPU, and numba installed."""
    return cpu.numba is not None and x.device.type == "cpu"


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Whole codes [n] below 2**bits, of any integer type -> uint8 [ceil(n * bits / 8)]."""
    source, out = (
        codes.detach().contiguous().numpy(),
        np.empty(-(-codes.numel() * bits // 8), np.uint8),
    )
    if bits == 1:
        return (
            torch.from_numpy(np.packbits(source, bitorder="little"))
            if source.size
            else torch.from_numpy(out)
        )
    if source.dtype == np.bool_:
        source = source.view(np.uint8)
    task = _pack_blocks if bits <= 8 else _pack
    _over_blocks(lambda a, b: task(source, bits, out, a, b), source.size)
    return torch.from_numpy(out)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack_codes`: int64 codes [count]."""
    source, out = packed.contiguous().numpy(), np.empty(count, np.int64)
    task = _unpack_blocks if bits <= 8 else _unpack
    _over_blocks(lambda a, b: task(source, bits, out, a, b), count)
    return torch.from_numpy(out)


def unpack_bytes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack_codes` for at most 8 bits: uint8 codes [count]."""
    out = np.empty(count, np.uint8)
    source = packed.contiguous().numpy()
    _over_blocks(lambda a, b: _unpack_blocks(source, bits, out, a, b), count)
    return torch.from_numpy(out)


def unpack_flags(packed: Tensor, count: int) -> Tensor:
    """Return one-bit codes as booleans [count]."""
    return torch.from_numpy(
        np.unpackbits(packed.contiguous().numpy(), count=count, bitorder="little").view(np.bool_)
    )


def quantize(x: Tensor, shift: Tensor, gain: Tensor, bits: int, signed: bool) -> Tensor:
    """Packed codes of float32 x [groups, n], with shift and gain [groups].

    Not signed: rint((x - shift) * gain) in [0, 2^b - 1]. Signed: rint(x / shift * gain) in
    [-2^(b-1), 2^(b-1) - 1], plus 2^(b-1); a shift of zero counts as one.
    """
    source = x.detach().contiguous().numpy()
    out = np.empty(-(-x.numel() * bits // 8), np.uint8)
    args = source, shift.contiguous().numpy(), gain.contiguous().numpy(), bits, signed, out
    _over_blocks(lambda a, b: _quantize(*args, a, b), source.size)
    return torch.from_numpy(out)


def dequantize(
    packed: Tensor, shape: tuple[int, int], shift: Tensor, step: Tensor, bits: int, signed: bool
) -> Tensor:
    """float32 [groups, n] of packed codes q: q * step + shift; signed: (q - 2^(b-1)) / 2^(b-1) *
    step.
    """
    out = np.empty(shape, np.float32)
    args = (
        packed.contiguous().numpy(),
        shift.contiguous().numpy(),
        step.contiguous().numpy(),
        bits,
        signed,
        out,
    )
    _over_blocks(lambda a, b: _dequantize(*args, a, b), out.size)
    return torch.from_numpy(out)


def select(x: Tensor, k: int, as_mask: bool) -> tuple[Tensor, Tensor]:
    """The k largest magnitudes of each row of float32 x [rows, n], of ties the first: values [rows,
    k], and where they are, as columns [rows, k] or as a boolean mask [rows, n].
    """
    source = x.detach().contiguous()
    values = torch.empty(x.shape[0], k)
    columns = np.empty((1, k) if as_mask else (x.shape[0], k), np.int32)
    mask = np.empty(x.shape if as_mask else (1, x.shape[1]), np.bool_)
    args = (
        source.view(torch.int32).numpy(),
        k,
        as_mask,
        values.view(torch.int32).numpy(),
        columns,
        mask,
    )
    _over_rows(lambda a, b: _select(*args, a, b), *source.shape)
    return values, torch.from_numpy(mask if as_mask else columns)


def scattered_into(values: Tensor, columns: Tensor, row: int) -> Tensor | None:
    """Zeros [rows, row] with values [rows, k] at columns [rows, k]; None unless each row's columns
    ascend within it.
    """
    out, good = torch.zeros(columns.shape[0], row), np.ones(columns.shape[0], np.bool_)
    args = (
        values.reshape(columns.shape).contiguous().numpy(),
        columns.contiguous().numpy(),
        out.numpy(),
        good,
    )
    _over_rows(lambda a, b: _scatter_rows(*args, a, b), columns.shape[0], row)
    return out if good.all() else None


def spread(values: Tensor, mask: Tensor, row_k: int = -1) -> Tensor | None:
    """Zeros of mask's shape [rows, row] with values [m] at its true entries in order.

    None unless m entries are true, and `row_k` of every row where that is given.
    """
    source, flags = values.contiguous().numpy(), mask.contiguous().view(torch.uint8).numpy()
    out = np.empty(flags.shape, np.float32)
    return torch.from_numpy(out) if _spread(source, flags, row_k, out) else None


def spread_bits(values: Tensor, packed: Tensor, n_rows: int, row: int, k: int) -> Tensor | None:
    """Zeros [rows, row] with values [rows * k] at the places that a bitmask names, its bits packed
    from the lowest on; None unless every row has k of them.
    """
    out, good = np.empty((n_rows, row), np.float32), np.ones(n_rows, np.bool_)
    words = np.zeros(-(-n_rows * row // 64), np.uint64)
    words.view(np.uint8)[: packed.numel()] = packed.contiguous().numpy()
    args = (values.contiguous().numpy(), words, k, out, good, _LOWEST)
    _over_rows(lambda a, b: _spread_bits(*args, a, b), n_rows, row)
    return torch.from_numpy(out) if good.all() else None


def checksum(words: Tensor) -> Tensor:
    """int64 [1]: sum over int32 words [n], read as unsigned, of word * weight; weight = (i *
    2654435761 mod 2^32) | 1.

    Modulo 2^64. A weight is odd, so any change within one word changes the sum.
    """
    if usable(words):
        return torch.from_numpy(_checksum(words.numpy()))
    weights = (torch.arange(words.numel(), device=words.device) * 2654435761 & 0xFFFFFFFF) | 1
    return ((words.long() & 0xFFFFFFFF) * weights).sum(dtype=torch.int64).reshape(1)


def _over_blocks(task, n: int) -> None:
    """task(a, b) over the blocks [a, b) of n codes, on torch's threads."""
    _over_rows(task, -(-n // _BLOCK), _BLOCK)


@_compiled
def _checksum(words):
    low = np.uint64(0xFFFFFFFF)
    total, product = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        total += (np.uint64(words[i]) & low) * (product & low | np.uint64(1))
        product += np.uint64(2654435761)
    out = np.empty(1, np.int64)
    out[0] = np.int64(total)
    return out


@_compiled
def _pack(codes, bits, out, block_from, block_to):
    start, stop = block_from * _BLOCK, min(codes.size, block_to * _BLOCK)
    position, held, fill = start * bits // 8, np.uint64(0), np.uint64(0)
    for i in range(start, stop):
        held |= np.uint64(codes[i]) << fill
        fill += np.uint64(bits)
        while fill >= np.uint64(8):
            out[position] = np.uint8(held & np.uint64(255))
            position += 1
            held >>= np.uint64(8)
            fill -= np.uint64(8)
    if fill > np.uint64(0):
        out[position] = np.uint8(held & np.uint64(255))


@_compiled
def _unpack(packed, bits, out, block_from, block_to):
    start, stop = block_from * _BLOCK, min(out.size, block_to * _BLOCK)
    position, held, fill = start * bits // 8, np.uint64(0), np.uint64(0)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(start, stop):
        while fill < np.uint64(bits):
            held |= np.uint64(packed[position]) << fill
            position += 1
            fill += np.uint64(8)
        out[i] = np.int64(held & mask)
        held >>= np.uint64(bits)
        fill -= np.uint64(bits)


@_compiled
def _pack_blocks(codes, bits, out, block_from, block_to):
    for block in range(block_from, block_to):
        start, stop = block * _BLOCK, min(codes.size, (block + 1) * _BLOCK)
        position = start * bits // 8
        target = out[position : position + -(-(stop - start) * bits // 8)]
        _pack_block(codes[start:stop], bits, target)


@_compiled
def _unpack_blocks(packed, bits, out, block_from, block_to):
    for block in range(block_from, block_to):
        start, stop = block * _BLOCK, min(out.size, (block + 1) * _BLOCK)
        position = start * bits // 8
        source = packed[position : position + -(-(stop - start) * bits // 8)]
        _unpack_block(source, bits, out[start:stop])


@_compiled
def _quantize(x, shift, gain, bits, signed, out, block_from, block_to):
    n = x.shape[1]
    flat = x.reshape(-1)
    codes = np.empty(_BLOCK, np.int32)
    half = np.int32(1 << (bits - 1))
    top = np.int32((1 << bits) - 1)
    for block in range(block_from, block_to):
        start = block * _BLOCK
        stop = min(flat.size, start + _BLOCK)
        start_ = start
        while start_ < stop:  # the parts of the block that lie in one group each
            g = start_ // n
            end = min(stop, (g + 1) * n)
            low, scale = shift[g], gain[g]
            source, target = flat[start_:end], codes[start_ - start : end - start]
            if signed:
                low = low if low != 0 else np.float32(1)
                # clipped as whole numbers, which vectorises and leaves no NaN
                for i in range(source.size):
                    target[i] = (
                        min(
                            max(np.int32(np.rint(source[i] / low * scale)), -half),
                            half - np.int32(1),
                        )
                        + half
                    )
            else:
                for i in range(source.size):
                    target[i] = min(
                        max(np.int32(np.rint((source[i] - low) * scale)), np.int32(0)), top
                    )
            start_ = end
        position = start * bits // 8
        _pack_block(
            codes[: stop - start], bits, out[position : position + -(-(stop - start) * bits // 8)]
        )


@_compiled
def _pack_block(codes, bits, out):
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
            out[i] = np.uint8(
                codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6
            )
        if n % 4:
            byte = np.int32(0)
            for i in range(n % 4):
                byte |= codes[n - n % 4 + i] << 2 * i
            out[n // 4] = np.uint8(byte)
    else:
        b, last = np.uint64(bits), n - n % 8
        for start in range(0, last, 8):  # eight codes take `bits` whole bytes
            c = codes[start : start + 8]
            held = (
                np.uint64(c[0])
                | np.uint64(c[1]) << b
                | np.uint64(c[2]) << np.uint64(2) * b
                | np.uint64(c[3]) << np.uint64(3) * b
                | np.uint64(c[4]) << np.uint64(4) * b
                | np.uint64(c[5]) << np.uint64(5) * b
                | np.uint64(c[6]) << np.uint64(6) * b
                | np.uint64(c[7]) << np.uint64(7) * b
            )
            target = out[start // 8 * bits : start // 8 * bits + bits]
            for i in range(target.size):
                target[i] = np.uint8(held & np.uint64(255))
                held >>= np.uint64(8)
        held = np.uint64(0)
        for i in range(last, n):
            held |= np.uint64(codes[i]) << np.uint64((i - last) * bits)
        for i in range(last // 8 * bits, out.size):
            out[i] = np.uint8(held & np.uint64(255))
            held >>= np.uint64(8)


@_compiled
def _unpack_block(packed, bits, codes):
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
        b, mask, last = np.uint64(bits), np.uint64((1 << bits) - 1), n - n % 8
        for start in range(0, last, 8):
            source, held = packed[start // 8 * bits : start // 8 * bits + bits], np.uint64(0)
            for i in range(source.size):
                held |= np.uint64(source[i]) << np.uint64(8 * i)
            target = codes[start : start + 8]
            target[0] = np.int32(held & mask)
            target[1] = np.int32(held >> b & mask)
            target[2] = np.int32(held >> np.uint64(2) * b & mask)
            target[3] = np.int32(held >> np.uint64(3) * b & mask)
            target[4] = np.int32(held >> np.uint64(4) * b & mask)
            target[5] = np.int32(held >> np.uint64(5) * b & mask)
            target[6] = np.int32(held >> np.uint64(6) * b & mask)
            target[7] = np.int32(held >> np.uint64(7) * b & mask)
        held = np.uint64(0)
        for i in range(last // 8 * bits, packed.size):
            held |= np.uint64(packed[i]) << np.uint64(8 * (i - last // 8 * bits))
        for i in range(last, n):
            codes[i] = np.int32(held & mask)
            held >>= b


@_compiled
def _dequantize(packed, shift, step, bits, signed, out, block_from, block_to):
    n = out.shape[1]
    flat = out.reshape(-1)
    codes = np.empty(_BLOCK, np.int32)
    half = np.float32(2 ** (bits - 1))
    for block in range(block_from, block_to):
        start = block * _BLOCK
        stop = min(flat.size, start + _BLOCK)
        position = start * bits // 8
        _unpack_block(
            packed[position : position + -(-(stop - start) * bits // 8)],
            bits,
            codes[: stop - start],
        )
        start_ = start
        while start_ < stop:
            g = start_ // n
            end = min(stop, (g + 1) * n)
            low, scale = shift[g], step[g]
            values, target = flat[start_:end], codes[start_ - start : end - start]
            if signed:
                for i in range(values.size):
                    values[i] = (np.float32(target[i]) - half) / half * scale
            else:
                for i in range(values.size):
                    values[i] = np.float32(target[i]) * scale + low
            start_ = end


@_compiled
def _select(x, k, as_mask, values, columns, mask, row_from, row_to):
    n = x.shape[1]
    magnitude = np.int32(0x7FFFFFFF)
    counts = np.zeros((4, 2048), np.int32)
    pool = np.empty(n + 1, np.int32)
    chosen, where = np.empty(n + 1, np.int32), np.empty(n + 1, np.int32)
    threshold = np.int32(0)
    for r in range(row_from, row_to):
        row = x[r]
        threshold, need, ties = _ranked(row, k, counts, pool, where, threshold)
        m = 0
        if need == ties:
            # Every tie stays. No branch: each entry is written, and counted if it is kept.
            for i in range(n):
                chosen[m] = row[i]
                where[m] = i
                m += np.int32(row[i] & magnitude >= threshold)
        else:
            for i in range(n):
                value = row[i] & magnitude
                tied = value == threshold
                chosen[m] = row[i]
                where[m] = i
                m += np.int32(value > threshold or (tied and need > 0))
                need -= np.int32(tied)
        values[r, :] = chosen[:k]
        if as_mask:
            flags = mask[r]
            flags[:] = False
            for i in range(k):
                flags[where[i]] = True
        else:
            columns[r, :] = where[:k]


@_compiled
def _scatter_rows(values, columns, out, good, row_from, row_to):
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
def _spread_bits(values, words, k, out, good, lowest, row_from, row_to):
    row = out.shape[1]
    for r in range(row_from, row_to):
        target, p, stop = out[r], r * k, (r + 1) * k
        target[:] = 0
        column = 0
        while column < row and p <= stop:
            bit = r * row + column
            skipped = bit & 63
            size = min(64 - skipped, row - column)
            word = words[bit >> 6] >> np.uint64(skipped)
            if size < 64:
                word &= (np.uint64(1) << np.uint64(size)) - np.uint64(1)
            while word:
                if p == stop:  # one more than there are values
                    p += 1
                    break
                last = word & (~word + np.uint64(1))
                target[column + lowest[(last * _DE_BRUIJN) >> np.uint64(58)]] = values[p]
                p += 1
                word ^= last
            column += size
        good[r] = p == stop


@_compiled
def _spread(values, mask, row_k, out):
    # One more, which is read behind the last value. A place without a sign: with one, each would be
    # looked at for a count from the end.
    p, padded = np.uint64(0), np.append(values, np.float32(0))
    size = np.uint64(values.size)
    for r in range(mask.shape[0]):
        row, target = mask[r], out[r]
        m = np.uint32(0)
        for i in range(row.size):
            m += row[i]
        if p + np.uint64(m) > size or (row_k >= 0 and m != row_k):
            return False
        for i in range(row.size):  # without a branch, which a random mask would mispredict
            flag = row[i]
            target[i] = padded[p] if flag else np.float32(0)
            p += np.uint64(flag)
    return p == size

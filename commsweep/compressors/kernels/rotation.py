"""Compiled passes of EDEN on the CPU: signs, butterflies, levels and scales of a block at once.

`commsweep/compressors/rotation.py` computes the same in torch where numba is absent or the tensor
lies elsewhere: the same additions in the same order, so the same bits.
"""

# numba compiles the loops: its types are no types of Python's
# pyright: reportIndexIssue=false

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.kernels.cpu import _compiled, _over_rows, usable

__all__ = ["codes_of", "usable", "values_of"]

_ZERO, _ONE, _EIGHT, _GROUP = np.uint64(0), np.uint64(1), np.uint64(8), np.uint64(64)


def codes_of(
    flat: Tensor,
    words: tuple[Tensor, Tensor],
    cut: tuple[int, int, int],
    levels: Tensor,
    codes: Tensor,
) -> Tensor:
    """Write the codes of whole blocks of samples into `codes`, uint8 [samples, row]; their scales.

    flat: float32 [samples, row]. words: int64, the signs of both rounds, 64 in each. cut: first
    element, end and size of the blocks in a sample. levels: float32, the positive ones, rising.
    Returns float32 [samples, blocks].
    """
    start, end, size = cut
    n_blocks = (end - start) // size
    scales = torch.empty(len(flat), n_blocks)
    half = levels.numpy()
    edges = ((levels[1:] + levels[:-1]) / 2).numpy()
    x, first, second = flat.numpy(), words[0].numpy(), words[1].numpy()
    unit, root = np.float32(size**-0.5), np.float32(size**0.5)
    small = np.float32(size * torch.finfo(torch.float32).tiny)
    out, by_block = codes.numpy(), scales.view(-1).numpy()

    where, numbers = (start, size, n_blocks), (unit, root, small)

    def task(a: int, b: int) -> None:
        _codes(x, first, second, *where, half, edges, *numbers, out, by_block, a, b)

    _over_rows(task, len(flat) * n_blocks, size)
    return scales


def values_of(
    codes: Tensor,
    scales: Tensor,
    words: tuple[Tensor, Tensor],
    cut: tuple[int, int, int],
    levels: Tensor,
    out: Tensor,
) -> None:
    """Write what arrives of codes [samples, row] of whole blocks with these scales [samples,
    blocks] into `out`, float32 [samples, row]. levels: all of them, rising.
    """
    start, end, size = cut
    n_blocks = (end - start) // size
    first, second = words[0].numpy(), words[1].numpy()
    unit, by_block = np.float32(size**-0.5), scales.contiguous().view(-1).numpy()
    read, table, written = codes.numpy(), levels.numpy(), out.numpy()

    def task(a: int, b: int) -> None:
        _values(read, by_block, first, second, start, size, n_blocks, table, unit, written, a, b)

    _over_rows(task, len(codes) * n_blocks, size)


# Eight blocks go through the loops side by side, entry i of block k at place 8 i + k: every loop
# then runs over neighbours in memory, which a processor adds in one instruction. Places are numbers
# without a sign: with one, each would be looked at for a count from the end.


@_compiled
def _butterflies(v, n):
    """The Hadamard transform of eight blocks v[:n] in place, strides 1, 2, 4, ..."""
    stride = _EIGHT
    while stride < n:
        begin = _ZERO
        while begin < n:
            for i in range(begin, begin + stride):
                j = i + stride
                a, b = v[i], v[j]
                v[i] = a + b
                v[j] = a - b
            begin += stride + stride
        stride += stride


@_compiled
def _flip(v, words, begin, blocks, size, unit):
    """Multiply eight blocks by `unit` and by the signs of their entries, the first one's from
    `begin` on; `begin` and `size` are multiples of 64.
    """
    twice, word = unit + unit, np.zeros(8, np.uint64)
    at = _ZERO
    for group in range(size >> 6):
        for block in range(blocks):
            word[block] = np.uint64(words[(begin + block * size >> 6) + group])
        for i in range(_ZERO, _GROUP):
            for block in range(_ZERO, _EIGHT):
                bit = np.int32((word[block] >> i) & _ONE)
                v[at + block] *= unit - np.float32(bit) * twice
            at += _EIGHT


@_compiled
def _halved(v, n):
    """The sums of eight blocks v[:n] in v[:8], which they overwrite: halves are added."""
    half = n >> _ONE
    while half >= _EIGHT:
        for i in range(_ZERO, half):
            v[i] += v[i + half]
        half >>= _ONE


@_compiled
def _side_by_side(row, begin, blocks, size, v):
    """Lay blocks of a sample beside each other."""
    for k in range(blocks):
        block, at = row[begin + k * size : begin + (k + 1) * size], np.uint64(k)
        for i in range(_ZERO, np.uint64(size)):
            v[at] = block[i]
            at += _EIGHT


@_compiled
def _codes(
    x, first, second, start, size, n_blocks, half, edges, unit, root, small, out, scales, a, b
):
    n = np.uint64(8 * size)
    v, w = np.zeros(8 * size, np.float32), np.empty(8 * size, np.float32)
    level = np.empty(8 * size, np.int32)
    most, safe = np.empty(8, np.float32), np.empty(8, np.float32)
    norm, gain = np.empty(8, np.float32), np.empty(8, np.float32)
    unity, count = np.float32(1), np.int32(half.size)
    block = a
    while block < b:
        r, first_block = block // n_blocks, block % n_blocks
        blocks = min(8, b - block, n_blocks - first_block)
        begin = start + first_block * size
        _side_by_side(x[r], begin, blocks, size, v)
        _flip(v, first, begin, blocks, size, unity)
        _butterflies(v, n)
        _flip(v, second, begin, blocks, size, unit)
        _butterflies(v, n)
        most[:] = 0
        at = _ZERO
        while at < n:
            for k in range(_ZERO, _EIGHT):
                value = v[at + k] * unit
                v[at + k] = value
                # not less, so that what is no number stays
                most[k] = most[k] if abs(value) <= most[k] else abs(value)
            at += _EIGHT
        for k in range(8):
            safe[k] = most[k] if most[k] > 0 else unity
        at = _ZERO
        while at < n:
            for k in range(_ZERO, _EIGHT):
                ratio = v[at + k] / safe[k]
                w[at + k] = ratio * ratio
            at += _EIGHT
        _halved(w, n)
        for k in range(8):
            # in 64 bits: some libraries' roots of 32 are not rounded exactly
            norm[k] = np.float32(np.sqrt(np.float64(w[k]))) * safe[k]
            gain[k] = root / (unity if norm[k] <= small else norm[k])
        at = _ZERO
        while at < n:
            for k in range(_ZERO, _EIGHT):
                v[at + k] *= gain[k]
            at += _EIGHT
        for i in range(_ZERO, n):
            w[i] = half[0]
            level[i] = 0
        for e in range(edges.size):
            edge, value, number = edges[e], half[e + 1], np.int32(e + 1)
            for i in range(_ZERO, n):
                is_above = not abs(v[i]) <= edge
                w[i] = value if is_above else w[i]
                level[i] = number if is_above else level[i]
        for i in range(_ZERO, n):
            w[i] *= abs(v[i])
            level[i] = count - np.int32(1) - level[i] if v[i] < 0 else count + level[i]
        for k in range(blocks):
            part_out = out[r, begin + k * size : begin + (k + 1) * size]
            at = np.uint64(k)
            for i in range(_ZERO, np.uint64(size)):
                part_out[i] = np.uint8(level[at])
                at += _EIGHT
        _halved(w, n)
        for k in range(blocks):
            scales[block + k] = np.float32(0) if norm[k] <= small else norm[k] * root / w[k]
        block += blocks


@_compiled
def _values(codes, scales, first, second, start, size, n_blocks, table, unit, out, a, b):
    n = np.uint64(8 * size)
    v = np.zeros(8 * size, np.float32)
    block = a
    while block < b:
        r, first_block = block // n_blocks, block % n_blocks
        blocks = min(8, b - block, n_blocks - first_block)
        begin = start + first_block * size
        for k in range(blocks):
            scale, at = scales[block + k], np.uint64(k)
            read = codes[r, begin + k * size : begin + (k + 1) * size]
            for i in range(_ZERO, np.uint64(size)):
                v[at] = table[np.uint64(read[i])] * scale
                at += _EIGHT
        _butterflies(v, n)
        _flip(v, second, begin, blocks, size, unit)
        _butterflies(v, n)
        _flip(v, first, begin, blocks, size, unit)
        for k in range(blocks):
            written, at = out[r, begin + k * size : begin + (k + 1) * size], np.uint64(k)
            for i in range(_ZERO, np.uint64(size)):
                written[i] = v[at]
                at += _EIGHT
        block += blocks

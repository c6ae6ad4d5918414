"""Compiled CPU kernels of floats of few bits under a scale for every block (`mx`). Absent numba, or
off the CPU, torch does the same, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.kernels.cpu import _compiled, _over_rows
from commsweep.compressors.kernels.packing import _BLOCK, _over_blocks, _unpack_block

NONE = np.empty((0, 0), np.float32)


class Element(NamedTuple):
    """A small floating-point type: its bits with the sign, those of the mantissa, the exponent of
    its smallest normal number, its largest number.
    """

    bits: int
    mantissa: int
    least: int
    most: float


def tops(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block of float32 [blocks, n], NaN where one is, [blocks]."""
    source = blocks.numpy().view(np.int32)
    out = np.empty(len(source), np.int32)
    _over_rows(lambda a, b: _tops(source, out, a, b), *source.shape)
    return torch.from_numpy(out.view(np.float32))


def values(blocks: Tensor, scales: Tensor, drawn: Tensor | None, element: Element) -> Tensor:
    """Return what arrives of float32 blocks [blocks, n] under scales [blocks], float32; drawn: what
    stochastic rounding draws, of the blocks' shape.
    """
    out = np.empty(blocks.shape, np.float32)
    args = blocks.numpy(), scales.numpy(), NONE if drawn is None else drawn.numpy(), element
    _over_rows(lambda a, b: _values(*args, out, a, b), *out.shape)
    return torch.from_numpy(out)


def codes(blocks: Tensor, scales: Tensor, drawn: Tensor | None, element: Element) -> Tensor:
    """The same as bits of sign, exponent and mantissa, uint8 [blocks, n]."""
    out = np.empty(blocks.shape, np.uint8)
    args = blocks.numpy(), scales.numpy(), NONE if drawn is None else drawn.numpy(), element
    _over_rows(lambda a, b: _codes(*args, out, a, b), *out.shape)
    return torch.from_numpy(out)


def decoded(
    packed: Tensor, scales: Tensor, block: int, count: int, element: Element
) -> Tensor | None:
    """Return float32 [count] of packed codes under scales [blocks], a scale every `block` codes;
    None where a code stands for more than the largest number.
    """
    out, good = np.empty(count, np.float32), np.ones(1, np.bool_)
    args = packed.contiguous().numpy(), scales.contiguous().numpy(), block, element, out, good
    _over_blocks(lambda a, b: _decoded(*args, a, b), count)
    return torch.from_numpy(out) if good[0] else None


@_compiled
def _tops(bits, out, first, last):
    for b in range(first, last):
        most = np.int32(0)
        for i in range(bits.shape[1]):
            most = max(most, bits[b, i] & np.int32(0x7FFFFFFF))
        out[b] = most


@_compiled
def _power(exponent):
    """2^exponent of a normal number."""
    return np.int32((exponent + np.int32(127)) << np.int32(23)).view(np.float32)


@_compiled
def _exponent(x, least):
    return max((np.float32(x).view(np.int32) >> np.int32(23)) - np.int32(127), least)


@_compiled
def _rounded(x, scale, drawn, b, i, mantissa, least, most):
    """The magnitude that x becomes, in units of its block's scale."""
    size = min(abs(x) / scale, np.float32(2.0**20))
    step = _exponent(size, least) - mantissa
    fine = size * _power(-step)
    if drawn.size:
        rounded = np.floor(fine + drawn[b, i])
    else:  # to the nearest, ties to even
        rounded = (fine + np.float32(2.0**23)) - np.float32(2.0**23)
    return min(rounded * _power(step), most)


@_compiled
def _values(blocks, scales, drawn, element, out, first, last):
    mantissa, least = np.int32(element.mantissa), np.int32(element.least)
    most = np.float32(element.most)
    for b in range(first, last):
        scale = scales[b]
        if not scale > 0 or scale == np.inf:
            # What is not finite spoils its block, and is seen.
            out[b, :] = np.float32(0.0) if scale <= 0 else np.float32(np.nan)
            continue
        for i in range(blocks.shape[1]):
            x = blocks[b, i]
            size = _rounded(x, scale, drawn, b, i, mantissa, least, most)
            value = size * scale
            out[b, i] = -value if x < 0 and size > 0 else value


@_compiled
def _codes(blocks, scales, drawn, element, out, first, last):
    mantissa, least = np.int32(element.mantissa), np.int32(element.least)
    most, sign = np.float32(element.most), np.int32(1 << (element.bits - 1))
    for b in range(first, last):
        scale = scales[b]
        if not scale > 0 or scale == np.inf:
            out[b, :] = 0
            continue
        for i in range(blocks.shape[1]):
            x = blocks[b, i]
            size = _rounded(x, scale, drawn, b, i, mantissa, least, most)
            exponent = _exponent(size, least)
            # A subnormal number's exponent field is zero, and its mantissa has no leading one.
            code = np.int32(size * _power(mantissa - exponent))
            code += (exponent - least) << mantissa
            code += sign if x < 0 and size > 0 else np.int32(0)
            out[b, i] = code


@_compiled
def _decoded(packed, scales, block, element, out, good, first, last):
    smallest, most = _power(np.int32(element.least)), np.float32(element.most)
    sign = np.int32(1 << (element.bits - 1))
    normal, shift = np.int32(1 << element.mantissa), np.int32(23 - element.mantissa)
    offset = np.int32(element.least + 126) << np.int32(23)
    codes, values = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32)
    worst = np.int32(0)  # the largest magnitude's code
    for piece in range(first, last):
        start, stop = piece * _BLOCK, min(out.size, (piece + 1) * _BLOCK)
        position, n = start * element.bits // 8, stop - start
        source = packed[position : position + -(-n * element.bits // 8)]
        _unpack_block(source, element.bits, codes[:n])
        for i in range(n):
            size = codes[i] & (sign - np.int32(1))
            value = np.int32((size << shift) + offset).view(np.float32)
            # A subnormal number has no leading one.
            value = value if size >= normal else np.float32(2) * value - smallest
            worst = max(worst, size)
            values[i] = -value if codes[i] & sign else value
        i = 0
        while i < n:
            b = (start + i) // block
            end, scale = min(n, (b + 1) * block - start), scales[b]
            for j in range(i, end):
                out[start + j] = values[j] * scale
            i = end
    if np.int32((worst << shift) + offset).view(np.float32) > most and worst >= normal:
        good[0] = False

"""Places of kept entries as Rice codes of the gaps between them: near the entropy where they lie at
random.

A gap g (entries left out before a kept one) is g >> b ones, a zero, and the low b bits of g; the
first bit fills the lowest bit of a byte. b follows from how many places of how many are kept, so it
does not travel. Source: Rice 1979; the parameter: Kiely 2004, for geometric gaps.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.kernels.cpu import _compiled
from commsweep.errors import UserError

_GOLDEN = math.log((math.sqrt(5) - 1) / 2)


def parameter(k: int, of: int) -> int:
    """The b for gaps of `k` places among `of`, if they lie at random: a gap's mean is (of -
    kept) / kept.
    """
    share = k / of
    return max(0, 1 + math.floor(math.log2(_GOLDEN / math.log1p(-share)))) if 0 < share < 1 else 0


def coded_bytes(mask: Tensor, k: int, b: int) -> Tensor:
    """Bytes of the code of a mask that is true `k` times; a 0-dim tensor, nothing is waited
    for.
    """
    positions = torch.nonzero_static(mask.reshape(-1), size=k)[:, 0]
    gaps = torch.diff(positions, prepend=positions.new_tensor([-1])) - 1
    return ((gaps >> b).sum() + k * (b + 1) + 7) // 8


def counted_bytes(mask: Tensor) -> Tensor:
    """The same of a mask that is true any number of times, with the b that follows from it: gaps by
    a running maximum, so that nothing is waited for.
    """
    flat = mask.reshape(-1)
    n, k = flat.numel(), flat.sum(dtype=torch.int64)
    where = torch.arange(n, device=flat.device)
    before = torch.where(flat, where, -1).cummax(0).values.roll(1)
    before[0] = -1
    share = k.double() / n
    b = (
        (1 + (_GOLDEN / torch.log1p(-share)).log2().floor())
        .nan_to_num(0.0, 0.0, 0.0)
        .clamp(min=0)
        .long()
    )
    b = torch.where((k > 0) & (k < n), b, 0)
    return (((where - before - 1).where(flat, 0) >> b).sum() + k * (b + 1) + 7) // 8


def encode(positions: np.ndarray, b: int) -> np.ndarray:
    """Code (uint8) of ascending places int64 [m]."""
    out = np.zeros((_length(positions, b) + 7) // 8, np.uint8)
    _write(positions, b, out)
    return out


def decode(code: np.ndarray, count: int, b: int) -> np.ndarray:
    """Inverse of `encode`: `count` ascending places. Raises UserError when the bytes are not just
    their code.
    """
    positions = np.empty(count, np.int64)
    if _read(code, b, positions) != code.size:
        raise UserError(f"{code.size} bytes are no Rice code of {count} places")
    return positions


@_compiled
def _length(positions, b):
    bits, last = positions.size * (b + 1), -1
    for i in range(positions.size):
        bits += (positions[i] - last - 1) >> b
        last = positions[i]
    return bits


@_compiled
def _write(positions, b, out):
    """A window of bits is filled from below and emptied a byte at a time."""
    window, filled, at, last = np.uint64(0), 0, 0, -1
    low = (1 << b) - 1
    for i in range(positions.size):
        gap = positions[i] - last - 1
        last = positions[i]
        ones = gap >> b
        while ones >= 24:  # so many at once that a window never overflows
            window |= np.uint64((1 << 24) - 1) << np.uint64(filled)
            filled += 24
            ones -= 24
            while filled >= 8:
                out[at] = np.uint8(window & np.uint64(255))
                window >>= np.uint64(8)
                filled -= 8
                at += 1
        window |= np.uint64(((1 << ones) - 1) | ((gap & low) << (ones + 1))) << np.uint64(filled)
        filled += ones + 1 + b
        while filled >= 8:
            out[at] = np.uint8(window & np.uint64(255))
            window >>= np.uint64(8)
            filled -= 8
            at += 1
    if filled:
        out[at] = np.uint8(window & np.uint64(255))


@_compiled
def _read(code, b, positions):
    """Fills places; returns the bytes that were read, or -1 where they end within a code or their
    rest is not zero.
    """
    total, at, last = code.size * 8, 0, -1
    for i in range(positions.size):
        ones = 0
        while True:
            if at >= total:
                return -1
            bit = (code[at >> 3] >> (at & 7)) & 1
            at += 1
            if not bit:
                break
            ones += 1
        if at + b > total:
            return -1
        low = 0
        for j in range(b):
            low |= ((code[at >> 3] >> (at & 7)) & 1) << j
            at += 1
        last += 1 + ((ones << b) | low)
        positions[i] = last
    if at & 7 and code[at >> 3] >> (at & 7):
        return -1
    return (at + 7) >> 3

"""Compiled CPU kernels of codes with few levels a value: signs, three values, QSGD's levels. Absent
numba, or off the CPU, torch does the same, bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.kernels.cpu import _compiled, _over_rows
from commsweep.compressors.kernels.elias import elias_bits

_PIECE = 1 << 14  # entries a task begins and ends at, at least


def two_values(flags: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """float32 [rows, n]: `high` [rows, 1] where flags [rows, n] are true, else `low` [rows, 1]."""
    out = np.empty(flags.shape, np.float32)
    values = low.flatten().numpy(), high.flatten().numpy()
    args = _flat(flags), *values, flags.shape[1], out.reshape(-1)
    _over_pieces(lambda a, b: _two_values(*args, a, b), out.size)
    return torch.from_numpy(out)


def tern_codes(x: Tensor, drawn: Tensor, s: Tensor) -> Tensor:
    """uint8 [rows, n]: 1 or 2 (the sign of x) where drawn * s < |x|, else 0; s [rows, 1]."""
    out = np.empty(x.shape, np.uint8)
    args = _flat(x), _flat(drawn), s.flatten().numpy(), x.shape[1], out.reshape(-1)
    _over_pieces(lambda a, b: _tern(*args, a, b), out.size)
    return torch.from_numpy(out)


def tern_values(codes: Tensor, s: Tensor) -> Tensor:
    """float32 [rows, n]: s, -s or s - s of codes 1, 2 and 0; s [rows, 1]."""
    out = np.empty(codes.shape, np.float32)
    args = _flat(codes), s.flatten().numpy(), codes.shape[1], out.reshape(-1)
    _over_pieces(lambda a, b: _untern(*args, a, b), out.size)
    return torch.from_numpy(out)


def drawn_levels(x: Tensor, gain: Tensor, drawn: Tensor, most: int) -> Tensor:
    """int32 of x [groups, n]: floor(|x| gain + drawn), at most `most`, with the sign of x; not a
    number gives 0. gain [groups].
    """
    out = np.empty(x.shape, np.int32)
    args = _flat(x), gain.contiguous().numpy(), _flat(drawn), np.float32(most), x.shape[1]
    flat_out = out.reshape(-1)
    _over_pieces(lambda a, b: _levels(*args, flat_out, a, b), out.size)
    return torch.from_numpy(out)


def level_values(levels: Tensor, step: Tensor, group: int) -> Tensor:
    """float32 [rows, n]: int32 levels [rows, n] times the step [rows, groups] of their group of
    `group` entries.
    """
    rows, n = levels.shape
    out = np.empty((rows, n), np.float32)
    source, steps = levels.contiguous().numpy(), step.contiguous().numpy()
    _over_rows(lambda a, b: _unlevel(source, steps, group, out, a, b), rows, n)
    return torch.from_numpy(out)


def folded(levels: Tensor) -> Tensor:
    """int32 codes of int32 levels [n]: twice the size, and one more where it is negative."""
    out = np.empty(levels.numel(), np.int32)
    source = _flat(levels)
    _over_pieces(lambda a, b: _fold(source[a:b], out[a:b]), out.size)
    return torch.from_numpy(out)


def unfolded(codes: Tensor) -> Tensor:
    """Inverse of `folded`, of integer codes."""
    out = np.empty(codes.numel(), np.int32)
    source = _flat(codes)
    _over_pieces(lambda a, b: _unfold(source[a:b], out[a:b]), out.size)
    return torch.from_numpy(out)


def elias_bytes(levels: Tensor) -> int:
    """Bytes of `elias_encode` of int32 levels, without writing them."""
    return (elias_bits(_flat(levels)) + 7) // 8


def _flat(x: Tensor) -> np.ndarray:
    return x.contiguous().numpy().reshape(-1)


def _over_pieces(task, n: int) -> None:
    """task(a, b) over the entries [a, b) of n, on torch's threads."""
    pieces = -(-n // _PIECE)
    _over_rows(lambda a, b: task(a * _PIECE, min(n, b * _PIECE)), pieces, _PIECE)


@_compiled
def _two_values(flags, low, high, n, out, first, last):
    start = first
    while start < last:  # the part of each row that lies in this piece
        r = start // n
        end = min(last, (r + 1) * n)
        below, above = low[r], high[r]
        source, target = flags[start:end], out[start:end]
        for i in range(source.size):
            target[i] = above if source[i] else below
        start = end


@_compiled
def _tern(x, drawn, s, n, out, first, last):
    start = first
    while start < last:
        r = start // n
        end = min(last, (r + 1) * n)
        size = s[r]
        source, draws, target = x[start:end], drawn[start:end], out[start:end]
        for i in range(source.size):
            sent = draws[i] * size < abs(source[i])
            target[i] = np.uint8(sent) << np.uint8(not source[i] > 0)
        start = end


@_compiled
def _untern(codes, s, n, out, first, last):
    start = first
    while start < last:
        r = start // n
        end = min(last, (r + 1) * n)
        size = s[r]
        nothing = size - size
        source, target = codes[start:end], out[start:end]
        for i in range(source.size):
            code = source[i]
            target[i] = size if code == 1 else (-size if code == 2 else nothing)
        start = end


@_compiled
def _levels(x, gain, drawn, most, n, out, first, last):
    start = first
    while start < last:
        g = start // n
        end = min(last, (g + 1) * n)
        factor = gain[g]
        source, draws, target = x[start:end], drawn[start:end], out[start:end]
        for i in range(source.size):
            size = min(np.floor(abs(source[i]) * factor + draws[i]), most)
            size = size if size == size else np.float32(0)
            target[i] = np.int32(-size if source[i] < 0 else size)
        start = end


@_compiled
def _fold(levels, codes):
    for i in range(levels.size):
        codes[i] = np.int32(2) * abs(levels[i]) + np.int32(levels[i] < 0)


@_compiled
def _unfold(codes, levels):
    for i in range(codes.size):
        size = np.int32(codes[i] >> 1)
        levels[i] = -size if codes[i] & 1 else size


@_compiled
def _unlevel(levels, step, group, out, row_from, row_to):
    for r in range(row_from, row_to):
        for g in range(step.shape[1]):
            size = step[r, g]
            source = levels[r, g * group : (g + 1) * group]
            target = out[r, g * group : (g + 1) * group]
            for i in range(source.size):
                target[i] = np.float32(source[i]) * size + np.float32(0)

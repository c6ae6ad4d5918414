"""The entries of an array that changed, in one pass; compiled with Numba where it is installed."""

from __future__ import annotations

import numpy as np

from commsweep.compressors.kernels.cpu import _compiled


def changes(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (places int64 [k], exclusive-or of old and new bits [k]) of the entries that differ;
    before, after: whole numbers [n] of one type.
    """
    positions, values = np.empty(len(after), np.int64), np.empty_like(after)
    count = _changes(before, after, positions, values)
    return positions[:count].copy(), values[:count].copy()


@_compiled
def _changes(before, after, positions, values):
    count = 0
    for i in range(after.size):
        difference = before[i] ^ after[i]
        if difference != 0:
            positions[count] = i
            values[count] = difference
            count += 1
    return count


@_compiled
def change(bits, positions, values):
    """Change the bits [n] at ascending places [k] in place: exclusive-or with values [k]."""
    for i in range(positions.size):
        bits[positions[i]] ^= values[i]


@_compiled
def complement(positions, out):
    """Write the places [n - k] that are not among ascending places [k]."""
    last, count = -1, 0
    for i in range(positions.size):
        for position in range(last + 1, positions[i]):
            out[count] = position
            count += 1
        last = positions[i]
    for position in range(last + 1, out.size + positions.size):
        out[count] = position
        count += 1

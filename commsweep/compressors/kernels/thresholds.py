"""Compiled CPU kernels of what exceeds a threshold. Absent numba, or off the CPU, torch does the
same, bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.kernels.cpu import _compiled, _keep, _over_rows
from commsweep.compressors.kernels.levels import _flat, _over_pieces


def above(x: Tensor, edge: Tensor, want_mask: bool) -> tuple[Tensor, Tensor | None]:
    """(x [rows, n] where |x| exceeds its row's edge [rows, 1] or is not a number, else 0; that
    mask). float32; edges of at least 0; where an edge is not a number all of its row stays.
    """
    sent = np.empty(x.shape, np.int32)
    mask = np.empty(x.shape if want_mask else (1,), np.bool_)
    edge_bits = (edge + 0.0).view(torch.int32).masked_fill(edge.isnan(), -1)
    args = _flat(x.view(torch.int32)), edge_bits.flatten().numpy(), x.shape[1], want_mask
    _over_pieces(lambda a, b: _above(*args, sent.reshape(-1), mask.reshape(-1), a, b), sent.size)
    return torch.from_numpy(sent).view(torch.float32), torch.from_numpy(mask) if want_mask else None


def count_above(size: Tensor, edge: Tensor) -> Tensor:
    """int64 [rows, 1]: entries of size [rows, n] that exceed their row's edge [rows, 1]."""
    rows, n = size.shape
    counts = np.empty((rows, 1), np.int64)
    source, edges = size.contiguous().numpy(), edge.contiguous().numpy()
    _over_rows(lambda a, b: _count(source, edges, counts, a, b), rows, n)
    return torch.from_numpy(counts)


@_compiled
def _above(bits, edges, n, want_mask, sent, mask, first, last):
    start = first
    while start < last:  # the part of each row that lies in this piece
        r = start // n
        end = min(last, (r + 1) * n)
        flags = mask[start:end] if want_mask else mask
        _keep(bits[start:end], edges[r], 0, 1, True, want_mask, sent[start:end], flags)
        start = end


@_compiled
def _count(size, edges, counts, row_from, row_to):
    for r in range(row_from, row_to):
        edge, count = edges[r, 0], np.int64(0)
        source = size[r]
        for begin in range(
            0, source.size, 1 << 20
        ):  # counts of a block fit 32 bits: they vectorise
            block, count_block = source[begin : begin + (1 << 20)], np.int32(0)
            for i in range(block.size):
                count_block += np.int32(block[i] > edge)
            count += count_block
        counts[r, 0] = count

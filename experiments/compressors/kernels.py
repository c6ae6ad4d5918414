"""Compiled CPU kernels behind TopK and min-max codes; absent numba, or off the CPU, torch does the same.

Rows are shared out over `torch.get_num_threads()` threads: the kernels release the interpreter lock, so
a plain thread pool serves and no second OpenMP runtime fights torch's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

try:
    import numba
except ImportError:  # a GPU machine needs none of this file
    numba = None

_SHORT = 1 << 11  # rows up to here are bisected
_SERIAL = 1 << 15  # below this many elements a second thread costs more than it brings


def usable(x: Tensor) -> bool:
    """Whether the kernels serve x: float32 on the CPU, and numba installed."""
    return numba is not None and x.device.type == "cpu" and x.dtype is torch.float32


def topk_rows(x: Tensor, k: int, strict: bool, want_mask: bool) -> tuple[Tensor, Tensor | None]:
    """Per row of float32 x [rows, n]: entries above the k-th largest magnitude, and ties with it.

    Not strict: exactly k entries stay, of tied ones the first. Strict: every tied entry is dropped.
    Returns the masked rows and, if wanted, the boolean mask.
    """
    source = x.detach().contiguous()
    out = torch.empty_like(source)
    mask = torch.empty(source.shape if want_mask else (1, 0), dtype=torch.bool)
    arrays = source.view(torch.int32).numpy(), out.view(torch.int32).numpy(), mask.numpy()
    _over_rows(lambda a, b: _topk(arrays[0], k, strict, want_mask, arrays[1], arrays[2], a, b), *source.shape)
    return out, mask if want_mask else None


def uniform_rows(x: Tensor, lo: Tensor, gain: Tensor, step: Tensor) -> Tensor:
    """Per row of float32 x [rows, n]: round((x - lo) * gain) * step + lo, with lo, gain, step each [rows]."""
    source = x.detach().contiguous()
    out = torch.empty_like(source)
    args = source.numpy(), lo.numpy(), gain.numpy(), step.numpy(), out.numpy()
    n_rows, n = source.shape
    if n_rows == 1 and n >= _SERIAL:  # one scale for the whole tensor: cut the only row into pieces
        pieces = torch.get_num_threads()
        edges = [n * i // pieces for i in range(pieces + 1)]
        _parallel([lambda a=a, b=b: _uniform(*args, 0, 1, a, b) for a, b in pairwise(edges)])
    else:
        _over_rows(lambda a, b: _uniform(*args, a, b, 0, n), n_rows, n)
    return out


def _over_rows(task: Callable[[int, int], None], n_rows: int, n: int) -> None:
    pieces = min(torch.get_num_threads(), n_rows) if n_rows * n >= _SERIAL else 1
    edges = [n_rows * i // pieces for i in range(pieces + 1)]
    _parallel([lambda a=a, b=b: task(a, b) for a, b in pairwise(edges)])


def _parallel(tasks: list[Callable[[], None]]) -> None:
    waiting = [_pool(os.getpid()).submit(task) for task in tasks[1:]] if len(tasks) > 1 else []
    tasks[0]()
    for other in waiting:
        other.result()


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    """One pool a process; keyed by its id because threads do not survive a fork."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="kernels")


def _compiled(function: Callable) -> Callable:
    return numba.njit(nogil=True, cache=True, boundscheck=False)(function) if numba else function


@_compiled
def _bisect(pool, n, k, exact):  # pragma: no cover (compiled)
    """(t, entries above t, entries of at least t): with `exact` t is the k-th largest, else any t that k entries reach.

    One bit a pass from the highest; a pass is a count, which vectorises.
    """
    t, kept, above = np.int32(0), np.int32(n), np.int32(0)
    for bit in range(30, -1, -1):
        candidate = t | np.int32(1 << bit)
        count = np.int32(0)
        for i in range(n):
            count += np.int32(pool[i] >= candidate)
        if count >= k:
            t, kept = candidate, count
            if count == k and not exact:
                return t, np.int32(0), kept
        else:
            above = count
    return t, above, kept


@_compiled
def _keep(row, threshold, need, ties, strict, want_mask, sent, places):  # pragma: no cover (compiled)
    """Entries above the threshold and, unless strict, the first `need` of the `ties` with it."""
    n = row.size
    magnitude = np.int32(0x7FFFFFFF)
    if strict or need == ties:  # no tie to break: a plain comparison, which vectorises
        floor = threshold + np.int32(1) if strict else threshold
        for i in range(n):
            sent[i] = row[i] if row[i] & magnitude >= floor else np.int32(0)
        if want_mask:
            for i in range(n):
                places[i] = row[i] & magnitude >= floor
        return
    for i in range(n):
        value = row[i] & magnitude
        keep = value > threshold
        if value == threshold and need > 0:
            keep = True
            need -= 1
        sent[i] = row[i] if keep else np.int32(0)
        if want_mask:
            places[i] = keep


@_compiled
def _topk(x, k, strict, want_mask, out, mask, row_from, row_to):  # pragma: no cover (compiled)
    """Selection on the bits of |x|: a non-negative float32 orders like its bit pattern.

    Long rows: radix selection, 11 + 11 + 9 bits, so three histograms find the exact threshold; only entries
    sharing the threshold's leading bits (a few percent of a row) reach the second and third. Short rows,
    which would spend their time on empty bins: bisection.
    """
    n = x.shape[1]
    magnitude = np.int32(0x7FFFFFFF)
    # Four interleaved counters: neighbouring equal values would otherwise wait for each other's store.
    counts = np.zeros((4, 2048), np.int32)
    pool = np.empty(n, np.int32)
    for r in range(row_from, row_to):
        row, sent, places = x[r], out[r], mask[r if want_mask else 0]
        if n <= _SHORT:
            for i in range(n):
                pool[i] = row[i] & magnitude
            threshold, above, kept = _bisect(pool, n, k, strict)
            _keep(row, threshold, 0 if strict else k - above, kept - above, strict, want_mask, sent, places)
            continue
        counts[:] = 0
        whole = n - n % 4
        for i in range(0, whole, 4):
            counts[0, (row[i] & magnitude) >> 20] += 1
            counts[1, (row[i + 1] & magnitude) >> 20] += 1
            counts[2, (row[i + 2] & magnitude) >> 20] += 1
            counts[3, (row[i + 3] & magnitude) >> 20] += 1
        for i in range(whole, n):
            counts[0, (row[i] & magnitude) >> 20] += 1
        need = k
        top = 2047
        while True:
            here = counts[0, top] + counts[1, top] + counts[2, top] + counts[3, top]
            if need <= here:
                break
            need -= here
            top -= 1
        m = 0
        for i in range(n):
            value = row[i] & magnitude
            pool[m] = value
            m += np.int32(value >> 20 == top)
            if m == n:  # the whole row shares the leading bits; pool is full
                break
        counts[0] = 0
        for i in range(m):
            counts[0, (pool[i] >> 9) & 2047] += 1
        middle = 2047
        while need > counts[0, middle]:
            need -= counts[0, middle]
            middle -= 1
        prefix = (top << 11) | middle
        counts[1] = 0
        for i in range(m):
            if pool[i] >> 9 == prefix:
                counts[1, pool[i] & 511] += 1
        low = 511
        while need > counts[1, low]:
            need -= counts[1, low]
            low -= 1
        threshold = np.int32((prefix << 9) | low)
        _keep(row, threshold, need, counts[1, low], strict, want_mask, sent, places)


@_compiled
def _uniform(x, lo, gains, steps, out, row_from, row_to, a, b):  # pragma: no cover (compiled)
    for r in range(row_from, row_to):
        low, gain, step = lo[r], gains[r], steps[r]
        row, near = x[r, a:b], out[r, a:b]
        for i in range(row.size):
            near[i] = np.rint((row[i] - low) * gain) * step + low

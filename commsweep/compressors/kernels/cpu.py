"""Compiled CPU kernels behind TopK and min-max codes; absent numba, or off the CPU, torch does the
same.

Rows are shared out over `torch.get_num_threads()` threads: the kernels release the interpreter
lock, so a plain thread pool serves and no second OpenMP runtime fights torch's.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from commsweep import seeds

try:
    import numba
except ImportError:  # a GPU machine needs none of this file
    numba = None

_SHORT = 1 << 11  # rows up to here are bisected
# rows up to here, of which few entries stay, are bisected after a look for candidates
_TILE = 1 << 14
_FEW = 16  # at most one entry in so many
_SAMPLE, _LOOKS = (
    512,
    6,
)  # entries of a long row that a threshold is estimated from, and how often it is mended
_STEPS = (
    -(1 << 21),
    -(1 << 18),
    1 << 18,
    1 << 21,
)  # from one row's threshold to where the next one's is looked for
_LONG = 16 * _SAMPLE  # rows from here on are long
_CLOSE, _PART = (
    64,
    1024,
)  # entries that bounds may leave, and that are looked at together to find these
_PAGE, _LIBC, _HUGE = (
    1 << 21,
    ctypes.CDLL(None),
    getattr(mmap, "MADV_HUGEPAGE", None),
)  # Linux has it
_SERIAL = 1 << 15  # below this many elements a second thread costs more than it brings
_GAMMA, _FACTOR = np.uint64(seeds.GAMMA), tuple(np.uint64(factor) for _, factor in seeds.ROUNDS)
_SHIFT = *(np.uint64(shift) for shift, _ in seeds.ROUNDS), np.uint64(seeds.LAST)
_UNIT, _TINY = np.float32(2.0**-24), np.float32(2.0**-16)
EVEN, MEAN = (
    0x0000FFFF0000FFFF,
    12 * 65535 // 2,
)  # of normal draws: every other sixteen bits; mean of a sum of twelve
_EVEN, _MEAN = np.uint64(EVEN), np.int32(MEAN)


def usable(x: Tensor) -> bool:
    """Return whether the kernels serve x: float32 on the CPU, and numba installed."""
    return numba is not None and x.device.type == "cpu" and x.dtype is torch.float32


def topk_rows(x: Tensor, k: int, strict: bool, want_mask: bool) -> tuple[Tensor, Tensor | None]:
    """Per row of float32 x [rows, n]: entries above the k-th largest magnitude, and ties with it.

    Not strict: exactly k entries stay, of tied ones the first. Strict: every tied entry is dropped.
    Returns the masked rows and, if wanted, the boolean mask.
    """
    source = x.detach().contiguous()
    out = _room(torch.empty_like(source))
    mask = torch.empty(source.shape if want_mask else (1, 0), dtype=torch.bool)
    arrays = source.view(torch.int32).numpy(), out.view(torch.int32).numpy(), mask.numpy()
    _over_rows(
        lambda a, b: _topk(arrays[0], k, strict, want_mask, arrays[1], arrays[2], a, b),
        *source.shape,
    )
    return out, mask if want_mask else None


def topk_tiles(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what `topk_rows` (not strict) keeps of the tiles of float32 x [samples, down, a,
    across, b], tile after tile: values and where they lie in theirs, [tiles, k] each, ascending in
    each tile. Rows of n: x [rows, 1, 1, 1, n].
    """
    source = x.detach().contiguous()
    samples, down, a, across, b = source.shape
    values = torch.empty(samples * down * across, k)
    columns = torch.empty(values.shape, dtype=torch.int32)
    args = source.view(torch.int32).numpy(), k, values.view(torch.int32).numpy(), columns.numpy()
    _over_rows(lambda first, last: _tiles(*args, first, last), samples * down, a * across * b)
    return values, columns


def put_tiles(values: Tensor, columns: Tensor, shape: tuple[int, int, int, int, int]) -> Tensor:
    """Inverse of `topk_tiles` for x of this shape; zeros elsewhere."""
    out = _room(torch.empty(shape))
    args = values.contiguous().numpy(), columns.numpy(), out.numpy()
    _over_rows(
        lambda first, last: _put_tiles(*args, first, last),
        shape[0] * shape[1],
        math.prod(shape[2:]),
    )
    return out


def few_rows(n: int, k: int) -> bool:
    """Return whether `topk_tiles` is the fast way to the k largest of rows of n."""
    return _SHORT < n <= _TILE and k * _FEW <= n and 4 * k <= _SHORT


def uniform_rows(x: Tensor, lo: Tensor, gain: Tensor, step: Tensor) -> Tensor:
    """Per row of float32 x [rows, n]: round((x - lo) * gain) * step + lo, with lo, gain, step each
    [rows].
    """
    source = x.detach().contiguous()
    out = _room(torch.empty_like(source))
    args = source.numpy(), lo.numpy(), gain.numpy(), step.numpy(), out.numpy()
    n_rows, n = source.shape
    if n_rows == 1 and n >= _SERIAL:  # one scale for the whole tensor: cut the only row into pieces
        pieces = torch.get_num_threads()
        edges = [n * i // pieces for i in range(pieces + 1)]
        _parallel([lambda a=a, b=b: _uniform(*args, 0, 1, a, b) for a, b in pairwise(edges)])
    else:
        _over_rows(lambda a, b: _uniform(*args, a, b, 0, n), n_rows, n)
    return out


def level_means(x: Tensor, bins: int, span: float) -> tuple[Tensor, Tensor]:
    """`Statistical`'s codes int64 [n] of float32 x [n], and what they stand for [bins]."""
    codes, book = np.empty(x.numel(), np.int64), np.empty(bins, np.float32)
    _level_means(x.detach().contiguous().numpy(), span, codes, book)
    return torch.from_numpy(codes), torch.from_numpy(book)


def uniform_draws(n: int, start: int) -> Tensor:
    """`draws.uniform` [n] of the stream that starts there."""
    out, half = np.empty(n, np.float32), -(-n // 2)
    _over_rows(
        lambda a, b: _draw_uniform(
            np.uint64(start), a, out[a : min(b, half)], out[half + a : half + b]
        ),
        half,
        2,
    )
    return torch.from_numpy(out)


def normal_draws(n: int, start: int) -> Tensor:
    """`draws.normal` [n] of the stream that starts there."""
    out = np.empty(n, np.float32)
    _over_rows(lambda a, b: _draw_normal(np.uint64(start), a, n, out[a:b]), n, 1)
    return torch.from_numpy(out)


def word_draws(n: int, start: int) -> Tensor:
    """`draws.words` [n] of the stream that starts there."""
    out = np.empty(n, np.int64)
    _over_rows(lambda a, b: _draw_words(np.uint64(start), a, out.view(np.uint64)[a:b]), n, 1)
    return torch.from_numpy(out)


def _room(out: Tensor) -> Tensor:
    """A tensor that nobody has written to, in large pages where the system has some: to get small
    ones takes longer than to write them.
    """
    begin = -(-out.data_ptr() // _PAGE) * _PAGE
    if (length := (out.data_ptr() + out.nbytes - begin) // _PAGE * _PAGE) > 0 and _HUGE is not None:
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _HUGE)
    return out


def _over_rows(task: Callable[[int, int], None], n_rows: int, n: int) -> None:
    pieces = min(torch.get_num_threads(), n_rows) if n_rows * n >= _SERIAL else 1
    edges = [n_rows * i // pieces for i in range(pieces + 1)]
    _parallel([lambda a=a, b=b: task(a, b) for a, b in pairwise(edges)])


def _parallel(tasks: list[Callable[[], None]]) -> None:
    waiting = [_pool(os.getpid()).submit(task) for task in tasks[1:]] if len(tasks) > 1 else []
    tasks[0]()
    for worker in waiting:
        worker.result()


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    """Return the pool of this process; keyed by its id because threads do not survive a fork."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="kernels")


def _compiled(function: Callable) -> Callable:
    return numba.njit(nogil=True, cache=True, boundscheck=False)(function) if numba else function


@_compiled
def _bisect(pool, n, k, exact):
    """(t, entries above t, entries of at least t): with `exact` t is the k-th largest, else any t
    that k entries reach.

    One bit a pass from the highest; a pass is a count, which vectorises.
    """
    t, count_kept, above = np.int32(0), np.int32(n), np.int32(0)
    for bit in range(30, -1, -1):
        candidate = t | np.int32(1 << bit)
        count = np.int32(0)
        for i in range(n):
            count += np.int32(pool[i] >= candidate)
        if count >= k:
            t, count_kept = candidate, count
            if count == k and not exact:
                return t, np.int32(0), count_kept
        else:
            above = count
    return t, above, count_kept


@_compiled
def _keep(row, threshold, need, ties, strict, want_mask, sent, positions):
    """Entries above the threshold and, unless strict, the first `need` of the `ties` with it."""
    n = row.size
    magnitude = np.int32(0x7FFFFFFF)
    if strict or need == ties:  # no tie to break: a plain comparison, which vectorises
        floor = threshold + np.int32(1) if strict else threshold
        for i in range(n):
            sent[i] = row[i] if row[i] & magnitude >= floor else np.int32(0)
        if want_mask:
            for i in range(n):
                positions[i] = row[i] & magnitude >= floor
        return
    for i in range(n):
        value = row[i] & magnitude
        keep = value > threshold
        if value == threshold and need > 0:
            keep = True
            need -= 1
        sent[i] = row[i] if keep else np.int32(0)
        if want_mask:
            positions[i] = keep


@_compiled
def _candidates(row, k, most, groups, pool, positions):
    """Magnitudes of a row of bits that may be among the k largest -> pool [n], where they lie ->
    places, ascending; how many. most, groups: [4 k] to work in.

    Of 4 k groups (every 4 k-th entry) k have a maximum of at least the k-th largest maximum, so the
    k-th largest entry is no smaller; only these groups are looked through: of 4096 random entries
    about 1100, for 90 candidates, when k is 64.
    """
    n, magnitude, size = row.size, np.int32(0x7FFFFFFF), 4 * k
    most[:] = 0
    for begin in range(0, n, size):
        block = row[begin : begin + size]
        for i in range(block.size):
            most[i] = max(most[i], block[i] & magnitude)
    least, _, _ = _bisect(most, size, k, True)
    count = 0
    for group in range(size):
        groups[count] = group
        count += np.int32(most[group] >= least)
    m = 0
    for begin in range(0, n, size):
        for index in range(count):
            i = begin + groups[index]
            if i < n:
                value = row[i] & magnitude
                pool[m], positions[m] = value, i
                m += np.int32(value >= least)
    return m


@_compiled
def _tiles(x, k, values, columns, first, last):
    _, down, a, across, b = x.shape
    n = a * b
    band, pool, positions = (
        np.empty((across, n), np.int32),
        np.empty(n + 1, np.int32),
        np.empty(n + 1, np.int32),
    )
    most, groups, chosen = (
        np.empty(4 * k + 1, np.int32),
        np.empty(4 * k + 1, np.int32),
        np.empty(4 * k + 1, np.int32),
    )
    # tiles beside each other; read line by line, as they lie in memory
    for tile_index in range(first, last):
        for line in range(a):
            for j in range(across):
                band[j, line * b : (line + 1) * b] = x[
                    tile_index // down, tile_index % down, line, j
                ]
        for j in range(across):
            row, tile = band[j], tile_index * across + j
            m = _candidates(row, k, most, groups, pool, positions)
            threshold, above, _ = _bisect(pool, m, k, True)
            need, count = np.int32(k - above), 0
            for index in range(m):
                tied = np.int32(pool[index] == threshold)
                chosen[count] = positions[index]
                count += np.int32(pool[index] > threshold) | tied & np.int32(need > 0)
                need -= tied
            for index in range(k):
                columns[tile, index] = chosen[index]
                values[tile, index] = row[chosen[index]]


@_compiled
def _put_tiles(values, columns, out, first, last):
    _, down, _, across, b = out.shape
    for tile_index in range(first, last):  # while a band is at hand
        band = out[tile_index // down, tile_index % down]
        band[:] = 0
        for j in range(across):
            tile = tile_index * across + j
            for index in range(values.shape[1]):
                position = columns[tile, index]
                band[position // b, j, position % b] = values[tile, index]


@_compiled
def _reach(row, at, count):
    """Return how many entries of a row of bits reach each of four thresholds -> count; one pass,
    which vectorises.
    """
    a, b, c, d = at[0], at[1], at[2], at[3]
    na, nb, nc, nd = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    for i in range(row.size):
        value = row[i] & np.int32(0x7FFFFFFF)
        na += np.int32(value >= a)
        nb += np.int32(value >= b)
        nc += np.int32(value >= c)
        nd += np.int32(value >= d)
    count[0], count[1], count[2], count[3] = na, nb, nc, nd


@_compiled
def _narrow(row, k, pool, hint):
    """(low, high, entries that reach high): bounds of the k-th largest of a long row of bits, at
    most _CLOSE entries apart; low -1 where none are found soon (ties, steep steps).

    The first bounds are about the threshold of the row before, `hint`, or without one (0) ranks of
    a sample about k's. Between bounds, ranks go up evenly but for a spread of sqrt(entries) / 2, so
    four thresholds about the line between them leave few.
    """
    n = row.size
    at, count = np.empty(4, np.int32), np.empty(4, np.int32)
    if hint > 0:
        for round_ in range(4):
            at[round_] = min(0x7FFFFFFE, max(1, np.int64(hint) + _STEPS[round_]))
    else:
        step = n // _SAMPLE
        for i in range(_SAMPLE):
            pool[i] = row[i * step] & np.int32(0x7FFFFFFF)
        rank = _SAMPLE * k / n
        aside = 2.5 * np.sqrt(rank * (1 - rank / _SAMPLE)) + 1
        for round_ in range(4):
            target = min(_SAMPLE, max(1, int(rank + aside * (1 - round_ / 1.5))))
            at[round_], _, _ = _bisect(pool, _SAMPLE, target, True)
    low, reach, high, above = np.int64(0), np.int64(n), np.int64(0x7FFFFFFF), np.int64(0)
    for _look in range(_LOOKS):
        _reach(row, at, count)
        for round_ in range(4):
            if count[round_] >= k and at[round_] > low:
                low, reach = np.int64(at[round_]), np.int64(count[round_])
            elif count[round_] < k and at[round_] < high:
                high, above = np.int64(at[round_]), np.int64(count[round_])
        if reach - above <= _CLOSE:
            return np.int32(low), np.int32(high), np.int32(above)
        if high - low <= 1:
            break
        gap = (high - low) / (reach - above)
        middle, spread = high - gap * (k - above), gap * (0.5 * np.sqrt(reach - above) + 1)
        for round_ in range(4):
            aside = (round_ - 1.5) * (1 + (round_ % 3 == 0) / 3)  # -2, -1/2, 1/2, 2
            at[round_] = min(high - 1, max(low + 1, np.int64(middle + aside * spread)))
    return np.int32(-1), np.int32(0), np.int32(0)


@_compiled
def _keep_near(row, low, high, need, strict, want_mask, sent, count_kept, pool, positions):
    """`_keep` by bounds: entries of at least high, and of the few down to low the `need` largest;
    the threshold.
    """
    count, magnitude = 0, np.int32(0x7FFFFFFF)
    for begin in range(0, row.size, _PART):
        block, to = row[begin : begin + _PART], sent[begin : begin + _PART]
        inside = np.int32(0)
        for i in range(block.size):
            value = block[i] & magnitude
            to[i] = block[i] if value >= low else np.int32(0)
            inside += np.int32(value >= low) & np.int32(value < high)
        if want_mask:
            for i in range(block.size):
                count_kept[begin + i] = block[i] & magnitude >= low
        if inside:
            for i in range(block.size):
                value = block[i] & magnitude
                if low <= value < high:
                    pool[count], positions[count] = value, begin + i
                    count += 1
    threshold, above, _ = _bisect(pool, count, need, True)
    ties = np.int32(0) if strict else np.int32(need - above)
    for index in range(count):
        tied = np.int32(pool[index] == threshold)
        if pool[index] < threshold or (tied and ties <= 0):
            sent[positions[index]] = 0
            if want_mask:
                count_kept[positions[index]] = False
        ties -= tied
    return threshold


@_compiled
def _rank(row, k, exact, counts, pool, positions):
    """(threshold, entries to keep that equal it, entries that equal it) for the k largest
    magnitudes of a row of bits.

    A non-negative float32 orders like its bit pattern. Short rows: bisection, which without `exact`
    may stop at a smaller threshold that the same k entries reach. Rows in between of which few
    entries stay: the same, over candidates. All others: radix selection, 11 + 11 + 9 bits, so three
    histograms find the exact threshold; only entries sharing the threshold's leading bits (a few
    percent of a row) reach the second and third. Of long rows `_narrow` knows sooner.
    """
    n = row.size
    magnitude = np.int32(0x7FFFFFFF)
    if n <= _SHORT:
        for i in range(n):
            pool[i] = row[i] & magnitude
        threshold, above, count_kept = _bisect(pool, n, k, exact)
        return threshold, k - above, count_kept - above
    if n <= _TILE and k * _FEW <= n and 4 * k <= _SHORT:
        threshold, above, count_kept = _bisect(
            pool, _candidates(row, k, counts[0], counts[1], pool, positions), k, True
        )  # others lie below
        return threshold, k - above, count_kept - above
    counts[:] = 0
    multiple = n - n % 4
    for i in range(0, multiple, 4):
        counts[0, (row[i] & magnitude) >> 20] += 1
        counts[1, (row[i + 1] & magnitude) >> 20] += 1
        counts[2, (row[i + 2] & magnitude) >> 20] += 1
        counts[3, (row[i + 3] & magnitude) >> 20] += 1
    for i in range(multiple, n):
        counts[0, (row[i] & magnitude) >> 20] += 1
    need = k
    top = 2047
    while True:
        count_top = counts[0, top] + counts[1, top] + counts[2, top] + counts[3, top]
        if need <= count_top:
            break
        need -= count_top
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
    return np.int32((prefix << 9) | low), np.int32(need), counts[1, low]


@_compiled
def _ranked(row, k, counts, pool, positions, hint):
    """`_rank`, of a long row like one whose threshold was `hint` (0: none) by bounds."""
    low = high = above = np.int32(-1)
    if row.size >= _LONG:
        low, high, above = _narrow(row, k, pool, hint)
    if low < 0:
        return _rank(row, k, False, counts, pool, positions)
    count = 0
    for begin in range(0, row.size, _PART):
        block = row[begin : begin + _PART]
        inside = np.int32(0)
        for i in range(block.size):
            value = block[i] & np.int32(0x7FFFFFFF)
            inside += np.int32(value >= low) & np.int32(value < high)
        if inside:
            for i in range(block.size):
                value = block[i] & np.int32(0x7FFFFFFF)
                if low <= value < high:
                    pool[count] = value
                    count += 1
    threshold, count_kept_more, reach = _bisect(pool, count, k - above, True)
    return threshold, np.int32(k - above - count_kept_more), np.int32(reach - count_kept_more)


@_compiled
def _topk(x, k, strict, want_mask, out, mask, row_from, row_to):
    n = x.shape[1]
    # Four interleaved counters: neighbouring equal values would otherwise wait for each other's
    # store.
    counts = np.zeros((4, 2048), np.int32)
    pool, positions = np.empty(n + 1, np.int32), np.empty(n + 1, np.int32)
    threshold = np.int32(0)
    for r in range(row_from, row_to):
        if n >= _LONG:
            low, high, above = _narrow(x[r], k, pool, threshold)
            if low >= 0:
                threshold = _keep_near(
                    x[r],
                    low,
                    high,
                    k - above,
                    strict,
                    want_mask,
                    out[r],
                    mask[r if want_mask else 0],
                    pool,
                    positions,
                )
                continue
        threshold, need, ties = _rank(x[r], k, strict, counts, pool, positions)
        _keep(x[r], threshold, need, ties, strict, want_mask, out[r], mask[r if want_mask else 0])


@_compiled
def _word(start, i):
    """Word i of SplitMix64 from this start; every number here is a uint64, as numba would make
    others float64.
    """
    z = start + np.uint64(i + 1) * _GAMMA
    z = (z ^ (z >> _SHIFT[0])) * _FACTOR[0]
    z = (z ^ (z >> _SHIFT[1])) * _FACTOR[1]
    return z ^ (z >> _SHIFT[2])


@_compiled
def _draw_words(start, first, out):
    for i in range(out.size):
        out[i] = _word(start, first + i)


@_compiled
def _draw_normal(start, first, n, out):
    for i in range(out.size):
        pairs = np.uint64(0)
        for round_ in range(3):
            z = _word(start, first + i + round_ * n)
            pairs += (z & _EVEN) + ((z >> np.uint64(16)) & _EVEN)
        out[i] = (
            np.float32(
                np.int32(pairs & np.uint64(0xFFFFFFFF)) + np.int32(pairs >> np.uint64(32)) - _MEAN
            )
            * _TINY
        )


@_compiled
def _draw_uniform(start, first, low, high):
    """Words from `first` on: their low halves, and their high halves, of which there may be one
    less.
    """
    for i in range(high.size):
        z = _word(start, first + i)
        low[i] = np.float32(np.int32((z & np.uint64(0xFFFFFFFF)) >> np.uint64(8))) * _UNIT
        high[i] = np.float32(np.int32(z >> np.uint64(40))) * _UNIT
    for i in range(high.size, low.size):
        low[i] = (
            np.float32(np.int32((_word(start, first + i) & np.uint64(0xFFFFFFFF)) >> np.uint64(8)))
            * _UNIT
        )


@_compiled
def _uniform(x, lo, gains, steps, out, row_from, row_to, a, b):
    for r in range(row_from, row_to):
        low, gain, step = lo[r], gains[r], steps[r]
        row, near = x[r, a:b], out[r, a:b]
        for i in range(row.size):
            near[i] = np.rint((row[i] - low) * gain) * step + low


@_compiled
def _level_means(x, span, codes, book):
    """Sums are float64; where a value is not finite, nor is what any code stands for."""
    n, bins = x.size, book.size
    total, square = 0.0, 0.0
    for i in range(n):
        total += x[i]
    shift = np.float32(total / max(1, n))
    for i in range(n):
        off = np.float64(x[i] - shift)
        square += off * off
    scale = max(np.float32(span * math.sqrt(square / max(1, n - 1)) / bins), np.float32(1e-30))
    half, last = np.float32(bins / 2), np.float32(bins - 1)
    if not np.isfinite(total) or not np.isfinite(square):
        codes[:], book[:] = 0, np.nan
        return
    sums, taken = np.zeros(bins), np.zeros(bins)
    for i in range(n):
        off = x[i] - shift
        code = int(min(max(np.rint(off / scale + half), np.float32(0)), last))
        codes[i] = code
        sums[code] += off
        taken[code] += 1
    for code in range(bins):
        book[code] = np.float32(sums[code] / max(1.0, taken[code])) + shift


@_compiled
def _adacomp_tops(e, bits, d, size, top, row_from, row_to):
    """e += d, and the bits of the largest |e| of every bin in [row_from, row_to) -> top."""
    residues, new = e[row_from * size : row_to * size], d[row_from * size : row_to * size]
    for i in range(residues.size):
        residues[i] += new[i]
    for b in range(row_from, row_to):
        bin_bits = bits[b * size : (b + 1) * size]
        most = np.int32(0)
        # bits of a non-negative float order like it; whole numbers vectorise
        for i in range(bin_bits.size):
            most = max(most, bin_bits[i] & np.int32(0x7FFFFFFF))
        top[b] = most


@_compiled
def _adacomp_send(e, d, ahead, size, top, scale, out, sent, row_from, row_to):
    """Return what is sent of the bins in [row_from, row_to), taken off e: +-scale where |e + ahead
    d| reaches the top.
    """
    for b in range(row_from, row_to):
        residue, new, go = (
            e[b * size : (b + 1) * size],
            d[b * size : (b + 1) * size],
            out[b * size : (b + 1) * size],
        )
        if not np.isfinite(top[b]):
            go[:] = np.nan
            continue
        most = top[b] if top[b] > 0 else np.float32(np.inf)
        count = np.int32(0)
        for i in range(residue.size):
            keep = np.int32(abs(residue[i] + ahead * new[i]) >= most) & np.int32(residue[i] != 0)
            go[i] = np.copysign(scale, residue[i]) * np.float32(keep) + np.float32(0)  # never -0.0
            count += keep
        for i in range(residue.size):
            residue[i] -= go[i]
        sent[b] = count


def adacomp(e: Tensor, d: Tensor, ahead: float, size: int) -> tuple[Tensor, int, bool]:
    """AdaComp's message of residue e [n] (float32, contiguous, changed in place) and new gradient d
    [n].

    Returns what arrives, how many entries were sent, and whether a bin sent nothing; see
    `adacomp.AdaComp`.
    """
    residue, new = e.detach().numpy(), d.detach().contiguous().numpy()
    bins = -(-residue.size // size)
    top, sent, out = np.empty(bins, np.int32), np.zeros(bins, np.int32), np.empty_like(residue)
    bits, factor = residue.view(np.int32), np.float32(ahead)
    _in_bins(lambda a, b: _adacomp_tops(residue, bits, new, size, top, a, b), bins, residue.size)
    tops = top.view(np.float32)
    count_kept = np.count_nonzero(top)
    scale = np.float32(tops.sum(dtype=np.float64) / count_kept) if count_kept else np.float32(0)
    _in_bins(
        lambda a, b: _adacomp_send(residue, new, factor, size, tops, scale, out, sent, a, b),
        bins,
        residue.size,
    )
    return torch.from_numpy(out), int(sent.sum()), bool((sent == 0).any())


def _in_bins(task: Callable[[int, int], None], bins: int, n: int) -> None:
    _over_rows(task, bins, -(-n // bins))

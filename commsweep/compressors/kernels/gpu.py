"""Triton kernels behind the same steps as `kernels` and `packing`, bit for bit, for tensors on a
GPU.

Without Triton, or off the GPU, plain torch does the same. With TRITON_INTERPRET=1 they run on the
CPU, which is how they are tested where there is none. No product may be fused with a sum (FUSED),
or last bits would differ.
"""

# pyright: reportInvalidTypeForm=false, reportUnboundVariable=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Triton's kernels are a language of their own, which a checker of Python takes for functions.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commsweep import seeds

if TYPE_CHECKING:
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = None

PLAIN, EF, EF21 = range(3)  # what a selection remembers
FUSED = {"enable_fp_fusion": False}
PART, MANY = (
    16384,
    64,
)  # rows longer than this are shared out among programs, unless there are so many
# Bits of a magnitude, by bytes of an entry: (the lowest of a level, how many). Few bins a level,
# because Triton's histogram needs one population count per entry and 32 bins.
LEVELS = {4: ((24, 7), (18, 6), (12, 6), (6, 6), (0, 6)), 2: ((24, 7), (18, 6), (13, 5))}
_FEW = 4096  # elements of a group that one program holds in registers
_PARTS = 1024  # programs that share a longer group, at most


def usable(x: Tensor) -> bool:
    """Return whether the kernels serve x (and not what stands for a tensor that is nowhere)."""
    return triton is not None and x.is_cuda and type(x) in (Tensor, torch.nn.Parameter)


def selects(x: Tensor) -> bool:
    """Return whether they choose among the entries of x: of 16 or 32 bits."""
    return usable(x) and x.element_size() in (2, 4)


def topk_rows(x: Tensor, k: int, strict: bool, want_mask: bool) -> tuple[Tensor, Tensor | None]:
    """Do what `kernels.topk_rows` does, of any type with 16 or 32 bits."""
    x = x.detach().contiguous()
    y, mask = (
        torch.empty_like(x),
        torch.empty(x.shape if want_mask else (1,), dtype=torch.bool, device=x.device),
    )
    _selected(x, k, y=y, mask=mask if want_mask else None, strict=strict)
    return y, mask if want_mask else None


def select(x: Tensor, k: int, as_mask: bool) -> tuple[Tensor, Tensor]:
    """Do what `packing.select` does."""
    x = x.detach().contiguous()
    values = torch.empty(x.shape[0], k, dtype=x.dtype, device=x.device)
    if as_mask:
        _selected(
            x,
            k,
            values=values,
            mask=(mask := torch.empty(x.shape, dtype=torch.bool, device=x.device)),
        )
        return values, mask
    _selected(
        x,
        k,
        values=values,
        columns=(columns := torch.empty(values.shape, dtype=torch.int32, device=x.device)),
    )
    return values, columns


def message(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`select` as a mask already packed, uint8 [rows * n / 8], for rows of a multiple of eight."""
    x = x.detach().contiguous()
    values = torch.empty(x.shape[0], k, dtype=x.dtype, device=x.device)
    packed = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)
    _selected(x, k, values=values, packed=packed)
    return values, packed


def topk_remembered(x: Tensor, memory: Tensor, k: int, kind: int) -> Tensor:
    """TopK with its feedback in one pass over memory: float32 x, memory [rows, n], both contiguous,
    memory changed.

    EF: y = C(memory + x), memory <- memory + x - y. EF21: y = C(x - memory), memory <- memory + y.
    Returns y.
    """
    y = torch.empty_like(x)
    _selected(x, k, y=y, memory=memory, kind=kind)
    return y


def _selected(
    x: Tensor,
    k: int,
    y: Tensor | None = None,
    mask: Tensor | None = None,
    values: Tensor | None = None,
    columns: Tensor | None = None,
    packed: Tensor | None = None,
    memory: Tensor | None = None,
    strict: bool = False,
    kind: int = PLAIN,
) -> None:
    rows, n = x.shape
    key_type = torch.int32 if x.element_size() == 4 else torch.int16
    bits = [x if tensor is None else tensor.view(key_type) for tensor in (x, y, values)]
    marks = packed if packed is not None else x if mask is None else mask.view(torch.uint8)
    memory = x if memory is None else memory.view(key_type)
    shared = rows < MANY and n > PART
    block = min(8192 if shared else 16384, max(8, triton.next_power_of_2(n)))
    alike = {
        "KIND": kind,
        "SHIFT": 32 - 8 * x.element_size(),
        "BLOCK": block,
        "num_warps": {16384: 16, 8192: 32}.get(block, 4),  # the fastest of those tried on an H200
        **FUSED,
    }
    options = {
        "STRICT": strict,
        "Y": y is not None,
        "MASK": mask is not None,
        "VALUES": values is not None,
        "COLUMNS": columns is not None,
        "PACKED": packed is not None,
    }
    outputs = *bits[1:], marks, x if columns is None else columns
    if not shared:
        _select[(rows,)](bits[0], *outputs, memory, n, k, **options, **alike)
        return
    blocks = triton.cdiv(n, PART)
    levels = LEVELS[x.element_size()]
    counts = torch.empty(rows, blocks, 128, dtype=torch.int32, device=x.device)
    state, scratch = (
        torch.zeros(rows, size, dtype=torch.int32, device=x.device) for size in (4, 2 * blocks)
    )
    for low, width in levels:
        _tally[(rows, blocks)](
            bits[0], memory, counts, state, n, blocks, LOW=low, BITS=width, PART=PART, **alike
        )
        first = low == levels[0][0]
        _settle[(rows,)](counts, state, scratch, k, blocks, FIRST=first, BITS=width, SOME=32)
    _positions[(rows, blocks)](
        bits[0],
        *outputs,
        memory,
        state,
        scratch,
        n,
        k,
        blocks,
        LOW=levels[-1][0],
        WIDE=triton.next_power_of_2(blocks),
        PART=PART,
        **options,
        **alike,
    )


def above(x: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """(x where |x| exceeds its row's edge or is not a number, that mask): x [rows, n], edge float32
    [rows, 1].
    """
    x = x.detach().contiguous()
    y, mask = torch.empty_like(x), torch.empty(x.shape, dtype=torch.bool, device=x.device)
    _above[(triton.cdiv(x.numel(), 1024),)](
        x, edge.contiguous(), y, mask.view(torch.uint8), x.numel(), x.shape[1], BLOCK=1024
    )
    return y, mask


def quantize(
    x: Tensor, bits: int, symmetric: bool, start: int | None = None
) -> tuple[Tensor, Tensor]:
    """The message of `grouped`: packed codes uint8, and scales float32 [1 or 2, groups]; see
    `whole_bytes`.
    """
    x = x.detach().contiguous()
    codes = torch.empty(x.numel() * bits // 8, dtype=torch.uint8, device=x.device)
    scales = torch.empty(1 if symmetric else 2, x.shape[0], device=x.device)
    _in_groups(x, x, bits, symmetric, start, codes, scales)
    return codes, scales


def whole_bytes(n: int, bits: int) -> bool:
    """Return whether codes of so many bits of groups of n fill whole bytes, each by itself."""
    return 8 % bits == 0 and n * bits % 8 == 0


def grouped(x: Tensor, bits: int, symmetric: bool, start: int | None = None) -> Tensor:
    """Return what arrives of x [groups, n] in codes of so many bits, each group's range found on
    the way; of x's type, computed in float32.

    start: of the stream that rounding draws from; None: to the nearest code. As `quantize.Uniform`,
    or `FixedPoint`.
    """
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    _in_groups(x, out, bits, symmetric, start)
    return out


def _in_groups(
    x: Tensor,
    out: Tensor,
    bits: int,
    symmetric: bool,
    start: int | None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    groups, n = x.shape
    outputs = out, x if codes is None else codes, x if scales is None else scales
    numbers = (
        float(2 ** (bits - 1) if symmetric else 2**bits - 1),
        seeds.signed(start or 0),
        -(-x.numel() // 2),
    )
    flags = {
        "BITS": bits,
        "SYMMETRIC": symmetric,
        "DRAWN": start is not None,
        "PACKED": codes is not None,
        **FUSED,
    }
    if n <= _FEW:
        wide = max(8, triton.next_power_of_2(n))
        groups_each = max(1, 2048 // wide)
        grid = (triton.cdiv(groups, groups_each),)
        _grouped[grid](x, *outputs, groups, n, *numbers, ROWS=groups_each, WIDE=wide, **flags)
        return
    block = _FEW * triton.cdiv(triton.cdiv(n, _FEW), _PARTS)
    blocks = triton.cdiv(n, block)
    ranges = torch.empty(2, groups, blocks, device=x.device)
    grid, sizes = (groups, blocks), {"PART": block, "BLOCK": min(block, 4096), "num_warps": 8}
    _ranges[grid](x, ranges, groups, n, blocks, **sizes, **FUSED)
    wide = triton.next_power_of_2(blocks)
    _coded[grid](x, *outputs, ranges, groups, n, blocks, *numbers, WIDE=wide, **sizes, **flags)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Do what `packing.pack_codes` does."""
    codes = codes.detach().contiguous()
    codes = codes.view(torch.uint8) if codes.dtype == torch.bool else codes
    out = torch.empty(-(-codes.numel() * bits // 8), dtype=torch.uint8, device=codes.device)
    if out.numel():
        _pack[(triton.cdiv(out.numel(), 1024),)](
            codes,
            out,
            codes.numel(),
            out.numel(),
            BITS=bits,
            TURNS=(bits + 6) // bits + 1,
            BLOCK=1024,
        )
    return out


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Do what `packing.unpack_codes` does."""
    out = torch.empty(count, dtype=torch.int64, device=packed.device)
    if count:
        _unpack[(triton.cdiv(count, 1024),)](
            packed.contiguous(),
            out,
            count,
            packed.numel(),
            BITS=bits,
            TURNS=(bits + 14) // 8,
            BLOCK=1024,
        )
    return out


def draw_uniform(out: Tensor, start: int) -> Tensor:
    """Do what `kernels.uniform_draws` does, into out [n]."""
    if n := out.numel():
        _draws[(triton.cdiv(n, 1024),)](out, n, seeds.signed(start), -(-n // 2), BLOCK=1024)
    return out


def adacomp(e: Tensor, d: Tensor, ahead: float, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `kernels.adacomp` does; numbers stay on the device."""
    n = e.numel()
    bins, wide = -(-n // size), triton.next_power_of_2(size)
    rows_each = max(1, 2048 // wide)
    top, sent = (
        torch.empty(bins, device=e.device),
        torch.empty(bins, dtype=torch.int32, device=e.device),
    )
    out, grid, sizes = (
        torch.empty_like(e),
        (triton.cdiv(bins, rows_each),),
        {"SIZE": size, "ROWS": rows_each, "WIDE": wide},
    )
    _adacomp_tops[grid](e, d.contiguous(), top, n, bins, **sizes, **FUSED)
    scale = (top.sum(dtype=torch.float64) / torch.count_nonzero(top).clamp(min=1)).float()
    _adacomp_send[grid](e, d.contiguous(), top, scale, out, sent, n, bins, ahead, **sizes, **FUSED)
    return out, sent.sum(), (sent == 0).any()


if triton is not None:

    @triton.jit
    def _read(x, memory, i, inside, KIND: tl.constexpr):
        """The bits of what is selected from: x, x added to the residue, or its difference from the
        state.
        """
        raw = tl.load(x + i, mask=inside, other=0)
        if KIND == 1:
            raw = (
                tl.load(memory + i, mask=inside, other=0).to(tl.float32, bitcast=True)
                + raw.to(tl.float32, bitcast=True)
            ).to(tl.int32, bitcast=True)
        if KIND == 2:
            raw = (
                raw.to(tl.float32, bitcast=True)
                - tl.load(memory + i, mask=inside, other=0).to(tl.float32, bitcast=True)
            ).to(tl.int32, bitcast=True)
        return raw

    @triton.jit
    def _size(raw, SHIFT: tl.constexpr):
        """Bits of a magnitude, of 16 bits as of a float32's upper half: whole numbers that order
        like it.
        """
        return (raw.to(tl.int32) << SHIFT) & 0x7FFFFFFF

    @triton.jit
    def _bin(counts, k, BINS: tl.constexpr):
        """(the bin of the k-th largest, how many of it are among the k, how many there are)."""
        at = tl.arange(0, BINS)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        bin_ = tl.sum((above >= k).to(tl.int32), 0)
        return (
            bin_,
            k - tl.sum(tl.where(at > bin_, counts, 0), 0),
            tl.sum(tl.where(at == bin_, counts, 0), 0),
        )

    @triton.jit
    def _counts(
        x,
        memory,
        first,
        last,
        prefix,
        LOW: tl.constexpr,
        BITS: tl.constexpr,
        KIND: tl.constexpr,
        SHIFT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Return the counts of the entries [first, last) of a row that share the leading bits: how
        many have which next bits.
        """
        BINS: tl.constexpr = 1 << BITS
        counts = tl.zeros([BINS], tl.int32)
        for begin in range(first, last, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            size = _size(_read(x, memory, i, i < last, KIND), SHIFT)
            alike = (i < last) & ((size >> LOW) >> BITS == prefix)
            counts += tl.histogram((size >> LOW) & (BINS - 1), BINS, mask=alike)
        return counts

    @triton.jit
    def _narrow(
        x,
        memory,
        n,
        prefix,
        need,
        LOW: tl.constexpr,
        BITS: tl.constexpr,
        KIND: tl.constexpr,
        SHIFT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """(leading bits of a row's k-th largest down to bit LOW, how many to keep of the entries
        that share them, how many do).
        """
        counts = _counts(x, memory, 0, n, prefix, LOW, BITS, KIND, SHIFT, BLOCK)
        bin_, need, ties = _bin(counts, need, 1 << BITS)
        return (prefix << BITS) | bin_, need, ties

    @triton.jit
    def _select(
        x,
        y,
        values,
        mask,
        columns,
        memory,
        n,
        k,
        STRICT: tl.constexpr,
        Y: tl.constexpr,
        MASK: tl.constexpr,
        VALUES: tl.constexpr,
        COLUMNS: tl.constexpr,
        PACKED: tl.constexpr,
        KIND: tl.constexpr,
        SHIFT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A row a program: radix selection by the levels of LEVELS, then a pass that writes. A row
        is read from memory once and from the cache after that.
        """
        row = tl.program_id(0).to(tl.int64)
        x, memory = x + row * n, memory + row * n
        edge, need, ties = _narrow(x, memory, n, 0, k, 24, 7, KIND, SHIFT, BLOCK)
        edge, need, ties = _narrow(x, memory, n, edge, need, 18, 6, KIND, SHIFT, BLOCK)
        if SHIFT:
            edge, need, ties = _narrow(x, memory, n, edge, need, 13, 5, KIND, SHIFT, BLOCK)
            edge = edge << 13
        else:
            edge, need, ties = _narrow(x, memory, n, edge, need, 12, 6, KIND, SHIFT, BLOCK)
            edge, need, ties = _narrow(x, memory, n, edge, need, 6, 6, KIND, SHIFT, BLOCK)
            edge, need, ties = _narrow(x, memory, n, edge, need, 0, 6, KIND, SHIFT, BLOCK)
        none = need - need  # a number that the compiler lets a loop add to
        _write(
            x,
            y,
            values,
            mask,
            columns,
            memory,
            row,
            n,
            k,
            0,
            n,
            edge,
            need,
            ties,
            none,
            none,
            STRICT,
            Y,
            MASK,
            VALUES,
            COLUMNS,
            PACKED,
            KIND,
            SHIFT,
            BLOCK,
        )

    @triton.jit
    def _tally(
        x,
        memory,
        counts,
        state,
        n,
        blocks,
        LOW: tl.constexpr,
        BITS: tl.constexpr,
        PART: tl.constexpr,
        KIND: tl.constexpr,
        SHIFT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A part of a row a program: how many of its entries that are still in question lie in each
        bin of a level.
        """
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        x, memory = x + row * n, memory + row * n
        last = tl.minimum(n, (block + 1) * PART)
        prefix = tl.load(state + 4 * row)
        bins = _counts(x, memory, block * PART, last, prefix, LOW, BITS, KIND, SHIFT, BLOCK)
        BINS: tl.constexpr = 1 << BITS
        tl.store(counts + (row * blocks + block) * BINS + tl.arange(0, BINS), bins)

    @triton.jit
    def _settle(
        counts,
        state,
        scratch,
        k,
        blocks,
        FIRST: tl.constexpr,
        BITS: tl.constexpr,
        SOME: tl.constexpr,
    ):
        """found [rows, 4]: leading bits, how many to keep of those that share them, how many do.
        own [rows, 2, parts]: a part's entries above these, and with them.
        """
        BINS: tl.constexpr = 1 << BITS
        row = tl.program_id(0).to(tl.int64)
        lanes, at = tl.arange(0, SOME)[:, None], tl.arange(0, BINS)[None, :]
        bins = tl.zeros([BINS], tl.int32)
        for begin in range(0, blocks, SOME):
            block = begin + lanes
            address = counts + (row * blocks + block) * BINS + at
            bins += tl.sum(tl.load(address, mask=block < blocks, other=0), 0)
        need = k if FIRST else tl.load(state + 4 * row + 1)
        bin_, need, ties = _bin(bins, need, BINS)
        prefix = (tl.load(state + 4 * row) << BITS) | bin_
        for begin in range(0, blocks, SOME):
            block = begin + lanes
            address = counts + (row * blocks + block) * BINS + at
            mine = tl.load(address, mask=block < blocks, other=0)
            block = begin + tl.arange(0, SOME)
            address = scratch + row * 2 * blocks + block
            above = tl.load(address, mask=block < blocks, other=0)
            above += tl.sum(tl.where(at > bin_, mine, 0), 1)
            tl.store(address, above, mask=block < blocks)
            tl.store(
                address + blocks, tl.sum(tl.where(at == bin_, mine, 0), 1), mask=block < blocks
            )
        tl.store(state + 4 * row, prefix)
        tl.store(state + 4 * row + 1, need)
        tl.store(state + 4 * row + 2, ties)

    @triton.jit
    def _positions(
        x,
        y,
        values,
        mask,
        columns,
        memory,
        state,
        scratch,
        n,
        k,
        blocks,
        LOW: tl.constexpr,
        WIDE: tl.constexpr,
        PART: tl.constexpr,
        STRICT: tl.constexpr,
        Y: tl.constexpr,
        MASK: tl.constexpr,
        VALUES: tl.constexpr,
        COLUMNS: tl.constexpr,
        PACKED: tl.constexpr,
        KIND: tl.constexpr,
        SHIFT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A part of a row a program, which knows what the parts before it keep."""
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        edge, need = tl.load(state + 4 * row) << LOW, tl.load(state + 4 * row + 1)
        before = tl.arange(0, WIDE) < block
        base = scratch + row * 2 * blocks + tl.arange(0, WIDE)
        tied = tl.sum(tl.load(base + blocks, mask=before, other=0), 0)
        kept_before = tl.sum(tl.load(base, mask=before, other=0), 0) + tl.minimum(tied, need)
        _write(
            x + row * n,
            y,
            values,
            mask,
            columns,
            memory + row * n,
            row,
            n,
            k,
            block * PART,
            min(n, (block + 1) * PART),
            edge,
            need,
            tl.load(state + 4 * row + 2),
            tied,
            kept_before,
            STRICT,
            Y,
            MASK,
            VALUES,
            COLUMNS,
            PACKED,
            KIND,
            SHIFT,
            BLOCK,
        )

    @triton.jit
    def _write(
        x,
        y,
        values,
        mask,
        columns,
        memory,
        row,
        n,
        k,
        first,
        last,
        edge,
        need,
        ties,
        tied_before,
        kept_before,
        STRICT: tl.constexpr,
        Y: tl.constexpr,
        MASK: tl.constexpr,
        VALUES: tl.constexpr,
        COLUMNS: tl.constexpr,
        PACKED: tl.constexpr,
        KIND: tl.constexpr,
        SHIFT: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Return what is asked for of the entries [first, last) of a row whose k-th largest is
        `edge`; `ties` equal it, of which the first `need` stay.
        """
        for begin in range(first, last, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            inside = i < last
            raw = _read(x, memory, i, inside, KIND)
            size = _size(raw, SHIFT)
            keep = inside & (size > edge)
            if not STRICT:
                tied = inside & (size == edge)
                if need < ties:  # of tied entries the first
                    rank = tied_before + tl.cumsum(tied.to(tl.int32), 0)
                    tied_before += tl.sum(tied.to(tl.int32), 0)
                    tied = tied & (rank <= need)
                keep = keep | tied
            sent = tl.where(keep, raw, 0)
            if Y:
                tl.store(y + row * n + i, sent, mask=inside)
            if KIND == 1:
                left = raw.to(tl.float32, bitcast=True) - sent.to(tl.float32, bitcast=True)
                tl.store(memory + i, left.to(tl.int32, bitcast=True), mask=inside)
            if KIND == 2:
                state = tl.load(memory + i, mask=inside, other=0).to(tl.float32, bitcast=True)
                tl.store(
                    memory + i,
                    (state + sent.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True),
                    mask=inside,
                )
            if MASK:
                tl.store(mask + row * n + i, keep.to(tl.uint8), mask=inside)
            if PACKED:
                byte = tl.sum(
                    tl.reshape(keep.to(tl.int32), [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :], 1
                )
                j = begin // 8 + tl.arange(0, BLOCK // 8)
                tl.store(mask + row * (n // 8) + j, byte.to(tl.uint8), mask=j < last // 8)
            if VALUES:
                position = row * k + kept_before + tl.cumsum(keep.to(tl.int32), 0) - 1
                tl.store(values + position, raw, mask=keep)
                if COLUMNS:
                    tl.store(columns + position, i, mask=keep)
                kept_before += tl.sum(keep.to(tl.int32), 0)

    @triton.jit
    def _above(x, edge, y, mask, total, n, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < total
        value = tl.load(x + i, mask=inside, other=0)
        size = tl.abs(value.to(tl.float32))
        keep = (size > tl.load(edge + i // n, mask=inside, other=0)) | (size != size)
        tl.store(y + i, tl.where(keep, value, 0), mask=inside)
        tl.store(mask + i, keep.to(tl.uint8), mask=inside)

    @triton.jit
    def _draw(i, start, half):
        """Entry i of a uniform stream whose first `half` entries are the low halves of its
        words.
        """
        low = i < half
        z = (
            start.to(tl.uint64)
            + (tl.where(low, i, i - half) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        z = z ^ (z >> 31)
        bits = tl.where(low, z & 0xFFFFFFFF, z >> 32) >> 8
        return bits.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08

    @triton.jit
    def _draws(out, n, start, half, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, _draw(i, start, half), mask=i < n)

    @triton.jit
    def _nearest(v):
        """To the nearest whole number, ties to the even one; |v| < 2^22."""
        return (v + 12582912.0) - 12582912.0

    @triton.jit
    def _extremes(v, inside):
        """(smallest, largest) of each row of v, [rows, 1]: not a number where one of it is none."""
        bad = tl.max((inside & (v != v)).to(tl.int32), 1)[:, None] > 0
        lo = tl.min(tl.where(inside, v, float("inf")), 1)[:, None]
        hi = tl.max(tl.where(inside, v, float("-inf")), 1)[:, None]
        return tl.where(bad, float("nan"), lo), tl.where(bad, float("nan"), hi)

    @triton.jit
    def _code(
        v,
        lo,
        hi,
        i,
        levels,
        start,
        half,
        SYMMETRIC: tl.constexpr,
        DRAWN: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        """Return the codes of values [rows, n], entries i of the message, and their rows' range
        [rows, 1]: (what arrives, the code that travels, the first scale that travels).
        """
        if SYMMETRIC:
            if DRAWN:
                hi = hi * tl.div_rn(levels, levels - 1)
            s = tl.where(hi != hi, float("nan"), tl.maximum(hi, -lo)) + 0.0
            code = tl.div_rn(v, tl.where(s != 0, s, 1.0)) * levels
        else:
            spread = hi - lo
            # as torch divides by a tensor
            gain = tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), spread) * levels
            gain = tl.where((gain == float("inf")) & (spread < 1), 0.0, gain)
            code = (v - lo) * gain
        code = tl.floor(code + _draw(i, start, half)) if DRAWN else _nearest(code)
        if SYMMETRIC:
            code = (
                tl.where(code < -levels, -levels, tl.where(code > levels - 1, levels - 1, code))
                + 0.0
            )
            values, rounded, first = tl.div_rn(code, levels) * s, code + levels, s
        else:
            if DRAWN:
                code = tl.where(code > levels, levels, code)
            values, rounded, first = code * tl.div_rn(spread, levels) + lo, code, lo
        none = levels if SYMMETRIC else 0.0  # the code of zero stands for what is not a number
        return values, tl.where(rounded == rounded, rounded, none).to(tl.int32), first

    @triton.jit
    def _bytes(rounded, ROWS: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr):
        """Codes [rows, wide] in bytes, the first code of a byte in its lowest bits."""
        pairs = tl.reshape(rounded, [ROWS, WIDE * BITS // 8, 8 // BITS])
        return tl.sum(pairs << (tl.arange(0, 8 // BITS) * BITS)[None, None, :], 2).to(tl.uint8)

    @triton.jit
    def _grouped(
        x,
        out,
        codes,
        scales,
        groups,
        n,
        levels,
        start,
        half,
        BITS: tl.constexpr,
        SYMMETRIC: tl.constexpr,
        DRAWN: tl.constexpr,
        PACKED: tl.constexpr,
        ROWS: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """Some short groups a program."""
        group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, WIDE)[None, :]
        inside = (group < groups) & (column < n)
        i = group * n + column
        v = tl.load(x + i, mask=inside, other=0).to(tl.float32)
        lo, hi = _extremes(v, inside)
        values, rounded, first = _code(v, lo, hi, i, levels, start, half, SYMMETRIC, DRAWN, ROWS)
        if PACKED:
            if not SYMMETRIC:
                tl.store(scales + groups + group, hi, mask=group < groups)
            tl.store(scales + group, first, mask=group < groups)
            j = tl.arange(0, WIDE * BITS // 8)[None, :]
            tl.store(
                codes + group * (n * BITS // 8) + j,
                _bytes(tl.where(inside, rounded, 0), ROWS, WIDE, BITS),
                mask=(group < groups) & (j < n * BITS // 8),
            )
        else:
            tl.store(out + i, values, mask=inside)

    @triton.jit
    def _ranges(x, ranges, groups, n, blocks, PART: tl.constexpr, BLOCK: tl.constexpr):
        """A part of a long group a program: ranges [2, groups, parts], its smallest and largest."""
        group, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        low = tl.full([1, 1], float("inf"), tl.float32)
        high = tl.full([1, 1], float("-inf"), tl.float32)
        last = tl.minimum(n, (block + 1) * PART)
        for begin in range(block * PART, last, BLOCK):
            i = begin + tl.arange(0, BLOCK)[None, :]
            v = tl.load(x + group * n + i, mask=i < last, other=0).to(tl.float32)
            lo, hi = _extremes(v, i < last)
            bad = (lo != lo) | (low != low)
            low = tl.where(bad, float("nan"), tl.minimum(low, lo))
            high = tl.where(bad, float("nan"), tl.maximum(high, hi))
        at = ranges + group * blocks + block + tl.zeros([1, 1], tl.int32)
        tl.store(at, low)
        tl.store(at + groups * blocks, high)

    @triton.jit
    def _coded(
        x,
        out,
        codes,
        scales,
        ranges,
        groups,
        n,
        blocks,
        levels,
        start,
        half,
        BITS: tl.constexpr,
        SYMMETRIC: tl.constexpr,
        DRAWN: tl.constexpr,
        PACKED: tl.constexpr,
        WIDE: tl.constexpr,
        PART: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A part of a long group a program, which knows the ranges of all parts."""
        group, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        lanes = tl.arange(0, WIDE)[None, :]
        at = ranges + group * blocks + lanes
        lo, _ = _extremes(tl.load(at, mask=lanes < blocks, other=0), lanes < blocks)
        _, hi = _extremes(
            tl.load(at + groups * blocks, mask=lanes < blocks, other=0), lanes < blocks
        )
        last = tl.minimum(n, (block + 1) * PART)
        for begin in range(block * PART, last, BLOCK):
            column = begin + tl.arange(0, BLOCK)[None, :]
            inside, i = column < last, group * n + column
            v = tl.load(x + i, mask=inside, other=0).to(tl.float32)
            values, rounded, first = _code(v, lo, hi, i, levels, start, half, SYMMETRIC, DRAWN, 1)
            if PACKED:
                if block == 0:
                    if not SYMMETRIC:
                        tl.store(scales + groups + group + tl.zeros([1, 1], tl.int32), hi)
                    tl.store(scales + group + tl.zeros([1, 1], tl.int32), first)
                j = begin * BITS // 8 + tl.arange(0, BLOCK * BITS // 8)[None, :]
                tl.store(
                    codes + group * (n * BITS // 8) + j,
                    _bytes(tl.where(inside, rounded, 0), 1, BLOCK, BITS),
                    mask=j < last * BITS // 8,
                )
            else:
                tl.store(out + i, values, mask=inside)

    @triton.jit
    def _pack(codes, out, n, total, BITS: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr):
        """Byte j: the codes that reach into bits 8 j to 8 j + 7."""
        j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        byte = tl.zeros([BLOCK], tl.int64)
        for round_ in tl.static_range(TURNS):
            i = 8 * j // BITS + round_
            code = tl.load(codes + i, mask=i < n, other=0).to(tl.int64)
            ahead = i * BITS - 8 * j
            byte |= tl.where(
                ahead >= 8,
                0,
                tl.where(
                    ahead >= 0,
                    code << tl.maximum(tl.minimum(ahead, 8), 0),
                    code >> tl.maximum(-ahead, 0),
                ),
            )
        tl.store(out + j, (byte & 255).to(tl.uint8), mask=j < total)

    @triton.jit
    def _unpack(
        packed, out, count, total, BITS: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr
    ):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        first = i * BITS // 8
        word = tl.zeros([BLOCK], tl.int64)
        for round_ in tl.static_range(TURNS):
            byte = tl.load(
                packed + first + round_, mask=(i < count) & (first + round_ < total), other=0
            )
            word |= byte.to(tl.int64) << (8 * round_)
        tl.store(out + i, (word >> (i * BITS % 8)) & ((1 << BITS) - 1), mask=i < count)

    @triton.jit
    def _adacomp_tops(
        e, d, top, n, bins, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
    ):
        """e += d, and the largest |e| of every bin; NaN counts as larger than any."""
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, WIDE)[None, :]
        i = row[:, None] * SIZE + column
        inside = (column < SIZE) & (i < n)
        sums = tl.load(e + i, mask=inside, other=0) + tl.load(d + i, mask=inside, other=0)
        tl.store(e + i, sums, mask=inside)
        bits = tl.where(inside, sums.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        tl.store(top + row, tl.max(bits, 1).to(tl.float32, bitcast=True), mask=row < bins)

    @triton.jit
    def _adacomp_send(
        e,
        d,
        top,
        scale,
        out,
        sent,
        n,
        bins,
        ahead,
        SIZE: tl.constexpr,
        ROWS: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, WIDE)[None, :]
        i = row[:, None] * SIZE + column
        inside = (column < SIZE) & (i < n)
        sums = tl.load(e + i, mask=inside, other=0)
        most = tl.load(top + row, mask=row < bins, other=0)[:, None]
        finite = (most.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
        h = tl.abs(sums + tl.load(d + i, mask=inside, other=0) * ahead)
        keep = inside & finite & (most > 0) & (sums != 0) & (h >= most)
        size = tl.load(scale)
        none = size - size  # 0, or NaN where a bin is not finite
        go = tl.where(keep, tl.where(sums > 0, size, -size), tl.where(finite, none, float("nan")))
        tl.store(out + i, go, mask=inside)
        tl.store(e + i, tl.where(finite, sums - go, sums), mask=inside)
        count = tl.sum(keep.to(tl.int32), 1)
        tl.store(sent + row, count, mask=row < bins)

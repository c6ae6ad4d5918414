"""Sparsifiers: most entries become zero, the kept ones travel with the places they belong to."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from commsweep import seeds
from commsweep.compressors import draws, rice
from commsweep.compressors.base import (
    COMPRESSORS,
    Compressor,
    Field,
    Payload,
    S,
    laid_out,
    payload,
    row_shape,
    rows,
    unrows,
)
from commsweep.compressors.bits import (
    check_columns,
    check_length,
    index_bits,
    indices_win,
    mask_bytes,
    pack,
    pack_mask,
    packed_bytes,
    taken,
    unpack,
    unpack_flags,
    unpack_mask,
)
from commsweep.compressors.kernels import cpu, gpu, packing
from commsweep.config.compressors.sparse import (
    ForwardMaskSpec,
    RandomKSpec,
    RandTopKSpec,
    TopKSpec,
    TopKStrictSpec,
)
from commsweep.errors import UserError

SelectionT = TypeVar("SelectionT", TopKSpec, RandomKSpec, RandTopKSpec)


class Sparsifier(Compressor[S]):
    """A compressor that keeps some entries; `masked` also says which."""

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """(what the receiver sees, boolean mask of the kept entries or None), both of x's shape and
        layout.
        """
        raise NotImplementedError

    def where_kept(self, x: Tensor, seed: int = 0) -> Tensor:
        """The boolean mask of `masked`."""
        mask = self.masked(x, seed)[1]
        assert mask is not None  # asked for
        return mask

    def mask(self, payload: Payload) -> Tensor:
        """The boolean mask of the entries that a payload carries, of the message's shape and
        layout.
        """
        raise NotImplementedError

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return self.masked(x, seed, want_mask=False)[0]

    def halved(self) -> Sparsifier:
        """The same sparsifier with half the ratio (EF-mixed spends the budget twice)."""
        ratio: float = getattr(self.spec, "ratio")  # noqa: B009 (every sparsifier that halves has one)
        return type(self)(self.spec.model_copy(update={"ratio": ratio / 2}))


def budget(ratio: float, row: int) -> int:
    """Entries kept of `row`: the nearest whole number to ratio * row, at least one."""
    return max(1, round(ratio * row))


def largest(flat: Tensor, k: int) -> Tensor:
    """The mask of `keep_largest`."""
    mask = keep_largest(flat, k)[1]
    assert mask is not None  # asked for
    return mask


def keep_largest(
    flat: Tensor, k: int, strict: bool = False, want_mask: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Per row of flat [rows, n]: the k largest magnitudes, ties going to the lowest index.

    strict: only entries above the k-th largest magnitude, so that every tie with it is dropped.
    """
    if cpu.usable(flat):
        return cpu.topk_rows(flat, k, strict, want_mask)
    if flat.dtype in (torch.bfloat16, torch.float16) and cpu.usable(flat[:0].float()):
        # exact: float32 holds them all
        out, mask = cpu.topk_rows(flat.float(), k, strict, want_mask)
        return out.to(flat.dtype), mask
    if gpu.selects(flat):
        return gpu.topk_rows(flat, k, strict, want_mask)
    size = flat.abs()
    size = torch.where(size.isnan(), torch.inf, size)
    threshold = size.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    mask = size > threshold
    if not strict:
        tied = size == threshold
        free = k - mask.sum(1, keepdim=True)
        mask |= tied & (tied.cumsum(1) <= free)
    return flat.where(mask, flat.new_zeros(())), mask


class FixedK(Sparsifier[SelectionT]):
    """A sparsifier that keeps as many entries of every row, whatever they are; samples are the rows
    unless it says.
    """

    def budget(self, row: int) -> int:
        """Entries kept of a row of so many."""
        return budget(self.spec.ratio, row)

    def kept_shape(self, shape: torch.Size) -> tuple[int, int]:
        """(rows, entries kept of each) of a message of this shape."""
        n_rows, row = self._row_shape(shape)
        return n_rows, self.budget(row)

    def kept_rows(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """A message as the rows [rows, n], and what is kept of them."""
        return self.as_rows(x), self.as_rows(laid_out(self.where_kept(x, seed), x))

    def as_rows(self, x: Tensor) -> Tensor:
        """A message (or its mask) as the rows [rows, n]."""
        return rows(x)

    def from_rows(self, flat: Tensor, like: Tensor | Payload) -> Tensor:
        """Inverse of `as_rows`."""
        return unrows(flat, like)

    def gain(self, shape: torch.Size) -> float:
        """Return what the receiver multiplies the values by."""
        return 1.0

    def _row_shape(self, shape: torch.Size) -> tuple[int, int]:
        return row_shape(shape)


@COMPRESSORS.of(TopKSpec)
class TopK(FixedK[TopKSpec]):
    """The k = ratio * d largest magnitudes of each sample, of the tensor, or of each last-dimension
    row.

    nbytes = rows * k * itemsize + min(ceil(rows * k * ceil(log2 d) / 8), ceil(rows * d / 8));
    without the second term when k = d.
    """

    def budget(self, row: int) -> int:
        if self.spec.per_tile == "number":
            return min(row, super().budget((self.spec.tile or TILE) ** 2))
        return super().budget(row)

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        flat = self.as_rows(x)
        k = self.budget(flat.shape[1])
        if k == flat.shape[1]:
            return x, torch.ones_like(x, dtype=torch.bool) if want_mask else None
        y, mask = keep_largest(flat, k, want_mask=want_mask)
        return self.from_rows(y, x), None if mask is None else self.from_rows(mask, x)

    def remembered(self, x: Tensor, memory: Tensor, kind: int) -> Tensor | None:
        if not gpu.usable(x):
            return None
        flat, remembered_rows = self.as_rows(x), self.as_rows(memory)
        k = self.budget(flat.shape[1])
        views = flat.data_ptr() == x.data_ptr() and remembered_rows.data_ptr() == memory.data_ptr()
        if not (
            views
            and x.dtype == memory.dtype == torch.float32
            and x.stride() == memory.stride()
            and flat.is_contiguous()
            and k < flat.shape[1]
        ):
            return None
        return self.from_rows(gpu.topk_remembered(flat, remembered_rows, k, kind), x)

    def kept_rows(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        flat = self.as_rows(x)
        k = self.budget(flat.shape[1])
        if k == flat.shape[1]:
            return flat, torch.ones_like(flat, dtype=torch.bool)
        return flat, largest(flat, k)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        n_rows, row = self._row_shape(shape)
        k = self.budget(row)
        return n_rows * k * dtype.itemsize + mask_bytes(n_rows, row, k)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        n_rows, row = self._row_shape(shape)
        k = self.budget(row)
        return [
            {
                "values": Field(dtype, (n_rows * k,)),
                "places": Field(torch.uint8, (mask_bytes(n_rows, row, k),)),
            }
        ]

    def mask(self, payload: Payload) -> Tensor:
        n_rows, row = self._row_shape(payload.shape)
        mask = unpack_mask(payload.parts["places"], n_rows, row, self.budget(row))
        return self.from_rows(mask, payload)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        flat = self.as_rows(x)
        n_rows, row = flat.shape
        k = self.budget(row)
        if k < row and (cpu.usable(flat) or gpu.selects(flat)):
            short = indices_win(n_rows, row, k)
            if flat.is_cuda and not short and row % 8 == 0:
                values, positions = gpu.message(flat, k)
                return payload(x, values=values.view(-1), places=positions)
            values, positions = (gpu if flat.is_cuda else packing).select(
                flat, k, as_mask=not short
            )
            return payload(
                x, values=values.view(-1), places=pack(positions, index_bits(row) if short else 1)
            )
        mask = self.as_rows(self.where_kept(x, seed))
        return payload(x, values=taken(flat, mask, k).view(-1), places=pack_mask(mask, k))

    def _decode(self, payload: Payload) -> Tensor:
        n_rows, row = self._row_shape(payload.shape)
        k = self.budget(row)
        values, positions = payload.parts["values"], payload.parts["places"]
        if k < row and cpu.usable(values):
            if indices_win(n_rows, row, k):
                flat = packing.scattered_into(
                    values, unpack(positions, index_bits(row), n_rows * k).view(n_rows, k), row
                )
            else:
                check_length(positions, 1, n_rows * row)
                flat = packing.spread_bits(values, positions, n_rows, row, k)
            if flat is not None:
                return self.from_rows(flat, payload)
        mask = unpack_mask(positions, n_rows, row, k)
        return self.from_rows(scatter(values, mask), payload)

    def _row_shape(self, shape: torch.Size) -> tuple[int, int]:
        if self.spec.scope == "tile":
            samples, down, a, across, b = self.tiles(shape)
            return samples * down * across, a * b
        if self.spec.scope == "tensor" or not shape:
            return 1, shape.numel()
        return (shape[:-1].numel(), shape[-1]) if self.spec.scope == "last" else row_shape(shape)

    def tiles(self, shape: torch.Size) -> tuple[int, int, int, int, int]:
        """A message's rows as tiles of a matrix (samples, tiles down, rows of one, tiles across,
        columns of one); rows that are none are samples of one tile, which is one row.
        """
        if self.spec.scope == "tile":
            side = self.spec.tile or TILE
            return tiles(shape, side, side if self.spec.per_tile == "number" else side * side)
        n_rows, row = self._row_shape(shape)
        return n_rows, 1, 1, 1, row

    def as_tiles(self, x: Tensor) -> Tensor:
        """A message of the shape that `tiles` says; its rows are the tiles, one after the other."""
        return (x if self.spec.scope == "tile" else self.as_rows(x)).reshape(self.tiles(x.shape))

    def from_tiles(self, y: Tensor, like: Tensor) -> Tensor:
        """Inverse of `as_tiles`."""
        if self.spec.scope == "tile":
            return laid_out(y.reshape(like.shape), like)
        return self.from_rows(y.reshape(self._row_shape(like.shape)), like)

    def as_rows(self, x: Tensor) -> Tensor:
        if self.spec.scope == "tile":
            return self.as_tiles(x).transpose(2, 3).reshape(self._row_shape(x.shape))
        return (x if self.spec.scope == "last" else rows(x)).reshape(self._row_shape(x.shape))

    def from_rows(self, flat: Tensor, like: Tensor | Payload) -> Tensor:
        if self.spec.scope == "tile":
            samples, down, a, across, b = self.tiles(like.shape)
            return laid_out(
                flat.reshape(samples, down, across, a, b).transpose(2, 3).reshape(like.shape), like
            )
        return (
            laid_out(flat.reshape(like.shape), like)
            if self.spec.scope == "last"
            else unrows(flat, like)
        )


class RiceTopK(TopK):
    """TopK whose places travel as Rice-coded gaps where that is shorter.

    nbytes = rows * k * itemsize + the smallest of packed indices, a bitmask, and ceil(code bits /
    8).
    """

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        raise NotImplementedError

    def bytes_sent(self, y: Tensor) -> Tensor:
        return self.kept_bytes(y) + self.place_bytes(
            largest(self.as_rows(y), self.kept_shape(y.shape)[1])
        )

    def kept_bytes(self, y: Tensor) -> int:
        """Return the bytes of the values of a message."""
        n_rows, k = self.kept_shape(y.shape)
        return n_rows * k * y.element_size()

    def place_bytes(self, mask: Tensor) -> Tensor:
        """Return the bytes of the places in a mask [rows, n]."""
        n_rows, row = mask.shape
        k = self.budget(row)
        most = self._fixed(mask.shape)
        if k == row:
            return torch.zeros((), dtype=torch.int64, device=mask.device)
        return rice.coded_bytes(mask, n_rows * k, rice.parameter(k, row)).clamp(max=most)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        (form,) = super().layouts(shape, dtype)
        fixed = form["places"].most_bytes
        return [form] + (
            [{"values": form["values"], "gaps": Field(torch.uint8, None, fixed - 1)}]
            if fixed
            else []
        )

    def mask(self, payload: Payload) -> Tensor:
        if "gaps" not in payload.parts:
            return super().mask(payload)
        return self.from_rows(self._mask(payload), payload)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        mask = self.as_rows(self.where_kept(x, seed))
        row = mask.shape[1]
        k = self.budget(row)
        values = taken(self.as_rows(x), mask, k).view(-1)
        if k < row:
            positions = mask.reshape(-1).cpu().nonzero()[:, 0].numpy()
            code = rice.encode(positions, rice.parameter(k, row))
            if code.size < self._fixed(mask.shape):
                return payload(x, values=values, gaps=torch.from_numpy(code).to(x.device))
        return payload(x, values=values, places=pack_mask(mask, k))

    def _decode(self, payload: Payload) -> Tensor:
        if "gaps" not in payload.parts:
            return super()._decode(payload)
        return self.from_rows(scatter(payload.parts["values"], self._mask(payload)), payload)

    def _fixed(self, rows: torch.Size) -> int:
        """Bytes of the places without codes."""
        return mask_bytes(rows[0], rows[1], self.budget(rows[1]))

    def _mask(self, payload: Payload) -> Tensor:
        n_rows, row = self._row_shape(payload.shape)
        k, gaps = self.budget(row), payload.parts["gaps"]
        positions = torch.from_numpy(
            rice.decode(gaps.cpu().numpy(), n_rows * k, rice.parameter(k, row))
        ).view(n_rows, k)
        columns = positions - torch.arange(n_rows)[:, None] * row
        if int(columns.min()) < 0:
            raise UserError(f"a Rice code does not keep {k} places in every row")
        check_columns(columns, row)
        mask = torch.zeros(n_rows, row, dtype=torch.bool, device=gaps.device)
        return mask.scatter_(1, columns.to(gaps.device), True)


TILE = 64  # SparseLoCo's


@lru_cache(maxsize=1024)
def tiles(shape: torch.Size, side: int, run: int) -> tuple[int, int, int, int, int]:
    """(samples, tiles down, rows of one, tiles across, columns of one) of a message whose samples
    are matrices, their first dimension by all others, or vectors. Sides are the largest divisors up
    to `side`, of a vector up to `run`.
    """
    samples, *sizes = shape if len(shape) > 1 else (1, *shape)
    if len(sizes) < 2:
        n = shape.numel() // samples
        b = divisor(n, run)
        return samples, 1, 1, n // b, b
    down, across = sizes[0], torch.Size(sizes[1:]).numel()
    a, b = divisor(down, side), divisor(across, side)
    return samples, down // a, a, across // b, b


def divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


class Counted(Sparsifier[S]):
    """A sparsifier whose number of kept entries m depends on the data; none of them is zero.

    nbytes = 1 (which coding) + m * itemsize + min(ceil(m * ceil(log2 d) / 8) + 4 * rows, ceil(rows
    * d / 8), and with index_coding=rice 4 + ceil(code bits / 8)).
    """

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        m = torch.count_nonzero(y)
        return m * y.element_size() + self.shortest(y, m)

    @property
    def rice(self) -> bool:
        """Return whether places may travel as Rice-coded gaps, which then have a coding of their
        own.
        """
        return getattr(self.spec, "index_coding", None) == "rice"

    def shortest(self, y: Tensor, m: Tensor) -> Tensor:
        """Bytes of the places of the m entries of a message that arrives as y."""
        fixed = self.place_bytes(m, *row_shape(y.shape))
        return torch.minimum(fixed, rice.counted_bytes(rows(y) != 0) + 5) if self.rice else fixed

    @staticmethod
    def place_bytes(m: Tensor, n_rows: int, row: int) -> Tensor:
        """Return what it takes to say where m entries of `n_rows` rows of `row` are."""
        indices = (m * index_bits(row) + 7) // 8 + 4 * n_rows
        return indices.clamp(max=packed_bytes(n_rows * row, 1)) + 1

    def places(self, mask: Tensor, indices: Tensor) -> dict[str, Tensor]:
        """The parts of a payload that say where a mask [rows, row] is true. indices: those of
        `positions`.
        """
        n_rows, row = mask.shape
        bits, count = index_bits(row), len(indices)
        if self.rice:
            code = rice.encode(indices.cpu().numpy(), rice.parameter(count, mask.numel()))
            count_field = torch.tensor([count], dtype=torch.int32, device=mask.device)
            if code.size + 5 < int(self.place_bytes(count_field[0], n_rows, row)):
                return {
                    "coding": _byte(mask, 3),
                    "count": count_field,
                    "gaps": torch.from_numpy(code).to(mask.device),
                }
        if packed_bytes(count, bits) + 4 * n_rows <= packed_bytes(n_rows * row, 1):
            counts = torch.bincount(indices // row, minlength=n_rows)
            return {
                "coding": _byte(mask, 1),
                "counts": counts.int(),
                "places": pack(indices % row, bits),
            }
        return {"coding": _byte(mask, 2), "places": pack(mask, 1)}

    def mask_of(self, payload: Payload) -> Tensor:
        """Inverse of `places`: the mask [rows, row]. Raises UserError when the parts name no such
        mask.
        """
        n_rows, row = row_shape(payload.shape)
        indices = self._indices(payload)
        if indices is None:
            return unpack_flags(payload.parts["places"], n_rows * row).reshape(n_rows, row)
        mask = torch.zeros(n_rows * row, dtype=torch.bool, device=indices.device)
        return mask.index_fill_(0, indices, True).reshape(n_rows, row)

    def _indices(self, payload: Payload) -> Tensor | None:
        """Return the positions that a payload names; None where it has a bitmask. Raises UserError
        when the parts name none.
        """
        n_rows, row = row_shape(payload.shape)
        fields = payload.parts
        coding = int(fields["coding"])
        if coding == 3 and self.rice and "gaps" in fields:
            return _from_gaps(fields["gaps"], int(fields["count"]), n_rows * row)
        if (
            coding == 2
            and "places" in fields
            and fields["places"].numel() == packed_bytes(n_rows * row, 1)
        ):
            return None
        if coding != 1 or "counts" not in fields:
            raise UserError(f"places are in no known coding ({coding})")
        counts, bits = fields["counts"].long(), index_bits(row)
        if not ((counts >= 0) & (counts <= row)).all():
            raise UserError(f"the counts of kept entries do not fit rows of {row} entries")
        columns = unpack(fields["places"], bits, int(counts.sum()))
        starts = torch.arange(n_rows, device=columns.device).repeat_interleave(counts) * row
        check_columns((starts + columns)[None], n_rows * row)
        if not (columns < row).all():
            raise UserError(f"a packed place lies outside its row of {row} entries")
        return starts + columns

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return self.place_layouts(shape, {"values": Field(dtype, None, shape.numel())})

    def place_layouts(self, shape: torch.Size, common: dict[str, Field]) -> list[dict[str, Field]]:
        """The codings of places after the parts `common`."""
        n_rows, row = row_shape(shape)
        coding, bitmask = {"coding": Field(torch.uint8, (1,))}, packed_bytes(n_rows * row, 1)
        options = [
            common | coding | {"places": Field(torch.uint8, (bitmask,))},
            common
            | coding
            | {
                "counts": Field(torch.int32, (n_rows,)),
                "places": Field(torch.uint8, None, bitmask),
            },
        ]
        gaps = {"count": Field(torch.int32, (1,)), "gaps": Field(torch.uint8, None, bitmask)}
        return [*options, common | coding | gaps] if self.rice else options

    def mask(self, payload: Payload) -> Tensor:
        return unrows(self.mask_of(payload), payload)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        flat, mask = rows(x), rows(self.where_kept(x, seed))
        indices = positions(mask)
        return payload(x, values=flat.reshape(-1)[indices], **self.places(mask, indices))

    def _decode(self, payload: Payload) -> Tensor:
        values, indices = payload.parts["values"], self._indices(payload)
        if indices is None:
            return unrows(scatter(values, self.mask_of(payload)), payload)
        if len(values) != len(indices):
            raise UserError(f"{len(values)} values for {len(indices)} kept entries")
        n_rows, row = row_shape(payload.shape)
        out = torch.zeros(n_rows * row, dtype=values.dtype, device=values.device)
        return unrows(out.index_copy_(0, indices, values).view(n_rows, row), payload)


def _from_gaps(gaps: Tensor, count: int, n: int) -> Tensor:
    """The positions in [0, n) of a Rice code of `count` places. Raises UserError on none."""
    if not 0 <= count <= n:
        raise UserError(f"{count} kept entries do not fit a message of {n}")
    indices = torch.from_numpy(rice.decode(gaps.cpu().numpy(), count, rice.parameter(count, n)))
    if count and int(indices[-1]) >= n:
        raise UserError(f"a Rice code names a place outside a message of {n} entries")
    return indices.to(gaps.device)


@COMPRESSORS.of(TopKStrictSpec)
class TopKStrict(Counted[TopKStrictSpec]):
    """The authors' operator: per sample, t = the int(d * (1 - ratio))-th smallest |x|, keep |x| >
    t.

    Ties with t all drop, so sparse maps keep fewer than ratio * d. nbytes as `Counted`; elements *
    itemsize + 1 when nothing drops. Source: authors' notebooks; their crash at ratio = 1 is
    replaced by keeping everything.
    """

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        flat = rows(x)
        dropped = self._dropped(flat.shape[1])
        if dropped == 0:
            return x, torch.ones_like(x, dtype=torch.bool) if want_mask else None
        y, mask = keep_largest(flat, flat.shape[1] - dropped + 1, strict=True, want_mask=want_mask)
        return unrows(y, x), None if mask is None else unrows(mask, x)

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        if self._dropped(row_shape(y.shape)[1]) == 0:
            return y.numel() * y.element_size() + 1
        return super().bytes_sent(y)

    def _dropped(self, row: int) -> int:
        return int(row * (1 - self.spec.ratio))

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        if self._dropped(row_shape(shape)[1]) == 0:
            return [{"values": Field(dtype, (shape.numel(),)), "coding": Field(torch.uint8, (1,))}]
        return super().layouts(shape, dtype)

    def mask(self, payload: Payload) -> Tensor:
        if self._dropped(row_shape(payload.shape)[1]) == 0:
            return unrows(
                torch.ones(row_shape(payload.shape), dtype=torch.bool, device=payload.device),
                payload,
            )
        return super().mask(payload)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        if self._dropped(row_shape(x.shape)[1]) == 0:
            return payload(x, values=rows(x).flatten(), coding=_byte(x, 0))
        return super()._encode(x, seed)

    def _decode(self, payload: Payload) -> Tensor:
        if self._dropped(row_shape(payload.shape)[1]) == 0:
            return unrows(payload.parts["values"].reshape(row_shape(payload.shape)), payload)
        return super()._decode(payload)


@COMPRESSORS.of(RandomKSpec)
class RandomK(FixedK[RandomKSpec]):
    """k = ratio * d random positions, the same in every sample of a message and new in the next
    one.

    The positions follow from a 64-bit seed that travels: nbytes = rows * k * itemsize + 8. `scaled`
    multiplies what arrives by d / k, which makes the message unbiased.
    """

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        flat = rows(x)
        mask = self._columns(flat.shape[1], seed, x.device)
        y = (flat * self.gain(x.shape)).where(mask, flat.new_zeros(()))
        return unrows(y, x), unrows(mask.expand_as(flat), x) if want_mask else None

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        n_rows, row = row_shape(shape)
        return n_rows * budget(self.spec.ratio, row) * dtype.itemsize + 8

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        n_rows, row = row_shape(shape)
        return [
            {
                "values": Field(dtype, (n_rows, budget(self.spec.ratio, row))),
                "seed": Field(torch.int64, (1,)),
            }
        ]

    def mask(self, payload: Payload) -> Tensor:
        n_rows, row = row_shape(payload.shape)
        mask = self._columns(row, int(payload.parts["seed"]), payload.device)
        return unrows(mask.expand(n_rows, row), payload)

    def _columns(self, row: int, seed: int, device: torch.device) -> Tensor:
        return draws.smallest(row, budget(self.spec.ratio, row), seed, device)

    def gain(self, shape: torch.Size) -> float:
        row = row_shape(shape)[1]
        return row / budget(self.spec.ratio, row) if self.spec.scaled else 1.0

    def _encode(self, x: Tensor, seed: int) -> Payload:
        flat = rows(x)
        mask = self._columns(flat.shape[1], seed, x.device).expand_as(flat)
        values = taken(flat, mask, budget(self.spec.ratio, flat.shape[1]))
        return payload(x, values=values, seed=torch.tensor([seed], dtype=torch.int64))

    def _decode(self, payload: Payload) -> Tensor:
        n_rows, row = row_shape(payload.shape)
        values = payload.parts["values"] * self.gain(payload.shape)
        mask = self._columns(row, int(payload.parts["seed"]), values.device)
        return unrows(scatter(values.flatten(), mask.expand(n_rows, row)), payload)


_LAST = torch.iinfo(torch.int64).max


@COMPRESSORS.of(RandTopKSpec)
class RandTopK(FixedK[RandTopKSpec]):
    """k places of each row, of which m ~ Binomial(k, alpha) are random ones outside the top k; the
    others are random ones of the top k. At inference: TopK (RandTopk, Zheng et al., arXiv
    2305.18469).

    nbytes as for TopK: rows * k * itemsize + min(ceil(rows * k * ceil(log2 d) / 8), ceil(rows * d /
    8)).
    """

    def __init__(self, spec: RandTopKSpec) -> None:
        super().__init__(spec)
        self.top = TopK(TopKSpec(ratio=spec.ratio, scope=spec.scope))

    def at_inference(self) -> Compressor:
        return self.top

    def kept_shape(self, shape: torch.Size) -> tuple[int, int]:
        return self.top.kept_shape(shape)

    def as_rows(self, x: Tensor) -> Tensor:
        return self.top.as_rows(x)

    def from_rows(self, flat: Tensor, like: Tensor | Payload) -> Tensor:
        return self.top.from_rows(flat, like)

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        flat = self.top.as_rows(x)
        n_rows, row = flat.shape
        k = budget(self.spec.ratio, row)
        if k == row:
            return self.top.masked(x, seed, want_mask)
        top = largest(flat, k)
        others_count = min(k, row - k)
        tosses = (
            draws.uniform(torch.Size([n_rows, k]), seeds.draw(seeds.SHARE, seed), x.device)
            < self.spec.alpha
        )
        m = tosses.sum(1, keepdim=True).clamp_(max=others_count)
        order = draws.words(flat.numel(), seed, x.device).view(flat.shape)
        rank = torch.arange(k, device=x.device)
        mask = torch.zeros_like(top)
        for group, count, quota in ((top, k, k - m), (~top, others_count, m)):
            # a random order of the group
            drawn = order.where(group, _LAST).topk(count, dim=1, largest=False).indices
            mask.scatter_(1, drawn, rank[:count] < quota)
        y = flat.where(mask, flat.new_zeros(()))
        return self.top.from_rows(y, x), self.top.from_rows(mask, x) if want_mask else None

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.top.formula_bytes(shape, dtype)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        flat, mask = self.top.as_rows(x), self.top.as_rows(self.where_kept(x, seed))
        k = budget(self.spec.ratio, flat.shape[1])
        return payload(x, values=taken(flat, mask, k).view(-1), places=pack_mask(mask, k))

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return self.top.layouts(shape, dtype)

    def mask(self, payload: Payload) -> Tensor:
        return self.top.mask(payload)

    def _decode(self, payload: Payload) -> Tensor:
        return self.top._decode(payload)


@COMPRESSORS.of(ForwardMaskSpec)
class ForwardMask(Compressor[ForwardMaskSpec]):
    """The gradient where the forward message kept the activation; both ends know the mask, values
    travel alone.

    nbytes = kept entries * itemsize. `given` binds the forward mask of the step.
    """

    bound_mask: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """The forward mask of the step."""
        assert self.bound_mask is not None, "bound by `given` before a message"
        return self.bound_mask

    def given(self, mask: Tensor) -> ForwardMask:
        """This compressor for messages whose forward twin kept `mask` (boolean, the message's
        shape).
        """
        bound = copy(self)
        bound.bound_mask = mask
        return bound

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return x.where(self.mask, x.new_zeros(()))

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        return self.mask.sum() * y.element_size()

    def _encode(self, x: Tensor, seed: int) -> Payload:
        return payload(x, values=rows(x)[self._rows(x)])

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [{"values": Field(dtype, None, shape.numel())}]

    def _decode(self, payload: Payload) -> Tensor:
        return unrows(scatter(payload.parts["values"], self._rows(payload)), payload)

    def _rows(self, like: Tensor | Payload) -> Tensor:
        """The mask as the rows of a message; it may lie in memory otherwise."""
        return rows(laid_out(self.mask, like))


def scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Zeros of mask's shape with `values` at its true entries, in row-major order.

    Raises UserError unless there are as many values as true entries.
    """
    if cpu.usable(values):
        dense = packing.spread(values.reshape(-1), mask)
        if dense is not None:
            return dense
    if values.numel() != int(mask.sum()):
        raise UserError(f"{values.numel()} values for {int(mask.sum())} kept entries")
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter_(
        mask, values
    )


def positions(mask: Tensor) -> Tensor:
    """Return where a mask is true, in row-major order: int64 [true entries]."""
    flat = mask.reshape(-1)
    if flat.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flat.numpy()))
    return flat.nonzero()[:, 0]


def _byte(x: Tensor, value: int) -> Tensor:
    return torch.full((1,), value, dtype=torch.uint8, device=x.device)

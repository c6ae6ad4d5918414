"""Places of kept entries as Rice codes of the gaps between them: near the entropy where they lie at random.

A gap g (entries left out before a kept one) is g >> b ones, a zero, and the low b bits of g; the first bit fills the
lowest bit of a byte. b follows from how many places of how many are kept, so it does not travel. Source: Rice 1979;
the parameter: Kiely 2004, for geometric gaps.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from commsweep.experiments.compressors.base import Field, Payload, payload
from commsweep.experiments.compressors.bits import check_columns, pack_mask
from commsweep.experiments.compressors.kernels import _compiled
from commsweep.experiments.compressors.sparse import TopK, budget, keep_largest, scatter
from commsweep.experiments.errors import UserError

_GOLDEN = math.log((math.sqrt(5) - 1) / 2)


def parameter(kept: int, of: int) -> int:
    """The b for gaps of `kept` places among `of`, if they lie at random: a gap's mean is (of - kept) / kept."""
    share = kept / of
    return max(0, 1 + math.floor(math.log2(_GOLDEN / math.log1p(-share)))) if share < 1 else 0


def coded_bytes(mask: Tensor, kept: int, b: int) -> Tensor:
    """Bytes of the code of a mask that is true `kept` times; a 0-dim tensor, nothing is waited for."""
    places = torch.nonzero_static(mask.reshape(-1), size=kept)[:, 0]
    gaps = torch.diff(places, prepend=places.new_tensor([-1])) - 1
    return ((gaps >> b).sum() + kept * (b + 1) + 7) // 8


def encode(places: np.ndarray, b: int) -> np.ndarray:
    """Code (uint8) of ascending places int64 [m]."""
    out = np.zeros((_length(places, b) + 7) // 8, np.uint8)
    _write(places, b, out)
    return out


def decode(code: np.ndarray, count: int, b: int) -> np.ndarray:
    """Inverse of `encode`: `count` ascending places. Raises UserError when the bytes are not just their code."""
    places = np.empty(count, np.int64)
    if _read(code, b, places) != code.size:
        raise UserError(f"{code.size} bytes are no Rice code of {count} places")
    return places


class RiceTopK(TopK):
    """TopK whose places travel as Rice-coded gaps where that is shorter.

    nbytes = rows * k * itemsize + the smallest of packed indices, a bitmask, and ceil(code bits / 8).
    """

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        raise NotImplementedError

    def bytes_sent(self, y: Tensor) -> Tensor:
        return self.kept_bytes(y) + self.place_bytes(keep_largest(self.as_rows(y), self.kept(y.shape)[1])[1])

    def kept_bytes(self, y: Tensor) -> int:
        """Of the values of a message."""
        n_rows, k = self.kept(y.shape)
        return n_rows * k * y.element_size()

    def place_bytes(self, mask: Tensor) -> Tensor:
        """Of the places in a mask [rows, n]."""
        n_rows, row = mask.shape
        k = budget(self.spec.ratio, row)
        most = self._fixed(mask.shape)
        if k == row:
            return torch.zeros((), dtype=torch.int64, device=mask.device)
        return coded_bytes(mask, n_rows * k, parameter(k, row)).clamp(max=most)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        form, = super().layouts(shape, dtype)
        fixed = form["places"].most_bytes
        return [form] + ([{"values": form["values"], "gaps": Field(torch.uint8, None, fixed - 1)}] if fixed else [])

    def mask(self, payload: Payload) -> Tensor:
        if "gaps" not in payload.parts:
            return super().mask(payload)
        return self.from_rows(self._mask(payload), payload)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        mask = self.as_rows(self.masked(x, seed)[1])
        row = mask.shape[1]
        k, values = budget(self.spec.ratio, row), self.as_rows(x)[mask]
        if k < row:
            places = mask.reshape(-1).cpu().nonzero()[:, 0].numpy()
            code = encode(places, parameter(k, row))
            if code.size < self._fixed(mask.shape):
                return payload(x, values=values, gaps=torch.from_numpy(code).to(x.device))
        return payload(x, values=values, places=pack_mask(mask, k))

    def _decode(self, payload: Payload) -> Tensor:
        if "gaps" not in payload.parts:
            return super()._decode(payload)
        return self.from_rows(scatter(payload.parts["values"], self._mask(payload)), payload)

    def _fixed(self, rows: tuple[int, int]) -> int:
        """Bytes of the places without codes."""
        return TopK.formula_bytes(self, torch.Size(rows), torch.uint8) - rows[0] * budget(self.spec.ratio, rows[1])

    def _mask(self, payload: Payload) -> Tensor:
        n_rows, row = self._row_shape(payload.shape)
        k, gaps = budget(self.spec.ratio, row), payload.parts["gaps"]
        places = torch.from_numpy(decode(gaps.cpu().numpy(), n_rows * k, parameter(k, row))).view(n_rows, k)
        columns = places - torch.arange(n_rows)[:, None] * row
        if int(columns.min()) < 0:
            raise UserError(f"a Rice code does not keep {k} places in every row")
        check_columns(columns, row)
        mask = torch.zeros(n_rows, row, dtype=torch.bool, device=gaps.device)
        return mask.scatter_(1, columns.to(gaps.device), True)


@_compiled
def _length(places, b):  # pragma: no cover (compiled)
    bits, last = places.size * (b + 1), -1
    for i in range(places.size):
        bits += (places[i] - last - 1) >> b
        last = places[i]
    return bits


@_compiled
def _write(places, b, out):  # pragma: no cover (compiled)
    """A window of bits is filled from below and emptied a byte at a time."""
    window, filled, at, last = np.uint64(0), 0, 0, -1
    low = (1 << b) - 1
    for i in range(places.size):
        gap = places[i] - last - 1
        last = places[i]
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
def _read(code, b, places):  # pragma: no cover (compiled)
    """Fills places; returns the bytes that were read, or -1 where they end within a code or their rest is not zero."""
    total, at, last = code.size * 8, 0, -1
    for i in range(places.size):
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
        places[i] = last
    if at & 7 and code[at >> 3] >> (at & 7):
        return -1
    return (at + 7) >> 3

"""Sparsifiers whose threshold is given, or estimated without sorting; how many entries stay depends
on the data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from commsweep.compressors.base import COMPRESSORS, Field, Payload, payload, row_shape, rows, unrows
from commsweep.compressors.bits import pack, packed_bytes, unpack_flags
from commsweep.compressors.kernels import cpu, gpu
from commsweep.compressors.kernels import thresholds as kernels
from commsweep.compressors.sparse import Counted, budget, largest, positions, scatter
from commsweep.config.compressors.thresholds import (
    DrydenSpec,
    PeriodicSpec,
    SIDCoSpec,
    ThresholdSpec,
)


@COMPRESSORS.of(ThresholdSpec)
class Threshold(Counted[ThresholdSpec]):
    """Entries with |x| > v (Strom 2015; GRACE's threshold-v). nbytes as `Counted`."""

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        return _above(
            x, torch.full((row_shape(x.shape)[0], 1), self.spec.value, device=x.device), want_mask
        )


@COMPRESSORS.of(PeriodicSpec)
class Periodic(Counted[PeriodicSpec]):
    """Entries with |x| > edge, where the edge is of an earlier message, or without one of this: it
    leaves the `ratio` of the largest entries (fewer where some tie with the next). nbytes as
    `Counted`. Source: DCT, arXiv 2010.08899.
    """

    def __init__(self, spec: PeriodicSpec, edge: Tensor | None = None) -> None:
        """edge: [rows, 1]."""
        super().__init__(spec)
        self.edge = edge

    def sender_state(self, shape: torch.Size) -> Tensor:
        """The edge of an earlier message, [1, 1]."""
        return torch.zeros(1, 1)

    def for_message(self, x: Tensor, state: Tensor, number: int) -> Periodic:
        if number % self.spec.every == 0:
            state.copy_(self.edge_of(x))
        return Periodic(self.spec, state)

    def edge_of(self, x: Tensor) -> Tensor:
        """The largest size that is not to be sent, of every row, [rows, 1]."""
        flat = rows(x).float()
        top = largest(flat, budget(self.spec.ratio, flat.shape[1]))
        return flat.abs().masked_fill(top, 0.0).amax(1, keepdim=True)

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        return _above(x, self.edge_of(x) if self.edge is None else self.edge, want_mask)


@COMPRESSORS.of(SIDCoSpec)
class SIDCo(Counted[SIDCoSpec]):
    """Above a threshold at which a distribution fitted to |x| says that `ratio` of the entries lie.

    Exponential: t = -mu ln r; generalised Pareto: t = a (1 - exp(k ln r)) / k with a = mu (mu^2 /
    var + 1) / 2 and k = (mu^2 / var - 1) / 2. The first of `stages` aims at a quarter, each later
    one refits what exceeds the last threshold, exponentially (as the authors' code does). Their
    adaptation of the number of stages to the ratio reached is left out: a message is a function of
    its tensor. nbytes as `Counted`. Source: arXiv 2101.10761.
    """

    FIRST = 0.25

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        size = rows(x).float().abs()
        stages = self.spec.stages if self.spec.ratio < self.FIRST else 1
        first = self.spec.ratio if stages == 1 else self.FIRST
        later_ratio = (self.spec.ratio / first) ** (1 / max(1, stages - 1))
        mean = size.mean(1, keepdim=True)
        edge = -mean * math.log(first)
        if self.spec.fit == "gpareto":
            var = size.var(1, correction=0, keepdim=True)
            shape = mean.square() / var.clamp(min=1e-30)
            a, k = 0.5 * mean * (shape + 1), 0.5 * (shape - 1)
            pareto = a * (1 - torch.exp(k * math.log(first))) / k.where(k.abs() > 1e-6, 1e-6)
            edge = torch.where(pareto.isfinite() & (var > 0), pareto, edge)
        for _ in range(stages - 1):
            n = _count(size, edge).clamp(min=1)
            above = (size - edge).clamp_(min=0).sum(1, keepdim=True)
            excess = above.nan_to_num(0.0) / n  # where the edge is infinite nothing exceeds it
            edge = edge - excess * math.log(later_ratio)
        return _above(x, edge, want_mask)


@COMPRESSORS.of(DrydenSpec)
class Dryden(Counted[DrydenSpec]):
    """The top `ratio` of the positive and of the negative entries, each replaced by its group's
    mean.

    nbytes = as `Counted`, but one sign bit an entry and two float32 means a sample instead of
    values. Source: Dryden 2016 (adaptive quantization), as in GRACE.
    """

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        flat = rows(x).float()
        up, down = (_top_share(flat * sign, self.spec.ratio) for sign in (1, -1))
        high, low = (
            flat.where(mask, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
            for mask in (up, down)
        )
        largest = flat.abs().amax(1, keepdim=True)
        # NaN where one is not finite
        y = torch.where(up, high, torch.where(down, low, 0.0)) + (largest - largest)
        return unrows(y.to(x.dtype), x), unrows(up | down, x) if want_mask else None

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        n_rows, m = row_shape(y.shape)[0], torch.count_nonzero(y)
        return (m + 7) // 8 + 8 * n_rows + self.shortest(y, m)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        means = {"means": Field(torch.float32, (row_shape(shape)[0], 2))}
        return self.place_layouts(
            shape, {"signs": Field(torch.uint8, None, packed_bytes(shape.numel(), 1))} | means
        )

    def _encode(self, x: Tensor, seed: int) -> Payload:
        sent, count = self.masked(x, seed)
        assert count is not None  # asked for
        y, mask = rows(sent).float(), rows(count)
        means = torch.stack([y.amin(1).clamp(max=0), y.amax(1).clamp(min=0)], dim=1)
        indices = positions(mask)
        signs = pack(y.reshape(-1)[indices] > 0, 1)
        return payload(x, signs=signs, means=means, **self.places(mask, indices))

    def _decode(self, payload: Payload) -> Tensor:
        mask = self.mask_of(payload)
        signs = unpack_flags(payload.parts["signs"], int(mask.sum()))
        low, high = payload.parts["means"].unsqueeze(2).unbind(1)
        y = torch.where(scatter(signs, mask), high, low).where(mask, 0.0)
        return unrows(y.to(payload.dtype), payload)


def _above(x: Tensor, edge: Tensor, want_mask: bool) -> tuple[Tensor, Tensor | None]:
    """Entries of each row whose size exceeds its edge [rows, 1] (at least 0, so that what is kept
    is not zero).
    """
    flat = rows(x)
    edge = edge.clamp(0, torch.finfo(torch.float32).max)
    if gpu.usable(flat):
        y, mask = gpu.above(flat, edge)
        return unrows(y, x), unrows(mask, x) if want_mask else None
    if cpu.usable(flat):
        y, mask = kernels.above(flat, edge, want_mask)
        return unrows(y, x), None if mask is None else unrows(mask, x)
    mask = ~(flat.float().abs() <= edge)  # NaN and infinities stay
    return unrows(flat.where(mask, flat.new_zeros(())), x), unrows(mask, x) if want_mask else None


def _count(size: Tensor, edge: Tensor) -> Tensor:
    """Entries of each row that exceed its edge, [rows, 1]."""
    if cpu.usable(size):
        return kernels.count_above(size, edge)
    return torch.count_nonzero(size > edge, 1).unsqueeze(1)


def _top_share(flat: Tensor, ratio: float) -> Tensor:
    """Per row, the mask of the largest round(ratio * p) of its p positive entries; ties with the
    last all stay.
    """
    ordered = flat.clamp(min=0).sort(1, descending=True).values
    k = ((flat > 0).sum(1, keepdim=True) * ratio).round().long()
    edge = ordered.gather(1, (k - 1).clamp(min=0))
    return (flat >= edge) & (flat > 0) & (k > 0)

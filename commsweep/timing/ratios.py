"""Ratios of a sparsifier by boundary, for links that differ: hardest on the slowest, at the step
time of one ratio.

What FusionLLM's AdaTopK is after (arXiv 2410.12707; its formula is not public, so this rule is
ours): every boundary keeps as much as its link carries within a limit of seconds a message, and the
limit is the greatest with which the predicted step is no longer than with one ratio everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from commsweep.config import Run, override
from commsweep.config.compressors.sparse import ForwardMaskSpec
from commsweep.errors import UserError
from commsweep.timing.measured_pipelines import PipelineModel
from commsweep.timing.timeline.pipelines import Network, step_seconds

Sizes = dict[str, tuple[int, int]]  # by cut: bytes (forward, backward) of a microbatch's message
RATIOS = [round(1.05**-index, 4) for index in range(160)]  # to choose from, the largest first


@dataclass(frozen=True)
class Spread:
    """A ratio for each boundary, by cut, and the predicted seconds of a step with one ratio and
    with these.
    """

    ratios: dict[str, float]
    one: float
    step: float
    sides: tuple[str, ...] = (
        "fwd",
        "bwd",
    )  # that have a ratio; a gradient in the forward mask has none

    @property
    def settings(self) -> dict[str, Any]:
        """Return what makes a run use them. The last boundary's ratio speaks for those that have
        none of their own.
        """
        *inner, last = self.ratios
        return {f"{side}.compressor.ratio": self.ratios[last] for side in self.sides} | {
            f"at.{cut.replace('.', '_')}.{side}.compressor.ratio": self.ratios[cut]
            for cut in inner
            for side in self.sides
        }


def spread(
    run: Run, sizes: Callable[[Run], Sizes], model: PipelineModel, network: Network
) -> Spread:
    """The ratios for these links.

    run: one ratio everywhere, both ways, or forward with the gradient in its mask. sizes: bytes of
    a run's messages. model: fitted to a measurement of `run`. Raises UserError when the run has no
    ratio or the links are not as many as its boundaries.
    """
    sides = tuple(
        side for side in ("fwd", "bwd") if hasattr(getattr(run, side).compressor, "ratio")
    )
    if (
        run.at
        or "fwd" not in sides
        or (len(sides) < 2 and not isinstance(run.bwd.compressor, ForwardMaskSpec))
    ):
        raise UserError(
            "ratios by link begin from one ratio everywhere: set fwd.compressor.kind=topk and "
            "bwd.compressor.kind=topk or forward_mask, and leave out at"
        )
    sizes_now = sizes(run)
    if len(network.links) != len(sizes_now):
        raise UserError(
            f"{len(network.links)} links for {len(sizes_now)} boundaries: write one for each pair "
            "of neighbouring stages"
        )
    sizes_of = {
        ratio: list(
            sizes(override(run, {f"{side}.compressor.ratio": ratio for side in sides})).values()
        )
        for ratio in RATIOS
    }
    before = list(sizes_now.values())
    times, links = model.base.times(), network.links

    def step(chosen: list[float]) -> float:
        fwd, bwd = (
            [
                nbytes + sizes_of[ratio][b][direction] - before[b][direction]
                for b, (nbytes, ratio) in enumerate(zip(was, chosen, strict=True))
            ]
            for direction, was in enumerate((times.fwd_bytes, times.bwd_bytes))
        )
        return step_seconds(
            model.base.orders,
            replace(model.times(), fwd_bytes=fwd, bwd_bytes=bwd),
            model.machine.network(network),
            model.base.engine,
        )

    def within(limit: float) -> list[float]:
        return [
            next(
                (ratio for ratio in RATIOS if link.seconds(max(sizes_of[ratio][b])) <= limit),
                RATIOS[-1],
            )
            for b, link in enumerate(links)
        ]

    one_ratio = model.step(network)
    limits = sorted(
        {link.seconds(max(sizes_of[ratio][b])) for ratio in RATIOS for b, link in enumerate(links)}
    )
    low, high = 0, len(limits)  # the step grows with the limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step(within(limits[middle])) <= one_ratio else (low, middle)
    chosen = within(limits[low])
    return Spread(dict(zip(sizes_now, chosen, strict=True)), one_ratio, step(chosen), sides)

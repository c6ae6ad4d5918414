"""Schedules of compression: what a layer's messages go through depends on the epoch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from commsweep.compressors import Compressor
from commsweep.config.base import Spec
from commsweep.config.gradients import AccordionSpec, Gradients
from commsweep.data_parallel.joint import JointCompressor, build
from commsweep.data_parallel.layers import Layer


def scheduled(
    spec: Gradients, base: Compressor | JointCompressor, epoch: int, critical: bool
) -> Compressor | JointCompressor:
    """Return what a layer's messages go through in this epoch; `critical`: Accordion has found it
    in a critical regime.
    """
    schedule: Any = spec.schedule
    if schedule.kind == "ramp" and epoch < schedule.epochs:
        return build(_scaled(base.spec, ratio=max(base.spec.ratio, 0.25 ** (epoch + 1))))
    return milder(spec) if critical else base


def greatest(spec: Gradients, base: Compressor | JointCompressor) -> Compressor | JointCompressor:
    """The compressor with the greatest budget that a layer's messages may go through."""
    return milder(spec) if spec.schedule.kind == "accordion" else base


def milder(spec: Gradients) -> Compressor | JointCompressor:
    """Return what Accordion uses in a critical regime."""
    assert isinstance(spec.schedule, AccordionSpec)
    mild = spec.schedule.mild
    ratio, rank = (getattr(spec.compressor, name, 0) * mild for name in ("ratio", "rank"))
    return build(_scaled(spec.compressor, ratio=min(1.0, ratio), rank=round(rank)))


def _scaled(spec: Spec, **values: Any) -> Spec:
    return spec.model_copy(
        update={name: value for name, value in values.items() if name in type(spec).model_fields}
    )


class Accordion:
    """The choice of layers that are in a critical regime: their gradient's norm over an epoch
    changes a lot (arXiv 2010.16248).
    """

    def __init__(self, spec: Gradients, layers: list[Layer]) -> None:
        assert isinstance(spec.schedule, AccordionSpec)
        self.schedule = spec.schedule
        self.mild = [not layer.dense for layer in layers]  # the first epochs are critical
        self.sums: list[Tensor | None] = [None] * len(layers)
        self.before: list[float] | None = None

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a step's mean gradient of a layer."""
        total = self.sums[index]
        # After a resume the sum lies on the host.
        self.sums[index] = (
            gradient.clone() if total is None else total.to(gradient.device).add_(gradient)
        )

    def decide(self, epoch: int) -> None:
        """After an epoch: compare norms with those of the last decision."""
        norms = [
            math.nan if total is None else float(torch.linalg.vector_norm(total))
            for total in self.sums
        ]
        self.sums = [None] * len(self.sums)
        if (epoch + 1) % self.schedule.every:
            return
        if self.before is not None:
            self.mild = [
                math.isfinite(norm) and (last == 0 or abs(last - norm) / last >= self.schedule.eta)
                for last, norm in zip(self.before, norms, strict=True)
            ]
        self.before = norms

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"mild": self.mild, "sums": self.sums, "before": self.before}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.mild, self.sums, self.before = state["mild"], state["sums"], state["before"]

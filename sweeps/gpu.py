"""Ours: what `make gpu` trains on a lent GPU, the first cells first; it goes on from the rows that
an earlier card left.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.launching.grid import seeds
from commsweep.registry import preset

from .recipe import code, kept_share, pair
from .rudakov import aqsgd, feedback, topk


def _images(base: Run) -> list[Run]:
    """Eight arms, the most wanted first."""
    return [
        base,
        pair(base, None, {"kind": "zero"}),
        *topk(base, (0.1,)),
        *feedback(base, (0.1,), ("ef21",)),
        pair(base, None, code(2)),
        pair(base, None, code(2, "stochastic")),
        *topk(base, (0.05,)),
        *aqsgd(base, (0.3,)),
    ]


def _text(base: Run) -> list[Run]:
    """A GPT-2 from scratch: dense, nothing sent backward, TopK and two unbiased bits."""
    return [
        base,
        pair(base, None, {"kind": "zero"}),
        pair(base, None, kept_share(0.1)),
        pair(base, None, code(2, "stochastic")),
    ]


def gpu_queue() -> list[Run]:
    """ResNet-18 on the JPEG copy for 100 epochs, bfloat16: eight cells in half an hour of four at
    once; then GPT-2 small from scratch; then two more seeds of the images.
    """
    images = seeds(_images(preset("resnet18_jpeg")), 3)
    return [*images[:8], *_text(preset("gpt2_scratch")), *images[8:]]


def smoke_gpu() -> list[Run]:
    """The queue at toy size on a CPU, for tests."""
    text = override(preset("synthetic_text"), {"epochs": 1})
    return [*_images(preset("synthetic")), *_text(text)]


SWEEPS = {"gpu_queue": gpu_queue, "smoke-gpu": smoke_gpu}

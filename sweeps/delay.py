"""Ours: what gradients of old weights cost, dense and compressed, with and without error feedback
and look-ahead.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.registry import preset

from .ladders import gradient_arms
from .recipe import Changes

LATE: tuple[Changes, ...] = ({"delay.steps": 1}, {"delay.kind": "stages"})
MUON: Changes = {"optim.kind": "muon", "optim.lr": 0.005}


def text_delay() -> list[Run]:
    """A nano GPT-2 of four stages, 1,600 steps: dense, gradients in 2 bits without bias, by TopK,
    by TopK with error feedback; on time, a step late, late by stages; look-ahead of a step; Muon;
    three seeds; an hour of a core.
    """
    base = override(preset("sotu_nano"), {"data.train_blocks": 25600})
    arms = gradient_arms(base)
    runs = []
    for seed in range(3):
        for late in ({}, *LATE):
            for arm in arms:
                runs.append(override(arm, late | {"seed": seed}))
        for late in LATE:
            runs.append(override(base, late | {"delay.lookahead": 1, "seed": seed}))
        for late in ({}, {"delay.steps": 1}):
            runs.append(override(base, MUON | late | {"seed": seed}))
    return runs


SWEEPS = {"text_delay": text_delay}

"""Named Runs. A preset's header says table, hardware, minutes and what to expect."""

from __future__ import annotations

from commsweep.experiments.config import Run
from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.presets import cifar, digits, gradients, local, resnet18, sparse, text

PRESETS: dict[str, Run] = (digits.PRESETS | cifar.PRESETS | gradients.PRESETS | resnet18.PRESETS | text.PRESETS
                            | local.PRESETS | sparse.PRESETS)


def preset(name: str) -> Run:
    """The Run of this name. Raises UserError naming the nearest one."""
    if name not in PRESETS:
        raise UserError(f"unknown preset '{name}'{nearest(name, PRESETS)} (one of: {', '.join(PRESETS)})")
    return PRESETS[name]

"""Named Runs. A preset's header says table, hardware, minutes and what to expect."""

from __future__ import annotations

from typing import Any

from commsweep.experiments.config import Run, override
from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.presets import cifar, digits, gradients, local, resnet18, sparse, text

PRESETS: dict[str, Run] = (digits.PRESETS | cifar.PRESETS | gradients.PRESETS | resnet18.PRESETS | text.PRESETS
                            | local.PRESETS | sparse.PRESETS)


def preset(name: str, **settings: Any) -> Run:
    """The Run of this name, with some settings changed: preset("digits", **{"optim.lr": 0.1}), or optim__lr=0.1.

    Raises UserError naming the nearest preset or setting.
    """
    if name not in PRESETS:
        raise UserError(f"unknown preset '{name}'{nearest(name, PRESETS, 3)} (all of them: commsweep presets)")
    run = PRESETS[name]
    return override(run, {key.replace("__", "."): value for key, value in settings.items()}) if settings else run

"""A callback for transformers.Trainer: codecs measured in shadow while it trains.

trainer = transformers.Trainer(..., callbacks=[ShadowCallback(["topk:0.1", "uniform:4"])])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from commsweep.integrations.shadow import ShadowOfATraining


class ShadowCallback(ShadowOfATraining, TrainerCallback):
    """Looks from the first to the last step of a training, then writes a report."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end(state.is_world_process_zero)

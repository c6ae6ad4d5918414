"""A callback for transformers.Trainer: codecs measured in shadow while it trains.

trainer = transformers.Trainer(..., callbacks=[ShadowCallback(["topk:0.1", "uniform:4"])])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from commsweep.integrations.shadow import Shadow


class ShadowCallback(TrainerCallback):
    """Looks from the first to the last step of a training, then writes a report."""

    def __init__(
        self,
        codecs: list[str | dict[str, Any]],
        at: dict[str, str] | None = None,
        every: int = 50,
        out: str | Path = "shadow",
    ) -> None:
        """codecs, at, every: as of Shadow. out: the folder of the report."""
        self.settings: dict[str, Any] = {"codecs": codecs, "at": at, "every": every}
        self.out = Path(out)
        self.shadow: Shadow | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.shadow = Shadow(kwargs["model"], **self.settings).start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.shadow is not None:
            self.shadow.stop()
            if state.is_world_process_zero:
                self.shadow.report(self.out)

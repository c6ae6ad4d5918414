"""A callback for pytorch_lightning.Trainer: codecs measured in shadow, or gradients compressed.

trainer = pl.Trainer(..., callbacks=[ShadowCallback(["topk:0.1", "uniform:4"])])
trainer = pl.Trainer(strategy="ddp", callbacks=[CompressionCallback({"kind": "topk"})])
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from torch.nn.parallel import DistributedDataParallel

from commsweep.data_parallel.hook import CompressionHook
from commsweep.errors import UserError
from commsweep.integrations.shadow import ShadowOfATraining


class ShadowCallback(ShadowOfATraining, pl.Callback):
    """Looks from the first to the last step of a training, then writes a report."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # A LightningModule's step may call any of its children, so its own forward counts nothing.
        children = [child for child in module.children() if list(child.parameters())]
        model = children[0] if len(children) == 1 else module
        self.begin(model)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.end(trainer.is_global_zero)


class CompressionCallback(pl.Callback):
    """Gradients between the processes of DDPStrategy in codes; what is remembered goes into
    checkpoints.
    """

    def __init__(
        self, compressor: dict[str, Any], feedback: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """As of CompressionHook."""
        self.settings: dict[str, Any] = {"compressor": compressor, "feedback": feedback, **more}
        self.hook: CompressionHook | None = None
        self._kept: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        wrapped = trainer.strategy.model
        if not isinstance(wrapped, DistributedDataParallel):
            raise UserError(
                f"the strategy {type(trainer.strategy).__name__} has no hook for gradients: use "
                'strategy="ddp" with two or more devices'
            )
        self.hook = CompressionHook(module, **self.settings)
        if self._kept is not None:
            self.hook.load_state_dict(self._kept)
        self.hook.attach(wrapped)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.hook is None else dict(self.hook.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict or None

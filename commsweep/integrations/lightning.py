"""A callback for pytorch_lightning.Trainer: codecs measured in shadow, or gradients compressed.

trainer = pl.Trainer(..., callbacks=[ShadowCallback(["topk:0.1", "uniform:4"])])
trainer = pl.Trainer(strategy="ddp", callbacks=[CompressionCallback({"kind": "topk"})])
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commsweep.data_parallel.hook import CompressionHook
from commsweep.errors import UserError, notice
from commsweep.integrations.shadow import ShadowOfATraining


class ShadowCallback(ShadowOfATraining, pl.Callback):
    """Looks from the first to the last step of a training, then writes a report."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # A LightningModule's step may call any of its children, so its own forward counts nothing.
        children = [child for child in module.children() if list(child.parameters())]
        model = children[0] if len(children) == 1 else module
        self.begin(model, _scaler(trainer), counts_forwards=False)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.shadow is not None:
            self.shadow.forward_begins()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.end(trainer.is_global_zero)


def _scaler(trainer: pl.Trainer) -> torch.amp.GradScaler | None:
    """Return what multiplies the loss in "16-mixed" training, if anything does."""
    return getattr(trainer.precision_plugin, "scaler", None)


class CompressionCallback(pl.Callback):
    """Gradients between the processes of DDPStrategy in codes; what each process remembers goes
    into checkpoints.
    """

    def __init__(
        self,
        compressor: dict[str, Any] | str,
        feedback: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Take the arguments of CompressionHook."""
        self.settings: dict[str, Any] = {"compressor": compressor, "feedback": feedback, **settings}
        self.hook: CompressionHook | None = None
        self._kept: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        wrapped = trainer.strategy.model
        if not isinstance(wrapped, DistributedDataParallel):
            raise UserError(
                f"the strategy {type(trainer.strategy).__name__} has no hook for gradients: use "
                'strategy="ddp" with two or more devices'
            )
        settings: dict[str, Any] = {"scaler": _scaler(trainer)} | self.settings
        self.hook = CompressionHook(module, **settings)
        if self._kept is not None:
            learners = dist.get_world_size()
            if len(self._kept) != learners:
                raise UserError(
                    f"the checkpoint has the state of {len(self._kept)} processes, and the process "
                    f"group has {learners}: resume with as many"
                )
            self.hook.load_state_dict(self._kept[dist.get_rank()])
        self.hook.attach(wrapped)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.hook is not None and trainer.is_global_zero:
            notice(self.hook.report())

    def state_dict(self) -> dict[str, Any]:
        """Return what every process remembers. All processes must call it, as those of Lightning
        do; only the first one writes a checkpoint.
        """
        if self.hook is None:
            return {}
        return {"processes": self.hook.gathered_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict.get("processes")

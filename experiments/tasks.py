"""LightningModules: what is trained, and how it is scored with compression on and off."""

from __future__ import annotations

import math
import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.compressors.base import channels_last
from experiments.config import Model, Optim, Run, Schedule
from experiments.data.module import Batch, ImageData
from experiments.errors import Diverged
from experiments.feedback import Keys
from experiments.pipeline import Boundaries

CHECK_EVERY = 50  # steps between looks at the loss, each of which waits for the device once


class ImageClassification(pl.LightningModule):
    """Cross-entropy training of a staged network; accuracy and loss with compression on and off."""

    def __init__(self, run: Run, model: nn.Module, boundaries: Boundaries) -> None:
        super().__init__()
        self.run, self.model, self.boundaries = run, model, boundaries
        self.seconds = {"train": 0.0, "eval": 0.0}
        self._totals: dict[str, Tensor] = {}
        self._loss_sum = self._samples = None

    def configure_optimizers(self) -> dict[str, Any]:
        optim, schedule = self.run.optim, self.run.schedule
        sgd = torch.optim.SGD(self.model.parameters(), optim.lr, optim.momentum, weight_decay=optim.weight_decay,
                              fused=True)
        if schedule.kind == "cosine":
            rate = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, schedule.t_max)
        else:
            rate = torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0, total_iters=0)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": rate, "interval": "epoch"}}

    # Training.

    def on_train_start(self) -> None:
        self._clock = time.perf_counter()

    def on_train_epoch_start(self) -> None:
        self._loss_sum = torch.zeros((), device=self.device)
        self._samples = 0

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._clock = time.perf_counter()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y, samples = batch
        step = self.boundaries.step
        step.training, step.compress, step.epoch = True, True, self.current_epoch
        step.number, step.keys = self.global_step, Keys(samples, x.device)
        loss = cross_entropy(self.model(self._laid_out(x)), y)
        self._loss_sum += loss.detach() * len(y)
        self._samples += len(y)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.boundaries.check_calls(self.global_step)
        if self.global_step % CHECK_EVERY == 0:
            self._check_finite()
        self.seconds["train"] += time.perf_counter() - self._clock

    def on_train_epoch_end(self) -> None:
        self._check_finite()
        self.log("train_loss", self.train_loss)

    @property
    def train_loss(self) -> float:
        """Mean loss over the samples of this epoch so far (waits for the device)."""
        return float(self._loss_sum) / max(1, self._samples)

    def _check_finite(self) -> None:
        if math.isfinite(self.train_loss):
            return
        where = self.boundaries.non_finite() or "non-finite loss"
        raise Diverged(f"{where}, epoch {self.current_epoch + 1}, by step {self.global_step}")

    # Evaluation: every batch twice, compression on and off; nothing in it changes a feedback memory.

    def on_validation_epoch_start(self) -> None:
        self._clock = time.perf_counter()
        self._totals = {}

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y, _ = batch
        split = "test" if dataloader_idx == len(self.trainer.val_dataloaders) - 1 else "val"
        step = self.boundaries.step
        step.training, step.epoch, step.number = False, self.current_epoch, batch_idx
        x = self._laid_out(x)
        for mode in ("on", "off"):
            step.compress = mode == "on"
            logits = self.model(x).float()
            loss = cross_entropy(logits, y, reduction="sum")
            correct = (logits.argmax(1) == y).sum()
            score = torch.stack([loss, correct.float(), torch.tensor(float(len(y)), device=loss.device)])
            key = f"{split}_{mode}"
            self._totals[key] = self._totals[key] + score if key in self._totals else score

    def on_validation_epoch_end(self) -> None:
        scores = self.scores
        self.log_dict(scores)
        self.seconds["eval"] += time.perf_counter() - self._clock

    @property
    def scores(self) -> dict[str, float]:
        """Accuracy (share of all samples) and mean loss of the last evaluation, by split and mode."""
        out = {}
        for key, total in self._totals.items():
            loss, correct, n = total.tolist()
            out |= {f"{key}_acc": correct / n, f"{key}_loss": loss / n}
        return out

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self.run.channels_last else x

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seconds"] = self.seconds
        checkpoint["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            checkpoint["random_cuda"] = torch.cuda.get_rng_state(self.device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seconds = checkpoint["seconds"]
        torch.set_rng_state(checkpoint["random"])
        if "random_cuda" in checkpoint and self.device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint["random_cuda"].cpu(), self.device)


def installed(run: Run, task: ImageClassification, data: ImageData, trainer: pl.Trainer) -> dict[str, Any]:
    """The settings that really ran, read from the optimizer, scheduler, loaders, boundaries and trainer."""
    group = trainer.optimizers[0].param_groups[0]
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    cosine = isinstance(scheduler, torch.optim.lr_scheduler.CosineAnnealingLR)
    links = list(task.boundaries.links().values())
    for side in ("fwd", "bwd"):
        if any(link[side] != links[0][side] for link in links):
            raise RuntimeError(f"the boundaries were given different {side} links")
    return {
        "model": Model(name=run.model.name, width=task.model.conv1.out_channels,
                       cuts=tuple(boundary.name for boundary in task.boundaries.values())),
        "data": data.installed,
        "optim": Optim(lr=group["initial_lr"], momentum=group["momentum"], weight_decay=group["weight_decay"]),
        "schedule": Schedule(kind="cosine", t_max=scheduler.T_max) if cosine else Schedule(kind="constant"),
        **(links[0] if links else {"fwd": run.fwd, "bwd": run.bwd}),
        "epochs": trainer.max_epochs,
        "eval_every": trainer.check_val_every_n_epoch,
        "precision": "bfloat16" if "bf16" in str(trainer.precision) else "float32",
        "channels_last": any(channels_last(p) for p in task.model.parameters()),
        "seed": data.train.seed,
    }

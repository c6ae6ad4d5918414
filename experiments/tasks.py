"""LightningModules: what is trained, and how it is scored with compression on and off."""

from __future__ import annotations

import math
import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from commsweep.experiments.compressors.base import channels_last
from commsweep.experiments.config import SGD, AdamW, Constant, Cosine, ImageModel, Linear, Links, Run, TextModel
from commsweep.experiments.data.module import Batch, Blocks, ImageData
from commsweep.experiments.data_parallel.learners import Learners, Share
from commsweep.experiments.errors import Diverged, UserError
from commsweep.experiments.memory import Keys
from commsweep.experiments.models import causal_lm
from commsweep.experiments.pipeline import Boundaries
from commsweep.experiments.specs import Spec

CHECK_EVERY = 50  # steps between looks at the loss, each of which waits for the device once


class Task(pl.LightningModule):
    """Training of a staged network, scored with compression on and off; subclasses say what the loss is."""

    def __init__(self, run: Run, model: nn.Module, boundaries: Boundaries, rank: int | None = None) -> None:
        super().__init__()
        self.run, self.model, self.boundaries = run, model, boundaries
        trained = nn.ModuleDict({"model": model, "boundaries": boundaries})  # coders learn, too
        self.learners = Learners(run.grad, trained, run.seed, run.data.batch_size, rank)
        self.seconds = {"train": 0.0, "eval": 0.0}
        self._totals: dict[str, Tensor] = {}
        self._loss_sum = self._samples = None

    def logits(self, x: Tensor) -> Tensor:
        """What the model says of a batch."""
        raise NotImplementedError

    @staticmethod
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        """Mean training loss of a batch."""
        raise NotImplementedError

    @staticmethod
    def score(logits: Tensor, y: Tensor) -> Tensor:
        """Sums over a batch that add up over batches, float32 [k]."""
        raise NotImplementedError

    @staticmethod
    def means(total: list[float]) -> dict[str, float]:
        """Named metrics of the scores of a whole split."""
        raise NotImplementedError

    def configure_optimizers(self) -> dict[str, Any]:
        made = optimizer(self.run, list(self.parameters()))
        scheduler, interval = schedule(self.run, made, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Lightning calls this after the training step, which has made the earlier microbatches' gradients."""
        if self.run.microbatches == 1:
            optimizer.zero_grad()

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: float | None = None,
                                    gradient_clip_algorithm: str | None = None) -> None:
        """Clip here: Lightning refuses fused optimizers under autocast for the sake of loss scaling, which bfloat16
        does without."""
        if gradient_clip_val:
            nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

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
        if self.run.microbatches > 1:
            self.trainer.optimizers[0].zero_grad()
            self.begin_microbatches()
        for share in self._shares(len(y)):
            step.number = self.learners.passes + share.turn
            step.keys = Keys(samples[share.rows], x.device, share.slot)
            with self.learners.turn(share, self.rate):
                loss = self.loss(self.logits(x[share.rows]), y[share.rows])
                self._loss_sum += loss.detach() * share.size
                self._samples += share.size
                if self.run.microbatches > 1 and share.weight != 1:  # of a batch that is not cut evenly
                    loss = loss * share.weight
                if not share.last:
                    loss.backward()
        return loss

    def begin_microbatches(self) -> None:
        """Before the first microbatch of a step."""

    def end_microbatches(self) -> None:
        """After the last one's backward; gradients are means already."""

    def _shares(self, batch: int) -> list[Share]:
        """The passes of a batch: the learners', or the microbatches."""
        return self.learners.shares(batch) if self.run.microbatches == 1 else microbatches(batch, self.run.microbatches)

    @property
    def rate(self) -> float:
        """The learning rate of this step."""
        return self.trainer.optimizers[0].param_groups[0]["lr"]

    def on_after_backward(self) -> None:
        if self.run.microbatches > 1:  # each microbatch's loss is a mean
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.run.microbatches)
            self.end_microbatches()
        self.learners.exchange_gradients(self.global_step, self.current_epoch)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.learners.passed(self._shares(len(batch[1])))
        self.boundaries.check_calls(self.learners.crossed)
        if self.global_step % CHECK_EVERY == 0:
            self._check_finite()
        self.seconds["train"] += time.perf_counter() - self._clock

    def on_train_epoch_end(self) -> None:
        self._check_finite()
        self.learners.epoch_ended(self.current_epoch)
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
        for mode in ("on", "off"):
            step.compress = mode == "on"
            score = self.score(self.logits(x), y)
            key = f"{split}_{mode}"
            self._totals[key] = self._totals[key] + score if key in self._totals else score

    def on_validation_epoch_end(self) -> None:
        scores = self.scores
        self.log_dict(scores)
        self.seconds["eval"] += time.perf_counter() - self._clock

    @property
    def scores(self) -> dict[str, float]:
        """Metrics of the last evaluation, by split and mode: test_on_loss, ..."""
        return {f"{key}_{name}": value for key, total in self._totals.items()
                for name, value in self.means(total.tolist()).items()}

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


class ImageClassification(Task):
    """Cross-entropy over classes; accuracy is the share of all samples."""

    def logits(self, x: Tensor) -> Tensor:
        return self.model(laid_out(self.run, x))

    @staticmethod
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(logits, y)

    @staticmethod
    def score(logits: Tensor, y: Tensor) -> Tensor:
        logits = logits.float()
        correct = (logits.argmax(1) == y).sum()
        return _sums(cross_entropy(logits, y, reduction="sum"), correct, len(y))

    @staticmethod
    def means(total: list[float]) -> dict[str, float]:
        loss, correct, n = total
        return {"acc": correct / n, "loss": loss / n}


class LanguageModelling(Task):
    """Next-token cross-entropy; perplexity is exp of the mean over all predicted tokens of a split."""

    def __init__(self, run: Run, model: nn.Module, boundaries: Boundaries, rank: int | None = None) -> None:
        super().__init__(run, model, boundaries, rank)
        coders = [boundary.coder for boundary in boundaries.values() if boundary.coder is not None]
        if coders and coders[0].anchored:
            causal_lm.entrance(model).register_forward_pre_hook(self._anchor, with_kwargs=True)
        head, self._tied, self._head = model.get_output_embeddings(), model.get_input_embeddings().weight, None
        self._head_name = next((f"{name}.weight" for name, one in model.named_modules() if one is head), "")
        if not boundaries or getattr(head, "weight", None) is not self._tied:
            self._tied = None
        self._confined: list[tuple[Tensor, int]] = []
        if coders and getattr(run.fwd.compressor, "constrain", False):
            before = len(boundaries) * len(causal_lm.blocks(model)) // run.model.stages
            self._confined = causal_lm.writers(model, before)
            causal_lm.confine(self._confined, coders[0].encoder)

    def logits(self, x: Tensor) -> Tensor:
        if self._head is None:
            return self.model(input_ids=x).logits
        return torch.func.functional_call(self.model, {self._head_name: self._head}, (), {"input_ids": x},
                                          tie_weights=False).logits

    # In a pipeline the first and the last stage hold the tied embeddings, and each sums its own gradients over the
    # microbatches. Sums of floats depend on their order, and AdamW divides small ones by their size, so it is the same
    # order here: the head's use has a gradient of its own until the last microbatch.

    def begin_microbatches(self) -> None:
        if self._tied is not None:
            self._head = self._tied.detach().requires_grad_()

    def end_microbatches(self) -> None:
        if self._head is not None:
            self._tied.grad = self._head.grad.div_(self.run.microbatches) + self._tied.grad
            self._head = None

    @staticmethod
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return _entropy(logits, y, "mean")

    @staticmethod
    def score(logits: Tensor, y: Tensor) -> Tensor:
        return _sums(_entropy(logits, y, "sum"), y[:, 1:].numel())

    @staticmethod
    def means(total: list[float]) -> dict[str, float]:
        loss = total[0] / total[1]
        return {"loss": loss, "ppl": math.exp(min(loss, 700.0))}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self._confined:
            basis = next(b.coder.encoder for b in self.boundaries.values())  # where the model lies by now
            causal_lm.confine(self._confined, basis)
        super().on_train_batch_end(outputs, batch, batch_idx)

    def _anchor(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.boundaries.step.anchor = (args[0] if args else kwargs["hidden_states"]).detach()


class LinearRamp:
    """Factor of the learning rate at a step: up from zero over `warmup` steps, then down to zero at `total`."""

    def __init__(self, warmup: int, total: int, epochs: float) -> None:
        self.warmup, self.total, self.epochs = warmup, total, epochs

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        return max(0.0, (self.total - step) / max(1, self.total - self.warmup))


def build(run: Run, model: nn.Module, boundaries: Boundaries, rank: int | None = None) -> Task:
    """The task of a run; `rank`: of the only learner in this process, where learners are processes."""
    return kind(run)(run, model, boundaries, rank)


def kind(run: Run) -> type[Task]:
    """What a run trains."""
    return LanguageModelling if isinstance(run.model, TextModel) else ImageClassification


def optimizer(run: Run, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a run, for these of its parameters."""
    optim = run.optim
    if optim.kind == "adamw":
        return torch.optim.AdamW(parameters, optim.lr, (optim.beta1, optim.beta2), optim.eps, optim.weight_decay,
                                 fused=True)
    return torch.optim.SGD(parameters, optim.lr, optim.momentum, weight_decay=optim.weight_decay, fused=True)


def schedule(run: Run, optimizer: torch.optim.Optimizer, steps: int) -> tuple[Any, str]:
    """(the learning rate's scheduler, whether it advances each "step" or "epoch") of a training of `steps` steps."""
    spec, rates = run.schedule, torch.optim.lr_scheduler
    if spec.kind == "linear":
        ramp = LinearRamp(round(spec.warmup * steps / run.epochs), steps, spec.warmup)
        return rates.LambdaLR(optimizer, ramp), "step"
    if spec.kind == "cosine":
        return rates.CosineAnnealingLR(optimizer, spec.t_max), "epoch"
    return rates.ConstantLR(optimizer, factor=1.0, total_iters=0), "epoch"


def microbatches(batch: int, count: int) -> list[Share]:
    """`count` contiguous parts of a batch, of a short one the first ones a row longer. Weight: part * count / batch."""
    sizes = [batch // count + (part < batch % count) for part in range(count)]
    starts = [sum(sizes[:part]) for part in range(count)]
    return [Share(0, slice(start, start + size), size, size * count / batch, last := part == count - 1, last, part,
                  start) for part, (start, size) in enumerate(zip(starts, sizes, strict=True))]


def check_microbatches(run: Run, samples: int, drop_last: bool) -> None:
    """Raise UserError when the last batch of an epoch has fewer rows than there are microbatches."""
    short = samples % run.data.batch_size
    if short and not drop_last and short < run.microbatches:
        raise UserError(f"microbatches={run.microbatches}: the last batch of an epoch has {short} rows; choose another "
                        "data.batch_size or fewer microbatches")


def laid_out(run: Run, x: Tensor) -> Tensor:
    """Images in the run's memory layout."""
    return x.contiguous(memory_format=torch.channels_last) if run.channels_last else x


def _entropy(logits: Tensor, y: Tensor, reduction: str) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten().long(), reduction=reduction)


def _sums(loss: Tensor, *rest: Tensor | int) -> Tensor:
    """One float32 vector, built on the loss's device without waiting for it."""
    parts = [one if isinstance(one, Tensor) else torch.full((), float(one), device=loss.device) for one in rest]
    return torch.stack([loss.float(), *(part.float() for part in parts)])


def installed(run: Run, task: Task, data: ImageData | Blocks, trainer: pl.Trainer) -> dict[str, Any]:
    """The settings that really ran, read from the optimizer, scheduler, loaders, boundaries and trainer."""
    links = task.boundaries.links()
    common = next((one for cut, one in links.items() if cut not in run.at), Links(fwd=run.fwd, bwd=run.bwd))
    return {
        "model": _model(run, task),
        "data": data.installed,
        "optim": _optim(trainer),
        "schedule": _schedule(trainer.lr_scheduler_configs[0].scheduler),
        "fwd": common.fwd, "bwd": common.bwd,
        "at": {cut: one for cut, one in links.items() if one != common},
        "grad": task.learners.installed,
        "microbatches": 1 if task.learners.exchange is not None else len(task._shares(data.train.batch_size)),
        "epochs": trainer.max_epochs,
        "eval_every": trainer.check_val_every_n_epoch,
        "precision": "bfloat16" if "bf16" in str(trainer.precision) else "float32",
        "channels_last": any(channels_last(p) for p in task.model.parameters()),
        "seed": data.train.seed,
    }


def _model(run: Run, task: Task) -> Spec:
    cuts = tuple(boundary.name for boundary in task.boundaries.values())
    if isinstance(run.model, ImageModel):
        width = task.model.fc.in_features if run.model.name == "mlp" else task.model.conv1.out_channels
        return ImageModel(name=run.model.name, width=width, cuts=cuts)
    wrapped = any("forward" in vars(block) for block in causal_lm.blocks(task.model))
    return TextModel(name=run.model.name, weights=run.model.weights, stages=len(cuts) + 1,
                     dropout=causal_lm.dropout(task.model), gradient_checkpointing=wrapped)


def _optim(trainer: pl.Trainer) -> Spec:
    optimizer = trainer.optimizers[0]
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.AdamW):
        return AdamW(lr=group["initial_lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
                     weight_decay=group["weight_decay"], clip=trainer.gradient_clip_val or 0.0)
    return SGD(lr=group["initial_lr"], momentum=group["momentum"], weight_decay=group["weight_decay"])


def _schedule(scheduler: Any) -> Spec:
    if isinstance(scheduler, torch.optim.lr_scheduler.CosineAnnealingLR):
        return Cosine(t_max=scheduler.T_max)
    if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
        return Linear(warmup=scheduler.lr_lambdas[0].epochs)
    return Constant()

"""The step of every training, in its order, and the evaluation with compression on and off.

    for each pass (a learner's, or a microbatch's):
        before_pass, forward, loss, after_forward, backward, after_pass
    before_exchange
    after_backward (gradients are exchanged)
    clip, optimizer, after_step, learning rate

What happens at these moments beside the model is the components' (`commsweep/component.py`).
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sized
from functools import cache, partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from commsweep.component import Component, Moment, Pass
from commsweep.config import Run
from commsweep.data.module import Batch
from commsweep.errors import Diverged, UserError
from commsweep.modules import NamedModules
from commsweep.training import optim
from commsweep.training.points import Points, scoring
from commsweep.training.recalibration import MODE

CHECK_EVERY = 50  # steps between looks at the loss, each of which waits for the device once


class Task(pl.LightningModule):
    """Training of a staged network, scored with compression on and off; subclasses say what the
    loss is.
    """

    automatic_optimization = False  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        components: dict[str, Component],
        divide: Callable[[int], list[Pass]],
    ) -> None:
        """divide: the passes that a batch of so many rows is worked on in."""
        super().__init__()
        self.run, self.model, self.divide = run, model, cache(divide)
        # Any: the run names some of them for what they are (boundaries, learners).
        self.components: NamedModules[Any] = NamedModules(components)
        self.clip = getattr(run.optim, "clip", 0.0)
        # As an engine of pipelines adds up microbatches: sums first. Learners weigh theirs.
        self.engine = run.microbatches > 1 and components["learners"].exchange is None
        self.passed = self.crossed = 0  # passes so far: of all learners, and in this process
        self.seconds = {"train": 0.0, "eval": 0.0}
        self.spent: dict[str, float] = {}  # seconds of this process after backwards, by component
        self._scores = Scores(self.means)
        self._loss_sum = torch.zeros(())
        self._samples = 0
        # Of a training whose passes are shared out among processes: gathers what all say, in their
        # order.
        self.gather: Callable[[Any], list[Any]] | None = None
        # number, rows and loss of passes not gathered yet
        self._untold: list[tuple[int, int, Tensor]] = []
        self.points: Points | None = None  # scores along the way, where they are asked for

    def logits(self, x: Tensor) -> Tensor:
        """Return what the model says of a batch."""
        raise NotImplementedError

    @staticmethod
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        """Mean training loss of a batch."""
        raise NotImplementedError

    def drawn(self, logits: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        """The loss of labels drawn from the model's own distribution, of the form of y."""
        with self.trainer.precision_plugin.forward_context():
            return self.loss(logits, self.labels(sampled(logits, generator), y))

    @staticmethod
    def labels(classes: Tensor, y: Tensor) -> Tensor:
        """Return what a training set would hold if the outcome of every row of logits were these
        classes.
        """
        return classes

    @staticmethod
    def score(logits: Tensor, y: Tensor) -> Tensor:
        """Sums over a batch that add up over batches, float32 [k]."""
        raise NotImplementedError

    @staticmethod
    def means(total: list[float]) -> dict[str, float]:
        """Named metrics of the scores of a whole split."""
        raise NotImplementedError

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = optim.optimizer(self.run, list(self.parameters()), optim.embedded(self))
        for component in self.components.values():
            component.configured(optimizer)
        scheduler, interval = optim.rates(
            self.run, optimizer, int(self.trainer.estimated_stepping_batches)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval},
        }

    # Training.

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Inputs and labels go to the device; numbers of samples stay on the host, where memories
        look them up.
        """
        x, y, samples = batch
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True), samples

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Take a step; the loss of its last pass. Only the forward passes run in the precision of
        the trainer (`OneDevice`): a backward computes in the types of its forward.
        """
        began = time.perf_counter()
        x, y, samples = batch
        optimizer: Any = self.optimizers()
        passes = self.divide(len(y))
        moment = Moment(
            self.global_step,
            self.current_epoch,
            optimizer.param_groups[0]["lr"],
            self.passed,
            self.crossed + len(passes),
        )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        loss = self._passes(moment, passes, x, y, samples)
        self.passed += passes[0].of
        self.crossed += len(passes)
        components = dict(self.components.items())
        finish_step(components, moment, optimizer, self._shorten, self.clip, self.spent)
        self._next_rate()
        if self.global_step % CHECK_EVERY == 0:
            self._finite_loss()
        self.seconds["train"] += time.perf_counter() - began
        return {"loss": loss.detach()}

    # Lightning asks for it at every step.
    training_step.__signature__ = inspect.signature(training_step)

    def _passes(
        self, moment: Moment, passes: list[Pass], x: Tensor, y: Tensor, samples: Tensor
    ) -> Tensor:
        """Forward and backward of every pass; the loss of the last one."""
        is_last, loss = True, x.new_zeros(())
        for pass_ in passes:
            for component in self.components.values():
                component.before_pass(moment, pass_, samples[pass_.rows], x.device)
            if is_last:
                self.begin_gradient()
            with self.trainer.precision_plugin.forward_context():
                logits = self.logits(x[pass_.rows])
                loss = self.loss(logits, y[pass_.rows])
            self._note_loss(moment.passed + pass_.turn, loss.detach() * pass_.size, pass_.size)
            loss = weighted(loss, pass_, self.engine, self.run.microbatches)
            for component in self.components.values():
                component.after_forward(
                    moment, pass_, logits, partial(self.drawn, logits, y[pass_.rows])
                )
            loss.backward()
            if is_last := pass_.whole:
                self.end_gradient()
            for component in self.components.values():
                component.after_pass(moment, pass_)
        return loss

    def _shorten(self, most: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), most)

    def begin_gradient(self) -> None:
        """Before the first pass that a learner's gradient is summed over."""

    def end_gradient(self) -> None:
        """After the last one: each microbatch's loss is a mean, and so is that of all."""
        if self.engine:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.run.microbatches)

    def _next_rate(self) -> None:
        config = self.trainer.lr_scheduler_configs[0]
        if config.interval == "step" or self.trainer.is_last_batch:
            config.scheduler.step()  # pyright: ignore[reportCallIssue]

    def on_train_epoch_start(self) -> None:
        self._loss_sum = torch.zeros((), device=self.device)
        self._samples = 0
        self._untold = []

    def _note_loss(self, number: int, loss: Tensor, rows: int) -> None:
        """Count the loss of pass `number`, summed over its rows."""
        if self.points is not None:
            self.points.note(loss, rows)
        if self.gather is not None:
            self._untold.append((number, rows, loss))
            return
        self._loss_sum += loss
        self._samples += rows

    def _log(self, values: dict[str, float]) -> None:
        """Hand values to a logger, if there is one, under the store's number of steps: the store
        is the record.
        """
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=self.global_step)

    def on_train_epoch_end(self) -> None:
        loss = self._finite_loss()
        for component in self.components.values():
            component.epoch_ended(self.current_epoch)
        self._log({"train_loss": loss})

    @property
    def train_loss(self) -> float:
        """Mean loss over the samples of this epoch so far (waits for the device, and for other
        processes).
        """
        if self.gather is not None:
            reports = self.gather(
                [(number, rows, float(loss)) for number, rows, loss in self._untold]
            )
            self._untold = []
            # Sums of floats depend on their order: this is the simulation's.
            for _, rows, loss in sorted(tuple(entry) for report in reports for entry in report):
                self._loss_sum += loss
                self._samples += rows
        return float(self._loss_sum) / max(1, self._samples)

    def _finite_loss(self) -> float:
        """Return `train_loss`. Raises Diverged where it is not finite."""
        loss = self.train_loss
        if math.isfinite(loss):
            return loss
        reasons = [
            where for component in self.components.values() if (where := component.non_finite())
        ]
        _, where = min(reasons, key=lambda bad: bad[0], default=(0, "non-finite loss"))
        raise Diverged(f"{where}, epoch {self.current_epoch + 1}, by step {self.global_step}")

    # Evaluation: every batch twice, compression on and off, or once where that is the same; nothing
    # in it changes a memory.

    def on_validation_epoch_start(self) -> None:
        self._clock = time.perf_counter()
        self._scores = Scores(self.means)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y, _ = batch
        split = split_of(dataloader_idx, self.trainer.val_dataloaders)  # pyright: ignore[reportArgumentType]
        for modes in scored(self.run.scores_alike(self.current_epoch)):
            for component in self.components.values():
                component.before_scoring(self.current_epoch, batch_idx, modes[0] == "on")
            self._scores.add(split, modes, self.score(self.logits(x), y))

    def on_validation_epoch_end(self) -> None:
        self._finite_loss()  # which says where it began
        if "recalibration" in self.components and self.current_epoch + 1 == self.run.epochs:
            self._score_recalibrated()
        scores = self.scores
        if bad := next((name for name, value in scores.items() if not math.isfinite(value)), None):
            raise Diverged(f"non-finite {bad}, epoch {self.current_epoch + 1}")
        self._log(scores | self.components["boundaries"].sent_bytes())
        self.seconds["eval"] += time.perf_counter() - self._clock

    def _score_recalibrated(self) -> None:
        """Score every split without compression, BatchNorm's statistics gathered so, too."""

        def logits(x: Tensor) -> Tensor:
            with self.trainer.precision_plugin.forward_context():
                return self.logits(x)

        for component in self.components.values():
            component.before_scoring(self.current_epoch, 0, compress=False)
        loaders: Any = self.trainer.val_dataloaders
        with self.components["recalibration"].gathered(logits, self.trainer.train_dataloader):
            for index, loader in enumerate(loaders):
                for x, y, _ in loader:
                    self._scores.add(split_of(index, loaders), (MODE,), self.score(logits(x), y))

    @property
    def scores(self) -> dict[str, float]:
        """Metrics of the last evaluation, by split and mode: test_on_loss, ..."""
        return self._scores.values()

    def evaluation(self) -> dict[str, Any]:
        """The record of the last evaluation, of all processes that train together."""
        record: dict[str, Any] = {
            "epoch": self.current_epoch + 1,
            "step": self.global_step,
            "train_loss": self.train_loss,
            **self.scores,
            "seconds": round(self.seconds["train"], 4),
        }
        for component in self.components.values():
            record |= component.evaluation()
        return record

    def point(self) -> dict[str, Any]:
        """Score the samples of a point now, and return its record, of all processes that train
        together. Weights, memories and random states stay as they are.
        """
        assert self.points is not None
        began, scores, epoch = time.perf_counter(), Scores(self.means), self.current_epoch
        with scoring(self.model, self.device), self.trainer.precision_plugin.forward_context():
            for number, (x, y, _) in enumerate(self.points.samples):
                for modes in scored(self.run.scores_alike(epoch)):
                    for component in self.components.values():
                        component.before_scoring(epoch, number, modes[0] == "on")
                    scores.add(self.points.split, modes, self.score(self.logits(x), y))
        record = self.points.record(
            self.global_step, scores.values(), self.points.loss(self.gather), self.seconds["train"]
        )
        sent = {
            key: nbytes
            for component in self.components.values()
            for key, nbytes in component.sent_bytes().items()
        }
        reports = [sent] if self.gather is None else self.gather(sent)
        record |= {key: round(sum(report[key] for report in reports)) for key in sent}
        self._log({f"point_{key}": value for key, value in record.items() if key != "step"})
        self.seconds["eval"] += time.perf_counter() - began
        return record

    def totals(self) -> dict[str, Any]:
        """Return what the components add to the row."""
        return {
            key: value
            for component in self.components.values()
            for key, value in component.totals().items()
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seconds"], checkpoint["crossings"] = self.seconds, (self.passed, self.crossed)
        checkpoint["random"] = torch.get_rng_state()
        if self.points is not None:
            checkpoint["points"] = self.points.state()
        if self.device.type == "cuda":
            checkpoint["random_cuda"] = torch.cuda.get_rng_state(self.device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seconds, (self.passed, self.crossed) = checkpoint["seconds"], checkpoint["crossings"]
        torch.set_rng_state(checkpoint["random"])
        if self.points is not None and "points" in checkpoint:
            self.points.load(checkpoint["points"])
        if "random_cuda" in checkpoint and self.device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint["random_cuda"].cpu(), self.device)


def scored(alike: bool) -> tuple[tuple[str, ...], ...]:
    """The modes of inference that one forward of an evaluation scores, forward by forward."""
    return (("on", "off"),) if alike else (("on",), ("off",))


def split_of(index: int, loaders: Sized) -> str:
    """The split that the loader of this number scores: the last one is the test set's."""
    return "test" if index == len(loaders) - 1 else "val"


class Scores:
    """The sums of an evaluation, by split and mode of inference."""

    def __init__(self, means: Callable[[list[float]], dict[str, float]]) -> None:
        """means: named metrics of the sums of a whole split."""
        self.means = means
        self.totals: dict[str, Tensor] = {}

    def add(self, split: str, modes: tuple[str, ...], score: Tensor) -> None:
        """Add a batch's sums to those of its split in these modes."""
        for mode in modes:
            key = f"{split}_{mode}"
            self.totals[key] = self.totals[key] + score if key in self.totals else score

    def values(self) -> dict[str, float]:
        """The metrics, by split and mode: test_on_loss, ... (waits for the device)."""
        out = {}
        for key, total in self.totals.items():
            for name, value in self.means(total.tolist()).items():
                out[f"{key}_{name}"] = value
        return out


def weighted(loss: Tensor, pass_: Pass, engine: bool, microbatches: int) -> Tensor:
    """The loss of a pass, weighted so that the sum over passes is the gradient of the mean. engine:
    whether gradients of microbatches are summed first and divided afterwards.
    """
    # not 1 of a batch cut unevenly, or of a part of a share
    weight = pass_.weight if engine else pass_.share
    return loss * weight if microbatches > 1 and weight != 1 else loss


def finish_step(
    components: Mapping[str, Component],
    moment: Moment,
    optimizer: torch.optim.Optimizer,
    shorten: Callable[[float], object],
    clip: float,
    spent: dict[str, float] | None = None,
) -> None:
    """Do what follows the last backward of a step, in this order: exchange, clip, optimizer.

    shorten: limits the norm of all gradients to `clip` (0: not), where no component does. spent:
    seconds of each component's exchange are added to it.
    """
    for component in components.values():
        component.before_exchange(moment)
    for name, component in components.items():
        since = time.perf_counter()
        component.after_backward(moment)
        if spent is not None:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - since
    if clip and not any(component.clips(clip) for component in components.values()):
        shorten(clip)
    optimizer.step()
    for component in components.values():
        component.after_step(moment)


def sampled(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A class for each row of logits [..., classes], drawn by their softmax; generator: on the
    host.
    """
    shares = logits.detach().float().softmax(-1).cumsum(-1)
    level = torch.rand(logits.shape[:-1], generator=generator).to(logits.device)
    return (shares < level[..., None]).sum(-1).clamp(max=logits.shape[-1] - 1)


def microbatches(batch: int, count: int) -> list[Pass]:
    """`count` contiguous parts of a batch, of a short one the first ones a row longer. Weight: part
    * count / batch.
    """
    sizes = [batch // count + (index < batch % count) for index in range(count)]
    starts = [sum(sizes[:index]) for index in range(count)]
    return [
        Pass(
            slice(start, start + size),
            size,
            size * count / batch,
            whole=index == count - 1,
            turn=index,
            of=count,
            slot=start,
            batch=batch,
        )
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def check_norms(
    run: Run,
    model: nn.Module,
    example: Tensor,
    divide: Callable[[int], list[Pass]],
    samples: int,
    drop_last: bool,
) -> None:
    """Raise UserError when a pass would have one row only, and a BatchNorm of the model one value
    of it a channel.
    """
    batch = run.data.batch_size
    batches = [batch] if samples >= batch else []
    batches += [samples % batch] if samples % batch and not drop_last else []
    least = {rows: min(pass_.size for pass_ in divide(rows)) for rows in batches}
    short = next((rows for rows, size in least.items() if size == 1), None)
    norms = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if short is None or not norms:
        return
    values: dict[str, int] = {}

    def counting(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def count(norm: nn.Module, inputs: Any, output: Tensor) -> None:
            values[name] = output.numel() // output.shape[1]

        return count

    hooks = [norm.register_forward_hook(counting(name)) for name, norm in norms]
    training = model.training
    with torch.no_grad():
        model.eval()(example)
    model.train(training)
    for hook in hooks:
        hook.remove()
    single = next((name for name, count in values.items() if count == 1), None)
    if single is None:
        return
    which = "the last batch of an epoch has" if short != batch else "a batch has"
    mend = (
        "data.drop_last=true, or another data.batch_size or data.val_size"
        if short != batch
        else "data.batch_size"
    )
    raise UserError(
        f"{which} {short} row{'s' * (short > 1)} for {len(divide(short))} passes, and BatchNorm "
        f"{single} needs two rows in each: set {mend}"
    )


def check_microbatches(run: Run, samples: int, drop_last: bool) -> None:
    """Raise UserError when the last batch of an epoch has fewer rows than there are
    microbatches.
    """
    short = samples % run.data.batch_size
    if short and not drop_last and short < run.microbatches:
        raise UserError(
            f"microbatches={run.microbatches}: the last batch of an epoch has {short} rows; "
            "choose another data.batch_size or fewer microbatches"
        )

"""The training of one stage of a real pipeline: the loop around the engine, evaluation and
checkpoints.

With several learners each has a pipeline of its own over its rows of a batch, and processes with
the same stage exchange its gradients, or what they have moved by: a mesh of learners and stages.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from commsweep import checkpoint, input_digests
from commsweep.boundary.message_sizes import check_room
from commsweep.collectives import Processes, gathered
from commsweep.component import Component, Moment, Pass
from commsweep.compressors import message
from commsweep.config import Execution, Run
from commsweep.config.execution import Wiring
from commsweep.config.run import canonical
from commsweep.data import load as datasets
from commsweep.data.module import Batch, Batches
from commsweep.data_parallel.ledger import Ledger
from commsweep.data_parallel.memory import memory_bytes as learner_memory
from commsweep.errors import UserError, notice
from commsweep.feedback.memory import Keys
from commsweep.processes import stages, supervisor
from commsweep.processes.components import ClippingAcrossStages, ConfinedStage, TiedEmbeddings
from commsweep.processes.continuous import Continuous1F1B
from commsweep.processes.engine import SCHEDULES, Stage, Turn
from commsweep.processes.network import StageNetwork
from commsweep.processes.timing import KEPT
from commsweep.processes.weight_versions import Versions, memory_bytes
from commsweep.store import DIVERGED, FINISHED, POINTS, RunFolder
from commsweep.training import arithmetic, optim
from commsweep.training.points import Points, scoring
from commsweep.training.run import divided, quiet, sharing
from commsweep.training.step import (
    Scores,
    check_microbatches,
    finish_step,
    scored,
    split_of,
    weighted,
)
from commsweep.training.tasks import kind, laid_out

MEASURED = "measured"  # status of a run that was ended after `Wiring.steps`
PROGRESS_EVERY = 0.5  # seconds between reports of how far the run is


def connect(run: Run, execution: Execution, patience: float) -> torch.device:
    """Join the other stages; returns this stage's device."""
    world, stages_needed, n = (
        int(os.environ["WORLD_SIZE"]),
        stages.processes(run),
        run.grad.learners,
    )
    if world != stages_needed:
        of = (
            f"{n} learners with {stages.count(run)} stages each"
            if n > 1
            else f"{stages_needed} stages"
        )
        raise UserError(
            f"{world} processes were started for {of}; start one a stage"
            + (f", {stages_needed} in all" if n > 1 else "")
        )
    device = execution.torch_device()
    if device.type == "cuda":
        local_processes, gpus = (
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            torch.cuda.device_count(),
        )
        if local_processes > gpus:
            raise UserError(
                f"--device cuda: {local_processes} processes on this machine for {gpus} "
                f"GPU{'s' * (gpus > 1)}, and NCCL takes one each: use --device cpu, fewer "
                "stages, or torchrun on several machines"
            )
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
    supervisor.join(device, patience)
    return device


def _agree(text: str, label: str) -> None:
    """Raise UserError unless all processes have the same text."""
    digests = gathered(message.digest(text).hex())
    if len(set(digests)) > 1:
        disagrees = next(i for i, digest in enumerate(digests) if digest != digests[0])
        raise UserError(
            f"processes 0 and {disagrees} were started with different {label}; start all with "
            "the same"
        )


def turns(passes: list[Pass], samples: Tensor, first: int, device: torch.device) -> list[Turn]:
    """The microbatches of a training step whose first message has the number `first`."""
    return [
        Turn(first + pass_.turn, pass_.size, Keys(samples[pass_.rows], device, pass_.slot))
        for pass_ in passes
    ]


class Trainer:
    """The state of one stage's training."""

    def __init__(
        self,
        run: Run,
        wiring: Wiring,
        execution: Execution,
        folder: RunFolder,
        device: torch.device,
        keep_weights: bool = False,
    ) -> None:
        """keep_weights: leave the trained network in the folder, as weights.pt."""
        quiet()
        links_apart = wiring.model_dump_json(exclude={"bandwidth", "latency", "links"})
        _agree(f"{canonical(run)} {links_apart}", "settings")
        self.run, self.wiring, self.execution, self.folder = run, wiring, execution, folder
        self.device, self.keep_weights = device, keep_weights
        self.place, self.world = dist.get_rank(), stages.count(run)
        self.learner, self.rank = divmod(self.place, self.world)
        self.first, self.last = self.rank == 0, self.rank == self.world - 1
        self.records = self.place == 0  # for all processes
        self._join_mesh()
        arithmetic.install(run, device)
        torch.set_num_threads(wiring.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)  # as in the simulation
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        self.kind, self.clip = kind(run), getattr(run.optim, "clip", 0.0)
        self.data = datasets.build(run, execution.data_root, execution.model_root, device)
        _agree(self.data.digest(), "data (--data-root, --model-root)")
        steps = len(self.data.train) * run.epochs
        self._check_batches()
        self.network = StageNetwork(run, execution, self.data, device, self.rank, self.world)
        if self.records:
            input_digests.keep(folder, run, execution, self.network.inputs)
        self._make_components(steps)
        self._make_engine()
        self.optimizer = optim.optimizer(run, self.network.parameters, self.network.embedded)
        self.scheduler, self.interval = optim.rates(run, self.optimizer, steps)
        self.losses: list[Tensor] = []
        self.began: list[float] = []
        self.epoch_began: list[float] = []
        self._loss_sum, self._samples = torch.zeros((), device=device), 0
        self.step = self.passes = self.crossed = self.epoch = 0
        self.seconds = {"train": 0.0, "eval": 0.0}
        self.points = self._points()
        self.pace = checkpoint.Pace(execution.checkpoint_every)
        self._shown = 0.0

    def _join_mesh(self) -> None:
        """The group of this pipeline's processes, and the collectives with other learners'."""
        self.group: dist.ProcessGroup | None = None
        self.collectives: Processes | None = None
        if self.run.grad.learners > 1:
            mesh: DeviceMesh = init_device_mesh(
                self.device.type,
                (self.run.grad.learners, self.world),
                mesh_dim_names=("learners", "stages"),
            )
            self.group = mesh.get_group("stages")
            self.collectives = Processes(group=mesh.get_group("learners"))

    def _check_batches(self) -> None:
        """Raise UserError when a learner would have fewer rows than microbatches."""
        run, rows, drop_last = self.run, len(self.data.train.y), self.data.train.drop_last
        check_microbatches(run, rows, drop_last)
        n = run.grad.learners
        short = rows % run.data.batch_size
        if n > 1 and short and not drop_last and short // n < run.microbatches:
            raise UserError(
                f"the last batch of an epoch has {short} rows for {n} learners with "
                f"{run.microbatches} microbatches each: set data.drop_last=true or another "
                "data.batch_size"
            )

    def _make_components(self, steps: int) -> None:
        """Make what takes part in this stage's training, in the order of a step."""
        run, network = self.run, self.network
        need = {"learners": learner_memory(run.grad, network.part, 1, optim.states(run))}
        if run.delay is not None:
            need["delay"] = memory_bytes(run.delay, network.delays)
        check_room(need, self.device, None)
        elsewhere = network.tied if self.last else None  # the first stage counts it
        self.shorten = ClippingAcrossStages(
            network.order, network.named, elsewhere, self.device, self.group
        )
        self.components: dict[str, Component] = {}
        if network.tied is not None:
            peer = self.learner * self.world + (self.world - 1 if self.first else 0)
            self.components["tied"] = TiedEmbeddings(network.tied, self.first, peer)
        self.learners = sharing(
            run,
            network.part,
            network.embedded,
            steps,
            self.collectives,
            network.layers,
            lambda _: self.shorten(self.clip),
        )
        self.learners.to(self.device)
        self.components["learners"] = self.learners
        if network.confined is not None:
            self.components["subspace"] = ConfinedStage(network.confined)
        self.divide, self.engine = divided(run, self.learners), self.learners.exchange is None

    def _make_engine(self) -> None:
        """The stage in the engine, for training and for evaluation."""
        run, network = self.run, self.network
        before, behind = network.sides()
        # the channels that this stage sends through
        self.sends = {"bwd": before, "fwd": behind}
        make = partial(
            Stage,
            network.body,
            self.rank,
            self.world,
            self.device,
            network.boundaries.step,
            before,
            behind,
            self._precision,
            self.group,
        )
        self.stage, self.scorer = make(), make()
        self.stage.channels_last = self.scorer.channels_last = run.channels_last
        self.scoring = SCHEDULES["gpipe"](self.scorer, 1)
        self.continuous: Continuous1F1B | None = None
        # of steps whose passes are under way: where they are, and their last pass
        self._begun: dict[int, tuple[Moment, Pass]] = {}
        if run.delay is not None and run.delay.steps:
            self.schedule = self.continuous = Continuous1F1B(
                self.stage,
                run.microbatches,
                Versions(run.delay, network.delays),
                self._loss,
                self.engine,
                self._passes_done,
            )
            return
        try:
            self.schedule = SCHEDULES[self.wiring.schedule](
                self.stage, run.microbatches, loss_fn=self._loss, scale_grads=self.engine
            )
        except ValueError:
            raise UserError(
                f"--schedule {self.wiring.schedule} needs at least as many microbatches as "
                f"stages: set microbatches={self.world} (now {run.microbatches}), or use "
                "--schedule gpipe"
            ) from None

    def _points(self) -> Points | None:
        """The points along this training, where it has some."""
        if not self.execution.points or self.wiring.steps:
            return None
        if self.continuous is not None:
            if self.records:
                notice(
                    f"pipeline {self.folder.path.name}: no points along the training, because "
                    "passes of several steps are under way at once (delay.steps)"
                )
            return None
        return Points(self.run, self.data, self.execution.points)

    @property
    def tied_bytes(self) -> int:
        """Bytes of tied embeddings' gradients that this stage has sent."""
        tied = self.components.get("tied")
        return tied.sent if isinstance(tied, TiedEmbeddings) else 0

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.run.precision == "bfloat16"
        )

    def _loss(self, logits: Tensor, target: tuple[Tensor, Pass]) -> Tensor:
        y, share = target
        with self._precision():
            loss = self.kind.loss(logits, y)
        if self.points is not None:
            self.points.note(loss.detach() * share.size, share.size)
        self._loss_sum += loss.detach() * share.size
        self._samples += share.size
        return weighted(loss, share, self.engine, self.run.microbatches)

    # Training.

    def train(self) -> tuple[str, str | None, float]:
        """Train to the end, or for the steps that were asked for.

        Return the status, the error, and the seconds that it took.
        """
        started = time.perf_counter()
        status, error = FINISHED, None
        self._resume()
        for component in self.components.values():
            component.configured(self.optimizer)
        while self.epoch < self.run.epochs and status == FINISHED:
            stopped = self._train_epoch()
            error = self._epoch_ended(evaluate=not stopped)
            status = DIVERGED if error else MEASURED if stopped else FINISHED
            self.epoch += 1
            if status == FINISHED and self.epoch < self.run.epochs:
                self._checkpoint()
        return status, error, time.perf_counter() - started

    def _train_epoch(self) -> bool:
        """Return whether the steps that were asked for are done."""
        self._loss_sum.zero_()
        self._samples = 0
        self.losses = []
        del self.began[:-KEPT], self.stage.spans[: -KEPT * (2 * self.run.microbatches + 1)]
        del self.stage.passages[: -KEPT * 4 * self.run.microbatches]
        since = len(self.began)
        self.data.train.set_epoch(self.epoch)
        clock = time.perf_counter()
        for batch, following in self._batches():
            self._step(batch, following)
            if self.points is not None and self.points.due(self.step):
                paused = time.perf_counter()
                self._point(self.points, self.seconds["train"] + paused - clock)
                clock += time.perf_counter() - paused
            self._progress()
            if self.step == self.wiring.steps:
                break
        if self.continuous is not None:
            self.continuous.drain()
        self.seconds["train"] += time.perf_counter() - clock
        self.epoch_began = self.began[since:]
        return self.step == self.wiring.steps

    def _batches(self) -> Iterator[tuple[Batch, Batch | None]]:
        """Each batch of the epoch. Where passes go on from step to step, with the next one; None
        when training stops before it.
        """
        if self.continuous is None:
            for batch in self.data.train:
                yield batch, None
            return
        batches = iter(self.data.train)
        batch = next(batches, None)
        while batch is not None:
            following = None if self.step + 1 == self.wiring.steps else next(batches, None)
            yield batch, following
            batch = following

    def _step(self, batch: Batch, following: Batch | None) -> None:
        x, y, samples = batch
        passes, step = self.divide(len(y)), self.network.boundaries.step
        moment = Moment(
            self.step,
            self.epoch,
            self.optimizer.param_groups[0]["lr"],
            self.passes,
            self.crossed + len(passes),
        )
        step.training, step.compress, step.epoch, step.steps = True, True, self.epoch, self.step
        self.began.append(time.monotonic())
        passes_here = turns(passes, samples, self.passes, self.device)
        for component in self.components.values():
            component.before_pass(moment, passes[0], samples, self.device)
        x = laid_out(self.run, x) if self.first else x
        inputs = [(x[pass_.rows],) for pass_ in passes] if self.first else [()] * len(passes)
        targets = [(y[pass_.rows], pass_) for pass_ in passes] if self.last else None
        self._begun[self.step] = moment, passes[-1]
        if self.continuous is not None:
            coming = None
            if following is not None:
                first = self.passes + passes[0].of
                slices = self.divide(len(following[1]))
                coming = turns(slices, following[2], first, self.device)
            self.continuous.feed(self.step, passes_here, inputs, targets, coming)
        else:
            losses: list[Tensor] = []
            self.stage.begin(passes_here)
            self.schedule.step(
                arg_mbs=inputs, target_mbs=targets, losses=losses, return_outputs=False
            )
            self._passes_done(self.step, [loss.detach() for loss in losses])
        self.step += 1
        self.passes += passes[0].of
        self.crossed += len(passes)

    def _passes_done(self, number: int, losses: list[Tensor]) -> None:
        """Update the weights after the passes of a step. losses: at the last stage."""
        moment, pass_ = self._begun.pop(number)
        # the rate is that of this step only when all steps before it have ended
        moment = replace(moment, rate=self.optimizer.param_groups[0]["lr"])
        with self.stage._timed("U", 0):
            self._divide_coders()
            for component in self.components.values():
                component.after_pass(moment, pass_)
            # with outer steps each learner has clipped its own gradient
            clip = self.clip if self.run.grad.outer is None else 0.0
            finish_step(self.components, moment, self.optimizer, self.shorten, clip)
            if self.interval == "step":
                self.scheduler.step()
            self.optimizer.zero_grad()
        if self.last:
            self.losses.append(torch.stack(losses).sum() / len(losses))

    def _divide_coders(self) -> None:
        """The engine divides summed gradients of the stage's own modules only."""
        if self.run.microbatches == 1 or not self.engine:
            return
        for coder in self.network.coders:
            if coder.grad is not None:
                coder.grad.div_(self.run.microbatches)

    # Evaluation.

    def _evaluate(self) -> dict[str, float]:
        """Scores of validation and test set with compression on and off, at the last stage."""
        loaders = self.data.val_dataloader()
        return self._scores([(split_of(i, loaders), loader) for i, loader in enumerate(loaders)])

    def _scores(self, loaders: list[tuple[str, Batches]]) -> dict[str, float]:
        """Scores of these splits with compression on and off, at the last stage."""
        clock, scores = time.perf_counter(), Scores(self.kind.means)
        for component in self.components.values():
            component.before_scoring(self.epoch, 0, compress=True)
        step = self.network.boundaries.step
        step.training = False
        with scoring(self.network.body, self.device):
            for split, loader in loaders:
                for number, (x, y, _) in enumerate(loader):
                    for modes in scored(self.run.scores_alike(self.epoch)):
                        step.compress = modes[0] == "on"
                        self.scorer.begin([Turn(number, len(y), None)])
                        logits = self.scoring.step(*([laid_out(self.run, x)] if self.first else []))
                        if self.last:
                            with self._precision():
                                scores.add(split, modes, self.kind.score(logits, y))
        self.seconds["eval"] += time.perf_counter() - clock
        return scores.values()

    def _point(self, points: Points, seconds: float) -> None:
        """Score the samples of a point and record it; seconds: of training so far."""
        scores = gathered(self._scores([(points.split, points.samples)]))
        loss = points.loss(gathered)
        sent = {"bytes": sum(gathered(self._bytes()))}
        if self.learners.exchange is not None:
            sent["gradient_bytes"] = round(self.ledger().up_bytes)
        if self.records:
            record = points.record(self.step, scores[self.world - 1], loss, seconds)
            self.folder.append(record | sent, POINTS)

    def ledger(self) -> Ledger:
        """The bytes that all learners have exchanged so far. All processes must call it."""
        exchange = self.learners.exchange
        assert exchange is not None
        exchanged = gathered(([layer.place for layer in exchange.layers], exchange.ledger.state()))
        ledger = Ledger(list(self.network.layers.values()), self.run.grad, self.run.grad.learners)
        ledger.take(exchanged, self.world)
        return ledger

    def _epoch_ended(self, evaluate: bool) -> str | None:
        """Evaluate and record; returns where the training diverged, if it did."""
        if self.interval == "epoch" and evaluate:
            self.scheduler.step()
        for component in self.components.values():
            component.epoch_ended(self.epoch)
        due = evaluate and (self.epoch + 1) % self.run.eval_every == 0
        scores = self._evaluate() if due else {}
        reports = gathered(
            {
                "scores": scores,
                "loss": float(self._loss_sum),
                "samples": self._samples,
                "losses": [float(loss) for loss in self.losses],
                "bytes": self._bytes(),
            }
        )
        ends = reports[self.world - 1 :: self.world]  # the learners' last stages
        loss = sum(end["loss"] for end in ends) / max(1, sum(end["samples"] for end in ends))
        error = None if math.isfinite(loss) else self._where_it_diverged()
        if self.records:
            self._record_losses(ends)
            if due and error is None:
                self.folder.append(
                    {
                        "epoch": self.epoch + 1,
                        "step": self.step,
                        "train_loss": loss,
                        **ends[0]["scores"],
                        "bytes": sum(report["bytes"] for report in reports),
                        "seconds": round(self.seconds["train"], 4),
                    }
                )
        return error

    def _bytes(self) -> int:
        """Bytes that this stage has sent over its boundaries."""
        total = 0
        for direction, side in self.sends.items():
            if side is not None:
                channel: Any = side.boundary.get_submodule(direction)
                total += channel.counts.total()
        return total

    def _where_it_diverged(self) -> str:
        """The first boundary with a value that is not finite, and when. All processes call it."""
        bad = [where for where in gathered(self.network.boundaries.non_finite()) if where]
        reason = min(bad)[1] if bad else "non-finite loss"
        return f"{reason}, epoch {self.epoch + 1}, by step {self.step}"

    def _record_losses(self, ends: list[dict[str, Any]]) -> None:
        """The losses of every step of the epoch, as means over the learners."""
        losses = [
            sum(step) / len(step) for step in zip(*(end["losses"] for end in ends), strict=True)
        ]
        line = {"epoch": self.epoch + 1, "losses": losses, "began": self.epoch_began}
        with open(self.folder.path / "steps.jsonl", "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")

    def _progress(self) -> None:
        """The first process says how far it is, for whoever shows it."""
        if not self.records or time.monotonic() - self._shown <= PROGRESS_EVERY:
            return
        self._shown = time.monotonic()
        steps = self.wiring.steps or self.run.epochs * len(self.data.train)
        partial = self.folder.path / ".progress"
        partial.write_text(json.dumps({"step": self.step, "of": steps}), encoding="utf-8")
        os.replace(partial, self.folder.path / "progress.json")

    # Checkpoints: every process has its own file for an epoch, and two epochs are kept, so one is
    # always whole.

    def _checkpoint(self) -> None:
        if not gathered(self.pace.due())[0]:
            return
        with self.pace.taken():
            self._save()

    def _save(self) -> None:
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "passes": self.passes,
            "crossed": self.crossed,
            "seconds": self.seconds,
            "learners": self.learners.state_dict(),
            "exchanged": dict(self.collectives.sent) if self.collectives else {},
            "body": self.network.body.state_dict(),
            "boundaries": self.network.boundaries.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "sent": self.stage.sent,
            "framing": self.stage.framing,
            "tied": self.tied_bytes,
            "versions": self.continuous and self.continuous.versions.state_dict(),
            "points": self.points and self.points.state(),
        }
        checkpoint.save(state, self.folder.path, f"stage{self.place}", self.epoch)
        gathered(None)  # all have theirs

    def _resume(self) -> None:
        newest = supervisor.newest(self.folder.path, f"stage{self.place}")
        if newest is None:
            return
        state = torch.load(newest, map_location=self.device, weights_only=True)
        if "crossed" not in state:
            if self.records:
                notice(
                    f"pipeline {self.folder.path.name}: its checkpoints are of an earlier "
                    "commsweep: beginning anew"
                )
            return
        self.epoch, self.step, self.passes = state["epoch"], state["step"], state["passes"]
        self.seconds, self.crossed = state["seconds"], state["crossed"]
        if self.points is not None and state.get("points"):
            self.points.load(state["points"])
        if isinstance(tied := self.components.get("tied"), TiedEmbeddings):
            tied.sent = state["tied"]
        self.stage.sent, self.stage.framing = state["sent"], state["framing"]
        self.network.body.load_state_dict(state["body"])
        self.network.boundaries.load_state_dict(state["boundaries"])
        if self.continuous is not None:
            self.continuous.versions.load_state_dict(state["versions"])
        self.learners.load_state_dict(state["learners"])
        if self.collectives:
            self.collectives.sent.update(state["exchanged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"].cpu())

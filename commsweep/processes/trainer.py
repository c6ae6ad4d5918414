"""One stage of a real pipeline: the loop around the engine, evaluation, checkpoints, and the row of
it all.

With several learners each has a pipeline of its own over its rows of a batch, and processes with
the same stage exchange its gradients, or what they have moved by: a mesh of learners and stages.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from commsweep import checkpoint, inputs, models
from commsweep.boundary.insert import Boundaries, sections
from commsweep.boundary.plan import check_room, memory_bytes, message_shapes
from commsweep.collectives import Processes, gathered, gathered_tensors
from commsweep.component import Moment, Pass
from commsweep.compressors import message
from commsweep.config import Execution, Links, Run, Wiring, canonical, run_id
from commsweep.data import load as datasets
from commsweep.data.module import Batch
from commsweep.data_parallel import learners
from commsweep.data_parallel.layers import identified
from commsweep.data_parallel.ledger import Ledger
from commsweep.errors import UserError, notice
from commsweep.feedback.memory import Keys
from commsweep.processes import launch, stages
from commsweep.processes.engine import SCHEDULES, Side, Stage, Turn
from commsweep.processes.timing import KEPT, summary
from commsweep.store import DIVERGED, FINISHED, Row, RunFolder
from commsweep.training import arithmetic, optim
from commsweep.training.readback import Installed, model_of, nothing_lost
from commsweep.training.record import row
from commsweep.training.run import divided, quiet, sharing, tokens
from commsweep.training.step import add_scores, check_microbatches, scored
from commsweep.training.subspace import Confined
from commsweep.training.tasks import kind, laid_out

MEASURED = "measured"  # status of a run that was ended after `Wiring.steps`


def connect(run: Run, execution: Execution, patience: float) -> torch.device:
    """Join the other stages; returns this stage's device."""
    world, wanted, n = int(os.environ["WORLD_SIZE"]), stages.processes(run), run.grad.learners
    if world != wanted:
        of = f"{n} learners with {stages.count(run)} stages each" if n > 1 else f"{wanted} stages"
        raise UserError(
            f"{world} processes were started for {of}; start one a stage"
            + (f", {wanted} in all" if n > 1 else "")
        )
    device = execution.torch_device()
    if device.type == "cuda":
        here, there = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if here > there:
            raise UserError(
                f"--device cuda: {here} processes on this machine for {there} "
                f"GPU{'s' * (there > 1)}, and NCCL takes one each: use --device cpu, fewer "
                "stages, or torchrun on several machines"
            )
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
    launch.join(device, patience)
    return device


def _agree(text: str, what: str) -> None:
    """Raise UserError unless all processes have the same text."""
    digests = gathered(message.digest(text).hex())
    if len(set(digests)) > 1:
        other = next(i for i, one in enumerate(digests) if one != digests[0])
        raise UserError(
            f"processes 0 and {other} were started with different {what}; start all with the same"
        )


def turns(passes: list[Pass], samples: Tensor, first: int, device: torch.device) -> list[Turn]:
    """The microbatches of a training step whose first message has the number `first`."""
    return [
        Turn(first + one.turn, one.size, Keys(samples[one.rows], device, one.slot))
        for one in passes
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
        _agree(
            f"{canonical(run)} {wiring.model_dump_json(exclude={'bandwidth', 'latency', 'links'})}",
            "settings",
        )
        self.place, world = dist.get_rank(), stages.count(run)
        self.learner, rank = divmod(self.place, world)  # rank: of the stage, in its pipeline
        mesh: DeviceMesh | None = None
        if run.grad.learners > 1:
            mesh = init_device_mesh(
                device.type, (run.grad.learners, world), mesh_dim_names=("learners", "stages")
            )
        self.group = mesh and mesh.get_group("stages")
        self.collectives = mesh and Processes(group=mesh.get_group("learners"))
        arithmetic.install(run, device)
        torch.set_num_threads(wiring.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)  # as in the simulation
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        self.run, self.wiring, self.execution, self.folder = run, wiring, execution, folder
        self.device, self.rank, self.world, self.kind = device, rank, world, kind(run)
        self.keep_weights, self.clip = keep_weights, getattr(run.optim, "clip", 0.0)
        self.first, self.last = rank == 0, rank == world - 1
        self.speaks = self.place == 0  # for all: it records
        self.data = datasets.build(run, execution.data_root, execution.model_root, device)
        _agree(self.data.digest(), "data (--data-root, --model-root)")
        steps = len(self.data.train) * run.epochs
        self._build(run, execution, steps)
        self.optimizer = optim.optimizer(run, self.parameters, self.embedded)
        self.scheduler, self.interval = optim.rates(run, self.optimizer, steps)
        self.losses: list[Tensor] = []
        self.began: list[float] = []
        self._loss_sum, self._samples = torch.zeros((), device=device), 0
        self.step = self.passes = self.crossed = self.epoch = 0
        self.seconds = {"train": 0.0, "eval": 0.0}
        self.tied_bytes = 0
        self.pace = checkpoint.Pace(execution.checkpoint_every)

    def _build(self, run: Run, execution: Execution, steps: int) -> None:
        check_microbatches(run, len(self.data.train.y), self.data.train.drop_last)
        n = run.grad.learners
        short = len(self.data.train.y) % run.data.batch_size
        if n > 1 and short and not self.data.train.drop_last and short // n < run.microbatches:
            raise UserError(
                f"the last batch of an epoch has {short} rows for {n} learners with "
                f"{run.microbatches} microbatches each: set data.drop_last=true or another "
                "data.batch_size"
            )
        pl.seed_everything(run.seed, verbose=False)
        model, modules = models.build(run, self.data, execution.model_root)
        self.inputs = inputs.digests(run, self.data, model)
        if self.speaks:
            inputs.keep(self.folder, run, execution, self.inputs)
        (shapes, _), cuts = message_shapes(model, modules, self.data.example), list(modules)
        run.check_cuts(modules)
        self.model, self.embedded = model_of(run, model, tuple(cuts)), optim.embedded(model)
        links = {cut: run.links(cut) for cut in cuts}
        beside = cuts[max(0, self.rank - 1) : self.rank + 1]
        model = model.to(self.device)
        need = memory_bytes(
            {cut: links[cut] for cut in beside}, shapes, run.data.batch_size, len(self.data.train.y)
        )
        check_room(need, self.device, None)
        self.boundaries = Boundaries(
            links,
            modules,
            shapes,
            run.data.batch_size,
            len(self.data.train.y),
            run.seed,
            own=run.at,
            channels_last=run.channels_last,
            only=beside,
        ).to(self.device)
        every = [
            *((f"model.{name}", one) for name, one in model.named_parameters()),
            *((f"boundaries.{name}", one) for name, one in self._coders(cuts, shapes)),
        ]
        self.order = [name for name, _ in every]
        names = {
            id(one): f"model.{name}"
            for name, one in [*model.named_parameters(), *model.named_buffers()]
        }
        ends = (
            (model.get_input_embeddings().weight, model.get_output_embeddings().weight)  # pyright: ignore[reportCallIssue]
            if hasattr(model, "get_input_embeddings")
            else (None, False)
        )
        self.tied = (
            ends[0] if ends[0] is ends[1] and (self.first or self.last) and self.world > 1 else None
        )
        self.confined = (
            Confined(run, model, self.boundaries, self.rank)
            if (run.fwd.compressor.kind == "subspace" and cuts)
            else None
        )
        known = identified(nn.ModuleDict({"model": model, "boundaries": self.boundaries}), run.grad)
        self.layers = list(known.values())
        body = stages.body(run, model, cuts, self.rank).train()
        parts = {
            name: dict(getattr(body, name)()) for name in ("named_parameters", "named_buffers")
        }
        self.named = {names[id(one)]: one for one in parts["named_parameters"].values()}
        self.buffers = {
            names[id(one)]: one for one in parts["named_buffers"].values() if id(one) in names
        }
        coded = {f"boundaries.{name}": one for name, one in self.boundaries.named_parameters()}
        self.coders = list(coded.values())
        self.parameters = [*self.named.values(), *self.coders]
        self.named |= coded
        part = nn.ModuleDict({"model": body, "boundaries": self.boundaries})
        check_room(
            {"learners": learners.memory_bytes(run.grad, part, 1, optim.states(run))},
            self.device,
            None,
        )
        self.shared = sharing(
            run, part, self.embedded, steps, self.collectives, known, lambda _: self._clip()
        )
        self.shared.to(self.device)
        self.divide, self.engine = divided(run, self.shared), self.shared.exchange is None

        sides: list[Side | None] = [None, None]
        for turn, at in enumerate((self.rank - 1, self.rank)):
            if 0 <= at < len(cuts):
                cut = cuts[at]
                agreed = message.digest(f"{canonical(run)} {cut} {tuple(shapes[cut])}")
                sides[turn] = Side(self.boundaries[cut.replace(".", "_")], shapes[cut], agreed)
        self.sides = {"bwd": sides[0], "fwd": sides[1]}  # the channel that this stage sends through
        make = partial(
            Stage,
            body,
            self.rank,
            self.world,
            self.device,
            self.boundaries.step,
            *sides,
            self._precision,
            self.group,
        )
        self.stage, self.scorer, self.body = make(), make(), body
        self.stage.channels_last = self.scorer.channels_last = run.channels_last
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
        self.scoring = SCHEDULES["gpipe"](self.scorer, 1)

    def _coders(self, cuts: list[str], shapes: dict[str, torch.Size]) -> list[tuple[str, Any]]:
        """Names of all coders' parameters in the simulation's order; those of other stages without
        a value.
        """
        if self.run.fwd.compressor.kind != "bottleneck":
            return []
        return [
            (f"{cut.replace('.', '_')}.coder.{part}", None)
            for cut in cuts
            for part in ("encoder", "decoder")
        ]

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.run.precision == "bfloat16"
        )

    def _loss(self, logits: Tensor, target: tuple[Tensor, Pass]) -> Tensor:
        y, one = target
        with self._precision():
            loss = self.kind.loss(logits, y)
        self._loss_sum += loss.detach() * one.size
        self._samples += one.size
        weight = one.weight if self.engine else one.share
        return loss * weight if self.run.microbatches > 1 and weight != 1 else loss

    # Training.

    def train(self) -> dict[str, Any] | None:
        """All epochs that are left; the row, at stage 0."""
        begun = time.perf_counter()
        status, error = FINISHED, None
        self._resume()
        self.shared.configured(self.optimizer)
        while self.epoch < self.run.epochs and status == FINISHED:
            stopped = self._train_epoch()
            error = self._epoch_ended(evaluate=not stopped)
            status = DIVERGED if error else MEASURED if stopped else FINISHED
            self.epoch += 1
            if status == FINISHED and self.epoch < self.run.epochs:
                self._checkpoint()
        return self._row(status, error, time.perf_counter() - begun)  # pyright: ignore[reportReturnType]

    def _train_epoch(self) -> bool:
        """Whether the steps that were asked for are done."""
        self._loss_sum.zero_()
        self._samples = 0
        self.losses = []
        del self.began[:-KEPT], self.stage.spans[: -KEPT * (2 * self.run.microbatches + 1)]
        del self.stage.passages[: -KEPT * 4 * self.run.microbatches]
        since = len(self.began)
        self.data.train.set_epoch(self.epoch)
        clock = time.perf_counter()
        for batch in self.data.train:
            self._step(batch)
            self._progress()
            if self.step == self.wiring.steps:
                break
        self.seconds["train"] += time.perf_counter() - clock
        self.epoch_began = self.began[since:]
        return self.step == self.wiring.steps

    def _step(self, batch: Batch) -> None:
        x, y, samples = batch
        passes, step = self.divide(len(y)), self.boundaries.step
        moment = Moment(
            self.step,
            self.epoch,
            self.optimizer.param_groups[0]["lr"],
            self.passes,
            self.crossed + len(passes),
        )
        step.training, step.compress, step.epoch = True, True, self.epoch
        self.began.append(time.monotonic())
        self.stage.begin(turns(passes, samples, self.passes, self.device))
        self.optimizer.zero_grad()
        self.shared.before_pass(moment, passes[0], samples, self.device)
        losses: list[Tensor] = []
        x = laid_out(self.run, x) if self.first else x
        self.schedule.step(
            arg_mbs=[(x[one.rows],) for one in passes] if self.first else [()] * len(passes),
            target_mbs=[(y[one.rows], one) for one in passes] if self.last else None,
            losses=losses,
            return_outputs=False,
        )
        with self.stage._timed("U", 0):
            # the engine divides the gradients of the stage's own modules only
            for coder in self.coders:
                if coder.grad is not None and self.run.microbatches > 1 and self.engine:
                    coder.grad.div_(self.run.microbatches)
            self._share_tied()
            self.shared.after_pass(moment, passes[-1])
            self.shared.after_backward(moment)
            if self.run.grad.outer is None:
                self._clip()
            self.optimizer.step()
            if self.confined is not None:
                self.confined()
            if self.interval == "step":
                self.scheduler.step()
        if self.last:
            self.losses.append(torch.stack([one.detach() for one in losses]).sum() / len(losses))
        self.step += 1
        self.passes += passes[0].of
        self.crossed += len(passes)

    def _share_tied(self) -> None:
        """First and last stage hold the token embeddings; each takes the sum of both gradients,
        head's first.
        """
        if self.tied is None:
            return
        other, mine = (
            self.learner * self.world + (self.world - 1 if self.first else 0),
            self.tied.grad,
        )
        theirs = torch.empty_like(mine)
        # The word that this stage waits must not wait itself, behind what it sends.
        both = [
            dist.P2POp(dist.irecv, theirs, other, self.group),
            dist.P2POp(dist.isend, mine, other, self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        self.tied_bytes += mine.numel() * mine.element_size()
        self.tied.grad = theirs + mine if self.first else mine + theirs

    def _clip(self) -> None:
        """To the norm over all stages' gradients, summed in the simulation's order."""
        if not self.clip:
            return
        norms = torch.zeros(len(self.order), device=self.device)
        for place, name in enumerate(self.order):
            own = self.named.get(name)
            if own is not None and own.grad is not None and not (own is self.tied and self.last):
                norms[place] = torch.linalg.vector_norm(own.grad)
        dist.all_reduce(norms, group=self.group)  # each place has one owner, so nothing is rounded
        factor = (self.clip / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    # Evaluation.

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Scores of validation and test set with compression on and off, at the last stage."""
        clock, totals = time.perf_counter(), {}
        self.shared.before_scoring(self.epoch, 0, compress=True)
        self.body.eval()
        step = self.boundaries.step
        step.training = False
        loaders = self.data.val_dataloader()
        for turn, loader in enumerate(loaders):
            split = "test" if turn == len(loaders) - 1 else "val"
            for number, (x, y, _) in enumerate(loader):
                for modes in scored(self.run.scores_alike(self.epoch)):
                    step.compress = modes[0] == "on"
                    self.scorer.begin([Turn(number, len(y), None)])
                    logits = self.scoring.step(*([laid_out(self.run, x)] if self.first else []))
                    if self.last:
                        with self._precision():
                            add_scores(totals, split, modes, self.kind.score(logits, y))
        self.body.train()
        self.seconds["eval"] += time.perf_counter() - clock
        return {
            f"{key}_{name}": value
            for key, total in totals.items()
            for name, value in self.kind.means(total.tolist()).items()
        }

    def _epoch_ended(self, evaluate: bool) -> str | None:
        """Evaluate and record; returns where the training diverged, if it did."""
        if self.interval == "epoch" and evaluate:
            self.scheduler.step()
        self.shared.epoch_ended(self.epoch)
        due = evaluate and (self.epoch + 1) % self.run.eval_every == 0
        scores = self._evaluate() if due else {}
        mine = {
            "scores": scores,
            "loss": float(self._loss_sum),
            "samples": self._samples,
            "losses": [float(one) for one in self.losses],
            "bytes": sum(
                side.boundary.get_submodule(way).counts.total()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
                for way, side in self.sides.items()
                if side is not None
            ),
        }
        every = gathered(mine)
        ends, error = every[self.world - 1 :: self.world], None  # the learners' last stages
        loss = sum(one["loss"] for one in ends) / max(1, sum(one["samples"] for one in ends))
        if not math.isfinite(loss):
            bad = [where for where in gathered(self.boundaries.non_finite()) if where]
            error = (
                f"{min(bad)[1] if bad else 'non-finite loss'}, epoch {self.epoch + 1}, by step "
                f"{self.step}"
            )
        record = {
            "epoch": self.epoch + 1,
            "step": self.step,
            "train_loss": loss,
            **ends[0]["scores"],
            "bytes": sum(one["bytes"] for one in every),
            "seconds": round(self.seconds["train"], 4),
        }
        if self.speaks:
            losses = [
                sum(step) / len(step) for step in zip(*(one["losses"] for one in ends), strict=True)
            ]
            with open(self.folder.path / "steps.jsonl", "a", encoding="utf-8") as handle:
                handle.write(
                    json.dumps(
                        {"epoch": self.epoch + 1, "losses": losses, "began": self.epoch_began}
                    )
                    + "\n"
                )
            if due and error is None:
                self.folder.append(record)
        return error

    def _progress(self) -> None:
        """The first process says how far it is, for whoever shows it."""
        if self.speaks and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            part = self.folder.path / ".progress"
            part.write_text(
                json.dumps(
                    {
                        "step": self.step,
                        "of": self.wiring.steps or self.run.epochs * len(self.data.train),
                    }
                ),
                encoding="utf-8",
            )
            os.replace(part, self.folder.path / "progress.json")

    _shown = 0.0

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
            "learners": self.shared.state_dict(),
            "exchanged": dict(self.collectives.sent) if self.collectives else {},
            "body": self.body.state_dict(),
            "boundaries": self.boundaries.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "sent": self.stage.sent,
            "framing": self.stage.framing,
            "tied": self.tied_bytes,
        }
        checkpoint.save(state, self.folder.path, f"stage{self.place}", self.epoch)
        gathered(None)  # all have theirs

    def _resume(self) -> None:
        newest = launch.newest(self.folder.path, f"stage{self.place}")
        if newest is None:
            return
        state = torch.load(newest, map_location=self.device, weights_only=True)
        if "crossed" not in state:
            if self.speaks:
                notice(
                    f"pipeline {self.folder.path.name}: its checkpoints are of an earlier "
                    "commsweep: beginning anew"
                )
            return
        self.epoch, self.step, self.passes = state["epoch"], state["step"], state["passes"]
        self.seconds, self.tied_bytes = state["seconds"], state["tied"]
        self.stage.sent, self.stage.framing = state["sent"], state["framing"]
        self.body.load_state_dict(state["body"])
        self.boundaries.load_state_dict(state["boundaries"])
        self.crossed = state["crossed"]
        self.shared.load_state_dict(state["learners"])
        if self.collectives:
            self.collectives.sent.update(state["exchanged"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"].cpu())

    # The row.

    def _row(self, status: str, error: str | None, wall: float) -> Row | None:
        ledgers = gathered(self.boundaries.ledger())
        self.shared.settle()
        state = (
            gathered_tensors(
                {name: one.detach() for name, one in self._owned().items()}, self.group
            )
            if self.keep_weights
            else []
        )
        timing = gathered(
            {"spans": self.stage.spans, "began": self.began, "passages": self.stage.passages},
            self.group,
        )
        told = gathered(
            [[cut, one.model_dump(mode="json")] for cut, one in self.boundaries.links().items()],
            self.group,
        )
        links = [(cut, Links.model_validate(one)) for every in told for cut, one in every]
        evaluations = self.folder.metrics()
        ran = Installed(
            self.run,
            self.model,
            self.body,
            self.data,
            self.optimizer,
            self.clip,
            self.scheduler,
            {**sections(dict(links), self.run.at), **self.shared.installed()},
            self.schedule._n_microbatches,
            self.epoch,
            evaluations[0]["epoch"] if evaluations else self.epoch,
            self.stage.precision,
        )
        every = gathered(ran.record())
        transport = gathered(
            {"sent": self.stage.sent, "framing": self.stage.framing, "tied": self.tied_bytes}
            | ({"exchanged": dict(self.collectives.sent)} if self.collectives else {})
        )
        exchange = self.shared.exchange
        told = gathered(
            exchange and ([layer.place for layer in exchange.layers], exchange.ledger.state())
        )
        if not self.speaks:
            return None
        for cut, one in links:  # both ends of a boundary say the same
            if one != dict(links)[cut]:
                raise RuntimeError(f"the two ends of boundary {cut} have different links")
        nothing_lost(
            self.run,
            *every,
            only=lambda key: status == FINISHED or key not in ("epochs", "eval_every"),
        )
        ledger: dict[str, dict[str, int]] = {}
        for place, (left, right) in enumerate(pairwise(ledgers)):
            # a boundary's activations are sent before it, its gradients behind it
            if (place + 1) % self.world:
                cut = next(cut for cut in left if cut in right)
                own = ledger.setdefault(cut, {})
                for key in left[cut]:
                    own[key] = (
                        own.get(key, 0) + (right if key.startswith("bwd") else left)[cut][key]
                    )
        exchanged = {}
        if exchange is not None:
            whole = Ledger(self.layers, self.run.grad, self.run.grad.learners)
            whole.take(told, self.world)
            exchanged = whole.totals()
        if state:
            torch.save(
                {name: one for part in state for name, one in part.items()},
                self.folder.path / "weights.pt",
            )
        return row(  # pyright: ignore[reportReturnType]
            self.run,
            status,
            error,
            ran=ran if status == FINISHED else None,
            evaluations=evaluations,
            steps=self.step,
            totals={"boundaries": ledger, "gradients": exchanged},
            seconds=self.seconds | {"wall": wall},
            device=self.device,
            tokens=tokens(self.data),
            run_id=run_id(self.run),
            wiring=self.wiring.model_dump(mode="json"),
            inputs=self.inputs,
            transport=transport,
            timing=summary(timing),
            cores=len(os.sched_getaffinity(0)),
        ) | {"id": self.folder.path.name}

    def _owned(self) -> dict[str, Tensor]:
        """Parameters and buffers of this stage by the whole network's names; coders' halves where
        they are used.
        """
        own = {
            name: one for name, one in self.named.items() if name.startswith("model.")
        } | self.buffers
        for way, part in (("fwd", "encoder"), ("bwd", "decoder")):
            side = self.sides[way]
            name = (
                ""
                if side is None
                else f"boundaries.{side.boundary.name.replace('.', '_')}.coder.{part}"
            )
            if name in self.named:
                own[name] = getattr(side.boundary.coder, part)  # pyright: ignore[reportOptionalMemberAccess]
        return own

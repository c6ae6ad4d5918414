"""A run's learners as processes of this machine: one each, the collectives between them.

A process trains as the simulation does, through the same step and exchange; only its collectives
are others. What it hands to them are the serialised payloads of a bucket's layers; what it gets are
all learners', averaged in their order, so losses, scores and weights are the simulation's bit for
bit. Recorded in <store>/learners; many runs of as many learners go through one set of processes,
whose links are reshaped in between. Each process keeps checkpoints of its own beside the row; a
training that ended early goes on from the newest that all have.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep import input_digests
from commsweep.config import Execution, Run, own, run_id
from commsweep.config.execution import Cable, LearnerWiring
from commsweep.config.feedback import sample_keyed
from commsweep.config.links import Link, Links
from commsweep.config.override import parse
from commsweep.config.training import OwnModel
from commsweep.errors import Diverged, UserError
from commsweep.lean_imports import leaving
from commsweep.processes import launcher, supervisor
from commsweep.store import (
    DIVERGED,
    FINISHED,
    POINTS,
    Busy,
    Row,
    RunFolder,
    Store,
    read_json,
    write_json,
)

if TYPE_CHECKING:
    from commsweep.collectives import Processes
    from commsweep.data_parallel.ledger import Ledger
    from commsweep.processes.timing import Steps
    from commsweep.training.run import Parts
    from commsweep.training.step import Task

MODULE = "commsweep.processes.ddp"
MEASURED = "measured"  # status of a run that was ended after `LearnerWiring.steps`
PATIENCE = 300.0
Measurement = tuple[Run, LearnerWiring]


def folder_of(store: Store, run: Run, wiring: LearnerWiring) -> RunFolder:
    """Return where this run over this wiring is recorded: <store>/learners/<id>."""
    return store.learners(launcher.measurement_id(run, wiring))


def execute(
    measurements: Sequence[Measurement],
    store: Store,
    execution: Execution,
    patience: float = PATIENCE,
    done: Callable[[int], object] = lambda n: None,
    keep_weights: bool = False,
    calm: bool = False,
) -> list[Row]:
    """The rows of these runs over these wirings: as recorded, or by executing them now; `done`
    hears how many are new.

    keep_weights: leave the trained network beside the row, as weights.pt. calm: take what is ended
    after some steps again while something else has the machine. Raises UserError when a process
    fails; all others are ended then.
    """
    for run, wiring in measurements:
        check(run, wiring)
    todo = {}
    for run, wiring in measurements:
        folder = folder_of(store, run, wiring)
        if (recorded := folder.row()) is None:
            todo[folder.path.name] = run, wiring
        else:
            input_digests.check(folder, run, recorded, execution)

    def kind(item: tuple[str, Measurement]) -> tuple[int, float]:
        return item[1][0].grad.learners, item[1][1].latency

    before, shaped = 0, any(wiring.bandwidth or wiring.latency for _, wiring in todo.values())
    for (learners, latency), group in groupby(sorted(todo.items(), key=kind), key=kind):
        cells = dict(group)
        folder = RunFolder(store.root / "learners" / ".launch", store.root)
        folder.make()
        with _address(folder):
            launcher.queue(
                folder, cells, execution, patience=patience, keep_weights=keep_weights, calm=calm
            )
            fastest = max(wiring.bandwidth for _, wiring in cells.values())
            launcher.start(
                folder,
                MODULE,
                store.root,
                learners,
                [Cable(bandwidth=fastest, latency=latency)] if shaped else None,
                lambda progress, before=before: done(before + progress["done"]),
                patience,
                "learner",
            )
        before += len(cells)
        done(before)
    rows: list[Row] = []
    for measurement in measurements:
        if row := folder_of(store, *measurement).row():
            rows.append(row)
    if len(rows) < len(measurements):
        raise UserError(
            "the learners ended without a result; what they said is in "
            f"'{store.root}/learners/.launch' (is another commsweep in this folder?)"
        )
    return rows


@contextmanager
def _address(folder: RunFolder) -> Iterator[None]:
    try:
        with folder.locked():
            yield
    except Busy:
        raise UserError(
            f"another process launches learners in store '{folder.root}'; wait for it, or name "
            "another with --store"
        ) from None


def work(store: Store, folder: RunFolder) -> None:
    """A learner's part in all runs of one launch."""
    import torch
    import torch.distributed as dist

    from commsweep.collectives import gathered
    from commsweep.processes import namespaces
    from commsweep.processes.timing import Calm
    from commsweep.training.record import environment

    options = read_json(folder.path / "execution.json")
    patience, keep, repeats = (
        options.pop(option) for option in ("patience", "keep_weights", "calm")
    )
    execution, rank, world = (
        Execution.read(options),
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
    )
    calm = Calm()
    execution = replace(execution, device="cpu", progress=execution.progress and rank == 0)
    supervisor.join(torch.device("cpu"), patience)
    for n, (name, settings, wires) in enumerate(launcher.queued(folder)):
        run, wiring, recorded = parse(settings), LearnerWiring(**wires), store.learners(name)
        if world != run.grad.learners:
            raise UserError(
                f"{world} processes were started for {run.grad.learners} learners; start one a "
                "learner"
            )
        agree(run)
        points = gathered(recorded.points(execution.points) if rank == 0 else 0)[0]
        if rank == 0:
            recorded.make()
            launcher.begin(recorded, run, wiring, environment("cpu") | {"points": points})
            if namespaces.CHAIN in os.environ:
                namespaces.shape(wiring.bandwidth)
        dist.barrier()
        train = partial(
            _train,
            run,
            wiring,
            replace(execution, threads=wiring.threads, points=points),
            recorded,
            keep,
        )
        own_code = own.no_exit(run.model.build) if isinstance(run.model, OwnModel) else None
        with own_code or nullcontext():
            row = calm.measure(train) if repeats and wiring.steps else train()
        if rank == 0:
            recorded.finish({**row, "id": name, "run_id": run_id(run), "wiring": wires})  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
            for left in (
                *recorded.path.glob("learner*.ckpt"),
                *recorded.path.glob(".learner*.part"),
            ):
                left.unlink()
            write_json(folder.path / "progress.json", {"done": n + 1})
    dist.destroy_process_group()


def _train(
    run: Run, wiring: LearnerWiring, execution: Execution, recorded: RunFolder, keep: bool
) -> Row:
    import pytorch_lightning as pl
    import torch.distributed as dist
    from pytorch_lightning.callbacks import Checkpoint

    from commsweep import checkpoint
    from commsweep.collectives import Processes, gathered
    from commsweep.data_parallel.ledger import Ledger
    from commsweep.models.causal_lm import tied_bytes
    from commsweep.processes import namespaces
    from commsweep.processes.timing import Steps
    from commsweep.training.readback import nothing_lost
    from commsweep.training.record import row
    from commsweep.training.run import build, installed, tokens, trainer

    collectives = Processes(ring=run.kfac is not None)
    built = build(run, execution, collectives=collectives, wiring=wiring)
    built.task.gather, exchange = gathered, built.task.components["learners"].exchange
    if len({json.dumps(digests) for digests in gathered(built.inputs)}) > 1:
        raise UserError(
            "the learners loaded different data; name the same with --data-root and --model-root"
        )
    if dist.get_rank() == 0:
        input_digests.keep(recorded, run, execution, built.inputs)
    watch, name, rank = Steps(collectives), f"learner{dist.get_rank()}", dist.get_rank()

    class Noting(Checkpoint):
        """Times, evaluations and checkpoints, which Lightning takes after the task's own end of an
        epoch.
        """

        pace = checkpoint.Pace(execution.checkpoint_every)

        def on_train_batch_start(
            self, trainer: pl.Trainer, task: Any, batch: Any, number: int
        ) -> None:
            watch.begin(task)

        def on_train_batch_end(
            self, trainer: pl.Trainer, task: Any, outputs: Any, batch: Any, number: int
        ) -> None:
            watch.end(task)
            if task.points is not None and task.points.due(task.global_step):
                record = task.point()
                if rank == 0:
                    recorded.append(record, POINTS)

        def on_validation_end(self, trainer: pl.Trainer, task: Any) -> None:
            record = evaluation_of(gathered(task.evaluation()))
            if rank == 0:
                recorded.append(record)

        def on_train_epoch_end(self, trainer: pl.Trainer, task: Any) -> None:
            over = trainer.current_epoch + 1 >= (trainer.max_epochs or 0) or wiring.steps
            if over or not collectives.agree(self.pace.due()):
                return
            with self.pace.taken():
                trainer.save_checkpoint(recorded.path / f"{name}.{trainer.global_step}")
                dist.barrier()  # all have theirs

        def state_dict(self) -> dict[str, Any]:
            return {"sent": dict(collectives.sent), "framing": dict(collectives.framing)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            collectives.sent.update(state_dict["sent"])
            collectives.framing.update(state_dict.get("framing", {}))

    trainer_ = trainer(run, built, [Noting()], execution.progress, steps=wiring.steps)
    status, error = MEASURED if wiring.steps else FINISHED, None
    checkpoint_, before = (
        None if wiring.steps else supervisor.newest(recorded.path, name),
        namespaces.relayed(),
    )
    try:
        trainer_.fit(
            built.task,
            built.data.train,
            [] if wiring.steps else built.data.val_dataloader(),
            ckpt_path=checkpoint_ and str(checkpoint_),
            weights_only=True,
        )
    except Diverged as outcome:
        status, error = DIVERGED, str(outcome)
    relayed, ran = namespaces.relayed() - before, installed(run, built, trainer_)
    if status == FINISHED:
        nothing_lost(run, ran.record())
    reports = _reports(built, collectives, watch, recorded if keep else None)
    timing, transport = _measured(run, reports, built.task)
    if "step_seconds" in timing:
        timing["relayed"] = relayed / len(watch.steps)
    ledger = Ledger(exchange.layers, run.grad, run.grad.learners)
    ledger.take(
        [(list(range(len(exchange.layers))), report["ledger"]) for report in reports], stages=1
    )
    totals = totals_of([report["totals"] for report in reports], ledger)
    return row(
        run,
        status,
        error,
        ran=ran if status == FINISHED else None,
        evaluations=recorded.metrics(),
        steps=trainer_.global_step,
        totals=totals,
        seconds=built.task.seconds,
        device=built.device,
        tokens=tokens(built.data),
        tied=tied_bytes(run, built.task.model),
        transport=transport,
        weights=reports[0]["digest"],
        inputs=built.inputs,
        timing=timing,
        cores=len(os.sched_getaffinity(0)),
        **({"points": built.task.points.plan} if built.task.points else {}),
    )


def _reports(
    built: Parts, collectives: Processes, watch: Steps, keep: RunFolder | None
) -> list[dict[str, Any]]:
    """Return what each learner's process has to say at the end: bytes, digest of its weights,
    durations of steps, totals and ledger. keep: where the first one leaves its weights.

    Raises RuntimeError where the learners have different weights.
    """
    import torch
    import torch.distributed as dist

    from commsweep.collectives import gathered

    learners = built.task.components["learners"]
    learners.settle()
    state = {name: tensor.detach().cpu() for name, tensor in built.task.model.state_dict().items()}
    reports = gathered(
        {
            "sent": dict(collectives.sent),
            "framing": dict(collectives.framing),
            "digest": digest(state),
            "steps": watch.steps,
            "totals": built.task.totals(),
            "ledger": learners.exchange.ledger.state(),
        }
    )
    if len({report["digest"] for report in reports}) > 1:
        raise RuntimeError("the learners ended with different weights")
    if keep is not None and dist.get_rank() == 0:
        torch.save(state, keep.path / "weights.pt")
    return reports


def _measured(
    run: Run, reports: list[dict[str, Any]], task: Task
) -> tuple[dict[str, Any], list[dict[str, int]]]:
    """Return the durations of steps, and the bytes that each learner sent by purpose."""
    from commsweep.processes.timing import Steps

    timing = Steps.summary([report["steps"] for report in reports], task)
    transport = [report["sent"] for report in reports]
    if run.kfac is None:
        return timing, transport
    # which factors share a message, and its framing, follows from measured times
    timing["framing"] = [report["framing"].get("factors", 0) for report in reports]
    for index, framing in enumerate(timing["framing"]):
        factors = transport[index].get("factors", 0) - framing
        transport[index] = transport[index] | {"factors": factors}
    return timing, transport


def evaluation_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of an evaluation, given that of every learner: bytes are added up, rates are of
    all learners' bytes; the rest is the same at all of them.
    """
    record = dict(reports[0])
    if "bytes" in record:
        record["bytes"] = sum(report["bytes"] for report in reports)
    if "rates" in record:
        record["rates"] = {
            name: len(reports) / sum(1 / report["rates"][name] for report in reports)
            for name in record["rates"]
        }
    return record


def totals_of(reports: list[dict[str, Any]], ledger: Ledger) -> dict[str, Any]:
    """Return what the row of a run says of its messages, given that of every learner, and all
    learners' ledger of gradients.

    Bytes at boundaries are added up; bytes that a learner sends a step are means over the learners.
    """
    totals = dict(reports[0])
    totals["boundaries"] = {
        name: {key: sum(report["boundaries"][name][key] for report in reports) for key in sent}
        for name, sent in totals["boundaries"].items()
    }
    merged = ledger.totals()
    hops = totals["gradients"].keys() - merged.keys()
    totals["gradients"] = merged | {
        hop: _mean(report["gradients"][hop] for report in reports) for hop in sorted(hops)
    }
    if "kfac" in totals:
        totals["kfac"] = {
            key: _mean(report["kfac"][key] for report in reports)
            if key.startswith("factors_")
            else value
            for key, value in totals["kfac"].items()
        }
    return totals


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def digest(state: dict[str, Any]) -> str:
    """Return what stands for a network's weights."""
    joined = sha256()
    for tensor in state.values():
        joined.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return joined.hexdigest()


def agree(run: Run) -> None:
    """Raise UserError unless all processes execute the same run."""
    from commsweep.collectives import gathered

    ids = gathered(run_id(run))
    if len(set(ids)) > 1:
        raise UserError(
            f"the learners' configurations differ (runs {', '.join(map(str, ids))}); start all "
            "with the same settings"
        )


def check(run: Run, wiring: LearnerWiring | None = None) -> None:
    """Raise UserError for runs that processes would train otherwise than the simulation does, or
    not at all.
    """
    if run.grad.learners < 2:
        raise UserError(
            "one learner has nobody to exchange gradients with: set grad.learners=2 or more"
        )
    check_memories(run)
    if run.recalibrate is not None:
        raise UserError(
            f"recalibrate={run.recalibrate} is an evaluation of simulated runs: set "
            "recalibrate=null, or use commsweep run"
        )
    if wiring is not None and wiring.placement == "shared":
        from commsweep.second_order.placement import shared

        try:
            shared(1, run.grad.learners, wiring.fraction)
        except ValueError as error:
            raise UserError(f"--fraction: {error}") from None


def check_memories(run: Run) -> None:
    """Raise UserError for what boundaries would remember of rows that other learners had before."""
    links_by_prefix = {"": Links(fwd=run.fwd, bwd=run.bwd)} | {
        f"at.{cut}.": links for cut, links in run.at.items()
    }
    for prefix, links in links_by_prefix.items():
        for side in ("fwd", "bwd"):
            link: Link = getattr(links, side)
            if sample_keyed(link.feedback):
                raise UserError(
                    f"{prefix}{side}.feedback.kind={link.feedback.kind} remembers samples, which "
                    "come to another learner each epoch, and processes do not share memories: "
                    "simulate it with commsweep run, or key it by slot"
                )
            if getattr(link.compressor, "warm", False):
                raise UserError(
                    f"{prefix}{side}.compressor.warm=true begins from the last message of all "
                    "learners, which processes do not share: simulate it with commsweep run, or "
                    "set warm=false"
                )
            if link.compressor.kind == "mean":
                raise UserError(
                    f"{prefix}{side}.compressor.kind=mean follows the messages of all learners, "
                    "which processes do not share: simulate it with commsweep run, or use zero"
                )


def main(root: str) -> int:
    """A learner that `execute` has started."""
    store = Store(Path(root))
    folder = RunFolder(store.root / "learners" / ".launch", store.root)
    return supervisor.worker(folder, lambda: work(store, folder), "learner")


if __name__ == "__main__":
    sys.exit(leaving(lambda: main(sys.argv[1])))

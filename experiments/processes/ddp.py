"""The same learners as processes of this machine: one each, the collectives between them.

A process trains as the simulation does, through the same step and exchange; only its collectives are others. What it
hands to them are the serialised payloads of a bucket's layers; what it gets are all learners', averaged in their order,
so losses, scores and weights are the simulation's bit for bit.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from commsweep.experiments.config import Execution, Link, Links, Run, run_id
from commsweep.experiments.errors import Diverged, UserError
from commsweep.experiments.feedback.boundaries import sample_keyed
from commsweep.experiments.processes.launch import free_port
from commsweep.experiments.store import DIVERGED, FINISHED, Row

PATIENCE = timedelta(minutes=5)


def execute(run: Run, execution: Execution) -> tuple[Row, dict[str, Any]]:
    """Train with one process a learner: (rank 0's row, with `transport` of all; the trained model's weights, NumPy).

    Raises UserError when a process fails; all others are ended then.
    """
    import multiprocessing as mp
    from multiprocessing.connection import wait

    check(run)
    context = mp.get_context("spawn")
    port, pipes, processes = free_port(), [], []
    for rank in range(run.grad.learners):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=learn, args=(rank, run, execution, port, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    answers: dict[int, dict[str, Any]] = {}
    try:
        left = list(pipes)
        while left:
            for pipe in wait(left):
                left.remove(pipe)
                try:
                    answer = pipe.recv()
                except EOFError:
                    rank = pipes.index(pipe)
                    processes[rank].join()
                    raise UserError(f"learner {rank} ended with exit code {processes[rank].exitcode}; all others were "
                                    "ended") from None
                if "error" in answer:
                    raise UserError(answer["error"])
                answers[answer["rank"]] = answer
    finally:
        for process in processes:
            if process.is_alive() and len(answers) < len(processes):
                process.kill()
            process.join()
    if len({answer["digest"] for answer in answers.values()}) > 1:
        raise RuntimeError("the learners ended with different weights")
    row: Row = answers[0]["row"]
    row["transport"] = [answers[rank]["sent"] for rank in sorted(answers)]
    return row, answers[0]["weights"]


def learn(rank: int, run: Run, execution: Execution, port: int, answer: Connection) -> None:
    """One learner's process: train, and send the outcome through `answer`."""
    execution = replace(execution, progress=execution.progress and rank == 0,
                        cores=max(1, len(os.sched_getaffinity(0)) // run.grad.learners))
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                                world_size=run.grad.learners, timeout=PATIENCE)
        _agree(run)
        answer.send({"rank": rank} | _train(run, execution, rank))
    except UserError as error:
        answer.send({"rank": rank, "error": str(error)})
    finally:
        answer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(run: Run, execution: Execution, rank: int) -> dict[str, Any]:
    import pytorch_lightning as pl

    from commsweep.experiments.collectives import Processes
    from commsweep.experiments.training.readback import nothing_lost
    from commsweep.experiments.training.record import row
    from commsweep.experiments.training.run import build, installed, tokens, trainer

    collectives = Processes()
    parts = build(run, execution, collectives=collectives)
    evaluations: list[dict[str, Any]] = []

    class Noting(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, task: Any) -> None:
            evaluations.append(task.evaluation())

    made = trainer(run, parts, [Noting()], execution.progress)
    status, error = FINISHED, None
    try:
        made.fit(parts.task, parts.data.train, parts.data.val_dataloader())
    except Diverged as outcome:
        status, error = DIVERGED, str(outcome)
    ran = installed(run, parts, made)
    if status == FINISHED:
        nothing_lost(run, ran.record())
    weights = {name: one.detach().cpu().contiguous().numpy() for name, one in parts.task.model.state_dict().items()}
    return {
        "row": row(run, status, error, ran=ran, evaluations=evaluations, steps=made.global_step,
                   totals=parts.task.totals(), seconds=parts.task.seconds, device=parts.device,
                   tokens=tokens(parts.data)),
        "sent": dict(collectives.sent), "weights": weights if rank == 0 else None,
        "digest": sha256(b"".join(one.tobytes() for one in weights.values())).hexdigest()}


def _agree(run: Run) -> None:
    """Raise UserError unless all processes execute the same run."""
    ids: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ids, run_id(run))
    if len(set(ids)) > 1:
        raise UserError(f"the learners' configurations differ (runs {', '.join(map(str, ids))}); start all with the "
                        "same settings")


def check(run: Run) -> None:
    """Raise UserError for runs that processes would train otherwise than the simulation does."""
    if run.grad.learners < 2:
        raise UserError("one learner has nobody to exchange gradients with: set grad.learners=2 or more")
    places = {"": Links(fwd=run.fwd, bwd=run.bwd)} | {f"at.{cut}.": links for cut, links in run.at.items()}
    for place, links in places.items():
        for side in ("fwd", "bwd"):
            link: Link = getattr(links, side)
            if sample_keyed(link.feedback):
                raise UserError(f"{place}{side}.feedback.kind={link.feedback.kind} remembers samples, which come to "
                                "another learner each epoch, and processes do not share memories: simulate it with "
                                "commsweep run, or key it by slot")
            if getattr(link.compressor, "warm", False):
                raise UserError(f"{place}{side}.compressor.warm=true begins from the last message of all learners, "
                                "which processes do not share: simulate it with commsweep run, or set warm=false")

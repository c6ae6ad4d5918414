"""The outcome of a real pipeline: what every stage says of its part becomes one row."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch

from commsweep.boundary.insert import sections
from commsweep.collectives import gathered, gathered_tensors
from commsweep.config import run_id
from commsweep.config.links import Links
from commsweep.processes.timing import summary
from commsweep.processes.trainer import Trainer
from commsweep.store import FINISHED, Row
from commsweep.training.readback import Installed, nothing_lost
from commsweep.training.record import row
from commsweep.training.run import tokens


def trained(trainer: Trainer) -> Row | None:
    """Train, and return the row at process 0; None elsewhere. All processes must call it.

    Raises RuntimeError when the ends of a boundary differ, UserError when a setting was lost.
    """
    status, error, wall = trainer.train()
    network, group, stage = trainer.network, trainer.group, trainer.stage
    ledgers = gathered(network.boundaries.ledger())
    trainer.learners.settle()
    if trainer.keep_weights:
        _save_weights(trainer)
    timing = gathered(
        {"spans": stage.spans, "began": trainer.began, "passages": stage.passages}, group
    )
    links = _links(trainer)
    evaluations = trainer.folder.metrics()
    ran = Installed(
        trainer.run,
        network.model,
        network.body,
        trainer.data,
        trainer.optimizer,
        trainer.clip,
        trainer.scheduler,
        {
            **sections(links, trainer.run.at),
            **trainer.learners.installed(),
            **({"delay": trainer.continuous.versions.spec} if trainer.continuous else {}),
        },
        trainer.schedule._n_microbatches,
        trainer.epoch,
        evaluations[0]["epoch"] if evaluations else trainer.epoch,
        stage.precision,
    )
    records = gathered(ran.record())
    transport = gathered(_transport(trainer))
    gradients = {} if trainer.learners.exchange is None else trainer.ledger().totals()
    if not trainer.records:
        return None
    nothing_lost(
        trainer.run,
        *records,
        only=lambda key: status == FINISHED or key not in ("epochs", "eval_every"),
    )
    return row(  # pyright: ignore[reportReturnType]
        trainer.run,
        status,
        error,
        ran=ran if status == FINISHED else None,
        evaluations=evaluations,
        steps=trainer.step,
        totals={"boundaries": _bytes(ledgers, trainer.world), "gradients": gradients},
        seconds=trainer.seconds | {"wall": wall},
        device=trainer.device,
        tokens=tokens(trainer.data),
        tied=sum(sent["tied"] for sent in transport) // max(trainer.step, 1),
        run_id=run_id(trainer.run),
        wiring=trainer.wiring.model_dump(mode="json"),
        inputs=network.inputs,
        transport=transport,
        timing=summary(timing),
        cores=len(os.sched_getaffinity(0)),
        **({"points": trainer.points.plan} if trainer.points else {}),
    ) | {"id": trainer.folder.path.name}


def _save_weights(trainer: Trainer) -> None:
    """The trained network of the first pipeline, as weights.pt."""
    mine = {name: tensor.detach() for name, tensor in trainer.network.owned().items()}
    states = gathered_tensors(mine, trainer.group)
    if trainer.records:
        weights = {name: tensor for state in states for name, tensor in state.items()}
        torch.save(weights, trainer.folder.path / "weights.pt")


def _links(trainer: Trainer) -> dict[str, Links]:
    """The settings of every boundary, read back from both of its ends, which must agree."""
    mine = [
        [cut, links.model_dump(mode="json")]
        for cut, links in trainer.network.boundaries.links().items()
    ]
    links_: dict[str, Links] = {}
    for links_here in gathered(mine, trainer.group):
        for cut, settings in links_here:
            links = Links.model_validate(settings)
            if links_.setdefault(cut, links) != links:
                raise RuntimeError(f"the two ends of boundary {cut} have different links")
    return links_


def _transport(trainer: Trainer) -> dict[str, Any]:
    """Bytes that this process has handed to send."""
    sent: dict[str, Any] = {
        "sent": trainer.stage.sent,
        "framing": trainer.stage.framing,
        "tied": trainer.tied_bytes,
    }
    if trainer.collectives:
        sent["exchanged"] = dict(trainer.collectives.sent)
    return sent


def _bytes(ledgers: list[dict[str, dict[str, int]]], world: int) -> dict[str, dict[str, int]]:
    """The bytes of every boundary over all pipelines, given each process's account: activations
    are sent before a boundary, gradients behind it.
    """
    out: dict[str, dict[str, int]] = {}
    for index, (left, right) in enumerate(pairwise(ledgers)):
        if (index + 1) % world == 0:
            continue  # the last stage of a pipeline and the first of the next
        cut = next(cut for cut in left if cut in right)
        total = out.setdefault(cut, {})
        for key in left[cut]:
            sender = right if key.startswith("bwd") else left
            total[key] = total.get(key, 0) + sender[cut][key]
    return out

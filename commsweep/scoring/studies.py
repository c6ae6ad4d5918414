"""Recorded trainings that a forecast of worth kept is fitted to, and what shadow mode measures of
each one's dense training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytorch_lightning as pl
from torch import nn

from commsweep.config import Execution, Run, override, run_id
from commsweep.config.compressors.spelling import spelled
from commsweep.errors import UserError
from commsweep.integrations.lightning import ShadowCallback
from commsweep.reporting.worth import Kept, of_settings
from commsweep.scoring import board as boards
from commsweep.scoring.samples import MESSAGES
from commsweep.scoring.training import CONTROL, Scores, Setup, worth_kept
from commsweep.training.run import Parts, build, trainer

LOOKS = 20  # at a training
SEED = 99  # of the training that is looked at; none is scored that has it
ENDS = ("none", CONTROL, "mean")  # dense, and what a codec is compared with
REMOVED = {
    f"{side}.{section}.kind": "none"
    for side in ("fwd", "bwd")
    for section in ("compressor", "feedback")
}


@dataclass
class Study:
    """A dense training, and the worth that codecs keep in it.

    watched: the dense training that shadow mode looks at; of learners, one learner's. worths:
    what was kept, by codec.
    """

    name: str
    role: str
    watched: Run
    worths: dict[str, Kept] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """Return the kind of message, as shadow mode has it."""
        return MESSAGES[self.role]

    @property
    def architecture(self) -> str:
        """Return the kind of network: "resnet_small", or an own one's function."""
        model = self.watched.model
        return model.build.split(":")[-1] if model.name == "own" else model.name


def of_setups(
    setups: Iterable[Setup], codecs: Sequence[str], count: int, scores: Scores, name: str
) -> list[Study]:
    """Return the studies of trainings with codecs, where dense, control and codec are recorded."""
    studies = []
    for setup in setups:
        watched = setup.control if setup.role == "learners" else setup.dense
        study = Study(f"{name}: {setup.name}", setup.role, watched)
        for codec in codecs:
            worth = worth_kept(setup, setup.coded(codec), count, scores)
            if worth is not None:
                study.worths[codec] = worth.kept
        studies.append(study)
    return studies


def of_board(folder: Path, count: int = 3) -> list[Study]:
    """Return the studies of a board: its shipped codecs without feedback."""
    board = boards.read(folder)
    studies = []
    for role in MESSAGES:
        codecs = []
        for entry in board.of_role(role):
            kind = (spelled(entry.codec) or {}).get("kind")
            if entry.feedback == "none" and kind != "own" and boards.measurable(entry.codec):
                codecs.append(entry.codec)
        setups = boards.trainings(role, boards.SHORT)
        studies += of_setups(setups, codecs, count, board.score_of, "board")
    return studies


def of_sweep(name: str, runs: Sequence[Run], rows: Path) -> list[Study]:
    """Return the studies of a sweep at boundaries, one side of which is compressed, from its rows.
    Raises UserError where the file is missing.
    """
    if not rows.is_file():
        raise UserError(f"sweep {name}: no file '{rows}'; launch the sweep and record its rows")
    frame = pd.read_csv(rows, dtype={"id": str}, low_memory=False)
    worths = of_settings(frame)
    setting_of = dict(zip(frame["id"], frame["setting_id"], strict=True))
    numbers: dict[str, int] = {}  # of the dense trainings
    studies: dict[tuple[int, str], Study] = {}
    for run in runs:
        dense = override(run, REMOVED)
        number = numbers.setdefault(run_id(dense.model_copy(update={"seed": 0})), len(numbers) + 1)
        for role, side, other_side in (("activations", "fwd", "bwd"), ("gradients", "bwd", "fwd")):
            compressor = getattr(run, side).compressor
            worth = worths.get(setting_of.get(run_id(run), ""))
            if worth is None or compressor.kind in ENDS or not _plain(run, side, other_side):
                continue
            study = Study(f"{name} {number}", role, dense)
            studies.setdefault((number, role), study).worths[in_a_word(compressor)] = worth
    return [studies[key] for key in sorted(studies)]


def _plain(run: Run, side: str, other_side: str) -> bool:
    """Return whether a run compresses no more than one side, without a memory."""
    link, opposite = getattr(run, side), getattr(run, other_side)
    return opposite.compressor.kind == "none" and link.feedback.kind == "none"


def in_a_word(compressor: Any) -> str:
    """Return a codec's settings in the short spelling, without defaults: "topk,ratio=0.1"."""
    settings = compressor.model_dump(exclude_defaults=True) | {"kind": compressor.kind}
    kind = settings.pop("kind")
    return ",".join([kind, *(f"{name}={value}" for name, value in settings.items())])


class _Watched(ShadowCallback):
    """Looks at a dense training's messages at its modules; writes no report."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.begin(cast("nn.Module", module.model), counts_forwards=False)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.end(writes=False)


def watch(study: Study, codecs: Sequence[str], settings: Execution) -> list[dict[str, Any]]:
    """Train a study's dense network with codecs in shadow, and return a row of means a codec."""
    run = study.watched.model_copy(update={"seed": SEED})
    built = build(run, settings)
    steps = len(built.data.train) * run.epochs
    patterns = _watched_at(built, study.role)
    interval = max(1, steps // LOOKS)
    watched = _Watched(list(codecs), patterns, interval)
    training = trainer(run, built, [watched], False)
    training.fit(built.task, built.data.train, built.data.val_dataloader())
    assert watched.shadow is not None
    rows = [row for row in watched.shadow.summary() if row["message"] == study.message]
    fixed = {"study": study.name, "architecture": study.architecture}
    return [fixed | row for row in rows]


def _watched_at(built: Parts, role: str) -> dict[str, str]:
    """Return where shadow mode looks: at the cuts, or at all gradients of matrices."""
    if role == "learners":
        return {"*": "gradients"}
    names = {id(module): name for name, module in built.task.model.named_modules()}
    return {names[id(module)]: "activations" for module in built.modules.values()}

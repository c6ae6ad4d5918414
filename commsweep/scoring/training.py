"""The trainings of a score card: small ones, in which a message is worth something."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commsweep.config import Run, override, run_id
from commsweep.launching.codecs import CONTROL, SIDES, changes
from commsweep.launching.grid import seeds
from commsweep.registry import preset
from commsweep.reporting.claim import Effect
from commsweep.reporting.results import CHANCE, nats_of_nothing
from commsweep.reporting.worth import LOSS, Kept, share_kept
from commsweep.store import DIVERGED, FINISHED, Row, Store

TEXT_WIDTH, IMAGE_WIDTH = 64, 8  # of the short trainings
SEED = 50  # the first of the fixed seeds
ENDED = (FINISHED, DIVERGED)  # what a run with a score has as its status
# So few samples that a learner alone has too few.
FEW_IMAGES = {"data.train_size": 400, "epochs": 30, "schedule.t_max": 30, "eval_every": 30}
# A learner alone: a fourth of every batch, and of the samples.
ALONE = {
    "text": {"data.batch_size": 4, "data.train_blocks": 1600},
    "images": {"data.batch_size": 16, "data.train_size": 100},
}
EVERYWHERE = "zeros arrive instead of every message"  # the floor at boundaries
AVERAGED = {
    "grad.outer.interval": 16,
    "grad.outer.rate": 1.0,
    "grad.outer.momentum": 0.0,
    "grad.outer.nesterov": False,
}


@dataclass(frozen=True)
class Setup:
    """A training that a codec is put into.

    control: the same one in which nothing travels; `floor` says what that is. without: the test
    loss that is reached without any message, by letter frequencies or by guessing, as `ignorant`
    says; None where it is not known. Scores are test losses, which have no grid as accuracies have.
    """

    role: str
    name: str
    dense: Run
    control: Run
    floor: str
    without: float | None
    ignorant: str

    def coded(self, codec: str, feedback: str = "none") -> Run:
        """Return the training with a codec. Raises UserError where they do not go together."""
        return override(self.dense, changes(self.role, codec, feedback))


@dataclass(frozen=True)
class Outcome:
    """The worth that a training keeps of its messages with a codec, and with its rival.

    lead: points of worth that the codec keeps beyond its rival, a seed each, as an effect that is
    adjusted for the number of comparisons of the card; None without a rival.
    """

    setup: Setup
    codec: str
    rival: str
    kept: Kept
    rival_kept: Kept | None
    share: float  # of the dense bytes
    rival_share: float | None
    lead: Effect | None


def setups(role: str, scale: int = 1, width: int = 1) -> list[Setup]:
    """Return the trainings of a role: a nano GPT-2 at 400 steps and a small ResNet on digits, of
    `scale` times the steps and `width` times the width.
    """
    text = override(preset("sotu_nano"), {"data.train_blocks": 6400 * scale})
    images = preset("digits")
    if width > 1:
        text = override(text, {"model.width": TEXT_WIDTH * width})
        images = override(images, {"model.width": IMAGE_WIDTH * width})
    if role in ("learners", "pseudo-gradients"):
        images = override(images, {**FEW_IMAGES, **_longer(FEW_IMAGES, scale)})
    else:
        epochs = images.epochs * scale
        images = override(images, {"epochs": epochs, "schedule.t_max": epochs})
    trainings = []
    for kind, base in (("text", text), ("images", images)):
        dense, control, floor = _ends(role, kind, base, scale)
        name = f"nano GPT-2, {400 * scale} steps" if kind == "text" else "small ResNet on digits"
        name += f", width x{width}" if width > 1 else ""
        trainings.append(Setup(role, name, dense, control, floor, *_without(dense)))
    return trainings


def at_boundaries(role: str, name: str, base: Run) -> Setup:
    """Return a training of one's own as a set-up whose boundaries are compressed. Raises UserError
    where it has none.
    """
    control = override(base, changes(role, CONTROL))
    return Setup(role, name, base, control, EVERYWHERE, *_without(base))


def _without(run: Run) -> tuple[float | None, str]:
    """The test loss of a training that receives no message, and what that knows."""
    tokenizer = getattr(run.data, "tokenizer", None)
    if tokenizer is None:
        return -math.log(CHANCE), "guessing"
    nats = nats_of_nothing(run.data.name, tokenizer, getattr(run.model, "weights", None))
    name = "letter frequencies" if tokenizer == "bytes" else "guessing"
    return (None if math.isnan(nats) else nats), name


def _longer(changes: dict[str, Any], scale: int) -> dict[str, Any]:
    return {key: changes[key] * scale for key in ("epochs", "schedule.t_max", "eval_every")}


def _ends(role: str, kind: str, base: Run, scale: int) -> tuple[Run, Run, str]:
    """Return (dense, control, what the control is) of a training."""
    if role in ("activations", "gradients"):
        control = override(base, changes(role, CONTROL))
        return base, control, EVERYWHERE
    lonely = dict(ALONE[kind])
    if kind == "text":
        lonely["data.train_blocks"] *= scale
    dense = {"grad.learners": 4} | (AVERAGED if role == "pseudo-gradients" else {})
    floor = "a learner alone, with a fourth of the samples"
    return override(base, dense), override(base, lonely), floor


def runs_of(setup: Setup, codecs: Sequence[str], feedback: str, count: int) -> list[Run]:
    """Return dense, the control and codecs, a run a seed. Raises UserError as `coded` does."""
    settings = [setup.dense, setup.control, *(setup.coded(codec, feedback) for codec in codecs)]
    return seeds(settings, count, SEED)


@dataclass(frozen=True)
class Score:
    """The result of a training: its test loss, and the bytes of its messages: a learner's a step,
    or the share of the dense ones at boundaries. error, bias: means over boundaries, where they
    were measured.
    """

    loss: float
    sent: float
    diverged: bool = False
    error: float | None = None
    bias: float | None = None


# The score of a training's run; None where it has not ended.
Scores = Callable[[Setup, Run], Score | None]


def recorded(store: Store) -> Scores:
    """Return a lookup of the runs of a store."""

    def look_up(setup: Setup, run: Run) -> Score | None:
        row = store.folder(run_id(run)).row()
        return score(setup, row) if row is not None and row["status"] in ENDED else None

    return look_up


def outcome(
    setup: Setup, codec: str, rival: str, feedback: str, count: int, scores: Scores
) -> Outcome | None:
    """Return what a codec keeps, by the recorded runs; None while there are none of three kinds."""
    run, rival_run = setup.coded(codec, feedback), setup.coded(rival)
    worth = worth_kept(setup, run, count, scores)
    if worth is None:
        return None
    rival_worth = worth_kept(setup, rival_run, count, scores)
    return Outcome(
        setup,
        codec,
        rival,
        worth.kept,
        rival_worth.kept if rival_worth else None,
        worth.share,
        rival_worth.share if rival_worth else None,
        lead(setup, f"{codec} over {rival}", run, rival_run, count, scores),
    )


@dataclass(frozen=True)
class Worth:
    """The worth that a setting keeps, and its share of the dense bytes."""

    kept: Kept
    share: float


def worth_kept(setup: Setup, run: Run, count: int, scores: Scores) -> Worth | None:
    """Return what a setting keeps over the seeds that dense and control have, too; None without
    one.
    """
    tables = [_by_seed(setup, cells, count, scores) for cells in (setup.control, run, setup.dense)]
    shared = [seed for seed in tables[1] if seed in tables[0] and seed in tables[2]]
    if not shared:
        return None
    controls, losses, denses = ([table[seed].loss for seed in shared] for table in tables)
    share = tables[1][shared[0]].sent / (tables[2][shared[0]].sent or 1.0)
    diverged = sum(tables[1][seed].diverged for seed in shared)
    return Worth(share_kept(controls, losses, denses, setup.without, diverged), share)


def lead(
    setup: Setup, name: str, run: Run, rival: Run, count: int, scores: Scores
) -> Effect | None:
    """Return the points of worth that a setting keeps beyond another one, a seed each; None where
    no seed has both, or where nothing sent is as good as dense.
    """
    settings = (setup.control, setup.dense, run, rival)
    tables = [_by_seed(setup, setting, count, scores) for setting in settings]
    shared = [seed for seed in tables[0] if all(seed in table for table in tables)]
    if not shared:
        return None
    controls, denses, losses, rivals = ([table[seed].loss for seed in shared] for table in tables)
    floor = float(np.mean(controls))
    if setup.without is not None:
        floor = min(floor, setup.without)
    worth = floor - float(np.mean(denses))
    if worth <= 0:
        return None
    values = [100 * float(gain) / worth for gain in np.subtract(rivals, losses)]
    return Effect(name, above=0.0, values=values, by=shared, digits=0)


def _by_seed(setup: Setup, run: Run, count: int, scores: Scores) -> dict[int, Score]:
    scores_by_seed: dict[int, Score] = {}
    for cell in seeds([run], count, SEED):
        result = scores(setup, cell)
        if result is not None:
            scores_by_seed[cell.seed] = result
    return scores_by_seed


def score(setup: Setup, row: Row) -> Score:
    """Return the score of a row; a diverged run counts as one that has learned nothing."""
    return Score(_loss(setup, row), _sent(setup, row), row["status"] != FINISHED)


def _loss(setup: Setup, row: Row) -> float:
    if row["status"] == FINISHED:
        return float(row["metrics"][LOSS])
    return math.nan if setup.without is None else setup.without


def _sent(setup: Setup, row: Row) -> float:
    """Return what the role's messages had: bytes of a learner a step, or the share of the dense
    bytes at all boundaries, which a run that ended early has, too.
    """
    side = SIDES[setup.role]
    if side == "grad":
        return float(row["gradients"].get("up", 0.0)) if "gradients" in row else 0.0
    boundaries = row.get("boundaries", {}).values()
    dense = sum(counts[f"{side}_dense"] for counts in boundaries)
    return sum(counts[side] for counts in boundaries) / max(1, dense)

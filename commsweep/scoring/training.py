"""The trainings of a score card: small ones, in which a message is worth something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commsweep.config import Run, override, run_id
from commsweep.launching.grid import seeds
from commsweep.registry import preset
from commsweep.reporting.claim import Effect
from commsweep.reporting.results import LETTERS
from commsweep.reporting.worth import Kept, share_kept
from commsweep.store import FINISHED, Row, Store

SEED = 50  # the first of the fixed seeds
CONTROL = "zero"
SIDES = {"activations": "fwd", "gradients": "bwd", "learners": "grad", "pseudo-gradients": "grad"}
# So few samples that a learner alone has too few.
FEW_IMAGES = {"data.train_size": 400, "epochs": 30, "schedule.t_max": 30, "eval_every": 30}
# A learner alone: a fourth of every batch, and of the samples.
ALONE = {
    "text": {"data.batch_size": 4, "data.train_blocks": 1600},
    "images": {"data.batch_size": 16, "data.train_size": 100},
}
AVERAGED = {
    "grad.outer.interval": 16,
    "grad.outer.rate": 1.0,
    "grad.outer.momentum": 0.0,
    "grad.outer.nesterov": False,
}


@dataclass(frozen=True)
class Setup:
    """A training that a codec is put into.

    control: the same one in which nothing travels; `floor` says what that is. unit: of a score,
    and the loss is minus the score.
    """

    role: str
    name: str
    dense: Run
    control: Run
    floor: str
    metric: str
    unit: str

    def coded(self, codec: str, feedback: str = "none") -> Run:
        """Return the training with a codec. Raises UserError where they do not go together."""
        return override(self.dense, _changes(self.role, codec, feedback))


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


def setups(role: str, scale: int = 1) -> list[Setup]:
    """Return the trainings of a role: a nano GPT-2 at 400 steps and a small ResNet on digits, both
    times `scale`.
    """
    text = override(preset("sotu_nano"), {"data.train_blocks": 6400 * scale})
    images = preset("digits")
    if role in ("learners", "pseudo-gradients"):
        images = override(images, {**FEW_IMAGES, **_longer(FEW_IMAGES, scale)})
    else:
        epochs = images.epochs * scale
        images = override(images, {"epochs": epochs, "schedule.t_max": epochs})
    trainings = []
    for kind, base in (("text", text), ("images", images)):
        dense, control, floor = _ends(role, kind, base, scale)
        is_text = kind == "text"
        name = f"nano GPT-2, {400 * scale} steps" if is_text else "small ResNet on digits"
        metric, unit = ("test_on_loss", "nats") if is_text else ("test_on_acc", "points")
        trainings.append(Setup(role, name, dense, control, floor, metric, unit))
    return trainings


def _longer(changes: dict[str, Any], scale: int) -> dict[str, Any]:
    return {key: changes[key] * scale for key in ("epochs", "schedule.t_max", "eval_every")}


def _ends(role: str, kind: str, base: Run, scale: int) -> tuple[Run, Run, str]:
    """Return (dense, control, what the control is) of a training."""
    if role in ("activations", "gradients"):
        control = override(base, _changes(role, CONTROL, "none"))
        return base, control, "zeros arrive instead of every message"
    lonely = dict(ALONE[kind])
    if kind == "text":
        lonely["data.train_blocks"] *= scale
    dense = {"grad.learners": 4} | (AVERAGED if role == "pseudo-gradients" else {})
    floor = "a learner alone, with a fourth of the samples"
    return override(base, dense), override(base, lonely), floor


def _changes(role: str, codec: str, feedback: str) -> dict[str, Any]:
    side = SIDES[role]
    changes: dict[str, Any] = {f"{side}.compressor": codec}
    if feedback != "none":
        changes[f"{side}.feedback.kind"] = feedback
    if side == "grad":
        changes |= {"grad.exchange": "allgather", "grad.compress_vectors": True}
    return changes


def runs_of(setup: Setup, codecs: Sequence[str], feedback: str, count: int) -> list[Run]:
    """Return dense, the control and codecs, a run a seed. Raises UserError as `coded` does."""
    settings = [setup.dense, setup.control, *(setup.coded(codec, feedback) for codec in codecs)]
    return seeds(settings, count, SEED)


def outcome(
    setup: Setup, codec: str, rival: str, feedback: str, count: int, store: Store
) -> Outcome | None:
    """Return what a codec keeps, by the recorded runs; None while there are none of three kinds."""
    controls = _scores(setup, setup.control, count, store)
    denses = _scores(setup, setup.dense, count, store)
    scores = _scores(setup, setup.coded(codec, feedback), count, store)
    rivals = _scores(setup, setup.coded(rival), count, store)
    both = [seed for seed in scores if seed in controls and seed in denses]
    if not both:
        return None
    dense_bytes = denses[both[0]].sent
    codec_kept = _worth(both, controls, scores, denses)
    all_four = [seed for seed in both if seed in rivals]
    rival_kept, lead = None, None
    if all_four:
        rival_kept = _worth(all_four, controls, rivals, denses)
        worth = np.mean([controls[seed].loss - denses[seed].loss for seed in all_four])
        gains = [rivals[seed].loss - scores[seed].loss for seed in all_four]
        if worth > 0:
            values = [100 * gain / float(worth) for gain in gains]
            lead = Effect(f"{codec} over {rival}", above=0.0, values=values, by=all_four, digits=0)
    return Outcome(
        setup,
        codec,
        rival,
        codec_kept,
        rival_kept,
        scores[both[0]].sent / dense_bytes,
        rivals[all_four[0]].sent / dense_bytes if all_four else None,
        lead,
    )


def _worth(chosen: Sequence[int], *tables: dict[int, _Score]) -> Kept:
    """Return the worth kept over these seeds; tables: of the control, a setting and dense."""
    controls, scores, denses = ([table[seed].loss for seed in chosen] for table in tables)
    return share_kept(controls, scores, denses)


@dataclass(frozen=True)
class _Score:
    loss: float
    sent: float  # bytes, or a share of the dense ones


def _scores(setup: Setup, run: Run, count: int, store: Store) -> dict[int, _Score]:
    """Return the recorded scores of a setting by seed, as losses; a diverged run counts as one that
    has learned nothing.
    """
    scores: dict[int, _Score] = {}
    for cell in seeds([run], count, SEED):
        row = store.folder(run_id(cell)).row()
        if row is not None and row["status"] in (FINISHED, "diverged"):
            scores[cell.seed] = _Score(_loss(setup, row), _sent(setup, row))
    return scores


def _loss(setup: Setup, row: Row) -> float:
    if row["status"] != FINISHED:
        return LETTERS[setup.dense.data.name] if setup.unit == "nats" else -0.1
    value = row["metrics"][setup.metric]
    return value if setup.unit == "nats" else -value


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

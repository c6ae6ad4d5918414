"""A folder of a forecast: the studies it is fitted to, and those that it must foretell unseen.

studies.csv      a study a line: seen (a board, or the rows of a sweep) or unseen (a preset with
                 settings), and where it is
codecs.csv       the codecs of unseen studies whose line names none
table.csv        what shadow mode measured of each seen training, and the worth that was kept
predictions.csv  the same of unseen ones, with the forecast, written before they are trained
rows.csv         one line a training of an unseen study
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from commsweep.config import Execution, override, run_id
from commsweep.errors import UserError
from commsweep.integrations.forecast import Bound, Forecast, features_of
from commsweep.launching.codecs import listed
from commsweep.launching.grid import seeds
from commsweep.registry import preset, sweep
from commsweep.scoring import board as boards
from commsweep.scoring import fit, studies
from commsweep.scoring.board import DENSE, NOTHING, Cell
from commsweep.scoring.studies import Study
from commsweep.scoring.training import SEED, Setup, at_boundaries

STUDIES, CODECS, TABLE, PREDICTIONS = "studies.csv", "codecs.csv", "table.csv", "predictions.csv"
ROWS = boards.ROWS
SEEN, UNSEEN = "seen", "unseen"
ROLES = ("activations", "gradients")  # of unseen studies


@dataclass(frozen=True)
class Line:
    """A line of studies.csv; its codecs are divided by ";", and "" are those of codecs.csv."""

    study: str
    section: str
    source: str
    settings: str
    codecs: str


@dataclass(frozen=True)
class Unseen:
    """A training that is foretold, and the codecs of its messages."""

    setup: Setup
    codecs: list[str]


@dataclass(frozen=True)
class Outcome:
    """An unseen training: what was foretold, and the worth that it kept.

    bound: at its score, None beyond what was seen. answered: whether that was an answer. seeds:
    that it was trained with.
    """

    row: dict[str, Any]
    bound: Bound | None
    answered: bool
    worth: float | None
    seeds: int

    @property
    def held(self) -> bool:
        """Return whether the worth lies within the bound."""
        return (
            self.bound is not None and self.worth is not None and fit.holds(self.bound, self.worth)
        )


def lines(folder: Path) -> list[Line]:
    """Return the studies of a folder. Raises UserError on a mistake in the file."""
    path = folder / STUDIES
    if not path.is_file():
        raise UserError(f"'{folder.absolute()}' is no forecast: it has no file {STUDIES}")
    with open(path, newline="", encoding="utf-8") as handle:
        records = list(csv.DictReader(handle))
    for number, record in enumerate(records, start=2):
        if record.get("part") not in (SEEN, UNSEEN) or not record.get("source"):
            raise UserError(
                f"'{path}', line {number}: a line is study,part,source,settings,codecs with part "
                f"{SEEN} or {UNSEEN}"
            )
    names = ("study", "part", "source", "settings", "codecs")
    return [Line(*(record.get(name) or "" for name in names)) for record in records]


def seen_studies(folder: Path) -> list[Study]:
    """Return the seen studies of a folder. Raises UserError where one cannot be read."""
    studies_: list[Study] = []
    for line in lines(folder):
        if line.section != SEEN:
            continue
        source = folder / line.source
        if source.is_dir():
            studies_ += studies.of_board(source)
        else:
            studies_ += studies.of_sweep(line.study, sweep(line.study), source)
    return [study for study in studies_ if study.worths]


def unseen(folder: Path) -> list[Unseen]:
    """Return the unseen trainings of a folder. Raises UserError on settings that are none."""
    trainings = []
    for line in lines(folder):
        if line.section == UNSEEN:
            base = override(preset(line.source), _changes(line.settings))
            codecs_ = listed(line.codecs) if line.codecs else codecs(folder)
            for role in ROLES:
                trainings.append(Unseen(at_boundaries(role, line.study, base), codecs_))
    return trainings


def _changes(text: str) -> dict[str, Any]:
    """Return settings such as "optim.lr=0.02 model.cuts=a,b"."""
    changes: dict[str, Any] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{STUDIES}: '{word}' is no setting; write name=value")
        changes[name] = value.split(",") if name.endswith(".cuts") else value
    return changes


def codecs(folder: Path) -> list[str]:
    """Return the codecs of unseen studies that name none."""
    path = folder / CODECS
    if not path.is_file():
        raise UserError(f"'{path}': no such file; it names a codec a line, under the head 'codec'")
    with open(path, newline="", encoding="utf-8") as handle:
        return [record["codec"] for record in csv.DictReader(handle)]


def watch(folder: Path, settings: Execution, done: Callable[[], object]) -> None:
    """Look at the dense training of each seen study, and record what was measured beside the worth
    kept. A study whose codecs and dense training are recorded is not trained again.
    """
    path = folder / TABLE
    for study in seen_studies(folder):
        recorded = _read(path)
        name = study.name, study.role, run_id(study.watched)
        measured = _of_study(recorded, name)
        if set(study.worths) - set(measured.get("codec", [])):
            rows = studies.watch(study, list(study.worths), settings)
            measured = pd.DataFrame(
                [{"role": study.role, "watched": name[2]} | row for row in rows]
            )
        rows = [_with_worth(row, study) for row in measured.to_dict("records")]
        unchanged = recorded.drop(_of_study(recorded, name, any_training=True).index)
        _write(path, pd.concat([unchanged, pd.DataFrame([row for row in rows if row])]))
        done()


def _of_study(
    frame: pd.DataFrame, name: tuple[str, str, str], any_training: bool = False
) -> pd.DataFrame:
    if frame.empty:
        return frame
    same = (frame["study"] == name[0]) & (frame["role"] == name[1])
    return frame[same if any_training else same & (frame["watched"] == name[2])]


def _with_worth(row: dict[str, Any], study: Study) -> dict[str, Any]:
    worth = study.worths.get(row["codec"])
    if worth is None:
        return {}
    ends = {"worth_low": worth.low, "worth_high": worth.high}
    return row | {"worth": worth.percent, **ends, "n": worth.n}


def table(folder: Path) -> pd.DataFrame:
    """Return the seen trainings. Raises UserError where nothing was measured."""
    frame = _read(folder / TABLE)
    if frame.empty:
        raise UserError(
            f"'{folder.absolute()}' has no {TABLE}; measure the seen trainings with --watch"
        )
    return frame.assign(distance=1 - frame["cosine"])


def predict(
    folder: Path,
    forecasts: dict[str, Forecast],
    commit: str,
    settings: Execution,
    replicas: int,
    done: Callable[[], object],
) -> None:
    """Look at the dense training of each unseen study, and write what is foretold of its codecs.
    Raises UserError where a codec was trained before with one of so many seeds.
    """
    path = folder / PREDICTIONS
    trained = boards.scores_of(folder / ROWS)
    for training in unseen(folder):
        setup = training.setup
        study = Study(setup.name, setup.role, setup.dense)
        recorded = _read(path)
        foretold = _of_study(recorded, (study.name, study.role, run_id(study.watched)))
        missing = [
            codec for codec in training.codecs if codec not in set(foretold.get("codec", []))
        ]
        for codec in missing:
            if any(run_id(run) in trained for run in seeds([setup.coded(codec)], replicas, SEED)):
                raise UserError(
                    f"{study.name}: {codec} as {study.role} was trained before its forecast; take "
                    f"the study out of {STUDIES}"
                )
        if missing:
            rows = studies.watch(study, missing, settings)
            fixed = {"role": study.role, "watched": run_id(study.watched), "commit": commit}
            forecast = forecasts.get(study.message)
            lines_ = [fixed | row | _foretold(row, forecast) for row in rows]
            _write(path, pd.concat([recorded, pd.DataFrame(lines_)]))
        done()


def _foretold(row: dict[str, Any], forecast: Forecast | None) -> dict[str, Any]:
    """Return the columns of a forecast: its score, its bound, and whether that is an answer."""
    if forecast is None:
        return {}
    features = features_of(row)
    score = forecast.score.of(features)
    bound = forecast.evidence.bound(score)
    columns = {"rank": score, "answered": isinstance(forecast.answer(features), Bound)}
    if bound is not None:
        columns |= {"low": bound.low, "worth": bound.middle, "high": bound.high}
    return columns


def cells(folder: Path, count: int) -> dict[str, Cell]:
    """Return the trainings that unseen studies need, by id. Raises UserError where one of them has
    no forecast yet.
    """
    foretold = _read(folder / PREDICTIONS)
    cells_by_id: dict[str, Cell] = {}
    for training in unseen(folder):
        setup = training.setup
        predicted = _of_study(foretold, (setup.name, setup.role, run_id(setup.dense)))
        settings = [(DENSE, "none", setup.dense), (NOTHING, "none", setup.control)]
        for codec in training.codecs:
            if codec not in set(predicted.get("codec", [])):
                raise UserError(
                    f"{setup.name}: {codec} as {setup.role} has no forecast; use --watch"
                )
            settings.append((codec, "none", setup.coded(codec)))
        cells_by_id |= boards.cells_of(setup, boards.SHORT, settings, count)
    return cells_by_id


def outcomes(folder: Path, count: int) -> list[Outcome]:
    """Return what was foretold of unseen trainings beside what they kept."""
    foretold = _read(folder / PREDICTIONS)
    if foretold.empty:
        return []
    recorded = boards.Board(folder, [], boards.scores_of(folder / ROWS), {})
    outcomes_ = []
    for training in unseen(folder):
        setup = training.setup
        rows = _of_study(foretold, (setup.name, setup.role, run_id(setup.dense)))
        (study,) = studies.of_setups([setup], list(rows["codec"]), count, recorded.score_of, "")
        for row in rows.to_dict("records"):
            bound = None
            if pd.notna(row["low"]):
                bound = Bound(row["low"], row["worth"], row["high"])
            worth = study.worths.get(row["codec"])
            percent = worth.percent if worth is not None and worth.tells else None
            trained = worth.n if worth is not None else 0
            outcomes_.append(Outcome(row, bound, bool(row["answered"]), percent, trained))
    return outcomes_


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        return pd.DataFrame()
    try:
        return pd.read_csv(path)
    except (ValueError, pd.errors.ParserError) as error:
        raise UserError(f"'{path}': no table of a forecast ({error})") from None


def _write(path: Path, frame: pd.DataFrame) -> None:
    """Write a table at once, in order."""
    partial = path.with_name(f".{path.name}.part")
    frame.sort_values(["study", "role", "codec"]).to_csv(partial, index=False)
    partial.replace(path)

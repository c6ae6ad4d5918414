"""The board: codecs side by side in fixed trainings, from rows that lie beside the page.

entries.csv     the codecs that are entered, their feedback and roles
rows.csv        one line a training; every number of the page follows from it
measures.json   laws, real messages and speed of each codec, by role
README.md       the page; cards/ has one file a codec
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from commsweep.config import Run, own, run_id
from commsweep.config.base import by_kind
from commsweep.config.compressors import CompressorSpec
from commsweep.config.compressors.spelling import spelled
from commsweep.errors import UserError, nearest
from commsweep.launching.codecs import SIDES
from commsweep.launching.grid import seeds
from commsweep.reporting.claim import SUPPORTED, Claim, Effect, adjust
from commsweep.reporting.worth import Kept
from commsweep.scoring import ROLES, laws, samples, speed
from commsweep.scoring.laws import Law
from commsweep.scoring.samples import Summary
from commsweep.scoring.speed import Speed
from commsweep.scoring.training import SEED, Score, Setup, lead, score, setups, worth_kept
from commsweep.store import DIVERGED, Row

ENTRIES, ROWS, MEASURES = "entries.csv", "rows.csv", "measures.json"
SHORT, LONG = "short", "long"
# The codecs that long trainings repeat: of few bytes, of some, and of many.
REPEATED = ("topk:0.01", "eden:2", "uniform:4")
DENSE, NOTHING = "dense", "nothing sent"


@dataclass(frozen=True)
class Entry:
    """A codec on the board, its feedback, and the roles that it is entered in."""

    codec: str
    feedback: str
    roles: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return how tables name it: "ef + topk:0.01"."""
        return self.codec if self.feedback == "none" else f"{self.feedback} + {self.codec}"

    @property
    def file_name(self) -> str:
        """Return the name of its card's file."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") + ".md"


@dataclass(frozen=True)
class Measures:
    """The findings about a codec in a role that need no training."""

    laws: list[Law]
    messages: Summary
    speed: Speed

    @property
    def broken(self) -> int:
        """Return how many laws do not hold."""
        return sum(not law.holds for law in self.laws)


@dataclass
class Standing:
    """The place of an entry in one training.

    rival: of the others with at most its bytes, the one that keeps most, or nothing sent. gain:
    the points of worth between both, as an effect among those of all entries; None without a seed
    in common. error, bias: of the messages of this training; None where they were not measured.
    """

    entry: Entry
    worth: Kept
    share: float  # of the dense bytes
    rival: str = NOTHING
    gain: Effect | None = None
    error: float | None = None
    bias: float | None = None

    @property
    def leads(self) -> bool:
        """True where it is decided that it keeps more than all of at most its bytes."""
        return self.worth.ranks and self.gain is not None and self.gain.verdict == SUPPORTED


@dataclass
class Board:
    """The entries of a folder and what is recorded of them."""

    folder: Path
    entries: list[Entry]
    scores: dict[str, Score]  # by id of a run
    measures: dict[str, Measures]  # by `measures_key`

    def of_role(self, role: str) -> list[Entry]:
        """Return the entries of a role."""
        return [entry for entry in self.entries if role in entry.roles]

    def score_of(self, setup: Setup, run: Run) -> Score | None:
        """Return the recorded score of a run, or None."""
        return self.scores.get(run_id(run))

    def losses(self, run: Run, count: int) -> list[float]:
        """Return the recorded losses of a setting, a seed each."""
        results = [self.scores.get(run_id(cell)) for cell in seeds([run], count, SEED)]
        return [result.loss for result in results if result is not None]

    def measured(self, codec: str, role: str) -> Measures | None:
        """Return what is recorded of a codec, by its code of today."""
        return self.measures.get(measures_key(codec, role))


def read(folder: Path) -> Board:
    """Return the board of a folder. Raises UserError on a mistake in its files."""
    path = folder / ENTRIES
    if not path.is_file():
        raise UserError(f"'{folder.absolute()}' is no board: it has no file {ENTRIES}")
    with open(path, newline="", encoding="utf-8") as handle:
        lines = list(csv.DictReader(handle))
    entries = [_entry(line, f"'{path}', line {at}") for at, line in enumerate(lines, start=2)]
    names = [entry.name for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"'{path}': {twice} is entered twice; give it all its roles in one line")
    return Board(folder, entries, scores_of(folder / ROWS), _measures(folder / MEASURES))


def _entry(line: dict[str, Any], where: str) -> Entry:
    for name in ("codec", "feedback", "roles"):
        if not line.get(name):
            raise UserError(f"{where}: no {name}; a line is codec,feedback,roles")
    roles = tuple(ROLES) if line["roles"] == "all" else tuple(line["roles"].split())
    for role in roles:
        if role not in ROLES:
            roles_text = f"all, {', '.join(ROLES)}{nearest(role, ROLES)}"
            raise UserError(f"{where}: role '{role}' is none of {roles_text}")
    try:
        settings = spelled(line["codec"])
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if settings is None:
        raise UserError(f"{where}: '{line['codec']}' names no codec")
    return Entry(line["codec"], line["feedback"], roles)


def scores_of(path: Path) -> dict[str, Score]:
    """Return the scores of a file of rows, by id. Raises UserError where it is none."""
    if not path.is_file():
        return {}
    try:
        frame = pd.read_csv(path, dtype={"id": str})
        columns = frame["id"], frame["loss"].astype(float), frame["share"].astype(float)
        lost = frame["status"] == DIVERGED if "status" in frame else [False] * len(frame)
        measured = []
        for name in ("error", "bias"):
            values = frame[name].astype(float) if name in frame else [math.nan] * len(frame)
            measured.append([None if math.isnan(value) else value for value in values])
    except (ValueError, KeyError, pd.errors.ParserError) as error:
        raise UserError(f"'{path}': no rows of a board ({error})") from None
    if twice := frame["id"][frame["id"].duplicated()].tolist():
        raise UserError(f"'{path}': two rows have the id {twice[0]}; keep the one that was trained")
    scores: dict[str, Score] = {}
    for name, loss, share, diverged, error, bias in zip(*columns, lost, *measured, strict=True):
        scores[name] = Score(loss, share, bool(diverged), error, bias)
    return scores


def _measures(path: Path) -> dict[str, Measures]:
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: Measures(
                [Law(**law) for law in measures["laws"]],
                Summary(**measures["messages"]),
                Speed(**measures["speed"]),
            )
            for key, measures in record.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}': no measures of a board ({error}); delete it") from None


def measures_key(codec: str, role: str) -> str:
    """Return what a codec's measures are kept under: changed code has others."""
    settings = spelled(codec) or {}
    code = own.source(settings["code"]) if settings.get("kind") == "own" else ""
    return f"{role}: {codec} {code}".rstrip()


def measurable(codec: str) -> bool:
    """Return whether a codec encodes a message alone: not all learners' gradients together."""
    return (spelled(codec) or {}).get("kind") in by_kind(CompressorSpec)


def measure(board: Board, done: Callable[[], object] = lambda: None) -> None:
    """Measure what is not recorded of the entries, and record it. `done` hears of each role."""
    missing: dict[str, list[str]] = {role: [] for role in ROLES}
    checked: dict[str, list[Law]] = {}
    for role in ROLES:
        for codec in dict.fromkeys(entry.codec for entry in board.of_role(role)):
            if measurable(codec) and board.measured(codec, role) is None:
                missing[role].append(codec)
                checked.setdefault(codec, [])
    for codec in checked:
        checked[codec] = laws.check(codec)
    for role, codecs in missing.items():
        summaries = samples.summaries(codecs, role)
        speeds = speed.measured(codecs, role) if codecs else {}
        for codec in codecs:
            measures = Measures(checked[codec], summaries[codec], speeds[codec])
            board.measures[measures_key(codec, role)] = measures
        done()
    record = {key: asdict(measures) for key, measures in sorted(board.measures.items())}
    text = json.dumps(record, indent=1)
    (board.folder / MEASURES).write_text(text + "\n", encoding="utf-8")


def trainings(role: str, length: str) -> list[Setup]:
    """Return the trainings of a role; long ones have four times the steps and twice the width."""
    return setups(role) if length == SHORT else setups(role, scale=4, width=2)


@dataclass(frozen=True)
class Cell:
    """A training that a board needs, and what its line of `rows.csv` says of it."""

    run: Run
    setup: Setup
    length: str
    name: str
    feedback: str


def cells(board: Board, roles: Iterable[str], count: int, length: str) -> dict[str, Cell]:
    """Return the trainings of a board by id: dense, nothing sent, and each entry, a run a seed."""
    cells_by_id: dict[str, Cell] = {}
    for role in roles:
        for setup in trainings(role, length):
            settings = [(DENSE, "none", setup.dense), (NOTHING, "none", setup.control)]
            for entry in board.of_role(role):
                if length == SHORT or entry.codec in REPEATED:
                    run = setup.coded(entry.codec, entry.feedback)
                    settings.append((entry.name, entry.feedback, run))
            cells_by_id |= cells_of(setup, length, settings, count)
    return cells_by_id


def cells_of(
    setup: Setup, length: str, settings: Iterable[tuple[str, str, Run]], count: int
) -> dict[str, Cell]:
    """Return the trainings of some settings (name, feedback, run) by id, a run a seed."""
    cells_by_id: dict[str, Cell] = {}
    for name, feedback, setting in settings:
        for run in seeds([setting], count, SEED):
            cells_by_id[run_id(run)] = Cell(run, setup, length, name, feedback)
    return cells_by_id


def line(cell: Cell, row: Row) -> dict[str, Any]:
    """Return a line of `rows.csv`. error, bias: means over boundaries, where they were measured."""
    result, side = score(cell.setup, row), SIDES[cell.setup.role]
    fields: dict[str, Any] = {
        "id": row["id"],
        "role": cell.setup.role,
        "training": cell.setup.name,
        "length": cell.length,
        "codec": cell.name,
        "feedback": cell.feedback,
        "seed": cell.run.seed,
        "status": row["status"],
        "loss": result.loss,
        "share": result.sent,
    }
    entries: list[dict[str, Any]] = row.get("diagnosis", [])
    for name in ("error", "bias"):
        values = [
            float(entry[name])
            for entry in entries
            if entry["direction"] == side and entry.get(name) is not None
        ]
        fields[name] = sum(values) / len(values) if values else None
    where = row.get("environment", {})
    fields |= {name: where.get(name) for name in ("processor", "torch", "commit")}
    return fields | {"when": row.get("when")}


def write_rows(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines to `rows.csv`; a recorded one stays as it is."""
    frame = pd.DataFrame(lines)
    if (folder / ROWS).is_file():
        frame = pd.concat([pd.read_csv(folder / ROWS, dtype={"id": str}), frame])
    if frame.empty:
        return
    frame = frame.drop_duplicates("id").sort_values(["role", "training", "length", "codec", "seed"])
    partial = folder / f".{ROWS}.part"
    frame.to_csv(partial, index=False)
    partial.replace(folder / ROWS)


def standings(board: Board, role: str, setup: Setup, count: int) -> list[Standing]:
    """Return the recorded entries of a training, fewest bytes first, with their rivals."""
    standings_: list[Standing] = []
    runs: dict[str, Run] = {}
    for entry in board.of_role(role):
        runs[entry.name] = setup.coded(entry.codec, entry.feedback)
        result = worth_kept(setup, runs[entry.name], count, board.score_of)
        if result is not None:
            error, bias = _measured(board, runs[entry.name], count)
            standings_.append(Standing(entry, result.kept, result.share, error=error, bias=bias))
    standings_.sort(key=lambda standing: (standing.share, standing.entry.name))
    for standing in standings_:
        rival, rival_run = _rival(standing, standings_), setup.control
        if rival is not None:
            standing.rival = rival.entry.name
            rival_run = runs[rival.entry.name]
        name = f"{standing.entry.name} over {standing.rival}"
        run = runs[standing.entry.name]
        standing.gain = lead(setup, name, run, rival_run, count, board.score_of)
    return standings_


def _measured(board: Board, run: Run, count: int) -> tuple[float | None, float | None]:
    """The error and the bias of a setting's messages, means over its seeds."""
    scores = [board.scores.get(run_id(cell)) for cell in seeds([run], count, SEED)]
    means: list[float | None] = []
    for name in ("error", "bias"):
        values = [getattr(score, name) for score in scores if score is not None]
        values = [value for value in values if value is not None]
        means.append(sum(values) / len(values) if values else None)
    return means[0], means[1]


def _rival(standing: Standing, standings_: Sequence[Standing]) -> Standing | None:
    """Return the best of the others with at most its bytes; None where nothing sent is better."""
    rivals = [
        rival
        for rival in standings_
        if rival is not standing and rival.worth.ranks and rival.share <= 1.01 * standing.share
    ]
    best = max(rivals, key=lambda rival: rival.worth.percent, default=None)
    return best if best is not None and best.worth.percent > 0 else None


def judge(standings_: Iterable[Standing]) -> None:
    """Adjust the comparisons of the whole board for their number (Holm)."""
    gains = [
        standing.gain
        for standing in standings_
        if standing.gain is not None and standing.worth.ranks
    ]
    adjust([Claim("board", "an entry keeps more than all of at most its bytes", gains)])


def entries_named(board: Board, name: str) -> list[Entry]:
    """Return the entries of a codec, or of a codec with its feedback. Raises UserError where there
    is none.
    """
    named = [entry for entry in board.entries if name in (entry.name, entry.codec)]
    if not named:
        names = [entry.name for entry in board.entries]
        raise UserError(f"'{name}' is no entry of this board{nearest(name, names)}")
    return named


def entry_cells(entries: Iterable[Entry], count: int) -> dict[str, Cell]:
    """Return the short trainings of entries in all of their roles, by id, a run a seed."""
    cells_by_id: dict[str, Cell] = {}
    for entry in entries:
        for role in entry.roles:
            for setup in trainings(role, SHORT):
                run = setup.coded(entry.codec, entry.feedback)
                settings = [(entry.name, entry.feedback, run)]
                cells_by_id |= cells_of(setup, SHORT, settings, count)
    return cells_by_id


def draw(board: Board, cells_by_id: dict[str, Cell], count: int) -> list[Cell]:
    """Return the trainings to repeat, in an order that follows from the entry's rows: whoever makes
    rows up cannot choose which are tried.
    """
    losses = {name: board.scores[name].loss for name in sorted(cells_by_id)}
    digest = sha256(json.dumps(losses).encode()).hexdigest()
    order = sorted(cells_by_id, key=lambda name: sha256(f"{digest} {name}".encode()).hexdigest())
    return [cells_by_id[name] for name in order[:count]]


def check(board: Board, named: Iterable[Entry], count: int) -> list[str]:
    """Return what is wrong with entries, by their laws and the ids of their rows; empty where
    nothing is.
    """
    problems = []
    for entry in named:
        for law in laws.check(entry.codec) if measurable(entry.codec) else []:
            if not law.holds:
                problems.append(f"{entry.name}: breaks the law '{law.name}': {law.note}")
    for name, cell in entry_cells(named, count).items():
        if name not in board.scores:
            where = f"{cell.name} as {cell.setup.role}, {cell.setup.name}, seed {cell.run.seed}"
            problems.append(
                f"{where}: {ROWS} has no row {name}, which this code's training would have; train "
                "it with --train"
            )
    return problems

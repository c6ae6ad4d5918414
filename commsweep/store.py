"""The record: one folder a run, readable with cat, merged with rsync. No torch here.

<store>/store.json       schema of the store
<store>/pipelines/<id>/  runs executed as real processes, over links of a bandwidth and latency
<store>/<run_id>/
                 run.json       the Run, whole, written before the first step
                 env.json       versions, device, git commit, who asked for the run
                 metrics.jsonl  one line an evaluation, appended
                 points.jsonl   one line a point along the training, appended
                 log.txt        what the run printed
                 last.*.ckpt    to continue from (checkpoint.py); removed when the run ends well
                 done.json      the row, written last by rename: a run counts once this exists
                 lock           held (flock) by the process that executes the run
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Required, cast

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # before Python 3.12 pydantic takes no other

from commsweep.config import Run, record, run_id
from commsweep.config.override import parse
from commsweep.config.renames import current_names
from commsweep.config.run import SCHEMA, text_id
from commsweep.errors import UserError, notice

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
OOM, TIMEOUT = "oom", "timeout"  # out of memory; stopped after the time it was given
UNFINISHED = (DIVERGED, OOM, TIMEOUT, FAILED)  # outcomes without a number
OUTCOMES = (FINISHED, *UNFINISHED, "measured")  # the last one of processes that were timed
WITHOUT_OUTCOME = ("missing", "interrupted", "running", "damaged")
CONTINUABLE = (OOM, TIMEOUT, FAILED)  # their checkpoint is kept, and a retry continues from it


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Amount = Annotated[Number, Field(ge=0)]
Whole = Annotated[int, Field(strict=True, ge=0, le=2**63)]


def printable(text: str) -> str:
    """Return a text of others on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _is_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it has letters that a terminal would obey")
    return text


Words = Annotated[str, Field(strict=True)]
Text = Annotated[Words, AfterValidator(_is_printable)]
Numbers = dict[Text, Number]


def _has(*names: str, unless_empty: bool = True) -> Any:
    """Return a check that a dictionary has these keys."""

    def check(values: dict[str, Any]) -> dict[str, Any]:
        lost = [name for name in names if name not in values]
        if lost and (values or not unless_empty):
            raise ValueError(f"no {', no '.join(lost)} in it")
        return values

    return AfterValidator(check)


def _look(look: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(look["boundary"], str):
        raise ValueError("its boundary is no name")
    if look["direction"] not in ("fwd", "bwd"):
        raise ValueError("its direction is neither fwd nor bwd")
    for name, value in look.items():
        if name not in ("boundary", "direction") and isinstance(value, str):
            raise ValueError(f"its {name} is no number")
    return look


def _scores(metrics: dict[str, float]) -> dict[str, float]:
    for name, value in metrics.items():
        if name.endswith("_acc") and not 0 <= value <= 1:
            raise ValueError(f"{name} {value:g} is no accuracy, which lies between 0 and 1")
        if name.endswith("_ppl") and value < 0:
            raise ValueError(f"{name} {value:g} is no perplexity, which is not below 0")
    return metrics


def _outcome(text: str) -> str:
    if text not in OUTCOMES:
        raise ValueError(f"none of {', '.join(OUTCOMES)}")
    return text


def _moment(text: str) -> str:
    datetime.fromisoformat(text)  # a ValueError says what is wrong with it
    return text


class Row(TypedDict, total=False):
    """The outcome of a run, as `training/record.py` builds it. Metrics are there only when it
    finished.
    """

    schema: Whole
    id: Required[Text]
    status: Required[Annotated[Text, AfterValidator(_outcome)]]
    error: Annotated[Words, Field(max_length=10_000), AfterValidator(printable)] | None
    run: Required[dict[str, Any]]  # the Run, read back from the objects that ran
    metrics: Required[Annotated[Numbers, AfterValidator(_scores)]]
    steps: Whole
    # bytes each way, dense bytes, calls and samples, by cut
    boundaries: dict[Text, Annotated[dict[Text, Whole], _has("fwd", "bwd", unless_empty=False)]]
    # of all boundaries: a step each way, in total, and as a share of the dense bytes
    bytes: Annotated[dict[Text, Amount], _has("ratio")]
    # bytes of the learners' exchange; empty without one
    gradients: Annotated[dict[Text, Amount], _has("up")]
    # of runs with K-FAC: its factors, and bytes of them a learner sends a step
    kfac: Annotated[dict[Text, Amount], _has("factors_up")]
    flops: dict[Text, Number | None]  # of runs with masks: by part, and as shares of the dense run
    masks: Numbers
    speed: dict[Text, Amount]
    memory_bytes: dict[Text, Whole]  # of simulated runs: what was remembered
    # what compression did to messages, by boundary and direction
    diagnosis: list[
        Annotated[
            dict[Text, Text | Number | None],
            _has("boundary", "direction", unless_empty=False),
            AfterValidator(_look),
        ]
    ]
    device: Text
    seconds: Required[dict[Text, Amount]]
    when: Annotated[Text, AfterValidator(_moment)]
    environment: dict[Text, Text]  # what the last bits depend on: processor, torch, commit
    inputs: dict[Text, Text]  # digests of what was loaded: data, weights
    run_id: Text  # of real processes, whose id is another: the Run's
    wiring: dict[str, Any]
    transport: list[dict[str, Any]]
    timing: dict[str, Any]
    cores: Whole
    tries: Whole
    points: dict[Text, Whole | Text]  # scores along the training: how many, of how many samples
    adopted: Text  # of an outcome measured elsewhere: the published file it was taken from
    weights: Text  # of learners as processes: SHA-256 over the trained network


ROW = TypeAdapter(Row)
# a section may be absent
RUN = tuple(name for name, field in Run.model_fields.items() if field.default is not None)


RUN_FILES = ("run.json", "done.json")  # one of which a run folder has
METRICS, DIAGNOSIS = "metrics.jsonl", "diagnosis.jsonl"  # a line an evaluation
POINTS = "points.jsonl"  # a line a point along the training


class Busy(Exception):
    """Another process executes this run right now."""


class Damaged(UserError):
    """A file of the store does not hold what it should; the message names it and what mends it."""

    def __init__(self, path: Path | str, why: str, mend: str = "") -> None:
        super().__init__(
            f"'{path}' is damaged ({why}); {mend or 'sweep launch sets it aside and runs it again'}"
        )
        self.why = why


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        """root: the store's folder, where it is not the one above."""
        self.path, self.root = path, root or path.parent

    def begin(self, run: Run, env: dict[str, Any]) -> None:
        """Write what is asked for and where it runs."""
        write_json(
            self.path / "run.json", {"schema": SCHEMA, "id": run_id(run), "run": record(run)}
        )
        write_json(self.path / "env.json", env)

    def make(self) -> None:
        """Make the folder. Raises UserError when the store is gone: its mount point may be there,
        on another disk.
        """
        if not (self.root / "store.json").exists():
            raise UserError(
                f"store '{self.root}' is not there any more; mount its disk again, or name "
                "another folder with --store"
            )
        self.path.mkdir(exist_ok=True, parents=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the run; the kernel gives the lock back when the process dies, however it dies."""
        self.make()
        with open(self.path / "lock", "a", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(self.path.name) from None
            yield

    def append(self, metrics: dict[str, Any], file: str = METRICS) -> None:
        """Add one evaluation. A line torn by a crash is closed first, so it never swallows this
        one.
        """
        path, metrics = self.path / file, finite(metrics)
        torn = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"
        with open(path, "a", encoding="utf-8") as handle:
            handle.write("\n" * torn + json.dumps(metrics, allow_nan=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())

    def metrics(self, file: str = METRICS) -> list[dict[str, Any]]:
        """Evaluations in the order of their steps; a resumed run repeats some, and the later line
        counts.
        """
        by_step: dict[float, dict[str, Any]] = {}
        path = self.path / file
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                epoch, step = float(record["epoch"]), float(record.get("step", record["epoch"]))
            except (ValueError, KeyError, TypeError, AttributeError):
                if line.endswith(b"\n"):  # another one was torn by a crash, and is made again
                    why = "torn by a crash, or damaged; it is left out"
                    notice(f"'{path}': line {number} is no evaluation ({why})")
                continue
            if wrong := [key for key, value in record.items() if not _measured(key, value)]:
                notice(
                    f"'{path}': {wrong[0]} of epoch {epoch:g} is no number; this evaluation is "
                    "left out"
                )
                continue
            by_step[step] = record
        return [by_step[step] for step in sorted(by_step)]

    def finish(self, row: Row) -> None:
        """Record the outcome; never over another one."""
        if (self.path / "done.json").exists():
            raise FileExistsError(
                f"{self.path / 'done.json'} exists: a recorded outcome is never overwritten"
            )
        write_json(self.path / "done.json", row)

    def drop_checkpoints(self) -> None:
        """Remove what a run would continue from. Call it with the run locked."""
        for left in ("*.ckpt", "*.buffer*", ".*.part"):
            for path in self.path.glob(left):
                path.unlink(missing_ok=True)

    def row(self) -> Row | None:
        """The outcome, or None while there is none. Raises Damaged when the file is no row of this
        schema.
        """
        path = f"{self.path}/done.json"  # text: of ten thousand rows, making paths is half the time
        try:
            row = read_json(path)
        except FileNotFoundError:
            return None
        if "schema" in row and row["schema"] != SCHEMA:
            schema = row["schema"]
            raise Damaged(path, f"it is of schema {schema}, and this commsweep reads {SCHEMA}")
        row = _check(row, path)
        if row["id"] != self.path.name:
            raise Damaged(path, f"it is of run {row['id']}")
        row["run"] = current_names(row["run"])
        return cast(Row, row)

    def run(self) -> Run:
        """The Run this folder was made for. Raises UserError when the file is missing, Damaged when
        it is that.
        """
        path = self.path / "run.json"
        try:
            content = read_json(path)
        except FileNotFoundError:
            if (row := self.row()) is None:
                raise UserError(f"'{self.path}' has no run.json: not a run folder") from None
            content: dict[str, Any] = {**row}  # an outcome has the settings, too
        if not isinstance(content.get("run"), dict):
            raise Damaged(path, "no run in it")
        try:
            return parse(content["run"])
        except UserError as error:
            raise Damaged(path, str(error)) from None

    def busy(self) -> bool:
        """Return whether a process executes this run; nothing is written, so a store may be
        read-only.
        """
        try:
            handle = open(self.path / "lock", "rb")  # noqa: SIM115 (closed below)
        except OSError:
            return False
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def environment(self) -> dict[str, Any]:
        """Return the folder's env.json: where and how its run was begun; empty before that."""
        try:
            return read_json(self.path / "env.json")
        except (OSError, UserError):
            return {}

    def points(self, count: int) -> int:
        """Return how many points along its training this run has: as many as it was begun with,
        else `count`.
        """
        recorded = self.environment().get("points")
        if not isinstance(recorded, int) or isinstance(recorded, bool) or recorded == count:
            return count
        notice(f"run {self.path.name} was begun with --points {recorded}, which stays")
        return recorded

    def begun_by(self) -> str:
        """Return who asked for this run: "sweep", "search", "run", or "" where the folder does not
        say.
        """
        return str(self.environment().get("by", ""))

    def set_aside(self) -> Path:
        """Keep a recorded (or damaged) outcome under another name, so that the run can be executed
        again. Call it with the run locked.
        """
        taken = len(list(self.path.glob("done.*.json")))
        aside = self.path / f"done.{taken + 1}.json"
        os.replace(self.path / "done.json", aside)
        return aside


class Store:
    """A folder of run folders. Raises UserError when it was written in another schema."""

    def __init__(self, root: str | Path, create: bool = True) -> None:
        """create: make the folder if it is not there; else a store that is not there is an empty
        one.
        """
        self.root = Path(root).absolute()  # a user's own code may change the working folder
        mark = self.root / "store.json"
        if not create and not self.root.is_dir():
            return
        self.root.mkdir(parents=True, exist_ok=True)
        if not mark.exists():
            if any(self.root.glob("[!.]*/run.json")):
                raise UserError(
                    f"store '{self.root}' holds runs and no store.json, which says their "
                    f'schema: if they are of this commsweep, mend it with: echo \'{{"schema": '
                    f"{SCHEMA}}}' > {mark}"
                )
            if not create:
                return
            write_json(mark, {"schema": SCHEMA})
        try:
            schema = read_json(mark).get("schema")
        except Damaged as error:
            schema, why = None, error.why
        else:
            why = f"its schema is {schema!r}"
        if not isinstance(schema, int) or isinstance(schema, bool):
            raise UserError(
                f"'{mark}' is damaged ({why}); if the runs are of this commsweep, mend it with: "
                f"echo '{{\"schema\": {SCHEMA}}}' > {mark}"
            )
        if schema > SCHEMA:
            raise UserError(
                f"store '{self.root}' has schema {schema}; this commsweep reads up to {SCHEMA}: "
                "update commsweep, or name another folder with --store"
            )
        if schema < SCHEMA:
            raise UserError(
                f"store '{self.root}' has schema {schema} and this commsweep writes {SCHEMA}, "
                "in which a run has other settings: name another folder with --store"
            )

    def exists(self) -> Store:
        """This store. Raises UserError when there is none in its folder."""
        if not (self.root / "store.json").exists():
            raise UserError(
                f"--store '{self.root}': no store lies there; runs are recorded by commsweep "
                "run, sweep launch and search"
            )
        return self

    def folder(self, name: str) -> RunFolder:
        """The folder of a run id (it need not exist yet)."""
        return RunFolder(self.root / name)

    def pipeline(self, name: str) -> RunFolder:
        """The folder of a run that was executed as real processes."""
        return RunFolder(self.root / "pipelines" / name, self.root)

    def learners(self, name: str) -> RunFolder:
        """The folder of a run whose learners were executed as real processes."""
        return RunFolder(self.root / "learners" / name, self.root)

    def pipelines(self) -> list[Row]:
        """The outcomes of all runs whose stages were executed as real processes, by id."""
        return self._processes("pipelines")

    def learner_rows(self) -> list[Row]:
        """The outcomes of all runs whose learners were executed as real processes, by id."""
        return self._processes("learners")

    def _processes(self, kind: str) -> list[Row]:
        names = sorted(path.parent.name for path in self.root.glob(f"{kind}/*/done.json"))
        return [
            row
            for name in names
            if (row := _message(RunFolder(self.root / kind / name, self.root).row)) is not None
        ]

    def find(self, prefix: str) -> RunFolder:
        """The one folder whose id begins with `prefix`. Raises UserError when none or several
        do.
        """
        names = [name for name in self.ids() if name.startswith(prefix)]
        if len(names) != 1:
            problem = f"is ambiguous: {', '.join(names[:5])}" if names else "is in no run folder"
            raise UserError(f"run id '{prefix}' {problem} (store '{self.root}')")
        return self.folder(names[0])

    def ids(self) -> list[str]:
        """Ids of all run folders, finished or not."""
        return [
            name
            for name in sorted(self._folders())
            if any(os.path.isfile(f"{self.root}/{name}/{file}") for file in RUN_FILES)
        ]

    def _folders(self) -> Iterator[str]:
        """Names of the folders of the store. One that is a link is none: it may lead out of the
        store, or round in a circle.
        """
        if not self.root.is_dir():
            return
        with os.scandir(self.root) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield entry.name
                elif entry.is_symlink():
                    notice(f"'{entry.path}' is a link, which a store does not follow; copy the run")

    def rows(self) -> list[Row]:
        """The outcomes of all runs that have one, by id. A damaged file is named on stderr and left
        out.
        """
        return [row for name in sorted(self.stamps()) if (row := self.read(name)) is not None]

    def read(self, name: str) -> Row | None:
        """A run's outcome; None while there is none, or where it is damaged, which is said on
        stderr.
        """
        return _message(self.folder(name).row)

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Return, for every recorded outcome, when the file was last changed (ns) and its size. One
        look at each folder.
        """
        stamps: dict[str, tuple[int, int]] = {}
        for name in self._folders():
            with suppress(OSError):
                state = os.stat(f"{self.root}/{name}/done.json")
                stamps[name] = (state.st_mtime_ns, state.st_size)
        return stamps

    def unnamed(self) -> list[str]:
        """Run folders, finished or not, that no sweep of this store names. Raises Damaged on a
        sweep's file that is.
        """
        named: set[str] = set()
        for path in (self.root / "sweeps").glob("*.json"):
            named |= self.cells(path.stem).keys()
        return [name for name in self.ids() if name not in named]

    def sweeps(self) -> list[str]:
        """Names of the sweeps that were launched into this store."""
        return sorted(path.stem for path in (self.root / "sweeps").glob("*.json"))

    def cells(self, sweep: str) -> dict[str, dict[str, Any]]:
        """The runs that a sweep names, by id. Raises FileNotFoundError on an unknown one, Damaged
        where it is that.
        """
        path = self.root / "sweeps" / f"{sweep}.json"
        runs = read_json(path, f"commsweep sweep launch {sweep} writes it anew").get("runs")
        if not isinstance(runs, dict) or not all(isinstance(run, dict) for run in runs.values()):
            raise Damaged(path, "no runs in it", f"commsweep sweep launch {sweep} writes it anew")
        return runs

    @contextmanager
    def changing_sweeps(self) -> Iterator[None]:
        """Own the lists of which runs a sweep names: whoever reads, changes and writes one does it
        in here.
        """
        folder = self.root / "sweeps"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "a", encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def remove(self, name: str) -> bool:
        """Delete a run folder unless it is being executed; False then. Whole or not at all: it is
        renamed first.
        """
        trash = self.root / f".removed-{name}-{secrets.token_hex(4)}"
        try:
            with self.folder(name).locked():
                os.replace(self.root / name, trash)
        except Busy:
            return False
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def tidy(self) -> None:
        """Remove what killed processes have left: runs half removed, files half written, and
        checkpoints of runs that have an outcome which nothing continues from.
        """
        for trash in self.root.glob(".removed-*"):
            shutil.rmtree(trash, ignore_errors=True)
        for leftover in (
            *self.root.glob("*/.*.part-*"),
            *self.root.glob(".*.part-*"),
            *self.root.glob("sweeps/.*.part-*"),
        ):
            if _abandoned(leftover):
                leftover.unlink(missing_ok=True)
        left = {
            path.parent.name
            for path in (*self.root.glob("[!.]*/*.ckpt"), *self.root.glob("[!.]*/*.buffer*"))
        }
        for name in left:
            with suppress(Busy, UserError), self.folder(name).locked():
                row = self.folder(name).row()
                if row is not None and row["status"] not in CONTINUABLE:
                    self.folder(name).drop_checkpoints()

    def mend(self, names: list[str]) -> list[str]:
        """Set damaged outcomes of these runs aside, so that they count as missing; one line about
        each.
        """
        lines = []
        for name in names:
            folder = self.folder(name)
            try:
                folder.row()
            except Damaged:
                with suppress(Busy), folder.locked():
                    aside = folder.set_aside()
                    lines.append(
                        f"'{name}/done.json' was damaged; kept as {aside.name}, and the run is "
                        "executed again"
                    )
        return lines

    def statuses(self, names: list[str], rows: list[Row]) -> dict[str, str]:
        """The status of each of these runs, given all recorded rows."""
        recorded = {row["id"]: str(row["status"]) for row in rows}
        return {name: recorded.get(name) or self.status(name) for name in names}

    def status(self, name: str) -> str:
        """missing, running, interrupted, damaged, or the recorded outcome."""
        folder = self.folder(name)
        try:
            if (row := folder.row()) is not None:
                return str(row["status"])
            read_json(folder.path / "run.json")["run"]
        except FileNotFoundError:
            return "missing"
        except (UserError, KeyError):
            return "damaged"
        return "running" if folder.busy() else "interrupted"


def _check(row: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a row as it may be shown. Raises Damaged, which names the field, unless this is a row
    whose settings are those of its id.
    """
    try:
        checked = ROW.validate_python(row)  # whole numbers are floats in it
        row = row | ({"error": checked["error"]} if "error" in checked else {})
    except ValidationError as error:
        lost = [str(error["loc"][0]) for error in error.errors() if error["type"] == "missing"]
        if lost:
            raise Damaged(path, f"no {', no '.join(lost[:3])} in it") from None
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(
            path, f"{where} is {str(first['input'])[:40]!r}: {first['msg'].lower()}"
        ) from None
    if "schema" not in row:
        raise Damaged(path, f"it says no schema, and this commsweep reads {SCHEMA}")
    if row["status"] == FINISHED and not row["metrics"]:
        raise Damaged(path, "it is finished and has no metrics")
    if row["status"] in UNFINISHED and row["metrics"]:
        raise Damaged(path, f"it is {row['status']} and has metrics, which only a finished run has")
    if lost := [f"run.{key}" for key in RUN if key not in row["run"]]:
        raise Damaged(path, f"no {', no '.join(lost[:3])} in it")
    named = row.get("run_id", row["id"])
    if text_id(row["run"]) == named:
        return row
    try:
        expected = run_id(parse(row["run"]))  # the same values may be written in another way
    except UserError as error:
        raise Damaged(path, str(error)) from None
    if expected != named:
        raise Damaged(path, f"its settings are those of run {expected}, not of {named}")
    return row


# What evaluations and points count, beside their scores (docs/reference/columns.md).
COUNTED = ("epoch", "step", "seconds", "bytes", "gradient_bytes", "examples", "tokens")


def _measured(key: str, value: Any) -> bool:
    """Return whether an evaluation may say this of something; what it says by name are numbers."""
    named = key.startswith(("train_", "val_", "test_")) or key in COUNTED
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool)
        if named
        else not isinstance(value, str)
    )


def finite(value: Any) -> Any:
    """Content as JSON has it, which knows no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _abandoned(leftover: Path) -> bool:
    """Return whether the process that was writing this file has ended; of other machines after a
    day.
    """
    host, _, pid = leftover.name.rpartition(".part-")[2].rpartition("-")
    with suppress(OSError):
        return (
            not Path(f"/proc/{pid}").exists()
            if host == socket.gethostname()
            else (time.time() - leftover.stat().st_mtime > 86400)
        )
    return False


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write whole or not at all: a temporary file beside it, flushed to disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part-{socket.gethostname()}-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(finite(content), handle, indent=1, allow_nan=False)
            handle.write("\n")
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:  # a full disk names no file by itself
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path | str, mend: str = "") -> dict[str, Any]:
    """An object of a file. Raises Damaged when it is none; `mend` says what to do then."""
    try:
        with open(path, "rb") as handle:
            content = json.loads(handle.read(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, str(error), mend) from None
    if not isinstance(content, dict):
        raise Damaged(path, "no JSON object", mend)
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where a key stands in it twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} stands in it twice")
    return content


def _message(read: Callable[[], Row | None]) -> Row | None:
    """Return what `read` returns; a damaged file is named on stderr instead, and nothing
    returned.
    """
    try:
        return read()
    except Damaged as error:
        notice(str(error))
        return None

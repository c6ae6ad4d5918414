"""The record: one folder a run, readable with cat, merged with rsync. No torch here.

    <store>/store.json              schema of the store
    <store>/pipelines/<id>/         runs executed as real processes, over links of some bandwidth and latency
    <store>/<run_id>/run.json       the Run, whole, written before the first step
                     env.json       versions, device, git commit, who asked for the run
                     metrics.jsonl  one line an evaluation, appended
                     log.txt        what the run printed
                     last.*.ckpt    to continue from (checkpoint.py); removed when the run ends well
                     done.json      the row, written last by rename: a run counts once this exists
                     lock           held (flock) by the process that executes the run
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

from commsweep.experiments.config import SCHEMA, Run, parse, record, run_id
from commsweep.experiments.errors import UserError, notice

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
OOM, TIMEOUT = "oom", "timeout"  # out of memory; stopped after the time it was given
UNFINISHED = (DIVERGED, OOM, TIMEOUT, FAILED)  # outcomes without a number
CONTINUABLE = (OOM, TIMEOUT, FAILED)  # their checkpoint is kept, and a retry continues from it


class Row(TypedDict, total=False):
    """The outcome of a run, as `training/record.py` builds it. Metrics are there only when it finished."""

    schema: int
    id: str
    status: str
    error: str | None
    run: dict[str, Any]  # the Run, read back from the objects that ran
    metrics: dict[str, float]
    steps: int
    boundaries: dict[str, dict[str, int]]  # bytes each way, dense bytes, calls and samples, by cut
    bytes: dict[str, float]  # of all boundaries: a step each way, in total, and as a share of the dense bytes
    gradients: dict[str, Any]  # bytes of the learners' exchange; empty without one
    kfac: dict[str, float]  # of runs with K-FAC: its factors, and bytes of them a learner sends a step
    speed: dict[str, float]
    memory_bytes: dict[str, int]  # of simulated runs: what was remembered
    device: str
    seconds: dict[str, float]
    when: str
    run_id: str  # of real processes, whose id is another: the Run's
    wiring: dict[str, Any]
    transport: list[dict[str, Any]]
    timing: dict[str, Any]
    cores: int
    tries: int
    adopted: str  # of an outcome measured elsewhere: the published file it was taken from
    weights: str  # of learners as processes: SHA-256 over the trained network


RUN = tuple(name for name, field in Run.model_fields.items() if field.default is not None)  # a section may be absent
# What every row has, and of which type; an unfinished cell of a sweep has no more.
ROW = {"id": str, "status": str, "run": dict, "metrics": dict, "seconds": dict}


METRICS, DIAGNOSIS = "metrics.jsonl", "diagnosis.jsonl"  # a line an evaluation


class Busy(Exception):
    """Another process executes this run right now."""


class Damaged(UserError):
    """A file of the store does not hold what it should; the message names it and what mends it."""

    def __init__(self, path: Path | str, why: str, mend: str = "") -> None:
        super().__init__(f"'{path}' is damaged ({why}); {mend or 'sweep launch sets it aside and runs it again'}")
        self.why = why


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        """root: the store's folder, where it is not the one above."""
        self.path, self.root = path, root or path.parent

    def begin(self, run: Run, env: dict[str, Any]) -> None:
        """Write what is asked for and where it runs."""
        write_json(self.path / "run.json", {"schema": SCHEMA, "id": run_id(run), "run": record(run)})
        write_json(self.path / "env.json", env)

    def make(self) -> None:
        """Make the folder. Raises UserError when the store is gone: its mount point may be there, on another disk."""
        if not (self.root / "store.json").exists():
            raise UserError(f"store '{self.root}' is not there any more; mount its disk again, or name another "
                            "folder with --store")
        self.path.mkdir(exist_ok=True, parents=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the run; the kernel gives the lock back when the process dies, however it dies."""
        self.make()
        with open(self.path / "lock", "a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(self.path.name) from None
            yield

    def append(self, metrics: dict[str, Any], file: str = METRICS) -> None:
        """Add one evaluation. A line torn by a crash is closed first, so it never swallows this one."""
        path = self.path / file
        torn = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"
        with open(path, "a") as handle:
            handle.write("\n" * torn + json.dumps(metrics) + "\n")
            handle.flush()
            os.fsync(handle.fileno())

    def metrics(self, file: str = METRICS) -> list[dict[str, Any]]:
        """Evaluations by epoch; a resumed run repeats some, and the later line counts."""
        by_epoch: dict[int, dict[str, Any]] = {}
        path = self.path / file
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
                by_epoch[int(record["epoch"])] = record
            except (ValueError, KeyError, TypeError):  # torn by a crash, or damaged
                continue
        return [by_epoch[epoch] for epoch in sorted(by_epoch)]

    def finish(self, row: Row) -> None:
        """Record the outcome; never over another one."""
        if (self.path / "done.json").exists():
            raise FileExistsError(f"{self.path / 'done.json'} exists: a recorded outcome is never overwritten")
        write_json(self.path / "done.json", row)

    def row(self) -> Row | None:
        """The outcome, or None while there is none. Raises Damaged when the file is no row of this schema."""
        path = f"{self.path}/done.json"  # text: of ten thousand rows, making paths is half the time
        try:
            row = read_json(path)
        except FileNotFoundError:
            return None
        if row.get("schema") != SCHEMA and "schema" in row:
            raise Damaged(path, f"it is of schema {row['schema']}, and this commsweep reads {SCHEMA}")
        lost = [key for key, kind in ROW.items() if not isinstance(row.get(key), kind)]
        lost += [] if "run" in lost else [f"run.{key}" for key in RUN if key not in row["run"]]
        if lost:
            raise Damaged(path, f"no {', no '.join(lost[:3])} in it")
        if row["id"] != self.path.name:
            raise Damaged(path, f"it is of run {row['id']}")
        return row

    def run(self) -> Run:
        """The Run this folder was made for. Raises UserError when the file is missing, Damaged when it is that."""
        path = self.path / "run.json"
        try:
            content = read_json(path)
        except FileNotFoundError:
            raise UserError(f"'{self.path}' has no run.json: not a run folder") from None
        if not isinstance(content.get("run"), dict):
            raise Damaged(path, "no run in it")
        try:
            return parse(content["run"])
        except UserError as error:
            raise Damaged(path, str(error)) from None

    def busy(self) -> bool:
        """Whether a process executes this run; nothing is written, so a store may be read-only."""
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

    def begun_by(self) -> str:
        """Who asked for this run: "sweep", "search", "run", or "" where the folder does not say."""
        try:
            return str(read_json(self.path / "env.json").get("by", ""))
        except (OSError, UserError):
            return ""

    def set_aside(self) -> Path:
        """Keep a recorded (or damaged) outcome under another name, so that the run can be executed again. Call it with
        the run locked."""
        taken = len(list(self.path.glob("done.*.json")))
        kept = self.path / f"done.{taken + 1}.json"
        os.replace(self.path / "done.json", kept)
        return kept


class Store:
    """A folder of run folders. Raises UserError when it was written in another schema."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        mark = self.root / "store.json"
        if not mark.exists():
            if any(self.root.glob("[!.]*/run.json")):
                raise UserError(f"store '{self.root}' holds runs and no store.json, which says their schema: if they "
                                f"are of this commsweep, mend it with: echo '{{\"schema\": {SCHEMA}}}' > {mark}")
            write_json(mark, {"schema": SCHEMA})
        try:
            schema = read_json(mark).get("schema")
        except Damaged as error:
            schema, why = None, error.why
        else:
            why = f"its schema is {schema!r}"
        if not isinstance(schema, int) or isinstance(schema, bool):
            raise UserError(f"'{mark}' is damaged ({why}); if the runs are of this commsweep, mend it with: "
                            f"echo '{{\"schema\": {SCHEMA}}}' > {mark}")
        if schema > SCHEMA:
            raise UserError(f"store '{self.root}' has schema {schema}; this commsweep reads up to {SCHEMA}: "
                            "update commsweep, or name another folder with --store")
        if schema < SCHEMA:
            raise UserError(f"store '{self.root}' has schema {schema} and this commsweep writes {SCHEMA}, in which a "
                            "run has other settings: name another folder with --store")

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
        return [row for name in names
                if (row := _said(RunFolder(self.root / kind / name, self.root).row)) is not None]

    def find(self, prefix: str) -> RunFolder:
        """The one folder whose id begins with `prefix`. Raises UserError when none or several do."""
        names = [name for name in self.ids() if name.startswith(prefix)]
        if len(names) != 1:
            what = f"is ambiguous: {', '.join(names[:5])}" if names else "is in no run folder"
            raise UserError(f"run id '{prefix}' {what} (store '{self.root}')")
        return self.folder(names[0])

    def ids(self) -> list[str]:
        """Ids of all run folders, finished or not."""
        return sorted(path.parent.name for path in self.root.glob("[!.]*/run.json"))

    def rows(self) -> list[Row]:
        """The outcomes of all runs that have one, by id. A damaged file is named on stderr and left out."""
        return [row for name in sorted(self.stamps()) if (row := self.read(name)) is not None]

    def read(self, name: str) -> Row | None:
        """A run's outcome; None while there is none, or where it is damaged, which is said on stderr."""
        return _said(self.folder(name).row)

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Of every recorded outcome: when the file was last changed (ns) and its size. One look at each folder."""
        found = {}
        with os.scandir(self.root) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    with suppress(OSError):
                        state = os.stat(f"{entry.path}/done.json")
                        found[entry.name] = (state.st_mtime_ns, state.st_size)
        return found

    def unnamed(self) -> list[str]:
        """Run folders, finished or not, that no sweep of this store names. Raises Damaged on a sweep's file that is."""
        named: set[str] = set()
        for path in (self.root / "sweeps").glob("*.json"):
            named |= self.cells(path.stem).keys()
        return [name for name in self.ids() if name not in named]

    def sweeps(self) -> list[str]:
        """Names of the sweeps that were launched into this store."""
        return sorted(path.stem for path in (self.root / "sweeps").glob("*.json"))

    def cells(self, sweep: str) -> dict[str, dict[str, Any]]:
        """The runs that a sweep names, by id. Raises FileNotFoundError on an unknown one, Damaged where it is that."""
        path = self.root / "sweeps" / f"{sweep}.json"
        runs = read_json(path, f"commsweep sweep launch {sweep} writes it anew").get("runs")
        if not isinstance(runs, dict) or not all(isinstance(run, dict) for run in runs.values()):
            raise Damaged(path, "no runs in it", f"commsweep sweep launch {sweep} writes it anew")
        return runs

    def remove(self, name: str) -> bool:
        """Delete a run folder unless it is being executed; False then. Whole or not at all: it is renamed first."""
        try:
            with self.folder(name).locked():
                trash = self.root / f".removed-{name}"
                os.replace(self.root / name, trash)
        except Busy:
            return False
        for left in (trash, *self.root.glob(".removed-*")):  # also what a killed prune left behind
            shutil.rmtree(left, ignore_errors=True)
        return True

    def mend(self, names: list[str]) -> list[str]:
        """Set damaged outcomes of these runs aside, so that they count as missing; one line about each."""
        lines = []
        for name in names:
            folder = self.folder(name)
            try:
                folder.row()
            except Damaged:
                with suppress(Busy), folder.locked():
                    kept = folder.set_aside()
                    lines.append(f"'{name}/done.json' was damaged; kept as {kept.name}, and the run is executed again")
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write whole or not at all: a temporary file beside it, flushed to disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as handle:
            json.dump(content, handle, indent=1)
            handle.write("\n")
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path | str, mend: str = "") -> dict[str, Any]:
    """An object of a file. Raises Damaged when it is none; `mend` says what to do then."""
    try:
        with open(path, "rb") as handle:
            content = json.loads(handle.read())
    except (ValueError, RecursionError) as error:
        raise Damaged(path, str(error), mend) from None
    if not isinstance(content, dict):
        raise Damaged(path, "no JSON object", mend)
    return content


def _said(read: Callable[[], Row | None]) -> Row | None:
    """What `read` returns; a damaged file is named on stderr instead, and nothing returned."""
    try:
        return read()
    except Damaged as error:
        notice(str(error))
        return None

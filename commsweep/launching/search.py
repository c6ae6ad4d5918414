"""Optuna searches for the best quality at a byte budget, or for the front of quality against bytes.

A trial is one setting with all its seeds. Its runs are ordinary rows of the store, executed once
and shared with every sweep; the study only remembers which parameters led to which runs. What
Optuna suggests goes through `override` like anything a user types. A parameter is named as its
setting, or side.kind.parameter where its range depends on the kind.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing as mp
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep import input_digests
from commsweep.child import die_with_parent
from commsweep.config import Execution, Run, override, run_id
from commsweep.config.coordinates import CODEC_SETTING
from commsweep.config.run import canonical
from commsweep.config.training import GPT2_SIZES, TextModel
from commsweep.errors import UserError, nearest, notice
from commsweep.launching import codecs
from commsweep.launching.executors.local import forked
from commsweep.launching.views.optuna import journal_storage
from commsweep.lean_imports import loading
from commsweep.registry import preset, presets
from commsweep.store import DIVERGED, FINISHED, Damaged, Store

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Search:
    """A base Run, what may vary, and how many seeds make a trial.

    codecs: the only ones to choose from in each of the roles; () of K, bits, scales and feedback.
    """

    base: Run
    cuts: tuple[str, ...]  # its boundaries, each varied by itself with Goal.per_boundary
    seeds: int = 2
    codecs: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    def suggest(self, trial: optuna.Trial, per_boundary: bool = False) -> dict[str, Any]:
        """A trial's dotted changes; per boundary, the last one's links are those of the run."""
        prefixes = [f"at.{cut}." for cut in self.cuts[:-1]] if per_boundary else []
        changes: dict[str, Any] = {}
        for prefix in ("", *prefixes):
            changes |= self._of_codecs(trial, prefix) if self.codecs else links(trial, prefix)
        return changes

    def _of_codecs(self, trial: optuna.Trial, prefix: str) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        for role in self.roles:
            text = trial.suggest_categorical(f"{prefix}{role}", self.codecs)
            changes |= codecs.changes(role, *codecs.separated(text), prefix)
        return changes

    def signature(self) -> str:
        """Changes when the base, the seeds or the code of the space change."""
        import inspect

        text = f"{canonical(self.base)}|{self.seeds}|{self.cuts}|{inspect.getsource(links)}"
        if self.codecs:
            text += f"|{self.codecs}|{self.roles}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Goal:
    """The goal of a search. `budget`: largest share of the dense bytes; None: the front of quality
    against bytes.
    """

    budget: float | None = None
    sampler: str = "tpe"  # or nsga2
    prune: bool = False
    per_boundary: bool = False

    @property
    def directions(self) -> list[str]:
        """Return the directions of the study: quality up, and bytes down when they are an
        objective.
        """
        return ["maximize"] if self.budget is not None else ["maximize", "minimize"]


def links(trial: optuna.Trial, prefix: str = "") -> dict[str, Any]:
    """K, bits, scales and feedback of both directions, everywhere or (place "at.layer1.") at one
    boundary.
    """
    changes: dict[str, Any] = {}
    for side in (f"{prefix}fwd", f"{prefix}bwd"):
        kind = trial.suggest_categorical(f"{side}.compressor.kind", ["topk", "uniform", "fixed"])
        changes[f"{side}.compressor.kind"] = kind
        if kind == "topk":
            changes[f"{side}.compressor.ratio"] = trial.suggest_float(
                f"{side}.compressor.ratio", 0.02, 0.5, log=True
            )
        else:
            changes[f"{side}.compressor.bits"] = trial.suggest_int(f"{side}.{kind}.bits", 2, 8)
            changes[f"{side}.compressor.scale"] = trial.suggest_categorical(
                f"{side}.{kind}.scale", ["tensor", "sample", "group"]
            )
        changes[f"{side}.feedback.kind"] = trial.suggest_categorical(
            f"{side}.feedback.kind", ["none", "ef", "ef21"]
        )
    return changes


def runs_of(search: Search, changes: dict[str, Any]) -> list[Run]:
    """The runs of a trial, one a seed."""
    return [override(search.base, changes | {"seed": seed}) for seed in range(search.seeds)]


def open_study(
    name: str, search: Search, goal: Goal, storage: str | None, store: Store
) -> optuna.Study:
    """The study of this name, made if it is new. Raises UserError when it belongs to another search
    or goal.
    """
    import optuna
    from optuna.study import StudyDirection

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = _guarded(
        storage,
        lambda: optuna.create_study(
            study_name=name,
            storage=_storage(name, storage, store),
            directions=[StudyDirection[name.upper()] for name in goal.directions],
            load_if_exists=True,
            sampler=_sampler(goal),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4)
            if goal.prune
            else optuna.pruners.NopPruner(),
        ),
    )
    mark = {"search": search.signature(), "budget": goal.budget, "per_boundary": goal.per_boundary}
    recorded = study.user_attrs.get("commsweep")
    if recorded is None and not study.trials:
        study.set_user_attr("commsweep", mark)
        names = ["validation quality", "share of the dense bytes"]
        study.set_metric_names(names[: len(goal.directions)])
    elif recorded != mark:
        raise UserError(
            f"study '{name}' belongs to another search or byte budget; choose another name with "
            "--study"
        )
    return study


def revive(study: optuna.Study) -> int:
    """Put trials that a killed worker left running back into the queue. Call only while no worker
    runs.
    """
    import optuna

    stale = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    _put_back(study, stale)
    return len(stale)


def _put_back(study: optuna.Study, stale: list[optuna.trial.FrozenTrial]) -> None:
    import optuna

    for trial in stale:
        with suppress(ValueError):  # it was told in the meantime
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if trial.params:
                study.enqueue_trial(trial.params)


def work(
    study: optuna.Study,
    search: Search,
    goal: Goal,
    store: Store,
    execution: Any,
    trials: int,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Make trials until the study has `trials` of them that count (complete or pruned)."""
    import optuna

    done = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)

    me = f"{socket.gethostname()}:{os.getpid()}"
    while (finished_trials := len(study.get_trials(deepcopy=False, states=done))) < trials:
        # looking and asking are one, or two workers would both make the last trial
        with _round(store, study):
            running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
            trial = study.ask() if finished_trials + len(running) < trials else None
            if trial is not None:
                trial.set_user_attr("worker", me)
        if trial is None:  # the others make the last ones; those of a worker that died are put back
            time.sleep(WAIT)
            _put_back(
                study,
                [
                    process
                    for process in running
                    if not _lives(process.user_attrs.get("worker", me))
                ],
            )
            continue
        try:
            values = evaluate(trial, search, goal, store, execution)
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except CellFailed:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, values)
        progress()


@contextmanager
def _round(store: Store, study: optuna.Study) -> Iterator[None]:
    """Run the trials of one round; one worker of this store enters at a time."""
    path = store.root / "studies" / f".{study.study_name}.turn"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _lives(worker: str) -> bool:
    """Return whether a worker "host:process" may still be at its trial; of other hosts it is
    assumed.
    """
    host, _, pid = worker.rpartition(":")
    return host != socket.gethostname() or os.path.exists(f"/proc/{pid}")


WAIT = 0.2  # seconds between looks at the last trials of others


class CellFailed(Exception):
    """A run of a trial came to no number; the trial fails and the search goes on."""


def evaluate(trial: optuna.Trial, search: Search, goal: Goal, store: Store, execution: Any) -> Any:
    """Execute a trial's runs (those recorded are reused); quality, and the share of the dense
    bytes.
    """
    import optuna

    with loading():
        from commsweep.training.run import execute

    runs = runs_of(search, search.suggest(trial, goal.per_boundary))
    trial.set_user_attr("runs", [run_id(run) for run in runs])
    qualities, shares = [], []
    for index, run in enumerate(runs):
        pruning = (
            _Pruning(trial, store, run)
            if goal.prune and goal.budget is not None and index == 0
            else None
        )
        try:
            row = execute(run, store, execution, pruning or (lambda: False))
        except KeyboardInterrupt:
            if pruning and pruning.pruned:
                raise optuna.TrialPruned from None
            raise
        if row["status"] not in (FINISHED, DIVERGED):
            raise CellFailed(f"{row['id']} {row['status']}: {row['error']}")
        qualities.append(quality(row))
        shares.append(row["bytes"]["ratio"])
    share = sum(shares) / len(shares)
    trial.set_user_attr("share", share)
    if goal.budget is not None:
        trial.set_constraint("bytes over the budget", share - goal.budget)
    mean = sum(qualities) / len(qualities)
    return mean if goal.budget is not None else (mean, share)


def quality(row: Mapping[str, Any]) -> float:
    """Larger is better: validation accuracy, or minus the validation loss of a language model,
    compression on.
    """
    metrics = row["metrics"]
    if row["status"] == DIVERGED:  # it did happen: worse than any run that trains
        return -100.0 if "tokenizer" in row["run"]["data"] else 0.0
    return metrics["val_on_acc"] if "val_on_acc" in metrics else -metrics["val_on_loss"]


class _Pruning:
    """Asked after each epoch: reports the last evaluation to Optuna and says whether to stop."""

    def __init__(self, trial: optuna.Trial, store: Store, run: Run) -> None:
        self.trial, self.folder, self.pruned = trial, store.folder(run_id(run)), False
        self.reported: set[int] = set()

    def __call__(self) -> bool:
        for record in self.folder.metrics():
            if record["epoch"] not in self.reported:
                self.trial.report(quality({"metrics": record, "status": FINISHED}), record["epoch"])
                self.reported.add(record["epoch"])
        self.pruned = self.trial.should_prune()
        return self.pruned


def best(study: optuna.Study, goal: Goal) -> list[optuna.trial.FrozenTrial]:
    """The best feasible trial, or the Pareto front by bytes."""
    if goal.budget is None:
        return sorted(study.best_trials, key=lambda trial: trial.values[1])
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    feasible = [trial for trial in complete if trial.user_attrs["share"] <= goal.budget]
    return [max(feasible, key=lambda trial: trial.values[0])] if feasible else []


def _sampler(goal: Goal) -> optuna.samplers.BaseSampler:
    import optuna

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of grouped TPE
    if goal.sampler == "nsga2":
        return optuna.samplers.NSGAIISampler(population_size=16)
    return optuna.samplers.TPESampler(multivariate=True, group=True)


def _storage(name: str, storage: str | None, store: Store) -> Any:
    import optuna

    if storage is None:
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise UserError(f"study name '{name}' cannot be a file name")
        path = store.root / "studies" / f"{name}.journal"
        path.parent.mkdir(parents=True, exist_ok=True)
        return journal_storage(path)
    if "://" not in storage:
        raise UserError(
            "--storage takes a database URL such as postgresql://user@host/name; leave it out "
            "for a file in the store"
        )
    # psycopg 3 is the driver of the extra commsweep[postgres]; a bare URL would mean version 2.
    return optuna.storages.RDBStorage(
        re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", storage)
    )


def _guarded(storage: str | None, call: Callable[[], Any]) -> Any:
    """Database errors as one line that never shows a password."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        if storage is None:
            raise
        # no user, no password, whatever stands in them
        location = re.split(r"[?#]", re.sub(r"//.*@", "//", storage))[0]
        raise UserError(
            f"--storage {location}: cannot be used ({type(error).__name__}); is the server "
            "running, are user and password right, and is 'commsweep[postgres]' installed?"
        ) from None


_IMAGES, _TEXT = ("layer1", "layer2", "layer3"), ("block2", "block5", "block8")
SEARCHES: dict[str, Search] = {
    "synthetic": Search(preset("synthetic"), _IMAGES, seeds=1),
    "digits": Search(preset("digits"), _IMAGES),
    "sotu_nano": Search(preset("sotu_nano"), ("block0", "block1", "block2")),
    "resnet18": Search(preset("resnet18_corrected"), _IMAGES),
    "gpt2_scratch": Search(preset("gpt2_scratch"), _TEXT),
}


def _end_with(launcher: Connection) -> None:
    with suppress(EOFError, OSError):
        launcher.recv()
    os._exit(1)  # any moment is safe: store and study hold only whole records


def based(run: Run, words: Sequence[str] = (), roles: Sequence[str] = ()) -> Search:
    """A search over the boundaries of any run, of some codecs in some roles where these are named.
    Raises UserError where it has none.
    """
    if "learners" in roles:
        raise UserError(
            "--role learners: a search counts the bytes of boundaries; compare learners' codecs "
            "with commsweep sweep launch --base PRESET --codecs"
        )
    if isinstance(run.model, TextModel):
        blocks = GPT2_SIZES[run.model.name][0] if run.model.name in GPT2_SIZES else 0
        size = blocks // run.model.stages
        cuts = tuple(f"block{last}" for last in range(size - 1, blocks - 1, size)) if size else ()
        has_cuts = run.model.stages > 1
    else:
        cuts = tuple(cut.replace(".", "_") for cut in run.model.cuts)
        has_cuts = bool(cuts)
    if not has_cuts:
        setting = "model.stages" if isinstance(run.model, TextModel) else "model.cuts"
        raise UserError(
            f"the run has no boundary whose compression could be searched for; set {setting}"
        )
    search = Search(
        run.model_copy(update={"seed": 0}), cuts, codecs=tuple(words), roles=tuple(roles)
    )
    for role in roles:  # a codec that does not fit ends here, before the first trial
        for text in words:
            override(search.base, codecs.changes(role, *codecs.separated(text)))
    return search


def search_of(name: str) -> Search:
    """The search of this name. Raises UserError naming the nearest one."""
    if name not in SEARCHES:
        raise UserError(
            f"unknown search '{name}'{nearest(name, SEARCHES)} (one of: {', '.join(SEARCHES)}); "
            "any preset is searched with --base PRESET"
        )
    return SEARCHES[name]


def serve(
    launcher: Connection,
    search: Search,
    study_name: str,
    goal: Goal,
    storage: str | None,
    root: str,
    execution: Any,
    trials: int,
    workers: int,
) -> None:
    """Serve as a worker process of a search; it ends with its launcher, whose other end of the pipe
    closes then.
    """
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    execution = replace(
        execution, cores=max(1, len(os.sched_getaffinity(0)) // workers), by="search"
    )
    store = Store(root)
    log = os.open(
        store.root / "studies" / f"{study_name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    for stream in (1, 2):
        os.dup2(log, stream)
    work(
        open_study(study_name, search, goal, storage, store), search, goal, store, execution, trials
    )


def run(
    search: Search,
    study_name: str,
    goal: Goal,
    storage: str | None,
    store: Store,
    execution: Any,
    trials: int,
    workers: int | None = None,
    progress: Callable[[int], None] = lambda trials_done: None,
) -> optuna.Study:
    """Search with worker processes until the study has `trials`; `progress` hears how many there
    are.

    Raises UserError when the study is another search's, or every worker broke down.
    """
    count = min(workers or execution.workers(), trials)
    if storage is None:
        _mend_journal(store.root / "studies", study_name)
    study = open_study(study_name, search, goal, storage, store)
    _check_data(study, store, execution)
    with _exclusive(store.root / "studies" / f"{study_name}.lock") as is_alone:
        if is_alone:
            revive(study)
        receiver, sender = mp.Pipe()
        job = (sender, search, study_name, goal, storage, str(store.root), execution)
        processes = [forked(serve, (*job, trials, count)) for _ in range(count)]
        sender.close()
        try:
            while any(process.is_alive() for process in processes):
                time.sleep(0.3)
                progress(finished_trials(study))
            progress(finished_trials(study))
        finally:
            receiver.close()
            for process in processes:
                process.kill()
                process.join()
    broken = [process.exitcode for process in processes if process.exitcode]
    if broken and len(broken) == len(processes):
        raise UserError(
            f"every worker of the search ended with exit code {broken[0]}; its log is beside "
            "the study"
        )
    return study


def _check_data(study: optuna.Study, store: Store, execution: Execution) -> None:
    """Raise UserError when trials of the study were trained on other data than this search's."""
    runs, rows = [], {}
    for trial in study.get_trials(deepcopy=False):
        for name in trial.user_attrs.get("runs", []):
            folder = store.folder(name)
            with suppress(Damaged, UserError):
                if (row := folder.row()) is not None:
                    runs.append(folder.run())
                    rows[name] = folder, row
    input_digests.check_all(runs, rows, execution)


def _mend_journal(folder: Path, name: str) -> None:
    """Drop a line at the end of a study's journal that its writer could not finish. Raises
    UserError on a broken line before it.
    """
    path = folder / f"{name}.journal"
    if not path.exists():
        return
    with _exclusive(folder / f"{name}.lock") as is_alone:
        if not is_alone:  # another search writes at this moment
            return
        lines = path.read_bytes().splitlines(keepends=True)
        complete = 0
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the line has no end")
                json.loads(line)
            except ValueError as error:
                if number < len(lines):
                    raise UserError(
                        f"'{path}', line {number} is damaged ({error}): delete this line, or move "
                        "the file away and begin the study anew (recorded runs are kept)"
                    ) from None
                notice(f"'{path}': the last line was cut off and is dropped")
                os.truncate(path, complete)
            complete += len(line)


def finished_trials(study: optuna.Study) -> int:
    """Trials that count: complete or pruned."""
    return sum(
        trial.state.name in ("COMPLETE", "PRUNED") for trial in study.get_trials(deepcopy=False)
    )


class _exclusive:
    """Yield whether no other search process of this store works on the study."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.handle = open(path, "a", encoding="utf-8")  # noqa: SIM115 (held until __exit__)

    def __enter__(self) -> bool:
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        self.handle.close()


def settings(search: Search, trial: optuna.trial.FrozenTrial, goal: Goal) -> dict[str, Any]:
    """The dotted settings that a trial stands for, as `commsweep run` takes them."""
    import optuna

    return search.suggest(optuna.trial.FixedTrial(trial.params), goal.per_boundary)  # type: ignore[arg-type]


def preset_of(name: str) -> str:
    """The preset that a search of this name begins from."""
    return next(key for key, run in presets().items() if run == SEARCHES[name].base)


def summary(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """A trial for people and programs."""
    return {
        "number": trial.number,
        "values": trial.values,
        "share": trial.user_attrs.get("share"),
        "params": trial.params,
        "runs": trial.user_attrs.get("runs", []),
    }


def words(search: Search, trial: optuna.trial.FrozenTrial, goal: Goal) -> str:
    """The settings of a trial as `commsweep run` takes them after the preset: codecs in words, and
    all other settings that it chose.
    """
    chosen = settings(search, trial, goal)
    run = runs_of(search, chosen)[0]
    codecs = dict.fromkeys(search.base.codecs, "none") | run.codecs
    pieces = [f"{side}={word}" for side, word in codecs.items()]
    for name, value in chosen.items():
        if not CODEC_SETTING.match(name) and name not in codecs:
            pieces.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    return " ".join(pieces)


def describe(search: Search, trial: optuna.trial.FrozenTrial, goal: Goal) -> str:
    """A line about a trial."""
    values = summary(trial)
    return (
        f"trial {values['number']:>4}  quality {values['values'][0]:.4f}  bytes "
        f"{100 * values['share']:.2f} %  {words(search, trial, goal)}"
    )


def knee(trials: Sequence[optuna.trial.FrozenTrial]) -> optuna.trial.FrozenTrial:
    """The trial of a front that lies farthest from the line between its ends, both measured from
    one end to the other: behind it more bytes buy little.
    """
    first, last = trials[0], trials[-1]
    quality_range = last.values[0] - first.values[0] or 1.0
    bytes_range = last.values[1] - first.values[1] or 1.0

    def distance(trial: optuna.trial.FrozenTrial) -> float:
        gained = (trial.values[0] - first.values[0]) / quality_range
        return gained - (trial.values[1] - first.values[1]) / bytes_range

    return max(trials, key=lambda trial: (distance(trial), trial.values[0]))

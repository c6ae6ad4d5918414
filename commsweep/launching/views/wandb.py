"""Weights & Biases as a view of the store: runs are replayed into it, nothing is read back from it.

One W&B run a recorded run, under the same id, in a group of the seeds of its setting, tagged with
the sweep; flat dotted configuration, with codec, K, bits and feedback; the evaluations with
compression on and off, and the bytes. What was replayed is noted beside the store, so that a second
replay sends only what is new. Run folders stay the record: fragments of W&B's offline files never
matter.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from commsweep.config import Run, flatten, override, record, run_id
from commsweep.config.coordinates import CODEC_SETTING
from commsweep.config.labels import title
from commsweep.errors import UserError
from commsweep.launching.views.follow import config_of
from commsweep.registry import sweep as sweep_runs
from commsweep.registry import sweeps
from commsweep.store import FINISHED, Row, Store

MODES = ("disabled", "offline", "online")


@dataclass(frozen=True)
class View:
    """A view of runs in Weights & Biases."""

    store: Store
    group: str = ""  # the sweep
    mode: str = "offline"
    project: str = "commsweep"

    @property
    def folder(self) -> Path:
        """W&B's files, and our note of what is in them."""
        return self.store.root / ".wandb"

    @property
    def notes(self) -> Path:
        """Return a line for each run that was replayed: its id, and when its outcome was recorded
        (ns).
        """
        return self.folder / f"{self.project}.{self.mode}.jsonl"

    @cached_property
    def names(self) -> dict[str, str]:
        """The runs of the sweep by what tells them apart: "fwd=topk:0.1 optim.lr=0.01 seed=0"."""
        if self.group not in self.store.sweeps() and self.group not in sweeps():
            return {}
        runs, names = sweep_runs(self.group, self.store), {}
        for run, values in zip(runs, parameters(runs), strict=True):
            first = values.get(CODECS, values.get(ALL))
            named = [f"{key}={value}" for key, value in values.items() if key not in (CODECS, ALL)]
            names[run_id(run)] = " ".join([str(first), *named])
        return names

    def check(self) -> None:
        """Raise UserError when the mode is unknown, or online without a login."""
        if self.mode not in MODES:
            raise UserError(f"--wandb {self.mode}: not one of {', '.join(MODES)}")
        if not self.project or set(self.project) & set("/\\#?%:"):
            raise UserError(f"--project {self.project!r}: a name without / \\ # ? % :")
        if self.mode == "online":
            wandb = _library()
            with suppress(Exception):  # whatever the library finds wrong, it is no login
                if wandb.login(prompt=False):
                    return
            raise UserError(
                "--wandb online: not logged in to W&B; run `wandb login`, set WANDB_API_KEY, or "
                "use --wandb offline"
            )

    def replayed(self) -> set[tuple[str, int]]:
        """(id, time) of the outcomes that were sent already."""
        lines = self.notes.read_text(encoding="utf-8").splitlines() if self.notes.exists() else []
        names = set()
        for line in lines:
            with suppress(ValueError):  # torn by a crash
                names.add(tuple(json.loads(line)))
        return names

    def push(self, ids: Iterable[str]) -> int:
        """Replay these recorded runs unless they were; how many were sent. Raises UserError when
        W&B refuses.
        """
        stamps, replayed, sent = self.store.stamps(), self.replayed(), 0
        for name in ids:
            if name in stamps and (name, stamps[name][0]) not in replayed:
                folder = self.store.folder(name)
                row = folder.row()
                if row is None:  # removed since that look
                    continue
                self._replay(row, folder.metrics())
                with open(self.notes, "a", encoding="utf-8") as notes:
                    notes.write(json.dumps([name, stamps[name][0]]) + "\n")
                sent += 1
        return sent

    def push_report(self, folder: Path) -> None:
        """The tables, figures and claims of the sweep as an artifact of a run named after it."""
        wandb = _library()
        run = self._begin(f"report-{self.group}", "report", {})
        artifact = wandb.Artifact(f"{self.group}-report", type="report")
        for section in ("tables", "figures"):
            artifact.add_dir(str(folder / section), name=section)
        artifact.add_file(str(folder / "claims.md"))
        run.log_artifact(artifact)
        for figure in sorted((folder / "figures").glob("*.png")):
            run.log({f"figures/{figure.stem}": wandb.Image(str(figure))})
        run.finish()

    def _begin(self, wandb_id: str, kind: str, config: dict[str, Any], **settings: Any) -> Any:
        wandb = _library()
        self.folder.mkdir(exist_ok=True)
        try:
            return wandb.init(
                project=self.project,
                id=wandb_id,
                group=config.get("setting") or self.group or None,
                job_type=kind,
                config=config,
                mode=self.mode,
                dir=self.folder,
                resume="allow" if self.mode == "online" else None,
                reinit="create_new",
                settings=_settings(wandb),
                **settings,
            )
        except Exception as error:
            raise UserError(f"--wandb {self.mode}: {str(error).strip().splitlines()[0]}") from None

    def _replay(self, row: Row, evaluations: list[dict[str, Any]]) -> None:
        name, settings = self.names.get(row["id"], title(row["run"])), config_of(row)
        tags = [row["status"], *[self.group][: bool(self.group)]]
        run = self._begin(row["id"], "run", settings, name=name, tags=tags)
        fill(run, row, evaluations)
        run.finish(exit_code=0 if row["status"] == FINISHED else 1)


def fill(run: Any, row: Row, evaluations: list[dict[str, Any]]) -> None:
    """A recorded run's evaluations by step, and its outcome as summary."""
    for evaluation in evaluations:
        run.log(evaluation, step=evaluation["step"])
    summary = dict(row["metrics"])
    for section in ("bytes", "seconds", "speed"):
        summary |= {f"{section}.{key}": value for key, value in row.get(section, {}).items()}
    run.summary.update(summary | {"status": row["status"], "error": row["error"]})


METHODS = ("grid", "random", "bayes")
CODECS, ALL, SEED = "codecs", "settings", "seed"


def in_words(run: Run) -> str:
    """The codecs of a run: "fwd=ef+topk:0.1 bwd=uniform:4"; "dense" of one that has none."""
    return " ".join(f"{key}={word}" for key, word in run.codecs.items()) or "dense"


def parameters(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The parameters of a W&B sweep that tell runs apart, one record a run.

    `codecs` in words, and each other setting that varies, where every combination of these is a
    run. Else `settings`, the words of all that varies, and the seed where each has the same.
    """
    settings = [_but_codecs(run) for run in runs]
    names = sorted({name for values in settings for name in values})
    varied = [name for name in names if len({str(values.get(name)) for values in settings}) > 1]
    records = []
    for run, values in zip(runs, settings, strict=True):
        records.append({CODECS: in_words(run)} | {name: values.get(name) for name in varied})
    if _are_all(records):
        return records
    together = []
    for values in records:
        named = [name for name in varied if name != SEED and values[name] is not None]
        words = " ".join([values[CODECS], *(f"{name}={values[name]}" for name in named)])
        together.append({ALL: words, SEED: values.get(SEED, runs[0].seed)})
    if _are_all(together):
        return together
    return [{ALL: f"{values[ALL]} seed={values[SEED]}"} for values in together]


def _but_codecs(run: Run) -> dict[str, Any]:
    """The settings of a run that are not of its codecs, as text where they are lists."""
    values = {}
    for name, value in flatten(record(run)).items():
        if not CODEC_SETTING.match(name):
            values[name] = json.dumps(value) if isinstance(value, list) else value
    return values


def _are_all(records: Sequence[dict[str, Any]]) -> bool:
    """True where each combination of the values of these records is one of them, once."""
    if any(value is None for values in records for value in values.values()):
        return False
    combinations = math.prod(len({str(values[name]) for values in records}) for name in records[0])
    distinct = {json.dumps(values, sort_keys=True) for values in records}
    return combinations == len(distinct) == len(records)


def definition(
    name: str, store: Path, project: str = "commsweep", method: str = "grid"
) -> dict[str, Any]:
    """The W&B sweep of a grid, with its settings as parameters and a score of the validation set.

    The command is our own (`commsweep wandb cell`); W&B's agent fills the macros in. method: "grid"
    goes through the cells; "random" and "bayes" choose settings, each trained with all seeds of the
    grid.
    """
    runs = sweep_runs(name, Store(store))
    text = runs[0].model.name.startswith(("gpt2", "pretrained"))
    records = parameters(runs)
    fixed: list[str] = []
    if method != "grid":
        seeds = sorted({run.seed for run in runs})
        fixed = ["--seeds", ",".join(map(str, seeds))]
        records = parameters([run for run in runs if run.seed == seeds[0]])
    values = {}
    for key in records[0]:
        if key != SEED or method == "grid":
            values[key] = {"values": list(dict.fromkeys(values[key] for values in records))}
    return {
        "name": name,
        "project": project,
        "method": method,
        "metric": {"name": "val_on_loss", "goal": "minimize"}
        if text
        else {"name": "val_on_acc", "goal": "maximize"},
        "parameters": values,
        # No path of this machine: agents elsewhere have their own, and start where the store is
        # seen by this name.
        "command": [
            "${env}",
            "${interpreter}",
            "-m",
            "commsweep",
            "wandb",
            "cell",
            name,
            "--store",
            str(store),
            *fixed,
            "${args_no_hyphens}",
        ],
    }


def cell_of(runs: Sequence[Run], chosen: dict[str, Any], seeds: Sequence[int] = ()) -> list[Run]:
    """The runs of a sweep that an agent's parameters name, one a seed where seeds are given.

    chosen: as in `parameters`; a setting may have a value that the sweep has not. Raises UserError
    where no run of the sweep has the other ones.
    """
    if seeds:
        first = [run for run in runs if run.seed == min(run.seed for run in runs)]
    else:
        first = list(runs)
    records = parameters(first)
    texts = {key: str(value) for key, value in chosen.items()}
    for run, values in zip(first, records, strict=True):
        if all(str(values.get(key)) == value for key, value in texts.items()):
            return [run.model_copy(update={SEED: seed}) for seed in seeds] or [run]
    for run, values in zip(first, records, strict=True):
        if values.get(CODECS, ALL) == texts.get(CODECS, ALL) and ALL not in texts:
            changes = {key: value for key, value in chosen.items() if key != CODECS}
            changed = override(run, changes)
            return [changed.model_copy(update={SEED: seed}) for seed in seeds] or [changed]
    names = ", ".join(f"{key}={value}" for key, value in texts.items())
    raise UserError(
        f"'{names}' names no cell of the sweep; its parameters are those of commsweep wandb sweep"
    )


def report_cell(rows: Sequence[Row], store: Store) -> None:
    """Fill in the run that W&B's agent made for this cell; its environment names it. Does nothing
    without an agent. Of several seeds the scores are means.
    """
    if "WANDB_SWEEP_ID" not in os.environ:
        return
    wandb, first = _library(), rows[0]
    settings = config_of(first)
    if len(rows) > 1:
        settings |= {"id": [row["id"] for row in rows], SEED: [row["run"][SEED] for row in rows]}
    run = wandb.init(config=settings, dir=store.root / ".wandb", settings=_settings(wandb))
    fill(run, first, store.folder(first["id"]).metrics() if len(rows) == 1 else [])
    if len(rows) > 1 and all(row["status"] == FINISHED for row in rows):
        means = {}
        for name in first["metrics"]:
            scores = [row["metrics"].get(name) for row in rows]
            numbers = [float(score) for score in scores if isinstance(score, (int, float))]
            if len(numbers) == len(rows):
                means[name] = sum(numbers) / len(numbers)
        run.summary.update(means | {"seeds": len(rows)})
    run.finish(exit_code=0 if all(row["status"] == FINISHED for row in rows) else 1)


def _settings(wandb: Any) -> Any:
    """Return settings that say nothing of the machine or the code: the run folder has it."""
    return wandb.Settings(
        console="off",
        silent=True,
        x_disable_stats=True,
        disable_git=True,
        disable_code=True,
        x_disable_machine_info=True,
    )


def _library() -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
    except ImportError:
        raise UserError("W&B is not installed: pip install wandb") from None
    return wandb

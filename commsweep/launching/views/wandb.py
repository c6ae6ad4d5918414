"""Weights & Biases as a view of the store: runs are replayed into it, nothing is read back from it.

One W&B run a recorded run, under the same id, in a group named after the sweep; flat dotted
configuration; the evaluations with compression on and off, and the bytes. What was replayed is
noted beside the store, so that a second replay sends only what is new. Run folders stay the record:
fragments of W&B's offline files never matter.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commsweep.config import flatten, run_id
from commsweep.config.labels import title
from commsweep.errors import UserError
from commsweep.registry import sweep as sweep_runs
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
                group=self.group or None,
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
        name, settings = title(row["run"]), config_of(row)
        run = self._begin(row["id"], "run", settings, name=name, tags=[row["status"]])
        fill(run, row, evaluations)
        run.finish(exit_code=0 if row["status"] == FINISHED else 1)


def config_of(row: Row) -> dict[str, Any]:
    """Settings under flat dotted names, with our id."""
    return {"id": row["id"], **flatten(row["run"])}


def fill(run: Any, row: Row, evaluations: list[dict[str, Any]]) -> None:
    """A recorded run's evaluations by step, and its outcome as summary."""
    for record in evaluations:
        run.log(record, step=record["step"])
    summary = dict(row["metrics"])
    for section in ("bytes", "seconds", "speed"):
        summary |= {f"{section}.{key}": value for key, value in row.get(section, {}).items()}
    run.summary.update(summary | {"status": row["status"], "error": row["error"]})


class Follower:
    """Replays runs beside a launch, in a thread, as they are recorded. What W&B refuses is said
    once, at the end.
    """

    def __init__(self, view: View) -> None:
        self.view, self.fault = view, ""
        self.waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def add(self, name: str) -> None:
        """This run was recorded."""
        self.waiting.put(name)

    def end(self) -> str:
        """Wait until all are sent; what went wrong, or ""."""
        self.waiting.put(None)
        self.thread.join()
        return self.fault

    def _work(self) -> None:
        while (name := self.waiting.get()) is not None:
            if not self.fault:
                try:
                    self.view.push([name])
                # a view must not end a launch, whatever is wrong with it
                except Exception as error:
                    self.fault = f"{error or type(error).__name__}; later: commsweep wandb push"


def definition(name: str, store: Path, project: str = "commsweep") -> dict[str, Any]:
    """The W&B sweep of a grid: its cells are the values of one parameter, so an agent runs those
    and no other.

    The command is our own (`commsweep wandb cell`); W&B's agent fills the macros in.
    """
    runs = sweep_runs(name, Store(store))
    text = runs[0].model.name.startswith(("gpt2", "pretrained"))
    return {
        "name": name,
        "project": project,
        "method": "grid",
        "metric": {"name": "test_on_ppl", "goal": "minimize"}
        if text
        else {"name": "test_on_acc", "goal": "maximize"},
        "parameters": {"cell": {"values": [run_id(run) for run in runs]}},
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
            "${args_no_hyphens}",
        ],
    }


def report_cell(row: Row, evaluations: list[dict[str, Any]], folder: Path) -> None:
    """Fill in the run that W&B's agent made for this cell; its environment names it. Does nothing
    without an agent.
    """
    if "WANDB_SWEEP_ID" not in os.environ:
        return
    wandb = _library()
    run = wandb.init(config=config_of(row), dir=folder, settings=_settings(wandb))
    fill(run, row, evaluations)
    run.finish(exit_code=0 if row["status"] == FINISHED else 1)


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

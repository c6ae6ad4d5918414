"""The end of each README of docs/results: how its rows came about, and how to repeat them.

python -m docs.tools.provenance    # writes it anew, from the rows and the history of their files
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from commsweep.reporting.statistics import pair_spread

RESULTS = Path(__file__).parents[1] / "results"
HEAD = "## How to repeat it"
NEW = "# {name}\n\nWhat ran, and where its verdicts are: [all results](../README.md).\n"
LABELS = ("Command", "Machine", "Versions", "Commit", "Hours", "Seeds", "Another machine")
CORES = "two shared x86-64 cores, no GPU"
LINKS = "times depend on the cores, bytes do not; the tables show errors of ratios and ranks"
LINKED = "`sudo commsweep links {name} --out out/{name}` (Linux network namespaces)"


@dataclass(frozen=True)
class Facts:
    """What no row says of a folder: its command, the file that its commit is of, its hours and
    seeds, and what another machine gets.
    """

    command: str
    file: str
    hours: str
    seeds: str
    another_machine: str


NOT_TRIED = "not tried; the same environment gives the same numbers"
MEASURED = "of a machine by itself, half an hour a sitting; not recorded by measurement"
BY_HAND = {
    name: Facts(LINKED.format(name=name), "measurements.csv", MEASURED, "one a run", LINKS)
    for name in (
        "demo-links",
        "heldout-advice",
        "heldout-learners",
        "heldout-links",
        "late-links",
        "unequal-links",
    )
} | {
    "local-links": Facts(
        LINKED.format(name="local-links"), "learners.md", MEASURED, "one a run", LINKS
    ),
    "steps": Facts(
        "`python -m docs.tools.corpus`",
        "steps.csv",
        "none: it is drawn from the folders beside it",
        "as there",
        "the same table, byte for byte",
    ),
    "clusters": Facts(
        "`commsweep predict --rows vtrain_single.csv` and the other tables in turn",
        "vtrain_multi.csv",
        "seconds; the measurements are of others",
        "none: predictions draw nothing",
        "the same predictions",
    ),
    "cifar10-jpeg": Facts(
        "`commsweep run resnet18_corrected epochs=1 schedule.t_max=1 data.name=cifar10-jpeg`, and "
        "with fwd=topk:0.1 bwd=topk:0.1",
        "rows.jsonl",
        "about three of two cores",
        "1",
        NOT_TRIED,
    ),
    "hops": Facts(
        "`python docs/results/hops/measure.py` and `training.py`",
        "errors.csv",
        "1 of a core",
        "3 sets of learners; 1 of the trainings",
        NOT_TRIED,
    ),
    "weights": Facts(
        "`python docs/results/weights/measure.py` and `sharded.py`",
        "sharded.csv",
        "1 of a core",
        "1 of updates, 3 of trainings",
        NOT_TRIED,
    ),
    "shadow_smollm2": Facts(
        "`python docs/results/shadow_smollm2/run.py`",
        "rows.csv",
        "half of a core",
        "1",
        NOT_TRIED,
    ),
}


def folders() -> list[Path]:
    """Return the folders of results."""
    return sorted(path for path in RESULTS.iterdir() if path.is_dir())


def numbers(frame: pd.DataFrame) -> dict[str, str]:
    """Return what rows say of themselves: hours, seeds, and how far two seeds differ."""
    hours = frame["seconds.wall"].sum() / 3600
    seeds = sorted(frame["seed"].dropna().astype(int).unique())
    metric = "test_on_acc" if "test_on_acc" in frame else "test_on_loss"
    scores = frame[frame[metric].notna()].groupby("setting_id")[metric]
    spread = pair_spread([list(values) for _, values in scores])
    accuracy = metric == "test_on_acc"
    differ = f"{100 * spread:.1f} points of accuracy" if accuracy else f"{spread:.3f} nats"
    return {
        "Hours": f"{hours:.2g} of wall time, of {len(frame)} runs with one thread or two",
        "Seeds": f"{len(seeds)} ({seeds[0]} to {seeds[-1]}); not all of each setting",
        "differ": differ,
    }


def lines(folder: Path) -> dict[str, str]:
    """Return what the end of a folder's README says, by label."""
    name = folder.name
    if name in BY_HAND:
        facts = BY_HAND[name]
        commit = _commit(folder / facts.file)
        return {
            "Command": facts.command,
            "Machine": CORES,
            "Versions": _versions(commit),
            "Commit": commit,
            "Hours": facts.hours,
            "Seeds": facts.seeds,
            "Another machine": facts.another_machine,
        }
    frame = pd.read_csv(folder / "rows.csv", low_memory=False)
    found = numbers(frame)
    commit, machine = _commit(folder / "rows.csv"), CORES
    versions = _versions(commit)
    if "environment.processor" in frame and frame["environment.processor"].notna().any():
        environment = frame[frame["environment.processor"].notna()].iloc[0]
        machine = f"{CORES} ({environment['environment.processor']})"
        versions = f"torch {environment['environment.torch']}"
        commit = str(environment["environment.commit"])
    return {
        "Command": f"`commsweep sweep launch {name}`, then `commsweep report {name}`",
        "Machine": machine,
        "Versions": versions,
        "Commit": commit,
        "Hours": found["Hours"],
        "Seeds": found["Seeds"],
        "Another machine": (
            f"a run may be another draw; two seeds of a setting differ by at most "
            f"{found['differ']} in 95 of 100 pairs. `commsweep verify docs/results/{name}` compares"
        ),
    }


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=RESULTS, check=True, capture_output=True, text=True
    ).stdout


def _commit(path: Path) -> str:
    """Return the commit that wrote a file last."""
    return _git("log", "-1", "--format=%h", "--abbrev=12", "--", str(path)).strip()


def _versions(commit: str) -> str:
    """Return the version of torch that the lock of a commit names."""
    lock = _git("show", f"{commit}:requirements.lock")
    torch = re.search(r"^torch==([\w.]+)", lock, re.MULTILINE)
    assert torch is not None
    return f"torch {torch[1]}, and the others of requirements.lock at that commit"


def main() -> None:
    """Write the end of every README."""
    for folder in folders():
        path = folder / "README.md"
        text = path.read_text(encoding="utf-8") if path.is_file() else NEW.format(name=folder.name)
        before = text.partition(HEAD)[0].rstrip()
        labelled = [f"* **{label}**: {value}." for label, value in lines(folder).items()]
        path.write_text(f"{before}\n\n{HEAD}\n\n" + "\n".join(labelled) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

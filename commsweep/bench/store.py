"""`commsweep bench store`: status, plan, list, loading and a report of 10,000 finished runs
(seconds and memory, not ratios).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from commsweep.bench import Result
from commsweep.config import Run, override, record, run_id
from commsweep.config.run import SCHEMA
from commsweep.launching.grid import product, seeds
from commsweep.launching.launch import missing
from commsweep.registry import preset, sweep
from commsweep.store import Store, write_json

RUNS = 10_000


def bench() -> Iterator[Result]:
    """Yield what a user waits for when a store has grown large. The rows are made up; nothing is
    trained.
    """
    from commsweep.reporting import (
        report,
        report_parts,
        results,
    )  # pandas and matplotlib are not what is timed

    runs = grid()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        generate(store, runs)
        ids = [run_id(run) for run in sweep("ten_thousand", store)]
        yield _timed(
            "statuses of 10,000 finished runs", 2.0, lambda: store.statuses(ids, store.rows())
        )
        yield _timed("what is missing of them", 2.0, lambda: missing(runs, store))
        yield _timed("loading all rows, first time", 5.0, lambda: results.load(folder))
        yield _timed("loading all rows, again", 1.0, lambda: results.load(folder))
        frame = results.load(folder)
        yield _timed("all tables of them", 2.0, lambda: report_parts.all_tables(frame))
        out = Path(folder) / ".out"
        yield _timed(
            "report of 10,000 runs", 15.0, lambda: report.write(Path(folder), "ten_thousand", out)
        )
        yield Result("its page (MB)", (out / "report.html").stat().st_size / 1e6, 5.0)
        for command in ("list", "sweep status"):
            arguments = [*command.split(), *["ten_thousand"][: command != "list"]]
            yield _memory(f"{command} of 10,000 runs", 300, arguments, folder)
    with tempfile.TemporaryDirectory() as folder:
        generate(Store(Path(folder)), runs[:2000], points=20)
        arguments = ["report", "ten_thousand", "--out", str(Path(folder) / ".out")]
        yield _memory("report of 2,000 runs of 20 points", 500, arguments, folder)


def _memory(name: str, bound: float, arguments: list[str], folder: str) -> Result:
    """The largest memory of a command on a store."""
    code = (
        "import sys; from commsweep.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "status = open('/proc/self/status').read(); print(status.split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--store", folder],
        capture_output=True,
        text=True,
        check=True,
    )
    return Result(f"{name} (MiB)", int(done.stdout.split()[-1]) / 1024, bound)


def grid() -> list[Run]:
    """10,000 Runs: dense and six TopK levels over many seeds."""
    base = preset("digits")
    feedback = override(base, {"fwd.compressor.kind": "topk", "fwd.feedback.kind": "ef"})
    axes = {
        "fwd.compressor.kind+bwd.compressor.kind": ("topk",),
        "fwd.compressor.ratio+bwd.compressor.ratio": (0.5, 0.3, 0.2, 0.1, 0.05, 0.02),
    }
    cells = [base, *product(base, axes), *product(feedback, axes)]
    return seeds(cells, -(-RUNS // len(cells)))[:RUNS]


def generate(store: Store, runs: list[Run], points: int = 5) -> None:
    """A finished run folder for each, with so many evaluations, and the sweep that names them."""
    named = {}
    for index, run in enumerate(runs):
        name, settings = run_id(run), record(run)
        named[name] = settings
        folder = store.root / name
        folder.mkdir()
        scores = {
            f"{split}_{mode}_{metric}": 0.5 + (index % 97) / 200
            for split in ("val", "test")
            for mode in ("on", "off")
            for metric in ("acc", "loss")
        }
        cuts: tuple[str, ...] = run.model.model_dump()["cuts"]
        boundaries = {
            cut: {
                "fwd": 1000,
                "bwd": 1000,
                "fwd_dense": 9000,
                "bwd_dense": 9000,
                "calls": 10,
                "samples": 80,
            }
            for cut in cuts
        }
        row = {
            "schema": SCHEMA,
            "id": name,
            "status": "finished",
            "error": None,
            "run": settings,
            "metrics": scores,
            "steps": 10,
            "boundaries": boundaries,
            "bytes": {"fwd_per_step": 3e3, "bwd_per_step": 3e3, "ratio": 0.11},
            "seconds": {"train": 3.0, "eval": 1.0, "wall": 4.0},
            "when": "2026-01-01T00:00:00+00:00",
        }
        (folder / "run.json").write_text(
            json.dumps({"schema": SCHEMA, "id": name, "run": settings}), encoding="utf-8"
        )
        (folder / "done.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
        (folder / "metrics.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "epoch": epoch,
                        "step": 20 * epoch,
                        "bytes": 9000 * epoch,
                        "seconds": 0.1 * epoch,
                        "train_loss": 1 / epoch,
                        **scores,
                    }
                )
                + "\n"
                for epoch in range(2, 2 * points + 1, 2)
            ),
            encoding="utf-8",
        )
    write_json(store.root / "sweeps" / "ten_thousand.json", {"name": "ten_thousand", "runs": named})


def _timed(name: str, bound: float, call: Callable[[], object]) -> Result:
    started = time.perf_counter()
    call()
    return Result(f"{name} (seconds)", time.perf_counter() - started, bound)

"""What must never change by accident: ids of all presets and sweeps, and the numbers of some
sweeps, bit for bit.

A capability that is absent from a Run leaves its id and its numbers alone, and a store written
today stays readable. `python -m tests.test_golden` writes the files anew, which is right only when
a change of results was meant.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from commsweep.config import Execution, run_id
from commsweep.config.renames import current_names
from commsweep.registry import presets, sweep, sweeps
from commsweep.store import Store, write_json
from commsweep.training.record import processor
from commsweep.training.run import execute

HERE = Path(__file__).parent / "golden"
KEPT = ("run", "status", "metrics", "steps", "boundaries", "bytes", "gradients")
QUICK, SLOW = ("smoke",), ("smoke-text", "smoke-gradients", "digits_methods")


def ids() -> dict[str, dict]:
    """Every preset's id; of every sweep how many runs it names, and a digest of their ids in
    order.
    """
    known = {name: [run_id(run) for run in sweep(name)] for name in sweeps()}
    return {
        "presets": {name: run_id(run) for name, run in presets().items()},
        "sweeps": {
            name: [len(own), hashlib.sha256(" ".join(own).encode()).hexdigest()[:16]]
            for name, own in known.items()
        },
    }


def cells(name: str) -> list:
    return (
        [run for run in sweep(name) if run.seed == 0] if name == "digits_methods" else sweep(name)
    )


def rows(name: str) -> list[dict]:
    """What these runs come to here."""
    with tempfile.TemporaryDirectory() as folder:
        made = [execute(run, Store(folder), Execution("cpu")) for run in cells(name)]
    return [{key: row.get(key) for key in KEPT} for row in made]


def machine() -> str:
    """What the last bits depend on beside the code: two processors with the same instructions may
    sum in other orders, because libraries choose by maker and model.
    """
    return f"torch {torch.__version__.split('+')[0]} {torch.backends.cpu.get_cpu_capability()} {processor()}"


def near(now: dict, before: dict, within: float) -> bool:
    """Whether losses lie as close to each other as last bits let them after some steps."""
    return all(
        now[key] == pytest.approx(value, rel=within)
        for key, value in before.items()
        if key.endswith("loss")
    )


def test_ids_of_presets_and_sweeps_are_what_they_were():
    assert ids() == json.loads((HERE / "ids.json").read_text())


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_numbers_are_what_they_were(name):
    """Bit for bit on the kind of processor that wrote them; elsewhere what does not depend on the
    last bits, and losses of few steps nearly.
    """
    golden = json.loads(gzip.decompress((HERE / f"{name}.json.gz").read_bytes()))
    made = json.loads(json.dumps(rows(name)))
    assert [run_id(run) for run in cells(name)] == golden["ids"]
    for now, before in zip(made, golden["rows"], strict=True):
        before["run"] = current_names(before["run"])  # written under the names of then
        if golden["machine"] == machine():
            assert now == before
        else:
            assert {key: now[key] for key in ("run", "status", "steps")} == {
                key: before[key] for key in ("run", "status", "steps")
            }
            assert name not in QUICK or near(now["metrics"], before["metrics"], 0.05)


def test_a_store_written_in_this_schema_is_read(store):
    """Rows as they were recorded when the schema was made."""
    from commsweep.launching.launch import register
    from commsweep.reporting import report_parts, results

    golden = json.loads(gzip.decompress((HERE / "smoke.json.gz").read_bytes()))
    for name, row in zip(golden["ids"], golden["rows"], strict=True):
        write_json(
            store.root / name / "done.json",
            row | {"id": name, "schema": golden["schema"], "error": None, "seconds": {}},
        )
    register("smoke", sweep("smoke"), store)
    frame = results.load(store.root, "smoke")
    assert (frame.status == "finished").all() and len(report_parts.all_tables(frame)) > 5


def main() -> None:
    """Write the files anew."""
    from commsweep.config.run import SCHEMA

    HERE.mkdir(exist_ok=True)
    write_json(HERE / "ids.json", ids())
    for name in sys.argv[1:] or (*QUICK, *SLOW):
        text = json.dumps(
            {
                "schema": SCHEMA,
                "machine": machine(),
                "ids": [run_id(run) for run in cells(name)],
                "rows": rows(name),
            }
        )
        (HERE / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()

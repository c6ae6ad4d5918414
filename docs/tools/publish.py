"""Takes the runs of a store into a folder of docs/results: rows and thinned curves.

`python -m docs.tools.publish STORE NAME ...` replaces rows.csv and curves.csv.gz of these folders;
`python -m docs.tools.renew NAME ...` then writes verdicts, tables and figures from them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from commsweep.reporting import results
from commsweep.reporting.published import CURVES
from docs.tools.renew import RESULTS

MOST = 50  # points of a run


def thinned(points: pd.DataFrame) -> pd.DataFrame:
    """At most `MOST` points a run, evenly chosen, the last one kept."""
    chosen = []
    for _, run in points.groupby("id", sort=False):
        stride = -(-len(run) // MOST)
        chosen.append(run.iloc[::-1].iloc[::stride].iloc[::-1])
    return pd.concat(chosen) if chosen else points


def publish(store: Path, name: str) -> str:
    """Write the rows and curves of a sweep; a sentence on what changed."""
    folder = RESULTS / name
    frame = results.load(store, name)
    lost = frame[~frame.status.isin(["finished", "diverged"])]
    if len(lost):
        return f"{name}: left as it is, {len(lost)} runs have no outcome"
    sentence = f"{name}: {len(frame)} runs"
    if (folder / "rows.csv").exists():
        before = pd.read_csv(folder / "rows.csv", dtype={"id": str}, low_memory=False)
        shared = frame.merge(before, on="id", suffixes=("", "_before"))
        score = "test_on_loss" if "test_on_loss" in shared else "test_on_acc"
        equal = (shared[score] - shared[f"{score}_before"]).abs() < 1e-9
        sentence += f", {int(equal.sum())} of {len(before)} scores as before"
        if len(shared) < len(before):
            return f"{sentence}; left as it is, because runs are missing"
    frame.to_csv(folder / "rows.csv", index=False)
    points = thinned(results.points(store, list(frame.id)))
    points.to_csv(folder / CURVES, index=False, compression={"method": "gzip", "mtime": 0})
    return f"{sentence}, {len(points)} points"


def main() -> None:
    """Publish the sweeps that are named."""
    for name in sys.argv[2:]:
        print(publish(Path(sys.argv[1]), name), flush=True)


if __name__ == "__main__":
    main()

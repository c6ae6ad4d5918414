"""Verdicts on a table that any tool may have written: which settings differ, and which do not?

    python examples/verdicts.py

Prints, with other numbers on another machine:

    | setting  | n | mean ± sd     | median | 95 % of the mean |  |
    | dense    | 6 | 2.001 ± 0.021 | 2.004  | [1.979, 2.023]   |  |
    | eden:2   | 6 | 2.014 ± 0.028 | 2.004  | [1.984, 2.043]   |  |
    | topk:0.1 | 6 | 2.193 ± 0.026 | 2.184  | [2.165, 2.220]   |  |
    - topk:0.1 > dense + 0.1: +0.192 [+0.173, +0.211] at 97.5 %, n=6: supported
"""

import csv
import random
from pathlib import Path

from commsweep.reporting import foreign_rows
from commsweep.reporting.judge import columns, judge, table, verdicts

if __name__ == "__main__":
    random.seed(0)
    path = Path("out/example_runs.csv")
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["codec", "seed", "val_loss"])
        for seed in range(6):
            luck = random.gauss(0, 0.02)  # of the seed, in all settings
            for codec, harm in {"dense": 0.0, "eden:2": 0.01, "topk:0.1": 0.2}.items():
                writer.writerow([codec, seed, 2 + luck + harm + random.gauss(0, 0.01)])
    rows = foreign_rows.read(path)
    judged = judge(rows, columns(rows), claims=["topk:0.1 > dense + 0.1", "eden:2 = dense +- 0.05"])
    print(table(judged).markdown())
    print(verdicts(judged))

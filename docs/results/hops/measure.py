"""Measures the error of sums that are rounded on the way, on gradients of a nano GPT-2.

python docs/results/hops/measure.py    # writes errors.csv beside it, in a quarter of an hour
"""

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from commsweep.collectives import Simulated
from commsweep.compressors import build, message
from commsweep.config import Execution
from commsweep.data_parallel.hops import ALL_TO_ALL, RING, TREE, Hops
from commsweep.registry import preset
from commsweep.training import run as training

LEARNERS = (2, 4, 8, 16, 32, 64, 128, 256)
MOST_DRAWN = 64  # learners; above, only codes that are simulated as one batch
STOCHASTIC = "rounding=stochastic,scale=group,group=128"
CODES = {
    "bfloat16": "cast:to=bfloat16",
    "MXFP8 e4m3": "mxfp8_e4m3",
    "MXFP8 e5m2": "mxfp8_e5m2",
    "8 bits, nearest": "uniform:8,scale=group,group=128",
    "8 bits, stochastic": f"uniform:8,{STOCHASTIC}",
    "4 bits, nearest": "uniform:4,scale=group,group=128",
    "4 bits, stochastic": f"uniform:4,{STOCHASTIC}",
}
LAYERS = ("transformer.h.0.attn.c_proj.weight", "transformer.h.3.mlp.c_proj.weight")
STEPS, SHARE, SETS = 100, 2, 3  # of training before, samples of a learner, sets of learners


def gradients(seed):
    """Return the gradients of the learners, [learner][layer], after a short training."""
    built = training.build(preset("sotu_nano", seed=seed), Execution())
    model = built.task.model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    layers = [dict(model.named_parameters())[name] for name in LAYERS]
    x = built.data.train.x
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for step in range(STEPS + max(LEARNERS)):
        size = 16 if step < STEPS else SHARE
        batch = x[torch.randint(len(x), (size,), generator=generator)].long()
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        if step < STEPS:
            optimizer.step()
        else:
            rows.append([layer.grad.clone() for layer in layers])
    return rows


def table(path):
    """Write errors.md: the growth of the error with the number of learners, by code."""
    rows = pd.read_csv(path)
    text = (
        "| code | collective | exponent [lowest, highest] | n = 2 | 8 | 64 | 256 |\n" + "|---" * 7
    )
    for (code, way), cells in rows.groupby(["code", "collective"]):
        slopes = []
        for _, ours in cells[cells.learners.between(4, 64)].groupby("set"):
            slopes.append(np.polyfit(np.log(ours.learners), np.log(ours.error), 1)[0])
        means = cells.groupby("learners").error.mean()
        errors = [f"{means[n]:.4f}" if n in means else "-" for n in (2, 8, 64, 256)]
        growth = f"{np.mean(slopes):.2f} [{min(slopes):.2f}, {max(slopes):.2f}]"
        text += f"|\n| {code} | {way} | {growth} | {' | '.join(errors)} "
    path.with_name("errors.md").write_text(text + "|\n", encoding="utf-8")


def main():
    address = message.Address(message.digest("hops"), 0)
    with open(Path(__file__).with_name("errors.csv"), "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["set", "learners", "collective", "code", "error"])
        for number in range(SETS):
            grads = gradients(number)
            for n in LEARNERS:
                exact = [
                    torch.stack(list(column)).double().mean(0)
                    for column in zip(*grads[:n], strict=True)
                ]
                for name, code in CODES.items():
                    if n > MOST_DRAWN and ("stochastic" in name or "MX" in name):
                        continue
                    for way in (RING, TREE, ALL_TO_ALL):
                        draw = lambda layer, learner, hop: hash((number, layer, learner, hop))  # noqa: E731, B023
                        codes = [build(code)] * len(LAYERS)
                        means = (
                            Hops(Simulated(n), codes, draw, address).reduce(way, grads[:n]).means
                        )
                        off = sum(
                            float((m - e).norm() ** 2) for m, e in zip(means, exact, strict=True)
                        )
                        whole = sum(float(e.norm() ** 2) for e in exact)
                        writer.writerow([number, n, way, name, (off / whole) ** 0.5])
                handle.flush()
                print(number, n, flush=True)


if __name__ == "__main__":
    main()
    table(Path(__file__).with_name("errors.csv"))

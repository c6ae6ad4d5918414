"""Measures what codes of gathered weights cost a nano GPT-2: FSDP by hand, two processes in turn.

python docs/results/weights/sharded.py    # adds to sharded.csv what it lacks, in half an hour

Each of two processes owns half of the rows of every weight, in float32. Before a step all compute
with the decoded halves, as `compress_fsdp(weights=...)` does; `tests/integrations/test_fsdp.py`
compares the two. Gradients are dense. In the control nothing is sent: a process computes with its
own half as it is, and the other's as it was in the beginning.

Registered before the runs, of worth kept at 400 steps: 8 bits keep at least 95 %; 6 bits at least
80 %; 4 bits, rounded to nearest, keep less than 6 bits.
"""

import csv
import os
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from commsweep import compressors
from commsweep.config import Execution
from commsweep.registry import preset
from commsweep.reporting.worth import share_kept
from commsweep.training import optim
from commsweep.training import run as training

STEPS, SEEDS = 400, (60, 61, 62)
GROUPED = "scale=group,group=128"
CODES = {
    "dense": "none",
    "nothing sent": None,
    "8 bits": f"uniform:8,{GROUPED}",
    "6 bits": f"uniform:6,{GROUPED}",
    "4 bits": f"uniform:4,{GROUPED}",
    "4 bits, stochastic": f"uniform:4,rounding=stochastic,{GROUPED}",
    "MXFP8 e4m3": "mxfp8_e4m3",
    "MXFP4": "mxfp4",
}
ROWS = Path(__file__).with_name("sharded.csv")


def halves(weight):
    """Return the rows that each process owns, as messages of one row."""
    return [half.reshape(1, -1) for half in weight.chunk(2)]


def gathered(weights, code, begun, me, seed):
    """Return the weights that process `me` computes with. begun: these at the beginning."""
    computed = []
    for number, weight in enumerate(weights):
        parts = halves(weight)
        if code is None:
            stale = halves(begun[number])
            parts = [parts[k] if k == me else stale[k] for k in range(len(parts))]
        else:
            drawn = 1000 * seed + number
            parts = [code.roundtrip(half, drawn) for half in parts]
        computed.append(torch.cat([half.view(-1) for half in parts]).view_as(weight))
    return computed


def training_loss(name, seed):
    """Return the loss on the test set after a training, and the bytes of a gather beside dense."""
    run = preset("sotu_nano", seed=seed, **{"data.train_blocks": 16 * STEPS})
    built = training.build(run, Execution())
    model = built.task.model
    weights = list(model.parameters())
    begun = [weight.detach().clone() for weight in weights]
    code = None if CODES[name] is None else compressors.build(CODES[name])
    optimizer = optim.optimizer(run, weights)
    rates, _ = optim.rates(run, optimizer, STEPS)
    x = built.data.train.x
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    for step in range(STEPS):
        batch = x[order[16 * step : 16 * (step + 1)]].long()
        kept = [weight.detach().clone() for weight in weights]
        optimizer.zero_grad()
        for me, share in enumerate(batch.chunk(2)):
            computed = gathered(kept, code, begun, me, STEPS * seed + step)
            for weight, value in zip(weights, computed, strict=True):
                weight.data = value.clone()
            logits = model(input_ids=share).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), share[:, 1:].flatten())
            (loss / 2).backward()
        for weight, value in zip(weights, kept, strict=True):
            weight.data = value
        torch.nn.utils.clip_grad_norm_(weights, run.optim.clip)
        optimizer.step()
        rates.step()
    return tested(model, built.data.test.x.long(), weights, begun, code)


@torch.no_grad()
def tested(model, x, weights, begun, code):
    """Return (the loss with weights as they would be gathered once more, bytes beside dense)."""
    kept = [weight.detach().clone() for weight in weights]
    losses = []
    for me in range(2):
        for weight, value in zip(weights, gathered(kept, code, begun, me, 0), strict=True):
            weight.data = value.clone()
        for share in x.split(64):
            logits = model(input_ids=share).logits
            losses.append(cross_entropy(logits[:, :-1].flatten(0, 1), share[:, 1:].flatten()))
    dense = sum(4 * half.numel() for weight in kept for half in halves(weight))
    sent = 0
    for weight in kept if code is not None else ():
        sent += sum(code.encode(half).nbytes for half in halves(weight))
    return float(sum(losses) / len(losses)), float(sent / dense)


def main():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    recorded = {}
    if ROWS.is_file():
        for row in csv.DictReader(ROWS.read_text().splitlines()):
            recorded[row["code"], int(row["seed"])] = float(row["loss"])
    with open(ROWS, "a", newline="") as handle:
        writer = csv.writer(handle)
        if not recorded:
            writer.writerow(["code", "seed", "loss", "share"])
        for seed in SEEDS:
            for name in CODES:
                if (name, seed) in recorded:
                    continue
                loss, share = training_loss(name, seed)
                recorded[name, seed] = loss
                writer.writerow([name, seed, f"{loss:.6f}", f"{share:.5f}"])
                handle.flush()
                print(name, seed, f"{loss:.4f}", flush=True)
    for name in CODES:
        losses = {
            setting: [recorded[setting, seed] for seed in SEEDS]
            for setting in (name, "dense", "nothing sent")
        }
        kept = share_kept(losses["nothing sent"], losses[name], losses["dense"])
        print(f"{name:20} {kept.text()}")


if __name__ == "__main__":
    main()

"""Measures what sums that are rounded on the way cost a training, by the number of learners.

python docs/results/hops/training.py    # adds what training.csv lacks; half an hour

A nano GPT-2 takes 60 steps of 256 sequences of 32 bytes. The sequences of a step are dealt out to
n learners, so that the dense training is the same whatever n is, and the sum alone differs. All
weights are one layer, as they are in the buckets of DistributedDataParallel. In the control nothing
is sent, and nobody moves.

Registered before the runs, of nats of test loss against dense:
    an 8-bit ring, rounded to nearest, costs less than 0.01 with 256 learners
    a 4-bit ring, rounded to nearest, costs more than 0.01 with 16 learners
    with 256 learners a 4-bit tree and 4-bit all-to-all cost less than the 4-bit ring
"""

import copy
import csv
from pathlib import Path

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from transformers import GPT2LMHeadModel

from commsweep.collectives import Simulated
from commsweep.compressors import build, message
from commsweep.config import Execution
from commsweep.data_parallel.hops import ALL_TO_ALL, RING, TREE, Hops
from commsweep.registry import preset
from commsweep.training import optim
from commsweep.training import run as training

SEQUENCES, STEPS, SEED, GROUP = 256, 60, 80, 128
DENSE, NOTHING = "dense", "nothing sent"
GROUPED = f"scale=group,group={GROUP}"
CODES = {
    "8 bits, nearest": f"uniform:8,{GROUPED}",
    "4 bits, nearest": f"uniform:4,{GROUPED}",
    "MXFP8 e4m3": "mxfp8_e4m3",
}
CELLS = [
    (DENSE, "", 1),
    (NOTHING, "", 1),
    *((code, RING, n) for n in (16, 256, 64, 4) for code in CODES),
    *(("4 bits, nearest", way, 256) for way in (TREE, ALL_TO_ALL)),
]
ROWS = Path(__file__).with_name("training.csv")


class Trained:
    """A nano GPT-2 without boundaries, its data and its optimizer."""

    def __init__(self) -> None:
        length = {"data.block_size": 32, "data.train_blocks": SEQUENCES * STEPS}
        run = preset("sotu_nano", seed=SEED, **length)
        built = training.build(run, Execution())
        config = copy.deepcopy(built.task.model.config)
        config._attn_implementation = "eager"  # the other one knows no vmap
        self.model = GPT2LMHeadModel(config).eval()
        self.model.load_state_dict(built.task.model.state_dict())
        self.weights = list(self.model.parameters())
        self.optimizer = optim.optimizer(run, self.weights)
        self.rates, _ = optim.rates(run, self.optimizer, STEPS)
        self.clip = run.optim.clip
        self.x, self.test = built.data.train.x.long(), built.data.test.x.long()
        generator = torch.Generator().manual_seed(SEED)
        self.order = torch.randperm(len(self.x), generator=generator)

    def loss(self, weights, x):
        """Return the loss of sequences, whatever the weights are."""
        logits = functional_call(self.model, weights, (), {"input_ids": x}).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    def gradients(self, step, learners):
        """Return the learners' gradients [learner, all weights], in float32."""
        batch = self.x[self.order[SEQUENCES * step : SEQUENCES * (step + 1)]]
        shares = batch.view(learners, SEQUENCES // learners, -1)
        weights = {name: value.detach() for name, value in self.model.named_parameters()}
        size = max(1, 64 * learners // SEQUENCES)
        grads = vmap(grad(self.loss), in_dims=(None, 0), chunk_size=size)(weights, shares)
        rows = [grads[name].flatten(1) for name, _ in self.model.named_parameters()]
        return torch.cat(rows, dim=1)

    def step(self, mean):
        """Take a step along a gradient of all weights."""
        sizes = [weight.numel() for weight in self.weights]
        for weight, value in zip(self.weights, mean.split(sizes), strict=True):
            weight.grad = value.view_as(weight).clone()
        torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
        self.optimizer.step()
        self.rates.step()

    def score(self):
        """Return the loss on the test set."""
        with torch.no_grad():
            return float(self.model(input_ids=self.test, labels=self.test).loss)


def summed(rows, code, way, step):
    """Return the mean of the learners' rows as a collective has it."""
    n, size = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -size % (n * GROUP)))

    def draw(layer, learner, hop):
        return hash((SEED, step, layer, learner, hop))

    address = message.Address(message.digest("hops"), step)
    hops = Hops(Simulated(n), [build(CODES[code])], draw, address)
    return hops.reduce(way, [[row] for row in padded]).means[0][:size]


def test_loss(code, way, learners):
    """Return the test loss after a training."""
    trained = Trained()
    for step in range(0 if code == NOTHING else STEPS):
        rows = trained.gradients(step, learners)
        trained.step(rows[0] if code == DENSE else summed(rows, code, way, step))
    return trained.score()


def main():
    """Train what training.csv lacks."""
    recorded = set()
    if ROWS.is_file():
        with open(ROWS, newline="") as handle:
            recorded = {
                (row["code"], row["collective"], int(row["learners"]))
                for row in csv.DictReader(handle)
            }
    else:
        ROWS.write_text("code,collective,learners,seed,loss\n", encoding="utf-8")
    for cell in CELLS:
        if cell not in recorded:
            loss = test_loss(*cell)
            with open(ROWS, "a", newline="") as handle:
                csv.writer(handle).writerow([*cell, SEED, loss])
            print(*cell, loss, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

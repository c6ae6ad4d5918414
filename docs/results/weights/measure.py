"""Measures weight updates of SmolLM2-135M, fine-tuned with AdamW, beside zstd and their entropy.

uv pip install -r requirements-finetune.txt zstandard
python docs/results/weights/measure.py    # writes updates.csv beside it, an hour of one core
"""

import csv
import time
from pathlib import Path

import numpy as np
import torch
import zstandard

from commsweep.config import Execution
from commsweep.integrations.weights import WeightReceiver, WeightSender, entropy
from commsweep.registry import preset
from commsweep.training import run as training

RATES, STEPS, EVERY, SAMPLES = (1e-6, 1e-5, 1e-4), 40, 8, 1


def timed(function, *arguments):
    """Return (what a function returns, seconds)."""
    began = time.perf_counter()
    return function(*arguments), time.perf_counter() - began


def rivals(before, after):
    """Return bytes and seconds of zstd on the raw difference, and on places and values."""
    changes = [(before[n].view(torch.int16) ^ after[n].view(torch.int16)).view(-1) for n in after]
    bits = torch.cat(changes).numpy()
    found = {}
    for level in (1, 3):
        packed, encoding = timed(zstandard.ZstdCompressor(level=level).compress, bits.tobytes())
        _, decoding = timed(zstandard.ZstdDecompressor().decompress, packed)
        found |= {f"zstd{level}": len(packed), f"zstd{level}_seconds": encoding + decoding}
    places = np.flatnonzero(bits)
    text = np.diff(places, prepend=0).astype(np.uint32).tobytes() + bits[places].tobytes()
    return found | {"zstd3_places": len(zstandard.ZstdCompressor(level=3).compress(text))}


def main():
    torch.set_num_threads(1)
    rows = []
    for rate in RATES:
        built = training.build(preset("smollm2"), Execution())
        model, x = built.task.model.train(), built.data.train.x
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        sender, receiver = WeightSender(model, dtype=torch.bfloat16), WeightReceiver()
        receiver.apply(sender.encode(0).data)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, STEPS + 1):
            batch = x[torch.randint(len(x), (SAMPLES,), generator=generator)].long()
            looked = step % EVERY == 0
            if looked:
                receiver.apply(sender.encode(2 * step - 1).data)
                before = {name: t.clone() for name, t in receiver.tensors.items()}
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            if looked:
                message, encoding = timed(sender.encode, 2 * step)
                _, decoding = timed(receiver.apply, message.data)
                row = {
                    "rate": rate,
                    "step": step,
                    "changed": message.changed,
                    "ours": message.nbytes,
                }
                row |= {
                    "entropy": entropy(before, receiver.tensors),
                    "seconds": encoding + decoding,
                }
                rows.append(row | rivals(before, receiver.tensors))
                with open(Path(__file__).with_name("updates.csv"), "w", newline="") as handle:
                    writer = csv.DictWriter(handle, rows[0].keys())
                    writer.writeheader()
                    writer.writerows(rows)
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()

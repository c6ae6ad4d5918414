"""A pipeline of two processes whose messages travel packed: 8 bits forward, EDEN's 2 bits back.

    python examples/pipeline.py

Prints, with other numbers on another machine:

    step 20: loss 0.84
    step 40: loss 0.76
"""

import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from commsweep.integrations.pipelining import CompressedStage

FWD = {"compressor": {"kind": "uniform", "bits": 8}}
BWD = {"compressor": {"kind": "eden", "bits": 2}}
BATCH, MICROBATCHES, WIDTH = 32, 4, 64


def train(rank, port):
    """Train one of two stages; the last one knows the loss and prints it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    split = {"rows": BATCH // MICROBATCHES, "microbatches": MICROBATCHES}
    device = torch.device("cpu")
    stage = CompressedStage(body, rank, 2, device, (WIDTH,), **split, fwd=FWD, bwd=BWD)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(body.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses = []
            schedule.step(target=x.roll(1, 1), losses=losses)
            if step % 20 == 19:
                print(f"step {step + 1}: loss {sum(losses).item() / len(losses):.2f}")
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=2)

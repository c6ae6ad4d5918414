"""DiLoCo around any optimizer: two processes exchange every 16 steps, in 4 bits.

    python examples/diloco.py

Prints, with other numbers on another machine:

    step 16: loss 1.11
    step 32: loss 0.48
    step 48: loss 0.22
    step 64: loss 0.40
    both processes end with the same weights: True
"""

import socket

import torch
import torch.distributed as dist
from torch import nn

from commsweep.integrations.outer import OuterOptimizer


def train(rank, port):
    """Train a small network in one of two processes; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    four_bits = {"kind": "uniform", "bits": 4}
    optimizer = OuterOptimizer(model, inner, interval=16, compressor=four_bits)
    generator = torch.Generator().manual_seed(rank)
    for step in range(64):
        x = torch.randn(64, 32, generator=generator)
        loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 16 == 15:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    optimizer.finish()
    digest = sum(p.detach().double().sum().item() for p in model.parameters())
    others = [None, None]
    dist.all_gather_object(others, digest)
    if rank == 0:
        print(f"both processes end with the same weights: {others[0] == others[1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=2)

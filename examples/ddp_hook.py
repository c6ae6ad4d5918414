"""Compressed gradients in DistributedDataParallel: TopK with error feedback, two processes.

    python examples/ddp_hook.py

Prints, with other numbers on another machine:

    step 20: loss 1.26
    step 40: loss 0.56
    step 60: loss 0.48
    sent 1940 bytes a step, dense 21024
"""

import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commsweep as cs


def train(rank, port):
    """Train a small network in one of two processes; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    ddp = DistributedDataParallel(model)
    hook = cs.CompressionHook(model, "topk:0.05", feedback={"kind": "ef"})
    hook.attach(ddp)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(60):
        x = torch.randn(64, 32, generator=generator)
        loss = nn.functional.cross_entropy(ddp(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    if rank == 0:
        totals = hook.totals()
        dense = 4 * sum(p.numel() for p in model.parameters())
        print(f"sent {totals['up']:.0f} bytes a step, dense {dense}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=2)

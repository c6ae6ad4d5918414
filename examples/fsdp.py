"""FSDP2 with gradients and weights in 8 bits, two processes.

    python examples/fsdp.py

Prints, with other numbers on another machine:

    step 20: loss 0.81
    step 40: loss 0.44
    gradients: 2804 bytes a step, dense 10512
    weights:   5608 bytes a step, dense 21024
"""

import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from commsweep.integrations.fsdp import compress_fsdp


def train(rank, port):
    """Train a small network in one of two processes; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    eight = "uniform:8,scale=group,group=128"
    wire = compress_fsdp(model, eight, weights=eight)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(40):
        x = torch.randn(64, 32, generator=generator)
        loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.2f}")
    totals = wire.totals()
    if rank == 0:
        print(f"gradients: {totals['bytes']:.0f} bytes a step, dense {totals['dense']:.0f}")
        weights, dense = totals["weights.bytes"], totals["weights.dense"]
        print(f"weights:   {weights:.0f} bytes a step, dense {dense:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=2)

"""`commsweep bench hook`: a training step with CompressionHook beside DistributedDataParallel alone
and with torch's own hooks; two gloo processes of one thread each, which take their steps in turn.

Without a limit over loopback; at 100 Mbit/s where this machine lets namespaces be made (Linux,
root).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from commsweep.bench import Result, compared
from commsweep.config.execution import Cable
from commsweep.config.training import ImageModel
from commsweep.errors import UserError, notice
from commsweep.models import resnet

WIDTH, BATCH = 32, 16  # a ResNet-18 of 2.8 M weights
ROUNDS = 12
# ours beside torch's own hook, and how many times its step ours may take
PEERS = {
    "float16": "fp16_compress_hook",
    "bfloat16": "bf16_compress_hook",
    "PowerSGD, rank 4": "powerSGD_hook, rank 4",
}
BOUNDS = {"float16": 1.02, "bfloat16": 1.02, "PowerSGD, rank 4": 1.0}


def bench() -> Iterator[Result]:
    """Medians over rounds of a step over that of the plain one in the same round."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [os.environ | address | {"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    command = [sys.executable, "-m", "commsweep.bench.hook"]
    seconds = _taken([command] * 2, ranks)
    yield from _results("loopback", seconds, {"dense": 1.10})
    for ours, theirs in PEERS.items():
        yield _ratio("loopback", seconds, ours, theirs, BOUNDS[ours])
    from commsweep.processes.namespaces import star

    try:
        with star(2, Cable(bandwidth=100e6)) as network:
            members = [os.environ | environment for environment in network.environments()]
            seconds = _taken(network.commands(["commsweep.bench.hook"]), members)
    except UserError as error:
        notice(f"bench hook: 100 Mbit/s is left out ({error})")
        return
    yield from _results("100 Mbit/s", seconds, {"dense": 1.10})
    yield _ratio("100 Mbit/s", seconds, "TopK 1 %", "powerSGD_hook, rank 4", 1.0)


def _results(
    where: str, seconds: dict[str, list[float]], bounds: dict[str, float]
) -> Iterator[Result]:
    for name in seconds:
        if name != "plain":
            yield _ratio(where, seconds, name, "plain", bounds.get(name))


def _ratio(
    where: str, seconds: dict[str, list[float]], a: str, b: str, bound: float | None
) -> Result:
    return compared(f"{where}: {a} / {b}", seconds, a, b, bound)


def _taken(commands: list[list[str]], environments: list[dict[str, str]]) -> dict[str, list[float]]:
    """Seconds of a step by method and round, as the first process says."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                command,
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
                cwd=folder,
            )
            for command, environment in zip(commands, environments, strict=True)
        ]
        outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise UserError("bench hook: a process ended with an error (above)")
    return json.loads(outputs[0].splitlines()[-1])


def _work() -> dict[str, list[float]]:
    """Return what one process does: a step of each method in each round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides = {name: _step(attach) for name, attach in _methods().items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(-2, ROUNDS):
        for name, step in sides.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def _methods() -> dict[str, Callable[[nn.Module, Any], None]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    from commsweep.data_parallel.hook import CompressionHook

    def low_rank(net: nn.Module, ddp: Any) -> None:
        # compresses from the second step on
        state = power.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, power.powerSGD_hook)

    def ours(codec: str) -> Callable[[nn.Module, Any], None]:
        return lambda net, ddp: CompressionHook(net, codec).attach(ddp)

    return {
        "plain": lambda net, ddp: None,
        "dense": ours("none"),
        "TopK 1 %": ours("ef+topk:0.01"),
        "float16": ours("cast,to=float16"),
        "fp16_compress_hook": lambda net, ddp: ddp.register_comm_hook(
            None, default_hooks.fp16_compress_hook
        ),
        "bfloat16": ours("cast,to=bfloat16"),
        "bf16_compress_hook": lambda net, ddp: ddp.register_comm_hook(
            None, default_hooks.bf16_compress_hook
        ),
        "PowerSGD, rank 4": ours("ef+powersgd,rank=4"),
        "powerSGD_hook, rank 4": low_rank,
    }


def _step(attach: Callable[[nn.Module, Any], None]) -> Callable[[], None]:
    torch.manual_seed(0)
    net = resnet.build(ImageModel(name="resnet18", width=WIDTH), 3, 10)
    ddp = nn.parallel.DistributedDataParallel(net)
    attach(net, ddp)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(ddp(x), y).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    print(json.dumps(_work()))

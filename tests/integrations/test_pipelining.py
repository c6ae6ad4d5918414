"""Stages of torch.distributed.pipelining in codes: two processes against boundaries in one model."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import commsweep as cs
from commsweep.errors import UserError
from commsweep.integrations.pipelining import CompressedStage
from tests.helpers import spawned

ROWS, STEPS = 4, 3
UNIFORM = {"compressor": {"kind": "uniform", "bits": 4}}
TOPK = {"compressor": {"kind": "topk", "ratio": 0.25}}
TERN = {"compressor": {"kind": "tern"}}


def data(step, microbatches):
    x = torch.randn(ROWS * microbatches, 6, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 1))
    )


def simulated(fwd, bwd, microbatches):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    inserted = cs.insert(net, {"0": {"fwd": fwd, "bwd": bwd}}, torch.zeros(1, 6), ROWS)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = data(step, microbatches)
        for part, wanted in zip(x.split(ROWS), y.split(ROWS), strict=True):
            (nn.functional.mse_loss(net(part), wanted) / microbatches).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        seen = net(data(99, 1)[0])
    ledger = next(iter(inserted.ledger().values()))
    return [p.tolist() for p in net.parameters()], seen.tolist(), ledger


def _train(rank, port, said, fwd, bwd, microbatches, schedule):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    body, device = model()[rank], torch.device("cpu")
    stage = CompressedStage(body, rank, 2, device, (16,), ROWS, microbatches, fwd=fwd, bwd=bwd)
    engine = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule](
        stage, microbatches, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD(body.parameters(), 0.1)
    for step in range(STEPS):
        if step == 1:  # resumed in between
            state = stage.state_dict()
            stage.load_state_dict(state)
        optimizer.zero_grad()
        x, y = data(step, microbatches)
        engine.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": y}))
        optimizer.step()
    body.eval()
    with torch.no_grad():
        x, y = data(99, microbatches)
        seen = engine.eval(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": y}))
    said.put(
        (
            rank,
            [p.tolist() for p in body.parameters()],
            None if seen is None else seen.tolist(),
            stage.totals(),
        )
    )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fwd, bwd, microbatches, schedule",
    [
        (UNIFORM, TOPK, 2, "1f1b"),
        (TOPK, TERN, 2, "gpipe"),
        (TOPK | {"feedback": {"kind": "ef21"}}, TOPK | {"feedback": {"kind": "ef"}}, 1, "gpipe"),
        ({}, {}, 2, "1f1b"),
    ],
    ids=["codes", "draws", "feedback", "dense"],
)
def test_two_processes_are_the_simulation(fwd, bwd, microbatches, schedule):
    told = sorted(
        spawned(_train, 2, fwd, bwd, microbatches, schedule, answers=2), key=lambda one: one[0]
    )
    weights, seen, ledger = simulated(fwd, bwd, microbatches)
    assert told[0][1] + told[1][1] == weights
    assert told[0][3]["fwd"] * STEPS == ledger["fwd"]
    assert told[1][3]["bwd"] * STEPS == ledger["bwd"]
    if microbatches == 1:
        assert told[1][2] == seen


def _misfit(rank, port, said, message, batch, wraps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    body, line = model()[rank], ""
    if wraps and rank == 0:
        body.register_forward_hook(lambda module, inputs, output: (output,))
    stage = CompressedStage(body, rank, 2, torch.device("cpu"), message, ROWS, 2, fwd=UNIFORM)
    engine = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(batch, 6), torch.randn(batch, 1)
    try:
        engine.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": y}))
    except UserError as error:
        line = str(error)
    except RuntimeError:  # the neighbour is gone
        pass
    said.put((rank, line))


@pytest.mark.slow
@pytest.mark.parametrize(
    "message, batch, wraps, says",
    [
        ((4, 4), 8, False, r"sends \[4, 16\], and message=\(4, 4\)"),
        ((16,), 6, False, r"sends \[3, 16\].*with rows=4"),
        ((16,), 16, False, r"sends \[8, 16\]"),
        ((16,), 8, True, "returns a tuple"),
    ],
)
def test_a_body_that_sends_something_else_is_one_line(message, batch, wraps, says):
    told = dict(spawned(_misfit, 2, message, batch, wraps, answers=2))
    assert re.search(says, told[0]), told


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="process group"):
        CompressedStage(model()[0], 0, 2, torch.device("cpu"), (16,), 4, 1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        for more, said in (
            ({"fwd": {"compressor": {"kind": "topkk"}}}, "did you mean 'topk'"),
            ({"fwd": {"compressor": {"kind": "bottleneck"}}}, "weights of its own"),
            ({"fwd": {"feedback": {"kind": "aqsgd"}} | UNIFORM}, "remembers samples"),
            ({"message": [(16,), (16,)]}, "2 shapes, and 2 stages have 1"),
        ):
            settings = {"message": (16,), "rows": 4, "microbatches": 1} | more
            with pytest.raises(UserError, match=said):
                CompressedStage(model()[0], 0, 2, torch.device("cpu"), **settings)
    finally:
        dist.destroy_process_group()

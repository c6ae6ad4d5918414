"""Compressed gradients in a loop of one's own: only torch, and one import."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commsweep.experiments.data_parallel.hook import CompressionHook
from commsweep.experiments.errors import UserError
from tests.helpers import free_port

EF = {"compressor": {"kind": "topk", "ratio": 0.2}, "feedback": {"kind": "ef"}}


def data(step, rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x.sum(1, keepdim=True).sin()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def by_hand(steps, ratio):
    """Two learners with TopK and error feedback on matrices, vectors dense; plain tensors."""
    net = model()
    errors = [{name: torch.zeros_like(p) for name, p in net.named_parameters()} for _ in range(2)]
    for step in range(steps):
        total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for rank in range(2):
            net.zero_grad()
            x, y = data(step, rank)
            nn.functional.mse_loss(net(x), y).backward()
            for name, p in net.named_parameters():
                sent = p.grad
                if p.dim() > 1:
                    m = errors[rank][name] + p.grad
                    k = max(1, round(ratio * m.numel()))
                    edge = m.abs().flatten().topk(k).values[-1]
                    sent = m * (m.abs() >= edge)
                    errors[rank][name] = m - sent
                total[name] += sent / 2
        with torch.no_grad():
            for name, p in net.named_parameters():
                p -= 0.1 * total[name]
    return net.state_dict()


def _train(rank, port, said, halves):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    net, kept = model(), None
    for steps in halves:  # each half begins from what a checkpoint of the last one would hold
        ddp = nn.parallel.DistributedDataParallel(net)
        hook = CompressionHook(net, **EF)
        hook.attach(ddp)
        if kept is not None:
            hook.load_state_dict(kept)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in steps:
            x, y = data(step, rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        kept = hook.state_dict()
    if rank == 0:
        said.put(({name: one.tolist() for name, one in net.state_dict().items()}, hook.totals()["up"], hook.step))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("halves", [(range(6),), (range(3), range(3, 6))], ids=["whole", "resumed"])
def test_ddp_with_the_hook_trains_as_the_formula_says(halves):
    context, port = torch.multiprocessing.get_context("spawn"), free_port()
    said = context.Queue()
    processes = [context.Process(target=_train, args=(rank, port, said, halves)) for rank in range(2)]
    for one in processes:
        one.start()
    weights, up, steps = said.get(timeout=120)
    for one in processes:
        one.join()
    wanted = by_hand(6, 0.2)
    assert max(float((torch.tensor(one) - wanted[name]).abs().max()) for name, one in weights.items()) < 1e-6
    assert steps == 6
    kept = [round(0.2 * n) for n in (96, 256, 16)]
    if len(halves) == 1:  # values, and the shorter of indices and a bitmask; vectors as they are
        places = [min(-(-k * (n - 1).bit_length() // 8), -(-n // 8)) for k, n in zip(kept, (96, 256, 16), strict=True)]
        assert up == 4 * sum(kept) + sum(places) + 4 * 33


@pytest.mark.parametrize(("settings", "says"), [
    ({"compressor": {"kind": "topkk"}}, "unknown grad.compressor.kind"),
    ({"compressor": {"kind": "topk"}, "exchange": "allreduce"}, "use grad.exchange=allgather or server"),
    ({"compressor": {"kind": "topk", "ratio": 2}}, "grad.compressor.ratio=2"),
    ({"compressor": {"kind": "topk"}, "outer": {"interval": 4}}, "outer: a hook sees gradients only"),
    ({"compressor": {"kind": "uniform"}, "sharded": {}}, "sharded: a hook sees gradients only"),
])
def test_what_does_not_go_together_is_one_line(settings, says, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match=says):
        CompressionHook(model(), **settings)

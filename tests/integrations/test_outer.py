"""OuterOptimizer: DiLoCo in a loop of one's own, against plain tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commsweep.errors import UserError
from commsweep.integrations.outer import OuterOptimizer
from tests.helpers import spawned

INTERVAL, STEPS = 3, 8


def data(step, rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x.sum(1, keepdim=True).sin()


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def by_hand(ratio=None):
    """Two learners, AdamW inside, Nesterov outside; TopK with error feedback on matrices."""
    nets = [model() for _ in range(2)]
    inner = [torch.optim.AdamW(net.parameters(), 0.01) for net in nets]
    common = {name: p.detach().clone() for name, p in nets[0].named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in common.items()}
    errors = [{name: torch.zeros_like(p) for name, p in common.items()} for _ in range(2)]
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, inner, strict=True)):
            optimizer.zero_grad()
            x, y = data(step, rank)
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        if (step + 1) % INTERVAL and step + 1 < STEPS:
            continue
        for name, reference in common.items():
            mean = torch.zeros_like(reference)
            for rank, net in enumerate(nets):
                moved = reference - dict(net.named_parameters())[name].detach()
                if ratio is not None and moved.dim() > 1:
                    wanted = moved + errors[rank][name]
                    k = max(1, round(ratio * wanted.numel()))
                    edge = wanted.abs().flatten().topk(k).values[-1]
                    moved = wanted * (wanted.abs() >= edge)
                    errors[rank][name] = wanted - moved
                mean += moved / 2
            momentum[name] = 0.9 * momentum[name] + mean
            common[name] = reference - 0.7 * (mean + 0.9 * momentum[name])
        for net in nets:
            for name, p in net.named_parameters():
                p.data.copy_(common[name])
    return common


def _train(rank, port, said, settings, halves):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    kept = None
    for steps in halves:  # each half begins from what a checkpoint of the last one would hold
        net = model(seed=rank)
        if rank:  # the first process's weights are everybody's
            nn.init.zeros_(net[0].weight)
        optimizer = OuterOptimizer(
            net, torch.optim.AdamW(net.parameters(), 0.01), interval=INTERVAL, **settings
        )
        if kept is not None:
            optimizer.load_state_dict(kept)
        for step in steps:
            x, y = data(step, rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        kept = optimizer.state_dict()
    with optimizer.common_weights():
        pass
    optimizer.finish()
    weights = {name: p.tolist() for name, p in net.state_dict().items()}
    said.put((rank, weights, optimizer.totals()["up"]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("halves", [(range(8),), (range(5), range(5, 8))], ids=["whole", "resumed"])
@pytest.mark.parametrize("ratio", [None, 0.2])
def test_it_is_diloco(ratio, halves):
    settings = {}
    if ratio is not None:
        settings = {"compressor": {"kind": "topk", "ratio": ratio}, "feedback": {"kind": "ef"}}
    told = {rank: rest for rank, *rest in spawned(_train, 2, settings, halves, answers=2)}
    wanted = by_hand(ratio)
    assert told[0][0] == told[1][0], "all processes end with the same weights"
    for name, values in told[0][0].items():
        assert float((torch.tensor(values) - wanted[name]).abs().max()) < 2e-6, name


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_learner_with_rate_one_is_plain_training(alone):
    plain, net = model(), model()
    inner = torch.optim.AdamW(plain.parameters(), 0.01)
    outer = OuterOptimizer(
        net,
        torch.optim.AdamW(net.parameters(), 0.01),
        interval=INTERVAL,
        rate=1,
        momentum=0,
        nesterov=False,
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (inner, outer)]
    for step in range(STEPS):
        x, y = data(step, 0)
        for trained, optimizer, schedule in zip(
            (plain, net), (inner, outer), schedules, strict=True
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(trained(x), y).backward()
            optimizer.step()
            schedule.step()
    outer.finish()
    for a, b in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_bad_input_is_one_line(alone):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp = nn.parallel.DistributedDataParallel(net)
    with pytest.raises(UserError, match="not DistributedDataParallel: give it model.module"):
        OuterOptimizer(ddp, optimizer)
    with pytest.raises(UserError, match=r"does not hold the model's 0\.weight"):
        OuterOptimizer(model(), optimizer)
    with pytest.raises(UserError, match=r"grad\.outer\.interval"):
        OuterOptimizer(net, optimizer, interval=0)
    state = OuterOptimizer(net, optimizer).state_dict() | {"learners": 3}
    with pytest.raises(UserError, match="one of 3 processes"):
        OuterOptimizer(net, optimizer).load_state_dict(state)


def test_without_processes_it_is_one_line():
    net = model()
    with pytest.raises(UserError, match="there is none: call torch.distributed"):
        OuterOptimizer(net, torch.optim.SGD(net.parameters(), 0.1))


class Layers(nn.Module):
    """Two weights, each of which loses 2 a step under SGD of rate 1."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self):
        return 2 * sum(layer.weight.sum() for layer in self.layers)


def test_fragments_have_the_weights_that_torchft_records(alone):
    """torchft (meta-pytorch), diloco_regression_test, mocked updates 0: two fragments, each
    exchanged every sixth step, outer SGD of rate 2: common weights -23 and -47 after 6 and 12
    steps of the one, -35 and -59 after 9 and 15 of the other.
    """
    net = Layers()
    optimizer = OuterOptimizer(
        net,
        torch.optim.SGD(net.parameters(), 1.0),
        interval=6,
        fragments=2,
        rate=2,
        momentum=0,
        nesterov=False,
    )
    seen = {}
    for step in range(1, 16):
        optimizer.zero_grad()
        net().backward()
        optimizer.step()
        with optimizer.common_weights():
            seen[step] = [layer.weight.item() for layer in net.layers]
    assert [seen[step][0] for step in (5, 6, 11, 12)] == [1, -23, -23, -47]
    assert [seen[step][1] for step in (8, 9, 14, 15)] == [1, -35, -35, -59]

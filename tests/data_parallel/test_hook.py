"""Compressed gradients in a loop of one's own: only torch, and one import."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commsweep.collectives import Processes
from commsweep.data_parallel.hook import CompressionHook, _as_it_lies
from commsweep.errors import UserError
from tests.helpers import spawned

EF = {"compressor": {"kind": "topk", "ratio": 0.2}, "feedback": {"kind": "ef"}}


def data(step, rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x.sum(1, keepdim=True).sin()


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def by_hand(steps, ratio, learners=2):
    """Learners with TopK and error feedback on matrices, vectors dense; plain tensors."""
    net = model()
    parameters = dict(net.named_parameters())
    errors = [
        {name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(learners)
    ]
    for step in range(steps):
        total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for rank in range(learners):
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
                total[name] += sent / learners
        with torch.no_grad():
            for name, p in net.named_parameters():
                p -= 0.1 * total[name]
    return net.state_dict()


def _train(rank, port, said, halves, by_host=False, card=None):
    """Train by the hook; card: the backend and the number of learners of a real GPU."""
    torch.set_num_threads(1)
    if by_host:  # as if the tensors were on a GPU
        Processes._elsewhere = staticmethod(lambda tensor: True)
    backend, learners = card or ("gloo", 2)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=learners)
    device = f"cuda:{rank % torch.cuda.device_count()}" if card else "cpu"
    net, kept = model().to(device), None
    for steps in halves:  # each half begins from what a checkpoint of the last one would hold
        # a bucket a layer, which are made anew in another order after the first step
        ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4)
        hook = CompressionHook(net, **EF)
        hook.attach(ddp)
        if kept is not None:
            hook.load_state_dict(kept)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in steps:
            x, y = (part.to(device) for part in data(step, rank))
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        kept = hook.state_dict()
    if rank == 0:
        said.put(
            (
                {name: one.tolist() for name, one in net.state_dict().items()},
                hook.totals()["up"],
                hook.step,
            )
        )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("halves", "by_host"),
    [((range(6),), False), ((range(3), range(3, 6)), False), ((range(6),), True)],
    ids=["whole", "resumed", "through the host"],
)
def test_ddp_with_the_hook_trains_as_the_formula_says(halves, by_host):
    ((weights, up, steps),) = spawned(_train, 2, halves, by_host)
    wanted = by_hand(6, 0.2)
    assert (
        max(float((torch.tensor(one) - wanted[name]).abs().max()) for name, one in weights.items())
        < 1e-6
    )
    assert steps == 6
    kept = [round(0.2 * n) for n in (96, 256, 16)]
    if len(halves) == 1:  # values, and the shorter of indices and a bitmask; vectors as they are
        places = [
            min(-(-k * (n - 1).bit_length() // 8), -(-n // 8))
            for k, n in zip(kept, (96, 256, 16), strict=True)
        ]
        assert up == 4 * sum(kept) + sum(places) + 4 * 33


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_hook_on_a_gpu_trains_as_the_formula_says(backend):
    """NCCL gives every learner a card of its own, so that one card has one learner."""
    learners = 2 if backend == "gloo" else min(2, torch.cuda.device_count())
    ((weights, _, steps),) = spawned(_train, learners, (range(6),), False, (backend, learners))
    wanted = by_hand(6, 0.2, learners)
    for name, weight in weights.items():
        assert (torch.tensor(weight) - wanted[name]).abs().max() < 1e-5
    assert steps == 6


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"compressor": {"kind": "topkk"}}, "unknown grad.compressor.kind"),
        (
            {"compressor": {"kind": "topk"}, "exchange": "allreduce"},
            "use grad.exchange=allgather or server",
        ),
        ({"compressor": {"kind": "topk", "ratio": 2}}, "grad.compressor.ratio=2"),
        (
            {"compressor": {"kind": "topk"}, "outer": {"interval": 4}},
            "outer: a hook sees gradients only",
        ),
        ({"compressor": {"kind": "uniform"}, "sharded": {}}, "sharded: a hook sees gradients only"),
    ],
)
def test_what_does_not_go_together_is_one_line(settings, says, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(UserError, match=says):
        CompressionHook(model(), **settings)


FEEDBACKS = ("none", "ef", "ef21", "ef21_sgdm", "dgc", "lowpass", "loco")
TOPK = {"kind": "topk", "ratio": 0.2}
HOOKS = (
    [{"compressor": TOPK, "feedback": {"kind": kind}} for kind in FEEDBACKS]
    + [
        {"compressor": {"kind": kind}}
        for kind in (
            "none",
            "zero",
            "mean",
            "cast",
            "topk_strict",
            "randomk",
            "uniform",
            "fixed",
            "sign",
            "onebit",
            "tern",
            "qsgd",
            "natural",
            "statistical",
            "e3m0",
            "threshold",
            "dryden",
            "periodic",
            "sidco",
            "cltk",
            "powersgd",
        )
    ]
    + [
        {"compressor": {"kind": "adacomp"}, "feedback": {"kind": "adacomp"}},
        {"compressor": {"kind": "zero"}, "exchange": "allreduce"},
        {"compressor": {"kind": "mean"}, "compress_vectors": True},
        {
            "compressor": {"kind": "dion"},
            "feedback": {"kind": "decoupled"},
            "exchange": "allreduce",
        },
        {
            "compressor": {"kind": "powersgd"},
            "feedback": {"kind": "ef"},
            "compress_vectors": True,
            "exchange": "allreduce",
        },
        {
            "compressor": TOPK,
            "feedback": {"kind": "ef"},
            "exchange": "server",
            "compress_vectors": True,
        },
        {"compressor": TOPK, "feedback": {"kind": "ef"}, "transform": "dct"},
    ]
)
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Scaled(nn.Module):
    """A network with a matrix, a vector and a parameter of no dimension."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.gain = nn.Linear(6, 8), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.inner(x).sum(1, keepdim=True) * self.gain


def _bits(net):
    return [p.detach().double().flatten().tolist() for p in net.parameters()]


def _remembered(hook):
    layers = range(len(hook.exchange.layers))
    return [state.clone() for index in layers for state in hook.exchange.states(index)]


def _every_kind(rank, port, said, types):
    """Each kind in each type; then one infinite gradient in the middle, under a scaler whose scale
    changes.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    faults = []
    for settings in HOOKS:
        for dtype in types:
            try:
                faults += [
                    f"{settings} {dtype}: {line}" for line in _one_kind(settings, dtype, rank)
                ]
            except Exception as error:
                faults.append(f"{settings} {dtype}: {type(error).__name__}: {error}")
    try:
        faults += _scales(rank)
    except Exception as error:
        faults.append(f"scaler: {type(error).__name__}: {error}")
    if rank == 0:
        said.put(faults)
    dist.barrier()
    dist.destroy_process_group()


def _one_kind(settings, dtype, rank):
    net = Scaled().to(dtype)
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4)  # a bucket a parameter
    hook = CompressionHook(net, **settings)
    hook.attach(ddp)
    optimizer, before = torch.optim.SGD(net.parameters(), 0.01), None
    for step in range(4):
        x, y = (one.to(dtype) for one in data(step, rank))
        optimizer.zero_grad()
        loss = (ddp(x) - y).square().mean()
        if step == 2:
            before = _remembered(hook)
            loss = loss * (torch.inf if rank else 1.0)  # of one learner only
        loss.backward()
        bad = [not bool(p.grad.isfinite().all()) for p in net.parameters()]
        if step == 2:
            if not all(bad):
                yield "a learner's infinite gradient did not reach all"
            now = _remembered(hook)
            if not all(torch.equal(a, b) for a, b in zip(before, now, strict=True)):
                yield "a step that is not finite changed what is remembered"
            continue
        if any(bad):
            yield f"step {step} is not finite"
        optimizer.step()
    every = [None, None]
    dist.all_gather_object(every, _bits(net))
    if every[0] != every[1]:
        yield "the learners ended with different weights"
    if settings["compressor"]["kind"] == "none":
        wanted = sum(p.numel() for p in net.parameters()) * dtype.itemsize
        if hook.totals()["up"] != wanted:
            yield f"{hook.totals()['up']} bytes are counted and {wanted} were sent"


def _scales(rank):
    """With a scaler whose scale doubles and halves, what is learned is what is learned without
    one.
    """
    weights = []
    for scales in ((1.0,) * 6, (4.0, 4.0, 8.0, 8.0, 2.0, 2.0)):
        net = model()
        ddp = nn.parallel.DistributedDataParallel(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=10**6)
        hook = CompressionHook(net, **EF, scaler=scaler)
        hook.attach(ddp)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step, scale in enumerate((*scales[1:], 1.0)):
            x, y = data(step, rank)
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(ddp(x), y)).backward()
            scaler.step(optimizer)
            scaler.update(scale)
        weights.append(_bits(net))
    if weights[0] != weights[1]:
        yield "a scale that changes changes what is learned"


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
def test_every_kind_in_every_type_survives_an_infinite_gradient(every):
    (faults,) = spawned(_every_kind, 2, TYPES if every else TYPES[:1])
    assert not faults, "\n".join(faults[:20])


def _on_a_group(rank, port, said):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    group, line = dist.new_group([1, 2]), ""
    if rank:
        net = model()
        ddp = nn.parallel.DistributedDataParallel(net, process_group=group)
        try:
            CompressionHook(net, **EF).attach(ddp)
        except UserError as error:
            line = str(error)
        hook = CompressionHook(net, **EF, group=group)
        hook.attach(ddp)
        x, y = data(0, rank)
        nn.functional.mse_loss(ddp(x), y).backward()
    else:
        hook = CompressionHook(model(), **EF)  # as the first one of the others
    every = [None] * 3
    dist.all_gather_object(every, [p.grad.tolist() for p in net.parameters()] if rank else None)
    if rank == 0:
        said.put((every[1] == every[2], line))
    else:
        said.put((None, line))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_hook_works_on_the_group_it_was_given_and_on_no_other():
    told = spawned(_on_a_group, 3, answers=3)
    assert (True, "") in told and sum("different process groups" in line for _, line in told) == 2


def test_a_gradient_is_taken_as_its_parameter_lies():
    """A bucket holds that of a transposed parameter in the order of its memory."""
    for p in (torch.zeros(3, 4).t(), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        grad = torch.randn(p.shape)
        in_memory = torch.empty_like(p).copy_(grad)
        bucket = torch.as_strided(in_memory, (p.numel(),), (1,)).clone()
        assert torch.equal(_as_it_lies(p, bucket.view(p.shape)), grad)


def test_without_processes_there_is_no_hook():
    with pytest.raises(
        UserError, match="there is none: call torch.distributed.init_process_group first"
    ):
        CompressionHook(model(), **EF)


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_a_hook_does_not_go_with_is_one_line(alone):
    net = model()
    with pytest.raises(
        UserError,
        match=r"attach takes a torch.nn.parallel.DistributedDataParallel, not Linear.*FSDP2",
    ):
        CompressionHook(net, **EF).attach(nn.Linear(2, 2))
    ddp, hook = nn.parallel.DistributedDataParallel(net), CompressionHook(net, **EF)
    hook.attach(ddp)
    with pytest.raises(UserError, match="has a hook already"):
        CompressionHook(net, **EF).attach(ddp)
    state = hook.state_dict()
    state["_extra_state"]["learners"] = 4
    with pytest.raises(UserError, match="state of 4 processes.*process group has 1"):
        hook.load_state_dict(state)


def test_the_backward_goes_on_while_a_bucket_travels(alone):
    net = model()
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4)
    hook = CompressionHook(net, **EF)
    hook.attach(ddp)
    x, y = data(0, 0)
    nn.functional.mse_loss(ddp(x), y).backward()  # from here on buckets are as gradients come
    passed, order = threading.Event(), []
    exchanged = hook.exchanged

    def slow(views, buffer):
        order.append(max(views))
        # The first bucket is not done before the backward has reached the first layer.
        assert passed.wait(60)
        exchanged(views, buffer)

    hook.exchanged = slow
    net[0].weight.register_hook(lambda grad: passed.set())
    nn.functional.mse_loss(ddp(x), y).backward()
    assert len(order) > 1 and order == sorted(order, reverse=True)
    assert hook.step == 2


def test_an_error_in_the_exchange_is_an_error_of_the_backward(alone):
    net = model()
    ddp, hook = nn.parallel.DistributedDataParallel(net), CompressionHook(net, **EF)
    hook.attach(ddp)

    def fails(views, buffer):
        raise UserError("the exchange failed")

    hook.exchanged = fails
    x, y = data(0, 0)
    with pytest.raises(Exception, match="the exchange failed"):
        nn.functional.mse_loss(ddp(x), y).backward()

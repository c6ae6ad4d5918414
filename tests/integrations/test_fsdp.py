"""FSDP2 in codes: two processes on CPU, against the same arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commsweep import compressors
from commsweep.config.compressors.spelling import in_full
from commsweep.errors import UserError
from commsweep.integrations.fsdp import _settings, compress_fsdp
from tests.helpers import spawned

STEPS = 4
UNIFORM = {"kind": "uniform", "bits": 4}
OWN = "commsweep.template.codec:RowSigns,k=4"


def data(step, rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x.sum(1, keepdim=True).sin()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 2, bias=False))


def by_hand(code, remembers, weights=None):
    """Two processes; of each matrix a process owns half of the rows, and one message is a half."""
    net, errors = model(), {}
    matrices = [net[0].weight, net[2].weight]
    for step in range(STEPS):
        grads, kept = [], [p.detach().clone() for p in matrices]
        for p in matrices if weights is not None else ():
            halves = [weights.roundtrip(half.reshape(1, -1)) for half in p.detach().chunk(2)]
            p.data = torch.cat([half.view(-1) for half in halves]).view_as(p)
        for rank in range(2):
            net.zero_grad()
            x, y = data(step, rank)
            nn.functional.mse_loss(net(x)[:, :1], y).backward()
            grads.append([p.grad.clone() for p in matrices])
        for place, p in enumerate(matrices):
            halves = []
            for to in range(2):
                total = 0
                for rank in range(2):
                    part = grads[rank][place].chunk(2)[to].reshape(-1)
                    part = part + errors.get((place, rank, to), 0)
                    arrived = code.roundtrip(part) if code is not None else part
                    if remembers:
                        errors[place, rank, to] = part - arrived
                    total = total + arrived
                halves.append(total / 2)
            p.data = kept[place] - 0.1 * torch.cat(halves).view_as(p)
    return [p.detach() for p in matrices]


def _train(rank, port, said, compressor, feedback, weights=None):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    wire = compress_fsdp(net, compressor, feedback, weights=weights)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        x, y = data(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x)[:, :1], y).backward()
        optimizer.step()
    weights = [p.full_tensor().tolist() for p in net.parameters()]
    said.put((rank, weights, wire.totals()))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compressor", "feedback"),
    [({"kind": "none"}, "none"), (UNIFORM, "none"), (UNIFORM, "ef"), (OWN, "ef")],
)
def test_the_sharded_training_is_the_one_by_hand(compressor, feedback):
    told = {rank: rest for rank, *rest in spawned(_train, 2, compressor, feedback, answers=2)}
    code = compressors.build(in_full(compressor))
    wanted = by_hand(code, feedback == "ef")
    assert told[0][0] == told[1][0]
    for values, p in zip(told[0][0], wanted, strict=True):
        assert float((torch.tensor(values) - p).abs().max()) < 1e-6
    # a half of each matrix travels to the other process
    halves = [torch.zeros(48), torch.zeros(16)]
    assert told[0][1]["bytes"] == sum(code.encode(half).nbytes for half in halves)
    assert told[0][1]["dense"] == 4 * 64


@pytest.mark.slow
def test_weights_in_codes_are_those_by_hand_and_their_bytes_are_what_was_moved():
    """Owners keep float32; all, the owner too, compute with the decoded weights."""
    answers = spawned(_train, 2, "uniform:4", "none", "uniform:6", answers=2)
    told = {rank: rest for rank, *rest in answers}
    code = compressors.build("uniform:6")
    wanted = by_hand(compressors.build(UNIFORM), False, code)
    assert told[0][0] == told[1][0]
    for values, p in zip(told[0][0], wanted, strict=True):
        assert float((torch.tensor(values) - p).abs().max()) < 1e-6
    halves = [torch.zeros(1, 48), torch.zeros(1, 16)]
    once = sum(code.encode(half).nbytes for half in halves)
    # before the forward, and again before the backward; the root has no parameters of its own
    assert told[0][1]["weights.bytes"] == 2 * once
    assert told[0][1]["weights.dense"] == 2 * 4 * 64


def test_what_is_not_sharded_is_one_line():
    with pytest.raises(UserError, match="call torch.distributed.fsdp.fully_shard first"):
        compress_fsdp(model(), UNIFORM)
    with pytest.raises(UserError, match="feedback='ef21': choose none or ef"):
        compress_fsdp(model(), UNIFORM, feedback="ef21")


def test_codes_whose_length_their_shape_does_not_say_are_one_line():
    assert _settings(OWN)["options"] == {"k": 4} and _settings("uniform:4")["bits"] == 4
    for compressor in ("topk:0.1", {"kind": "topk"}, "nothing:1", {}):
        with pytest.raises(
            UserError, match="sharded messages need codes whose length their shape says: none, "
        ):
            _settings(compressor)

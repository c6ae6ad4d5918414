"""What holds in every door to other people's trainings: resuming, scalers, steps that are thrown
away.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commsweep.data_parallel.hook import CompressionHook
from commsweep.errors import UserError
from commsweep.integrations.fsdp import compress_fsdp
from commsweep.integrations.outer import OuterOptimizer
from commsweep.integrations.shadow import BACKWARD, PARAMETER, Shadow
from tests.helpers import spawned

EF = {"compressor": {"kind": "topk", "ratio": 0.2}, "feedback": {"kind": "ef"}}


def data(step, rank=0):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x.sum(1, keepdim=True).sin()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def bits(net):
    return [p.detach().flatten().tolist() for p in net.parameters()]


def begin(rank, port):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)


def end():
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# OuterOptimizer


def fit(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x, y = data(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()


MODES = [
    {},
    {"fragments": 2},
    {"overlap": 2, "local_update": "add"},
    {"fragments": 3, "overlap": 1, "local_update": "add"},
    {"first_moment": 2, "second_moment": 3},
    {"eager": True},
]


@pytest.mark.parametrize("steps", [1, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_one_learner_with_rate_one_is_plain_training_at_any_length(alone, mode, steps):
    plain, net = Blocks(), Blocks()
    fit(plain, torch.optim.AdamW(plain.parameters(), 0.01), steps)
    inner = torch.optim.AdamW(net.parameters(), 0.01)
    outer = OuterOptimizer(net, inner, 4, rate=1, momentum=0, nesterov=False, **mode)
    fit(net, outer, steps)
    outer.finish()
    for a, b in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert outer.training.exchange.ledger.steps == steps
    before = bits(net)
    outer.finish()
    assert bits(net) == before, "a second finish() has nothing to exchange"


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_outer_optimizer_resumes_inside_an_interval_and_finishes_as_if_whole(alone, mode):
    ends = []
    for halves in ((7,), (6, 1), (3, 4)):
        net, state, first = Blocks(), None, 0
        for steps in halves:
            inner = torch.optim.AdamW(net.parameters(), 0.01)
            outer = OuterOptimizer(net, inner, 4, **mode)
            if state is not None:
                outer.load_state_dict(state)
            fit(net, outer, steps, first)
            first, state = first + steps, copy.deepcopy(outer.state_dict())
        again = OuterOptimizer(net, torch.optim.AdamW(net.parameters(), 0.01), 4, **mode)
        again.load_state_dict(state)
        again.finish()
        ends.append(bits(net))
    assert ends[0] == ends[1] == ends[2]


def test_a_finish_right_after_an_eager_exchange_is_the_last_exchange_of_a_run(alone):
    """The late half is added to the step that it belongs to: with one learner, DiLoCo's own."""
    ends = []
    for mode in ({}, {"eager": True}):
        net = Blocks()
        outer = OuterOptimizer(net, torch.optim.SGD(net.parameters(), 0.1), 4, **mode)
        fit(net, outer, 4)
        outer.finish()
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.allclose(*ends, atol=1e-6)


def _unequal(rank, port, said):
    begin(rank, port)
    weights = []
    for mode in ({}, {"fragments": 2, "overlap": 1}):
        net = Blocks()
        outer = OuterOptimizer(net, torch.optim.SGD(net.parameters(), 0.1), 3, **mode)
        fit(net, outer, 4 if rank else 11)
        outer.finish()
        weights.append(bits(net))
    outer.steps += 3 * rank  # as if resumed from a checkpoint of another step
    line = ""
    try:
        fit(net, outer, 9)
    except UserError as error:
        line = str(error)
    said.put((rank, weights, outer.training.exchange.ledger.steps, line))
    end()


@pytest.mark.slow
def test_processes_with_unequal_numbers_of_steps_end_with_common_weights():
    first, second = sorted(spawned(_unequal, 2, answers=2))
    assert first[1] == second[1]
    for told in (first, second):
        assert "different numbers of steps" in told[3]


def test_what_an_outer_optimizer_cannot_do_is_one_line(alone):
    net = Blocks()
    net.head.weight.requires_grad_(False)
    inner = torch.optim.AdamW(net.parameters(), 0.01)
    outer, seen = OuterOptimizer(net, inner, 4), []
    handle = outer.register_step_post_hook(lambda *_: seen.append("after"))
    outer.register_step_pre_hook(lambda *_: seen.append("before"))
    fit(net, outer, 1)
    handle.remove()
    fit(net, outer, 1)
    assert seen == ["before", "after", "before"]
    with pytest.raises(UserError, match="copy its state_dict"):
        copy.deepcopy(outer)
    fit(net, outer, 1)  # and is as it was
    with pytest.raises(UserError, match="takes no further parameters"):
        outer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    net.head.weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"'head\.weight' began to train"):
        outer.step()
    with pytest.raises(UserError, match="LBFGS computes gradients inside of its step"):
        OuterOptimizer(net, torch.optim.LBFGS(net.parameters()))


# The hook of DistributedDataParallel


class Sometimes(nn.Module):
    """Its second layer has no part in every other forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.uses = nn.Linear(6, 8), nn.Linear(8, 8), True

    def forward(self, x):
        x = self.first(x).tanh()
        return (self.second(x) if self.uses else x).sum(1, keepdim=True)


def _unused(rank, port, said):
    begin(rank, port)
    for kind in ("ef", "ef21", "dgc", "lowpass"):
        net = Sometimes()
        ddp = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        hook = CompressionHook(net, EF["compressor"], {"kind": kind})
        hook.attach(ddp)
        place = hook.places[id(net.second.weight)]
        changed = []
        for step in range(6):
            # used by all processes, by one, by none
            net.uses = step % 3 == 0 or (step % 3 == 1 and rank == 0)
            net.zero_grad()
            before = [kept.clone() for kept in hook.exchange.states(place)]
            x, y = data(step, rank)
            nn.functional.mse_loss(ddp(x), y).backward()
            now = list(hook.exchange.states(place))
            changed.append(not all(torch.equal(a, b) for a, b in zip(before, now, strict=True)))
        said.put((kind, changed))
    end()


@pytest.mark.slow
def test_a_step_that_no_process_uses_a_parameter_in_changes_no_memory_of_it():
    for kind, changed in spawned(_unused, 2, answers=8):
        assert changed == [True, True, False] * 2, kind


def test_what_a_hook_cannot_send_is_one_line(alone):
    net = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    ddp = nn.parallel.DistributedDataParallel(net)
    with pytest.raises(UserError, match=r"gradient of 0\.weight is sparse.*sparse=False"):
        CompressionHook(net, **EF).attach(ddp)
    net = model()
    net[0].weight.requires_grad_(False)
    hook = CompressionHook(net, **EF)
    net[0].weight.requires_grad_(True)
    with pytest.raises(UserError, match=r"'0\.weight' was not a trained parameter"):
        hook.attach(nn.parallel.DistributedDataParallel(net))


# FSDP2


def _sharded(rank, port, said):
    from torch.distributed.fsdp import fully_shard

    begin(rank, port)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def build(scaler=None):
        net = model()
        fully_shard(net, mesh=mesh)
        wire = compress_fsdp(net, {"kind": "uniform", "bits": 4}, "ef", scaler=scaler)
        return net, wire, torch.optim.SGD(net.parameters(), 0.1)

    def backward(net, step, factor=1.0):
        x, y = data(step, rank)
        (nn.functional.mse_loss(net(x), y) * factor).backward()

    def weights(net):
        return [p.full_tensor().tolist() for p in net.parameters()]

    ends = []
    for scales in ((1.0,) * 5, (4.0, 8.0, 8.0, 2.0, 1.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=10**6)
        net, wire, optimizer = build(scaler)
        for step, scale in enumerate((*scales[1:], 1.0)):
            optimizer.zero_grad()
            backward(net, step, scaler.get_scale())
            for p in net.parameters():
                p.grad /= scaler.get_scale()
            optimizer.step()
            scaler.scale(torch.zeros(1))
            scaler._scale.fill_(scale)
        ends.append(weights(net))
    same_scale = ends[0] == ends[1]

    net, wire, optimizer = build()
    for step in range(2):
        optimizer.zero_grad()
        backward(net, 2 * step)
        backward(net, 2 * step + 1)  # two backwards, one step
        optimizer.step()
    totals = wire.totals()
    before = [part.error.clone() for part in wire.parts if part.error is not None]
    optimizer.zero_grad()
    backward(net, 7, torch.inf if rank else 1.0)
    infinite = not any(bool(p.grad.to_local().isfinite().any()) for p in net.parameters())
    now = [part.error for part in wire.parts if part.error is not None]
    kept = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))

    # resumed between two steps
    state, halves = copy.deepcopy(wire.state_dict()), []
    saved = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        net, wire, optimizer = build()
        with torch.no_grad():
            for p, value in zip(net.parameters(), saved, strict=True):
                p.copy_(value)
        wire.load_state_dict(copy.deepcopy(state))
        backward(net, 9)
        optimizer.step()
        halves.append(weights(net))
    said.put((rank, same_scale, totals, infinite, kept, halves[0] == halves[1]))
    end()


@pytest.mark.slow
def test_fsdp_skips_what_a_scaler_skips_and_counts_steps_of_the_optimizer():
    for _, same_scale, totals, infinite, kept, resumed in spawned(_sharded, 2, answers=2):
        assert same_scale, "a scale that changes changes what is learned"
        assert infinite and kept, "an overflow must reach all and change no memory"
        # two backwards a step: twice half of the 129 float32 (padded to rows of two processes)
        assert totals["dense"] == 2 * 4 * (8 * 6 + 8 + 16 + 1) and totals["bytes"] < totals["dense"]
        assert resumed


# Shadow


def test_the_message_of_accumulated_backwards_is_their_sum():
    net, whole = model(), model()
    shadows = []
    for trained, accumulate in ((net, 4), (whole, 1)):
        optimizer = torch.optim.SGD(trained.parameters(), 0.0)
        with Shadow(trained, ["topk:0.1", "ef+topk:0.1"], {"0.weight": "gradients"}, 1) as shadow:
            for step in range(3):
                optimizer.zero_grad()
                x, y = data(step)
                for rows, wanted in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
                    (nn.functional.mse_loss(trained(rows), wanted) / accumulate).backward()
                optimizer.step()
        shadows.append([(look.result.error, look.result.bias) for look in shadow.looks])
    assert len(shadows[0]) == 6
    for a, b in zip(*shadows, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_a_scale_that_changes_changes_nothing_that_shadow_says():
    seen = []
    for scales in ((1.0, 1.0, 1.0), (2.0, 8.0, 4.0)):
        net = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        at = {"0.weight": "gradients"}
        with Shadow(net, ["ef+topk:0.1"], at, every=1, scaler=scaler) as shadow:
            for step, scale in enumerate(scales):
                scaler.scale(torch.zeros(1))
                scaler._scale.fill_(scale)
                x, y = data(step)
                optimizer.zero_grad()
                (nn.functional.mse_loss(net(x), y) * scale).backward()
                for p in net.parameters():
                    p.grad /= scale
                optimizer.step()
        seen.append([look.result.bias for look in shadow.looks])
    assert seen[0] == pytest.approx(seen[1], rel=1e-5) and len(seen[0]) == 3


def test_reentrant_checkpointing_is_seen_once_in_both_directions():
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = nn.Linear(6, 6), model()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.rest, self.first(x), use_reentrant=True)

    net = Recomputed()
    with Shadow(net, ["topk:0.1"], {"rest.0": "activations", "*": "gradients"}, 1) as shadow:
        for step in range(2):
            net.zero_grad()
            x, y = data(step)
            nn.functional.mse_loss(net(x), y).backward()
    assert shadow.forwards == 2 and not shadow.unseen()
    assert sum(look.message == BACKWARD for look in shadow.looks) == 2
    assert sum(look.place == "rest.0.weight" for look in shadow.looks) == 2
    assert {look.message for look in shadow.looks} >= {PARAMETER}


# Lightning and transformers


def _lightning(rank, port, said, folder):
    import pytorch_lightning as pl

    from commsweep.integrations.lightning import CompressionCallback

    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def trained(epochs, checkpoint=None, saves=None, feedback="ef", code=EF["compressor"]):
        batches = [data(step) for step in range(3)]
        rows = [torch.cat(part) for part in zip(*batches, strict=True)]
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=4)
        callback = CompressionCallback(code, {"kind": feedback})
        precision = pl.plugins.MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        )
        trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            plugins=[precision],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        module = Module()
        trainer.fit(module, loader, ckpt_path=checkpoint)
        if saves:
            trainer.save_checkpoint(saves)
        return bits(module), callback.hook

    _, hook = trained(2)
    found = hook.scaler is not None and hook.scaler.get_scale() > 64
    same = []
    for feedback, code in (("ef", EF["compressor"]), ("ef", {"kind": "powersgd", "rank": 1})):
        whole, _ = trained(2, feedback=feedback, code=code)
        trained(1, saves=f"{folder}/first.ckpt", feedback=feedback, code=code)
        resumed, hook = trained(2, f"{folder}/first.ckpt", feedback=feedback, code=code)
        same.append(whole == resumed and hook.step == 6)
    said.put((rank, found, same, hook.report()))
    end()


@pytest.mark.slow
def test_lightning_resumes_with_every_process_s_memory_and_finds_the_scaler(tmp_path):
    for _, found, same, report in spawned(_lightning, 2, str(tmp_path), answers=2):
        assert found, "the hook has no scaler"
        assert same == [True, True]
        assert "gradients between 2 processes" in report and "in 6 steps" in report


def test_a_lightning_module_without_a_forward_is_seen(tmp_path, capsys):
    import pytorch_lightning as pl

    from commsweep.integrations.lightning import ShadowCallback

    class Two(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 1)

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.b(self.a(batch[0])), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(at, out):
        callback = ShadowCallback(["topk:0.1"], at, every=1, out=out)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(0)), batch_size=4)
        pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        ).fit(Two(), loader)
        return callback.shadow

    shadow = fit({"a": "activations", "*": "gradients"}, tmp_path / "seen")
    assert shadow.forwards == 2 and not shadow.unseen()
    assert (tmp_path / "seen" / "table.md").exists()

"""Shadow mode measures and changes nothing."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import commsweep as cs
from commsweep.errors import UserError
from commsweep.integrations.measure import codec, measure
from commsweep.integrations.shadow import BACKWARD, FORWARD, PARAMETER, UPDATE, Shadow

CODECS = ["topk:0.1", "uniform:4", "tern"]
AT = {"1": "activations", "*": "gradients"}


class Recomputed(nn.Module):
    """A network that recomputes its activations in the backward."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(24, 24),
        nn.ReLU(),
        nn.Linear(24, 3),
    )


def train(model, steps=12, accumulate=1, autocast=False):
    """A plain loop; returns the weights it ends with."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(8, 12, generator=generator)
        y = torch.randint(3, (8,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():  # an evaluation
        model.eval()(torch.ones(1, 12))
    model.train()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "make, at, settings",
    [
        (network, AT, {}),
        (network, AT, {"accumulate": 3}),
        (network, AT, {"autocast": True}),
        (Recomputed, {"net.1": "activations", "*": "gradients"}, {}),
        (network, None, {}),
    ],
    ids=["plain", "accumulation", "autocast", "checkpointing", "all matrices"],
)
def test_weights_are_equal_bit_for_bit_with_and_without_it(make, at, settings):
    torch.manual_seed(5)
    plain = train(make(), **settings)
    torch.manual_seed(5)
    model = make()
    with Shadow(model, CODECS, at, every=3) as shadow:
        seen = train(model, **settings)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert shadow.forwards == 12  # evaluations are none
    assert {look.step for look in shadow.looks} == {1, 4, 7, 10}
    assert not shadow.unseen()
    # every place, message and codec once a look, recomputed forwards too
    keys = [(one.step, one.place, one.message, one.result.codec) for one in shadow.looks]
    assert len(set(keys)) == len(keys)
    assert not any(module._forward_hooks for module in model.modules())


def test_it_measures_what_passed():
    model = network()
    passed = {}

    def keep(module, inputs, output):
        passed[FORWARD] = output.detach().clone()

    model[1].register_forward_hook(keep)
    with Shadow(model, ["topk:0.1"], AT, every=100) as shadow:
        x, y = torch.randn(8, 12), torch.randint(3, (8,))
        nn.functional.cross_entropy(model(x), y).backward()
    passed[PARAMETER] = model[0].weight.grad
    for message, place in ((FORWARD, "1"), (PARAMETER, "0.weight")):
        (expected,) = cs.measure(passed[message], "topk:0.1", seed=1)
        (look,) = [k for k in shadow.looks if k.message == message and k.place == place]
        assert look.result == expected
    assert any(look.message == BACKWARD for look in shadow.looks)


def test_its_report_has_rows_a_table_and_a_figure(tmp_path, capsys):
    model = network()
    with Shadow(model, CODECS, AT, every=4) as shadow:
        train(model)
    folder = shadow.report(tmp_path / "out")
    out = capsys.readouterr().out
    assert "Overhead" in out and "| weight gradients | tern |" in out
    with open(folder / "rows.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == len(shadow.looks) and {row["codec"] for row in rows} == set(CODECS)
    assert (folder / "codecs.png").stat().st_size > 5000
    unbiased, biased = (
        next(r for r in shadow.summary() if r["codec"] == name and r["message"] == PARAMETER)
        for name in ("tern", "topk:0.1")
    )
    assert unbiased["error"] > 0 and unbiased["bias"] < biased["bias"]
    assert shadow.overhead > 0


def test_a_codec_that_cannot_work_there_is_named_once(capsys):
    model = network()
    with Shadow(model, ["lowrank:4", "topk:0.1"], {"*": "gradients"}, every=1) as shadow:
        train(model, steps=2)
    assert {look.result.codec for look in shadow.looks} >= {"topk:0.1"}


def test_gradients_that_are_not_finite_are_passed_over():
    model = network()
    with Shadow(model, CODECS, {"*": "gradients"}, every=1) as shadow:
        (model(torch.ones(2, 12)) * torch.inf).sum().backward()
    assert not shadow.looks


@pytest.mark.parametrize(
    "at, said",
    [
        ({"layer": "activations"}, "no module has such a name"),
        ({"0.weigth": "gradients"}, "did you mean '0.weight'"),
        ({"1": "messages"}, "choose activations"),
    ],
)
def test_patterns_that_match_nothing_are_named(at, said):
    with pytest.raises(cs.UserError, match=said):
        Shadow(network(), CODECS, at)


def test_other_mistakes_are_one_line(tmp_path):
    with pytest.raises(cs.UserError, match="every=0"):
        Shadow(network(), CODECS, AT, every=0)
    with pytest.raises(cs.UserError, match="name at least one"):
        Shadow(network(), [], AT)
    shadow = Shadow(network(), CODECS, AT)
    with pytest.raises(cs.UserError, match="saw no training forward"):
        shadow.report(tmp_path)
    with shadow, pytest.raises(cs.UserError, match="looks already"):
        shadow.start()


def test_a_compiled_model_is_looked_at(capsys):
    model = network()
    compiled = torch.compile(model, backend="eager")
    with Shadow(compiled, ["topk:0.1"], {"*": "gradients"}, every=1) as shadow:
        train(compiled, steps=2)
    assert "compiled" in capsys.readouterr().err
    assert {look.place for look in shadow.looks} >= {"0.weight", "5.weight"}


def test_in_transformers_trainer(tmp_path, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from commsweep.integrations.huggingface import ShadowCallback

    def trained(callbacks):
        torch.manual_seed(0)
        config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
        ids = torch.randint(50, (12, 16), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": row} for row in ids]
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "hf"),
            max_steps=4,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        model = GPT2LMHeadModel(config)
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks).train()
        return [p.detach().clone() for p in model.parameters()]

    callback = ShadowCallback(
        CODECS,
        {"transformer.h.0": "activations", "*.c_fc.weight": "gradients"},
        every=2,
        out=tmp_path / "shadow",
    )
    plain, seen = trained([]), trained([callback])
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert callback.shadow.forwards == 4 and (tmp_path / "shadow" / "table.md").exists()
    assert {look.message for look in callback.shadow.looks} == {FORWARD, BACKWARD, PARAMETER}


def test_the_scaler_of_a_trainer_is_found():
    """As accelerate keeps it for fp16, which a Trainer has on a GPU only."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from commsweep.integrations.huggingface import ShadowCallback

    Accelerator(cpu=True)
    model, scaler = network(), torch.amp.GradScaler("cpu")
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), 0.1), scaler=scaler)
    callback = ShadowCallback(CODECS)
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    assert callback.shadow.scaler is scaler
    callback.shadow.stop()


def test_in_lightning(tmp_path, capsys):
    import pytorch_lightning as pl

    from commsweep.integrations.lightning import CompressionCallback, ShadowCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def trained(*callbacks):
        generator = torch.Generator().manual_seed(1)
        x, y = (
            torch.randn(24, 12, generator=generator),
            torch.randint(3, (24,), generator=generator),
        )
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        module = Module()
        torch.manual_seed(2)
        trainer.fit(module, loader)
        return [p.detach().clone() for p in module.parameters()]

    callback = ShadowCallback(CODECS, AT, every=2, out=tmp_path / "shadow")
    plain, seen = trained(), trained(callback)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert callback.shadow.forwards == 6 and (tmp_path / "shadow" / "rows.csv").exists()
    with pytest.raises(cs.UserError, match="has no hook for gradients"):
        trained(CompressionCallback({"kind": "topk", "ratio": 0.1}))


def test_a_simulated_memory_sends_in_the_end_what_it_kept_back():
    """Error feedback by hand, on the gradients that the training really had."""
    torch.manual_seed(0)
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grads = []
    with Shadow(model, ["topk:0.1", "ef+topk:0.1"], {"weight": "gradients"}, every=1) as shadow:
        for _ in range(20):
            optimizer.zero_grad()
            (model(torch.randn(8, 10)) - 1).square().mean().backward()
            grads.append(model.weight.grad.clone())
            optimizer.step()
    error, total = torch.zeros(4, 10), torch.zeros(4, 10)
    code = codec("topk:0.1")
    looks = [look.result for look in shadow.looks if look.result.codec.startswith("ef+")]
    assert len(looks) == len(grads)
    for grad, result in zip(grads, looks, strict=True):
        arrived = code.roundtrip(grad + error)
        error, total = grad + error - arrived, total + grad
        assert result.error == pytest.approx(float((arrived - grad).norm() / grad.norm()))
        assert result.bias == pytest.approx(float(error.norm() / total.norm()))
    rows = {row["codec"]: row for row in shadow.summary()}
    assert rows["ef+topk:0.1"]["bias"] < rows["topk:0.1"]["bias"]
    assert math.isnan(rows["ef+topk:0.1"]["worth"])
    assert rows["ef+topk:0.1"]["reason"] == "no training with feedback was seen"


def test_repeat_is_the_cosine_of_errors_of_two_looks_and_total_weighs_places_by_length():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    code, grads = codec("topk:0.2"), []
    with Shadow(model, ["topk:0.2"], {"*.weight": "gradients"}, every=1) as shadow:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.randn(8, 6)) - 1).square().mean().backward()
            grads.append([model[0].weight.grad.clone(), model[1].weight.grad.clone()])
            optimizer.step()
    looks = {(look.step, look.place): look.result for look in shadow.looks}
    errors = [[code.roundtrip(grad) - grad for grad in step] for step in grads]
    for layer, name in enumerate(("0.weight", "1.weight")):
        first, second = errors[0][layer].flatten(), errors[1][layer].flatten()
        assert math.isnan(looks[1, name].repeat)
        cosine = nn.functional.cosine_similarity(first, second, dim=0)
        assert looks[2, name].repeat == pytest.approx(float(cosine), abs=1e-6)
        assert looks[2, name].norm == pytest.approx(float(grads[1][layer].norm()))
    (row,) = shadow.summary()
    lost = sum(float(error.square().sum()) for step in errors for error in step)
    sent = sum(float(grad.square().sum()) for step in grads for grad in step)
    assert row["total"] == pytest.approx((lost / sent) ** 0.5, rel=1e-4)


def test_silent_is_the_share_of_samples_of_which_nothing_arrives():
    x = torch.tensor([[3.0, 0.1], [0.0, 0.0], [1.0, 5.0], [0.0, 0.0]])
    assert measure(x, "uniform:8")[0].silent == 0.5
    assert measure(torch.randn(4, 8), "uniform:8")[0].silent == 0.0


def test_a_memory_needs_every_step_and_a_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(UserError, match="set every=1, not 50"):
        Shadow(model, ["ef+topk:0.1"])
    with pytest.raises(UserError, match="none is looked at"):
        Shadow(model, ["ef+topk:0.1"], {"0": "activations"}, every=1)


def test_a_report_of_another_training_is_not_overwritten(tmp_path, capsys):
    model = nn.Linear(4, 2)
    folders = []
    for _ in range(3):
        with cs.Shadow(model, ["sign"], {"*weight": "gradients"}, every=1) as shadow:
            model(torch.randn(3, 4)).sum().backward()
        folders += [shadow.report(tmp_path / "shadow"), shadow.report(tmp_path / "shadow")]
    names = ["shadow", "shadow-2", "shadow-3"]
    assert [folder.name for folder in folders] == [name for name in names for _ in range(2)]
    assert f"written: {tmp_path / 'shadow-3'}" in capsys.readouterr().out


@pytest.mark.parametrize(("accumulated", "every"), [(1, 1), (2, 1), (2, 2)])
def test_weights_are_what_a_step_changes_and_their_update_is_without_loss(
    accumulated, every, tmp_path
):
    """The share of entries of bfloat16 that change, by hand, with and without accumulation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    with Shadow(model, ["uniform:8"], {"*": "weights"}, every=every) as shadow:
        shares, moved = [], []
        for _ in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            for _ in range(accumulated):
                model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            pairs = list(zip(before, model.parameters(), strict=True))
            changed = sum(int((a.bfloat16() != b.bfloat16()).sum()) for a, b in pairs)
            shares.append(changed / sum(p.numel() for p in model.parameters()))
            moved.append(float((model[0].weight.detach() - before[0]).norm()))
    records = [update.record() for update in shadow.updates]
    assert [record["changed_share"] for record in records] == shares and max(shares) > 0
    assert {record["learning_rate"] for record in records} == {3e-4}
    assert all(0 < record["entropy_bytes"] <= record["bytes"] for record in records)
    norms = [look.result.norm for look in shadow.looks if look.place == "0.weight"]
    assert norms == pytest.approx(moved) and {look.message for look in shadow.looks} == {UPDATE}
    folder = shadow.report(tmp_path / "report")
    assert len((folder / "weights.csv").read_text().splitlines()) == 4
    assert "a step changes" in (folder / "table.md").read_text()

"""Language models in stages: laws 2 and 5 for text, checkpointing, weights from folders, coders
inside the model.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from commsweep.boundary.message_sizes import crossed, message_shapes
from commsweep.compressors import build as compressor
from commsweep.config import Execution, override, record, run_id
from commsweep.errors import UserError
from commsweep.feedback.memory import Keys
from commsweep.models import causal_lm
from commsweep.registry import preset
from commsweep.store import Store
from commsweep.training.run import build, execute
from tests.helpers import linked, same_bits, tiny_text

CPU = torch.device("cpu")
NOW = Execution("cpu", checkpoint_every=0)
TOPK = {"kind": "topk", "ratio": 0.1}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def train(parts, steps=3, seed=0):
    """SGD on the first batches; returns (losses, gradients of the last step)."""
    task, step = parts.task.train(), parts.task.components["boundaries"].step
    optimizer = torch.optim.SGD(task.parameters(), 0.1)
    losses = []
    torch.manual_seed(seed)
    for number, (x, y, samples) in zip(range(steps), parts.data.train, strict=False):
        step.training, step.compress, step.number, step.epoch, step.keys = (
            True,
            True,
            number,
            0,
            Keys(samples, CPU),
        )
        optimizer.zero_grad()
        loss = task.loss(task.logits(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [p.grad.clone() for p in task.model.parameters()]


def test_gpt2_has_the_published_size_and_is_cut_after_blocks_2_5_and_8():
    with torch.device("meta"):
        model = causal_lm._scratch(preset("gpt2_scratch").model, 50257, 1024)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    cuts = causal_lm.cut_points(preset("gpt2_scratch").model, model)
    assert list(cuts) == ["block2", "block5", "block8"]
    assert cuts["block5"] is model.transformer.h[5]
    for stages, last in (
        (1, []),
        (2, ["block5"]),
        (3, ["block3", "block7"]),
        (12, [f"block{i}" for i in range(11)]),
    ):
        spec = preset("gpt2_scratch").model.model_copy(update={"stages": stages})
        assert list(causal_lm.cut_points(spec, model)) == last
    with pytest.raises(
        UserError, match=r"12 blocks cannot be split equally .stages that can: 1, 2, 3, 4, 6, 12"
    ):
        causal_lm.cut_points(preset("gpt2_scratch").model.model_copy(update={"stages": 5}), model)


@pytest.mark.parametrize(
    "fwd,bwd",
    [
        ({"kind": "none"}, {"kind": "none"}),
        ({"kind": "topk", "ratio": 1.0}, {"kind": "topk", "ratio": 1.0}),
        ({"kind": "topk", "ratio": 1.0}, {"kind": "forward_mask"}),
    ],
    ids=str,
)
def test_everything_kept_is_bit_identical_to_no_boundary(fwd, bwd):
    staged = build(linked(fwd, bwd, base=tiny_text), NOW)
    bare = build(tiny_text(model__stages=1), NOW)  # one stage: no boundary, no hook
    assert not bare.task.components["boundaries"]
    for a, b in zip(train(staged), train(bare), strict=True):
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def test_a_compressed_boundary_does_change_training():
    assert not same_bits(
        train(build(linked(TOPK, TOPK, base=tiny_text), NOW))[0], train(build(tiny_text(), NOW))[0]
    )


@pytest.mark.parametrize("feedback", [None, {"kind": "ef"}, {"kind": "aqsgd"}], ids=str)
def test_gradient_checkpointing_changes_nothing_and_sends_nothing_twice(feedback):
    made = {}
    for checkpointing in (False, True):
        run = linked(
            TOPK,
            {"kind": "forward_mask"},
            feedback,
            base=tiny_text,
            model__dropout=0.1,
            model__gradient_checkpointing=checkpointing,
        )
        parts = build(run, NOW)
        made[checkpointing] = (
            *train(parts),
            parts.task.components["boundaries"].ledger(),
            [
                value
                for value in parts.task.components["boundaries"].state_dict().values()
                if torch.is_tensor(value)
            ],
        )
        parts.task.components["boundaries"].check_calls(3)
    for a, b in zip(made[False], made[True], strict=True):
        if isinstance(a, dict):
            assert a == b
        else:
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_checkpointing_does_recompute():
    parts = build(tiny_text(model__gradient_checkpointing=True), NOW)
    calls = []
    parts.task.model.transformer.h[1].ln_1.register_forward_hook(lambda *_: calls.append(1))
    train(parts, steps=1)
    assert len(calls) == 2
    parts = build(tiny_text(), NOW)
    calls.clear()
    parts.task.model.transformer.h[1].ln_1.register_forward_hook(lambda *_: calls.append(1))
    train(parts, steps=1)
    assert len(calls) == 1


def test_both_output_conventions_of_a_block_are_crossed():
    x = torch.ones(2, 3)
    assert torch.equal(crossed(lambda t: t * 2, nn.Identity(), None, x), x * 2)
    first, *rest = crossed(lambda t: t * 2, nn.Identity(), None, (x, "cache", None))
    assert torch.equal(first, x * 2) and rest == ["cache", None]

    class Block(nn.Module):
        def forward(self, h):
            return h + 1, "attention"

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, h):
            return self.block(h)[0]

    model = Model()
    assert message_shapes(model, {"b": model.block}, torch.zeros(1, 5, 7))[0] == {
        "b": torch.Size([5, 7])
    }


def test_an_untied_head_begins_as_the_embedding_and_has_gradients_of_its_own():
    """The tied embedding's gradient is the sum of both uses', which an untied model keeps apart."""
    models = {}
    for tied in (True, False):
        parts = build(tiny_text(model__tied=tied), NOW)
        model = parts.task.model
        assert causal_lm.is_tied(model) is tied
        x = torch.arange(12).view(2, 6) % 10
        model.eval()(input_ids=x, labels=x).loss.backward()
        models[tied] = model
    tied, untied = models[True], models[False]
    for name, weight in untied.state_dict().items():
        assert torch.equal(weight, tied.state_dict()[name])
    both = untied.lm_head.weight.grad + untied.transformer.wte.weight.grad
    assert torch.allclose(tied.transformer.wte.weight.grad, both, atol=1e-7)
    assert untied.lm_head.weight.grad.any() and untied.transformer.wte.weight.grad.any()
    assert run_id(tiny_text(model__tied=True)) == run_id(tiny_text())


def test_bytes_of_a_tied_embedding_stand_in_the_row(tmp_path):
    for tied in (True, False):
        run = tiny_text(model__tied=tied)
        row = execute(run, Store(tmp_path), Execution("cpu"))
        weight = build(run, NOW).task.model.get_input_embeddings().weight
        expected = 2 * 4 * weight.numel() if tied else None
        assert row["bytes"].get("tied_per_step") == expected
        assert row["run"]["model"].get("tied") is (None if tied else False)


def test_embeddings_stay_tied_and_the_causal_mask_untouched():
    parts = build(linked(TOPK, TOPK, base=tiny_text), NOW)
    model = parts.task.model
    train(parts)
    assert model.lm_head.weight is model.transformer.wte.weight
    step = parts.task.components["boundaries"].step
    step.training, step.compress = False, False
    x = parts.data.test.x[:1].clone()
    model.eval()
    before = model(input_ids=x).logits[0, :10]
    x[0, 10:] = 1
    # the future is not seen
    assert torch.allclose(model(input_ids=x).logits[0, :10], before, atol=1e-6)


def saved(folder, kind):
    """A model of its own in the hub's layout, and what it says of ten tokens."""
    torch.manual_seed(3)
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=4, n_head=2)
        )
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=32,
            )
        )
    model.save_pretrained(folder / "mini")
    assert (folder / "mini" / "model.safetensors").exists()
    x = torch.arange(10)[None]
    return x, model.eval()(input_ids=x).logits


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_come_from_a_local_folder_and_are_trained_in_stages(kind, tmp_path, store):
    x, expected = saved(tmp_path, kind)
    run = linked(
        TOPK,
        {"kind": "forward_mask"},
        base=tiny_text,
        model__name="pretrained",
        model__weights="mini",
    )
    how = Execution("cpu", model_root=tmp_path)
    parts = build(run, how)
    parts.task.components["boundaries"].step.compress = False
    assert torch.equal(parts.task.model.eval()(input_ids=x).logits, expected)
    row = execute(run, store, how)
    assert row["status"] == "finished" and row["run"] == record(run)
    assert set(row["boundaries"]) == {"block0", "block1", "block2"}


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"data.block_size": 64, "data.train_blocks": 8, "data.eval_blocks": 8},
            "mini has 32 positions",
        ),
        ({"model.dropout": 0.1}, "LlamaForCausalLM has no dropout"),
        (
            {"model.weights": "nothing"},
            "no causal language model with a list of blocks could be loaded from 'nothing'",
        ),
        ({"model.weights": "bert"}, "BertLMHeadModel"),
        (
            {"model.weights": "partial"},
            "lacks 1 of the weights of LlamaForCausalLM (model.norm.weight",
        ),
        ({"model.weights": "wide"}, "the tokenizer has 256 tokens and wide has 600"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(changes, message, tmp_path):
    saved(tmp_path, "llama")
    saved(tmp_path / "partial", "llama")
    (tmp_path / "partial" / "mini").rename(tmp_path / "p")
    (tmp_path / "partial").rmdir()
    (tmp_path / "p").rename(tmp_path / "partial")
    weights = load_file(tmp_path / "partial" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "partial" / "model.safetensors", {"format": "pt"})
    BertLMHeadModel(
        BertConfig(
            hidden_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=256,
        )
    ).save_pretrained(tmp_path / "bert")
    GPT2LMHeadModel(
        GPT2Config(vocab_size=600, n_positions=32, n_embd=16, n_layer=4, n_head=2)
    ).save_pretrained(tmp_path / "wide")
    run = tiny_text(model__name="pretrained", model__weights="mini")
    with pytest.raises(UserError) as caught:
        build(override(run, changes), Execution("cpu", model_root=tmp_path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


# Coders and low rank inside a model.


def test_a_confined_subspace_loses_nothing_and_an_open_one_does():
    scores = {}
    for constrain in (True, False):
        run = linked({"kind": "subspace", "width": 16, "constrain": constrain}, base=tiny_text)
        parts = build(run, NOW)
        train(parts)
        if constrain:
            # it follows the optimizer's step in a real run
            parts.task.components["subspace"].after_step(None)
        step, (x, y, _) = parts.task.components["boundaries"].step, next(iter(parts.data.test))
        step.training = False
        parts.task.eval()
        for step.compress in (True, False):
            scores[constrain, step.compress] = float(
                parts.task.score(parts.task.logits(x), y)[0].detach()
            )
    assert scores[True, True] == pytest.approx(scores[True, False], rel=1e-5)
    assert scores[False, True] != pytest.approx(scores[False, False], rel=1e-3)


@pytest.mark.parametrize("more", [{}, {"frozen": True}])
def test_a_confined_run_stays_confined(store, more):
    row = execute(linked({"kind": "subspace", "width": 16} | more, base=tiny_text), store, NOW)
    sent = row["boundaries"]["block0"]
    # a token's number is one feature more
    assert sent["fwd"] == sent["samples"] * 32 * 4 * (16 + bool(more))
    assert row["metrics"]["test_on_loss"] == pytest.approx(
        row["metrics"]["test_off_loss"], rel=1e-5
    )
    assert row["metrics"]["test_on_loss"] < 5.4  # and learns


def test_a_subspace_that_is_not_frozen_is_one_run_and_what_learners_own_is_not_confined():
    plain, said = (
        linked({"kind": "subspace"} | more, base=tiny_text) for more in ({}, {"frozen": False})
    )
    assert (
        run_id(plain)
        == run_id(said)
        != run_id(linked({"kind": "subspace", "frozen": True}, base=tiny_text))
    )
    for section in ("outer.interval", "sharded.nodes"):
        with pytest.raises(UserError, match="set fwd.compressor.constrain=false"):
            override(plain, {"grad.learners": 2, f"grad.{section}": 1})


def test_frozen_embeddings_are_those_of_the_start_and_move_in_the_subspace_only():
    run = linked({"kind": "subspace", "width": 16, "frozen": True}, base=tiny_text)
    parts = build(run, NOW)
    model, boundaries = parts.task.model, parts.task.components["boundaries"]
    start = model.get_input_embeddings().weight.detach().clone()
    train(parts)
    parts.task.components["subspace"].after_step(None)
    moved = model.get_input_embeddings().weight.detach() - start
    basis = boundaries["block0"].coder.encoder
    assert float(moved.abs().max()) > 1e-3 and torch.allclose(
        moved @ basis @ basis.mT, moved, atol=1e-5
    )
    step, x = boundaries.step, torch.tensor([[3, 1, 255, 0]])
    assert torch.equal(step.frozen(x)[0], start[x[0]] + step.frozen.places[:4])
    step.tokens, h = x, torch.randn(1, 4, 64)
    code = boundaries["block1"].encode(h)
    step.tokens = None
    arrived = boundaries["block1"].decode(code, h)
    assert code.shape == (1, 4, 17) and torch.equal(step.tokens, x)
    a = step.frozen(x)
    assert torch.allclose(arrived, a + (h - a) @ basis @ basis.mT, atol=1e-5)


def test_a_bottleneck_is_trained_and_its_code_and_the_codes_gradient_travel():
    run = linked(
        {"kind": "bottleneck", "width": 8},
        {"kind": "uniform", "bits": 8, "scale": "last"},
        base=tiny_text,
    )
    parts = build(run, NOW)
    coder = parts.task.components["boundaries"]["block1"].coder
    before = coder.encoder.detach().clone()
    train(parts, steps=2)
    assert not torch.equal(coder.encoder, before) and coder.encoder.grad.abs().max() > 0
    sent = parts.task.components["boundaries"].ledger()["block1"]
    tokens = 2 * 8 * 32
    assert (
        sent["fwd"] == tokens * 8 * 4 and sent["fwd_dense"] == sent["bwd_dense"] == tokens * 64 * 4
    )
    assert sent["bwd"] == tokens * (8 + 8)  # 8 codes of 8 bits and two float32 scales a token


def test_a_bottleneck_computes_what_its_compressor_says_at_the_start():
    run = linked({"kind": "bottleneck", "width": 8}, base=tiny_text)
    boundary = build(run, NOW).task.components["boundaries"]["block0"]
    boundary.fwd.step.training = False
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        assert torch.equal(boundary(x), compressor({"kind": "bottleneck", "width": 8}).roundtrip(x))


def test_warm_started_factors_approach_the_best_ones_and_cold_ones_do_not():
    """A warm start is a power iteration over steps: on a message that stays the same it finds the
    SVD's subspace.
    """
    torch.manual_seed(0)
    x = (torch.randn(40, 12) @ torch.diag(0.8 ** torch.arange(12.0)) @ torch.randn(12, 12))[None]
    u, s, v = torch.linalg.svd(x[0])
    best = float((x[0] - u[:, :3] @ torch.diag(s[:3]) @ v[:3]).norm())
    errors = {}
    for warm in (True, False):
        made = compressor({"kind": "lowrank", "rank": 3, "warm": warm})
        q = made.begin(x.shape, 0)
        for step in range(30):
            y, q = made.apply_from(x, q, 0) if warm else (made.apply(x, seed=step), None)
        errors[warm] = float((x - y).norm())
    assert errors[True] == pytest.approx(best, rel=1e-3)
    assert errors[False] > 1.05 * best


def test_low_rank_follows_its_formula_in_float64():
    x = torch.randn(2, 7, 9)
    made = compressor({"kind": "lowrank", "rank": 2})
    q = torch.randn(9, 2)
    m = x.reshape(14, 9).double()
    p, _ = torch.linalg.qr(m @ q.double())
    assert torch.allclose(
        made.apply_from(x, q, 0)[0].double().reshape(14, 9), p @ (m.mT @ p).mT, atol=1e-5
    )


def test_randtopk_draws_top_places_with_probability_one_minus_alpha():
    x = torch.arange(1.0, 101.0).repeat(4000, 1)  # the top 10 are the last ten columns
    made = compressor({"kind": "randtopk", "ratio": 0.1, "alpha": 0.3})
    mask = made.masked(x, seed=1)[1]
    assert (mask.sum(1) == 10).all()
    share = mask.float().mean(0)
    assert share[90:].sum() == pytest.approx(7.0, abs=0.1)  # k (1 - alpha) of the top
    assert share[90:].std() < 0.03 and share[:90].std() < 0.01  # uniform within each group
    assert torch.equal(
        made.at_inference().apply(x), compressor({"kind": "topk", "ratio": 0.1}).apply(x)
    )


def test_tah_rotates_outlier_tiles_gives_rich_tokens_more_bits_and_follows_its_formula():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 10, 64, generator=g)
    x[0, :5] *= 0.01
    # five tokens of one large entry: little entropy, and an outlier in their first tile
    x[0, :5, 0] = 5.0
    made = compressor({"kind": "tah", "tile": 32, "high_share": 0.5})
    _, _, rotated, high = made._quantized(x)
    assert high.tolist() == [False] * 5 + [True] * 5
    assert rotated[:5, 0].all() and not rotated[5:].any()
    y = made.apply(x)
    for token, bits in ((0, 3), (9, 4)):
        for tile in (0, 1):
            t = x[0, token, 32 * tile : 32 * tile + 32].double()
            h = (
                torch.tensor(
                    [[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)]
                ).double()
                / 32**0.5
            )
            turned = bool(rotated[token, tile])
            t = t @ h if turned else t
            s = t.abs().max().bfloat16().double()
            half = 2 ** (bits - 1)
            v = (t / s * half).round().clamp(-half, half - 1) / half * s
            v = v @ h if turned else v
            assert torch.allclose(y[0, token, 32 * tile : 32 * tile + 32].double(), v, atol=1e-6)
    plain = compressor({"kind": "tah", "tile": 32, "high_share": 0.5, "tau": 1e9}).apply(x)
    assert (y - x)[0, :5].norm() < (plain - x)[0, :5].norm()  # the rotation is worth it

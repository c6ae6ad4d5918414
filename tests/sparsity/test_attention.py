"""Patterns: pairs in closed form, equality with masked dense attention, causality, and models that
attend so.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as dense

from commsweep.config import Execution, override
from commsweep.errors import UserError
from commsweep.sparsity import flops
from commsweep.sparsity.attention import SparseAttention, allowed, attend
from commsweep.training.run import build
from tests.helpers import same_bits, tiny, tiny_text

KINDS = ("causal", "local", "strided", "local_strided", "fixed")
HOW = Execution("cpu")
each_kind = pytest.mark.parametrize("kind", KINDS)


def qkv(tokens, heads=3, dtype=torch.float32, seed=0, head=8):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, heads, tokens, head, generator=generator).to(dtype).requires_grad_()
        for _ in range(3)
    ]


def near(a, b, bound):
    return float((a - b).detach().abs().max()) <= bound * max(1.0, float(b.detach().abs().max()))


@given(kind=st.sampled_from(KINDS), tokens=st.integers(1, 70), width=st.integers(1, 70))
def test_pairs_in_closed_form_are_those_of_the_mask(kind, tokens, width):
    width = min(width, tokens)
    assert int(allowed(kind, tokens, width).sum()) == flops.pairs(kind, tokens, width)


@pytest.mark.parametrize(
    "kind, published",
    [
        ("causal", 524800),
        ("local", 122944),
        ("strided", 4608),
        ("local_strided", 126528),
        ("fixed", 69632),
    ],
)
def test_pairs_of_1024_tokens_and_a_width_of_128(kind, published):
    assert flops.pairs(kind, 1024, 128) == published


@given(
    kind=st.sampled_from(KINDS),
    tokens=st.integers(1, 70),
    width=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_each_equals_dense_attention_under_the_same_mask(kind, tokens, width, seed):
    """Forward and backward, in whole and in broken blocks; largest difference 1e-6 of the largest
    value.
    """
    width, x = min(width, tokens), qkv(tokens, seed=seed)
    made, want = attend(kind, *x, width), dense(*x, attn_mask=allowed(kind, tokens, width))
    slope = torch.randn(made.shape, generator=torch.Generator().manual_seed(seed))
    assert made.shape == want.shape and near(made, want, 1e-6)
    for a, b in zip(
        torch.autograd.grad(made, x, slope), torch.autograd.grad(want, x, slope), strict=True
    ):
        assert near(a, b, 4e-6)  # sums of sums


@pytest.mark.parametrize("size", [1, 6])
@each_kind
def test_in_float64_and_in_bfloat16(kind, size):
    """bfloat16 is as near the truth as the fused dense kernel is, at large scores, too; under
    autocast as well.
    """
    for dtype in (torch.float64, torch.bfloat16):
        x = qkv(48, dtype=dtype, head=64)
        q, k, v = size * x[0].detach(), size * x[1].detach(), x[2].detach()
        want = dense(q.double(), k.double(), v.double(), attn_mask=allowed(kind, 48, 8))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            made = attend(kind, q, k, v, 8)
        fused = dense(q, k, v, attn_mask=allowed(kind, 48, 8))
        bound = 1e-13 if dtype == torch.float64 else 2 * float((fused.double() - want).abs().max())
        assert made.dtype == dtype and near(made.double(), want, bound)


@each_kind
def test_no_query_sees_the_future(kind):
    """What is changed from a token on leaves everything before it bit for bit."""
    q, k, v = (one.detach() for one in qkv(40))
    before = attend(kind, q, k, v, 8)
    for place in (1, 7, 8, 25, 39):
        changed = [one.clone() for one in (q, k, v)]
        for one in changed:
            one[:, :, place:] = 100.0
        assert same_bits(attend(kind, *changed, 8)[:, :, :place], before[:, :, :place])


@each_kind
def test_dropout_leaves_the_mean(kind):
    torch.manual_seed(0)
    q, k, _ = (one.detach() for one in qkv(16, heads=64))
    out = attend(kind, q, k, torch.ones_like(q), 8, dropout=0.25)
    assert out.std() > 0.05 and abs(float(out.mean()) - 1) < 0.05


def test_every_other_head_attends_otherwise():
    q, k, v = qkv(32, heads=5)
    made = SparseAttention(8, "local", "fixed")(q, k, v, None, 0.0)
    for head in range(5):
        one = [x[:, head : head + 1] for x in (q, k, v)]
        assert near(made[:, head : head + 1], attend(("local", "fixed")[head % 2], *one, 8), 1e-6)
    assert (
        flops.mean_pairs("local", "fixed", 32, 8, 5)
        == (3 * flops.pairs("local", 32, 8) + 2 * flops.pairs("fixed", 32, 8)) / 5
    )


def test_what_is_no_block_of_text_is_refused():
    q, k, v = qkv(16, heads=1)
    with pytest.raises(ValueError, match="no attention pattern 'nonsense'"):
        attend("nonsense", q, k, v, 64)
    with pytest.raises(ValueError, match="1 queries and 16 keys"):
        attend("local", q[:, :, -1:], k, v, 4)
    # no other head
    assert near(
        SparseAttention(4, "local", "fixed")(q, k, v, None, 0.0), attend("local", q, k, v, 4), 0
    )


# In a model.

PHASE = {"sparsity.width": 8, "sparsity.phases.all.attention": "local"}


def logits(run, kind=None, beside=None):
    parts = build(run, HOW)
    model = parts.task.model.eval()
    if kind:
        parts.task.components["sparsity"].attending.switch(kind, beside)
    with torch.no_grad():
        return model(input_ids=parts.data.example).logits


def test_a_model_attends_as_its_phase_says_and_causally_it_is_the_plain_model_bit_for_bit():
    run = override(tiny_text(), PHASE)
    assert same_bits(logits(run, "causal"), logits(tiny_text()))
    assert not torch.equal(logits(run, "local"), logits(tiny_text()))
    assert torch.allclose(logits(run, "causal", "local"), logits(run, "causal", "local"))


@pytest.mark.parametrize(
    "alternate, want", [("heads", ("local", "fixed")), ("layers", ("local", "fixed"))]
)
def test_alternation_over_heads_or_layers_is_read_back(alternate, want):
    run = override(
        tiny_text(),
        PHASE
        | {"sparsity.phases.all.alternate_attention": "fixed", "sparsity.alternate": alternate},
    )
    attending = build(run, HOW).task.components["sparsity"].attending
    attending.switch("local", "fixed")
    assert attending.now() == want
    kinds = [(layer.kind, layer.beside) for layer in attending.layers]
    assert kinds == (
        [("local", "fixed")] * 4 if alternate == "heads" else [("local", None), ("fixed", None)] * 2
    )


def test_grouped_queries_and_checkpointed_blocks():
    from transformers import LlamaConfig, LlamaForCausalLM

    from commsweep.sparsity.attention import Attending

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            vocab_size=50,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval()
    x = torch.randint(0, 50, (2, 24))
    before = model(input_ids=x).logits
    attending = Attending(model, 4, "heads")
    assert torch.equal(model(input_ids=x).logits, before)
    attending.switch("local", None)
    changed = x.clone()
    changed[:, 0] += 1  # two layers of band 4 reach six tokens back
    first, second = model(input_ids=x).logits, model(input_ids=changed % 50).logits
    assert torch.allclose(first[:, 7:], second[:, 7:], atol=1e-6) and not torch.allclose(
        first[:, 6], second[:, 6]
    )
    run = override(tiny_text(), PHASE)
    assert torch.equal(logits(run), logits(override(run, {"model.gradient_checkpointing": True})))


def test_what_has_no_such_attention_is_one_line():
    with pytest.raises(UserError, match=r"sparsity.width=64: wider than data.block_size=32"):
        override(tiny_text(), PHASE | {"sparsity.width": 64})
    with pytest.raises(
        UserError, match="model.name=resnet_small has no attention; leave attention out"
    ):
        override(tiny(), PHASE)

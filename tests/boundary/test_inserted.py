"""Boundaries in a loop of one's own: they see by themselves what is training, and leave no trace
when removed.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from commsweep.boundary.insert import insert
from commsweep.errors import UserError
from tests.helpers import same_bits

TOPK = {"compressor": {"kind": "topk", "ratio": 0.25}}
EF = TOPK | {"feedback": {"kind": "ef"}}
SAMPLE = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(n=8, seed=0):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


def step(model, x):
    model(x).square().mean().backward()


def test_training_is_counted_and_nothing_else_is():
    model = net()
    boundaries = insert(model, {"1": {"fwd": EF, "bwd": EF}}, SAMPLE, 8)
    for turn in range(3):
        step(model, batch(seed=turn))
    counted = boundaries.ledger()
    memory = [buffer.clone() for buffer in boundaries.buffers()]
    assert counted["1"]["calls"] == 3 and counted["1"]["samples"] == 24 and counted["1"]["fwd"] > 0
    with torch.no_grad():
        model(batch(20))  # larger than any batch of training
    model.eval()
    model(batch(5))
    model.train()
    with torch.no_grad():
        model(batch(1))
    assert boundaries.ledger() == counted
    assert all(same_bits(a, b) for a, b in zip(memory, boundaries.buffers(), strict=True))
    step(model, batch(3))  # a short last batch
    assert boundaries.ledger()["1"]["calls"] == 4


def test_an_evaluation_is_compressed_or_in_bypassed_dense():
    model = net()
    plain = copy.deepcopy(model)
    boundaries = insert(model, {"1": {"fwd": TOPK}}, SAMPLE, 8)
    model.eval()
    with torch.no_grad():
        assert not torch.equal(model(batch()), plain(batch()))
        with boundaries.bypassed():
            assert torch.equal(model(batch()), plain(batch()))


def test_random_places_are_others_each_step():
    model, seen = net(), []
    insert(model, {"1": {"fwd": {"compressor": {"kind": "randomk", "ratio": 0.5}}}}, SAMPLE, 8)
    model[2].register_forward_pre_hook(lambda _, inputs: seen.append((inputs[0] != 0).any(0)))
    for _ in range(6):
        step(model, batch())
    assert len({tuple(one.tolist()) for one in seen}) > 1


def test_samples_are_asked_for_only_where_something_is_keyed_by_them():
    model = net()
    boundaries = insert(
        model, {"1": {"fwd": TOPK | {"feedback": {"kind": "aqsgd"}}}}, SAMPLE, 4, n_samples=12
    )
    with pytest.raises(
        UserError, match=r"boundary 1 remembers samples: call boundaries.samples\(numbers\)"
    ):
        step(model, batch(4))
    for numbers in (torch.arange(3), torch.tensor([0, 1, 2, 12]), torch.tensor([-1, 0, 1, 2])):
        boundaries.samples(numbers)
        with pytest.raises(UserError, match="a batch of 4 needs as many, from 0 to 11"):
            step(model, batch(4))
    for _ in range(2):
        boundaries.samples(torch.tensor([3, 1, 4, 5]))
        step(model, batch(4))
    sent = boundaries.ledger()["1"]
    assert sent["fwd_dense"] > sent["fwd"] > sent["fwd_dense"] / 2  # the first visit is dense


def test_removed_they_leave_the_model_as_it_was():
    model = net()
    plain = copy.deepcopy(model)
    with insert(model, {"1": {"fwd": TOPK, "bwd": TOPK}}, SAMPLE, 8) as boundaries:
        step(model, batch())
        assert not torch.equal(model(batch()), plain(batch()))
    assert torch.equal(model(batch()), plain(batch())) and boundaries.ledger()["1"]["calls"] >= 1
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_resumed_loop_goes_on_where_it_was():
    def trained(model, boundaries, turns):
        for turn in turns:
            step(model, batch(seed=turn))

    randomk = {"compressor": {"kind": "randomk", "ratio": 0.5}, "feedback": {"kind": "ef"}}
    models = [net(), net()]
    one, other = (insert(model, {"1": {"fwd": randomk}}, SAMPLE, 8) for model in models)
    trained(models[0], one, range(4))
    trained(models[1], other, range(2))
    again = net()
    resumed = insert(again, {"1": {"fwd": randomk}}, SAMPLE, 8)
    resumed.load_state_dict(other.state_dict())
    trained(again, resumed, range(2, 4))
    assert all(same_bits(a, b) for a, b in zip(one.buffers(), resumed.buffers(), strict=True))
    assert one.ledger() == resumed.ledger()


@pytest.mark.parametrize(
    ("links", "more", "line"),
    [
        ({"9": {"fwd": TOPK}}, {}, "the model has no module '9'"),
        ({"1": {"fwd": {"compressor": {"kind": "topq"}}}}, {}, "did you mean 'topk'"),
        (
            {"1": {"fwd": TOPK | {"feedback": {"kind": "aqsgd"}}}},
            {},
            r"say how many there are with insert\(..., n_samples",
        ),
        (
            {"1": {"fwd": {"compressor": {"kind": "subspace"}}}},
            {},
            "needs a language model that commsweep builds",
        ),
        (
            {"1": {"bwd": {"compressor": {"kind": "forward_mask"}}}},
            {},
            "needs a forward sparsifier",
        ),
        ({"1": {"fwd": TOPK}}, {"batch_size": 0}, "at least 1"),
        (
            {"1": {"fwd": TOPK}},
            {"sample": torch.zeros(1, 5)},
            r"sample of shape \(1, 5\) does not pass through the model",
        ),
    ],
)
def test_what_cannot_be_inserted_is_one_line(links, more, line):
    with pytest.raises(UserError, match=line) as error:
        insert(net(), links, **({"sample": SAMPLE, "batch_size": 8} | more))
    assert "\n" not in str(error.value)


def test_a_batch_that_is_too_large_is_one_line():
    model = net()
    insert(model, {"1": {"fwd": EF}}, SAMPLE, 8)
    with pytest.raises(
        UserError, match="a batch of 9 rows: the boundaries were made for at most 8"
    ):
        step(model, batch(9))


def test_a_copy_of_the_model_is_plain_once_the_boundaries_are_out_and_two_are_refused():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    plain = model(x)
    links = {"0": {"fwd": {"compressor": {"kind": "zero"}}}}
    boundaries = insert(model, links, x[:1], 4)
    twin = copy.deepcopy(model)
    assert not torch.equal(model(x), plain) and not torch.equal(twin(x), plain)
    with pytest.raises(UserError, match="module '0' has a boundary already"):
        insert(model, links, x[:1], 4)
    boundaries.remove()
    assert torch.equal(model(x), plain) and torch.equal(twin(x), plain)
    insert(model, links, x[:1], 4)
    assert not torch.equal(model(x), plain)

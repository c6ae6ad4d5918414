"""Groups of layers with a compressor of their own: `grad.layers`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commsweep.config import Execution, override
from commsweep.config.labels import exchange
from commsweep.config.override import parse_gradients
from commsweep.data_parallel.exchange import Exchange
from commsweep.errors import UserError
from commsweep.registry import preset
from commsweep.store import Store
from commsweep.training.run import execute

TOPK = {
    "grad.learners": 2,
    "grad.exchange": "allgather",
    "grad.compressor.kind": "topk",
    "grad.compressor.ratio": 0.1,
}
HEAD = {
    "grad.layers.head.match": ["fc.*"],
    "grad.layers.head.compressor.kind": "uniform",
    "grad.layers.head.compressor.bits": 4,
}
SECTIONS = [
    {},
    {"grad.feedback.kind": "ef"},
    {"grad.outer.interval": 2, "grad.outer.rate": 0.7},
    {"grad.exchange": "server"},
    {"grad.local_steps": 2},
    {"kfac.factors_every": 2},
    {"fwd.compressor.kind": "uniform", "fwd.compressor.bits": 4},
    {"grad.layers.head.compressor.kind": "powersgd", "grad.layers.head.compressor.rank": 1},
]


@pytest.mark.parametrize("more", SECTIONS, ids=lambda more: ",".join(more) or "plain")
def test_a_group_sends_in_its_own_code(tmp_path, more):
    run = override(preset("synthetic"), TOPK | {"epochs": 1, "schedule.t_max": 1})
    base = {name: value for name, value in more.items() if "layers" not in name}
    changed = {
        name: value
        for name, value in HEAD.items()
        if name.endswith("match") or not (set(more) - set(base))
    }
    every = execute(override(run, base), Store(tmp_path), Execution())
    some = execute(override(run, changed | more), Store(tmp_path), Execution())
    assert some["status"] == "finished", some
    assert some["gradients"]["conv.up"] == pytest.approx(every["gradients"]["conv.up"], rel=0.05)
    assert some["gradients"]["fc.up"] != every["gradients"]["fc.up"]


@pytest.mark.parametrize(
    "kind", [{"kind": "topk", "ratio": 0.1}, {"kind": "tern"}, {"kind": "powersgd", "rank": 2}]
)
def test_a_group_in_the_code_of_all_changes_nothing(tmp_path, kind):
    changes = {f"grad.compressor.{name}": value for name, value in kind.items()}
    changes |= {"grad.learners": 2, "grad.exchange": "allgather", "grad.feedback.kind": "ef"}
    run = override(preset("synthetic"), changes | {"epochs": 1, "schedule.t_max": 1})
    group = {f"grad.layers.all.compressor.{name}": value for name, value in kind.items()}
    rows = [
        execute(one, Store(tmp_path), Execution())
        for one in (run, override(run, {"grad.layers.all.match": ["*"]} | group))
    ]
    assert rows[0]["id"] != rows[1]["id"]
    assert rows[0]["metrics"] == rows[1]["metrics"]
    assert rows[0]["gradients"] == rows[1]["gradients"]


def test_each_layer_arrives_as_its_own_compressor_says():
    """Against a network for each group, compressed as a whole."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 16), nn.Linear(16, 8)
    settings = {"learners": 2, "exchange": "allgather"}
    codes = [{"kind": "topk", "ratio": 0.25}, {"kind": "uniform", "bits": 3}]
    group = {"match": ["1.*"], "compressor": codes[1]}
    spec = parse_gradients(settings | {"compressor": codes[0], "layers": {"last": group}})
    both = Exchange(spec, nn.Sequential(first, last), seed=0)
    grads = [[torch.randn_like(p) for p in both.trained] for _ in range(2)]
    arrived = both.begin(grads, 0, 0, range(4))()
    for index, code in ((0, codes[0]), (2, codes[1])):
        alone = Exchange(
            parse_gradients(settings | {"compressor": code}), nn.Sequential(first, last), seed=0
        )
        assert torch.equal(arrived[index], alone.send(index, [g[index] for g in grads], 0, 0))
    assert both.installed == spec


def test_words_name_the_groups():
    run = override(preset("synthetic"), TOPK | HEAD)
    row = {f"grad.{name}": value for name, value in run.grad.model_dump(mode="json").items()}
    row |= {"grad.compressor.kind": "topk", "grad.compressor.ratio": 0.1}
    row |= {"grad.feedback.kind": "none", "grad.schedule.kind": "steady"}
    row |= {"grad.layers.head.compressor.kind": "uniform", "grad.layers.head.compressor.bits": 4}
    assert "head: min-max 4 bit" in exchange(row)


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"grad.layers.head.match": ["fc.*"], "grad.layers.head.compressor.kind": "none"},
            "grad.exclude",
        ),
        (HEAD | {"grad.schedule.kind": "ramp"}, "grad.schedule.kind=ramp"),
        ({"grad.layers.head.match": ["x"]}, "grad.layers.head.compressor"),
        (HEAD | {"grad.layers.head.match": []}, "grad.layers.head.match"),
        (HEAD | {"grad.exchange": "allreduce", "grad.compressor.kind": "randomk"}, "adds messages"),
    ],
)
def test_what_cannot_be_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        override(preset("synthetic"), TOPK | changes)


def test_groups_of_an_uncompressed_exchange_are_refused():
    with pytest.raises(UserError, match="layers and start_epoch have no effect"):
        override(preset("synthetic"), HEAD | {"grad.learners": 2, "grad.exchange": "allgather"})


def test_patterns_that_choose_nothing_or_twice_are_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    code = {"kind": "uniform", "bits": 4}
    settings = {"learners": 2, "exchange": "allgather", "compressor": {"kind": "topk"}}
    for more, said in (
        ({"layers": {"a": {"match": ["2.*"], "compressor": code}}}, r"grad.layers.a: '2.\*' match"),
        (
            {"layers": {name: {"match": ["1.*"], "compressor": code} for name in ("a", "b")}},
            "1.weight, and so does grad.layers.a",
        ),
        (
            {"layers": {"a": {"match": ["1.*"], "compressor": code}}, "exclude": ["1.bias"]},
            "1.bias, and so does grad.exclude",
        ),
    ):
        with pytest.raises(UserError, match=said):
            Exchange(parse_gradients(settings | more), model, seed=0)

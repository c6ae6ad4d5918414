"""Parameters that a pattern excludes travel dense, whatever the compressor is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commsweep.config import Execution, override
from commsweep.config.override import parse_gradients
from commsweep.data_parallel.layers import layers
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


def network():
    return nn.ModuleDict({"model": nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))})


def test_patterns_choose_by_the_models_own_names():
    spec = parse_gradients(
        {
            "learners": 2,
            "exchange": "allgather",
            "compressor": {"kind": "topk"},
            "exclude": ["1.*", "0.bias"],
        }
    )
    dense = {layer.name: layer.dense for layer in layers(network(), spec)}
    assert dense == {
        "model.0.weight": False,
        "model.0.bias": True,
        "model.1.weight": True,
        "model.1.bias": True,
    }
    with pytest.raises(UserError, match=r"'2\.\*' matches no parameter"):
        layers(network(), spec.model_copy(update={"exclude": ("2.*",)}))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"grad.feedback.kind": "ef"},
        {"grad.outer.interval": 2, "grad.outer.rate": 0.7},
        {"grad.exchange": "server"},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
def test_what_is_excluded_is_sent_whole(tmp_path, more):
    run = override(preset("synthetic"), TOPK | {"epochs": 1, "schedule.t_max": 1})
    every = execute(override(run, more), Store(tmp_path), Execution())
    some = execute(override(run, more | {"grad.exclude": ["fc.*"]}), Store(tmp_path), Execution())
    assert some["status"] == "finished" and some["run"]["grad"]["exclude"] == ["fc.*"]
    # the last layer is the only fully connected one
    steps = more.get("grad.outer.interval", 1)
    assert steps * some["gradients"]["fc.up"] == some["gradients"]["fc.dense"]
    assert some["gradients"]["fc.up"] > every["gradients"]["fc.up"]
    assert steps * some["gradients"]["conv.up"] < some["gradients"]["conv.dense"]


def test_everything_excluded_is_dense_training(tmp_path):
    dense = override(preset("synthetic"), {"grad.learners": 2, "grad.exchange": "allgather"})
    none = override(dense, TOPK | {"grad.exclude": ["*"]})
    rows = [execute(run, Store(tmp_path), Execution()) for run in (dense, none)]
    assert rows[0]["metrics"] == rows[1]["metrics"]


def test_it_is_refused_where_it_has_no_effect():
    run = preset("synthetic_text")
    for changes, said in (
        ({"grad.exclude": ["x"]}, "exclude, layers and start_epoch have no effect"),
        (TOPK | {"grad.exclude": []}, "grad.exclude"),
        (
            {
                "grad.learners": 2,
                "grad.compressor.kind": "uniform",
                "grad.exclude": ["x"],
                "grad.sharded.nodes": 1,
            },
            "does not go with grad.sharded",
        ),
    ):
        with pytest.raises(UserError, match=said):
            override(run, changes)
    assert torch.is_grad_enabled()

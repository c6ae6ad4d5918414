"""Scoring without compression after BatchNorm gathered its statistics anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commsweep.config import Execution, override, run_id
from commsweep.errors import UserError
from commsweep.registry import preset
from commsweep.store import Store
from commsweep.training.recalibration import Recalibration
from commsweep.training.run import execute

TOPK = {
    "fwd.compressor.kind": "topk",
    "fwd.compressor.ratio": 0.1,
    "epochs": 2,
    "eval_every": 1,
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU())


def batches(count):
    torch.manual_seed(1)
    return [(torch.randn(6, 1, 5, 5), torch.zeros(6), torch.arange(6)) for _ in range(count)]


def test_statistics_are_the_mean_over_the_batches_and_are_put_back():
    model = network().eval()
    norm = model[1]
    norm.running_mean.fill_(7.0)
    seen = []
    given = batches(5)
    for x, _, _ in given[:3]:
        y = model[0](x).transpose(0, 1).flatten(1)
        seen.append((y.mean(1), y.var(1)))
    recalibration = Recalibration(model, 3)
    with recalibration.gathered(model, given):
        assert not norm.training and not model[2].training
        mean, variance = (torch.stack(part).mean(0) for part in zip(*seen, strict=True))
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, variance)
    assert torch.equal(norm.running_mean, torch.full((4,), 7.0)) and norm.momentum == 0.1


def test_an_error_inside_puts_them_back_too():
    model = network().eval()
    with (
        pytest.raises(RuntimeError),
        Recalibration(model, 1).gathered(model, [(torch.zeros(1), None, None)]),
    ):
        pass
    assert torch.equal(model[1].running_mean, torch.zeros(4)) and not model[1].training


def test_a_model_without_batch_norm_is_refused():
    with pytest.raises(UserError, match="recalibrate=3: the model has no BatchNorm"):
        Recalibration(nn.Linear(2, 2), 3)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"precision": "bfloat16"},
        {"grad.learners": 2},
        {"grad.learners": 2, "grad.outer.interval": 2, "grad.outer.rate": 0.7},
        {"grad.learners": 2, "grad.sharded.nodes": 1},
        {"kfac.damping": 0.01},
        {"sparsity.phases.all.sparsity": 0.5, "sparsity.interval": 2},
        {"microbatches": 2},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
@pytest.mark.sampled(3)
def test_the_training_is_the_same_with_and_without_it(tmp_path, more):
    """Every section that a Run may have: only the third scoring is added."""
    run = override(preset("synthetic"), TOPK | more)
    plain = execute(run, Store(tmp_path), Execution())
    other = override(run, {"recalibrate": 4})
    assert run_id(other) != run_id(run)
    row = execute(other, Store(tmp_path), Execution())
    assert row["status"] == plain["status"] == "finished"
    added = {key for key in row["metrics"] if key not in plain["metrics"]}
    assert "test_recalibrated_acc" in added and all("_recalibrated_" in key for key in added)
    assert {key: row["metrics"][key] for key in plain["metrics"]} == plain["metrics"]
    assert row["bytes"] == plain["bytes"]

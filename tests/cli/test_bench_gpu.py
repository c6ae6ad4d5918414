"""The GPU's bench, walked through on the CPU: it must not first run on a machine that is lent for
an hour.
"""

from __future__ import annotations

import pytest
import torch

from commsweep.bench import gpu
from commsweep.cli.main import main
from commsweep.compressors.quantize import Uniform
from commsweep.registry import sweep

LITTLE = gpu.Sizes(
    rows=((4, 512),),
    batch=4,
    steps=1,
    seconds=1.0,
    cells=(1,),
    text={"model.name": "gpt2-nano", "data.block_size": 16},
    modes=(),
)


def test_without_a_gpu_it_says_so_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu"]) == 2
    out = capsys.readouterr()
    assert not out.out and out.err.count("\n") == 1 and "no CUDA device is here" in out.err


def test_a_device_that_computes_otherwise_is_seen(monkeypatch):
    assert all(result.verdict == "holds" for result in gpu.equality("cpu"))
    plain, turn = Uniform.apply, []

    def apply(self, x, seed=0):  # every second call is the other device's
        turn.append(1)
        return plain(self, x, seed) + 1e-6 * (len(turn) % 2)

    monkeypatch.setattr(Uniform, "apply", apply)
    missed = [result.name for result in gpu.equality("cpu") if result.verdict == "missed"]
    assert len(missed) == 7 and all(name.startswith("uniform") for name in missed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_part_of_it_measures():
    made = list(gpu.bench("cpu", LITTLE))
    names = " ".join(result.name for result in made)
    for wanted in (
        "4-bit groups of 32 of [4, 512] bfloat16, message",
        "EF21 + TopK 10 %: waits",
        "float32, AQ-SGD",
        "bfloat16, dense / dense",
        "1 cells at once",
        "gpt2-nano step, batch 8, bfloat16, AQ-SGD",
        "estimated hours",
    ):
        assert wanted in names
    assert all(result.ratio >= 0 for result in made)


def test_hours_are_those_of_the_sweeps_cells():
    """By hand: 295 cells of which each trains 100 epochs of 391 steps."""
    measured = dict.fromkeys(gpu.STEPS, 0.01)
    result = gpu.hours(measured, {1: 100.0, 2: 150.0, 4: 120.0})
    assert result.medians == {"cells": 295, "at once": 2}
    assert result.ratio == pytest.approx(295 * 100 * 391 * 0.01 * 1.13 / 1.5 / 3600)
    aq = gpu.hours(measured | {"AQ-SGD + TopK 10 %": 0.02}, {1: 1.0})
    more = sum(run.fwd.feedback.kind == "aqsgd" for run in sweep("resnet18_paper"))
    assert aq.ratio == pytest.approx((295 + more) * 100 * 391 * 0.01 * 1.13 / 3600)

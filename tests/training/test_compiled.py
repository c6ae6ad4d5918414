"""Compiled blocks: which they are, that hooks stay outside, and that numbers are the eager ones up
to rounding.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from commsweep.config import Execution, override
from commsweep.errors import UserError
from commsweep.store import Store
from commsweep.training import compiled
from commsweep.training.run import build, execute
from tests.helpers import linked, tiny, tiny_text

HOW = Execution("cpu")
TOPK = {"kind": "topk", "ratio": 0.1}


@pytest.fixture
def quickly(monkeypatch):
    """The compiler's front end alone; calls of what it made are noted."""
    calls = []
    plain = torch.compile

    def front(forward, **options):
        made = plain(forward, backend="eager", dynamic=options["dynamic"])
        return lambda *args, **kwargs: calls.append(1) or made(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", front)
    return calls


def test_blocks_are_what_lies_between_boundaries():
    model = build(linked(TOPK, TOPK), HOW).task.model
    assert [name for name, _ in compiled.blocks(model)] == ["layer1", "layer2", "layer3", "layer4"]
    text = build(linked(TOPK, TOPK, base=tiny_text), HOW).task.model
    assert [name for name, _ in compiled.blocks(text)] == [f"transformer.h.{i}" for i in range(4)]


def test_a_block_that_is_watched_inside_is_cut_up():
    """K-FAC looks at every layer; a boundary may lie inside a stage."""
    kfac = build(override(tiny(), {"kfac.damping": 0.1}), HOW).task.model
    assert not dict(compiled.blocks(kfac))
    model = build(tiny(model__name="resnet18", model__width=64), HOW).task.model
    model.layer2[0].register_forward_hook(lambda *_: None)
    assert [name for name, _ in compiled.blocks(model)] == [
        "layer1",
        "layer2.0",
        "layer2.1",
        "layer3",
        "layer4",
    ]


@pytest.mark.parametrize(
    "run",
    [
        linked(TOPK, TOPK, {"kind": "ef21"}),
        pytest.param(linked(TOPK, TOPK, base=tiny_text), marks=pytest.mark.slow),
        pytest.param(
            linked(TOPK, TOPK, base=tiny_text, model__gradient_checkpointing=True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["image", "text", "checkpointed"],
)
def test_a_training_is_the_eager_one_crossings_and_bytes_included(run, tmp_path, quickly):
    eager = execute(run, Store(tmp_path / "eager"), HOW)
    assert not quickly
    made = execute(run, Store(tmp_path / "compiled"), replace(HOW, compile="default"))
    assert len(quickly) >= made["steps"] * 4  # in training; evaluations run as they are
    for key in ("metrics", "boundaries", "bytes", "run", "id"):
        assert made[key] == eager[key]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "run",
    [linked(TOPK, TOPK, {"kind": "ef"}), linked(TOPK, TOPK, base=tiny_text)],
    ids=["image", "text"],
)
def test_compiled_numbers_are_eager_ones_up_to_rounding(run, tmp_path):
    """Of the loss over a short training; float32 sums in another order, over which TopK may choose
    otherwise.
    """
    eager, made = (
        execute(run, Store(tmp_path / str(mode)), replace(HOW, compile=mode))
        for mode in (None, "default")
    )
    assert made["boundaries"] == eager["boundaries"]
    assert made["metrics"]["train_loss"] == pytest.approx(eager["metrics"]["train_loss"], rel=1e-3)


def test_what_cannot_compile_is_one_line(monkeypatch):
    with pytest.raises(
        UserError, match="--compile reduce-overhead: CUDA graphs need a GPU; use --compile default"
    ):
        build(tiny(), replace(HOW, compile="reduce-overhead"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="no C.. compiler"):
        build(tiny(), replace(HOW, compile="default"))

"""Learners with a pipeline each equal the simulation bit for bit, both kinds of messages
compressed, and go on from their checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from commsweep.cli.main import main
from commsweep.config import Execution, Run, override, record
from commsweep.errors import UserError
from commsweep.processes import stages
from commsweep.processes.trainer import connect
from tests.helpers import linked, tiny, tiny_text
from tests.processes.test_pipelining import simulate, start, wiring

MESH = {"grad.learners": 2, "microbatches": 2, "eval_every": 1}
IMAGES = MESH | {"model.cuts": ["layer2"], "epochs": 2}
TEXT = MESH | {"model.stages": 2, "epochs": 2, "optim.clip": 0.5}
TOPK, UNIFORM = {"kind": "topk", "ratio": 0.2}, {"kind": "uniform", "bits": 4}
GATHER = {"grad.exchange": "allgather"}
APART = {"grad.outer.interval": 3}


def cases() -> dict[str, Run]:
    """A representative set."""
    images, text = (
        linked(TOPK, UNIFORM, {"kind": "ef"}, {"kind": "ef21"}),
        linked(TOPK, UNIFORM, base=tiny_text),
    )
    return {
        "dense": override(tiny(), IMAGES),
        "topk": override(
            images,
            IMAGES
            | GATHER
            | {
                "grad.compressor.kind": "topk",
                "grad.compressor.ratio": 0.1,
                "grad.feedback.kind": "ef",
            },
        ),
        "powersgd": override(
            images, IMAGES | {"grad.compressor.kind": "powersgd", "grad.feedback.kind": "ef"}
        ),
        "random": override(
            text, TEXT | GATHER | {"grad.compressor.kind": "qsgd", "grad.compress_vectors": True}
        ),
        "late": override(
            text,
            TEXT
            | GATHER
            | {"grad.compressor.kind": "topk", "grad.feedback.kind": "ef", "delay.kind": "stages"},
        ),
        "streaming": override(
            text,
            TEXT
            | GATHER
            | APART
            | {
                "grad.compressor.kind": "e3m0",
                "grad.outer.fragments": 2,
                "grad.outer.overlap": 1,
                "grad.outer.local_share": 0.5,
                "grad.compress_vectors": True,
            },
        ),
        "sparseloco": override(
            images,
            IMAGES
            | GATHER
            | APART
            | {
                "grad.compressor.kind": "topk",
                "grad.compressor.scope": "tile",
                "grad.compressor.ratio": 1 / 64,
                "grad.compressor.values.kind": "statistical",
                "grad.feedback.kind": "ef",
                "grad.feedback.decay": 0.95,
                "grad.outer.momentum": 0.0,
                "grad.outer.nesterov": False,
                "grad.outer.clip": True,
            },
        ),
    }


PLAN = [
    *((name, None) for name in cases()),
    ("topk", list(cases()).index("topk")),
    ("late", list(cases()).index("late")),
    ("streaming", list(cases()).index("streaming")),
]  # the last ones go on from what the first ones leave


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("mesh")
    runs = [(cases()[name], after) for name, after in PLAN]
    start(root, [(run, wiring(run), after) for run, after in runs])
    return root


@pytest.mark.slow
@pytest.mark.xdist_group("mesh")
@pytest.mark.parametrize(
    "place",
    range(len(PLAN)),
    ids=[f"{name}{', continued' * (after is not None)}" for name, after in PLAN],
)
def test_a_mesh_equals_the_simulation_bit_for_bit(trained, place):
    name, after = PLAN[place]
    check(cases()[name], trained / str(place), after)


def check(run, folder, after):
    """Weights, scores, bytes and settings are the simulation's; after: the place of the training it
    went on from.
    """
    task, losses = simulate(run)
    task.components["learners"].settle()
    row, weights = (
        json.loads((folder / "row.json").read_text()),
        torch.load(folder / "weights.pt", weights_only=True),
    )
    ours = {
        f"model.{key}": one
        for key, one in task.model.state_dict().items()
        if key != "lm_head.weight"
    }
    assert weights.keys() == ours.keys()
    for key, one in ours.items():
        assert torch.equal(one, weights[key]), key
    assert row["run"] == record(run)
    metrics = {key: value for key, value in row["metrics"].items() if not key.startswith("best")}
    # learners' sums in another order
    assert metrics.pop("train_loss") == pytest.approx(losses.epochs[-1], rel=1e-6)
    assert metrics == task.scores
    assert row["boundaries"] == task.components["boundaries"].ledger()
    assert row["gradients"] == pytest.approx(task.totals()["gradients"])
    exchanged = [sum(one["exchanged"].values()) for one in row["transport"]]
    assert min(exchanged) > 0
    assert [one["sent"]["fwd"] > 0 for one in row["transport"]] == [True, False, True, False]
    if after is not None:  # and really went on: a checkpoint of the first epoch alone was there
        assert len((folder / "steps.jsonl").read_text().splitlines()) == 1


def test_what_a_mesh_cannot_train_is_said(monkeypatch):
    mesh = override(tiny(), IMAGES)
    for changes, wrong in (
        ({"grad.local_steps": 2, "microbatches": 1}, "grad.local_steps=2"),
        ({"fwd.compressor.kind": "uniform", "fwd.feedback.kind": "aqsgd"}, "remembers samples"),
        ({"fwd.compressor.kind": "lowrank", "fwd.compressor.warm": True}, "warm=true"),
        ({"bwd.compressor.kind": "mean"}, "bwd.compressor.kind=mean follows"),
        ({"fwd.compressor.kind": "bottleneck"}, "weights of its own"),
    ):
        with pytest.raises(UserError, match=wrong):
            stages.check(override(mesh, changes), Execution("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        UserError, match="3 processes were started for 2 learners with 2 stages each; .* 4 in all"
    ):
        connect(mesh, Execution("cpu"), 1)


def test_links_that_differ_are_of_one_pipeline(tmp_path, capsys):
    (tmp_path / "links.json").write_text('[{"bandwidth": "5Mbit"}]')
    assert (
        main(
            [
                "pipeline",
                "sotu_nano_mesh",
                "--links",
                str(tmp_path / "links.json"),
                "--store",
                str(tmp_path / "store"),
            ]
        )
        == 2
    )
    assert "--links: with 2 learners" in capsys.readouterr().err


@pytest.mark.slow
def test_by_hand_over_shaped_links_it_is_the_simulation(tmp_path):
    """As a user would, a simulation before."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    settings = [
        "synthetic_text",
        "model.stages=2",
        "grad.learners=2",
        "microbatches=2",
        "grad.outer.interval=3",
    ]
    assert main(["run", *settings, "--store", str(tmp_path)]) == 0
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "commsweep",
            "pipeline",
            *settings,
            "--bandwidth",
            "50Mbit",
            "--latency",
            "2ms",
            "--store",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the same scores, bit for bit" in said.stdout

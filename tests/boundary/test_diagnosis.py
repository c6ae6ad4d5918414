"""--diagnose: what it says of a message is what the message is, and looking changes nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from commsweep.boundary.channel import Channel, Step
from commsweep.boundary.diagnosis import EVERY, MessageStatistics
from commsweep.config import Execution, override, run_id
from commsweep.config.links import Link
from commsweep.feedback import boundaries as feedback
from commsweep.feedback.memory import Keys
from commsweep.store import DIAGNOSIS, Store
from commsweep.training.run import execute
from tests.helpers import COMPRESSORS, FEEDBACKS, linked, name, tiny, tiny_text

SHAPE = torch.Size([6, 4, 4])


def watched(compressor, memory=None, messages=200, seed=3, scale=1.0):
    """(measures of a channel over so many random messages, the messages that were looked at)."""
    link = Link.model_validate(
        {"compressor": compressor} | ({"feedback": memory} if memory else {})
    )
    step = Step(training=True, keys=Keys(torch.arange(5), torch.device("cpu")))
    channel = Channel(link, feedback.build(link.feedback, SHAPE, 5, 5), step, (0, 0), SHAPE)
    channel.watch = MessageStatistics()
    generator, looked = torch.Generator().manual_seed(seed), []
    for number in range(messages):
        step.number = number
        x = scale * torch.randn(5, *SHAPE, generator=generator)
        y, _ = channel.cross(x)
        if number % EVERY == 0:
            looked.append((x, y.clone()))
    return channel.watch.take(), looked


def norm(parts):
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))


@pytest.mark.parametrize("spec", COMPRESSORS, ids=name)
def test_error_and_cosine_are_those_of_the_messages(spec):
    if spec["kind"] in ("bottleneck", "subspace"):
        return  # what crosses is the code, as it is
    seen, looked = watched(spec, messages=60)
    xs, ys = [x for x, _ in looked], [y for _, y in looked]
    assert seen["messages"] == 6 == len(looked)
    assert seen["error"] == pytest.approx(
        norm([y - x for x, y in looked]) / norm(xs), rel=1e-4, abs=1e-6
    )
    inner = sum(float((x.double() * y.double()).sum()) for x, y in looked)
    assert seen["cosine"] == pytest.approx(
        inner / (norm(xs) * norm(ys)) if norm(ys) else 0.0, rel=1e-4
    )
    assert seen["remembered"] == 0 or spec["kind"] == "none"
    errors = [(y - x).double().flatten() for x, y in looked]
    cosines = [
        float(a @ b / (a.norm() * b.norm())) if a.norm() * b.norm() else 0.0
        for a, b in itertools.pairwise(errors)
    ]
    assert seen["repeat"] == pytest.approx(sum(cosines) / 5, abs=1e-5)


def test_an_error_that_is_always_the_same_repeats_and_looks_are_forgotten():
    statistics = MessageStatistics()
    x = torch.randn(4, *SHAPE)
    for _ in range(3):
        statistics.looked(x, torch.zeros_like(x))
    assert statistics.take()["repeat"] == pytest.approx(1.0)
    statistics.looked(x, torch.zeros_like(x))
    assert "repeat" not in statistics.take()  # of one message, and none from before


def test_a_sparsifiers_measures_are_one_number():
    """What TopK keeps it keeps exactly: error^2 = 1 - energy, cosine^2 = energy; it draws nothing,
    so all is bias.
    """
    seen, _ = watched({"kind": "topk", "ratio": 0.3})
    assert seen["error"] ** 2 == pytest.approx(1 - seen["energy"], rel=1e-4)
    assert seen["cosine"] ** 2 == pytest.approx(seen["energy"], rel=1e-4)
    assert seen["bias"] == pytest.approx(seen["error"], rel=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "uniform", "bits": 2, "rounding": "stochastic", "scale": "sample"},
        {"kind": "randomk", "ratio": 0.25, "scaled": True},
        {"kind": "tern", "clip": 0.0},
        {"kind": "natural"},
    ],
    ids=name,
)
def test_what_is_drawn_without_bias_has_none(spec):
    seen, _ = watched(spec, messages=2000)
    assert seen["error"] > 0.1
    # 200 looks of 480 values: chance leaves a few percent of the square
    assert seen["bias"] < 0.25 * seen["error"]


def test_a_draw_with_bias_has_part_of_its_error():
    """RandomK unscaled: E y = x / 4, so the bias is 3/4 and the error the root of 3/4."""
    seen, _ = watched({"kind": "randomk", "ratio": 0.25}, messages=2000)
    assert seen["bias"] == pytest.approx(0.75, abs=0.02)
    assert seen["error"] == pytest.approx(math.sqrt(0.75), abs=0.02)


def test_error_feedback_sends_what_it_remembers():
    """|e| / |x| by hand: the residue of random messages under TopK."""
    seen, _ = watched({"kind": "topk", "ratio": 0.25}, {"kind": "ef"}, messages=50)
    generator, e = torch.Generator().manual_seed(3), torch.zeros(5, SHAPE.numel())
    sent = [[], []]
    for number in range(50):
        x = torch.randn(5, *SHAPE, generator=generator).flatten(1)
        if number % EVERY == 0:
            sent[0].append(e.clone())
            sent[1].append(x)
        u = e + x
        kept = u.abs().topk(24, dim=1).indices
        e = u.scatter(1, kept, 0.0)
    assert seen["remembered"] == pytest.approx(norm(sent[0]) / norm(sent[1]), rel=1e-4)


@pytest.mark.parametrize("memory", FEEDBACKS, ids=name)
def test_every_feedback_can_be_diagnosed(memory):
    seen, _ = watched(
        {"kind": "uniform", "bits": 4, "rounding": "stochastic"}
        if memory["kind"] != "ef_mixed"
        else {"kind": "randomk", "ratio": 0.5},
        memory,
        messages=60,
    )
    assert seen["error"] > 0 and math.isfinite(seen["bias"]) and seen["remembered"] > 0
    # the first visit travels dense
    assert seen["messages"] == (5 if memory["kind"] == "aqsgd" else 6)


def test_features_that_never_arrive_are_silent():
    link = Link.model_validate({"compressor": {"kind": "topk", "ratio": 0.5}})
    channel = Channel(
        link,
        feedback.build(link.feedback, SHAPE, 5, 5),
        Step(training=True, keys=None),
        (0, 0),
        SHAPE,
    )
    channel.watch = MessageStatistics()
    x = torch.zeros(5, *SHAPE)
    x[:, 1] = 1.0
    channel.cross(x)
    assert channel.watch.take()["silent"] == pytest.approx(5 / 6)
    assert channel.watch.take() is None


def test_looking_changes_nothing_and_is_recorded(tmp_path):
    run = linked(
        {"kind": "topk", "ratio": 0.3},
        {"kind": "uniform", "bits": 2, "rounding": "stochastic"},
        {"kind": "ef"},
        base=tiny,
    )
    plain = execute(run, Store(tmp_path / "a"), Execution("cpu"))
    seen = execute(run, Store(tmp_path / "b"), Execution("cpu", diagnose=True))
    assert plain["metrics"] == seen["metrics"] and plain["boundaries"] == seen["boundaries"]
    assert "diagnosis" not in plain
    folder = Store(tmp_path / "b").folder(run_id(run))
    lines = folder.metrics(DIAGNOSIS)
    assert [line["epoch"] for line in lines] == [1, 2] and lines[-1]["messages"] == seen[
        "diagnosis"
    ]
    assert [(one["boundary"], one["direction"]) for one in seen["diagnosis"]] == [
        (cut, side) for cut in run.model.cuts for side in ("fwd", "bwd")
    ]
    assert all(
        one["bias"] == pytest.approx(one["error"], rel=1e-4)
        for one in seen["diagnosis"]
        if one["direction"] == "fwd"
    )


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({"fwd.compressor.kind": "bottleneck", "fwd.compressor.width": 2}, 0.2, 1.0),
        ({"fwd.compressor.kind": "subspace", "fwd.compressor.width": 4}, 0.0, 1e-3),
        (
            {
                "fwd.compressor.kind": "subspace",
                "fwd.compressor.width": 4,
                "fwd.compressor.constrain": False,
            },
            0.1,
            1.0,
        ),
    ],
)
def test_of_a_coder_what_enters_it_and_comes_out_is_looked_at(changes, least, most, store):
    run = override(
        tiny_text(),
        {
            "model.width": 16,
            "model.stages": 2,
            "data.block_size": 16,
            "data.train_blocks": 32,
            "data.eval_blocks": 4,
            "epochs": 1,
            "eval_every": 1,
            **changes,
        },
    )
    row = execute(run, store, Execution("cpu", diagnose=True))
    (forward,) = [one for one in row["diagnosis"] if one["direction"] == "fwd"]
    assert (
        least <= forward["error"] <= most
        and forward["bias"] == forward["error"]
        and forward["messages"] > 0
    )

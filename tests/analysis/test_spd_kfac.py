"""What is published of SPD-KFAC agrees with itself, sizes come from the real networks, and
`commsweep iteration`.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from commsweep.cli.main import main
from commsweep.registry import content
from commsweep.second_order.loads import kronecker, loads
from commsweep.second_order.placement import inverse_elements, placed_factors
from commsweep.timing.timeline.iterations import (
    FACTOR_MESSAGES,
    INVERSE_MESSAGES,
    INVERSION,
    planned,
)

spd_kfac = content("analysis.spd_kfac")

spd_iterations = content("analysis.kfac_steps")


@pytest.mark.parametrize("name", spd_kfac.PUBLISHED)
def test_published_bars_and_published_ablations_are_one_set(name):
    """The middle arms are differences of the others: both = neither - what pipelining saves - what
    balance saves.
    """
    bars = {one: sum(parts) for one, parts in spd_kfac.PUBLISHED[name].items()}
    neither, pipelining, balance, both = spd_kfac.ABLATION[name]
    assert (bars["d"], bars["spd"]) == pytest.approx((neither, both), abs=2.5e-3)
    everywhere, _, _, _, balanced = spd_kfac.PLACEMENT[name]
    _, after, _, _, pipelined = spd_kfac.PIPELINING[name]
    assert neither - balance == pytest.approx(everywhere - balanced, abs=2e-4)
    assert neither - pipelining + neither - balance == pytest.approx(neither - both, abs=2e-4)
    # computing and messages
    factors = {one: sum(parts[2:4]) for one, parts in spd_kfac.PUBLISHED[name].items()}
    assert neither - pipelining == pytest.approx(factors["d"] - factors["spd"], abs=2e-4)
    assert after > pipelined


@pytest.mark.parametrize(
    "name, layers, packed_a, packed_g",
    [
        ("resnet50", 54, 62_348_671, 14_618_356),
        ("resnet152", 156, 161_955_199, 32_927_476),
        ("densenet201", 201, 130_961_295, 1_806_420),
    ],
)
def test_factors_of_the_real_networks_are_as_many_and_as_large_as_published(
    name, layers, packed_a, packed_g
):
    found = kronecker(loads(name))
    assert len(found) == 2 * layers
    assert tuple(sum(one.elements for one in found if one.side == side) for side in "AG") == (
        packed_a,
        packed_g,
    )


def test_placements_of_the_real_resnet50_send_what_is_published():
    found = kronecker(loads("resnet50"))
    for threshold, large, elements in ((1024, 34, 72.48e6), (1400, 16, 62.48e6)):
        placed = placed_factors(
            "balanced", found, 64, small=lambda size, least=threshold: size < least
        )
        assert sum(bool(placed.receivers(turn)) for turn in range(len(found))) == large
        assert inverse_elements(found, placed) == pytest.approx(elements, abs=5e3)


def test_predictions_with_the_published_constants():
    """By hand: all factors of ResNet-50 as one message, and its inversion everywhere as plotted."""
    made = planned(*_at("resnet50"), "d")[1]
    assert made.parts[FACTOR_MESSAGES] == pytest.approx(9.29e-4 + 1.4335e-9 * 76_967_027, rel=1e-6)
    assert made.parts[INVERSION] == pytest.approx(spd_kfac.PUBLISHED["resnet50"]["d"][4], rel=1e-3)
    spread = planned(*_at("resnet50"), "mpd")[1]
    assert spread.parts[INVERSION] + spread.parts[INVERSE_MESSAGES] < made.parts[INVERSION]
    plotted = planned(*_at("resnet50"), "d+balance", 1400)[1]
    assert plotted.parts[INVERSION] == pytest.approx(
        spd_kfac.PUBLISHED["resnet50"]["spd"][4], rel=0.35
    )


def _at(name):
    here = spd_kfac.setting(name)
    return here.work, here.cluster


def test_claims_quote_what_is_published_and_rest_on_what_is_not(monkeypatch):
    monkeypatch.setattr(spd_iterations, "networks", lambda: ["resnet50"])
    claims = {one.name: one for one in spd_iterations.claims([])}
    assert set(claims) == {"K1", "K2", "K3", "K6"}
    assert (
        "ResNet-50 13 %" in claims["K1"].statement and "DenseNet-201 10 %" in claims["K1"].statement
    )
    predicted = claims["K1"].effects[0].values
    assert len(predicted) == 1 and 10 < predicted[0] < 35
    # predictions lie inside, nothing is measured
    assert [effect.verdict for effect in claims["K1"].effects][-1] == "not enough runs"
    assert claims["K1"].verdict == "partly supported"
    last = spd_iterations.edge("resnet50")
    assert (
        spd_iterations._predicted_gain("resnet50", last)
        >= 5
        > spd_iterations._predicted_gain("resnet50", last + 1)
    )


def test_iteration_on_the_command_line(tmp_path, capsys):
    figure = tmp_path / "one" / "it.svg"
    assert (
        main(["iteration", "resnet50", "--algorithm", "spd,d", "--figure", str(figure), "--json"])
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert set(said["predicted"]) == {"spd", "d"} and figure.read_text().startswith("<?xml")
    assert said["predicted"]["spd"]["seconds"] < said["predicted"]["d"]["seconds"]
    assert main(["iteration", "resnet50", "--algorithm", "d", "--figure", str(figure)]) == 0
    assert "published" in capsys.readouterr().out
    assert (
        main(
            [
                "iteration",
                "resnet18",
                "--gpus",
                "8",
                "--bandwidth",
                "10Gbit",
                "--latency",
                "20us",
                "--every",
                "10",
                "--collective",
                "tree",
                "--figure",
                str(figure),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "published" not in out and "8 GPUs, factors and inverses every 10" in out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["resnet5"], "unknown network 'resnet5'; did you mean 'resnet50'?"),
        (["resnet50", "--algorithm", "spdd"], "did you mean 'spd'?"),
        (["resnet50", "--gpus", "16"], "--gpus 16: messages are published for 64 GPUs"),
        (["resnet50", "--gpus", "0"], "--gpus"),
        (["resnet18", "--algorithm", "dp"], "resnet18 has 21 layers; use fewer GPUs"),
        (["resnet50", "--latency", "1ms"], "--latency goes with --bandwidth"),
        (["resnet50", "--collective", "tree"], "--collective goes with --bandwidth"),
        (["resnet50", "--bandwidth", "1Gbit", "--fit", "first"], "leave one out"),
        (["resnet50", "--every", "0"], "--every"),
        (["resnet50", "--figure", "x.jpeg"], "must end in .png, .pdf or .svg"),
    ],
)
def test_mistakes_are_one_line(arguments, says, capsys):
    assert main(["iteration", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert says in said and "\n" not in said


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="needs timm")
def test_more_networks_come_with_timm():
    assert len(loads("inception_v4")) == 150

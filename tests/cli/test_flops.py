"""`commsweep flops`: an account before anything is trained; mistakes in one line."""

from __future__ import annotations

import json

import pytest

from commsweep.cli.main import main
from tests.cli.test_kfac import refused


def said(capsys, *arguments):
    assert main(["flops", *arguments]) == 0
    return capsys.readouterr().out


def test_gpt2_small(capsys):
    text = said(capsys, "gpt2", "--block", "1024", "--sparsity", "0.8")
    assert (
        "741.52 + 113.25 MFLOP a token" in text
        and "linear layers, live weights         101.92    509.61" in text
    )
    assert "with the head (dense; 29.0 % of the dense training)" in text
    assert (
        "a quarter of the dense training is out of reach while the head is dense and counted"
        in text
    )
    sparse = said(capsys, "gpt2", "--sparsity", "0.8", "--head", "--attention", "local_strided")
    assert "0.2029 with the head (sparse too" in sparse and "out of reach" not in sparse


def test_a_preset_over_its_phases_and_as_json(capsys):
    made = json.loads(said(capsys, "sotu_nano_mst", "--json"))
    assert made["steps"] == 240 and made["relative"] == pytest.approx(0.2494, abs=1e-4)
    assert sum(made["parts"].values()) == pytest.approx(made["total"])
    assert sum(made["dense_parts"].values()) == pytest.approx(made["dense"])
    less = json.loads(
        said(
            capsys,
            "sotu_nano_mst",
            "sparsity.phases.ultra.sparsity=0.9",
            "--steps",
            "480",
            "--json",
        )
    )
    assert less["steps"] == 480 and less["relative"] > made["relative"]


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["gpt3"], "'gpt3' is neither a preset nor a GPT-2; did you mean 'gpt2'?"),
        (["digits"], "FLOPs are planned for GPT-2 from scratch"),
        (["sotu_micro"], "give --steps"),
        (["gpt2", "--sparsity", "1"], "--sparsity 1: at least 0, at most 0.9999"),
        (["gpt2", "--width", "64"], "--width has no effect without --attention"),
        (
            ["gpt2", "--block", "64", "--attention", "local", "--width", "128"],
            "wider than --block 64",
        ),
        (["gpt2", "seed=1"], "'seed=1' is a setting of a run, and gpt2 is a size"),
        (["sotu_nano_mst", "--sparsity", "0.5"], "--sparsity is for a GPT-2 by its size"),
        (
            ["sotu_nano_mst", "sparsity.phases.ultra.until=0.05", "--steps", "40"],
            "sparsity.interval=8: no shorter than",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, line, capsys):
    assert line in refused(capsys, "flops", *arguments)

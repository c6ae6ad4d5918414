"""Claims before and after their runs: what they can decide, and the command that decides what is
left.
"""

from __future__ import annotations

import json
import re
import shlex

import pandas as pd
import pytest

from commsweep.cli.main import main
from commsweep.config import record, run_id
from commsweep.launching.launch import register
from commsweep.registry import sweep
from commsweep.reporting import power
from commsweep.reporting.report_parts import all_claims
from commsweep.reporting.results import of_cells
from commsweep.store import Store
from tests.helpers import outcome


def made_up(store, runs, score):
    """Rows made up by `score(run)`: tests of arithmetic."""
    for run in runs:
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        folder.finish(
            outcome(
                run,
                metrics={"test_on_acc": score(run), "test_off_acc": score(run)},
                bytes={"ratio": 1.0, "fwd_per_step": 1.0, "bwd_per_step": 1.0},
            )
        )


def topk_of_demo(tmp_path, score):
    """A store with the demo's dense and plain TopK 10 and 5 % runs, scored by `score(ratio or None,
    seed)`.
    """
    store, runs = Store(tmp_path / "store"), sweep("digits_methods")

    def ratio(run):
        return getattr(run.fwd.compressor, "ratio", None)

    made_up(
        store,
        [
            run
            for run in runs
            if run.fwd == run.bwd
            and run.fwd.feedback.kind == "none"
            and (run.fwd.compressor.kind == "none" or ratio(run) in (0.1, 0.05))
        ],
        lambda run: score(ratio(run), run.seed),
    )
    register("digits_methods", runs, store)
    return store


@pytest.fixture
def demo(tmp_path):
    """A store with the demo's dense and TopK runs: TopK 5 % is 2.2 points worse, give or take."""
    worse = {0.1: 0.0, 0.05: 0.022}
    noise = (0.004, -0.003, 0.001, 0.005, -0.004)

    def score(ratio, seed):
        return (
            0.95 - worse[ratio] + (noise[seed] if ratio == 0.05 else 0.0)
            if ratio
            else 0.95 + seed / 1000
        )

    return topk_of_demo(tmp_path, score)


def test_what_claims_can_decide_is_printed_before_there_are_runs(tmp_path, capsys):
    assert main(["sweep", "plan", "digits_methods", "--claims", "--store", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "claimed > 2): 5 seeds planned; needed: unknown" in out and "**C6.**" in out


def test_seeds_needed_come_from_the_spread_of_dense_runs(demo, capsys):
    assert main(["sweep", "plan", "digits_methods", "--claims", "--store", str(demo.root)]) == 0
    out = capsys.readouterr().out
    assert "Spread of 5 dense runs: 0.16 points." in out  # 0 to 4 thousandths
    assert re.search(r"dense minus TopK 10 % \(claimed < 2\): 5 seeds planned; needed: 4\n", out)


def test_the_printed_command_runs_what_decides(demo, capsys):
    assert main(["claims", "digits_methods", "--store", str(demo.root)]) == 0
    out = capsys.readouterr().out
    command = re.search(r"`commsweep (sweep launch digits_methods --claim 'C2' --decide)`", out)
    more = int(re.search(r"about (\d+) more seeds would decide it", out)[1])
    assert "Holm" in out and more > 2
    words = shlex.split(command[1])
    assert main([words[0], "plan", *words[2:], "--json", "--store", str(demo.root)]) == 0
    plan = json.loads(capsys.readouterr().out)
    # dense and TopK 5 %: 10 % is decided
    assert plan["cells"] == 2 * (5 + more) and plan["missing"] == 2 * more
    assert (
        main([words[0], "plan", "digits_methods", "--decide", "--json", "--store", str(demo.root)])
        == 0
    )
    assert json.loads(capsys.readouterr().out) == plan  # C3 is decided


def test_each_effect_gets_the_seeds_that_it_asks_for(tmp_path, capsys):
    """TopK 10 % nearly as clear as TopK 5 %, which scatters more."""
    noise, worse = (0.9, -1.0, 0.4, 1.1, -1.3), {0.1: (0.012, 0.009), 0.05: (0.035, 0.012)}

    def score(ratio, seed):
        at, spread = worse.get(ratio, (0.0, 0.0))
        return 0.95 - at + spread * noise[seed]

    store, runs = topk_of_demo(tmp_path, score), sweep("digits_methods")
    assert main(["claims", "digits_methods", "--json", "--store", str(store.root)]) == 0
    asked = [
        effect["seeds_to_decide"]
        for claim in json.loads(capsys.readouterr().out)
        if claim["claim"] == "C2"
        for effect in claim["effects"]
    ]
    assert len(set(asked)) == 2 and all(asked)
    command = [
        "sweep",
        "plan",
        "digits_methods",
        "--claim",
        "C2",
        "--decide",
        "--store",
        str(store.root),
    ]
    assert main([*command, "--json"]) == 0
    # the dense runs serve both
    assert json.loads(capsys.readouterr().out)["cells"] == sum(asked) + max(asked)
    begun = next(run for run in runs if getattr(run.fwd.compressor, "ratio", None) == 0.05)
    register("digits_methods", [*runs, begun.model_copy(update={"seed": 5})], store)
    assert main([*command, "--json"]) == 0  # what was begun comes first
    assert json.loads(capsys.readouterr().out)["missing_runs"] == [
        run_id(begun.model_copy(update={"seed": 5}))
    ]
    assert main([*command[:3], "--papers", "images", *command[-2:]]) == 2
    assert "--papers images: chooses claims" in capsys.readouterr().err
    assert main([*command, "--seeds", "9"]) == 2
    assert "--seeds 9 and --decide" in capsys.readouterr().err


def test_a_claim_that_is_decided_is_run_whole(demo, capsys):
    """Who asks for more of it means all of it."""
    assert main(["claims", "digits_methods", "--store", str(demo.root)]) == 0
    c3 = capsys.readouterr().out.split("**C3")[1]
    assert "undecided" not in c3 and "TopK 10 %" in c3 and "TopK 5 %" in c3
    assert (
        main(
            [
                "sweep",
                "plan",
                "digits_methods",
                "--claim",
                "C3",
                "--seeds",
                "6",
                "--json",
                "--store",
                str(demo.root),
            ]
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["missing"] == plan["cells"] - 10 and plan["cells"] % 6 == 0 and plan["cells"] >= 12


@pytest.mark.parametrize(
    "name",
    [
        "demo-kfac",
        "demo-text",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                "text_recipe",
                "demo",
                "demo-gradients",
                "demo-sparse",
                "cifar_recipe",
                "text_bias",
                "local_methods",
                "unequal_ratios",
                "cifar_small",
            )
        ),
    ],
)
def test_the_runs_behind_a_claim_are_all_that_its_effects_need(tmp_path, monkeypatch, name):
    """With only these finished each effect has as many values as with all."""
    frame = of_cells(Store(tmp_path).root, {run_id(run): record(run) for run in sweep(name)})
    for claim in power.planned(frame):
        behind = frame.id.isin({one for effect in claim.effects for one in effect.ids})

        def only(cells, papers, behind=behind):
            status = pd.Series("missing", cells.index).mask(behind, "finished")
            return all_claims(
                cells.assign(
                    status=status, **{one: cells[one].where(behind) for one in power.SCORES}
                ),
                papers,
            )

        with monkeypatch.context() as patched:
            patched.setattr(power, "all_claims", only)
            alone = {one.name: one for one in power.planned(frame)}[claim.name]
        assert [(one.what, len(one.values)) for one in alone.effects] == [
            (one.what, len(one.values)) for one in claim.effects
        ]


@pytest.mark.slow
def test_added_seeds_stay_in_the_sweep(tmp_path, capsys):
    """They are executed, belong to the sweep's report, and still do after a plain launch."""
    store = str(tmp_path / "store")
    assert (
        main(
            [
                "sweep",
                "launch",
                "smoke",
                "--claim",
                "C4",
                "--seeds",
                "2",
                "--workers",
                "1",
                "--store",
                store,
            ]
        )
        == 2
    )
    assert "--claim 'C4'" in capsys.readouterr().err  # smoke has no runs for it
    assert (
        main(
            [
                "sweep",
                "launch",
                "smoke",
                "--claim",
                "C1, 2 bit",
                "--seeds",
                "2",
                "--workers",
                "1",
                "--store",
                store,
            ]
        )
        == 0
    )
    done = Store(store).rows()
    assert sorted(row["run"]["seed"] for row in done) == [0, 0, 1, 1]
    named = set(Store(store).cells("smoke"))
    assert len(named) == len(sweep("smoke")) + 2
    assert main(["sweep", "plan", "smoke", "--store", store, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["cells"] == len(named) and plan["missing"] == len(named) - 4
    assert {json.dumps(record(run)) for run in sweep("smoke")} <= {
        json.dumps(told) for told in Store(store).cells("smoke").values()
    }


def test_where_seeds_decide_nothing_it_is_said(demo, capsys):
    assert (
        main(
            [
                "sweep",
                "launch",
                "digits_methods",
                "--claim",
                "C3",
                "--decide",
                "--store",
                str(demo.root),
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert "of claim 'C3' nothing is left that seeds would decide" in err and err.count("\n") == 1
    assert (
        main(
            [
                "sweep",
                "plan",
                "digits_methods",
                "--claim",
                "C22",
                "--decide",
                "--store",
                str(demo.root),
            ]
        )
        == 2
    )
    assert "did you mean 'C2'" in capsys.readouterr().err


def test_an_unknown_claim_is_named(capsys, tmp_path):
    assert main(["sweep", "plan", "demo", "--claim", "C22", "--store", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "--claim 'C22'" in err and "did you mean 'C2'" in err and err.count("\n") == 1

"""Lists of codecs in words, for sweeps and searches: the runs are those of settings typed out."""

from __future__ import annotations

import pytest

from commsweep.cli.main import main
from commsweep.config import override, run_id
from commsweep.errors import UserError
from commsweep.launching import codecs, search
from commsweep.launching.grid import product
from commsweep.registry import preset, sweep
from commsweep.store import Store


def ids(runs):
    return {run_id(run) for run in runs}


@pytest.mark.parametrize("roles", [["gradients"], ["activations"], ["activations", "gradients"]])
def test_a_list_of_codecs_is_the_runs_of_their_settings(roles):
    base = preset("digits")
    sides = [codecs.SIDES[role] for role in roles]
    expected = [base]
    for settings, feedback in (
        ({"kind": "zero"}, "none"),
        ({"kind": "topk", "ratio": 0.01}, "ef"),
        ({"kind": "uniform", "bits": 2, "rounding": "stochastic"}, "none"),
    ):
        changes = {}
        for side in sides:
            changes |= {f"{side}.compressor.{key}": value for key, value in settings.items()}
            changes[f"{side}.feedback.kind"] = feedback
        expected.append(override(base, changes))
    words = codecs.listed("ef+topk:0.01; uniform:2,rounding=stochastic;")
    assert ids(codecs.runs(base, words, roles)) == ids(expected)


def test_dense_and_nothing_stand_beside_and_only_once():
    base = preset("digits")
    runs = codecs.runs(base, ["none", "zero", "sign"], ["gradients"])
    assert [run.bwd.compressor.kind for run in runs] == ["none", "zero", "sign"]
    coded = override(base, {"bwd.compressor": "topk:0.1", "bwd.feedback.kind": "ef"})
    assert run_id(codecs.runs(coded, ["sign"], ["gradients"])[0]) == run_id(base)


def test_learners_exchange_codes_of_any_kind():
    base = preset("digits", **{"grad.learners": 4})
    dense, coded = codecs.runs(base, ["topk:0.1"], ["learners"])
    assert run_id(dense) == run_id(base)
    assert (coded.grad.compressor.kind, coded.grad.exchange) == ("topk", "allgather")


def test_a_sweep_takes_codecs_axes_and_seeds(tmp_path, capsys):
    store = ["--store", str(tmp_path)]
    chosen = ["--base", "synthetic", "--codecs", "topk:0.1; sign", "--axis", "optim.lr=0.1,0.2"]
    assert main(["sweep", "launch", "mine", *chosen, "--seeds", "1", *store]) == 0
    launched = sweep("mine", Store(tmp_path))
    bases = codecs.runs(preset("synthetic"), ["topk:0.1", "sign"], ["gradients"])
    expected = [run for base in bases for run in product(base, {"optim.lr": [0.1, 0.2]})]
    assert ids(launched) == ids(expected) and len(launched) == 8


def test_a_search_chooses_among_the_codecs_only():
    optuna = pytest.importorskip("optuna")
    found = search.based(preset("digits"), ["ef+topk:0.1", "sign"], ["activations", "gradients"])
    trial = optuna.trial.FixedTrial({"activations": "sign", "gradients": "ef+topk:0.1"})
    run = override(found.base, found.suggest(trial))
    assert (run.fwd.compressor.kind, run.fwd.feedback.kind) == ("sign", "none")
    assert (run.bwd.compressor.kind, run.bwd.feedback.kind) == ("topk", "ef")
    assert found.signature() != search.based(preset("digits")).signature()
    names = {f"{prefix}gradients": "sign" for prefix in ("", *(f"at.{c}." for c in found.cuts))}
    alone = search.based(preset("digits"), ["sign", "topk:0.1"], ["gradients"])
    places = alone.suggest(optuna.trial.FixedTrial(names), per_boundary=True)
    assert len(places) == len(found.cuts)
    override(alone.base, places)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--codecs", "tpk:0.1"], "did you mean 'topk'"),
        (["--codecs", ";"], "name some"),
        (["--codecs", "sign; sign"], "named twice"),
        (["--codecs", "eff+sign"], "did you mean 'ef'"),
        (["--codecs", "sign", "--role", "gradient"], "did you mean 'gradients'"),
        (["--codecs", "sign", "--role", "learners"], "grad.learners=4"),
        (["--role", "learners"], "Add --codecs"),
    ],
)
def test_bad_lists_end_in_a_line(tmp_path, capsys, options, sentence):
    assert main(["sweep", "plan", "--base", "digits", *options, "--store", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


def test_a_search_counts_bytes_at_boundaries_only():
    with pytest.raises(UserError, match="sweep launch"):
        search.based(preset("digits"), ["sign"], ["learners"])
    with pytest.raises(UserError, match="did you mean 'topk'"):
        search.based(preset("digits"), ["tpk:0.1"], ["gradients"])

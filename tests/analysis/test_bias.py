"""Claims F1 to F5 in made-up worlds: each is supported where it holds and contradicted where the
opposite does.
"""

from __future__ import annotations

import pytest

from commsweep.config import run_id
from commsweep.launching.launch import register
from commsweep.registry import content, sweep
from commsweep.reporting import report_parts, results
from commsweep.reporting.claim import CONTRADICTED, SUPPORTED, adjust
from commsweep.store import Store
from tests.helpers import outcome, scatter

bias = content("analysis.bias")
recipe = content("analysis.recipe")
rudakov = content("analysis.rudakov")
unequal = content("analysis.unequal")

BIASED = ("topk", "sign", "topk_strict")


def fill(place, name, lost, more=lambda run: {}):
    """A store whose rows are made up by `lost(run)`, points (images) or nats (text) below the dense
    run's score.
    """
    store, runs = place if isinstance(place, Store) else Store(place / "store"), sweep(name)
    register(name, runs, store)
    for run in runs:
        noise, text = (run.seed - 2) / 2000, hasattr(run.data, "block_size")
        loss = lost(run) + noise + scatter(run)
        scores = {
            f"test_{mode}_{what}": value
            for mode in ("on", "off")
            for what, value in (
                (("loss", 2.4 + loss), ("ppl", 11.0))
                if text
                else (("acc", 0.65 - loss / 100), ("loss", 1.0))
            )
        }
        made = store.folder(run_id(run))
        made.begin(run, {})
        for epoch in (1, 2):
            made.append(
                {
                    "epoch": epoch,
                    "step": 10 * epoch,
                    "bytes": 99 * epoch,
                    "seconds": epoch,
                    "train_loss": 2.0,
                    **scores,
                }
            )
        made.finish(
            outcome(
                run,
                metrics=scores,
                bytes={
                    "fwd_per_step": 1.0,
                    "bwd_per_step": 1.0,
                    "ratio": 0.1,
                    "fwd_ratio": 0.1,
                    "bwd_ratio": 0.1,
                },
                boundaries={"layer1": {"fwd": 900, "bwd": 500, "calls": 10}},
                **more(run),
            )
        )
    return results.load(store.root, name)


def unbiased(compressor) -> bool:
    if compressor.kind == "uniform":
        return compressor.rounding == "stochastic"
    return compressor.kind not in BIASED and not (
        compressor.kind == "randomk" and not compressor.scaled
    )


def seen(run):
    """Measured messages: the unbiased ones have twice the error of the others, and hardly a
    bias.
    """
    free = unbiased(run.bwd.compressor)
    one = {
        "error": 1.0 if free else 0.5,
        "bias": 0.01 if free else 0.5,
        "energy": 1.0,
        "cosine": 0.5,
        "remembered": 0.0,
        "silent": 0.0,
        "messages": 8,
    }
    return {
        "diagnosis": [{"boundary": "layer1", "direction": side, **one} for side in ("fwd", "bwd")]
    }


def bias_matters(run):
    """What only biased gradients lose: much with AdamW and with one range, nothing in codes of fine
    scales with SGD.
    """
    bwd, fwd = run.bwd, run.fwd
    if fwd.compressor.kind == "topk":
        coded = getattr(bwd.compressor, "values", None)
        return (
            0.0
            if bwd.compressor.kind == "forward_mask"
            and (coded is None or coded.rounding == "stochastic")
            else 8
        )
    if bwd.compressor.kind == "none" or unbiased(bwd.compressor):
        return 0.0
    if (
        bwd.compressor.kind == "uniform"
        and bwd.compressor.scale == "group"
        and not hasattr(run.data, "block_size")
    ):
        return 0.0 if run.optim.kind == "sgd" else 0.2
    return (2.0 if bwd.feedback.kind == "ef" else 6.0) + 6.0 * (run.optim.kind == "adamw")


@pytest.mark.parametrize(
    "name, asked",
    [
        ("text_bias", {"F1a", "F1c", "F1d", "F1e", "F1f", "F1g", "F1i"}),
        (
            "cifar_bias",
            {"F1a", "F1b", "F1d", "F1e", "F1g", "F1i"},
        ),  # F1f asks for a difference where F1b says none
    ],
)
def test_where_bias_is_what_matters_the_claims_hold(name, asked, tmp_path):
    frame = fill(tmp_path, name, bias_matters, seen)
    verdicts = {one.name: one.verdict for one in report_parts.all_claims(frame, ["bias"])}
    assert {claim for claim in asked if verdicts.get(claim) != SUPPORTED} == set(), verdicts
    tables = bias.tables(bias.rows(frame))
    assert len(tables) == (1 if name == "text_bias" else 2)
    assert bias.error_and_harm(bias.rows(frame), None) is not None


def test_where_the_error_is_what_matters_they_do_not(tmp_path):
    def error_matters(run):
        return (
            0.0
            if run.bwd.compressor.kind == "none"
            else 6.0
            if unbiased(run.bwd.compressor)
            else 1.0
        )

    frame = fill(tmp_path, "text_bias", error_matters, seen)
    verdicts = {one.name: one.verdict for one in report_parts.all_claims(frame, ["bias"])}
    assert {verdicts[name] for name in ("F1a", "F1c", "F1e", "F1f")} == {CONTRADICTED}


def test_pairs_are_compared_only_where_the_measured_errors_are_so(tmp_path):
    def same(run):
        return {"diagnosis": [one | {"error": 0.5} for one in seen(run)["diagnosis"]]}

    frame = fill(tmp_path, "text_bias", bias_matters, same)
    assert bias.f1f(bias.rows(frame)).effects == []


def memory(run):
    """Slots remember twice the message, samples half of it."""
    side = run.fwd.feedback
    share = {"slot": 2.0, "sample": 0.5}.get(getattr(side, "key", None), 0.0) + scatter(run)
    return {"diagnosis": [one | {"remembered": share} for one in seen(run)["diagnosis"]]}


@pytest.mark.parametrize("adds, verdict", [(True, SUPPORTED), (False, CONTRADICTED)])
def test_recipes_feedbacks_and_additivity(tmp_path, adds, verdict):
    def lost(run):
        kind, learned = run.fwd.feedback.kind, run.grad.compressor.kind != "none"
        links = (
            4.0
            if getattr(run.fwd.compressor, "values", None) is None
            and run.fwd.compressor.kind == "topk"
            else (0.5 if run.fwd.compressor.kind == "topk" else 0.0)
        )
        if kind in ("ef", "ef_mixed"):
            links = 8.0 if run.fwd.feedback.key == "slot" else 5.0
        if kind == "ef21":
            links = 0.5
        return links + 3.0 * learned + (0.0 if adds or not (learned and links) else 5.0)

    frame = fill(tmp_path, "cifar_recipe", lost, memory)
    found = {one.name: one for one in report_parts.all_claims(frame, ["recipe"])}
    assert {name: one.verdict for name, one in found.items() if name != "F5"} == dict.fromkeys(
        ("F3a", "F3b", "F3c", "F4a", "F4b", "F4c"), SUPPORTED
    )
    assert found["F5"].verdict == verdict and len(found["F5"].effects) == 4
    ranking, keys, both = recipe.tables(recipe.rows(frame))
    assert {row[0] for row in ranking.rows} == set(recipe.DIRECTIONS.values())
    assert [row[:2] for row in keys.rows] == [
        [kind, key] for kind in ("ef", "ef_mixed", "ef21") for key in ("slot", "sample")
    ]
    assert len(both.rows) == 4 and recipe.fronts(recipe.rows(frame), None) is not None


def test_the_front_of_a_direction_is_what_nothing_with_fewer_bytes_beats(tmp_path):
    frame = fill(
        tmp_path, "cifar_recipe", lambda run: 1.0 if run.fwd.compressor.kind == "topk" else 0.0
    )
    rows = [row for row in recipe.ranking(recipe.rows(frame)).rows if row[0] == "forward alone"]
    best = min(row[2].mean for row in rows)
    assert rows[0][-1] == "yes"  # nothing has fewer bytes
    assert all(row[2].mean <= best + 1e-9 or row[-1] == "" for row in rows[1:])


def test_augmentation_and_aqsgd(tmp_path):
    def lost(run):
        if run.fwd.feedback.kind != "aqsgd":
            return 0.0
        return 1.0 if run.data.fixed_augment else 5.0

    frame = fill(tmp_path, "cifar_small", lost)
    claim = rudakov.f2(rudakov.rows(frame))
    assert len(claim.effects) == 2 and all(len(one.values) == 5 for one in claim.effects)
    assert claim.verdict == SUPPORTED
    assert all(abs(sum(one.values) / 5 - 4.0) < 1e-6 for one in claim.effects)


@pytest.mark.parametrize(("saved", "verdict"), [(0.1, SUPPORTED), (-0.1, CONTRADICTED)])
def test_ratios_by_link(tmp_path, saved, verdict):
    frame = unequal.rows(
        fill(
            tmp_path,
            "unequal_ratios",
            lambda run: 0.0 if run.fwd.compressor.kind == "none" else 0.3 - saved * bool(run.at),
        )
    )
    (claim,) = adjust([unequal.u1(frame)])
    assert claim.verdict == verdict and len(claim.effects) == 4
    assert all(len(effect.values) == 7 for effect in claim.effects)
    assert len(unequal.tables(frame)[0].rows) == 6

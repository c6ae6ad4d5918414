"""The share of a message's worth that is kept: its value, and the coverage of its interval."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsweep.config import override, run_id
from commsweep.registry import preset
from commsweep.reporting import results
from commsweep.reporting.results import lost_against, score_and_sign
from commsweep.reporting.table import settings_table
from commsweep.reporting.worth import floors_text, of_settings, share_kept
from tests.helpers import outcome, scatter, tiny

LOSSES = st.lists(st.floats(0.5, 3.0), min_size=2, max_size=8)


@given(LOSSES, st.floats(0.2, 2.0))
def test_dense_keeps_all_nothing_keeps_none_and_harm_is_below(denses, worth):
    controls = [loss + worth for loss in denses]
    assert share_kept(controls, denses, denses).percent == pytest.approx(100)
    assert share_kept(controls, controls, denses).percent == pytest.approx(0)
    harm = share_kept(controls, [loss + worth for loss in controls], denses)
    assert harm.percent == pytest.approx(-100) and harm.tells
    accuracies = share_kept(*([-x for x in part] for part in (controls, denses, denses)))
    assert accuracies.percent == pytest.approx(100)


@pytest.mark.parametrize("n", [3, 5, 8])
@pytest.mark.parametrize(("share", "noise"), [(0.8, 0.05), (0.1, 0.1), (-0.5, 0.1)])
def test_the_interval_holds_the_share_in_95_of_100_experiments(n, share, noise):
    """Losses of a seed scatter together, and each arm by itself."""
    rng, inside, told = np.random.default_rng(n), 0, 0
    for _ in range(2000):
        seed = rng.normal(0, 0.2, n)
        arm = [rng.normal(0, noise, n) for _ in range(3)]
        dense, control = 2.0 + seed + arm[0], 2.6 + seed + arm[1]
        score = 2.6 - share * 0.6 + seed + arm[2]
        found = share_kept(control, score, dense)
        if found.tells:
            told += 1
            inside += found.low <= 100 * share <= found.high
    assert told > 1500 and inside / told == pytest.approx(0.95, abs=0.02)


def test_a_model_without_worth_says_that_it_cannot_tell():
    found = share_kept([1.0, 1.2, 0.9], [1.1, 1.0, 1.0], [1.0, 1.1, 1.0])
    assert not found.tells and found.text() == "cannot tell"
    assert share_kept([2.0], [1.5], [1.0]).text() == "50 %"


def test_each_setting_is_held_against_the_control_of_its_direction():
    arms = {
        "dense": ({}, 0.9),
        "no gradients": ({"bwd.compressor.kind": "zero"}, 0.5),
        "no activations": ({"fwd.compressor.kind": "zero"}, 0.1),
        "topk back": ({"bwd.compressor.kind": "topk"}, 0.7),
        "topk forth": ({"fwd.compressor.kind": "topk"}, 0.7),
        "both": ({"fwd.compressor.kind": "topk", "bwd.compressor.kind": "sign"}, 0.3),
    }
    rows, ids = [], {}
    for name, (changes, accuracy) in arms.items():
        for seed in range(3):
            run = override(tiny(seed=seed), changes)
            score = accuracy + 0.001 * seed
            rows.append(outcome(run, metrics={"test_on_acc": score, "test_off_acc": score}))
        ids[name] = run_id(override(tiny(), changes))
    frame = results.named(pd.DataFrame([results._flat(row) for row in rows]))
    found = of_settings(frame)
    setting = dict(zip(frame.id, frame.setting_id, strict=True))
    percents = {name: found[setting[ids[name]]].percent for name in arms}
    assert percents == pytest.approx(
        {
            "dense": 100,
            "no gradients": 0,
            "no activations": 0,
            "topk back": 50,
            "topk forth": 75,
            "both": -50,
        }
    )
    table = settings_table(frame)
    assert "worth kept" in table.header
    assert not any(math.isnan(kept.percent) for kept in found.values())
    control = frame[["fwd.compressor.kind", "bwd.compressor.kind"]].eq("zero").any(axis=1)
    without = frame[~control]
    assert "worth kept" not in settings_table(without).header and not of_settings(without)


def framed(arms, seeds=3):
    """A frame of made-up losses (run, loss), and the setting of each arm by its name."""
    rows, settings = [], {}
    for name, (run, loss) in arms.items():
        for seed in range(seeds):
            one = override(run, {"seed": seed})
            score = loss + 0.001 * seed + scatter(one)
            rows.append(outcome(one, metrics={"test_on_loss": score, "test_off_loss": score}))
            settings.setdefault(name, run_id(one))
    frame = results.named(pd.DataFrame([results._flat(row) for row in rows]))
    by_id = dict(zip(frame.id, frame.setting_id, strict=True))
    return frame, {name: by_id[settings[name]] for name in arms}


def test_no_floor_is_worse_than_letters_and_what_learns_only_them_collapsed():
    """The control of activations, with a dense way back, ends above the entropy of letters."""
    base = preset("sotu_nano")
    arms = {
        "dense": (base, 2.0),
        "nothing forth": (override(base, {"fwd": "zero"}), 3.6),
        "nothing back": (override(base, {"bwd": "zero"}), 2.4),
        "half": (override(base, {"fwd": "uniform:2"}), 2.515),
        "letters": (override(base, {"fwd": "topk:0.1"}), 3.0),
        "harm": (override(base, {"bwd": "topk:0.5"}), 2.6),
        "spoilt": (override(base, {"bwd": "topk:0.1"}), 3.02),
    }
    frame, settings = framed(arms)
    found = {name: of_settings(frame)[setting] for name, setting in settings.items()}
    assert found["half"].percent == pytest.approx(50, abs=0.5) and found["half"].ranks
    assert found["harm"].percent == pytest.approx(-50, abs=0.5) and found["harm"].ranks
    for name in ("letters", "spoilt", "nothing forth"):
        assert found[name].text() == "collapsed" and not found[name].ranks
    text = floors_text(frame)
    assert "activations: letter frequencies 3.03 (nothing sent 3.6)" in text
    assert "gradients: nothing sent 2.4 (letter frequencies 3.03)" in text


def test_the_floor_of_a_fine_tuning_is_the_untouched_model():
    base = preset("wikitext_small")
    arms = {
        "dense": (base, 3.5),
        "nothing": (override(base, {"fwd": "zero", "bwd": "zero"}), 9.0),
        "topk": (override(base, {"fwd": "topk:0.1"}), 4.2),
        "good": (override(base, {"fwd": "uniform:4"}), 3.6),
        "untouched": (override(base, {"optim.lr": 0.0}), 3.7),
    }
    frame, settings = framed(arms)
    found = {name: of_settings(frame).get(setting) for name, setting in settings.items()}
    assert found["good"].percent == pytest.approx(50, abs=1)
    assert found["topk"].text() == "collapsed"  # of ln 49152 = 10.8 it would keep 90 %
    assert "the untouched model 3.7 (nothing sent 9)" in floors_text(frame)


def test_a_diverged_run_is_marked_wherever_its_score_stands():
    kept = share_kept([2.4] * 3, [2.3, 2.2, 2.5], [2.0, 2.01, 2.0], 3.03, diverged=1)
    assert kept.text().endswith("diverged (1 of 3)") and kept.ranks
    assert share_kept([2.4] * 3, [2.3] * 3, [2.0] * 3, 3.03, 2).text() == "diverged (2 of 3)"


def test_the_control_of_learners_is_one_alone_with_its_part_of_batch_and_samples():
    base = override(preset("sotu_nano"), {"grad.learners": 4, "data.train_blocks": 1600})
    alone = {"grad.learners": 1, "data.batch_size": 4, "data.train_blocks": 400}
    arms = {
        "dense": (base, 2.0),
        "coded": (override(base, {"grad": "uniform:4", "grad.exchange": "allgather"}), 2.1),
        "alone": (override(base, alone), 2.5),
        "other": (override(base, {"grad.learners": 1}), 1.9),  # all samples: no control
    }
    frame, settings = framed(arms)
    assert of_settings(frame)[settings["coded"]].percent == pytest.approx(80, abs=0.5)
    assert "learners: nothing sent 2.5" in floors_text(frame)


def test_loss_against_dense_is_that_of_the_same_keys_and_of_the_whole_frames_score():
    frame = pd.DataFrame(
        {
            "data.tokenizer": ["byte"] * 3,
            "seed": [0, 1, 0],
            "test_on_loss": [2.0, 2.5, 2.75],
            "dense": [True, True, False],
        }
    )
    score, dense = score_and_sign(frame), frame[frame.dense]
    lost = lost_against(frame[~frame.dense], dense, ["seed"], score)
    assert list(lost) == [0.75] and list(lost.index) == [2]
    assert lost_against(frame, dense[dense.seed == 1], ["seed"], score).isna().tolist() == [
        True,
        False,
        True,
    ]
    assert len(lost_against(frame.iloc[:0], dense, ["seed"], score)) == 0

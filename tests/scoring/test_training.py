"""The trainings of a role: what is dense, what sends nothing, and where a codec goes."""

from __future__ import annotations

import math

import pytest

from commsweep.config import run_id
from commsweep.errors import UserError
from commsweep.launching.grid import seeds
from commsweep.scoring import ROLES, training
from commsweep.scoring.card import verdict
from commsweep.store import Store


@pytest.mark.parametrize("role", ROLES)
def test_a_codec_goes_where_the_role_says(role):
    for setup in training.setups(role):
        coded, side = setup.coded("uniform:4"), training.SIDES[role]
        links = {"fwd": coded.fwd, "bwd": coded.bwd, "grad": coded.grad}
        for name, link in links.items():
            assert (link.compressor.kind == "uniform") == (name == side)
        assert (coded.grad.learners == 4) == (setup.dense.grad.learners == 4) == (side == "grad")
        assert (setup.dense.grad.outer is not None) == (role == "pseudo-gradients")


def test_the_control_sends_nothing():
    for setup in training.setups("gradients"):
        assert setup.control.bwd.compressor.kind == "zero"
        assert setup.control.fwd == setup.dense.fwd
    for setup in training.setups("learners"):
        alone, together = setup.control, setup.dense
        assert alone.grad.learners == 1 and alone.data.batch_size * 4 == together.data.batch_size
        if setup.ignorant == "letter frequencies":
            assert alone.data.train_blocks * 4 == together.data.train_blocks
        else:
            assert alone.data.train_size * 4 == together.data.train_size
            assert alone.epochs == together.epochs


def test_a_long_score_has_four_times_the_steps():
    for role in ("gradients", "pseudo-gradients"):
        short, long = training.setups(role), training.setups(role, 4)
        for one, other in zip(short, long, strict=True):
            if one.ignorant == "letter frequencies":
                assert other.dense.data.train_blocks == 4 * one.dense.data.train_blocks
                ratio = other.control.data.train_blocks / one.control.data.train_blocks
                assert ratio == 4
            else:
                assert other.dense.epochs == 4 * one.dense.epochs


def test_what_does_not_go_together_is_refused():
    setup = training.setups("gradients")[0]
    with pytest.raises(UserError, match="no feedback 'nothing'"):
        setup.coded("uniform:4", "nothing")


def recorded(store: Store, run, **values) -> None:
    """Record made-up outcomes, a score a seed."""
    for cell, score in zip(
        seeds([run], len(values["scores"]), training.SEED), values["scores"], strict=True
    ):
        folder = store.folder(run_id(cell))
        with folder.locked():
            folder.begin(cell, {})
            folder.finish(
                {
                    "schema": 5,
                    "id": run_id(cell),
                    "status": "diverged" if score is None else "finished",
                    "error": None,
                    "run": cell.model_dump(mode="json"),
                    "metrics": {} if score is None else {"test_on_loss": score},
                    "boundaries": {
                        "1": {"fwd": 0, "fwd_dense": 100, "bwd": values["sent"], "bwd_dense": 100}
                    },
                    "seconds": {"train": 1.0},
                }
            )


def test_worth_and_lead_are_those_of_the_recorded_scores(tmp_path):
    store, setup = Store(tmp_path), training.setups("gradients")[0]
    ask = (setup, "uniform:4", "eden:2", "none", 3, training.recorded(store))
    assert training.outcome(*ask) is None
    recorded(store, setup.dense, scores=[1.0, 1.1, 0.9], sent=100)
    recorded(store, setup.control, scores=[2.0, 2.1, 1.9], sent=0)
    recorded(store, setup.coded("uniform:4"), scores=[1.2, 1.3, 1.1], sent=12)
    assert training.outcome(*ask).lead is None
    recorded(store, setup.coded("eden:2"), scores=[1.5, 1.7, 1.3], sent=7)
    found = training.outcome(*ask)
    assert found.kept.percent == pytest.approx(80.0) and found.kept.n == 3
    assert found.rival_kept.percent == pytest.approx(50.0)
    assert found.lead.values == pytest.approx([30.0, 40.0, 20.0])
    assert (found.share, found.rival_share) == (0.12, 0.07)


def test_a_training_in_which_nothing_is_worth_anything_cannot_tell(tmp_path):
    store, setup = Store(tmp_path), training.setups("gradients")[0]
    for run in (setup.dense, setup.control, setup.coded("topk:0.1"), setup.coded("eden:2")):
        recorded(store, run, scores=[1.0], sent=50)
    found = training.outcome(setup, "topk:0.1", "eden:2", "none", 1, training.recorded(store))
    assert found.lead is None and found.kept.text() == "cannot tell"
    assert "cannot tell" in verdict(found)


def test_a_control_worse_than_letters_is_no_floor_and_what_learns_only_them_collapsed(tmp_path):
    """The control of activations with a dense way back ends above the entropy of letters, 3.03."""
    store, setup = Store(tmp_path), training.setups("activations")[0]
    recorded(store, setup.dense, scores=[2.0, 2.01, 1.99], sent=100)
    recorded(store, setup.control, scores=[3.8, 4.0, 3.9], sent=0)
    recorded(store, setup.coded("uniform:4"), scores=[2.5, 2.51, 2.52], sent=12)
    recorded(store, setup.coded("sign"), scores=[3.0, 3.01, 3.0], sent=3)
    found = training.outcome(setup, "uniform:4", "sign", "none", 3, training.recorded(store))
    assert setup.without == 3.03
    assert found.kept.percent == pytest.approx(100 * 0.52 / 1.03) and found.kept.ranks
    assert found.rival_kept.text() == "collapsed" and not found.rival_kept.ranks
    other = training.outcome(setup, "sign", "uniform:4", "none", 3, training.recorded(store))
    assert "collapsed: no better than without the message" in verdict(other)


def test_a_diverged_run_has_learned_nothing(tmp_path):
    store, setup = Store(tmp_path), training.setups("gradients")[0]
    recorded(store, setup.dense, scores=[1.0], sent=100)
    recorded(store, setup.control, scores=[2.0], sent=0)
    recorded(store, setup.coded("topk:0.1"), scores=[None], sent=12)
    found = training.outcome(setup, "topk:0.1", "eden:2", "none", 1, training.recorded(store))
    assert found.kept.percent < 0 and math.isfinite(found.kept.percent)
    assert found.kept.text() == "diverged (1 of 1)"

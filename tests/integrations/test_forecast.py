"""The forecast of worth kept: its bounds, its refusals, and that it errs on no training it saw."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsweep.integrations import forecast
from commsweep.integrations.forecast import Bound, Forecast, Score, Seen, sentence

ERROR = Score((1.0, 0.0, 0.0, 0.0))
percents = st.floats(-300, 120)


def seen(scores, worths):
    order = np.argsort(scores)
    return Seen(np.array(scores)[order], np.array(worths)[order], np.array(worths)[order])


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 100)), min_size=1, max_size=20))
def test_a_bound_holds_for_all_that_was_seen_and_falls_with_the_score(trainings):
    known = seen(*zip((0.0, 100.0), *trainings, strict=True))
    for score, worth in trainings:
        bound = known.bound(score)
        assert bound is not None and bound.low <= worth <= bound.high
        assert bound.low <= bound.middle <= bound.high
    grid = [bound for x in np.linspace(0, 3, 31) if (bound := known.bound(float(x)))]
    for near, far in pairwise(grid):
        assert near.low >= far.low and near.high >= far.high


def test_a_bound_asks_the_next_training_on_either_side():
    known = seen([0.0, 0.2, 0.4, 0.8], [100.0, 90.0, 95.0, 30.0])
    assert known.bound(0.3) == Bound(90.0, pytest.approx(92.5), 95.0)
    assert known.bound(0.5).low == 30.0 and known.bound(0.5).high == 95.0
    assert known.bound(0.81) is None and known.bound(math.nan) is None


def test_a_margin_widens_a_bound_within_0_and_100():
    known = replace(seen([0.0, 0.2, 0.4], [100.0, 90.0, 60.0]), margin=15.0)
    assert known.bound(0.3) == Bound(45.0, pytest.approx(75.0), 100.0)


def test_an_answer_is_narrow_and_of_what_was_seen():
    known = seen([0.0, 0.1, 0.5, 1.0], [100.0, 95.0, 90.0, 10.0])
    sound = Forecast(ERROR, known, 4, 0.9, 0.95, 20, 19)
    assert sound.answer({"error": 0.05}) == Bound(95.0, 97.5, 100.0)
    assert "beyond all that was seen" in sound.answer({"error": 2.0})
    assert "kept 10 to 90 %" in sound.answer({"error": 0.7})
    for coverage, narrow, held in ((0.9, 20, 19), (0.95, 9, 7), (0.95, 0, 0)):
        unsound = Forecast(ERROR, known, 4, 0.9, coverage, narrow, held)
        text = f"{held} of {narrow} answers" if narrow else "no bound"
        assert f"ranks only: {text}" in unsound.answer({"error": 0.05})


def test_a_score_is_a_weighted_sum_and_says_so():
    score = Score((0.2, 1.0, 0.0, 0.0))
    assert score.of({"error": 2.0, "bias": 0.5, "distance": math.nan, "total": 7.0}) == 0.9
    assert score.text == "bias + 0.2 error"


@pytest.mark.parametrize("message", ["activations", "activation gradients", "weight gradients"])
def test_every_kind_of_message_has_a_forecast_and_a_sentence_on_its_data(message):
    known = forecast.forecast(message)
    assert known is not None and list(known.evidence.scores) == sorted(known.evidence.scores)
    assert f"{known.trainings} trainings" in sentence(message)
    assert known.evidence.bound(0.0).high == 100.0
    assert sentence("smoke signals") == "smoke signals: no forecast; no training was seen."

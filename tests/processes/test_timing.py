"""What measurements say of their steps, and when they are taken again."""

from types import SimpleNamespace

import pytest

from commsweep.processes import timing
from commsweep.processes.timing import SETTLED, TRIES, Calm, Steps


def row(width, seconds=0.1):
    """A measurement with quartiles so far apart, as a share of its step."""
    return {"timing": {"step_seconds": seconds, "spread": [seconds, seconds * (1 + width)]}}


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(timing.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(timing, "told_by_first", lambda value: value)


def old(calm):
    calm.began -= timing.SETTLE
    return calm


def test_a_disturbed_measurement_is_taken_again(alone):
    widths = iter([0.4, 0.3, 0.1, 0.0])
    assert old(Calm()).measure(lambda: row(next(widths))) == row(0.1) | {"tries": 3}
    assert old(Calm()).measure(lambda: {"timing": {}})["tries"] == 1, (
        "it ended before there was a step"
    )


def test_what_stays_disturbed_is_recorded_so(alone):
    widths = iter([0.5, 0.4, 0.5, *[0.6] * TRIES])
    assert old(Calm()).measure(lambda: row(next(widths))) == row(0.4) | {"tries": TRIES + 1}, (
        "the calmest counts"
    )


def test_young_processes_are_given_time(alone):
    """However often, until they have been there for a while."""
    calm, taken = Calm(), []

    def take():
        taken.append(1)
        calm.began -= timing.SETTLE * (len(taken) == 2 * TRIES)
        return row(0.5)

    assert calm.measure(take)["tries"] == 2 * TRIES


def test_the_first_process_decides(alone, monkeypatch):
    monkeypatch.setattr(timing.dist, "get_rank", lambda: 1)
    answers = iter([True, False])
    monkeypatch.setattr(timing, "told_by_first", lambda value: next(answers))
    assert Calm().measure(lambda: None) is None
    assert next(answers, None) is None, "it did as it was told, twice"


def test_steps_are_compared_with_others_of_their_kind():
    """One step in four meets the others and takes ten times as long, which is no disturbance; and
    what was waited is averaged as the steps are.
    """
    steps = [
        {
            "kind": [False, turn % 4 == 0],
            "seconds": 1.0 if turn % 4 == 0 else 0.1,
            "parts": {"gradients": 0.05},
            "waited": 0.4 if turn % 4 == 0 else 0.02,
            "meanwhile": 0.01,
            "computed": 0.03,
        }
        for turn in range(SETTLED + 40)
    ]
    task = SimpleNamespace(components={})
    told = Steps.summary([steps, steps], task)
    assert told["step_seconds"] == pytest.approx(0.325) and told["waited"] == pytest.approx(0.115)
    assert told["meanwhile"] == pytest.approx(0.01) and told["computed"] == pytest.approx(0.03)
    assert told["spread"] == pytest.approx([0.325, 0.325]) and told["steps"] == 40
    for turn in range(SETTLED, len(steps), 2):
        steps[turn]["seconds"] *= 1.5
    low, high = Steps.summary([steps, steps], task)["spread"]
    assert high > 1.3 * low

"""Learners that exchange with all: closed forms where none is late, falling out of step where cores
are shared.
"""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsweep.timing.timeline.learners import step


def stepwise(learners, cores, computing, latency, wire, spread, meanwhile=0.0, steps=30, dt=0.001):
    """The same by small steps of time, without events: who computes, what is under way, who has
    heard what.
    """
    draws, now = Random(1), 0.0
    left = [draws.gauss(computing - meanwhile, spread) for _ in range(learners)]
    tail = [meanwhile] * learners
    turn, done = [0] * learners, [{} for _ in range(learners)]  # turn -> when it was done
    sent, there = {}, {}  # (from, to, turn) -> seconds of the link left; when it is there
    ends = []
    while len(ends) < steps:
        busy = [k for k in range(learners) if turn[k] not in done[k] or tail[k] > 0]
        for k in busy:
            rest = tail if turn[k] in done[k] else left
            rest[k] -= dt * min(1.0, cores / len(busy))
            if left[k] <= 0:
                done[k].setdefault(turn[k], now)
        for k in range(learners):
            for other in range(learners):
                at = done[k].get(turn[other]), done[other].get(turn[other])
                key = k, other, turn[other]
                if (
                    other != k
                    and None not in at
                    and now >= max(at[0], at[1] + latency)
                    and key not in there
                ):
                    sent.setdefault(key, wire / (learners - 1))
        under_way = [key for key, rest in sent.items() if rest > 0 or key not in there]
        for key in under_way:
            share = max(
                sum(one[0] == key[0] for one in under_way),
                sum(one[1] == key[1] for one in under_way),
            )
            sent[key] -= dt / share
            if sent[key] <= 0:
                there[key] = now + latency
        for k in range(learners):
            came = [
                there.get((other, k, turn[k]), math.inf) for other in range(learners) if other != k
            ]
            if turn[k] in done[k] and tail[k] <= 0 and max(came) <= now:
                turn[k] += 1
                left[k], tail[k] = draws.gauss(computing - meanwhile, spread), meanwhile
                if k == 0:
                    ends.append(now)
        now += dt
    return (ends[-1] - ends[9]) / (steps - 10)


@given(
    st.integers(2, 9), st.floats(0.5, 16), st.floats(0.01, 2), st.floats(0, 2), st.integers(1, 3)
)
@settings(max_examples=12, deadline=None)
def test_without_latency_a_step_is_computing_and_messages(
    learners, cores, computing, wire, exchanges
):
    together = computing * max(1.0, learners / cores)
    assert step(learners, cores, computing, 0.0, wire, exchanges) == pytest.approx(together + wire)


@given(st.integers(2, 6), st.floats(0.01, 0.2), st.floats(0, 1), st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_with_a_core_each_every_exchange_takes_two_latencies(learners, latency, wire, exchanges):
    """The word, and the message."""
    told = step(learners, learners, 0.3, latency, wire, exchanges)
    assert told == pytest.approx(0.3 + 2 * exchanges * latency + wire, rel=0.02)


@pytest.mark.parametrize(
    ("learners", "cores", "hidden"),
    [(2, 2, 0.0), (4, 4, 0.0), (4, 2, 0.68), (8, 2, 0.97), (8, 4, 0.7)],
)
def test_where_cores_are_shared_some_compute_while_others_wait(learners, cores, hidden):
    """At most a latency is hidden: nobody is further ahead of the last."""
    together, latency = 0.4, 0.03
    told = step(learners, cores, together * cores / learners, latency, 0.0)
    assert (together + 2 * latency - told) / latency == pytest.approx(hidden, abs=0.1)


@given(st.integers(2, 6), st.floats(0.01, 0.2), st.floats(0, 0.5), st.floats(0, 0.25))
@settings(max_examples=12, deadline=None)
def test_what_is_computed_once_one_has_told_that_it_waits_takes_no_time_while_messages_do(
    learners, latency, wire, meanwhile
):
    told = step(learners, learners, 0.3, latency, wire, meanwhile=meanwhile)
    assert told == pytest.approx(0.3 + max(0.0, 2 * latency + wire - meanwhile), rel=0.03)


@pytest.mark.parametrize(
    ("learners", "cores", "wire", "meanwhile"),
    [
        (3, 2, 0.0, 0.0),
        (4, 2, 0.05, 0.0),
        (3, 3, 0.1, 0.0),
        (4, 2, 0.05, 0.03),
        (4, 1.5, 0.0, 0.05),
    ],
)
def test_a_simulation_by_small_steps_of_time_agrees(learners, cores, wire, meanwhile):
    computing, latency = 0.1, 0.04
    slow = stepwise(learners, cores, computing, latency, wire, 0.125 * latency, meanwhile)
    told = step(learners, cores, computing, latency, wire, meanwhile=meanwhile)
    assert told == pytest.approx(slow, rel=0.025)
    assert told <= step(learners, cores, computing, latency, wire) + 1e-3


def test_what_one_waits_for_the_last_is_given_back_without_a_latency_and_absorbed_by_one():
    for learners in (2, 4, 8):
        told = [step(learners, learners, 1.0, latency, 0.0, uneven=0.1) for latency in (0.0, 0.4)]
        assert told[0] == pytest.approx(1.1, rel=0.03), "waited for the last"
        assert told[1] == pytest.approx(1.0 + 0.8, rel=0.03), (
            "whoever is late by less than a latency delays nobody"
        )

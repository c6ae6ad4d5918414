"""The timeline against closed forms, and its laws on random graphs of activities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsweep.timing.timeline.activities import Activity, simulate
from commsweep.timing.timeline.pipelines import (
    FRAMES,
    IDEAL,
    TORCH,
    Cold,
    Network,
    Times,
    gpipe,
    interleaved,
    one_f_one_b,
    plan,
    shares,
    step_seconds,
    zero_bubble,
)

F, B = 1.0, 2.0


FREE = Network()


def length(orders, stages, network=FREE, **more) -> float:
    made = plan(orders, Times([F] * stages, [B] * stages, **more), network)
    return max(span.stop for span in made.run())


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 4), (4, 16), (8, 8)])
def test_gpipe_and_1f1b_fill_and_drain_once(p, m):
    """(m + p - 1)(F + B): Huang et al. 2019, Narayanan et al. 2021."""
    assert length(gpipe(p, m), p) == pytest.approx((m + p - 1) * (F + B))
    assert length(one_f_one_b(p, m), p) == pytest.approx((m + p - 1) * (F + B))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 4)])
def test_interleaving_divides_the_bubble(p, m, v):
    """m (F + B) v + (p - 1)(F + B) for v stages of F and B each: the bubble of a stage, not of v
    (arXiv 2104.04473).
    """
    assert length(interleaved(p, m, v), p * v) == pytest.approx((m * v + p - 1) * (F + B))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_h1(p, m):
    """(m (F + I + W)) + (p - 1)(F + I - W): arXiv 2401.10241, table 2, with F = I = W."""
    made = plan(zero_bubble(p, m), Times([F] * p, [B] * p), Network())
    assert max(span.stop for span in made.run()) == pytest.approx(m * (F + B) + (p - 1) * F)


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency_once():
    """One microbatch, two stages: F, message, F, B, message, B."""
    network = Network(bandwidth=80 * FRAMES, latency=0.25)
    whole = length(gpipe(2, 1), 2, network, fwd_bytes=[10], bwd_bytes=[5])
    assert whole == pytest.approx(2 * (F + B) + (1.0 + 0.25) + (0.5 + 0.25))


def test_a_full_bucket_lets_its_burst_through_at_once():
    """As above; 2.5 bytes are spared each way, for both buckets are full again."""
    network = Network(bandwidth=80 * FRAMES, burst=2.5 * FRAMES)
    assert length(gpipe(2, 1), 2, network, fwd_bytes=[10], bwd_bytes=[5]) == pytest.approx(
        2 * (F + B) + 0.75 + 0.25
    )


def test_a_bucket_is_emptied_by_what_passes_and_fills_while_idle():
    """Three things of 0.5 s over a bucket that saves 0.75 s: free, half, and full price after no
    pause, free later.
    """
    after = [Activity("wait", 4.0, (), []), Activity("send", 0.5, ("cable",), [0], spare=0.75)]
    first = [Activity("send", 0.5, ("cable",), spare=0.75, rank=rank) for rank in range(3)]
    spans = simulate([*after, *first])
    assert [round(span.stop - span.start, 6) for span in spans[2:]] == [0.0, 0.25, 0.5]
    assert spans[1].stop - spans[1].start == 0.0


def test_work_after_a_wait_takes_longer():
    """The second stage waits 1 s for its first forward and 4 s for the message before its
    backward's end comes back.
    """
    cold = Cold(after=0.5, slope=0.4, most=0.3)
    assert [cold(idle) for idle in (0.2, 0.5, 1.0, 9.0)] == pytest.approx([0.0, 0.0, 0.2, 0.3])
    made = plan(gpipe(2, 1), Times([F] * 2, [B] * 2, cold={"F": cold, "B": cold}), FREE)
    # Stage 1 waited F = 1 s, stage 0 then F + 0.2 + B = 3.2 s, of which at most 0.3 s count.
    assert max(span.stop for span in made.run()) == pytest.approx(2 * (F + B) + 0.2 + 0.3)


def test_torchs_1f1b_sends_one_way_after_the_other():
    """Two stages say that they wait behind what they send to each other, so that every message
    waits for the one the other way: eight transfers in sequence, where an ideal engine has both
    ways under way at once.
    """
    network = Network(bandwidth=8e4 * FRAMES)  # so that a receiver's word is short beside a message
    times = Times([0.05] * 2, [0.05] * 2, fwd_bytes=[1e5], bwd_bytes=[1e5])
    assert step_seconds(one_f_one_b(2, 4), times, network, TORCH["1f1b"]) == pytest.approx(
        8 * 10, rel=0.15
    )
    assert step_seconds(one_f_one_b(2, 4), times, network) < 6.5 * 10


def test_a_receivers_word_takes_a_latency():
    """GPipe, one microbatch, two stages: the first forward is waited for since the last step; the
    backward's receiver says so when its forward is done, while the other still works.
    """
    network = Network(latency=0.25)
    step = step_seconds(gpipe(2, 1), Times([F] * 2, [B] * 2), network, TORCH["gpipe"])
    assert step == pytest.approx(2 * (F + B) + 2 * 0.25)
    many = step_seconds(gpipe(2, 3), Times([0.001] * 2, [0.001] * 2), network, TORCH["gpipe"])
    # each later message waits for the word, too
    assert many == pytest.approx(2 * (0.25 + 2 * 0.5), rel=0.02)


def test_a_slow_link_bounds_the_step():
    """Four messages of 10 s each way, nearly nothing else: forwards one after the other, then
    backwards.
    """
    times = Times([0.001] * 2, [0.001] * 2, fwd_bytes=[1e5], bwd_bytes=[5e4])
    for engine in (IDEAL, TORCH["gpipe"]):
        made = step_seconds(gpipe(2, 4), times, Network(bandwidth=8e4 * FRAMES), engine)
        assert made == pytest.approx(4 * 10 + 4 * 5, rel=1e-2)


def test_of_links_that_differ_each_message_takes_its_own():
    """One microbatch, three stages: nearly nothing but messages, each of its own seconds and
    latency.
    """
    times = Times([1e-6] * 3, [1e-6] * 3, fwd_bytes=[1e4, 1e4], bwd_bytes=[1e4, 1e4])
    links = Network(links=(Network(8e4 * FRAMES), Network(8e3 * FRAMES, 0.5)))
    made = plan(gpipe(3, 1), times, links)
    assert max(span.stop for span in made.run()) == pytest.approx(2 * (1 + 10 + 0.5), rel=1e-4)
    alike = Network(3e5, 0.1)
    for engine in (IDEAL, TORCH["gpipe"]):
        steps = [
            step_seconds(gpipe(3, 4), times, one, engine)
            for one in (alike, Network(links=(alike, alike)))
        ]
        assert steps[0] == steps[1]


def test_tied_gradients_cross_all_links_both_ways_at_once():
    """By hand: the last device begins again when what the first sends after its backward, F + B + B
    after the last began, has crossed in 10 s; what the last sends after F + B crosses meanwhile.
    """
    links = Network(links=(Network(8e3 * FRAMES),))
    assert step_seconds(gpipe(2, 1), Times([F] * 2, [B] * 2, tied=1e4), links) == pytest.approx(
        F + B + B + 10
    )


def test_a_shared_machine_serves_as_many_stages_as_it_has_cores():
    """Four stages, many microbatches: on one core everything is in sequence."""
    times = Times([F] * 4, [B] * 4, cores=1)
    made = plan(gpipe(4, 3), times, Network())
    assert max(span.stop for span in made.run()) == pytest.approx(4 * 3 * (F + B))
    wide = plan(gpipe(4, 3), Times([F] * 4, [B] * 4, cores=4), Network())
    assert max(span.stop for span in wide.run()) == pytest.approx((3 + 3) * (F + B))


def test_shares_add_up_and_name_what_is_lost():
    times = Times([F] * 4, [B] * 4, fwd_bytes=[10] * 3, bwd_bytes=[10] * 3)
    free, slow = (shares(plan(gpipe(4, 8), times, Network(rate)), 4) for rate in (0.0, 20.0))
    assert free["exposed"] == 0 and free["bubble"] == pytest.approx(3 / 11)
    assert slow["exposed"] > 0.3 and sum(slow.values()) == pytest.approx(1)


def test_hundreds_of_stages_and_other_uses_than_pipelines():
    assert length(one_f_one_b(200, 16), 200) == pytest.approx(215 * (F + B))
    ring = [
        Activity(
            f"reduce {turn} {node}",
            1.0,
            (f"link {node}",),
            [4 * (turn - 1) + (node - 1) % 4] if turn else [],
            delay=0.5,
        )
        for turn in range(6)
        for node in range(4)
    ]
    # 2 (n - 1) hops of a ring
    assert max(span.stop for span in simulate(ring)) == pytest.approx(6 + 5 * 0.5)


def test_tasks_that_wait_for_each_other_are_named():
    with pytest.raises(ValueError, match="2 activities wait for each other"):
        simulate([Activity("a", 1, after=[1]), Activity("b", 1, after=[0])])


@given(st.data())
def test_laws_of_the_timeline(data):
    """No resource serves more than it can, nothing begins before what it waits for, and work is
    never put off.
    """
    n = data.draw(st.integers(1, 12))
    tasks = [
        Activity(
            str(i),
            data.draw(st.integers(0, 4)),
            tuple(sorted(data.draw(st.sets(st.sampled_from("xyz"))))),
            sorted(data.draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [],
            data.draw(st.integers(0, 2)),
            data.draw(st.integers(0, 2)),
        )
        for i in range(n)
    ]
    capacity = {"x": data.draw(st.integers(1, 2))}
    spans = simulate(tasks, capacity)
    for task, span in zip(tasks, spans, strict=True):
        ready = max((spans[one].stop + tasks[one].delay for one in task.after), default=0)
        assert span.start >= ready and span.stop == span.start + task.seconds
        if span.start > ready:  # something it needs was busy until then
            assert any(
                other.stop == span.start and set(use.uses) & set(task.uses)
                for use, other in zip(tasks, spans, strict=True)
            )
    for name in "xyz":
        for at in {span.start for span in spans}:
            using = sum(
                span.start <= at < span.stop
                for task, span in zip(tasks, spans, strict=True)
                if name in task.uses
            )
            assert using <= capacity.get(name, 1)

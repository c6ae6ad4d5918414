"""Iterations of data-parallel training: hand-made cases, and the laws of the model on random
networks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsweep.second_order.placement import Factor
from commsweep.timing.timeline import iterations
from commsweep.timing.timeline.iterations import (
    ALGORITHMS,
    FACTOR_MESSAGES,
    FACTORS,
    GRADIENT_MESSAGES,
    INVERSE_MESSAGES,
    INVERSION,
    PASSES,
    SPD,
    Algorithm,
    Cluster,
    Item,
    Work,
    average,
    iteration,
    planned,
    seconds,
)

FREE = (0.0, 0.0)


def work(layers):
    """(rows of A, rows of G, seconds of forward, of backward, of A's and G's computing) of every
    layer.
    """
    ahead = [
        item
        for turn, (_, _, forward, _, made, _) in enumerate(layers)
        for item in (Item(made, FACTORS, factor=2 * turn), Item(forward, forward=True))
    ]
    back = [
        item
        for turn, (a, g, _, backward, _, made) in reversed(list(enumerate(layers)))
        for item in (Item(made, FACTORS, factor=2 * turn + 1), Item(backward, gradient=a * g))
    ]
    return Work(
        ahead + back,
        [
            Factor(turn, side, size)
            for turn, layer in enumerate(layers)
            for side, size in zip("AG", layer, strict=False)
        ],
    )


def cluster(gpus=4, reduce=FREE, broadcast=FREE, inversion=1e-3, **more):
    return Cluster(gpus, reduce, broadcast, lambda size: inversion * size, **more)


TWO = work([(4, 2, 1.0, 2.0, 0.5, 0.25), (2, 3, 1.0, 2.0, 0.5, 0.25)])
times = st.floats(0.0, 2.0)
layer = st.tuples(st.integers(1, 30), st.integers(1, 30), times, times, times, times)
line = st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 0.01))
networks = st.lists(layer, min_size=4, max_size=7).map(work)
clusters = st.builds(cluster, st.integers(2, 4), line, line, st.floats(0.0, 0.1))


def test_a_step_of_sgd_by_hand():
    """Forward 2 s; backward 4 s. Both gradients (6 and 8 elements) travel as one message after it,
    1 s + 14 x 0.1 s.
    """
    made = iteration(TWO, cluster(reduce=(1.0, 0.1)), ALGORITHMS["s-sgd"])
    assert made.seconds == pytest.approx(6 + 2.4)
    assert made.parts == pytest.approx(
        dict.fromkeys(made.parts, 0.0) | {PASSES: 6.0, GRADIENT_MESSAGES: 2.4}
    )
    two = iteration(TWO, cluster(reduce=(1.0, 0.1)), Algorithm(kfac=False, bucket=6))
    # the last layer's left at 4 s, and the link was free again at 5.6 s
    assert two.seconds == pytest.approx(6 + 1.8)


def test_kfac_by_hand():
    """Factors of 10, 3, 3 and 6 elements; messages 1 s and 0.1 s an element."""
    links, inverting = (1.0, 0.1), 0.1
    naive = iteration(
        TWO, cluster(reduce=links, collect=links, inversion=inverting), ALGORITHMS["d"]
    )
    # 6 s of passes, 1.5 s of factors; gradients 2.4 s, factors 1 + 2.2 s; every GPU inverts 11
    # rows.
    assert naive.seconds == pytest.approx(7.5 + 2.4 + 3.2 + 1.1)
    assert naive.parts[INVERSION] == pytest.approx(1.1) and naive.parts[FACTORS] == pytest.approx(
        1.5
    )
    early = iteration(
        TWO, cluster(reduce=FREE, collect=links, inversion=inverting), Algorithm(fusion="layer")
    )
    # A of both layers at 0.5 and 2 s, G of the second and first at 3.25 and 5.5 s: 2, 1.3, 1.6 and
    # 1.3 s each.
    assert early.seconds - 1.1 == pytest.approx(max(7.5, 5.5 + 1.3))
    spread = iteration(TWO, cluster(2, broadcast=links, inversion=inverting), ALGORITHMS["mpd"])
    # GPU 0 inverts 4 and 2 rows, GPU 1 2 and 3: sent at 0.4, 0.3, 0.5 and 0.6 s after 7.5, in turn
    # 2, 1.6, 1.3, 1.3 s.
    assert spread.seconds == pytest.approx(7.5 + 0.3 + 1.6 + 2.0 + 1.3 + 1.3)


def test_a_message_that_needs_the_processor_makes_computing_longer():
    free = iteration(TWO, cluster(collect=(0.0, 0.001)), Algorithm(fusion="layer"))
    busy = iteration(
        TWO, cluster(collect=(0.0, 0.001), handling=(0.0, 0.001)), Algorithm(fusion="layer")
    )
    # The first layer's G comes last before the end, with its backward of 2 s still to do: all four
    # are handled in time.
    assert busy.seconds == pytest.approx(free.seconds + 0.022)


def test_dear_hides_half_of_the_gradients_behind_the_next_forward():
    """Two messages of 6 and 8 elements, 0.2 s an element: as all-reduces 2.8 s, halves of 0.6 and
    0.8 s.
    """
    links = cluster(reduce=(0.0, 0.2))
    whole = iteration(TWO, links, Algorithm(kfac=False, bucket=6))
    halves = iteration(TWO, links, replace(ALGORITHMS["s-sgd+dear"], bucket=6))
    assert whole.seconds == pytest.approx(6 + 1.6)
    # After the backward: scatter 0.8, gather of the first layer 0.8; the second's 0.6 is hidden by
    # the first forward.
    assert halves.seconds == pytest.approx(6 + 0.8 + 0.8)
    fast = iteration(TWO, links, replace(ALGORITHMS["s-sgd+dear"], bucket=20))
    assert fast.seconds == pytest.approx(6 + 1.4 + 1.4)  # one message hides nothing


@settings(max_examples=30, deadline=None)
@given(networks, clusters, st.sampled_from(list(ALGORITHMS)))
def test_parts_add_up_and_are_never_negative(net, links, name):
    made = iteration(net, links, ALGORITHMS[name])
    if name != "s-sgd+dear":
        assert sum(made.parts.values()) == pytest.approx(made.seconds, abs=1e-9)
    assert all(value >= -1e-9 for value in made.parts.values())
    assert seconds(net, links, name) == pytest.approx(planned(net, links, name)[1].seconds)


@settings(max_examples=20, deadline=None)
@given(networks, st.integers(2, 4), st.floats(0.0, 0.1), st.sampled_from(list(ALGORITHMS)))
def test_over_an_infinitely_fast_network_there_is_only_computing(net, gpus, inversion, name):
    made = iteration(net, cluster(gpus, inversion=inversion), ALGORITHMS[name])
    kfac, owner = ALGORITHMS[name].kfac, ALGORITHMS[name].placement == "owner"
    for part in (GRADIENT_MESSAGES, FACTOR_MESSAGES, INVERSE_MESSAGES):
        assert made.parts[part] == pytest.approx(0, abs=1e-9)
    passes = sum(item.seconds for item in net.items if item.part == PASSES)
    computing = sum(item.seconds for item in net.items if item.part == FACTORS)
    assert made.parts[PASSES] == pytest.approx(passes)
    assert (
        made.parts[FACTORS] == pytest.approx(computing * kfac)
        if not owner
        else made.parts[FACTORS] <= (computing + 1e-9)
    )


@settings(max_examples=20, deadline=None)
@given(networks, line, line, st.floats(0.0, 0.1))
def test_one_gpu_does_not_communicate_and_all_algorithms_are_one(net, reduce, broadcast, inversion):
    alone = cluster(1, reduce, broadcast, inversion)
    found = {name: iteration(net, alone, how) for name, how in ALGORITHMS.items()}
    assert all(
        found["d"].seconds == pytest.approx(found[name].seconds) for name in ("mpd", "spd", "dp")
    )
    assert all(
        one.parts[part] == pytest.approx(0, abs=1e-9)
        for one in found.values()
        for part in (GRADIENT_MESSAGES, FACTOR_MESSAGES, INVERSE_MESSAGES)
    )


@settings(max_examples=30, deadline=None)
@given(networks, clusters)
def test_spd_is_never_slower_than_its_own_ablations(net, links):
    best = planned(net, links, "spd")[1].seconds
    assert all(best <= iteration(net, links, ALGORITHMS[arm]).seconds + 1e-9 for arm in SPD)


@settings(max_examples=15, deadline=None)
@given(networks, clusters, st.sampled_from(["d", "mpd", "spd", "dp"]))
def test_rarer_updates_lead_from_kfac_to_sgd(net, links, name):
    how, both = planned(net, links, name)
    assert average(net, links, name) == pytest.approx(both.parts, abs=1e-9)
    rare = sum(average(net, links, name, 10**9, 10**9).values())
    assert rare == pytest.approx(iteration(net, links, replace(how, kfac=False)).seconds, abs=1e-6)
    low, high = sorted((rare, both.seconds))
    assert low - 1e-6 <= sum(average(net, links, name, 4, 4).values()) <= high + 1e-6


def test_collectives_by_hand():
    """A million elements between 4 GPUs over 1 Gbit/s, 1 ms a hop."""
    assert iterations.ring(4, 1e9, 1e-3) == pytest.approx((6e-3, 1.5 * 32e-9))
    assert iterations.tree(4, 1e9, 1e-3) == pytest.approx((4e-3, 2 * 32e-9))
    assert iterations.broadcast(4, 1e9, 1e-3) == pytest.approx((2e-3, 32e-9))
    assert iterations.ring(64, 0, 0) == (0, 0)

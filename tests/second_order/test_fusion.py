"""The merge rule's cases, and that fusing by it is never slower than its extremes in the cases it
was made for.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsweep.second_order.fusion import after, finished, pipelined, separate, threshold

ALPHA, BETA = 1.0, 0.01


@pytest.mark.parametrize(
    "elements, ready, groups",
    [
        (
            [100, 100],
            [1.0, 5.0],
            [[0], [1]],
        ),  # the first has arrived (1 + 2 = 3) before the second is there
        ([100, 100], [1.0, 1.5], [[0, 1]]),  # waiting half a second saves a start of one
        (
            [400, 100],
            [1.0, 3.0],
            [[0], [1]],
        ),  # ready before the first ends (6), but waiting two seconds costs more
        (
            [500, 100, 100],
            [1.0, 3.0, 4.0],
            [[0], [1, 2]],
        ),  # the link is busy until 7: the third is there before that
        ([100], [2.0], [[0]]),
        ([], [], []),
    ],
)
def test_the_rules_cases(elements, ready, groups):
    assert pipelined(elements, ready, ALPHA, BETA) == groups


def test_the_simple_fusions():
    assert after([1, 2, 3]) == [[0, 1, 2]] and after([]) == []
    assert separate([1, 2, 3]) == [[0], [1], [2]]
    assert threshold([4, 4, 4, 9, 1], 8) == [[0, 1], [2], [3], [4]]
    assert finished(separate([100, 100]), [100, 100], [1.0, 1.0], ALPHA, BETA) == 5.0
    assert finished(after([100, 100]), [100, 100], [1.0, 1.0], ALPHA, BETA) == 4.0


tensors = st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 5)), min_size=1, max_size=20)


@given(tensors, st.floats(0, 3), st.floats(0, 0.05))
def test_laws_of_fusion(pairs, alpha, beta):
    """Groups are neighbours and keep everything; without a cost of starting nothing is fused for
    its own sake.
    """
    elements, gaps = [n for n, _ in pairs], [gap for _, gap in pairs]
    ready = [sum(gaps[: place + 1]) for place in range(len(gaps))]
    groups = pipelined(elements, ready, alpha, beta)
    assert [place for group in groups for place in group] == list(range(len(elements)))
    whole = finished(after(elements), elements, ready, alpha, beta)
    least = max(ready[-1] + alpha + beta * elements[-1], ready[0] + alpha + beta * sum(elements))
    assert finished(groups, elements, ready, alpha, beta) >= least - 1e-9
    # all are there at once: one message is best, and the rule finds it
    if all(gap == 0 for gap in gaps[1:]):
        assert finished(groups, elements, ready, alpha, beta) == pytest.approx(whole)

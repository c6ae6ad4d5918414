"""Placement of K-FAC's inversions, against the published counts and by properties."""

from __future__ import annotations

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commsweep.second_order.placement import (
    EVERYWHERE,
    Factor,
    balanced,
    below,
    everywhere,
    owner,
    shared,
    spread,
)


def factors_of(name):
    """A and G of every Linear and Conv2d of a torchvision network, in order."""
    with torch.device("meta"):
        net = getattr(torchvision.models, name)(
            **({"aux_logits": False} if name == "inception_v3" else {})
        )
    found = []
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            a = module.weight[0].numel() + (module.bias is not None)
            layer = len(found) // 2
            found += [Factor(layer, "A", a), Factor(layer, "G", module.weight.shape[0])]
    return found


@pytest.mark.parametrize(
    "name, layers, a, g, sizes",
    [
        ("resnet50", 54, 62_348_671, 14_618_356, (64, 4608)),
        ("resnet152", 156, 161_955_199, 32_927_476, (64, 4608)),
        ("densenet201", 201, 130_961_295, 1_806_420, (32, 1921)),
    ],
)
def test_the_published_factor_sizes_come_out_of_the_networks(name, layers, a, g, sizes):
    factors = factors_of(name)
    assert len(factors) == 2 * layers
    assert sum(one.elements for one in factors if one.side == "A") == a
    assert sum(one.elements for one in factors if one.side == "G") == g
    assert (min(one.size for one in factors), max(one.size for one in factors)) == sizes


@pytest.mark.parametrize("threshold, large, elements", [(1024, 34, 72.48e6), (1400, 16, 62.48e6)])
def test_resnet_50s_large_factors_are_the_published_ones(threshold, large, elements):
    factors = factors_of("resnet50")
    placed = balanced(factors, 64, below(threshold))
    sent = [
        factor for factor, learner in zip(factors, placed, strict=True) if learner != EVERYWHERE
    ]
    assert len(sent) == large
    assert sum(one.elements for one in sent) == pytest.approx(elements, rel=1e-3)
    # 64 learners: nobody has two
    assert len({learner for learner in placed if learner != EVERYWHERE}) == large


def test_the_simple_placements():
    factors = factors_of("resnet50")
    assert set(everywhere(factors, 8)) == {EVERYWHERE}
    assert spread(factors, 8)[:10] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert all(
        owner(factors, 8)[place] == owner(factors, 8)[place + 1] for place in range(0, 108, 2)
    )


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 8), st.integers(1, 5001))
def test_laws_of_balance(sizes, learners, threshold):
    """Small ones everywhere, no load above another by more than one factor, all on one learner
    alone.
    """
    factors = [Factor(place // 2, "AG"[place % 2], size) for place, size in enumerate(sizes)]
    placed = balanced(factors, learners, below(threshold))
    assert all(
        (learner == EVERYWHERE) == (factor.size < threshold)
        for factor, learner in zip(factors, placed, strict=True)
    )
    large = [factor.size for factor in factors if factor.size >= threshold]
    loads = [
        sum(factor.size for factor, learner in zip(factors, placed, strict=True) if learner == one)
        for one in range(learners)
    ]
    assert sum(loads) == sum(large)
    assert max(loads) - min(loads) <= max(large, default=0)
    if learners == 1:
        assert set(placed) <= {0, EVERYWHERE}


def test_kaisas_fractions():
    assert shared(3, 4, 1.0) == [[0, 1, 2, 3]] * 3
    assert shared(3, 4, 0.5) == [[0, 1], [2, 3], [0, 1]]
    assert shared(5, 4, 0.25) == [[0], [1], [2], [3], [0]]
    with pytest.raises(
        ValueError, match=r"0.3 does not divide 4 learners \(these do: 0.25, 0.5, 1\)"
    ):
        shared(3, 4, 0.3)

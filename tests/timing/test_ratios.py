"""Ratios by link: hardest on the slowest, never slower than one everywhere, that one where all are
alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsweep.errors import UserError
from commsweep.timing import ratios
from commsweep.timing.measured_pipelines import Machine
from commsweep.timing.timeline.pipelines import (
    SCHEDULES,
    TORCH,
    Action,
    Engine,
    Network,
    Times,
    step_seconds,
)
from tests.helpers import linked

DENSE = 400_000


def asked(ratio: float = 0.1, **backward):
    return linked(
        {"kind": "topk", "ratio": ratio},
        backward or {"kind": "topk", "ratio": ratio},
        microbatches=4,
    )


def sizes(run) -> ratios.Sizes:
    kept = [run.links(cut).fwd.compressor.ratio for cut in run.model.cuts]
    return {
        cut: (round(DENSE * ratio),) * 2 for cut, ratio in zip(run.model.cuts, kept, strict=True)
    }


@dataclass
class Base:
    """A measurement of so many bytes at every boundary."""

    nbytes: float
    schedule: str = "gpipe"

    @property
    def orders(self) -> list[list[Action]]:
        return SCHEDULES[self.schedule](4, 4)

    @property
    def engine(self) -> Engine:
        return TORCH[self.schedule]

    def times(self) -> Times:
        return Times([0.001] * 4, [0.002] * 4, [], [self.nbytes] * 3, [self.nbytes] * 3)


@dataclass
class Fitted:
    """What `measured.PipelineModel` knows, without a measurement."""

    base: Base
    machine: Machine = field(default_factory=Machine)

    def times(self) -> Times:
        return self.base.times()

    def step(self, network: Network) -> float:
        return step_seconds(
            self.base.orders,
            self.times(),
            self.machine.network(network),
            self.base.engine,
        )


def network(*rates: float) -> Network:
    return Network(links=tuple(Network(rate) for rate in rates))


@settings(max_examples=5)  # a search of seconds each
@given(
    rates=st.lists(st.sampled_from([2e6, 5e6, 2e7, 1e8, 1e9]), min_size=3, max_size=3),
    ratio=st.sampled_from([0.05, 0.2, 0.5]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_the_slower_a_link_the_harder_and_no_step_is_longer(rates, ratio, schedule):
    model = Fitted(Base(DENSE * ratio, schedule))
    made = ratios.spread(asked(ratio), sizes, model, network(*rates))
    chosen = list(made.ratios.values())
    assert made.step <= made.one == model.step(network(*rates))
    assert all((chosen[a] <= chosen[b]) for a in range(3) for b in range(3) if rates[a] <= rates[b])
    # one ratio for all: the given one, or a milder one where links hold nothing up
    if len(set(rates)) == 1:
        assert len(set(chosen)) == 1 and chosen[0] > 0.94 * ratio
        assert max(rates) > 1e8 or chosen[0] < 1.06 * ratio
    else:
        assert chosen[rates.index(max(rates))] > ratio


def test_its_settings_make_the_run_with_these_ratios():
    from commsweep.config import override

    made = ratios.spread(asked(), sizes, Fitted(Base(DENSE * 0.1)), network(2e6, 1e8, 1e7))
    run = override(asked(), made.settings)
    for cut, ratio in made.ratios.items():
        assert run.links(cut).fwd.compressor.ratio == run.links(cut).bwd.compressor.ratio == ratio
    masked = ratios.spread(
        asked(kind="forward_mask"), sizes, Fitted(Base(DENSE * 0.1)), network(2e6, 1e8, 1e7)
    )
    assert masked.ratios == made.ratios and all(".fwd." in f".{key}" for key in masked.settings)


@pytest.mark.parametrize(
    ("run", "links", "says"),
    [
        (asked(), network(1e6, 1e6), "2 links for 3 boundaries"),
        (
            linked({"kind": "uniform", "bits": 4}),
            network(1e6, 1e6, 1e6),
            "begin from one ratio everywhere",
        ),
    ],
)
def test_what_has_no_ratio_is_refused(run, links, says):
    with pytest.raises(UserError, match=says):
        ratios.spread(run, sizes, Fitted(Base(100)), links)

"""Phases over steps, densities over layers, and how many weights an update moves."""

from __future__ import annotations

import math
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsweep.config import override
from commsweep.config.sparsity import Phase, Sparsity
from commsweep.errors import UserError
from commsweep.registry import preset
from commsweep.sparsity.densities import densities, live, scores
from commsweep.sparsity.schedule import Schedule, moved
from tests.helpers import tiny_text

BLOCK = [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
HEAD = [*BLOCK, (50304, 768)]


def phases(**given):
    return {name: Phase(**one) for name, one in given.items()}


THREE = phases(
    warmup={"until": 0.1, "sparsity": 0.8, "shape": "linear"},
    ultra={"until": 0.9, "sparsity": 0.95},
    restore={"until": 1.0, "shape": "cubic"},
)


def test_targets_follow_the_phases():
    plan = Schedule(Sparsity(phases=THREE, interval=10), 1000)
    assert [plan.target(step) for step in (0, 9, 10, 50, 90, 99)] == pytest.approx(
        [0, 0, 0.8 / 9, 0.8 * 5 / 9, 0.8, 0.8]
    )
    assert [plan.target(step) for step in (100, 500, 899)] == [0.95] * 3
    assert [plan.target(step) for step in (900, 930, 990, 999)] == pytest.approx(
        [0.95, 0.95 * (1 - 3 / 9) ** 3, 0.0, 0.0]
    )
    assert not plan.updates(0) and plan.updates(10) and not plan.updates(11)
    assert plan.updates(100) and plan.updates(900)  # a phase begins with an update
    assert [one.name for one in plan.stretches] == ["warmup", "ultra", "restore"]


def test_the_drop_fraction_is_a_cosine_of_the_run_or_of_its_phase():
    plan = Schedule(Sparsity(phases=THREE, interval=10, drop_fraction=0.4), 1000)
    assert [plan.drop(step) for step in (0, 500, 1000)] == pytest.approx([0.4, 0.2, 0.0])
    early = Schedule(Sparsity(phases=THREE, interval=10, drop_fraction=0.4, drop_until=0.5), 1000)
    assert early.drop(250) == pytest.approx(0.2) and early.drop(500) == early.drop(900) == 0
    again = Schedule(Sparsity(phases=THREE, interval=10, drop_fraction=0.4, restart=True), 1000)
    assert [again.drop(step) for step in (0, 100, 500, 900)] == pytest.approx([0.4, 0.4, 0.2, 0.4])


@given(numel=st.integers(1, 400), data=st.data(), drop=st.floats(0, 0.99), regrow=st.booleans())
def test_what_an_update_moves(numel, data, drop, regrow):
    """The target is met exactly, nothing is negative, and there is room for what grows."""
    now, to = data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))
    prune, grow = moved(now, to, numel, drop, regrow)
    assert now - prune + grow == to and 0 <= prune <= now and grow >= 0
    assert grow <= (numel - now + prune if regrow else numel - now)
    # there is room for the whole fraction
    if now - int(drop * now) + numel - now >= to and not regrow:
        assert prune >= min(int(drop * now), numel - to)


@pytest.mark.parametrize(
    "sparsity, published",
    [
        (0.5, (0.5403, 0.8104, 0.5065, 0.4114)),
        (0.8, (0.2161, 0.3242, 0.2026, 0.1646)),
        (0.9, (0.1081, 0.1621, 0.1013, 0.0823)),
    ],
)
def test_erdos_renyi_densities_of_gpt2_small_with_its_head(sparsity, published):
    made = densities(HEAD, Sparsity(), sparsity)
    assert [round(made[at], 4) for at in (0, 1, 2, -1)] == list(published) and made[2] == made[3]
    assert densities(BLOCK, Sparsity(), sparsity)[:3] == pytest.approx(
        [1 - sparsity, min(1.0, 1.5 * (1 - sparsity)), 0.9375 * (1 - sparsity)]
    )


def test_kernels_count_in_erk_and_not_in_er():
    shapes = [(16, 8, 3, 3), (10, 16)]
    assert scores(shapes, "er") == [24 / 128, 26 / 160] and scores(shapes, "erk") == [
        30 / 1152,
        26 / 160,
    ]
    assert scores(shapes, "uniform") == [1, 1]


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8)


@given(
    shapes=SHAPES,
    sparsity=st.floats(0, 0.999),
    distribution=st.sampled_from(("uniform", "er", "erk")),
    cap=st.sampled_from((1.0, 0.7)),
)
def test_live_weights_meet_the_target_and_no_layer_is_above_its_cap(
    shapes, sparsity, distribution, cap
):
    sizes = [prod(shape) for shape in shapes]
    spec = Sparsity(distribution=distribution)
    spec.__dict__["max_density"] = cap  # past the rule that a phase's density must be below it
    if 1 - sparsity > cap:
        with pytest.raises(
            UserError, match=r"sparsity.max_density=0.7: a density of .* cannot be reached"
        ):
            live(shapes, spec, sparsity)
        return
    made, exact = live(shapes, spec, sparsity), densities(shapes, spec, sparsity)
    # no layer is without any
    assert sum(made) == max(len(made), round((1 - sparsity) * sum(sizes)))
    # by the largest ones
    given = sum(density * size < 1 for density, size in zip(exact, sizes, strict=True))
    for count, density, size in zip(made, exact, sizes, strict=True):
        assert (
            1 <= count <= size
            and density <= cap + 1e-9
            and abs(count - density * size) <= 1 + given + 1e-6
        )
    raw = scores(shapes, distribution)
    free = [one / r for one, r in zip(exact, raw, strict=True) if one < cap * (1 - 1e-9)]
    assert all(math.isclose(one, free[0], rel_tol=1e-9) for one in free)


@pytest.mark.parametrize(
    "changes, line",
    [
        (
            {"phases.b.until": 1.0, "phases.all.until": 1.0},
            "sparsity.phases: all and b overlap, for both end at 1",
        ),
        (
            {"phases.all.until": 1.2},
            r"sparsity.phases.all.until=1.2: the last phase leaves the run; set it to 1",
        ),
        ({"phases.all.until": 0.5}, "ends before the run does; set it to 1"),
        ({"phases.all.until": 0}, "sparsity.phases.all.until=0"),
        (
            {"phases.all.sparsity": 1.0},
            r"sparsity.phases.all.sparsity=1.0: input should be less than 1",
        ),
        ({"phases.all": None}, "a run needs a phase"),
        ({"phases.all.sparsty": 0.5}, "did you mean 'sparsity.phases.all.sparsity'"),
        ({"phases.all": 3}, "write sparsity.phases.all.SETTING=VALUE"),
        ({"phases.b.sparsity": 0.5}, "setting 'sparsity.phases.b.until' is missing"),
        ({"max_density": 0.3}, "sparsity.max_density=0.3: a density of 1"),
        (
            {"steps": "skipped", "interval": 1},
            "sparsity.update_steps=skipped leaves out every step",
        ),
        (
            {"phases": "null"},
            "'sparsity.phases' is a section: write sparsity.phases.NAME.SETTING=VALUE",
        ),
        ({"phases.nope": None}, "there is no 'nope' in sparsity.phases"),
        (
            {"phases.first.until": 0.5},
            r"sparsity.phases.first.until=0.5: the last phase ends before the run does",
        ),
        (
            {"phases.all.sparsity": 0.5, "phases.all": None},
            "'sparsity.phases.all' is left out and set at once",
        ),
        ({"initial_sparsity": 0.5}, "sparsity.initial_sparsity=0.5 has no effect"),
        (
            {"growth": "none"},
            "sparsity.drop_fraction=0.3 would prune without end; set drop_fraction=0",
        ),
        ({"mixed": 2.0}, "sparsity.mixed has no effect unless sparsity.growth=mixed"),
        ({"mest": 2.0}, "sparsity.mest has no effect unless sparsity.score=mest"),
        (
            {"restart": True, "drop_until": 0.5},
            "sparsity.drop_until=0.5 has no effect with sparsity.restart=true",
        ),
        (
            {"alternate": "layers"},
            "sparsity.alternate=layers has no effect without a phase that sets alternate_attention",
        ),
        (
            {
                "growth": "none",
                "drop_fraction": 0,
                "phases.a.until": 0.5,
                "phases.a.sparsity": 0.5,
                "phases.all.sparsity": 0,
            },
            "nothing grows; set growth",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        override(tiny_text(), {f"sparsity.{key}": value for key, value in changes.items()})


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"kfac.damping": 0.1}, "sparsity does not go with kfac"),
        ({"grad.local_steps": 2}, "sparsity does not go with grad.local_steps=2"),
        (
            {"grad.learners": 2, "grad.compressor.kind": "powersgd"},
            "works on whole layers, not on the live",
        ),
        (
            {"fwd.compressor.kind": "bottleneck"},
            "sparsity does not go with fwd.compressor.kind=bottleneck",
        ),
    ],
)
def test_what_does_not_go_with_masks_is_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        override(tiny_text(), {"sparsity.phases.all.sparsity": 0.5} | changes)


def test_live_gradients_need_masks():
    with pytest.raises(UserError, match="without the section sparsity there are none"):
        override(tiny_text(), {"grad.compressor.kind": "live", "grad.learners": 2})


@pytest.mark.parametrize(
    "steps, line",
    [
        (100, "sparsity.interval=100: no shorter than phase all, which has 100"),
        (3, "no shorter than phase all"),
    ],
)
def test_an_interval_longer_than_its_phase_is_one_line(steps, line):
    with pytest.raises(UserError, match=line):
        Schedule(Sparsity(phases=phases(all={"until": 1, "sparsity": 0.8})), steps)
    # nothing moves
    Schedule(Sparsity(phases=phases(all={"until": 1, "sparsity": 0.8}), drop_fraction=0.0), steps)


def test_a_phase_without_a_step_is_one_line():
    with pytest.raises(UserError, match="sparsity.phases.a: of 10 steps none is left for it"):
        Schedule(Sparsity(phases=phases(a={"until": 0.01}, b={"until": 1})), 10)


def test_phases_are_set_and_left_out_by_name():
    run = override(
        preset("sotu_nano"),
        {
            "sparsity.phases.ultra.until": 0.5,
            "sparsity.phases.ultra.sparsity": 0.9,
            "sparsity.phases.all.sparsity": 0.5,
        },
    )
    assert {name: one.sparsity for name, one in run.sparsity.ordered} == {"ultra": 0.9, "all": 0.5}
    assert set(override(run, {"sparsity.phases.ultra": None}).sparsity.phases) == {"all"}
    assert override(run, {"sparsity": "null"}) == preset("sotu_nano")

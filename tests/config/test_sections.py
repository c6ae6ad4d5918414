"""Sections that most Runs do not have: absent, they change nothing; naming a setting opens one."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from commsweep.config import Run, override, record, rules, run_id
from commsweep.config.base import Spec
from commsweep.config.override import parse
from commsweep.config.run import canonical
from commsweep.errors import UserError
from commsweep.registry import preset, presets


class Second(Spec):
    """A section of a later version."""

    damping: Annotated[float, Field(gt=0)] = 0.03
    interval: int = 10


class Step(Spec):
    """One of two kinds."""

    kind: Literal["step"] = "step"
    at: int = 5


class Cubic(Spec):
    """The other."""

    kind: Literal["cubic"] = "cubic"
    power: int = 3


class Later(Run):
    """A Run as a later version may have it."""

    second: Second | None = None
    phase: Annotated[Step | Cubic | None, Field(discriminator="kind")] = None


def later(run: Run) -> Later:
    return parse(record(run), Later)


@pytest.mark.parametrize("name", presets())
def test_what_is_absent_is_not_in_a_runs_text(name):
    assert canonical(later(preset(name))) == canonical(preset(name))
    assert run_id(later(preset(name))) == run_id(preset(name))


def test_naming_a_setting_opens_a_section_and_null_closes_it():
    run = later(preset("digits"))
    opened = override(run, {"second.damping": "0.1"})
    assert opened.second == Second(damping=0.1) and run_id(opened) != run_id(run)
    assert override(opened, {"second.interval": 3}).second == Second(damping=0.1, interval=3)
    assert override(opened, {"second": "null"}) == run
    assert parse(record(opened), Later) == opened


def test_a_section_of_several_kinds_begins_as_the_first():
    run = later(preset("digits"))
    assert override(run, {"phase.at": 7}).phase == Step(at=7)
    assert override(run, {"phase.kind": "cubic", "phase.power": 2}).phase == Cubic(power=2)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"second.dampng": 1}, "unknown setting 'second.dampng'; did you mean 'second.damping'"),
        ({"second.damping": 0}, "second.damping=0: input should be greater than 0"),
        ({"phase.power": 2}, r"step has at; power belongs to kind=cubic"),
        ({"fwd": "null"}, "'fwd' is a section"),
    ],
)
def test_mistakes_in_them_are_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        override(later(preset("digits")), changes)


def test_a_run_of_this_version_does_not_know_them():
    with pytest.raises(UserError, match=r"unknown setting 'second.damping'"):
        override(preset("digits"), {"second.damping": 1})


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("digits", {"data.fixed_augment": True}, "no effect without augmentation"),
        (
            "digits",
            {"grad.exchange": "server"},
            "grad.exchange=server has no effect with one learner",
        ),
        (
            "digits",
            {"kfac.method": "eigen", "kfac.split": "direct"},
            "kfac.split=direct has no effect with kfac.method",
        ),
        (
            "digits",
            {"bwd.compressor.kind": "zero", "bwd.feedback.kind": "ef"},
            "bwd.feedback.kind=ef does not go with the control bwd.compressor.kind=zero",
        ),
        (
            "digits",
            {
                "grad.learners": 2,
                "grad.exchange": "allgather",
                "grad.compressor.kind": "mean",
                "grad.feedback.kind": "ef",
            },
            "grad.feedback.kind=ef does not go with the control grad.compressor.kind=mean",
        ),
        (
            "sotu_nano_static",
            {"grad.learners": 2, "grad.compressor.kind": "mean", "grad.exchange": "allgather"},
            "grad.compressor.kind=mean does not go with sparsity",
        ),
        (
            "digits",
            {"sparsity.width": 3},
            "sparsity.width=3 has no effect without sparse attention",
        ),
        (
            "sotu_nano_static",
            {"sparsity.width": 16},
            "sparsity.width=16 has no effect without sparse attention",
        ),
        *(
            (
                "sotu_nano_static",
                {f"sparsity.{key}": value},
                f"sparsity.{key}={str(value).lower()} has no effect where",
            )
            for key, value in (
                ("score", "sensitivity"),
                ("pruned_moments", "kept"),
                ("update_steps", "skipped"),
                ("regrow", True),
                ("restart", True),
                ("drop_until", 0.5),
            )
        ),
        (
            "sotu_nano_oneshot",
            {"sparsity.regrow": True},
            "sparsity.regrow=true has no effect where",
        ),
        (
            "sotu_nano_static",
            {"grad.learners": 4, "grad.outer.interval": 8},
            "sparsity does not go with grad.outer",
        ),
    ],
)
def test_what_has_no_effect_is_refused(name, changes, line):
    with pytest.raises(UserError, match=line):
        override(preset(name), changes)
    if name == "sotu_nano_oneshot":  # what prunes later has a score
        assert override(preset(name), {"sparsity.score": "sensitivity"})


HAVING = {
    "kfac": {"kfac.inverses_every": 2},
    "sparsity": {"sparsity.phases.all.sparsity": 0.5},
    "outer steps": {"grad.learners": 2, "grad.outer.interval": 4},
    "shards": {"grad.learners": 2, "grad.sharded.nodes": 1},
    "sums by hops": {
        "grad.learners": 2,
        "grad.collective": "ring",
        "grad.compressor.kind": "uniform",
    },
    "local steps": {"grad.learners": 2, "grad.local_steps": 2},
    "microbatches": {"microbatches": 2},
    "coder": {"fwd.compressor.kind": "bottleneck"},
    "layer-wise compressor": {
        "grad.learners": 2,
        "grad.compressor.kind": "powersgd",
        "grad.feedback.kind": "ef",
    },
    "matrix optimizer": {"optim.kind": "muon"},
    "optimizer with an exchange of its own": {
        "grad.learners": 2,
        "optim.kind": "dion",
        "grad.compressor.kind": "dion",
        "grad.feedback.kind": "decoupled",
    },
    "gradient checkpointing": {"model.gradient_checkpointing": True},
    "recalibration": {"recalibrate": 2},
    "delay": {"delay.steps": 1},
    "warm start in steps": {"bwd.compressor.kind": "sign", "bwd.start_step": 2},
}


@pytest.mark.parametrize("rule", rules.EXCLUSIONS, ids=lambda rule: f"{rule.first}+{rule.second}")
def test_every_exclusion_is_refused_in_one_line_that_names_both_and_the_mend(rule):
    """Each alone is a legal Run; together they are not, or not as a real pipeline."""
    images = "recalibration" in (rule.first, rule.second)
    base = preset("synthetic") if images else preset("synthetic_text")
    alone = [override(base, HAVING[name]) for name in (rule.first, rule.second) if name in HAVING]
    if rules.PIPELINE in (rule.first, rule.second):
        (run,) = alone
        line = rules.broken(run, rules.PIPELINE)
        assert not rules.broken(run)
    else:
        with pytest.raises(UserError) as refused:
            override(base, HAVING[rule.first] | HAVING[rule.second])
        line = str(refused.value)
    for name, run in zip((rule.first, rule.second), alone, strict=False):
        assert rules.PRESENT[name](run) in line
    assert rule.mend in line and "\n" not in line

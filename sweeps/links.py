"""Compression at the boundaries over links of some bandwidth and latency: runs with their
wiring.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from commsweep.config import Run, override, run_id
from commsweep.config.execution import LearnerWiring, Wiring
from commsweep.registry import preset

from . import local, unequal
from .adacomp import METHODS as METHODS_OF_LEARNERS

Measurement = tuple[Run, Wiring]
LearnerMeasurement = tuple[Run, LearnerWiring]

BANDWIDTHS = (10e6, 100e6, 1e9, 0.0)
STEPS, MANY_STEPS = 30, 60  # of a measurement; more where predictions are fitted or judged
TURNS, FEW_STEPS = (
    3,
    24,
)  # where what is measured is compared: a machine's speed changes within minutes
ROUNDS = 38  # steps with three exchanges after the first eight, one in ten
Schedule: TypeAlias = Literal["gpipe", "1f1b"]


def _both(kind: str, **parameters: Any) -> dict[str, Any]:
    return {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in {"kind": kind, **parameters}.items()
    }


METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "8 bits": _both("uniform", bits=8),
    "4 bits": _both("uniform", bits=4),
    "TopK 10 %": _both("topk", ratio=0.1),
    "EF21 TopK 5 %": _both("topk", ratio=0.05)
    | {f"{side}.feedback.kind": "ef21" for side in ("fwd", "bwd")},
}


def _grid(
    base: Run,
    methods: list[str],
    bandwidths: tuple[float, ...],
    latency: float = 0.0,
    schedule: Schedule = "gpipe",
    steps: int = STEPS,
) -> list[Measurement]:
    return [
        (
            override(base, METHODS[method]),
            Wiring(schedule=schedule, bandwidth=rate, latency=latency, steps=steps),
        )
        for rate in bandwidths
        for method in methods
    ]


def demo_links() -> list[Measurement]:
    """A small ResNet on digits in four stages and four microbatches: every method at 10 and 100
    Mbit/s, 1 Gbit/s and unlimited; both schedules; two latencies.
    """
    base = override(preset("digits"), {"microbatches": 4})
    methods = ["dense", "4 bits", "TopK 10 %"]
    return (
        _grid(base, list(METHODS), BANDWIDTHS)
        + _grid(base, methods, BANDWIDTHS, schedule="1f1b")
        + _grid(base, methods, (10e6, 100e6), latency=0.02)
    )


def links_text() -> list[Measurement]:
    """A nano GPT-2 in four stages and four microbatches, whose tied embeddings cross all links,
    too.
    """
    base = override(preset("sotu_nano"), {"microbatches": 4})
    return _grid(base, ["dense", "4 bits", "TopK 10 %"], BANDWIDTHS)


def _cut(*cuts: str) -> Run:
    return override(preset("digits"), {"microbatches": 4, "model.cuts": list(cuts)})


def calibrate_links() -> list[Measurement]:
    """The effect of slow links on this machine: dense and TopK over a slow, a late, and a slow and
    late link.
    """
    base, methods = _cut("layer1", "layer2", "layer3"), ["dense", "TopK 10 %"]
    return [
        measurement
        for schedule in ("gpipe", "1f1b")
        for rate, latency in ((0.0, 0.0), (10e6, 0.0), (100e6, 0.02), (30e6, 0.005))
        for measurement in _grid(base, methods, (rate,), latency, schedule, MANY_STEPS)
    ]


def heldout_links() -> list[Measurement]:
    """Predictions put to the test: links that no constant was fitted to, from 5 Mbit/s to 1 Gbit/s
    and from 0 to 50 ms, two to four stages, both schedules; and each setting over unlimited links,
    which a prediction begins from.
    """
    four, three, two = _cut("layer1", "layer2", "layer3"), _cut("layer1", "layer2"), _cut("layer2")
    cases: list[tuple[Run, Schedule, list[str], list[tuple[float, float]]]] = [
        (
            four,
            "gpipe",
            ["dense", "8 bits", "4 bits", "TopK 10 %"],
            [(5e6, 0.001), (40e6, 0.015), (300e6, 0.04)],
        ),
        (four, "1f1b", ["dense", "4 bits", "TopK 10 %"], [(15e6, 0.0), (80e6, 0.03), (1e9, 0.003)]),
        (three, "gpipe", ["dense", "4 bits"], [(25e6, 0.008), (500e6, 0.0)]),
        (two, "1f1b", ["dense", "EF21 TopK 5 %"], [(7e6, 0.004), (150e6, 0.05)]),
    ]
    plan = [
        measurement
        for base, schedule, names, links in cases
        for rate, latency in [(0.0, 0.0), *links]
        for measurement in _grid(base, names, (rate,), latency, schedule, MANY_STEPS)
    ]
    return list(
        {
            (run_id(measurement[0]), measurement[1].model_dump_json()): measurement
            for measurement in plan
        }.values()
    )


def heldout_learners() -> list[LearnerMeasurement]:
    """The same of learners: dense gradients and two ways of compressing them, two to eight
    learners, 5 Mbit/s to 1 Gbit/s, 0 to 50 ms; each also over unlimited links. What predicts them
    was settled before the published sitting, after an earlier one over the same links.
    """
    ways = [METHODS_OF_LEARNERS[name] for name in ("dense", "TopK 1 %", "TernGrad")]
    links = {
        2: [(0.0, 0.0), (20e6, 0.0), (5e6, 0.01), (45e6, 0.015), (1e9, 0.025), (300e6, 0.05)],
        4: [(0.0, 0.0), (60e6, 0.005), (200e6, 0.02), (10e6, 0.04)],
        8: [(0.0, 0.0), (35e6, 0.015), (14e6, 0.03)],
    }
    return [
        (
            override(preset("digits"), {"grad.learners": n} | method),
            LearnerWiring(bandwidth=rate, latency=latency, steps=MANY_STEPS),
        )
        for n, links_here in links.items()
        for rate, latency in links_here
        for method in ways
    ]


def local_links() -> list[LearnerMeasurement]:
    """Learners that train apart, four of them, over links between homes and between data centres,
    and without any; what they reach is in `local_methods`.
    """
    links = [(0.0, 0.0), (20e6, 0.02), (100e6, 0.05), (1e9, 0.005)]
    return [
        (
            override(local.base(), local.METHODS[name]),
            LearnerWiring(bandwidth=rate, latency=latency, steps=ROUNDS),
        )
        for rate, latency in links
        for name in local.LINKED
    ]


def heldout_advice() -> list[Measurement]:
    """Advice put to the test: every method and both schedules over links of which the advice sees
    nothing, and over unlimited ones, from which it predicts. All of them are measured in each of
    several turns.
    """
    base = override(preset("digits"), {"microbatches": 4})
    links = [
        (0.0, 0.0),
        (8e6, 0.0),
        (20e6, 0.005),
        (35e6, 0.0),
        (60e6, 0.001),
        (120e6, 0.01),
        (250e6, 0.0),
    ]
    return [
        (run, wiring.model_copy(update={"turn": index}))
        for index in range(TURNS)
        for rate, latency in links
        for schedule in ("gpipe", "1f1b")
        for run, wiring in _grid(base, list(METHODS), (rate,), latency, schedule, FEW_STEPS)
    ]


def unequal_links() -> list[Measurement]:
    """Links that differ: one ratio everywhere, ratios by link (see `sweeps/unequal.py`), and dense;
    each also over unlimited links.
    """
    runs = {name: unequal.by_link(name) for name in unequal.UNEQUAL}
    bases = [override(preset("sotu_nano"), {"microbatches": 4}), unequal.one_ratio()]
    plan = [(run, Wiring(steps=MANY_STEPS)) for run in (*bases, *runs.values())]
    return plan + [
        (run, Wiring(links=unequal.cables(name), steps=MANY_STEPS))
        for name, run_ in runs.items()
        for run in (*bases, run_)
    ]


def late_links() -> list[Measurement]:
    """Links of which the latency counts: three methods in eight microbatches, with gradients in
    time and a step late; each also over unlimited links.
    """
    base = override(preset("digits"), {"microbatches": 8})
    late = override(base, {"delay.steps": 1})
    links = [(0.0, 0.0), (100e6, 0.01), (20e6, 0.02), (100e6, 0.05)]
    return [
        measurement
        for rate, latency in links
        for run in (base, late)
        for measurement in _grid(
            run, ["dense", "4 bits", "TopK 10 %"], (rate,), latency, "1f1b", STEPS
        )
    ]


def smoke_links() -> list[Measurement]:
    """Two measurements of toy size."""
    return _grid(
        override(preset("synthetic"), {"microbatches": 4}),
        ["dense", "4 bits"],
        (100e6, 0.0),
        steps=6,
    )


# The plan whose measurements the constants of a machine are fitted to.
CALIBRATION = "calibrate-links"
PLANS = {
    "calibrate-links": calibrate_links,
    "heldout-links": heldout_links,
    "heldout-learners": heldout_learners,
    "local-links": local_links,
    "heldout-advice": heldout_advice,
    "unequal-links": unequal_links,
    "late-links": late_links,
    "demo-links": demo_links,
    "links-text": links_text,
    "smoke-links": smoke_links,
}

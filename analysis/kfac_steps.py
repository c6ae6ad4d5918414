"""Iterations of D-, MPD-, SPD-KFAC: published, predicted and measured; claims K1, K2, K3, K6.

Published are the first author's plotted seconds, predicted the timeline's with the published
constants (64 GPUs), and measured those of real processes over shaped links of one machine
(`commsweep/timing/measured_learners.py`), with a prediction beside each. What is published is
quoted; verdicts rest on what was predicted (one value a network) and measured (one a setting).
Effects are per cent of time.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from commsweep.reporting import report
from commsweep.reporting.claim import Claim, Effect
from commsweep.reporting.figure import COLUMN, INK, MARKS, legend, logarithmic, styled
from commsweep.reporting.table import Table
from commsweep.timing.measured_learners import (
    FUSIONS,
    LearnerModel,
    LearnerStep,
    errors,
    misordered,
)
from commsweep.timing.timeline.iterations import (
    ALGORITHMS,
    FACTOR_MESSAGES,
    FACTORS,
    INVERSE_MESSAGES,
    INVERSION,
    NAMES,
    STACK,
    Iteration,
    average,
    iteration,
    planned,
    seconds,
)
from commsweep.timing.timeline.pipelines import rate_text

from . import spd_kfac
from .spd_kfac import PUBLISHED, TITLES, Setting, setting

THREE = ("d", "mpd", "spd")
PLACES = {"d": "everywhere", "mpd": "spread", "d+balance": "balanced"}
STEPS = {"d": "neither", "d+pipelining": "pipelining", "d+balance": "balance", "spd": "both"}
INTERVALS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)
# of a hop: what the published all-reduce of 64 GPUs takes to start, over its 126 rounds
LATENCY = 7.4e-6
WORST = 0.2  # of a step: the largest error that is asked of a prediction
GAIN, MOST, LITTLE = 10.0, 35.0, 5.0  # per cent
# the update interval that K6 asks about: what the author's code does with factors unless told
# otherwise
USUAL = 10


def networks() -> list[str]:
    """The published networks that this installation can build: Inception-v4 needs timm."""
    return [
        name for name in PUBLISHED if name != "inception_v4" or importlib.util.find_spec("timm")
    ]


@lru_cache
def at(name: str) -> Setting:
    """A network with the published constants."""
    return setting(name)


@lru_cache
def predicted(name: str, algorithm: str) -> Iteration:
    """An iteration with the published constants."""
    return planned(at(name).work, at(name).cluster, algorithm)[1]


@lru_cache
def fused(name: str, fusion: str) -> Iteration:
    """D-KFAC with its factors fused otherwise."""
    return iteration(at(name).work, at(name).cluster, replace(ALGORITHMS["d"], fusion=fusion))


def gain(best: float, ours: float) -> float:
    """Per cent by which the best other one takes longer, as the paper counts."""
    return 100 * (best / ours - 1)


# Tables.


def iterations() -> Table:
    """Parts of an iteration, published and predicted."""
    table = Table(
        "iterations",
        "Seconds of an iteration on 64 GPUs: published / predicted with the published constants",
        ["Network", "Algorithm", *STACK, "all"],
    )
    for name in networks():
        # a layer has one, of those that own any
        owners = at(name).cluster.gpus <= len(at(name).work.factors) // 2
        for algorithm in ("s-sgd", *THREE, *(("dp",) if owners else ())):
            made, told = predicted(name, algorithm), PUBLISHED[name].get(algorithm)
            parts = [made.parts[part] for part in STACK]
            shown = [(told[turn] if told else None, value) for turn, value in enumerate(parts)]
            table.rows.append(
                [
                    TITLES[name],
                    NAMES[algorithm],
                    *(_both(*one) for one in shown),
                    _both(sum(told) if told else None, made.seconds),
                ]
            )
    return table


def _both(told: float | None, made: float) -> str:
    return f"{'-' if told is None else f'{told:.3f}'} / {made:.3f}"


def details() -> Table:
    """Fusion, placement and ablation, published and predicted."""
    table = Table(
        "ablations",
        "Exposed messages of factors by fusion, inversion with its messages by placement, and "
        "whole iterations: seconds, published / predicted",
        ["Network", "What", *TITLES_OF],
    )
    for name in networks():
        told = spd_kfac.PIPELINING[name]
        table.rows.append(
            [
                TITLES[name],
                "factor messages",
                *(
                    _both(told[1 + turn] - told[0], fused(name, fusion).parts[FACTOR_MESSAGES])
                    for turn, fusion in enumerate(FUSIONS)
                ),
            ]
        )
        everywhere, _, spread, _, balanced = spd_kfac.PLACEMENT[name]
        table.rows.append(
            [
                TITLES[name],
                "inversion",
                *(
                    _both(value, _inverting(predicted(name, algorithm)))
                    for value, algorithm in zip((everywhere, spread, balanced), PLACES, strict=True)
                ),
                "-",
            ]
        )
        table.rows.append(
            [
                TITLES[name],
                "iteration",
                *(
                    _both(value, predicted(name, algorithm).seconds)
                    for value, algorithm in zip(spd_kfac.ABLATION[name], STEPS, strict=True)
                ),
            ]
        )
    return table


TITLES_OF = (
    "after / everywhere / neither",
    "layer by layer / spread / pipelining",
    "threshold / balanced / balance",
    "pipelined / - / both",
)


def _inverting(made: Iteration) -> float:
    return made.parts[INVERSION] + made.parts[INVERSE_MESSAGES]


def measured(found: list[LearnerStep]) -> Table:
    """Every measurement beside its prediction."""
    model = LearnerModel(found)
    table = Table(
        "measured",
        "Milliseconds a step of real processes on this machine, measured and predicted; exposed "
        "parts as measured",
        [
            "learners",
            "bandwidth",
            "algorithm",
            "measured ms",
            "steps",
            "predicted ms",
            "error",
            "factor messages",
            "inversion",
            "inverse messages",
            "gradients",
        ],
    )
    for measurement in sorted(found, key=_order):
        guess = model.step(measurement)
        said = (
            "-"
            if guess is None
            else "fitted"
            if model.fitted(measurement)
            else f"{100 * (guess / measurement.seconds - 1):+.0f} %"
        )
        table.rows.append(
            [
                str(measurement.network.learners),
                rate_text(measurement.network.bandwidth),
                measurement.algorithm,
                f"{1e3 * measurement.seconds:.0f}",
                str(measurement.timing["steps"]),
                "-" if guess is None else f"{1e3 * guess:.0f}",
                said,
                *(
                    f"{1e3 * measurement.parts[part]:.0f}" if part in measurement.parts else "-"
                    for part in (FACTOR_MESSAGES, INVERSION, INVERSE_MESSAGES, "gradients")
                ),
            ]
        )
    return table


def _order(measurement: LearnerStep) -> tuple[int, float, str]:
    return (
        measurement.network.learners,
        measurement.network.bandwidth or math.inf,
        measurement.algorithm,
    )


# Claims.


def claims(found: list[LearnerStep]) -> list[Claim]:
    """K1, K2, K3 and K6."""
    return [k1(found), k2(found), k3(found), k6()]


def k1(found: list[LearnerStep]) -> Claim:
    """SPD-KFAC is 10 to 35 % faster than the better of D and MPD."""
    told = [
        gain(
            min(sum(PUBLISHED[name][other]) for other in ("d", "mpd")), sum(PUBLISHED[name]["spd"])
        )
        for name in PUBLISHED
    ]
    quoted = f"published bars: {_quoted(told)}"
    made = [
        gain(
            min(predicted(name, other).seconds for other in ("d", "mpd")),
            predicted(name, "spd").seconds,
        )
        for name in networks()
    ]
    seen = [
        (gain(min(own["D-KFAC"].seconds, own["MPD-KFAC"].seconds), own["SPD-KFAC"].seconds), own)
        for own in _settings(found)
    ]
    ids = sorted(one.row["id"] for _, own in seen for one in own.values())
    return Claim(
        "K1",
        f"SPD-KFAC is 10 to 35 % faster than the better of D- and MPD-KFAC ({quoted}).",
        [
            Effect("predicted, 64 GPUs: % gained, lower edge", GAIN, None, made, each="network"),
            Effect("predicted, 64 GPUs: % gained, upper edge", None, MOST, made, each="network"),
            Effect(
                "measured here, a setting each: % gained, lower edge",
                GAIN,
                None,
                [value for value, _ in seen],
                ids,
                each="setting",
            ),
        ],
    )


def _quoted(told: list[float]) -> str:
    return ", ".join(
        f"{TITLES[name]} {value:.0f} %" for name, value in zip(PUBLISHED, told, strict=True)
    )


def _settings(found: list[LearnerStep]) -> list[dict[str, LearnerStep]]:
    """D, MPD and SPD of every network that has all three."""
    by: dict[object, dict[str, LearnerStep]] = {}
    for measurement in found:
        if measurement.algorithm in ("D-KFAC", "MPD-KFAC", "SPD-KFAC"):
            by.setdefault(measurement.network, {})[measurement.algorithm] = measurement
    return [own for own in by.values() if len(own) == 3]


def k2(found: list[LearnerStep]) -> Claim:
    """Pipelined fusion exposes less communication than any other."""
    effects = []
    for fusion, text in FUSIONS.items():
        if fusion == "pipelined":
            continue
        made = [
            _saved(
                fused(name, fusion).parts[FACTOR_MESSAGES],
                fused(name, "pipelined").parts[FACTOR_MESSAGES],
            )
            for name in networks()
        ]
        pairs = _fusions(found, fusion)
        effects += [
            Effect(
                f"predicted: % of exposed messages saved over {text}",
                0.0,
                None,
                made,
                each="network",
            ),
            Effect(
                f"measured here: % of the step saved over {text}",
                0.0,
                None,
                [_saved(other.seconds, own.seconds) for other, own in pairs],
                sorted(one.row["id"] for pair in pairs for one in pair),
                each="setting",
            ),
        ]
    told = [
        _saved(min(after, layer, threshold) - computing, pipelined - computing)
        for computing, after, layer, threshold, pipelined in (
            spd_kfac.PIPELINING[name] for name in PUBLISHED
        )
    ]
    return Claim(
        "K2",
        "Pipelined fusion exposes less communication than layer by layer, by threshold, and "
        f"none (published, saved over the best of these: {_quoted(told)}).",
        effects,
    )


def _saved(other: float, own: float) -> float:
    return 100 * (1 - own / other) if other else 0.0


def _fusions(found: list[LearnerStep], fusion: str) -> list[tuple[LearnerStep, LearnerStep]]:
    """(with this fusion, pipelined) of every network, inverted everywhere."""
    by = {
        (measurement.network, measurement.fusion): measurement
        for measurement in found
        if measurement.kfac and measurement.placement == "everywhere"
    }
    return [
        (one, by[network, "pipelined"])
        for (network, kind), one in by.items()
        if kind == fusion and (network, "pipelined") in by
    ]


def k3(found: list[LearnerStep]) -> Claim:
    """Balanced placement beats inverting everywhere and spread."""
    effects = []
    for algorithm, text in PLACES.items():
        if text == "balanced":
            continue
        made = [
            _saved(_inverting(predicted(name, algorithm)), _inverting(predicted(name, "d+balance")))
            for name in networks()
        ]
        seen = [(own[NAMES[algorithm]], own["SPD-KFAC"]) for own in _settings(found)]
        effects += [
            Effect(
                f"{kind}: % of inversion and its messages saved over {text}",
                0.0,
                None,
                values,
                ids,
                each=each,
            )
            for kind, each, values, ids in (
                ("predicted", "network", made, []),
                (
                    "measured here",
                    "setting",
                    [_saved(_exposed(a), _exposed(b)) for a, b in seen],
                    sorted(one.row["id"] for pair in seen for one in pair),
                ),
            )
        ]
    slower = [
        TITLES[name]
        for name in PUBLISHED
        if sum(PUBLISHED[name]["mpd"]) > sum(PUBLISHED[name]["d"])
    ]
    told = [
        _saved(min(everywhere, spread), balanced)
        for everywhere, _, spread, _, balanced in (spd_kfac.PLACEMENT[name] for name in PUBLISHED)
    ]
    return Claim(
        "K3",
        "Balanced placement beats inverting everywhere and spread (published, saved over the "
        f"better: {_quoted(told)}; on {', '.join(slower)} spread is slower than everywhere).",
        effects,
    )


def _exposed(measurement: LearnerStep) -> float:
    return measurement.parts[INVERSION] + measurement.parts[INVERSE_MESSAGES]


def k6() -> Claim:
    """Ours: with rarer updates there is little to gain."""
    told = [_gained(name, USUAL) for name in PUBLISHED]
    made = [_predicted_gain(name, USUAL) for name in networks()]
    edges = [f"{TITLES[name]} {edge(name)}" for name in networks()]
    return Claim(
        "K6",
        f"With factors and inverses new every {USUAL} iterations smart parallelism gains less "
        f"than {LITTLE:g} % over the better of D and MPD (predicted to fall below it above an "
        f"interval of {', '.join(edges)}; published bars, thinned out to every {USUAL}: "
        f"{_quoted(told)}).",
        [Effect(f"predicted, every {USUAL}: % gained", None, LITTLE, made, each="network")],
    )


def _gained(name: str, interval: int) -> float:
    """From the published bars: what K-FAC adds to S-SGD's parts comes every so many iterations."""
    sgd = sum(PUBLISHED[name]["d"][:2])
    means = {one: sgd + (sum(PUBLISHED[name][one]) - sgd) / interval for one in THREE}
    return gain(min(means["d"], means["mpd"]), means["spd"])


@lru_cache
def _predicted_gain(name: str, interval: int) -> float:
    means = {
        one: sum(average(at(name).work, at(name).cluster, one, interval, interval).values())
        for one in THREE
    }
    return gain(min(means["d"], means["mpd"]), means["spd"])


def edge(name: str) -> int:
    """The last update interval at which SPD-KFAC is predicted to gain at least 5 %; 0 if it never
    does.
    """
    low, high = 0, 1024
    if _predicted_gain(name, 1) < LITTLE:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _predicted_gain(name, middle) >= LITTLE else (low, middle)
    return low


# Figures.


def _stack(
    axis: Axes, places: list[float], bars: list[list[float]], labels: bool, **more: Any
) -> None:
    bottom = [0.0] * len(bars)
    for turn, part in enumerate(STACK):
        heights = [bar[turn] for bar in bars]
        axis.bar(
            places, heights, bottom=bottom, color=INK[turn], label=part if labels else None, **more
        )
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]


@styled
def breakdown() -> Figure:
    """Iterations of 64 GPUs by part (exposed seconds): left bar published, right bar (pale)
    predicted.
    """
    names = networks()
    figure, axes = plt.subplots(
        1, len(names), figsize=(2 * COLUMN, 2.8), sharey=True, squeeze=False
    )
    for turn, (axis, name) in enumerate(zip(axes[0], names, strict=True)):
        _stack(
            axis,
            [place - 0.2 for place in range(3)],
            [list(PUBLISHED[name][one]) for one in THREE],
            not turn,
            width=0.38,
        )
        _stack(
            axis,
            [place + 0.2 for place in range(3)],
            [[predicted(name, one).parts[part] for part in STACK] for one in THREE],
            False,
            width=0.38,
            alpha=0.5,
        )
        axis.set(title=TITLES[name], xticks=range(3))
        axis.set_xticklabels([one.upper() for one in THREE])
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("seconds an iteration")
    legend(figure, *axes[0, 0].get_legend_handles_labels())
    return figure


def _pairs(
    columns: list[str],
    told: Callable[[str], list[float]],
    made: Callable[[str], list[float]],
    what: str,
) -> Figure:
    names = networks()
    figure, axes = plt.subplots(
        1, len(names), figsize=(2 * COLUMN, 2.3), sharey=True, squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        places = range(len(columns))
        axis.bar(
            [place - 0.2 for place in places], told(name), 0.38, color=INK[0], label="published"
        )
        axis.bar(
            [place + 0.2 for place in places], made(name), 0.38, color=INK[4], label="predicted"
        )
        axis.set(title=TITLES[name], xticks=places)
        axis.set_xticklabels(columns, rotation=30, ha="right", fontsize=6)
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel(what)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@styled
def pipelining() -> Figure:
    """Seconds of computing factors and of their exposed messages, by fusion."""
    return _pairs(
        list(FUSIONS.values()),
        lambda name: list(spd_kfac.PIPELINING[name][1:]),
        lambda name: [
            fused(name, one).parts[FACTORS] + fused(name, one).parts[FACTOR_MESSAGES]
            for one in FUSIONS
        ],
        "seconds",
    )


@styled
def placing() -> Figure:
    """Seconds of inverting and of exposed messages of inverses, by placement."""
    return _pairs(
        list(PLACES.values()),
        lambda name: [spd_kfac.PLACEMENT[name][turn] for turn in (0, 2, 4)],
        lambda name: [_inverting(predicted(name, one)) for one in PLACES],
        "seconds",
    )


@styled
def ablation() -> Figure:
    """Seconds of an iteration with neither, one or both of SPD-KFAC's means. Predictions are 14 to
    48 % below the published: the published fits explain a part of the messages only.
    """
    return _pairs(
        list(STEPS.values()),
        lambda name: list(spd_kfac.ABLATION[name]),
        lambda name: [predicted(name, one).seconds for one in STEPS],
        "seconds an iteration",
    )


@styled
def worth() -> Figure:
    """When smart parallelism is worth it, predicted: gain of SPD-KFAC on ResNet-50 over D and over
    MPD by bandwidth and number of GPUs (updates in every iteration), and over the better of both by
    update interval.
    """
    figure, axes = plt.subplots(1, 3, figsize=(2 * COLUMN, 2.5), width_ratios=(1, 1, 1.15))
    counts, rates = (4, 8, 16, 32, 64, 128), (1e9, 3e9, 1e10, 3e10, 1e11, 3e11)
    for axis, other in zip(axes, ("d", "mpd"), strict=False):
        grid = np.array([[_map(n, bits, other) for bits in rates] for n in counts])
        axis.imshow(grid, cmap="viridis", vmin=0, vmax=100, aspect="auto", origin="lower")
        for (row, column), value in np.ndenumerate(grid):
            axis.text(
                column,
                row,
                f"{value:.0f}",
                ha="center",
                va="center",
                fontsize=5.5,
                color="black" if value > 60 else "white",
            )
        axis.set(
            title=f"% gained over {NAMES[other]}",
            xlabel="Gbit/s",
            xticks=range(len(rates)),
            yticks=range(len(counts)),
        )
        axis.set_xticklabels([f"{bits / 1e9:g}" for bits in rates])
        axis.set_yticklabels([str(n) for n in counts])
        axis.grid(False)
    axes[0].set_ylabel("GPUs")
    for turn, name in enumerate(networks()):
        axes[2].plot(
            INTERVALS,
            [_predicted_gain(name, one) for one in INTERVALS],
            f"-{MARKS[turn]}",
            color=INK[turn],
            label=TITLES[name],
        )
    axes[2].axhline(LITTLE, color="black", lw=0.7, ls=":")
    axes[2].set(title="% gained, 64 GPUs", xlabel="update interval")
    logarithmic(axes[2].xaxis)
    axes[2].legend()
    return figure


@lru_cache
def _map(gpus: int, bandwidth: float, other: str) -> float:
    here = setting("resnet50", gpus, bandwidth=bandwidth, latency=LATENCY, collective="ring")
    return gain(seconds(here.work, here.cluster, other), seconds(here.work, here.cluster, "spd"))


@styled
def steps(found: list[LearnerStep]) -> Figure:
    """Steps of real processes on this machine by part, as measured; marks: predicted (white: what
    was fitted).
    """
    model, ordered = LearnerModel(found), sorted(found, key=_order)
    groups = list(dict.fromkeys(one.network for one in ordered))
    figure, axes = plt.subplots(
        1,
        len(groups),
        figsize=(2 * COLUMN, 3.0),
        squeeze=False,
        width_ratios=[sum(one.network == group for one in ordered) for group in groups],
    )
    for turn, (axis, group) in enumerate(zip(axes[0], groups, strict=True)):
        own = [one for one in ordered if one.network == group]
        bars = [
            [
                1e3
                * (
                    one.parts.get(part, 0.0)
                    + (part == "passes") * one.parts.get("preconditioning", 0.0)
                )
                for part in STACK
            ]
            for one in own
        ]
        _stack(axis, list(range(len(own))), bars, not turn, width=0.75)
        for place, one in enumerate(own):
            if (guess := model.step(one)) is not None:
                axis.plot(
                    place,
                    1e3 * guess,
                    "D",
                    ms=3,
                    color="black",
                    mfc="white" if model.fitted(one) else "black",
                )
        axis.set(
            title=f"{group.learners} learners,\n{rate_text(group.bandwidth)}",
            xticks=range(len(own)),
        )
        axis.set_xticklabels([_short(one) for one in own], rotation=90, fontsize=5.5)
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("ms a step")
    legend(figure, *axes[0, 0].get_legend_handles_labels())
    return figure


def _short(measurement: LearnerStep) -> str:
    if measurement.algorithm.startswith("K-FAC"):
        return f"D, {FUSIONS[measurement.fusion]}"
    return measurement.algorithm.removesuffix("-KFAC")


FIGURES: dict[str, Callable[[], Figure]] = {
    "breakdown": breakdown,
    "pipelining": pipelining,
    "placement": placing,
    "ablation": ablation,
    "worth": worth,
}


def beside(
    found: list[LearnerStep], tables_of_runs: list[Table], claims_of_runs: list[Claim]
) -> report.More:
    """What the report of a plan adds to that of its runs; `analysis/kfac.py` adds tables and claims
    of the runs.
    """
    drawn = [
        *([("steps", steps(found))] if found else []),
        *((name, draw()) for name, draw in FIGURES.items()),
    ]
    captions = {"steps": steps, **FIGURES}
    return report.More(
        [iterations(), details(), measured(found), *tables_of_runs],
        [*claims(found), *claims_of_runs],
        [
            (name, figure, " ".join((captions[name].__doc__ or "").split()))
            for name, figure in drawn
        ],
    )


def accuracy(found: list[LearnerStep]) -> str:
    """How well the measured steps were predicted, in a sentence."""
    off = [abs(error) for error in errors(found)]
    if not off:
        return "no prediction: a measurement of D-KFAC over unlimited links is missing"
    return (
        f"{len(off)} steps predicted: median error {100 * median(off):.1f} %, worst "
        f"{100 * max(off):.1f} %; {len(misordered(found, WORST))} pairs of algorithms that "
        f"differ by more than {100 * WORST:.0f} % are ordered otherwise than measured"
    )

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

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from commsweep.reporting import report
from commsweep.reporting.claim import Claim, Effect
from commsweep.reporting.style import INK, MARKS, legend, logarithmic, plt, size, styled
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
            iteration, bars = predicted(name, algorithm), PUBLISHED[name].get(algorithm)
            seconds = [iteration.parts[name] for name in STACK]
            shown = [(bars[index] if bars else None, value) for index, value in enumerate(seconds)]
            table.rows.append(
                [
                    TITLES[name],
                    NAMES[algorithm],
                    *(_both(*text) for text in shown),
                    _both(sum(bars) if bars else None, iteration.seconds),
                ]
            )
    return table


def _both(published: float | None, predicted_: float) -> str:
    return f"{'-' if published is None else f'{published:.3f}'} / {predicted_:.3f}"


def details() -> Table:
    """Fusion, placement and ablation, published and predicted."""
    table = Table(
        "ablations",
        "Exposed messages of factors by fusion, inversion with its messages by placement, and "
        "whole iterations: seconds, published / predicted",
        ["Network", "What", *TITLES_OF],
    )
    for name in networks():
        published = spd_kfac.PIPELINING[name]
        table.rows.append(
            [
                TITLES[name],
                "factor messages",
                *(
                    _both(
                        published[1 + index] - published[0],
                        fused(name, fusion).parts[FACTOR_MESSAGES],
                    )
                    for index, fusion in enumerate(FUSIONS)
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


def _inverting(iteration_: Iteration) -> float:
    return iteration_.parts[INVERSION] + iteration_.parts[INVERSE_MESSAGES]


def measured(steps_: list[LearnerStep]) -> Table:
    """Every measurement beside its prediction."""
    model = LearnerModel(steps_)
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
    for measurement in sorted(steps_, key=_order):
        guess = model.step(measurement)
        error = (
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
                error,
                *(
                    f"{1e3 * measurement.parts[name]:.0f}" if name in measurement.parts else "-"
                    for name in (FACTOR_MESSAGES, INVERSION, INVERSE_MESSAGES, "gradients")
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


def claims(steps_: list[LearnerStep]) -> list[Claim]:
    """K1, K2, K3 and K6."""
    return [k1(steps_), k2(steps_), k3(steps_), k6()]


def k1(steps_: list[LearnerStep]) -> Claim:
    """SPD-KFAC is 10 to 35 % faster than the better of D and MPD."""
    published = [
        gain(
            min(sum(PUBLISHED[name][rival]) for rival in ("d", "mpd")), sum(PUBLISHED[name]["spd"])
        )
        for name in PUBLISHED
    ]
    quoted = f"published bars: {_quoted(published)}"
    gains = [
        gain(
            min(predicted(name, rival).seconds for rival in ("d", "mpd")),
            predicted(name, "spd").seconds,
        )
        for name in networks()
    ]
    measured_gains = [
        (
            gain(
                min(setting["D-KFAC"].seconds, setting["MPD-KFAC"].seconds),
                setting["SPD-KFAC"].seconds,
            ),
            setting,
        )
        for setting in _settings(steps_)
    ]
    ids = sorted(step.row["id"] for _, setting in measured_gains for step in setting.values())
    return Claim(
        "K1",
        f"SPD-KFAC is 10 to 35 % faster than the better of D- and MPD-KFAC ({quoted}).",
        [
            Effect("predicted, 64 GPUs: % gained, lower edge", GAIN, None, gains, each="network"),
            Effect("predicted, 64 GPUs: % gained, upper edge", None, MOST, gains, each="network"),
            Effect(
                "measured here, a setting each: % gained, lower edge",
                GAIN,
                None,
                [value for value, _ in measured_gains],
                ids,
                each="setting",
            ),
        ],
    )


def _quoted(published: list[float]) -> str:
    return ", ".join(
        f"{TITLES[name]} {value:.0f} %" for name, value in zip(PUBLISHED, published, strict=True)
    )


def _settings(steps_: list[LearnerStep]) -> list[dict[str, LearnerStep]]:
    """D, MPD and SPD of every network that has all three."""
    by: dict[object, dict[str, LearnerStep]] = {}
    for measurement in steps_:
        if measurement.algorithm in ("D-KFAC", "MPD-KFAC", "SPD-KFAC"):
            by.setdefault(measurement.network, {})[measurement.algorithm] = measurement
    return [entries for entries in by.values() if len(entries) == 3]


def k2(steps_: list[LearnerStep]) -> Claim:
    """Pipelined fusion exposes less communication than any other."""
    effects = []
    for fusion, text in FUSIONS.items():
        if fusion == "pipelined":
            continue
        savings = [
            _saved(
                fused(name, fusion).parts[FACTOR_MESSAGES],
                fused(name, "pipelined").parts[FACTOR_MESSAGES],
            )
            for name in networks()
        ]
        pairs = _fusions(steps_, fusion)
        effects += [
            Effect(
                f"predicted: % of exposed messages saved over {text}",
                0.0,
                None,
                savings,
                each="network",
            ),
            Effect(
                f"measured here: % of the step saved over {text}",
                0.0,
                None,
                [_saved(rival.seconds, pipelined.seconds) for rival, pipelined in pairs],
                sorted(step.row["id"] for pair in pairs for step in pair),
                each="setting",
            ),
        ]
    published = [
        _saved(min(after, layer, threshold) - computing, pipelined - computing)
        for computing, after, layer, threshold, pipelined in (
            spd_kfac.PIPELINING[name] for name in PUBLISHED
        )
    ]
    return Claim(
        "K2",
        "Pipelined fusion exposes less communication than layer by layer, by threshold, and "
        f"none (published, saved over the best of these: {_quoted(published)}).",
        effects,
    )


def _saved(slower: float, faster: float) -> float:
    return 100 * (1 - faster / slower) if slower else 0.0


def _fusions(steps_: list[LearnerStep], fusion: str) -> list[tuple[LearnerStep, LearnerStep]]:
    """(with this fusion, pipelined) of every network, inverted everywhere."""
    by = {
        (measurement.network, measurement.fusion): measurement
        for measurement in steps_
        if measurement.kfac and measurement.placement == "everywhere"
    }
    return [
        (entries, by[network, "pipelined"])
        for (network, kind), entries in by.items()
        if kind == fusion and (network, "pipelined") in by
    ]


def k3(steps_: list[LearnerStep]) -> Claim:
    """Balanced placement beats inverting everywhere and spread."""
    effects = []
    for algorithm, text in PLACES.items():
        if text == "balanced":
            continue
        savings = [
            _saved(_inverting(predicted(name, algorithm)), _inverting(predicted(name, "d+balance")))
            for name in networks()
        ]
        pairs = [(setting[NAMES[algorithm]], setting["SPD-KFAC"]) for setting in _settings(steps_)]
        effects += [
            Effect(
                f"{kind}: % of inversion and its messages saved over {text}",
                0.0,
                None,
                values,
                ids,
                each=unit,
            )
            for kind, unit, values, ids in (
                ("predicted", "network", savings, []),
                (
                    "measured here",
                    "setting",
                    [_saved(_exposed(a), _exposed(b)) for a, b in pairs],
                    sorted(step.row["id"] for pair in pairs for step in pair),
                ),
            )
        ]
    slower = [
        TITLES[name]
        for name in PUBLISHED
        if sum(PUBLISHED[name]["mpd"]) > sum(PUBLISHED[name]["d"])
    ]
    published = [
        _saved(min(everywhere, spread), balanced)
        for everywhere, _, spread, _, balanced in (spd_kfac.PLACEMENT[name] for name in PUBLISHED)
    ]
    return Claim(
        "K3",
        "Balanced placement beats inverting everywhere and spread (published, saved over the "
        f"better: {_quoted(published)}; on {', '.join(slower)} spread is slower than everywhere).",
        effects,
    )


def _exposed(measurement: LearnerStep) -> float:
    return measurement.parts[INVERSION] + measurement.parts[INVERSE_MESSAGES]


def k6() -> Claim:
    """Ours: with rarer updates there is little to gain."""
    published = [_gained(name, USUAL) for name in PUBLISHED]
    savings = [_predicted_gain(name, USUAL) for name in networks()]
    edges = [f"{TITLES[name]} {edge(name)}" for name in networks()]
    return Claim(
        "K6",
        f"With factors and inverses new every {USUAL} iterations smart parallelism gains less "
        f"than {LITTLE:g} % over the better of D and MPD (predicted to fall below it above an "
        f"interval of {', '.join(edges)}; published bars, thinned out to every {USUAL}: "
        f"{_quoted(published)}).",
        [Effect(f"predicted, every {USUAL}: % gained", None, LITTLE, savings, each="network")],
    )


def _gained(name: str, interval: int) -> float:
    """From the published bars: what K-FAC adds to S-SGD's parts comes every so many iterations."""
    sgd = sum(PUBLISHED[name]["d"][:2])
    means = {
        algorithm: sgd + (sum(PUBLISHED[name][algorithm]) - sgd) / interval for algorithm in THREE
    }
    return gain(min(means["d"], means["mpd"]), means["spd"])


@lru_cache
def _predicted_gain(name: str, interval: int) -> float:
    means = {
        algorithm: sum(
            average(at(name).work, at(name).cluster, algorithm, interval, interval).values()
        )
        for algorithm in THREE
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
    axis: Axes, positions: list[float], bars: list[list[float]], labels: bool, **options: Any
) -> None:
    bottom = [0.0] * len(bars)
    for index, name in enumerate(STACK):
        heights = [bar[index] for bar in bars]
        axis.bar(
            positions,
            heights,
            bottom=bottom,
            color=INK[index],
            label=name if labels else None,
            **options,
        )
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]


@styled
def breakdown() -> Figure:
    """Iterations of 64 GPUs by part (exposed seconds): left bar published, right bar (pale)
    predicted.
    """
    names = networks()
    figure, axes = plt.subplots(1, len(names), figsize=size(2, 2.8), sharey=True, squeeze=False)
    for index, (axis, name) in enumerate(zip(axes[0], names, strict=True)):
        _stack(
            axis,
            [index - 0.2 for index in range(3)],
            [list(PUBLISHED[name][algorithm]) for algorithm in THREE],
            not index,
            width=0.38,
        )
        _stack(
            axis,
            [index + 0.2 for index in range(3)],
            [[predicted(name, algorithm).parts[name_] for name_ in STACK] for algorithm in THREE],
            False,
            width=0.38,
            alpha=0.5,
        )
        axis.set(title=TITLES[name], xticks=range(3))
        axis.set_xticklabels([algorithm.upper() for algorithm in THREE])
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("seconds an iteration")
    legend(figure, *axes[0, 0].get_legend_handles_labels())
    return figure


def _pairs(
    columns: list[str],
    published: Callable[[str], list[float]],
    predicted_: Callable[[str], list[float]],
    label: str,
) -> Figure:
    names = networks()
    figure, axes = plt.subplots(1, len(names), figsize=size(2, 2.3), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        positions = range(len(columns))
        axis.bar(
            [position - 0.2 for position in positions],
            published(name),
            0.38,
            color=INK[0],
            label="published",
        )
        axis.bar(
            [position + 0.2 for position in positions],
            predicted_(name),
            0.38,
            color=INK[4],
            label="predicted",
        )
        axis.set(title=TITLES[name], xticks=positions)
        axis.set_xticklabels(columns, rotation=30, ha="right", fontsize="small")
        axis.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel(label)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@styled
def pipelining() -> Figure:
    """Seconds of computing factors and of their exposed messages, by fusion."""
    return _pairs(
        list(FUSIONS.values()),
        lambda name: list(spd_kfac.PIPELINING[name][1:]),
        lambda name: [
            fused(name, fusion).parts[FACTORS] + fused(name, fusion).parts[FACTOR_MESSAGES]
            for fusion in FUSIONS
        ],
        "seconds",
    )


@styled
def placing() -> Figure:
    """Seconds of inverting and of exposed messages of inverses, by placement."""
    return _pairs(
        list(PLACES.values()),
        lambda name: [spd_kfac.PLACEMENT[name][column] for column in (0, 2, 4)],
        lambda name: [_inverting(predicted(name, placement)) for placement in PLACES],
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
        lambda name: [predicted(name, step).seconds for step in STEPS],
        "seconds an iteration",
    )


@styled
def worth() -> Figure:
    """When smart parallelism is worth it, predicted: gain of SPD-KFAC on ResNet-50 over D and over
    MPD by bandwidth and number of GPUs (updates in every iteration), and over the better of both by
    update interval.
    """
    figure, axes = plt.subplots(1, 3, figsize=size(2, 2.5), width_ratios=(1, 1, 1.15))
    counts, rates = (4, 8, 16, 32, 64, 128), (1e9, 3e9, 1e10, 3e10, 1e11, 3e11)
    for axis, rival in zip(axes, ("d", "mpd"), strict=False):
        grid = np.array([[_map(n, bits, rival) for bits in rates] for n in counts])
        axis.imshow(grid, cmap="viridis", vmin=0, vmax=100, aspect="auto", origin="lower")
        for (row, column), value in np.ndenumerate(grid):
            axis.text(
                column,
                row,
                f"{value:.0f}",
                ha="center",
                va="center",
                fontsize="small",
                color="black" if value > 60 else "white",
            )
        axis.set(
            title=f"% gained over {NAMES[rival]}",
            xlabel="Gbit/s",
            xticks=range(len(rates)),
            yticks=range(len(counts)),
        )
        axis.set_xticklabels([f"{bits / 1e9:g}" for bits in rates])
        axis.set_yticklabels([str(n) for n in counts])
        axis.grid(False)
    axes[0].set_ylabel("GPUs")
    for index, name in enumerate(networks()):
        axes[2].plot(
            INTERVALS,
            [_predicted_gain(name, interval) for interval in INTERVALS],
            f"-{MARKS[index]}",
            color=INK[index],
            label=TITLES[name],
        )
    axes[2].axhline(LITTLE, color="black", lw=0.7, ls=":")
    axes[2].set(title="% gained, 64 GPUs", xlabel="update interval")
    logarithmic(axes[2].xaxis)
    axes[2].legend()
    return figure


@lru_cache
def _map(gpus: int, bandwidth: float, rival: str) -> float:
    setting_ = setting("resnet50", gpus, bandwidth=bandwidth, latency=LATENCY, collective="ring")
    return gain(
        seconds(setting_.work, setting_.cluster, rival),
        seconds(setting_.work, setting_.cluster, "spd"),
    )


@styled
def steps(steps_: list[LearnerStep]) -> Figure:
    """Steps of real processes on this machine by part, as measured; marks: predicted (white: what
    was fitted).
    """
    model, ordered = LearnerModel(steps_), sorted(steps_, key=_order)
    groups = list(dict.fromkeys(step.network for step in ordered))
    figure, axes = plt.subplots(
        1,
        len(groups),
        figsize=size(2, 3.0),
        squeeze=False,
        width_ratios=[sum(step.network == group for step in ordered) for group in groups],
    )
    for index, (axis, group) in enumerate(zip(axes[0], groups, strict=True)):
        group_steps = [step for step in ordered if step.network == group]
        bars = [
            [
                1e3
                * (
                    step.parts.get(name, 0.0)
                    + (name == "passes") * step.parts.get("preconditioning", 0.0)
                )
                for name in STACK
            ]
            for step in group_steps
        ]
        _stack(axis, list(range(len(group_steps))), bars, not index, width=0.75)
        for position, step in enumerate(group_steps):
            if (guess := model.step(step)) is not None:
                axis.plot(
                    position,
                    1e3 * guess,
                    "D",
                    ms=3,
                    color="black",
                    mfc="white" if model.fitted(step) else "black",
                )
        axis.set(
            title=f"{group.learners} learners,\n{rate_text(group.bandwidth)}",
            xticks=range(len(group_steps)),
        )
        axis.set_xticklabels([_short(step) for step in group_steps], rotation=90, fontsize="small")
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


def additions(
    steps_: list[LearnerStep], tables_of_runs: list[Table], claims_of_runs: list[Claim]
) -> report.More:
    """Return what the report of a plan adds to that of its runs; `analysis/kfac.py` adds tables and
    claims of the runs.
    """
    drawn = [
        *([("steps", steps(steps_))] if steps_ else []),
        *((name, draw()) for name, draw in FIGURES.items()),
    ]
    captions = {"steps": steps, **FIGURES}
    return report.More(
        [iterations(), details(), measured(steps_), *tables_of_runs],
        [*claims(steps_), *claims_of_runs],
        [
            (name, figure, " ".join((captions[name].__doc__ or "").split()))
            for name, figure in drawn
        ],
    )


def accuracy(steps_: list[LearnerStep]) -> str:
    """Return how well the measured steps were predicted, in a sentence."""
    off = [abs(error) for error in errors(steps_)]
    if not off:
        return "no prediction: a measurement of D-KFAC over unlimited links is missing"
    return (
        f"{len(off)} steps predicted: median error {100 * median(off):.1f} %, worst "
        f"{100 * max(off):.1f} %; {len(misordered(steps_, WORST))} pairs of algorithms that "
        f"differ by more than {100 * WORST:.0f} % are ordered otherwise than measured"
    )

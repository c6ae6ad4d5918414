"""The report of compression over real networks: measured step times, predictions beside them, time
to a target quality.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from commsweep.errors import UserError
from commsweep.launching.grid import TUNING_SEED
from commsweep.processes import ddp, pipeline
from commsweep.registry import calibration
from commsweep.reporting import style
from commsweep.reporting.style import (
    INK,
    MARKS,
    legend,
    logarithmic,
    look,
    plot,
    plt,
    size,
    styled,
)
from commsweep.reporting.style import ends as mean_ends
from commsweep.reporting.table import Cell, Table
from commsweep.store import Row, Store
from commsweep.timing import advice, measured_learners
from commsweep.timing.measured_pipelines import (
    Machine,
    PipelineModel,
    PipelineStep,
    is_dense,
    machine_of,
    measurements,
    models,
    quality,
)
from commsweep.timing.timeline.activities import ARRIVE, ASK, HANDLE, SEND
from commsweep.timing.timeline.pipelines import (
    IDEAL,
    SCHEDULES,
    Network,
    Times,
    bandwidth_text,
    interleaved,
    latency_text,
    plan,
    rate_text,
    shares,
    step_seconds,
)

from . import late_links


@dataclass
class Made:
    """The files that were written."""

    folder: Path
    tables: list[Table]
    errors: list[float]  # of predictions over links that their model was not fitted to
    # of the same without the speed that the machine had there
    beforehand: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Return their median."""
        return median(self.errors) if self.errors else math.nan

    def record(self) -> dict[str, Any]:
        """For programs."""
        return {
            "folder": str(self.folder),
            "median_error": self.error,
            "errors": self.errors,
            "errors_beforehand": self.beforehand,
            "tables": {table.name: [table.header, *table.texts()] for table in self.tables},
        }

    def text(self) -> str:
        """For people."""
        return "\n".join(
            [
                *(table.markdown() for table in self.tables),
                self.accuracy(),
                f"written to {self.folder}",
            ]
        )

    def accuracy(self) -> str:
        """Return how far its predictions are off, at the machine's speed then and without that."""
        return accuracy_text(self.errors) + (
            "; without the speed that the machine had, which advice cannot know: "
            f"{accuracy_text(self.beforehand)}"
            if self.beforehand
            else ""
        )


def accuracy_text(errors: list[float]) -> str:
    """Return how far predictions are off, in a sentence."""
    if not errors:
        return "nothing was predicted"
    late = sorted(errors)[math.ceil(0.95 * len(errors)) - 1]
    return (
        f"{len(errors)} predictions: error {100 * median(errors):.1f} % in the median, "
        f"{100 * late:.1f} % at the 95th percentile, {100 * max(errors):.1f} % at worst"
    )


def write(
    root: str | Path,
    plan: str,
    names: list[str],
    folder: Path,
    fitted: list[str] | None = None,
) -> Made:
    """Write tables and figures of these measurements. Raises UserError where some are missing.

    fitted: measurements that the machine's constants are fitted to; those that the store has.
    """
    store = Store(root)
    rows = [store.pipeline(name).row() for name in set(names)]
    _check_complete(root, plan, sum(not row or not row["timing"] for row in rows), len(rows))
    steps_ = measurements(store, names)
    machine = machine_of(store, fitted or [])
    fits, fitted_names = models(steps_, machine), set(fitted or [])
    compared = [
        measurement
        for measurement in steps_
        if measurement.series in fits
        and measurement.network != Network()
        and measurement.row["id"] not in fitted_names
    ]
    errors = [abs(fits[step.series].measured(step) / step.seconds - 1) for step in compared]
    beforehand = [abs(fits[step.series].step(step.network) / step.seconds - 1) for step in compared]
    report = Made(
        folder,
        [steps_table(steps_, fits, fitted_names), ranks_table(compared, fits)],
        errors,
        beforehand,
    )
    try:
        metric, value, steps = quality(store, steps_)
        target = metric, value
        report.tables.insert(1, target_table(steps_, metric, value, steps))
        report.tables.append(regret_table(compared, fits, steps))
    except UserError:  # no simulation of the dense run: step times say nothing of quality
        target = steps = None
    folder.mkdir(parents=True, exist_ok=True)
    for table in report.tables:
        (folder / f"{table.name}.md").write_text(table.markdown(), encoding="utf-8")
        (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    drawn = {
        "prediction": prediction(compared, fits),
        "gantt": gantt(steps_, fits),
        "bubble": bubble(steps_, fits),
        "far": far(steps_, fits),
    }
    if any(step.schedule == "gpipe" and step.network.latency == 0 for step in steps_):
        drawn["step_time"] = step_time(steps_, fits)
        if target is not None and steps is not None:
            drawn["time_to_target"] = time_to_target(steps_, *target, steps)
    if steps is not None and late_links.compares(steps_):
        of_links = {
            step.network: f"{bandwidth_text(step.network)}\n{latency_text(step.network)}"
            for step in steps_
        }
        drawn["late"] = late_links.by_link(steps_, fits, steps, of_links)
    (folder / "errors.md").write_text(
        f"{report.accuracy()}; {_constants(machine)}\n", encoding="utf-8"
    )
    pd.DataFrame(
        [
            {
                "id": measurement.row["id"],
                "run": measurement.row["run_id"],
                "schedule": measurement.schedule,
                "stages": len(measurement.row["transport"]),
                "bandwidth": measurement.network.bandwidth,
                "latency": measurement.network.latency,
                "links": _links_text(measurement.network),
                "method": measurement.method,
                "bytes": measurement.bytes_a_step,
                "seconds": measurement.seconds,
                "quartile_1": measurement.row["timing"]["spread"][0],
                "quartile_3": measurement.row["timing"]["spread"][1],
                "steps": measurement.row["timing"]["steps"],
                "turns": " ".join(
                    f"{seconds:.6f}" for seconds in measurement.row["timing"].get("turns", [])
                ),
                "predicted": fits[measurement.series].measured(measurement)
                if measurement.series in fits
                else None,
                "beforehand": fits[measurement.series].step(measurement.network)
                if measurement.series in fits
                else None,
            }
            for measurement in sorted(steps_, key=_order)
        ]
    ).to_csv(folder / "measurements.csv", index=False)
    for name, figure_ in drawn.items():
        style.save(figure_, folder, name)
    return report


def write_learners(
    steps_: list[measured_learners.LearnerStep], folder: Path, store: Store, seeds: range
) -> Made:
    """The table of learners' steps, measured and predicted, and measurements.csv with what they are
    made of (seconds; bytes a step that all learners handed over; computed, of a core by a training
    thread; meanwhile, of that once its last message was under way; relayed, of a core by late
    links); of those that train apart, what whole trainings take and reach, where the store has
    simulations of them with these seeds.
    """
    model = measured_learners.ExchangeModel(steps_)
    rows, errors, data = [], [], []
    for measurement in sorted(
        steps_,
        key=lambda step: (
            step.network.learners,
            step.network.latency,
            step.network.bandwidth or math.inf,
            step.seconds,
        ),
    ):
        guess, fitted = model.step(measurement), measurement.network.unlimited
        data.append(
            {
                "id": measurement.row["id"],
                "run": measurement.row["run_id"],
                **asdict(measurement.network),
                "method": measurement.method,
                "bytes": measurement.row["gradients"]["up"],
                "seconds": measurement.seconds,
                "quartile_1": measurement.timing["spread"][0],
                "quartile_3": measurement.timing["spread"][1],
                "steps": measurement.timing["steps"],
                "exposed": measurement.timing["parts"]["gradients"],
                **{
                    name: measurement.timing.get(name)
                    for name in ("computed", "waited", "meanwhile", "relayed")
                },
                **{
                    kind: sum(sent.get(kind, 0) for sent in measurement.row["transport"])
                    / measurement.row["steps"]
                    for kind in ("gradients", "lengths", "statistics")
                },
                "cores": measurement.row["cores"],
                "predicted": guess,
            }
        )
        error = (guess or math.nan) / measurement.seconds - 1
        errors += [] if fitted or guess is None else [abs(error)]
        rows.append(
            [
                str(measurement.network.learners),
                rate_text(measurement.network.bandwidth),
                f"{1e3 * measurement.network.latency:g} ms",
                measurement.method,
                f"{measurement.row['gradients']['up']:,.0f}",
                f"{1e3 * measurement.seconds:.0f}",
                "-" if guess is None else f"{1e3 * guess:.0f}",
                "-" if guess is None else "fitted" if fitted else f"{100 * error:+.0f} %",
            ]
        )
    table = Table(
        "learners",
        "Milliseconds a step of learners, measured over real links and predicted",
        [
            "learners",
            "bandwidth",
            "latency",
            "method",
            "bytes up a step",
            "measured ms",
            "predicted ms",
            "error",
        ],
        rows,
    )
    report = Made(folder, [table], errors)
    folder.mkdir(parents=True, exist_ok=True)
    if any(measurement.row["run"]["grad"].get("outer") for measurement in steps_):
        ends = _ends(steps_, model, store, seeds)
        report.tables.append(_endings(ends))
        if ends:
            style.save(endings(ends), folder, "endings")
    for table in report.tables:
        (folder / f"{table.name}.md").write_text(table.markdown(), encoding="utf-8")
        (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    (folder / "errors.md").write_text(f"{accuracy_text(errors)}\n", encoding="utf-8")
    pd.DataFrame(data).to_csv(folder / "measurements.csv", index=False)
    return report


@dataclass(frozen=True)
class End:
    """A whole training over a network: what it takes and reaches."""

    network: measured_learners.LearnerNetwork
    method: str
    seconds: float
    predicted: float | None  # None: the prediction begins from it, or there is none
    scores: tuple[float, ...]  # test perplexity, of each seed


def _ends(
    steps_: list[measured_learners.LearnerStep],
    model: measured_learners.ExchangeModel,
    store: Store,
    seeds: range,
) -> list[End]:
    rows_by_run: dict[str, list[Row]] = {}
    for row in store.rows():
        if (
            row["status"] == "finished"
            and row["run"]["seed"] in seeds
            and "test_on_ppl" in row["metrics"]
        ):
            rows_by_run.setdefault(_but_seed(row["run"]), []).append(row)
    ends = []
    for measurement in steps_:
        rows = rows_by_run.get(_but_seed(measurement.row["run"]), [])
        if rows:
            steps = rows[0]["steps"]
            ends.append(
                End(
                    measurement.network,
                    measurement.method,
                    steps * measurement.seconds,
                    None
                    if measurement.network.unlimited or (step := model.step(measurement)) is None
                    else steps * step,
                    tuple(row["metrics"]["test_on_ppl"] for row in rows),
                )
            )
    return sorted(
        ends,
        key=lambda end: (end.network.bandwidth or math.inf, end.network.latency, end.seconds),
    )


def _but_seed(run: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in run.items() if key != "seed"}, sort_keys=True)


def _endings(ends: list[End]) -> Table:
    """Seconds of whole trainings, and what they reach."""
    return Table(
        "endings",
        "Whole trainings over these links: measured seconds a step times their steps, the same "
        "predicted, and test perplexity (mean ± sample standard deviation over seeds, simulated)",
        ["bandwidth", "latency", "method", "seconds", "predicted", "perplexity", "seeds"],
        [
            [
                rate_text(end.network.bandwidth),
                f"{1e3 * end.network.latency:g} ms",
                end.method,
                f"{end.seconds:.1f}",
                "-" if end.predicted is None else f"{end.predicted:.1f}",
                f"{mean(end.scores):.2f}"
                + (f" ± {stdev(end.scores):.2f}" if len(end.scores) > 1 else ""),
                str(len(end.scores)),
            ]
            for end in ends
        ],
    )


@styled
def endings(ends: list[End]) -> Figure:
    """Test perplexity at the end against the measured seconds of the whole training, a panel for
    each link. Bars: 95 % intervals over seeds.
    """
    networks = list(dict.fromkeys(end.network for end in ends))
    figure, axes = plt.subplots(
        1, len(networks), figsize=size(2, 3.4), sharex=True, sharey=True, squeeze=False
    )
    for ax, network in zip(axes[0], networks, strict=True):
        for end in ends:
            if end.network == network:
                mark = look(end.method, ls="none", ms=4.5)
                plot(ax, [end.seconds], [mean_ends(end.scores)], end.method, **mark)
        ax.set(
            xlabel="seconds",
            title=rate_text(network.bandwidth)
            + (f", {1e3 * network.latency:g} ms" if network.latency else ""),
        )
        logarithmic(ax.xaxis)
    axes[0][0].set_ylabel("test perplexity at the end")
    legend(figure)
    return figure


def _constants(machine: Machine) -> str:
    if machine == Machine():
        return "the machine was not calibrated for slow links"
    cold = machine.cold["F"]
    return (
        f"of the machine: after waits beyond {1e3 * cold.after:.0f} ms a forward takes "
        f"{cold.slope:.2g} s longer a second waited, at most {1e3 * cold.most:.1f} ms; handling "
        f"a message at most {1 + machine.wake.most:.1f} times as long; a link with a latency "
        f"{1e3 * machine.crossing:.1f} ms beyond that"
    )


def ranks_table(compared: list[PipelineStep], fits: dict[tuple[str, str], PipelineModel]) -> Table:
    """Rank correlation (Spearman) of predicted and measured step times of the methods that share a
    link, and how many of the pairs of methods that are far enough apart to choose by were predicted
    in their order; where measurements were taken in turns, how much the turns agree with each
    other, which is all that one measurement can tell.
    """
    turns = {step.row["id"]: step.row["timing"].get("turns", []) for step in compared}
    several = any(len(turns) > 1 for turns in turns.values())
    table = Table(
        "ranks",
        "Methods ranked by step time, predicted against measured (Spearman's correlation)",
        [
            "schedule",
            "stages",
            "bandwidth",
            "latency",
            "methods",
            "correlation",
            "pairs apart",
            "in order",
            *(["turns with each other"] if several else []),
        ],
    )
    groups: dict[tuple[Any, ...], list[PipelineStep]] = {}
    for step in sorted(compared, key=_order):
        groups.setdefault((step.schedule, len(step.row["transport"]), step.network), []).append(
            step
        )
    counts = []
    for (schedule, stages, network), group in groups.items():
        if len(group) > 2:
            times = [
                [value(step) for step in group]
                for value in (
                    lambda step: step.seconds,
                    lambda step: fits[step.series].measured(step),
                )
            ]
            counts.append(in_order(*times))
            table.rows.append(
                [
                    schedule,
                    str(stages),
                    bandwidth_text(network),
                    latency_text(network),
                    str(len(group)),
                    ranked(*times),
                    *map(str, counts[-1]),
                    *([agreement([turns[step.row["id"]] for step in group])] if several else []),
                ]
            )
    if counts:
        table.rows.append(
            [
                "all",
                *[""] * 5,
                *(str(sum(column)) for column in zip(*counts, strict=True)),
                *([""] if several else []),
            ]
        )
    return table


def agreement(turns: list[list[float]]) -> str:
    """Mean rank correlation between any two turns of the same measurements, [methods][turns]
    seconds; "" of one.
    """
    pairs = [_correlation(*pair) for pair in combinations(zip(*turns, strict=True), 2)]
    return f"{mean(pairs):.2f}" if pairs else ""


def ranked(measured: list[float], predicted: list[float]) -> str:
    """Rank correlation; times within `ALIKE` of each other are none apart."""
    if max(measured) < (1 + ALIKE) * min(measured):
        return (
            "all alike"
            if max(predicted) < (1 + ALIKE) * min(predicted)
            else "alike, predicted apart"
        )
    return f"{_correlation(measured, predicted):.2f}"


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; pandas' own imports scipy.stats, which takes seconds."""
    return pd.Series(a).rank().corr(pd.Series(b).rank())


def in_order(measured: list[float], predicted: list[float]) -> tuple[int, int]:
    """(pairs whose measured times are more than `advice.APART` apart, those of them that are
    predicted in the same order).
    """
    pairs = [
        (a, b)
        for a, b in combinations(zip(measured, predicted, strict=True), 2)
        if max(a[0], b[0]) > (1 + advice.APART) * min(a[0], b[0])
    ]
    return len(pairs), sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)


ALIKE = 0.02  # of a step: less is within what a measurement repeats to


def _order(measurement: PipelineStep) -> tuple[Any, ...]:
    return (
        measurement.schedule != "gpipe",
        measurement.network.latency,
        measurement.network.bandwidth or math.inf,
        repr(measurement.network.links),
        measurement.seconds,
    )


def steps_table(
    steps_: list[PipelineStep],
    fits: dict[tuple[str, str], PipelineModel],
    fitted_names: Collection[str] = (),
) -> Table:
    """Milliseconds a step of every measurement, beside what is predicted."""
    rows = []
    for measurement in sorted(steps_, key=_order):
        model = fits.get(measurement.series)
        guess = model.measured(measurement) if model else None
        basis = model is not None and (
            model.base is measurement or measurement.row["id"] in fitted_names
        )
        rows.append(
            [
                measurement.schedule,
                str(len(measurement.row["transport"])),
                bandwidth_text(measurement.network),
                latency_text(measurement.network),
                measurement.method,
                f"{measurement.bytes_a_step:,.0f}",
                f"{1e3 * measurement.seconds:.0f}",
                "-" if guess is None else f"{1e3 * guess:.0f}",
                "fitted"
                if basis
                else "-"
                if guess is None
                else f"{100 * (guess / measurement.seconds - 1):+.0f} %",
            ]
        )
    return Table(
        "steps",
        "Milliseconds a step, measured over real links and predicted by the timeline",
        [
            "schedule",
            "stages",
            "bandwidth",
            "latency",
            "method",
            "bytes a step",
            "measured ms",
            "predicted ms",
            "error",
        ],
        rows,
    )


def target_table(
    steps_: list[PipelineStep], metric: str, value: float, steps: dict[str, int | None]
) -> Table:
    """Seconds that every measurement needs to the target quality."""
    rows = []
    for measurement in sorted(steps_, key=_order):
        n = steps[measurement.row["run_id"]]
        rows.append(
            [
                measurement.schedule,
                bandwidth_text(measurement.network),
                latency_text(measurement.network),
                measurement.method,
                "not reached" if n is None else str(n),
                "-" if n is None else f"{n * measurement.seconds:.1f}",
            ]
        )
    shown = f"{100 * value:.1f} % accuracy" if metric.endswith("acc") else f"perplexity {value:.3f}"
    return Table(
        "target",
        f"Seconds to {shown} on the test set: steps of the simulation, times the measured step",
        ["schedule", "bandwidth", "latency", "method", "steps", "seconds"],
        rows,
    )


def regret_table(
    compared: list[PipelineStep],
    fits: dict[tuple[str, str], PipelineModel],
    steps: dict[str, int | None],
) -> Table:
    """Return what advice costs over links that it has not seen, against the best of what was
    measured there.
    """
    regrets = advice.regrets(compared, fits, steps)
    lost = sorted(share for _, _, share in regrets)
    summary = (
        f"median {100 * median(lost):.1f} %, worst {100 * lost[-1]:.1f} %"
        if lost
        else "nothing to choose from"
    )
    rows: list[list[Cell | str]] = [
        [
            str(len(chosen.row["transport"])),
            bandwidth_text(chosen.network),
            latency_text(chosen.network),
            *(f"{choice.method}, {choice.schedule}" for choice in (chosen, best)),
            f"{100 * share:.1f} %",
        ]
        for chosen, best, share in sorted(regrets, key=lambda item: _order(item[0]))
    ]
    return Table(
        "regret",
        f"Time to the target that the advised setting loses to the best measured one: {summary}",
        ["stages", "bandwidth", "latency", "advised", "best", "lost"],
        rows,
    )


# Figures.


def _inks(steps_: list[PipelineStep]) -> dict[str, int]:
    return {
        method: index
        for index, method in enumerate(dict.fromkeys(measurement.method for measurement in steps_))
    }


MICROBATCHES = 16  # of what is extrapolated
FAST = 1e10  # where "unlimited" is drawn


@styled
def step_time(steps_: list[PipelineStep], fits: dict[tuple[str, str], PipelineModel]) -> Figure:
    """Step time against bandwidth: measured marks, predicted lines; GPipe without added latency."""
    figure, axes = plt.subplots(figsize=size(1, 2.6))
    shown = [
        measurement
        for measurement in steps_
        if measurement.schedule == "gpipe" and measurement.network.latency == 0
    ]
    for method, ink_index in _inks(steps_).items():
        method_steps = [step for step in shown if step.method == method]
        axes.plot(
            [step.network.bandwidth or FAST for step in method_steps],
            [1e3 * step.seconds for step in method_steps],
            MARKS[ink_index],
            color=INK[ink_index],
            label=method,
        )
        model = next((fits[step.series] for step in method_steps if step.series in fits), None)
        if model is not None:
            rates = [10 ** (6 + 0.25 * i) for i in range(13)]
            axes.plot(
                rates,
                [1e3 * model.step(Network(bits)) for bits in rates],
                color=INK[ink_index],
                alpha=0.6,
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bandwidth of a link, bit/s (rightmost: unlimited)",
        ylabel="ms a step",
        title="measured (marks) and predicted (lines)",
    )
    axes.legend()
    return figure


@styled
def time_to_target(
    steps_: list[PipelineStep], metric: str, value: float, steps: dict[str, int | None]
) -> Figure:
    """Seconds until the target quality against bandwidth; methods that do not reach it are
    named.
    """
    figure, axes = plt.subplots(figsize=size(1, 2.8))
    missed = []
    for method, ink_index in _inks(steps_).items():
        method_steps = sorted(
            (
                measurement
                for measurement in steps_
                if measurement.method == method
                and measurement.schedule == "gpipe"
                and measurement.network.latency == 0
            ),
            key=lambda step: step.network.bandwidth or FAST,
        )
        if not method_steps:
            continue
        n = steps[method_steps[0].row["run_id"]]
        if n is None:
            missed.append(method)
            continue
        axes.plot(
            [step.network.bandwidth or FAST for step in method_steps],
            [n * step.seconds for step in method_steps],
            f"-{MARKS[ink_index]}",
            color=INK[ink_index],
            label=f"{method}, {n} steps",
        )
    shown = f"{100 * value:.1f} %" if metric.endswith("acc") else f"perplexity {value:.2f}"
    logarithmic(axes.xaxis, axes.yaxis)
    ticks = sorted({step.network.bandwidth or FAST for step in steps_})
    names = ["unlimited" if tick == FAST else f"{tick / 1e6:g}" for tick in ticks]
    axes.set_xticks(ticks, names)
    axes.set(
        xlabel="bandwidth of a link (Mbit/s)",
        ylabel="seconds (measured steps)",
        title=f"time to {shown}" + (f"\nnot reached: {', '.join(missed)}" if missed else ""),
    )
    legend(figure)
    return figure


@styled
def prediction(compared: list[PipelineStep], fits: dict[tuple[str, str], PipelineModel]) -> Figure:
    """Predicted against measured step time; the band is 15 %."""
    figure, axes = plt.subplots(figsize=size(1, 2.6))
    for index, (schedule, latency) in enumerate(
        sorted({(step.schedule, step.network.latency) for step in compared})
    ):
        group_steps = [
            step
            for step in compared
            if (step.schedule, step.network.latency) == (schedule, latency)
        ]
        axes.plot(
            [1e3 * step.seconds for step in group_steps],
            [1e3 * fits[step.series].measured(step) for step in group_steps],
            MARKS[index % 9],
            color=INK[index % 7],
            label=f"{schedule}, {1e3 * latency:g} ms latency",
        )
    ends = (
        [1e3 * limit(step.seconds for step in compared) for limit in (min, max)]
        if compared
        else [1.0, 1.0]
    )
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(
        ends,
        [0.85 * x for x in ends],
        [1.15 * x for x in ends],
        color="grey",
        alpha=0.2,
        label="within 15 %",
    )
    axes.set(xlabel="measured ms a step", ylabel="predicted ms a step")
    logarithmic(axes.xaxis, axes.yaxis)
    axes.legend(fontsize="small", loc="upper left")
    return figure


COLOURS = {"F": INK[0], "B": INK[1], "U": INK[2], "send": INK[4]}


@styled
def gantt(steps_: list[PipelineStep], fits: dict[tuple[str, str], PipelineModel]) -> Figure:
    """Draw a step of the slowest measured dense run: what the processes did, and what the timeline
    says of it.
    """
    chosen = max(
        (
            measurement
            for measurement in steps_
            if measurement.series in fits
            and measurement.row["timing"]["gantt"]
            and measurement.network.latency == 0
        ),
        key=lambda step: (is_dense(step.row), step.seconds),
    )
    figure, axes = plt.subplots(2, 1, figsize=size(2, 3.0), sharex=True)
    for stage, spans in enumerate(chosen.row["timing"]["gantt"]):
        for kind, _, start, stop in spans:
            axes[0].barh(
                stage, 1e3 * (stop - start), left=1e3 * start, color=COLOURS[kind], height=0.7
            )
    for sender, receiver, sent, came in passages(chosen.row["timing"].get("messages", [])):
        step = 0.35 if receiver > sender else -0.35
        axes[0].plot(
            [1e3 * sent, 1e3 * came],
            [sender + step, receiver - step],
            color=COLOURS["send"],
            lw=0.8,
        )
    model, devices = fits[chosen.series], len(chosen.row["timing"]["tasks"])
    plan_ = plan(
        chosen.orders,
        model.times(),
        model.machine.network(chosen.network),
        3,
        chosen.engine,
    )
    spans = plan_.run()
    begin = spans[plan_.ends[1][0]].stop
    for activity, span in zip(plan_.activities, spans, strict=True):
        if activity.step != 2 or activity.kind in (ARRIVE, ASK, HANDLE):
            continue
        message = activity.kind == SEND
        assert activity.device is not None  # what is drawn happens on a device
        back = activity.target is not None and activity.target < activity.device
        if message and not activity.uses:
            continue
        axes[1].barh(
            activity.device + (0.42 if back else -0.42) * message,
            1e3 * (span.stop - span.start),
            left=1e3 * (span.start - begin),
            color=COLOURS["send" if message else activity.kind[0].upper()],
            height=0.12 if message else 0.6,
        )
    titles = (
        "measured (lines: a message from send to use)",
        "predicted (thin: messages on a link)",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(
            ylabel="stage",
            title=f"{title}: {chosen.method}, {chosen.schedule}, {bandwidth_text(chosen.network)}",
            yticks=range(devices),
        )
        axis.invert_yaxis()
        axis.grid(False)
    axes[1].set_xlabel("ms since the step began at stage 0")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, ["forward", "backward", "update", "message"], loc="outside right center")
    return figure


def passages(messages: list[list[list[Any]]]) -> list[tuple[int, int, float, float]]:
    """(sender, receiver, when sent, when taken up) of every message whose both ends lie in the
    step.
    """
    sent = {
        (stage, direction, chunk): when
        for stage, message in enumerate(messages)
        for kind, direction, chunk, when in message
        if kind == "sent"
    }
    passages = []
    for stage, message in enumerate(messages):
        for kind, direction, chunk, when in message:
            sender = stage - 1 if direction == "fwd" else stage + 1
            if (
                kind == "came"
                and (began := sent.get((sender, direction, chunk))) is not None
                and began <= when
            ):
                passages.append((sender, stage, began, when))
    return passages


@styled
def bubble(steps_: list[PipelineStep], fits: dict[tuple[str, str], PipelineModel]) -> Figure:
    """Shares of the devices' time: busy, bubble, exposed communication; predicted, each stage on
    cores of its own.
    """
    figure, axes = plt.subplots(1, 2, figsize=size(2, 2.4), sharey=True)
    dense, squeezed = _pair(fits)
    for axis, model in zip(axes, (dense, squeezed), strict=True):
        times = _unlimited(model)
        devices, bars = len(times.forward), []
        for schedule, make in SCHEDULES.items():
            if schedule == "interleaved":
                continue  # it needs twice the stages; the figure of far links has it
            for bits in (1e7, 1e8, 1e9):
                shares_ = shares(plan(make(devices, 8), times, Network(bits), 2, IDEAL), devices)
                bars.append((f"{schedule}\n{rate_text(bits)}", shares_))
        bottom = [0.0] * len(bars)
        for name, ink in (("busy", INK[2]), ("bubble", INK[5]), ("exposed", INK[1])):
            heights = [shares[name] for _, shares in bars]
            axis.bar(
                range(len(bars)),
                heights,
                bottom=bottom,
                color=ink,
                label={"exposed": "exposed communication"}.get(name, name),
            )
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axis.set(title=f"predicted: {model.base.method}, 8 microbatches", xticks=range(len(bars)))
        axis.set_xticklabels([label for label, _ in bars], rotation=90, fontsize="small")
        axis.grid(False)
    axes[0].set_ylabel("share of the devices' time")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


@styled
def far(steps_: list[PipelineStep], fits: dict[tuple[str, str], PipelineModel]) -> Figure:
    """Predicted beyond the measured: up to 256 stages like the measured ones, over links between
    sites.
    """
    figure, axes = plt.subplots(1, 2, figsize=size(2, 3.4))
    counts = (4, 16, 64, 256)
    sites = {
        "one site (10 Gbit/s, 0.1 ms)": Network(1e10, 1e-4),
        "one country (1 Gbit/s, 10 ms)": Network(1e9, 0.01),
        "two continents (100 Mbit/s, 100 ms)": Network(1e8, 0.1),
    }
    for index, (name, network) in enumerate(sites.items()):
        for line, model in zip(("-", "--"), _pair(fits), strict=True):
            axes[0].plot(
                counts,
                [_repeated(model, n, network, "1f1b") for n in counts],
                line,
                color=INK[index],
                marker=MARKS[index],
                mfc="white" if line == "--" else None,
                label=f"{name}, {model.base.method}",
            )
    axes[0].set(
        xscale="log",
        yscale="log",
        xlabel=f"stages ({MICROBATCHES} microbatches)",
        ylabel="seconds a step",
        title="predicted: 1F1B, stages like the measured",
    )
    axes[0].set_xticks(counts, [str(n) for n in counts])
    axes[0].xaxis.set_minor_locator(NullLocator())
    latencies = [1e-4 * 10 ** (0.75 * i) for i in range(5)]
    # Schedules whose curves coincide stay visible: each later one is thinner, and has marks of its
    # own.
    for index, schedule in enumerate(SCHEDULES):
        axes[1].plot(
            [1e3 * latency for latency in latencies],
            [
                1e3 * _repeated(_pair(fits)[0], 8, Network(1e9, latency), schedule)
                for latency in latencies
            ],
            color=INK[index],
            label=schedule,
            lw=3.0 - 0.8 * index,
            marker=MARKS[index],
            markevery=(index % 2, 2),
            alpha=0.85,
            zorder=2 + index,
        )
    axes[1].set(
        xscale="log",
        yscale="log",
        xlabel="latency, ms",
        ylabel="ms a step",
        title=f"predicted: 8 devices, {MICROBATCHES} microbatches, 1 Gbit/s",
    )
    axes[1].legend()
    handles, labels = axes[0].get_legend_handles_labels()
    legend(figure, handles, labels)
    return figure


def _pair(fits: dict[tuple[str, str], PipelineModel]) -> tuple[PipelineModel, PipelineModel]:
    """The dense run's model, and that of the one with the fewest bytes."""
    models = [model for (_, schedule), model in fits.items() if schedule == "gpipe"] or list(
        fits.values()
    )
    return (
        next((model for model in models if is_dense(model.base.row)), models[0]),
        min(models, key=lambda model: sum(model.base.times().fwd_bytes)),
    )


def _unlimited(model: PipelineModel) -> Times:
    """Each stage on cores of its own; what handling a message takes is part of the stage's work."""
    times = model.base.times()
    return replace(
        times,
        cores=0,
        forward=[seconds + model.handling for seconds in times.forward],
        backward=[seconds + model.handling for seconds in times.backward],
    )


@lru_cache(maxsize=256)
def _cached(key: tuple[Any, ...], n: int, network: Network, schedule: str) -> float:
    forward, backward, nbytes = key
    v = 2 if schedule == "interleaved" else 1
    times = Times(
        [forward / v] * n * v,
        [backward / v] * n * v,
        [],
        [nbytes] * (n * v - 1),
        [nbytes] * (n * v - 1),
    )
    if schedule == "interleaved":
        return step_seconds(interleaved(n, MICROBATCHES, v), times, network, IDEAL, steps=2)
    return step_seconds(SCHEDULES[schedule](n, MICROBATCHES), times, network, IDEAL, steps=2)


def _repeated(model: PipelineModel, n: int, network: Network, schedule: str) -> float:
    """Seconds a step of n devices, each like the mean measured stage, with the largest measured
    message between.
    """
    times = _unlimited(model)
    mean = (
        sum(times.forward) / len(times.forward),
        sum(times.backward) / len(times.backward),
        max(times.fwd_bytes),
    )
    return _cached(mean, n, network, schedule)


def _links_text(network: Network) -> str:
    """Return bandwidth and latency of links that differ, or nothing."""
    if not network.links:
        return ""
    return f"{bandwidth_text(network)}, {latency_text(network)}"


def stages_report(store: Path, plan: str, measurements: list[Any], folder: Path) -> Made:
    """Write the report of a plan of pipelines. Raises UserError where measurements are missing."""
    store_ = Store(store)
    names, fitted = (
        [pipeline.folder_of(store_, *measurement).path.name for measurement in taken]
        for taken in (measurements, calibration())
    )
    return write(store, plan, names, folder, fitted)


def learner_steps(
    store: Path, plan: str, measurements: list[Any]
) -> list[measured_learners.LearnerStep]:
    """Return a plan's measured steps of learners. Raises UserError where some are missing."""
    store_ = Store(store)
    names = [ddp.folder_of(store_, *measurement).path.name for measurement in measurements]
    steps = measured_learners.measurements(store_, names)
    _check_complete(store, plan, len(names) - len(steps), len(names))
    return steps


def _check_complete(store: str | Path, plan: str, missing: int, measurements_wanted: int) -> None:
    if missing:
        raise UserError(
            f"{missing} of {measurements_wanted} measurements are missing in '{store}'; "
            f"commsweep links {plan} --only measure takes them (Linux, root)"
        )


def learners_report(store: Path, plan: str, measurements: list[Any], folder: Path) -> Made:
    """Write the report of a plan of learners. Raises UserError where measurements are missing."""
    steps = learner_steps(store, plan, measurements)
    return write_learners(steps, folder, Store(store), range(TUNING_SEED))


PROVIDES = {"report of stages": stages_report, "report of learners": learners_report}

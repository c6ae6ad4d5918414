"""Gradients a step late over links with a latency."""

from __future__ import annotations

import json

from matplotlib.figure import Figure

from commsweep.reporting.style import INK, MARKS, legend, logarithmic, plt, size, styled
from commsweep.timing.measured_pipelines import PipelineModel, PipelineStep, late
from commsweep.timing.timeline.pipelines import Network


def compares(steps_: list[PipelineStep]) -> bool:
    """Return whether both are among the measurements: gradients in time, and late ones."""
    return len({late(step.row["run"]) for step in steps_}) == 2


@styled
def by_link(
    steps_: list[PipelineStep],
    fits: dict[tuple[str, str], PipelineModel],
    steps: dict[str, int | None],
    names: dict[Network, str],
) -> Figure:
    """Step time, and seconds until the target is reached, by link: in time (full lines) and late
    (broken ones). `steps`: of a run until the target; None where it does not reach it. `names`: of
    the links.
    """
    figure, axes = plt.subplots(1, 2, figsize=size(2, 2.8))
    networks = sorted({step.network for step in steps_}, key=lambda it: (it.latency, -it.bandwidth))
    # a method has one colour, in time and late
    alike = {
        step.method: json.dumps(step.row["run"] | {"delay": None}, sort_keys=True)
        for step in steps_
    }
    inks = {settings: index for index, settings in enumerate(dict.fromkeys(alike.values()))}
    for method in dict.fromkeys(step.method for step in steps_):
        mine = sorted(
            (step for step in steps_ if step.method == method),
            key=lambda step: networks.index(step.network),
        )
        delayed = late(mine[0].row["run"])
        ink_index = inks[alike[method]]
        style = {
            "color": INK[ink_index],
            "marker": MARKS[ink_index],
            "mfc": "white" if delayed else None,
            "linestyle": "--" if delayed else "-",
            "label": method,
        }
        positions = [networks.index(step.network) for step in mine]
        axes[0].plot(positions, [1e3 * step.seconds for step in mine], **style)
        predicted = [1e3 * fits[step.series].measured(step) for step in mine if step.series in fits]
        if len(predicted) == len(positions):
            axes[0].plot(positions, predicted, "_", color=INK[ink_index], ms=9)
        needed = steps.get(mine[0].row["run_id"])
        if needed is not None:
            axes[1].plot(positions, [needed * step.seconds for step in mine], **style)
    for axis, label in zip(axes, ("ms a step", "seconds until the target"), strict=True):
        logarithmic(axis.yaxis)
        axis.set_xticks(range(len(networks)), [names[network] for network in networks])
        axis.set(ylabel=label, xlabel="link")
    axes[0].set_title("measured (marks) and predicted (dashes)")
    axes[1].set_title("methods that reach it")
    legend(figure, *axes[0].get_legend_handles_labels())
    return figure

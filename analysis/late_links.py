"""What gradients a step late buy on links with a latency."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from commsweep.reporting.figure import COLUMN, INK, MARKS, legend, logarithmic, styled
from commsweep.timing.measured_pipelines import PipelineModel, PipelineStep, late
from commsweep.timing.timeline.pipelines import Network


def asked(found: list[PipelineStep]) -> bool:
    """Whether both are among the measurements: gradients in time, and late ones."""
    return len({late(one.row["run"]) for one in found}) == 2


@styled
def by_link(
    found: list[PipelineStep],
    fits: dict[tuple[str, str], PipelineModel],
    steps: dict[str, int | None],
    names: dict[Network, str],
) -> Figure:
    """Step time, and seconds until the target is reached, by link: in time (full lines) and late
    (broken ones). `steps`: of a run until the target; None where it does not reach it. `names`: of
    the links.
    """
    figure, axes = plt.subplots(1, 2, figsize=(2 * COLUMN, 2.8))
    networks = sorted({one.network for one in found}, key=lambda it: (it.latency, -it.bandwidth))
    # a method has one colour, in time and late
    alike = {
        one.method: json.dumps(one.row["run"] | {"delay": None}, sort_keys=True) for one in found
    }
    inks = {settings: turn for turn, settings in enumerate(dict.fromkeys(alike.values()))}
    for method in dict.fromkeys(one.method for one in found):
        mine = sorted(
            (one for one in found if one.method == method),
            key=lambda one: networks.index(one.network),
        )
        delayed = late(mine[0].row["run"])
        turn = inks[alike[method]]
        style = {
            "color": INK[turn],
            "marker": MARKS[turn],
            "mfc": "white" if delayed else None,
            "linestyle": "--" if delayed else "-",
            "label": method,
        }
        places = [networks.index(one.network) for one in mine]
        axes[0].plot(places, [1e3 * one.seconds for one in mine], **style)
        predicted = [1e3 * fits[one.series].measured(one) for one in mine if one.series in fits]
        if len(predicted) == len(places):
            axes[0].plot(places, predicted, "_", color=INK[turn], ms=9)
        needed = steps.get(mine[0].row["run_id"])
        if needed is not None:
            axes[1].plot(places, [needed * one.seconds for one in mine], **style)
    for axis, label in zip(axes, ("ms a step", "seconds until the target"), strict=True):
        logarithmic(axis.yaxis)
        axis.set_xticks(range(len(networks)), [names[network] for network in networks])
        axis.set(ylabel=label, xlabel="link")
    axes[0].set_title("measured (marks) and predicted (dashes)")
    axes[1].set_title("methods that reach it")
    legend(figure, *axes[0].get_legend_handles_labels())
    return figure

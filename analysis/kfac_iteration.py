"""An iteration of a network on a cluster, predicted by algorithm: a table of its parts, a figure
of what happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from commsweep.errors import UserError
from commsweep.reporting.style import INK, drawing, legend, plt, size
from commsweep.reporting.table import Table
from commsweep.timing.timeline.iterations import NAMES, SENDS, STACK, Iteration, average, planned

from .spd_kfac import GPUS, PUBLISHED, Setting, setting

# parts on average, and an iteration in which all is new
Found = dict[str, tuple[dict[str, float], Iteration]]
ENDS = 1e-9


def table(
    setting: Setting,
    algorithms: list[str],
    interval: int = 1,
    small: int | None = None,
    published: bool = False,
) -> tuple[Table, Found]:
    """Exposed seconds of every part; published: with the first author's bars, where there are
    any.
    """
    gpus = setting.cluster.gpus
    thinned = f", factors and inverses every {interval}" if interval > 1 else ""
    table = Table(
        "iteration",
        f"{setting.title}, {gpus} GPUs{thinned}: seconds an iteration, exposed, predicted",
        ["algorithm", "", *STACK, "all"],
    )
    parts_by_name: Found = {}
    for name in algorithms:
        seconds_by = average(setting.work, setting.cluster, name, interval, interval, small)
        parts_by_name[name] = seconds_by, planned(setting.work, setting.cluster, name, small)[1]
        table.rows.append([NAMES[name], "predicted", *_shown([seconds_by[name] for name in STACK])])
        if published and name in PUBLISHED.get(setting.name, {}):
            table.rows.append(
                [NAMES[name], "published", *_shown(list(PUBLISHED[setting.name][name]))]
            )
    return table, parts_by_name


@dataclass(frozen=True)
class Prediction:
    """An iteration of a network on a cluster, predicted for some algorithms."""

    setting: Setting
    table: Table
    parts_by_name: Found

    def figure(self) -> Figure:
        """Return the figure of what happens when."""
        return timelines(self.setting, self.parts_by_name)

    def record(self) -> dict[str, dict[str, float | dict[str, float]]]:
        """Return seconds by algorithm, and by part, for programs."""
        return {
            name: {"seconds": sum(seconds_by.values()), "parts": seconds_by}
            for name, (seconds_by, _) in self.parts_by_name.items()
        }


def predict(
    network: str,
    algorithms: list[str],
    gpus: int = GPUS,
    interval: int = 1,
    small: int | None = None,
    published: bool = False,
    **cluster: Any,
) -> Prediction:
    """Predict one iteration; `cluster`: what `setting` knows of messages, inversion and batch.

    Raises UserError when the network is unknown, or has fewer layers than DP-KFAC needs owners.
    """
    setting_ = setting(network, gpus, **cluster)
    layers = len(setting_.work.factors) // 2
    if "dp" in algorithms and gpus > layers:
        raise UserError(
            f"--gpus {gpus}: DP-KFAC has an owner for each layer, and {network} has {layers} "
            "layers; use fewer GPUs (with --bandwidth), or another algorithm"
        )
    return Prediction(setting_, *table(setting_, algorithms, interval, small, published))


def _shown(values: list[float]) -> list[str]:
    return [f"{value:.4f}" for value in (*values, sum(values))]


def timelines(setting: Setting, parts_by_name: Found) -> Figure:
    """Return what the first GPU computes and what the network carries in an iteration in which all
    is new, by algorithm.
    """
    with drawing():
        figure, axes = plt.subplots(
            len(parts_by_name),
            1,
            figsize=size(2, 0.7 + 0.75 * len(parts_by_name)),
            sharex=True,
            squeeze=False,
        )
        for axis, (name, (_, iteration)) in zip(axes[:, 0], parts_by_name.items(), strict=True):
            for kind, ink in zip(STACK, INK, strict=False):
                spans = [
                    (span, activity)
                    for span, activity in zip(iteration.spans, iteration.activities, strict=True)
                    if activity.kind == kind and activity.seconds > ENDS
                ]
                for row, sends in enumerate((False, True)):
                    bars = [
                        (span.start, span.stop - span.start)
                        for span, activity in spans
                        if (kind in SENDS) == sends and (sends or not activity.device)
                    ]
                    axis.broken_barh(bars, (row - 0.4, 0.8), color=ink, lw=0)
            axis.set(yticks=(0, 1), title=f"{NAMES[name]}: {iteration.seconds:.3f} s")
            axis.set_yticklabels(["GPU 0", "network"])
            axis.invert_yaxis()
            axis.grid(axis="y", visible=False)
        axes[-1, 0].set_xlabel(f"seconds (predicted; {setting.title}, {setting.cluster.gpus} GPUs)")
        handles = [Rectangle((0, 0), 1, 1, color=ink) for ink in INK[: len(STACK)]]
        legend(figure, handles, STACK)
    return figure


PROVIDES = {"iteration": predict}

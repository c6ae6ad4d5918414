"""One iteration of a network on a cluster, predicted by algorithm: a table of its parts, a figure
of what happens.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from commsweep.reporting.figure import COLUMN, INK, STYLE, legend
from commsweep.reporting.table import Table
from commsweep.timing.spd_kfac import PUBLISHED, Setting
from commsweep.timing.timeline.iterations import NAMES, SENDS, STACK, Iteration, average, planned

# parts on average, and an iteration in which all is new
Found = dict[str, tuple[dict[str, float], Iteration]]
ENDS = 1e-9


def table(
    setting: Setting,
    algorithms: list[str],
    every: int = 1,
    small: int | None = None,
    published: bool = False,
) -> tuple[Table, Found]:
    """Exposed seconds of every part; published: with the first author's bars, where there are
    any.
    """
    gpus = setting.cluster.gpus
    thinned = f", factors and inverses every {every}" if every > 1 else ""
    made = Table(
        "iteration",
        f"{setting.title}, {gpus} GPUs{thinned}: seconds an iteration, exposed, predicted",
        ["algorithm", "", *STACK, "all"],
    )
    found: Found = {}
    for name in algorithms:
        parts = average(setting.work, setting.cluster, name, every, every, small)
        found[name] = parts, planned(setting.work, setting.cluster, name, small)[1]
        made.rows.append([NAMES[name], "predicted", *_shown([parts[part] for part in STACK])])
        if published and name in PUBLISHED.get(setting.name, {}):
            made.rows.append(
                [NAMES[name], "published", *_shown(list(PUBLISHED[setting.name][name]))]
            )
    return made, found


def _shown(values: list[float]) -> list[str]:
    return [f"{value:.4f}" for value in (*values, sum(values))]


def timelines(setting: Setting, found: Found) -> Figure:
    """What the first GPU computes and what the network carries in an iteration in which all is new,
    by algorithm.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(found), 1, figsize=(2 * COLUMN, 0.7 + 0.75 * len(found)), sharex=True, squeeze=False
        )
        for axis, (name, (_, made)) in zip(axes[:, 0], found.items(), strict=True):
            for part, ink in zip(STACK, INK, strict=False):
                spans = [
                    (span, activity)
                    for span, activity in zip(made.spans, made.activities, strict=True)
                    if activity.kind == part and activity.seconds > ENDS
                ]
                for row, sends in enumerate((False, True)):
                    bars = [
                        (span.start, span.stop - span.start)
                        for span, one in spans
                        if (part in SENDS) == sends and (sends or not one.device)
                    ]
                    axis.broken_barh(bars, (row - 0.4, 0.8), color=ink, lw=0)
            axis.set(yticks=(0, 1), title=f"{NAMES[name]}: {made.seconds:.3f} s")
            axis.set_yticklabels(["GPU 0", "network"])
            axis.invert_yaxis()
            axis.grid(axis="y", visible=False)
        axes[-1, 0].set_xlabel(f"seconds (predicted; {setting.title}, {setting.cluster.gpus} GPUs)")
        handles = [Rectangle((0, 0), 1, 1, color=ink) for ink in INK[: len(STACK)]]
        legend(figure, handles, STACK)
    return figure

"""The figures, pure functions of rows and curves: one column wide, colour-blind safe, readable in grey."""

from __future__ import annotations

import io
import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same rows give the same bytes
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from commsweep.analysis.tables import OFF, ON

COLUMN = 3.4  # inches, one column of a two-column page
INK = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
STYLE = {
    "font.size": 7.5, "axes.titlesize": 8, "legend.fontsize": 6.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.5,
    "lines.linewidth": 1.2, "lines.markersize": 3.5, "legend.frameon": False, "figure.dpi": 200,
    "pdf.fonttype": 42, "svg.hashsalt": "commsweep", "figure.constrained_layout.use": True,
}
BOTH = "fwd.compressor.ratio", "bwd.compressor.ratio"


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG, PDF and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "pdf", "svg")]
    with plt.rc_context(STYLE):  # the salt of SVG names is read when the file is written
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def tag(figure: Figure, alt: str, width: int = 620) -> str:
    """A figure as an HTML tag that holds its PNG, for a page."""
    out = io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(out, format="png")
    return f'<img alt="{alt}" width="{width}" src="data:image/png;base64,{b64encode(out.getvalue()).decode()}"/>'


def convergence(frame: pd.DataFrame, curves: pd.DataFrame) -> Figure:
    """Test accuracy over epochs for dense and each TopK level, inference with and without compression."""
    arms = _topk_arms(frame)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(COLUMN, 2.2), sharey=True)
        for axis, metric, title in zip(axes, (ON, OFF), ("compressed inference", "dense inference"), strict=True):
            for place, (label, ids) in enumerate(arms.items()):
                _band(axis, curves[curves.id.isin(ids)], metric, label, place)
            axis.set(title=title, xlabel="epoch")
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes[0].set_ylabel("test accuracy (%)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, title="TopK, both ways")
    return figure


def bytes_against_error(frame: pd.DataFrame) -> Figure:
    """Mean test error (compressed inference) against bytes sent; the line joins what nothing dominates."""
    points = summary(frame)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(COLUMN, 3.1))
        for place, (family, part) in enumerate(points.groupby("family", sort=False)):
            error, spread = 100 * (1 - part["mean"]), 100 * part["sd"].fillna(0)
            # On a logarithmic axis a lower whisker below zero would have no end: stop it at half the error.
            whiskers = [np.minimum(spread, error / 2), spread]
            axis.errorbar(100 * part["bytes.ratio"], error, yerr=whiskers, label=family, ls="none",
                          marker=MARKS[place % 9], color=INK[place % 7], elinewidth=0.7, zorder=3)
        front = pareto(points)
        axis.plot(100 * front["bytes.ratio"], 100 * (1 - front["mean"]), color="0.5", lw=1, zorder=1,
                  label="Pareto front")
        axis.set(xscale="log", yscale="log", xlabel="bytes sent, activations and gradients (% of dense)",
                 ylabel="test error (%)")
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter(lambda value, _: f"{value:g}")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def on_off(frame: pd.DataFrame) -> Figure:
    """TopK and its feedbacks: accuracy with compression on and off at inference, joined by a line."""
    both = summary(frame, ON).merge(summary(frame, OFF), on="method", suffixes=("_on", "_off"))
    both = both[~both.family_on.str.startswith("min-max")].iloc[::-1]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(COLUMN, 0.6 + 0.17 * len(both)))
        height = range(len(both))
        axis.hlines(height, 100 * both.mean_on, 100 * both.mean_off, color="0.7", lw=1, zorder=1)
        for side, label, place in (("on", "compressed inference", 0), ("off", "dense inference", 1)):
            axis.errorbar(100 * both[f"mean_{side}"], height, xerr=100 * both[f"sd_{side}"].fillna(0), ls="none",
                          marker=MARKS[place], color=INK[place], elinewidth=0.7, label=label, zorder=3 - place)
        axis.set_yticks(list(height), both.method)
        axis.set(xlabel="test accuracy (%)")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def summary(frame: pd.DataFrame, metric: str = ON) -> pd.DataFrame:
    """Mean, spread, n and bytes of every finished setting; `family` is its method without the level."""
    done = frame[frame.status == "finished"]
    out = done.groupby("method", sort=False).agg(
        mean=(metric, "mean"), sd=(metric, "std"), n=(metric, "size"), **{"bytes.ratio": ("bytes.ratio", "mean")})
    return out.reset_index().assign(family=lambda part: part.method.map(family))


def family(method: str) -> str:
    """The method without its level."""
    if "min-max" in method:
        return "min-max, group scale" if "group" in method else "min-max"
    activations = method.split(" / ")[0]
    return activations.split(" + ")[0] + " + TopK" if " + " in activations else activations.split(" ")[0]


def pareto(points: pd.DataFrame, worst: float = -1.0) -> pd.DataFrame:
    """The points with no other at least as good in both mean and bytes.ratio, by bytes."""
    ordered = points.sort_values(["bytes.ratio", "mean"], ascending=[True, False])
    return ordered[ordered["mean"] > ordered["mean"].cummax().shift(fill_value=worst)]


def _topk_arms(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Run ids of dense and of each plain TopK level, mildest first."""
    plain = frame[(frame["fwd.feedback.kind"] == "none") & (frame["bwd.feedback.kind"] == "none")]
    arms = {"dense": list(plain[plain.method == "dense"].id)}
    if BOTH[0] in plain:
        equal = plain[(plain[BOTH[0]] == plain[BOTH[1]]) & plain["fwd.compressor.kind"].str.startswith("topk")]
        for ratio in sorted(equal[BOTH[0]].unique(), reverse=True):
            arms[f"{100 * ratio:g} %"] = list(equal[equal[BOTH[0]] == ratio].id)
    return arms


def _band(axis: Axes, curves: pd.DataFrame, metric: str, label: str, place: int) -> None:
    if curves.empty:
        return
    by_epoch = curves.groupby("epoch")[metric].agg(["mean", "std"]).fillna(0) * 100
    axis.plot(by_epoch.index, by_epoch["mean"], color=INK[place % 7], marker=MARKS[place % 9], label=label)
    axis.fill_between(by_epoch.index, by_epoch["mean"] - by_epoch["std"], by_epoch["mean"] + by_epoch["std"],
                      color=INK[place % 7], alpha=0.15, lw=0)


def logarithmic(*axes: Axis) -> None:
    """Logarithmic axes with plain numbers at 1, 2 and 5; left linear where nothing is drawn."""
    for axis in axes:
        if np.isfinite(axis.get_minpos()):
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())


IMAGES: dict[str, Callable[..., Figure]] = {
    "convergence": convergence,
    "bytes": lambda frame, curves: bytes_against_error(frame),
    "on_off": lambda frame, curves: on_off(frame),
}

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

from commsweep.analysis.results import distinct
from commsweep.analysis.tables import OFF, ON, Cell, cell, kinds, levels, quantization, with_feedback

COLUMN = 3.4  # inches, one column of a two-column page
INK = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
STYLE = {
    "font.size": 7.5, "axes.titlesize": 8, "legend.fontsize": 6.5, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.5,
    "lines.linewidth": 1.2, "lines.markersize": 3.5, "legend.frameon": False, "figure.dpi": 200,
    "pdf.fonttype": 42, "svg.hashsalt": "commsweep", "figure.constrained_layout.use": True,
}
MOST = 7  # settings in one figure of curves


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
    return picture(out.getvalue(), alt, width)


def picture(png: bytes, alt: str, width: int = 620) -> str:
    """A PNG as an HTML tag that holds it."""
    return f'<img alt="{alt}" width="{width}" src="data:image/png;base64,{b64encode(png).decode()}"/>'


def loss(frame: pd.DataFrame, curves: pd.DataFrame) -> Figure | None:
    """Training loss (dotted) and test loss with compressed inference against steps, seconds of training and bytes sent.

    Mean over seeds; of many settings, the dense one and those that end best. Bands: ± one sample standard deviation.
    """
    done = frame[frame.status == "finished"]
    if curves.empty or "test_on_loss" not in curves:
        return None
    last = done.groupby("method", sort=False)["test_on_loss"].mean().sort_values()
    plain = done[(done["fwd.compressor.kind"] == "none") & (done["bwd.compressor.kind"] == "none")].method
    shown = list(dict.fromkeys([*plain.unique()[:1], *last.index]))[:MOST]
    axes_of = [("step", "steps", 1.0), ("seconds", "seconds of training", 1.0), ("bytes", "MB sent", 1e-6)]
    axes_of = [one for one in axes_of if one[0] in curves and curves[one[0]].fillna(0).max() > 0]
    if not axes_of or "train_loss" not in curves:
        return None
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(axes_of), figsize=(2 * COLUMN, 2.7), sharey=True, squeeze=False)
        for axis, (column, title, unit) in zip(axes[0], axes_of, strict=True):
            for place, method in enumerate(shown):
                own = curves[curves.id.isin(done[done.method == method].id)]
                if own.empty:
                    continue
                mean = own.groupby("epoch")[[column, "train_loss", "test_on_loss"]].mean()
                spread = own.groupby("epoch")["test_on_loss"].std().fillna(0)
                x, ink = unit * mean[column], INK[place % 7]
                axis.plot(x, mean["test_on_loss"], color=ink, marker=MARKS[place % 9], ms=2.5, label=method)
                axis.plot(x, mean["train_loss"], color=ink, ls=":", lw=0.8)
                axis.fill_between(x, (mean["test_on_loss"] - spread).clip(lower=mean["test_on_loss"] / 2),
                                  mean["test_on_loss"] + spread, color=ink, alpha=0.12, lw=0)
            axis.set(xlabel=title, yscale="log")
            if column == "bytes" and curves[column].max() > 0:
                axis.set_xscale("symlog", linthresh=max(1e-3, unit * curves[column][curves[column] > 0].min()))
        axes[0, 0].set_ylabel("loss")
        logarithmic(axes[0, 0].yaxis)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        short = all(len(label) < 45 for label in labels)
        figure.legend(handles, labels, loc="outside lower center", ncols=2 if short else 1)
    return figure


def boundaries(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Bytes a step at every boundary, activations forward (full) and gradients backward (pale); settings by total.

    Means over seeds. Of more than thirty settings, an even choice of thirty is shown.
    """
    done = frame[frame.status == "finished"]
    every = [name.removeprefix("boundary.") for name in frame if name.startswith("boundary.")]
    cuts = list(dict.fromkeys(name.rpartition(".")[0] for name in every))
    columns = [f"boundary.{cut}.{side}" for cut in cuts for side in ("fwd", "bwd")]
    if not columns:
        return None
    mean = done.groupby("method", sort=False)[columns].mean().fillna(0)
    mean = mean[mean.sum(axis=1) > 0].loc[lambda part: part.sum(axis=1).sort_values(ascending=False).index]
    if mean.empty:
        return None
    mean = mean.iloc[:: -(-len(mean) // 30)]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(1.5 * COLUMN, 0.9 + 0.16 * len(mean)))
        left = np.zeros(len(mean))
        for place, cut in enumerate(cuts):
            for side, alpha in (("fwd", 1.0), ("bwd", 0.45)):
                part = mean[f"boundary.{cut}.{side}"].to_numpy() / 1e3
                axis.barh(range(len(mean)), part, left=left, color=INK[place % 7], alpha=alpha, height=0.75,
                          label=f"{cut}, {'activations' if side == 'fwd' else 'gradients'}")
                left += part
        axis.set_yticks(range(len(mean)), list(mean.index), fontsize=5.5)
        axis.set(xlabel="kB a step")
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncols=max(2, len(cuts)))
    return figure


def quality(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test accuracy against K, plain TopK and with each feedback, inference with and without compression.

    Bands: ± one sample standard deviation over seeds; the dashed line is the uncompressed run.
    """
    names = {"none": "plain", "ef": "EF", "ef_mixed": "EF-mixed", "ef21": "EF21", "aqsgd": "AQ-SGD"}
    lines = {label: found for kind, label in names.items()
             if (found := levels(frame[with_feedback(frame, kind, "none" if kind == "aqsgd" else kind)]))}
    if not lines:
        return None
    dense = frame[kinds(frame, "none", "none") & (frame.status == "finished")]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(2 * COLUMN, 2.4), sharey=True)
        for axis, metric, title in zip(axes, (ON, OFF), ("compressed inference", "dense inference"), strict=True):
            for place, (label, found) in enumerate(lines.items()):
                series: dict[str, list[tuple[float, Cell]]] = {}
                for text, rows in found:
                    if (one := cell(rows, metric)).values:
                        number, _, more = text.partition(" %")
                        series.setdefault(label + more, []).append((float(number), one))
                for text, points in series.items():
                    k, mean, spread = (np.array(one) for one in zip(
                        *((k, 100 * one.mean, 100 * (one.sd or 0.0)) for k, one in sorted(points, key=lambda p: p[0])),
                        strict=True))
                    axis.plot(k, mean, marker=MARKS[place % 9], color=INK[place % 7], label=text)
                    axis.fill_between(k, mean - spread, mean + spread, color=INK[place % 7], alpha=0.15, lw=0)
            if len(dense):
                axis.axhline(100 * dense[metric].mean(), color="0.4", lw=1, ls="--", label="uncompressed")
            axis.set(title=title, xlabel="K, both ways (% of entries kept)")
            logarithmic(axis.xaxis)
        axes[0].set_ylabel("test accuracy (%)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def bits(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Test accuracy (%) of min-max codes by bits forward and backward, one panel a scale; inference compressed.

    Means over seeds, under them ± one sample standard deviation.
    """
    grids = [table for table in quantization(frame) if table.name.endswith("_on") and len(table.rows) > 1]
    if not grids:
        return None
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(1, len(grids), figsize=(COLUMN * len(grids), 2.2), squeeze=False)
        cells = [one for table in grids for row in table.rows for one in row if isinstance(one, Cell)]
        every = [one.mean for one in cells if one.values]
        for axis, table in zip(axes[0], grids, strict=True):
            means = np.array([[one.mean if isinstance(one, Cell) and one.values else np.nan for one in row[1:]]
                              for row in table.rows])
            axis.imshow(means, cmap="viridis", vmin=min(every), vmax=max(every), aspect="auto")
            for y, row in enumerate(table.rows):
                for x, one in enumerate(row[1:]):
                    if isinstance(one, Cell):
                        dark = bool(one.values) and one.mean < (min(every) + max(every)) / 2
                        axis.text(x, y, one.text().replace(" ± ", "\n± "), ha="center", va="center", fontsize=5.5,
                                  color="white" if dark else "black")
            axis.set_xticks(range(len(table.header) - 1), table.header[1:])
            axis.set_yticks(range(len(table.rows)), [str(row[0]) for row in table.rows])
            axis.set(xlabel="gradients", ylabel="activations", title=table.title.split(", ")[1])
    return figure


def convergence(frame: pd.DataFrame, curves: pd.DataFrame) -> Figure | None:
    """Test accuracy over epochs for dense and each TopK level, inference with and without compression.

    Bands: ± one sample standard deviation over seeds.
    """
    arms = _topk_arms(frame)
    if curves.empty or ON not in curves or len(arms) < 2:
        return None
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


def bytes_against_error(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Mean test error (compressed inference) against bytes sent; the line joins what nothing dominates.

    Numbers are K in percent, or bits forward / backward. Bars: ± one sample standard deviation over seeds.
    """
    points = summary(frame)
    if points.empty:
        return None
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(1.5 * COLUMN, 3.9))
        for place, (family, part) in enumerate(points.groupby("family", sort=False)):
            error, spread = 100 * (1 - part["mean"]), 100 * part["sd"].fillna(0)
            # On a logarithmic axis a lower whisker below zero would have no end: stop it at half the error.
            whiskers = [np.minimum(spread, error / 2), spread]
            axis.errorbar(100 * part["bytes.ratio"], error, yerr=whiskers, label=family, ls="none",
                          marker=MARKS[place % 9], color=INK[place % 7], elinewidth=0.5, zorder=3)
            for x, y, method in zip(100 * part["bytes.ratio"], error, part["method"], strict=True):
                axis.annotate(level(method), (x, y), xytext=(3, 2), textcoords="offset points", fontsize=4.5,
                              color=INK[place % 7], zorder=4)
        front = pareto(points)
        axis.plot(100 * front["bytes.ratio"], 100 * (1 - front["mean"]), color="0.5", lw=1, zorder=1,
                  label="Pareto front")
        axis.set(xlabel="bytes sent, activations and gradients (% of dense)", ylabel="test error (%)")
        logarithmic(axis.xaxis, axis.yaxis)
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def level(method: str) -> str:
    """A method's K or bits, for a mark: "10" or "4/8"."""
    parts = [part.partition(" (")[0] for part in method.split(" / ")]
    found = [next((word for word, unit in zip(part.split(), [*part.split()[1:], ""], strict=True)
                   if unit.startswith(("%", "bit"))), "") for part in parts]
    return "/".join(dict.fromkeys(one for one in found if one))


def on_off(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """TopK and its feedbacks: accuracy with compression on and off at inference, joined by a line.

    Bars: ± one sample standard deviation over seeds.
    """
    both = summary(frame, ON).merge(summary(frame, OFF), on="method", suffixes=("_on", "_off"))
    both = both[~both.family_on.str.startswith("min-max")].iloc[::-1]
    if both.empty:
        return None
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
    if metric not in done:
        return pd.DataFrame(columns=["method", "mean", "sd", "n", "bytes.ratio", "family"])
    out = done[done[metric].notna()].groupby("method", sort=False).agg(
        mean=(metric, "mean"), sd=(metric, "std"), n=(metric, "size"), **{"bytes.ratio": ("bytes.ratio", "mean")})
    return out.reset_index().assign(family=lambda part: part.method.map(family))


def family(method: str) -> str:
    """The method without its level."""
    method = method.partition(" (")[0]
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
    plain = frame[with_feedback(frame, "none", "none")]
    arms = [*distinct(plain[kinds(plain, "none", "none")], "dense"), *levels(plain)]
    return {label: list(rows.id) for label, rows in arms if len(rows)}


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


Draw = Callable[[pd.DataFrame, pd.DataFrame], Figure | None]
GENERAL: dict[str, Draw] = {"loss": loss, "boundaries": boundaries}
IMAGES: dict[str, Draw] = {"convergence": convergence, "bytes": bytes_against_error, "on_off": on_off,
                           "quality": quality, "bits": bits}

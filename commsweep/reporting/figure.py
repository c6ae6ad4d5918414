"""Figures, pure functions of rows and curves: one column wide, colour-blind safe, readable in
grey.
"""

from __future__ import annotations

import io
import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import Any

os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same rows give the same bytes
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.style.core import STYLE_BLACKLIST
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from commsweep.reporting.words import legible

COLUMN = 3.4  # inches, one column of a two-column page
INK = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
# Of a user's own matplotlibrc nothing is taken: a figure is a function of the rows.
STYLE: Any = {
    name: value for name, value in matplotlib.rcParamsDefault.items() if name not in STYLE_BLACKLIST
} | {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "legend.fontsize": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "figure.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "commsweep",
    "figure.constrained_layout.use": True,
}
MOST = 5  # settings in one figure of curves
NAMED = 8  # settings with a name in one figure of points
# A method keeps its mark and colour over all figures: the first word of a family, or a kind.
LOOKS = {
    "dense": ("*", "#000000"),
    "plain": ("o", INK[0]),
    "topk": ("o", INK[0]),
    "ef": ("s", INK[1]),
    "ef21": ("^", INK[2]),
    "aqsgd": ("D", INK[3]),
    "efmixed": ("P", INK[5]),
    "minmax": ("v", INK[4]),
    "uniform": ("v", INK[4]),
    "randomk": ("D", INK[3]),
    "tern": ("P", INK[5]),
    "terngrad": ("P", INK[5]),
    "sign": ("<", INK[1]),
    "qsgd": ("X", "#7F7F7F"),
}


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A drawing function that draws in the style of all figures."""

    @wraps(draw)
    def drawn(*args: Any) -> Figure:
        with plt.rc_context(STYLE):
            return draw(*args)

    return drawn


# For a second method of a family in one figure.
SPARE = [(mark, ink) for mark in ("p", "d", "h", "8") for ink in (*INK[2:6], *INK[:2])]


def look(name: str, index: int) -> dict[str, Any]:
    """Mark and colour of a method: those it has in every figure, else those of its place."""
    word = name.lower().split(" ")[0].replace("-", "").replace("_", "")
    mark, ink = LOOKS.get(word, (MARKS[index % 9], INK[index % 7]))
    return {"marker": mark, "color": ink}


def scatter(
    axis: Axes, points: pd.DataFrame, front: pd.DataFrame, keep: Iterable[str] = ()
) -> None:
    """Points with bars, and names for at most `NAMED` of them: of more, dense, those on the front
    and those of `keep`. The others are grey and share one name.

    points: name, x, y, low, high (lengths of the two whiskers); front: those of them on the front.
    """
    names = list(dict.fromkeys(points["name"]))
    drawn_names = names if len(names) <= NAMED else [name for name in names if name in set(keep)]
    dense = [name for name in names if name == "dense"]
    named = list(dict.fromkeys([*dense, *front["name"], *drawn_names]))[:NAMED]
    used: list[dict[str, Any]] = []
    unnamed = points[~points["name"].isin(named)]
    for index, name in enumerate([None, *named]):
        points_ = unnamed if name is None else points[points["name"] == name]
        if points_.empty:
            continue
        how: dict[str, Any] = {"marker": "o", "color": "0.75"}
        if name is not None:
            styles = [look(name, index - 1), *({"marker": m, "color": c} for m, c in SPARE)]
            how = next(style for style in styles if style not in used)
            used.append(how)
        axis.errorbar(
            points_["x"],
            points_["y"],
            yerr=[points_["low"], points_["high"]],
            label="others" if name is None else name,
            ls="none",
            ms=3 if name is None else 6 if name == "dense" else 4.5,
            elinewidth=0.6,
            zorder=2 if name is None else 3,
            **how,
        )
    axis.plot(front["x"], front["y"], color="0.5", lw=1, zorder=1)


def legend(
    figure: Figure, handles: Iterable[Any] | None = None, labels: Iterable[str] | None = None
) -> None:
    """A legend below the axes, in as many columns as the figure has room for; longer labels are
    folded.
    """
    if handles is None or labels is None:
        handles_by_label = {
            label: handle
            for axis in figure.axes
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        handles, labels = list(handles_by_label.values()), list(handles_by_label)
    letter = 0.55 * STYLE["legend.fontsize"] / 72  # inches, on average
    line, room = 0.45, figure.get_figwidth() - 0.2  # of the handle and the space beside it
    texts = [fill(legible(label), int((room - line) / letter)) for label in labels]
    longest = max((len(piece) for text in texts for piece in text.split("\n")), default=1)
    columns = max(1, min(len(texts), int(room / (line + letter * longest))))
    figure.legend(list(handles), texts, loc="outside lower center", ncols=columns)


def named(axis: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Names of lines at their right ends, moved apart where they would meet.

    ends: (y of the last point, name, colour). The y axis is linear and its limits are set.
    """
    low, high = axis.get_ylim()
    least = (high - low) * 0.075
    heights: list[float] = []
    ordered = sorted(ends)
    for y, _, _ in ordered:
        heights.append(max(min(y, high), heights[-1] + least) if heights else max(y, low))
    beyond = heights[-1] - high if heights else 0.0
    for index in range(
        len(heights) - 1, -1, -1
    ):  # from the top, what ran out of the axes moves down
        ceiling = high if index == len(heights) - 1 else heights[index + 1] - least
        heights[index] = min(heights[index], ceiling) if beyond > 0 else heights[index]
    for height, (_, name, ink) in zip(heights, ordered, strict=True):
        axis.annotate(
            name,
            (1.02, height),
            xycoords=("axes fraction", "data"),
            color=ink,
            fontsize=6.5,
            va="center",
            annotation_clip=False,
        )


FORMATS = ("png", "pdf", "svg")


def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a figure in these formats, and close it."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in formats]
    with plt.rc_context(STYLE):  # the salt of SVG names is read when the file is written
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
            figure.set_layout_engine("none")  # the same places in all, found once
    plt.close(figure)
    return paths


def tag(figure: Figure, alt: str, width: int = 620) -> str:
    """A figure as an HTML tag that holds its PNG, for a page."""
    out = io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(out, format="png", dpi=110)
    return picture(out.getvalue(), alt, width)


def picture(png: bytes, alt: str, width: int = 620) -> str:
    """A PNG as an HTML tag that holds it."""
    return (
        f'<img alt="{alt}" width="{width}" src="data:image/png;base64,{b64encode(png).decode()}"/>'
    )


def loss(frame: pd.DataFrame, curves: pd.DataFrame) -> Figure | None:
    """Training loss (dotted) and test loss with compressed inference against steps, seconds of
    training and bytes sent.

    Lines are means over seeds. If there are many settings, the dense one and the best ones are
    drawn. Bars at the end: ± one sample standard deviation.
    """
    done = frame[frame.status == "finished"]
    if curves.empty or "test_on_loss" not in curves or curves.groupby("id").size().max() < 2:
        return None
    last = done.groupby("method", sort=False)["test_on_loss"].mean().sort_values()
    plain = done[
        (done["fwd.compressor.kind"] == "none") & (done["bwd.compressor.kind"] == "none")
    ].method
    shown = list(dict.fromkeys([*plain.unique()[:1], *last.index]))[:MOST]
    axes_of = [
        ("step", "steps", 1.0),
        ("seconds", "seconds of training", 1.0),
        ("bytes", "MB sent", 1e-6),
    ]
    axes_of = [
        axis for axis in axes_of if axis[0] in curves and curves[axis[0]].fillna(0).max() > 0
    ]
    if not axes_of or "train_loss" not in curves:
        return None
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(axes_of), figsize=(2 * COLUMN, 2.7), sharey=True, squeeze=False
        )
        for axis, (column, title, unit) in zip(axes[0], axes_of, strict=True):
            for index, method in enumerate(shown):
                curves_ = curves[curves.id.isin(done[done.method == method].id)]
                if curves_.empty:
                    continue
                mean = curves_.groupby("epoch")[[column, "train_loss", "test_on_loss"]].mean()
                spread = curves_.groupby("epoch")["test_on_loss"].std().fillna(0)
                x, ink = unit * mean[column], INK[index % 7]
                axis.plot(
                    x,
                    mean["test_on_loss"],
                    color=ink,
                    marker=MARKS[index % 9],
                    ms=2.5,
                    label=method,
                )
                axis.plot(x, mean["train_loss"], color=ink, ls=":", lw=0.8)
                last_loss, last_spread = mean["test_on_loss"].iloc[-1], spread.iloc[-1]
                axis.errorbar(
                    x.iloc[-1],
                    last_loss,
                    yerr=[[min(last_spread, last_loss / 2)], [last_spread]],
                    color=ink,
                    elinewidth=0.8,
                    capsize=2,
                )
            axis.set(xlabel=title, yscale="log")
            if column == "bytes" and curves[column].max() > 0:
                shown_bytes = unit * curves[column]
                axis.set_xscale("symlog", linthresh=max(1e-3, shown_bytes[shown_bytes > 0].min()))
                if shown_bytes.min() > 0:
                    logarithmic(axis.xaxis)
        axes[0, 0].set_ylabel("loss")
        logarithmic(axes[0, 0].yaxis)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        legend(figure, handles, labels)
    return figure


def boundaries(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Bytes a step at every boundary, activations forward (full) and gradients backward (pale);
    settings by total.

    Means over seeds. Of more than thirty settings, an even choice of thirty is shown.
    """
    done = frame[frame.status == "finished"]
    cuts_ = [name.removeprefix("boundary.") for name in frame if name.startswith("boundary.")]
    cuts = list(dict.fromkeys(name.rpartition(".")[0] for name in cuts_))
    columns = [f"boundary.{cut}.{side}" for cut in cuts for side in ("fwd", "bwd")]
    if not columns:
        return None
    mean = done.groupby("method", sort=False)[columns].mean().fillna(0)
    mean = mean[mean.sum(axis=1) > 0].loc[
        lambda values: values.sum(axis=1).sort_values(ascending=False).index
    ]
    if mean.empty:
        return None
    mean = mean.iloc[:: -(-len(mean) // 30)]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(1.5 * COLUMN, 0.9 + 0.16 * len(mean)))
        left = np.zeros(len(mean))
        for index, cut in enumerate(cuts):
            for side, alpha in (("fwd", 1.0), ("bwd", 0.45)):
                kilobytes = mean[f"boundary.{cut}.{side}"].to_numpy() / 1e3
                axis.barh(
                    range(len(mean)),
                    kilobytes,
                    left=left,
                    color=INK[index % 7],
                    alpha=alpha,
                    height=0.75,
                    label=f"{cut}, {'activations' if side == 'fwd' else 'gradients'}",
                )
                left += kilobytes
        axis.set_yticks(range(len(mean)), list(mean.index), fontsize=5.5)
        axis.set(xlabel="kB a step")
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        legend(figure)
    return figure


def level(method: str) -> str:
    """A method's K or bits, for a mark: "10" or "4/8"."""
    words = [word.partition(" (")[0] for word in method.split(" / ")]
    matches = [
        next(
            (
                word
                for word, unit in zip(word.split(), [*word.split()[1:], ""], strict=True)
                if unit.startswith(("%", "bit"))
            ),
            "",
        )
        for word in words
    ]
    return "/".join(dict.fromkeys(match for match in matches if match))


def pareto(points: pd.DataFrame, worst: float = -1.0) -> pd.DataFrame:
    """The points with no other at least as good in both mean and bytes.ratio, by bytes."""
    ordered = points.sort_values(["bytes.ratio", "mean"], ascending=[True, False])
    return ordered[ordered["mean"] > ordered["mean"].cummax().shift(fill_value=worst)]


def logarithmic(*axes: Axis) -> None:
    """Logarithmic axes with plain numbers at 1, 2 and 5, linear around zero where values reach it,
    so that none is lost; left linear where nothing positive is drawn.
    """
    for axis in axes:
        smallest = float(axis.get_minpos())
        if not np.isfinite(smallest):
            continue
        name = axis.axis_name  # pyright: ignore[reportAttributeAccessIssue]
        set_scale = getattr(axis.axes, f"set_{name}scale")
        if axis.get_data_interval()[0] <= 0:
            set_scale("symlog", linthresh=smallest)
        else:
            set_scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())


def rescale(figure: Figure, scale: str) -> None:
    """Give vertical axes with numbers a scale, "linear" or "log" (`logarithmic`)."""
    for axes in figure.axes:
        if isinstance(axes.yaxis.get_major_locator(), FixedLocator):  # names, or ticks of its own
            continue
        if scale == "linear":
            axes.set_yscale("linear")
        else:
            logarithmic(axes.yaxis)


Draw = Callable[[pd.DataFrame, pd.DataFrame], Figure | None]
GENERAL: dict[str, Draw] = {"loss": loss, "boundaries": boundaries}

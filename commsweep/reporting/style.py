"""The style of all figures: sizes, letters, colours, intervals, axes, legends, captions, files.

A figure is drawn inside `drawing()`, which sets the sheet (how wide figures are and how large their
letters) and the looks: a name has one colour, marker and line in all figures of one report.
"""

from __future__ import annotations

import io
import math
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from textwrap import fill
from typing import Any

os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same rows give the same bytes
import matplotlib

# A notebook, and who has chosen a backend, keep the one that shows their figures.
if not {"matplotlib.pyplot", "ipykernel"} & set(sys.modules):
    matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.style.core import STYLE_BLACKLIST
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from commsweep.errors import UserError, nearest
from commsweep.reporting import statistics
from commsweep.reporting.words import latex, legible

# Okabe and Ito's colours without black, which dense has, and without yellow, too pale for lines.
INK = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES = ("-", "--", "-.", (0, (3, 1, 1, 1, 1, 1)))
NAMED = 8  # names with a colour in one pair of axes
DENSE: dict[str, Any] = {"color": "#000000", "marker": "*", "ls": "-"}
WIDTHS = ("column", "page")


@dataclass(frozen=True)
class Sheet:
    """The page that figures are drawn for.

    Attributes:
        column: width of a figure of one column, in inches.
        page: width of a figure of two columns, in inches.
        points: size of letters.
        width: "column" or "page", the width of every figure ("": each figure's own).
        venue: parameters of matplotlib for a venue, such as its fonts.
    """

    column: float = 3.3
    page: float = 6.9
    points: float = 8.0
    width: str = ""
    venue: dict[str, Any] = field(default_factory=dict)

    def size(self, columns: int, height: float) -> tuple[float, float]:
        """(width, height) in inches of a figure of one or two columns."""
        wide = self.width == "page" or (not self.width and columns > 1)
        return (self.page if wide else self.column), height

    def parameters(self) -> Any:
        """Matplotlib's parameters, all of them: a user's own matplotlibrc changes nothing."""
        defaults = matplotlib.rcParamsDefault.items()
        plain = {name: value for name, value in defaults if name not in STYLE_BLACKLIST}
        return plain | STYLE | _letters(self.points) | self.venue


STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "errorbar.capsize": 0,
    "legend.frameon": False,
    "figure.dpi": 100,  # on a screen
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "commsweep",
    "figure.constrained_layout.use": True,
}


def _letters(points: float) -> dict[str, float]:
    names = ("font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize")
    return dict.fromkeys((*names, "xtick.labelsize", "ytick.labelsize"), points)


def sheet(width: str = "", venue: str = "") -> Sheet:
    """The sheet of a width ("column", "page" or "") and of a venue, such as "icml2024".

    A venue's sizes and fonts come from the library tueplots.

    Raises:
        UserError: there is no such width or venue, or tueplots is not installed.
    """
    if width and width not in WIDTHS:
        raise UserError(f"--width {width}: not one of {', '.join(WIDTHS)}{nearest(width, WIDTHS)}")
    if not venue:
        return Sheet(width=width)
    try:
        from tueplots import bundles, figsizes
    except ImportError:
        raise UserError(
            f"--venue {venue} needs the package tueplots: pip install 'commsweep[figures]'"
        ) from None
    names = [name for name in dir(bundles) if name[-4:].isdigit()]
    if venue not in names:
        raise UserError(f"--venue {venue}: not one of {', '.join(names)}{nearest(venue, names)}")
    parameters = getattr(bundles, venue)(usetex=False)
    column = page = float(parameters.pop("figure.figsize")[0])
    full = getattr(figsizes, f"{venue}_full", None)
    if full is not None:
        page = float(full()["figure.figsize"][0])
    return Sheet(column, page, float(parameters["font.size"]), width, parameters)


Look = dict[str, Any]  # color, marker and ls of a name
_sheet: ContextVar[Sheet] = ContextVar("_sheet", default=Sheet())  # noqa: B039 (it is frozen)
_look_of: ContextVar[dict[str, Look] | None] = ContextVar("_look_of", default=None)


@contextmanager
def drawing(on: Sheet | None = None) -> Iterator[Sheet]:
    """Draw in the style of a sheet. Inside of another `drawing`, its sheet and looks are kept."""
    inside = _look_of.get() is not None
    current = on or _sheet.get()
    sheet_token = _sheet.set(current)
    looks_token = None if inside else _look_of.set({})
    try:
        interactive = matplotlib.is_interactive()
        with plt.rc_context(current.parameters()):
            yield current
            # the first figure of a notebook makes it interactive, which is to last
            interactive = matplotlib.is_interactive()
        matplotlib.interactive(interactive)
    finally:
        _sheet.reset(sheet_token)
        if looks_token is not None:
            _look_of.reset(looks_token)


def size(columns: int, height: float) -> tuple[float, float]:
    """(width, height) in inches on the current sheet."""
    return _sheet.get().size(columns, height)


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A drawing function that draws in the style of all figures."""

    @wraps(draw)
    def drawn(*args: Any) -> Figure:
        with drawing():
            return draw(*args)

    return drawn


def look(name: str, **options: Any) -> Look:
    """Colour, marker and line of a name, the same in all figures of one report.

    Names get them in the order in which they are first drawn. After seven the colours come again
    with another line and another marker. options: of matplotlib, beside these or instead.
    """
    by_name = _look_of.get()
    key = name.lower().strip()
    if key in ("dense", "uncompressed"):
        return DENSE | options
    if by_name is None:
        by_name = {}
    if key not in by_name:
        at = len(by_name)
        colour, line = INK[at % len(INK)], LINES[at // len(INK) % len(LINES)]
        by_name[key] = {"color": colour, "marker": MARKS[at % len(MARKS)], "ls": line}
    return by_name[key] | options


def distinct_looks(names: Iterable[str]) -> dict[str, Look]:
    """The looks of the names in one pair of axes, at most `NAMED`: no two have one colour.

    A name whose colour another one has here gets a free colour, and keeps its marker.
    """
    drawn: dict[str, Look] = {}
    for name in names:
        style = look(name)
        used = {style_used["color"] for style_used in drawn.values()}
        if style["color"] in used:
            free = [ink for ink in INK if ink not in used]
            style["color"] = free[0] if free else "0.5"
        drawn[name] = style
    return drawn


# Intervals.


@dataclass(frozen=True)
class Ends:
    """A mean over seeds with its 95 % interval; low and high are NaN below two values."""

    mean: float
    low: float
    high: float
    n: int


def ends(values: Iterable[float], log: bool = False) -> Ends:
    """The mean of values, one a seed, and its 95 % interval (Student's t).

    log: of the logarithm, for a logarithmic axis: the mean is the geometric one. Where a value is
    not positive the interval is the plain one. Values that are no numbers are left out.
    """
    numbers = [float(value) for value in values if math.isfinite(value)]
    if not numbers:
        return Ends(math.nan, math.nan, math.nan, 0)
    if log and min(numbers) > 0:
        logs = ends([math.log(value) for value in numbers])
        return Ends(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.n)
    interval = statistics.interval(numbers) or (math.nan, math.nan)
    return Ends(sum(numbers) / len(numbers), *interval, len(numbers))


def bars(means: Sequence[Ends]) -> np.ndarray:
    """The lengths of bars for `errorbar`, shape (2, len(means)); 0 where there is no interval."""
    lengths = []
    for point in means:
        down = point.mean - point.low
        if point.low > 0:  # so that rounding leaves it above zero, for a logarithmic axis
            down = min(down, (1 - 1e-9) * point.mean)
        lengths.append((down, point.high - point.mean))
    return np.nan_to_num(np.array(lengths, dtype=float).reshape(-1, 2).T, nan=0.0)


def plot(
    axis: Axes,
    x: Sequence[float] | float,
    means: Sequence[Ends],
    label: str | None = None,
    sideways: bool = False,
    **style: Any,
) -> None:
    """Points with their 95 % intervals as bars; sideways: x are heights, the bars are level."""
    positions = list(np.atleast_1d(np.asarray(x, dtype=float)))
    values = [point.mean for point in means]
    style = {"elinewidth": 0.8} | style
    if sideways:
        axis.errorbar(values, positions, xerr=bars(means), label=label, **style)
    else:
        axis.errorbar(positions, values, yerr=bars(means), label=label, **style)


def band(axis: Axes, x: Sequence[float], means: Sequence[Ends], **style: Any) -> None:
    """A line of means, and their 95 % intervals as a band, which has gaps where n is 1."""
    axis.plot(x, [point.mean for point in means], **style)
    low, high = [point.low for point in means], [point.high for point in means]
    axis.fill_between(x, low, high, color=style.get("color"), alpha=0.18, lw=0)


def chosen(names: Iterable[str], first: Iterable[str]) -> list[str]:
    """At most `NAMED` names that have a colour: dense, those of `first`, then the others."""
    names = list(dict.fromkeys(names))
    dense = [name for name in names if name == "dense"]
    leading = [name for name in first if name in names]
    return list(dict.fromkeys([*dense, *leading, *names]))[:NAMED]


def scatter(
    axis: Axes, points: pd.DataFrame, styles: dict[str, Look], front: pd.DataFrame, log: bool
) -> None:
    """Points with bars, in the looks of those that have one; the others are grey.

    Args:
        axis: where.
        points: name, x and values (a list of one number a seed).
        styles: looks by name.
        front: those of them on the front, with x and mean.
        log: whether the vertical axis will be logarithmic.
    """
    grey = points[~points["name"].isin(list(styles))]
    if len(grey):
        means = [ends(values, log) for values in grey["values"]]
        plot(axis, list(grey["x"]), means, "others", marker="o", color="0.75", ls="none", zorder=2)
    for name, style in styles.items():
        group = points[points["name"] == name]
        means = [ends(values, log) for values in group["values"]]
        mark = style | {"ls": "none", "ms": 6 if name == "dense" else 4.5}
        if means:
            plot(axis, list(group["x"]), means, name, zorder=3, **mark)
    axis.plot(front["x"], front["mean"], color="0.5", lw=1, zorder=1)


def front_of(points: pd.DataFrame, log: bool = False) -> pd.DataFrame:
    """The points (x, values) with means, of which none has less at as small an x."""
    mean = pd.Series([ends(values, log).mean for values in points["values"]], points.index)
    best = pareto(points.assign(**{"bytes.ratio": points["x"], "mean": -mean}), -math.inf)
    return best.assign(mean=mean[best.index])


# Axes, legends, captions.


ROWS = 2  # of a legend, for which the heights of figures have room


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
    letter = 0.56 * plt.rcParams["legend.fontsize"] / 72  # inches, on average
    line, room = 0.5, figure.get_figwidth() - 0.3  # of the handle and the space beside it
    texts = [fill(legible(label), max(8, int((room - line) / letter))) for label in labels]
    longest = max((len(piece) for text in texts for piece in text.split("\n")), default=1)
    columns = max(1, min(len(texts), int(room / (line + letter * longest))))
    if not texts:
        return
    heights = [text.count("\n") + 1 for text in texts]
    per_column = -(-len(texts) // columns)
    rows = sum(sorted(heights, reverse=True)[:per_column])
    if rows > ROWS:  # the axes keep their height
        line_height = 1.45 * plt.rcParams["legend.fontsize"] / 72
        figure.set_figheight(figure.get_figheight() + line_height * (rows - ROWS))
    figure.legend(list(handles), texts, loc="outside lower center", ncols=columns)


def named(axis: Axes, line_ends: list[tuple[float, str, str]]) -> None:
    """Names of lines at their right ends, moved apart where they would meet.

    line_ends: (y of the last point, name, colour). The y axis is linear and its limits are set.
    """
    low, high = axis.get_ylim()
    inches = axis.figure.get_figheight() * 0.7  # pyright: ignore[reportAttributeAccessIssue]
    least = (high - low) * 1.25 * plt.rcParams["font.size"] / 72 / inches
    heights: list[float] = []
    ordered = sorted(line_ends)
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
            va="center",
            annotation_clip=False,
        )


def logarithmic(*axes: Axis) -> None:
    """Logarithmic axes with plain numbers, linear around zero where values reach it, so that none
    is lost; left linear where nothing positive is drawn.
    """
    for axis in axes:
        smallest = float(axis.get_minpos())
        if not np.isfinite(smallest):
            continue
        name = axis.axis_name  # pyright: ignore[reportAttributeAccessIssue]
        set_scale = getattr(axis.axes, f"set_{name}scale")
        low, high = axis.get_data_interval()
        if low <= 0:
            set_scale("symlog", linthresh=smallest)
        else:
            set_scale("log")
            decades = math.log10(high / low) if high > low else 0.0
            subs = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
            axis.set_major_locator(LogLocator(subs=subs, numticks=12))
            if decades < 0.7:  # 1, 2 and 5 would leave one number or none
                axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(_number)
        axis.set_minor_formatter(NullFormatter())


def _number(value: float, _position: float) -> str:
    """A number on an axis; far from 1 as a power of ten."""
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    factor = value / 10**exponent
    head = "" if abs(factor - 1) < 1e-9 else rf"{factor:g}\times"
    return rf"${head}10^{{{exponent}}}$"


BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def in_bytes(largest: float) -> tuple[float, str]:
    """(bytes of a unit, its name) in which numbers up to `largest` are at least 1."""
    return next((unit for unit in BYTES if largest >= unit[0]), BYTES[-1])


def rescale(figure: Figure, scale: str) -> None:
    """Give vertical axes with numbers a scale, "linear" or "log" (`logarithmic`)."""
    for axes in figure.axes:
        if isinstance(axes.yaxis.get_major_locator(), FixedLocator):  # names, or ticks of its own
            continue
        if scale == "linear":
            axes.set_yscale("linear")
        else:
            logarithmic(axes.yaxis)


FAR = 2.0  # an interval may reach so many spans of the means beyond them before it is cut


def finish(figure: Figure, caption: str = "") -> Figure:
    """Cut intervals that dwarf the means, mark each end that leaves its axes, and keep a caption.

    The caption is the figure's label (`figure.get_label()`).
    """
    for axes in figure.axes:
        segments = _segments(axes)
        if segments:
            _bound(axes, [point for point in segments if point[3]], vertical=True)
            _bound(axes, [point for point in segments if not point[3]], vertical=False)
            _mark(axes, segments)
    if caption:
        figure.set_label(" ".join(caption.split()))
    return figure


Segment = tuple[float, float, Any, bool, float]  # low, high, colour, whether upright, the place


def _segments(axes: Axes) -> list[Segment]:
    """The bars that were drawn with `errorbar`."""
    segments: list[Segment] = []
    for container in axes.containers:
        if not isinstance(container, ErrorbarContainer):
            continue
        for lines in container.lines[2]:
            if not isinstance(lines, LineCollection):
                continue
            colour = lines.get_color()[0]
            for (x, y), (x_end, y_end) in (s for s in lines.get_segments() if len(s) == 2):
                upright = x == x_end
                low, high, position = (y, y_end, x) if upright else (x, x_end, y)
                segments.append((float(low), float(high), colour, upright, float(position)))
    return segments


def _bound(axes: Axes, segments: list[Segment], vertical: bool) -> None:
    """Set the limits of an axis so that no interval leaves the means too small to tell apart."""
    free = axes.get_autoscaley_on() if vertical else axes.get_autoscalex_on()
    if not segments or not free:
        return
    log = (axes.get_yscale() if vertical else axes.get_xscale()) == "log"
    means = [
        value
        for line in axes.lines
        for value in np.asarray(line.get_ydata() if vertical else line.get_xdata(), dtype=float)
        if np.isfinite(value) and (value > 0 or not log)
    ]
    if len(means) < 2:
        return
    to, back = (np.log, np.exp) if log else (lambda value: value, lambda value: value)
    low, high = float(to(min(means))), float(to(max(means)))
    span = FAR * ((high - low) or abs(high) or 1.0)
    lows = [float(to(max(point[0], 1e-300) if log else point[0])) for point in segments]
    highs = [float(to(point[1])) for point in segments if point[1] > 0 or not log]
    if min(lows) >= low - span and max([*highs, high]) <= high + span:
        return
    limits = (max(min([*lows, low]), low - span), min(max([*highs, high]), high + span))
    setter = axes.set_ylim if vertical else axes.set_xlim
    setter(*(float(back(limit)) for limit in limits))


def _mark(axes: Axes, segments: list[Segment]) -> None:
    """An arrowhead at the edge of the axes for each bar that goes on beyond it."""
    for low, high, colour, upright, position in segments:
        bottom, top = sorted(axes.get_ylim() if upright else axes.get_xlim())
        for end, edge, mark in ((low, bottom, "v<"), (high, top, "^>")):
            beyond = end < edge if edge == bottom else end > edge
            if beyond and low < top and high > bottom:
                x, y = (position, edge) if upright else (edge, position)
                marker = mark[0] if upright else mark[1]
                axes.plot([x], [y], marker=marker, color=colour, ms=4, clip_on=False, zorder=5)


def pareto(points: pd.DataFrame, worst: float = -1.0) -> pd.DataFrame:
    """The points with no other at least as good in both mean and bytes.ratio, by bytes."""
    ordered = points.sort_values(["bytes.ratio", "mean"], ascending=[True, False])
    return ordered[ordered["mean"] > ordered["mean"].cummax().shift(fill_value=worst)]


# Files.

FORMATS = ("png", "pdf", "svg")


def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a figure in these formats and close it; its caption stands beside it, as text and as
    a LaTeX figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in formats]
    with drawing():  # the salt of SVG names is read when the file is written
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
            figure.set_layout_engine("none")  # the same places in all, found once
    caption = str(figure.get_label())
    if caption:
        wide = figure.get_figwidth() > 1.2 * _sheet.get().column
        text = latex_figure(name, caption, wide, "pdf" if "pdf" in formats else "png")
        (folder / f"{name}.txt").write_text(caption + "\n", encoding="utf-8")
        (folder / f"{name}.tex").write_text(text, encoding="utf-8")
    plt.close(figure)
    return paths


def latex_figure(name: str, caption: str, wide: bool, suffix: str) -> str:
    """A LaTeX figure, over both columns where it is wide."""
    kind, width = ("figure*", r"\textwidth") if wide else ("figure", r"\columnwidth")
    return "\n".join(
        [
            rf"\begin{{{kind}}}",
            r"\centering",
            rf"\includegraphics[width={width}]{{{name}.{suffix}}}",
            rf"\caption{{{latex(caption)}}}",
            rf"\label{{fig:{name}}}",
            rf"\end{{{kind}}}",
            "",
        ]
    )


def tag(figure: Figure, alt: str, width: int = 620) -> str:
    """A figure as an HTML tag that holds its PNG, for a page."""
    out = io.BytesIO()
    with drawing():
        figure.savefig(out, format="png", dpi=110)
    return picture(out.getvalue(), alt, width)


def picture(png: bytes, alt: str, width: int = 620) -> str:
    """A PNG as an HTML tag that holds it."""
    return (
        f'<img alt="{alt}" width="{width}" src="data:image/png;base64,{b64encode(png).decode()}"/>'
    )


Draw = Callable[[pd.DataFrame, pd.DataFrame], Figure | None]

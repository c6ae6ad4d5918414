"""The figures of the field, pure functions of rows and curves: `cs.figure(data, kind)`.

Each shows means over seeds with 95 % intervals (Student's t; on a logarithmic axis of the
logarithm). Its caption says n, the kind of interval, units and what is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from commsweep.errors import UserError, nearest
from commsweep.reporting import worth as worths
from commsweep.reporting.results import counted, is_text, span
from commsweep.reporting.style import (
    NAMED,
    Ends,
    band,
    chosen,
    distinct_looks,
    drawing,
    ends,
    finish,
    front_of,
    in_bytes,
    legend,
    logarithmic,
    look,
    plot,
    plt,
    scatter,
    sheet,
    size,
)
from commsweep.reporting.tidy import tidy
from commsweep.reporting.words import in_words, legible

INTERVAL = "95 % intervals over seeds (Student's t)"
LOG_INTERVAL = "geometric means and 95 % intervals over seeds (Student's t of the logarithm)"


# What is scored.


@dataclass(frozen=True)
class Score:
    """A column of scores, and how it is drawn."""

    column: str
    label: str
    factor: float = 1.0
    offset: float = 0.0
    log: bool = False

    def of(self, values: Iterable[float]) -> list[float]:
        """The values in the unit of the axis."""
        return [self.offset + self.factor * float(value) for value in values]


SPLITS = {"val": "held-out", "test": "test", "train": "training"}


def score_of(name: str, error: bool = False) -> Score:
    """A column such as test_on_acc with its axis; error: an accuracy as what it lacks of 100 %."""
    words = SPLITS.get(name.split("_")[0], "")
    ending = name.rpartition("_")[2]
    if ending == "acc" and error:
        return Score(name, f"{words} error (%)", -100.0, 100.0, log=True)
    if ending == "acc":
        return Score(name, f"{words} accuracy (%)", 100.0)
    if ending == "ppl":
        return Score(name, f"{words} perplexity", log=True)
    return Score(name, f"{words} loss (nats)" if words else name, log=ending == "loss")


def _first(frame: pd.DataFrame, names: Iterable[str]) -> str:
    """The first of these columns that has numbers; "" where none has."""
    return next((name for name in names if name in frame and frame[name].notna().any()), "")


def _of_rows(frame: pd.DataFrame) -> str:
    if is_text(frame):
        return _first(frame, ("test_on_loss", "val_on_loss"))
    return _first(frame, ("test_on_acc", "val_on_acc", "test_on_loss", "val_on_loss"))


def _done(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.status == "finished"] if "status" in rows else rows


def _seeds(frame: pd.DataFrame) -> str:
    """ "n = 8", or "n = 3 to 8" of settings with different numbers of seeds."""
    return f"n = {span(frame.groupby('setting').seed.nunique())}"


def _lost(rows: pd.DataFrame) -> str:
    """A sentence on the runs that have no place in a figure; "" where there are none."""
    unfinished = counted(rows) if "status" in rows else ""
    return f" Left out: {unfinished}." if unfinished else ""


Kind = Callable[..., Figure | None]


def _kind(draw: Kind) -> Kind:
    """A figure of rows and curves as a report has them, or as `load_rows` and `load_curves` give
    them.
    """

    @wraps(draw)
    def drawn(
        rows: pd.DataFrame, curves: pd.DataFrame, score: str = "", **options: str
    ) -> Figure | None:
        rows = rows if "setting" in rows else tidy(rows)
        if len(curves) and "setting" not in curves:
            names = ["id", "setting", "seed", "codec", "method"]
            curves = rows[names].merge(curves, on="id")
        with drawing():
            return draw(rows, curves, score, **options)

    return drawn


def _largest_training(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """(the rows of the model and data with the most settings, a sentence on those left out)."""
    keys = ["model.name", "data.name"]
    if any(key not in rows for key in keys) or len(rows.drop_duplicates(keys)) < 2:
        return rows, ""
    settings = rows.groupby(keys, sort=False)["setting"].nunique()
    model, data = settings.idxmax()
    omitted = [f"{model} on {data}" for model, data in settings.index.drop([(model, data)])]
    shown = rows[(rows["model.name"] == model) & (rows["data.name"] == data)]
    return shown, f" Shown: {model} on {data}. Left out: {', '.join(omitted)}."


# Curves.

AXES = {
    "step": "steps",
    "epoch": "epochs",
    "bytes": "sent at boundaries",
    "gradient_bytes": "of gradients sent",
    "seconds": "seconds of training",
}


def _along(curves: pd.DataFrame) -> list[str]:
    """The axes that a frame has: steps, or epochs where no steps are known; bytes at boundaries,
    or of gradients where learners sent some; seconds.
    """
    learners = "gradient_bytes" in curves and bool((curves["gradient_bytes"] > 0).any())
    skipped = ("epoch" if "step" in curves else "step", "bytes" if learners else "gradient_bytes")
    return [axis for axis in AXES if axis in curves and axis not in skipped]


@dataclass(frozen=True)
class Line:
    """The mean curve of a setting over its seeds, at the steps where one of them has a point."""

    name: str
    x: dict[str, np.ndarray]  # by axis: step, bytes, seconds
    means: list[Ends]
    complete: int  # points at which all seeds still have a number; after them some have ended
    seeds: int
    dropped: int  # seeds that end before the others, or diverge


def lines(curves: pd.DataFrame, score: Score) -> list[Line]:
    """The curves of a frame by setting. Seeds with other steps are interpolated in their range.

    A seed counts until its first number that is not finite; after that, or after its last point,
    the mean is of the seeds that are left.
    """
    drawn = []
    base = _along(curves)[0]
    for _, group in curves.groupby("setting", sort=False):
        seeds: list[pd.DataFrame] = []
        for _, points in group.sort_values(base).groupby("id", sort=False):
            bad = ~np.isfinite(points[score.column].to_numpy(dtype=float))
            stop = int(np.argmax(bad)) if bad.any() else len(points)
            if stop:
                seeds.append(points.iloc[:stop])
        if not seeds:
            continue
        steps = np.unique(np.concatenate([points[base].to_numpy(float) for points in seeds]))
        axes_of = [axis for axis in _along(group) if group[axis].notna().any()]
        values = np.stack([_at(points, score.column, base, steps) for points in seeds])
        count = np.isfinite(values).sum(0)
        x = {}
        for axis in axes_of:
            all_seeds = np.stack([_at(points, axis, base, steps) for points in seeds])
            with np.errstate(invalid="ignore"):
                x[axis] = np.nanmean(all_seeds, axis=0)
        means = [ends(score.of(column), score.log) for column in values.T]
        complete = int((count == len(seeds)).sum())
        total = group.id.nunique()
        lost = total - int(np.isfinite(values[:, -1]).sum())
        name = in_words(str(group["method"].iloc[0]))
        drawn.append(Line(name, x, means, complete, total, lost))
    return drawn


def _at(points: pd.DataFrame, column: str, base: str, steps: np.ndarray) -> np.ndarray:
    """A column at these steps (or epochs), NaN outside of a run's own."""
    steps_of_run, numbers = points[base].to_numpy(float), points[column].to_numpy(float)
    return np.interp(steps, steps_of_run, numbers, left=np.nan, right=np.nan)


def _draw_line(axis: Axes, line: Line, by: str, unit: float, **style: object) -> None:
    """Solid where all seeds have a point, dotted where some have ended."""
    x = line.x[by] / unit
    split = max(line.complete, 1)
    band(axis, list(x[:split]), line.means[:split], **style)
    if split < len(x):
        dotted = style | {"ls": ":", "label": None}
        band(axis, list(x[split - 1 :]), line.means[split - 1 :], **dotted)


@_kind
def convergence(
    rows: pd.DataFrame, curves: pd.DataFrame, score: str = "", by: str = ""
) -> Figure | None:
    """Score against steps, bytes sent and seconds of training.

    Bands are 95 % intervals over seeds. Above eight settings each has axes of its own.
    """
    if curves.empty:
        return None
    rows, left_out = _largest_training(rows)
    curves = curves[curves["id"].isin(rows["id"])]
    name = score or _curve_score(rows, curves)
    if not name or name not in curves:
        return None
    how = score_of(name)
    all_lines = [line for line in lines(curves, how) if len(line.means) > 1]
    if not all_lines:
        return None
    several = len(all_lines) > NAMED
    axes_of = _along(curves)
    if by == "bytes":  # at boundaries, or of gradients
        axes_of = [axis for axis in axes_of if axis.endswith("bytes")]
    elif by:
        axes_of = [by]
    elif several:
        axes_of = axes_of[:1]
    axes_of = [axis for axis in axes_of if all(axis in line.x for line in all_lines)]
    axes_of = [axis for axis in axes_of if max(np.nanmax(line.x[axis]) for line in all_lines) > 0]
    if not axes_of:
        return None
    figure = _multiples(all_lines, how, axes_of[0]) if several else _panels(all_lines, how, axes_of)
    cut = _bound_bands(figure, all_lines)
    n = span(line.seeds for line in all_lines)
    text = (
        f"{how.label.capitalize()} along the training, "
        f"{LOG_INTERVAL if how.log else f'means and {INTERVAL}'}, n = {n}; no band where n is 1."
    )
    dropped = sum(line.dropped for line in all_lines)
    if dropped:
        text += (
            f" Dotted: {dropped} runs diverged or ended before the other seeds of their setting."
        )
    if several:
        text += " Grey: dense."
    if cut:
        text += " Bands that leave the axes go on beyond them."
    return finish(figure, text + left_out)


def _bound_bands(figure: Figure, all_lines: list[Line]) -> bool:
    """Bound the shared vertical axis by the means, so that no band leaves them too small to tell
    apart; True where a band is cut.
    """
    means = [point.mean for line in all_lines for point in line.means if point.n]
    lows = [point.low for line in all_lines for point in line.means if point.n > 1]
    highs = [point.high for line in all_lines for point in line.means if point.n > 1]
    axis = figure.axes[0]
    low, high = min(means), max(means)
    if axis.get_yscale() == "log":
        margin = max((high / low) ** 0.15, 1.05)
        limits = (low / margin, high * margin)
    else:
        margin = 0.15 * (high - low) or 0.05 * abs(high)
        limits = (low - margin, high + margin)
    if not lows or (min(lows) >= limits[0] and max(highs) <= limits[1]):
        return False
    axis.set_ylim(*limits)
    return True


def _curve_score(rows: pd.DataFrame, curves: pd.DataFrame) -> str:
    text = "data.tokenizer" in rows and is_text(rows)
    if text or not any(name.endswith("_acc") for name in curves):
        return _first(curves, ("val_on_loss", "test_on_loss", "train_loss"))
    return _first(curves, ("val_on_acc", "test_on_acc", "val_on_loss", "test_on_loss"))


def _panels(all_lines: list[Line], how: Score, axes_of: list[str]) -> Figure:
    columns = 1 if len(axes_of) == 1 else 2
    figure, axes = plt.subplots(
        1, len(axes_of), figsize=size(columns, 2.6), sharey=True, squeeze=False
    )
    styles = distinct_looks(line.name for line in all_lines)
    for axis, by in zip(axes[0], axes_of, strict=True):
        largest = max(float(np.nanmax(line.x[by])) for line in all_lines)
        unit, name = in_bytes(largest) if by.endswith("bytes") else (1.0, "")
        for line in all_lines:
            style = styles[line.name] | {"marker": None, "label": line.name}
            _draw_line(axis, line, by, unit, **style)
        axis.set(xlabel=f"{name} {AXES[by]}".strip())
        totals = [float(np.nanmax(line.x[by])) for line in all_lines]
        if by.endswith("bytes") and min(totals) > 0 and max(totals) > 30 * min(totals):
            logarithmic(axis.xaxis)
    axes[0, 0].set_ylabel(how.label)
    if how.log:
        logarithmic(axes[0, 0].yaxis)
    legend(figure)
    return figure


def _variant(name: str) -> set[str]:
    """The words in the last parentheses of a name: {"AdamW", "rate 0.01"}."""
    match = re.search(r"\(([^()]*)\)$", name)
    return set(match.group(1).split(", ")) if match else set()


def _multiples(all_lines: list[Line], how: Score, by: str) -> Figure:
    """A grid of axes, one for each setting, with dense in grey behind it."""
    dense = [line for line in all_lines if re.fullmatch(r"dense( \(.*\))?", line.name)]
    shown = [line for line in all_lines if line not in dense]
    wide = size(2, 1.0)[0]
    columns = max(2, int(wide / 1.6))
    count = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        count, columns, figsize=size(2, 0.5 + 1.25 * count), sharex=True, sharey=True, squeeze=False
    )
    points = plt.rcParams["font.size"]
    letters = int(72 * wide / columns / (0.6 * points))
    largest = max(float(np.nanmax(line.x[by])) for line in all_lines)
    unit, name = in_bytes(largest) if by.endswith("bytes") else (1.0, "")
    for axis, line in zip(axes.flat, shown, strict=False):
        for reference in dense:
            if len(dense) == 1 or _variant(reference.name) <= _variant(line.name):
                _draw_line(axis, reference, by, unit, color="0.6", lw=0.8)
        _draw_line(axis, line, by, unit, color=look("any setting")["color"])
        axis.set_title(fill(legible(line.name), letters))
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    if how.log:
        logarithmic(axes[0, 0].yaxis)
    figure.supxlabel(f"{name} {AXES[by]}".strip(), fontsize=points)
    figure.supylabel(how.label, fontsize=points)
    return figure


# Scores.


def _series(codec: str) -> str:
    """A codec without its levels: "ef+topk both ways"."""
    bare: dict[str, str] = {}
    for word in codec.split():
        side, equals, name = word.partition("=")
        if equals:
            bare[side] = re.sub(r":.*", "", name)
    if {"fwd", "bwd"} <= set(bare) and bare["fwd"] == bare["bwd"]:
        return " ".join([f"{bare.pop('fwd')} both ways", *_sides(bare, skip="bwd")])
    return " ".join(_sides(bare)) or codec


def _sides(words: dict[str, str], skip: str = "") -> list[str]:
    return [f"{side}={word}" for side, word in words.items() if side != skip]


def _modes(name: str, frame: pd.DataFrame) -> list[tuple[str, str]]:
    """(column, its words) of a score with compression on, and off where that differs."""
    off = name.replace("_on_", "_off_")
    if off == name or off not in frame or (frame[off].fillna(frame[name]) == frame[name]).all():
        return [(name, "")]
    return [(name, "compressed inference"), (off, "dense inference")]


@_kind
def score_k(rows: pd.DataFrame, curves: pd.DataFrame, score: str = "") -> Figure | None:
    """Score against the share of entries that are kept, with compression on and off at inference.

    Bars are 95 % intervals over seeds; the grey line is dense.
    """
    rows, left_out = _largest_training(rows)
    done = _done(rows)
    name = score or _of_rows(done)
    if not name or "K" not in done:
        return None
    sparse = done[done["K"].notna() & done["bits"].isna()]
    sparse = sparse.assign(series=sparse["codec"].map(_series))
    several = [
        key for key, group in sparse.groupby("series", sort=False) if group["K"].nunique() > 1
    ]
    sparse = sparse[sparse["series"].isin(several[:NAMED])]
    if sparse.empty:
        return None
    modes = _modes(name, sparse)
    figure, axes = plt.subplots(
        1, len(modes), figsize=size(len(modes), 2.7), sharey=True, squeeze=False
    )
    styles = distinct_looks(several[:NAMED])
    how = score_of(name)
    for axis, (column, title) in zip(axes[0], modes, strict=True):
        mode = score_of(column)
        for series, group in sparse.groupby("series", sort=False):
            by_share = group.groupby("K")[column]
            means = [ends(mode.of(values), mode.log) for _, values in by_share]
            shares = [100 * share for share, _ in by_share]
            plot(axis, shares, means, str(series), **styles[str(series)])
        dense = done[done["codec"] == "dense"]
        if len(dense):
            axis.axhline(ends(mode.of(dense[column]), mode.log).mean, **_reference())
        axis.set(title=title, xlabel="K (% of entries kept)")
        logarithmic(axis.xaxis)
    axes[0, 0].set_ylabel(how.label)
    if how.log:
        logarithmic(axes[0, 0].yaxis)
    legend(figure)
    text = (
        f"{how.label.capitalize()} against the share of entries that are kept, "
        f"{LOG_INTERVAL if how.log else f'means and {INTERVAL}'}, "
        f"{_seeds(sparse)}.{_lost(rows)}{left_out}"
    )
    if len(several) > NAMED:
        text += f" Left out: {len(several) - NAMED} further series."
    return finish(figure, text)


def _reference() -> dict[str, object]:
    return {"color": "0.4", "lw": 1, "ls": "--", "label": "dense"}


def sent_share(frame: pd.DataFrame) -> tuple[pd.Series, str]:
    """(bytes in percent of dense, the name of that axis): at boundaries, or of learners' gradients
    where more of the settings differ in these.
    """
    kinds = frame.drop_duplicates("setting")
    rates = kinds["gradients.rate"].nunique() if "gradients.rate" in frame else 0
    if "bytes.ratio" in frame and kinds["bytes.ratio"].nunique() >= max(2, rates):
        return 100 * frame["bytes.ratio"].astype(float), "bytes at boundaries (% of dense)"
    if "gradients.rate" in frame:
        return 100 / frame["gradients.rate"].astype(float), "bytes of gradients (% of dense)"
    return pd.Series(math.nan, frame.index), ""


def _by_method(rows: pd.DataFrame, how: Score) -> pd.DataFrame:
    """name, x (share of bytes) and values of each setting that has a score."""
    points = []
    for method, group in rows.groupby("method", sort=False):
        values = how.of(group[how.column].dropna())
        if values:
            share = float(group["share"].mean())
            points.append({"name": in_words(str(method)), "x": share, "values": values})
    return pd.DataFrame(points, columns=["name", "x", "values"])


@_kind
def score_bytes(rows: pd.DataFrame, curves: pd.DataFrame, score: str = "") -> Figure | None:
    """Score against bytes sent, with compression on and off at inference; the grey line joins what
    no setting with as few bytes beats. Bars are 95 % intervals over seeds.
    """
    rows, left_out = _largest_training(rows)
    done = _done(rows)
    name = score or _of_rows(done)
    if not name:
        return None
    share, label = sent_share(done)
    done = done.assign(share=share)
    done = done[done["share"].notna() & (done["share"] > 0)]
    modes = _modes(name, done)
    if done["share"].nunique() < 2:
        return None
    figure, axes = plt.subplots(
        1, len(modes), figsize=size(len(modes), 3.0), sharey=True, squeeze=False
    )
    how = score_of(name, error=True)
    points = [_by_method(done, score_of(column, error=True)) for column, _ in modes]
    fronts = [front_of(frame, how.log) for frame in points]
    first = [name for front in fronts for name in front["name"]]
    best = sorted(points[0].to_dict("records"), key=lambda point: ends(point["values"]).mean)
    names = chosen([point["name"] for point in best], first)
    styles = distinct_looks(names)
    for axis, (_, title), frame, front in zip(axes[0], modes, points, fronts, strict=True):
        scatter(axis, frame, styles, front, how.log)
        axis.set(title=title, xlabel=label)
        logarithmic(axis.xaxis)
    axes[0, 0].set_ylabel(how.label)
    if how.log:
        logarithmic(axes[0, 0].yaxis)
    legend(figure)
    text = (
        f"{how.label.capitalize()} against bytes sent, {LOG_INTERVAL if how.log else INTERVAL}, "
        f"{_seeds(done)}. Line: no setting with as few bytes is better.{_lost(rows)}{left_out}"
    )
    grey = len(best) - len(names)
    if grey:
        text += f" Grey: {grey} further settings."
    return finish(figure, text)


@_kind
def bits(rows: pd.DataFrame, curves: pd.DataFrame, score: str = "") -> Figure | None:
    """Score by bits forward and backward, as a map; 32 bits are dense. Means over seeds, under them
    their 95 % intervals.
    """
    rows, left_out = _largest_training(rows)
    done = _done(rows)
    name = score or _of_rows(done)
    columns = [f"{side}.compressor.bits" for side in ("fwd", "bwd")]
    if not name or any(column not in done for column in columns):
        return None
    plain = done[(done[columns].notna().any(axis=1) | (done["codec"] == "dense"))]
    for side, column in zip(("fwd", "bwd"), columns, strict=True):
        plain = plain[plain[column].notna() | (plain[f"{side}.codec"] == "none")]
    plain = plain[plain["feedback"] == "none"].fillna(dict.fromkeys(columns, 32))
    forms = [column for column in done if column.startswith(("fwd.compressor", "bwd.compressor"))]
    forms = [column for column in forms if column not in columns and not column.endswith("kind")]
    panels = []
    settings = plain[plain["codec"] != "dense"]
    if settings.empty:
        return None
    # a side that is not compressed has no form of its own
    by_form = {}
    for form in dict.fromkeys(name.partition(".")[2] for name in forms):
        empty = pd.Series(math.nan, settings.index, dtype=object)
        forward, back = (settings.get(f"{side}.{form}", empty) for side in ("fwd", "bwd"))
        by_form[form] = forward.astype(object).where(forward.notna(), back)
    words = pd.DataFrame(by_form, index=settings.index).fillna("").map(str)
    keys = words.agg("|".join, axis=1)
    for _, group in settings.groupby(keys, sort=False):
        with_dense = pd.concat([group, plain[plain["codec"] == "dense"]])
        if min(group[column].nunique() for column in columns) > 1:
            panels.append(with_dense)
    if not panels:
        return None
    how = score_of(name)
    figure, axes = plt.subplots(
        1, len(panels), figsize=size(min(2, len(panels)), 2.6), squeeze=False
    )
    means = [ends(how.of(g[name])).mean for p in panels for _, g in p.groupby(columns)]
    for axis, panel in zip(axes[0], panels, strict=True):
        _map(axis, panel, columns, how, (min(means), max(means)))
    axes[0, 0].set_ylabel("bits of activations")
    text = (
        f"{how.label.capitalize()} by bits of activations and of gradients (32: not compressed), "
        f"means and {INTERVAL}, {_seeds(settings)}. Empty: not run.{_lost(rows)}{left_out}"
    )
    return finish(figure, text)


def _map(
    axis: Axes, panel: pd.DataFrame, columns: list[str], how: Score, limits: tuple[float, float]
) -> None:
    down, across = (sorted(panel[column].unique()) for column in columns)
    values = np.full((len(down), len(across)), np.nan)
    points = plt.rcParams["font.size"]
    for y, fwd in enumerate(down):
        for x, bwd in enumerate(across):
            cell = panel[(panel[columns[0]] == fwd) & (panel[columns[1]] == bwd)]
            point = ends(how.of(cell[how.column]))
            values[y, x] = point.mean
            if not point.n:
                continue
            dark = point.mean < sum(limits) / 2
            text = f"{point.mean:.3g}"
            if point.n > 1:
                text += f"\n[{point.low:.3g}, {point.high:.3g}]"
            ink = "white" if dark else "black"
            axis.text(x, y, text, ha="center", va="center", fontsize=0.75 * points, color=ink)
    axis.grid(visible=False)
    axis.set_facecolor("0.92")
    axis.imshow(values, cmap="viridis", vmin=limits[0], vmax=limits[1], aspect="auto")
    axis.set_xticks(range(len(across)), [f"{value:g}" for value in across])
    axis.set_yticks(range(len(down)), [f"{value:g}" for value in down])
    scales = list(panel["fwd.compressor.scale"].dropna()) if "fwd.compressor.scale" in panel else []
    axis.set(xlabel="bits of gradients", title=f"scale: {scales[0]}" if scales else "")


SHOWN = (-60.0, 140.0)  # percent of worth that the axis has room for


@_kind
def worth_kept(rows: pd.DataFrame, curves: pd.DataFrame, score: str = "") -> Figure | None:
    """The share of its message's worth that each setting keeps: 100 % is dense, 0 % the floor,
    below 0 % harm. Bars are 95 % intervals (Fieller); an arrowhead marks what lies beyond the axis.
    Collapsed settings are no better than without the message, and have no worth.
    """
    if "fwd.compressor.kind" not in rows:
        return None
    by_setting = worths.of_settings(rows)
    names = dict(zip(rows.setting, rows.method, strict=True)) if "setting" in rows else {}
    shares = {str(in_words(names[key])): share for key, share in by_setting.items() if key in names}
    shares = {name: share for name, share in shares.items() if not name.startswith("dense")}
    if not any(share.ranks for share in shares.values()):
        return None
    order = sorted(shares, key=lambda name: (shares[name].ranks, shares[name].percent or 0.0))
    figure, axis = plt.subplots(figsize=size(2, 0.7 + 0.19 * len(order)))
    ranked = [share for share in shares.values() if share.ranks]
    numbers = [0.0, 100.0]
    for share in ranked:
        numbers += [end for end in (share.percent, share.low, share.high) if end is not None]
    first, last = max(SHOWN[0], min(numbers) - 8), min(SHOWN[1], max(numbers) + 8)
    for height, name in enumerate(order):
        share = shares[name]
        if not share.ranks:
            axis.text(first, height, f" {share.text()}", va="center", color="0.35")
            continue
        low, high = (share.percent if end is None else end for end in (share.low, share.high))
        point = Ends(share.percent, low, high, share.n)
        colour = look("worth kept")["color"]
        inside = first <= share.percent <= last
        plot(axis, [height], [point], sideways=True, marker="o" if inside else "", color=colour)
        if not inside:
            edge, mark = (first, "<") if share.percent < first else (last, ">")
            axis.plot([edge], [height], marker=mark, color=colour, clip_on=False, mfc="white")
    for edge in (0, 100):
        axis.axvline(edge, color="0.6", lw=0.7, ls=":")
    axis.set_yticks(range(len(order)), [legible(name) for name in order])
    axis.set(xlim=(first, last), xlabel="worth kept (%): 0 is the floor, 100 is dense")
    axis.set_ylim(-0.7, len(order) - 0.3)
    n = span(share.n for share in ranked)
    text = (
        "Share of its message's worth that each setting keeps: (floor - setting) / (floor - dense),"
        f" with 95 % intervals (Fieller), n = {n} seeds. {worths.floors_text(rows)} "
        "Words at the left edge: no worth, because the training collapsed, diverged, or the floor "
        f"and dense cannot be told apart.{_lost(rows)}"
    )
    return finish(figure, text)


@_kind
def rate(rows: pd.DataFrame, curves: pd.DataFrame, score: str = "") -> Figure | None:
    """Bytes sent in each part of the training, of codecs whose messages change in size.

    Bands are 95 % intervals over seeds.
    """
    if curves.empty or not {"bytes", "step", "setting"} <= set(curves):
        return None
    sent = next(axis for axis in _along(curves) if axis.endswith("bytes"))
    ordered = curves.sort_values("step")
    by_run = ordered.groupby("id")
    ordered = ordered.assign(
        rate=(ordered[sent] - by_run[sent].shift(fill_value=0))
        / (ordered["step"] - by_run["step"].shift(fill_value=0))
    )
    spread = ordered.groupby("setting")["rate"].agg(["min", "max"])
    adaptive = spread.index[(spread["min"] > 0) & (spread["max"] > 1.1 * spread["min"])]
    shown = lines(ordered[ordered["setting"].isin(adaptive)], Score("rate", "", log=True))
    shown = [line for line in shown if len(line.means) > 1]
    if not shown:
        return None
    figure, axis = plt.subplots(figsize=size(1, 2.6))
    unit, name = in_bytes(max(point.mean for line in shown for point in line.means))
    styles = distinct_looks(line.name for line in shown[:NAMED])
    for line in shown[:NAMED]:
        scaled = [Ends(p.mean / unit, p.low / unit, p.high / unit, p.n) for p in line.means]
        band(axis, list(line.x["step"]), scaled, **styles[line.name], label=line.name)
    axis.set(xlabel="steps", ylabel=f"{name} a step")
    logarithmic(axis.yaxis)
    legend(figure)
    text = f"Bytes a step along the training, {LOG_INTERVAL}."
    if len(shown) > NAMED:
        text += f" Left out: {len(shown) - NAMED} further settings."
    return finish(figure, text)


@_kind
def boundaries(rows: pd.DataFrame, curves: pd.DataFrame, score: str = "") -> Figure | None:
    """Bytes a step at every boundary, activations forward (full) and gradients backward (pale);
    settings by total. Means over seeds.
    """
    done = _done(rows)
    names = [name.removeprefix("boundary.") for name in rows if name.startswith("boundary.")]
    cuts = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    columns = [f"boundary.{cut}.{side}" for cut in cuts for side in ("fwd", "bwd")]
    if not columns:
        return None
    mean = done.groupby("method", sort=False)[columns].mean().fillna(0)
    mean = mean.loc[mean.sum(axis=1).sort_values(ascending=False).index]
    mean = mean[mean.sum(axis=1) > 0]
    if mean.empty:
        return None
    stride = -(-len(mean) // 30)
    shown = mean.iloc[::stride]
    figure, axis = plt.subplots(figsize=size(2, 0.9 + 0.17 * len(shown)))
    unit, unit_name = in_bytes(float(shown.sum(axis=1).max()))
    left = np.zeros(len(shown))
    colours = plt.get_cmap("cividis")(np.linspace(0, 0.85, len(cuts)))
    for cut, colour in zip(cuts, colours, strict=True):
        for side, alpha in (("fwd", 1.0), ("bwd", 0.45)):
            length = shown[f"boundary.{cut}.{side}"].to_numpy() / unit
            messages = "activations" if side == "fwd" else "gradients"
            axis.barh(
                range(len(shown)),
                length,
                left=left,
                color=colour,
                alpha=alpha,
                height=0.75,
                label=f"{cut}, {messages}",
            )
            left += length
    axis.set_yticks(range(len(shown)), [legible(str(name)) for name in shown.index])
    axis.set(xlabel=f"{unit_name} a step")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    legend(figure)
    text = (
        "Bytes a step at every boundary, activations forward (full) and gradients backward (pale). "
        f"Means over seeds, {_seeds(done)}; bytes are counted, so there is no interval."
    )
    if stride > 1:
        text += f" Shown: {len(shown)} of {len(mean)} settings, evenly chosen by total."
    return finish(figure, text)


KINDS: dict[str, Kind] = {
    "convergence": convergence,
    "score_k": score_k,
    "score_bytes": score_bytes,
    "bits": bits,
    "worth_kept": worth_kept,
    "rate": rate,
    "boundaries": boundaries,
}
WITHOUT_SCORE = ("worth_kept", "rate", "boundaries")
NEEDS = {
    "convergence": "curves (cs.load_curves) with at least two points a run",
    "score_k": "rows with a column K, two values of it in one codec",
    "score_bytes": "rows with bytes.ratio or gradients.rate, and a score",
    "bits": "rows with two numbers of bits forward and two backward",
    "worth_kept": "rows with dense runs and the control that sends nothing",
    "rate": "curves (cs.load_curves) with bytes, of a codec whose messages change in size",
    "boundaries": "rows with bytes at boundaries",
}


def figure(
    data: pd.DataFrame,
    kind: str,
    *,
    score: str = "",
    by: str = "",
    width: str = "",
    venue: str = "",
    curves: pd.DataFrame | None = None,
) -> Figure:
    """A figure of the field, for a paper.

    Args:
        data: rows (`cs.load_rows`), or for "convergence" and "rate" curves (`cs.load_curves`).
        kind: "convergence", "score_k", "score_bytes", "bits", "worth_kept", "rate" or "boundaries".
        score: the column to draw, such as "val_off_acc" ("": the one that fits).
        by: of "convergence", the one axis to draw: "step", "bytes" or "seconds" ("": all three).
        width: "column" (3.3 inches) or "page" (6.9) ("": what the kind needs).
        venue: sizes and fonts of a venue, such as "icml2024", from the library tueplots.
        curves: curves beside rows, where both are at hand.

    Returns:
        The figure, with its caption in `figure.get_label()`: n, interval, units, what is left out.

    Raises:
        UserError: the kind, the score, the axis, the width or the venue is unknown, or the data
            have nothing to draw, naming what the kind needs.
    """
    if kind not in KINDS:
        raise UserError(f"no figure '{kind}'{nearest(kind, KINDS)} (figures: {', '.join(KINDS)})")
    if score and kind in WITHOUT_SCORE:
        raise UserError(f"score='{score}': figure '{kind}' draws no score; leave it out")
    if by and (by not in ("step", "bytes", "seconds") or kind != "convergence"):
        raise UserError(f"by='{by}': of convergence, one of step, bytes, seconds")
    is_curves = "step" in data and "model.name" not in data
    if score and score not in data and (curves is None or score not in curves):
        names = [name for name in data if name.rpartition("_")[2] in ("acc", "loss", "ppl")]
        raise UserError(f"score='{score}': no such column{nearest(score, names)}")
    rows = data if is_curves or "setting" in data else tidy(data)
    points = data if is_curves else curves if curves is not None else pd.DataFrame()
    options = {"by": by} if kind == "convergence" else {}
    with drawing(sheet(width, venue)):
        drawn = KINDS[kind](rows, points, score=score, **options)
    if drawn is None:
        raise UserError(f"figure '{kind}' has nothing to draw: it needs {NEEDS[kind]}")
    return drawn

"""Figures: no value is lost on a logarithmic axis, intervals are those of the verdicts, no colour
stands for two settings, captions say n, interval and what is left out.
"""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection

import commsweep as cs
from commsweep.errors import UserError
from commsweep.reporting import statistics
from commsweep.reporting.figure import KINDS, lines, score_of
from commsweep.reporting.style import (
    NAMED,
    distinct_looks,
    drawing,
    ends,
    finish,
    logarithmic,
    look,
    plot,
    rescale,
    save,
    sheet,
)
from commsweep.reporting.words import latex


def curves(*runs):
    """Curves of runs (method, seed, steps, losses)."""
    points = []
    for method, seed, steps, losses in runs:
        for step, loss in zip(steps, losses, strict=True):
            point = {"id": f"{method}{seed}", "setting": method, "seed": seed, "codec": method}
            point |= {"method": method, "step": step, "bytes": 1e6 * step, "seconds": step / 10}
            points.append(point | {"val_on_loss": loss})
    return pd.DataFrame(points)


def rows(count=3, seeds=3, **columns):
    """Rows of dense and of TopK at `count` levels, with a score that falls with K."""
    generator = np.random.default_rng(0)
    out = []
    for setting in range(count):
        for seed in range(seeds):
            share = 1.0 / 2**setting
            row = {
                "id": f"{setting}-{seed}",
                "setting": f"s{setting}",
                "setting_id": f"s{setting}",
                "seed": seed,
                "status": "finished",
                "method": f"TopK {100 * share:g} %" if setting else "dense",
                "codec": f"fwd=topk:{share:g} bwd=topk:{share:g}" if setting else "dense",
                "K": share if setting else math.nan,
                "bits": math.nan,
                "feedback": "none",
                "bytes.ratio": share,
                "test_on_acc": 0.9 - 0.1 * setting + 0.01 * generator.normal(),
                "test_off_acc": 0.8 - 0.1 * setting + 0.01 * generator.normal(),
            }
            out.append(row | columns)
    return pd.DataFrame(out)


def bands(axis):
    """(low, high) at each x of every band that is drawn."""
    edges = []
    for band in axis.collections:
        if isinstance(band, PolyCollection):
            for path in band.get_paths():
                vertices = pd.DataFrame(path.vertices, columns=["x", "y"])
                edges.append(vertices.groupby("x").y.agg(["min", "max"]))
    return edges


@pytest.mark.parametrize(
    ("values", "scale"), [((0.5, 2.0), "log"), ((0.0, 2.0), "symlog"), ((-1.0, 2.0), "symlog")]
)
def test_an_axis_that_reaches_zero_is_linear_around_it(values, scale):
    figure, axes = plt.subplots()
    axes.plot([1, 2], values, "o")
    rescale(figure, "log")
    assert axes.get_yscale() == scale
    heights = axes.transData.transform([(1, value) for value in values])[:, 1]
    assert heights[0] < heights[1] and abs(heights).max() < 1e6
    rescale(figure, "linear")
    assert axes.get_yscale() == "linear"
    plt.close(figure)


def test_axes_with_names_stay():
    figure, axes = plt.subplots()
    axes.barh([0, 1], [1.0, 2.0])
    axes.set_yticks([0, 1], ["dense", "TopK"])
    rescale(figure, "log")
    assert axes.get_yscale() == "linear"
    plt.close(figure)


@pytest.mark.parametrize(("values", "scale"), [([0.0, 0.1, 1.0], "symlog"), ([0.1, 1.0], "log")])
def test_a_setting_without_error_is_drawn(values, scale):
    """On axes of errors too, where 0 is a code that loses nothing."""
    figure, axes = plt.subplots()
    axes.plot(values, values, "o")
    logarithmic(axes.xaxis, axes.yaxis)
    figure.canvas.draw()
    assert (axes.get_xscale(), axes.get_yscale()) == (scale, scale)
    places = axes.transData.transform([[value, value] for value in values])
    assert (places[:, 0] >= axes.bbox.x0 - 1).all() and len(set(places[:, 0])) == len(values)
    plt.close(figure)


def test_a_band_is_the_interval_of_the_verdicts_and_has_a_gap_where_n_is_1():
    steps = [10, 20, 30]
    figure = cs.figure(
        curves(
            ("dense", 0, steps, [3.0, 2.0, 1.0]),
            ("dense", 1, steps, [3.2, 2.4, 1.1]),
            ("TopK", 0, steps, [3.0, 2.5, 2.0]),
        ),
        "convergence",
        by="step",
    )
    (band,) = bands(figure.axes[0])  # the single run has none
    low, high = statistics.interval([math.log(2.0), math.log(2.4)])
    assert band.loc[20].to_list() == pytest.approx([math.exp(low), math.exp(high)])
    assert "n = 1 to 2" in figure.get_label() and "no band where n is 1" in figure.get_label()
    plt.close(figure)


def test_seeds_that_end_early_or_diverge_are_dotted_and_said():
    frame = curves(
        ("dense", 0, [10, 20, 30, 40], [3.0, 2.0, 1.0, 0.9]),
        ("dense", 1, [10, 20, 30], [3.2, 2.4, 1.1]),
        ("dense", 2, [10, 20, 30, 40], [3.1, math.nan, 5.0, 5.0]),
    )
    (line,) = lines(frame, score_of("val_on_loss"))
    assert [point.n for point in line.means] == [3, 2, 2, 1]
    assert (line.complete, line.seeds, line.dropped) == (1, 3, 2)
    figure = cs.figure(frame, "convergence", by="step")
    assert ":" in {drawn.get_linestyle() for drawn in figure.axes[0].lines}
    assert "2 runs diverged or ended" in figure.get_label()
    plt.close(figure)


def test_a_curve_that_reaches_zero_is_drawn_whole():
    steps = [10, 20]
    frame = curves(("a", 0, steps, [1.0, 0.0]), ("a", 1, steps, [1.0, 0.0]))
    figure = cs.figure(frame, "convergence", by="step")
    assert figure.axes[0].get_yscale() == "symlog"
    assert figure.axes[0].lines[0].get_ydata()[-1] == 0.0
    plt.close(figure)


def test_many_settings_have_axes_of_their_own_beside_dense():
    steps = [10, 20]
    runs = [(f"TopK {number} %", 0, steps, [2.0, 1.0]) for number in range(NAMED + 1)]
    figure = cs.figure(curves(("dense", 0, steps, [2.0, 0.5]), *runs), "convergence")
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert len(shown) == NAMED + 1 and all(len(axis.lines) == 2 for axis in shown)
    plt.close(figure)


@pytest.mark.parametrize("count", [3, NAMED, 12])
def test_no_colour_stands_for_two_settings_and_all_are_drawn(count):
    frame = rows(count)
    figure = cs.figure(frame, "score_bytes")
    for axis in figure.axes:
        colours = [series[0].get_color() for series in axis.containers]
        assert len(set(colours)) == len(colours)
        assert sum(len(series[0].get_xdata()) for series in axis.containers) == count
    text = figure.get_label()
    assert "n = 3" in text and (f"{count - NAMED} further settings" in text) == (count > NAMED)
    plt.close(figure)


def test_a_name_has_one_look_in_all_figures_of_a_report():
    with drawing():
        first = [look(name) for name in ("a", "b", "c")]
        assert list(distinct_looks(["c", "a"]).values()) == [first[2], first[0]]
        with drawing():
            assert look("b") == first[1]
        everything = [look(f"name {number}") for number in range(25)]
    distinct = {(style["color"], style["marker"], str(style["ls"])) for style in everything}
    assert len(distinct) == 25
    assert len({style["color"] for style in distinct_looks("abcdefg").values()}) == 7


def test_bars_are_intervals_and_those_of_one_seed_have_none():
    figure = cs.figure(rows(3, 1), "score_k")
    for series in figure.axes[0].containers:
        for segment in series[2][0].get_segments():
            assert segment[0][1] == segment[1][1]
    figure_of_three = cs.figure(rows(3, 3), "score_k")
    (series,) = figure_of_three.axes[0].containers
    low, high = statistics.interval(list(100 * rows().query("setting == 's2'").test_on_acc))
    assert series[2][0].get_segments()[0][:, 1] == pytest.approx([low, high])
    plt.close("all")


@pytest.mark.parametrize("log", [False, True])
def test_an_interval_that_leaves_the_axes_ends_in_a_mark(log):
    figure, axis = plt.subplots()
    wide, narrow = ends([0.1, 40.0], log), ends([3.0, 3.1, 3.2], log)
    plot(axis, [1, 2], [wide, narrow], color="k")
    if log:
        logarithmic(axis.yaxis)
    before = len(axis.lines)
    finish(figure)
    marks = [line.get_marker() for line in axis.lines[before:]]
    assert marks == ["v", "^"] and axis.get_ylim()[1] < wide.high
    plt.close(figure)


def test_an_interval_on_a_logarithmic_axis_is_of_the_logarithm():
    values = [1.0, 2.0, 8.0]
    low, high = statistics.interval([math.log(value) for value in values])
    point = ends(values, log=True)
    assert (point.low, point.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert point.mean == pytest.approx(16 ** (1 / 3)) and point.low > 0
    assert ends([0.0, 1.0], log=True) == ends([0.0, 1.0])
    assert ends([math.nan, 2.0]).n == 1 and math.isnan(ends([2.0]).low)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_that_has_nothing_to_draw_says_what_it_needs(kind):
    with pytest.raises(UserError, match="it needs (rows|curves)"):
        cs.figure(rows(1, 1).drop(columns="bytes.ratio"), kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "convergance"}, "did you mean 'convergence'"),
        ({"kind": "score_k", "score": "test_on_ac"}, "did you mean 'test_on_acc'"),
        ({"kind": "score_k", "by": "step"}, "of convergence, one of step"),
        ({"kind": "worth_kept", "score": "test_on_acc"}, "draws no score"),
        ({"kind": "score_k", "width": "colum"}, "did you mean 'column'"),
        ({"kind": "score_k", "venue": "icml2042"}, "not one of aaai2024"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_line(options, message):
    with pytest.raises(UserError, match=message):
        cs.figure(rows(), **options)


def test_widths_and_venues_are_those_of_the_page():
    for width, inches in (("column", 3.3), ("page", 6.9)):
        figure = cs.figure(rows(), "score_k", width=width)
        assert figure.get_figwidth() == inches
    with drawing(sheet("column", "icml2024")) as page:
        assert page.column == 3.25 and page.page == 6.75 and page.points == 8
        assert plt.rcParams["font.family"] == ["serif"]
    plt.close("all")


def test_a_caption_lies_beside_its_figure_as_text_and_in_latex(tmp_path):
    figure, axis = plt.subplots(figsize=(6.9, 2))
    axis.plot([1, 2])
    finish(figure, "100 % of A_1 & B")
    save(figure, tmp_path, "one", ("png",))
    assert (tmp_path / "one.txt").read_text() == "100 % of A_1 & B\n"
    text = (tmp_path / "one.tex").read_text()
    assert r"\caption{100 \% of A\_1 \& B}" in text and r"\begin{figure*}" in text
    assert latex("50 % ± #1 {x} fwd \\ bwd") == (r"50 \% $\pm$ \#1 \{x\} fwd \textbackslash{} bwd")

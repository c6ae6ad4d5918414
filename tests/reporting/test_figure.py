"""Scales of figures: no value is lost on a logarithmic axis."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from commsweep.reporting.figure import logarithmic, rescale


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

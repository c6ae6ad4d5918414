"""The law of scale: powers of made-up rows are found again, and the largest width is foretold."""

from __future__ import annotations

from typing import Any

import pytest

from commsweep.config import run_id
from commsweep.launching.launch import register
from commsweep.registry import content
from commsweep.reporting import report_parts, results
from commsweep.reporting.claim import CONTRADICTED, NOT_ENOUGH, SUPPORTED
from commsweep.store import Store
from tests.helpers import outcome

scale = content("analysis.scale")
sweeps = content("sweeps.ladders")
ERRORS = {"zero": 1.0, "uniform4": 0.03, "uniform2": 0.7, "tern": 0.95, "randomk": 3.0, "eden": 0.2}


def name_of(run):
    compressor = run.bwd.compressor
    return compressor.kind + (str(compressor.bits) if compressor.kind == "uniform" else "")


def share(run, width_power):
    """Percent of the worth that a code loses."""
    steps, error = run.data.train_blocks / 16, ERRORS[name_of(run)]
    return 8 * (steps / 400) ** 0.25 * (run.model.width / 64) ** width_power * error**0.5


def filled(tmp_path, beyond=False, width_power=-0.5, largest_power=None):
    """Rows made up by a law. largest_power: of the width 256, where it is another."""
    store, runs = Store(tmp_path), sweeps.text_scale()
    if not beyond:
        runs = [run for run in runs if run.model.width < 256]
    for run in runs:
        steps, width = run.data.train_blocks / 16, run.model.width
        power = width_power if width < 256 or largest_power is None else largest_power
        worth = 0.5 * (steps / 400) ** 0.4 * (width / 64) ** 0.1
        lost = {"none": 0.0, "zero": worth}.get(name_of(run))
        if lost is None:
            lost = worth * share(run, power) / 100
        looks = []
        if name_of(run) != "none":
            looks = [{"boundary": "block0", "direction": "bwd", "error": ERRORS[name_of(run)]}]
        metrics = {"test_on_loss": 1.5 + lost, "test_off_loss": 1.5 + lost}
        store.folder(run_id(run)).begin(run, {})
        row: Any = outcome(run, metrics=metrics, diagnosis=looks)
        store.folder(run_id(run)).finish(row)
    register("text_scale", runs, store)
    return results.load(store.root, "text_scale")


def verdicts(frame):
    return {claim.name: claim.verdict for claim in report_parts.all_claims(frame, ["scale"])}


def test_powers_of_steps_width_and_error_are_found_again(tmp_path):
    frame = filled(tmp_path)
    laws = scale.laws(frame)
    assert laws.share.powers == pytest.approx((0.25, -0.5, 0.5), abs=0.01)
    assert laws.worth.powers == pytest.approx((0.4, 0.1, 0.0), abs=0.01)
    assert laws.lost.powers == pytest.approx((0.65, -0.4, 0.5), abs=0.01)
    assert laws.share.factor == pytest.approx(1, abs=0.02)
    assert {point.width for point in laws.unseen} == {256}
    table = scale.tables(frame)[1]
    tern = next(row for row in table.rows if "TernGrad" in row[0])
    # 8 * 4 ** 0.25 * (256 / 64) ** -0.5 * 0.95 ** 0.5 percent are lost
    assert tern[4].startswith("94 % [93, 95]") and tern[3] == tern[5] == "-"
    assert set(verdicts(frame).values()) <= {NOT_ENOUGH}
    assert scale.scale(frame, frame) is not None


def test_the_largest_width_is_foretold_from_the_others_alone(tmp_path):
    frame = filled(tmp_path / "as foretold", beyond=True)
    laws = scale.laws(frame)
    assert {point.width for point in laws.points} == {32, 64, 128}
    assert verdicts(frame) == {"Y1": SUPPORTED, "Y2": SUPPORTED, "Y3": SUPPORTED}
    other = filled(tmp_path / "otherwise", beyond=True, largest_power=1.0)
    assert scale.laws(other).share == laws.share
    assert verdicts(other)["Y3"] == CONTRADICTED
    measured = {row[0]: row[5] for row in scale.tables(other)[1].rows}
    assert measured["gradients: TernGrad"] == f"{100 - 8 * 4**0.25 * 4 * 0.95**0.5:.0f} %"


def test_a_law_that_missed_a_left_out_width_is_less_certain(tmp_path):
    def bent(point):
        return point.share * (2.0 if point.width == 128 else 1.0)

    laws = scale.laws(filled(tmp_path))
    values = [bent(point) for point in laws.points]
    tried = scale.tried(laws.points, values, 1.0)
    low, high = tried.ends(laws.unseen[0])
    assert tried.factor == pytest.approx(2.0, rel=0.1)
    value = tried.at(laws.unseen[0])
    assert low == pytest.approx(max(0, value / tried.factor - 1))
    assert high == pytest.approx(value * tried.factor + 1)


def test_a_grid_of_widths_and_lengths_is_no_ladder(tmp_path):
    frame = filled(tmp_path)
    assert content("analysis.ladders").rows(frame).empty
    one_width = frame[frame["model.width"] == 64]
    assert scale.rows(one_width).empty and not scale.tables(one_width)

"""The model of measured learners, over made-up measurements whose truth is known."""

from __future__ import annotations

import pandas as pd
import pytest

from commsweep.config import override, record, run_id
from commsweep.config.run import SCHEMA
from commsweep.processes import ddp
from commsweep.registry import content, plan
from commsweep.second_order.placement import Factor, placed_factors
from commsweep.timing.measured_learners import (
    ACKNOWLEDGED,
    ExchangeModel,
    LearnerModel,
    LearnerNetwork,
    LearnerStep,
    measurements,
)
from commsweep.timing.timeline.pipelines import Network as Wire
from tests.helpers import outcome, tiny, tiny_text

spd_iterations = content("analysis.kfac_steps")

links = content("analysis.links")

kfac = content("sweeps.kfac")

SIZES = [20, 10, 30, 12]  # A and G of two layers
ELEMENTS = [d * (d + 1) // 2 for d in SIZES]
READY = [0.010, 0.020, 0.030, 0.040]
ORDER = [0, 2, 3, 1]
GRADIENT = 20 * 10 + 30 * 12
C1 = 1e-6  # seconds a cubed row
REST = 0.012  # of computing after the messages


def line(network):
    """The truth: a message of m elements takes 0.1 ms and wire time, beside 1 us an element of
    handling.
    """
    wire = 32 * (network.learners - 1) / network.bandwidth if network.bandwidth else 0.0
    return 1e-4, wire + 1e-6


def row(network, fusion="after", placement="everywhere", kfac=True, late=1.0, run=None, name=""):
    """A measurement as the truth has it: nothing overlaps with `after`."""
    run = run or tiny(model__cuts=[], grad__learners=network.learners, **WITH[kfac])
    alpha, beta = line(network)
    inverting = [C1 * d**3 for d in SIZES]
    parts = {"passes": 0.020, "gradients": alpha + beta * GRADIENT}
    timing = {"costs": {}, "steps": 12}
    if kfac:
        parts |= {
            "passes": 0.030,
            "factors": READY[-1] + REST - 0.030,
            "factor messages": alpha + beta * sum(ELEMENTS),
            "inversion": sum(inverting),
            "inverse messages": 0.0,
            "preconditioning": 0.0,
        }
        factors = [Factor(turn // 2, "AG"[turn % 2], size) for turn, size in enumerate(SIZES)]
        timing |= {
            "costs": {
                "gather": [alpha, beta],
                "broadcast": [alpha, beta],
                "inversion": [0.0, C1],
                "handling": [0.0, 1e-6],
                "handing_out": [0.0, 0.0],
            },
            "sizes": SIZES,
            "order": ORDER,
            "ready": READY,
            "groups": None,
            "inverters": placed_factors(placement, factors, network.learners).inverters,
        }
    timing |= {"step_seconds": late * sum(parts.values()), "parts": parts}
    name = name or f"{fusion}{placement}{kfac}{network.bandwidth:g}"
    return LearnerStep(
        {
            "schema": SCHEMA,
            "status": "measured",
            "metrics": {},
            "seconds": {},
            "id": name,
            "run": record(run),
            "run_id": run_id(run),
            "wiring": {
                "bandwidth": network.bandwidth,
                "latency": 0.0,
                "fusion": fusion,
                "placement": placement,
                "buffer": 2**24,
            },
            "timing": timing,
            "cores": 2,
            "gradients": {"up": 4.0 * GRADIENT, "dense": 4.0 * GRADIENT},
        }
    )


def fill(store):
    """The measurements of demo-kfac, made up."""
    for run, wiring in plan("demo-kfac"):
        folder = ddp.folder_of(store, run, wiring)
        folder.make()
        folder.finish(
            row(
                LearnerNetwork(run.grad.learners, wiring.bandwidth),
                wiring.fusion,
                wiring.placement,
                run.kfac is not None,
                run=run,
                name=folder.path.name,
            ).row
        )


WITH = {True: {"kfac__damping": 0.03}, False: {}}
FREE, SLOW = LearnerNetwork(2), LearnerNetwork(2, 1e7)


def test_measurements_are_read_from_a_store(store):
    fill(store)
    found = measurements(store)
    assert {one.algorithm for one in found} > {"S-SGD", "D-KFAC", "MPD-KFAC", "SPD-KFAC"} and len(
        found
    ) == 29
    assert len(measurements(store, [found[0].row["id"], "other"])) == 1
    assert [line[6] for line in spd_iterations.measured(found).texts()].count("fitted") == 4


def test_what_a_measurement_is_called():
    assert row(FREE).algorithm == "D-KFAC" and row(FREE, kfac=False).algorithm == "S-SGD"
    assert row(FREE, "after", "spread").algorithm == "MPD-KFAC"
    assert row(FREE, "layer").algorithm == "K-FAC, factors layer by layer, inverted everywhere"


def test_the_model_finds_what_made_the_measurements():
    found = [row(network, kfac=kfac) for network in (FREE, SLOW) for kfac in (True, False)]
    model = LearnerModel(found)
    assert [model.fitted(one) for one in found] == [True, True, False, False]
    assert [model.step(one) for one in found] == pytest.approx([one.seconds for one in found])
    assert spd_iterations.errors(found) == pytest.approx([0, 0], abs=1e-9)


def test_spread_is_predicted_from_the_same_measurement():
    """Two learners invert by halves; inverses take turns on the network."""
    found = [row(FREE), row(SLOW), row(SLOW, "after", "spread")]
    predicted, everywhere = LearnerModel(found).step(found[2]), LearnerModel(found).step(found[1])
    alpha, beta = line(SLOW)
    assert predicted < everywhere + 4 * alpha + beta * sum(ELEMENTS)
    assert predicted > everywhere - sum(C1 * d**3 for d in SIZES) + 4 * alpha + beta * sum(ELEMENTS)


def test_without_its_calibration_there_is_no_prediction():
    assert LearnerModel([row(SLOW)]).step(row(SLOW)) is None
    assert LearnerModel([row(FREE)]).step(row(LearnerNetwork(2, 3e8))) is None
    assert "no prediction" in spd_iterations.accuracy([row(SLOW)])


def test_a_prediction_that_orders_otherwise_is_found():
    """Layer by layer overlaps and so is predicted faster; measured it was half as fast again."""
    slower = row(SLOW, "layer", late=1.5)
    found = [row(FREE), row(SLOW), slower]
    assert LearnerModel(found).step(slower) < LearnerModel(found).step(found[1])
    assert spd_iterations.misordered(found, 0.08) == [("D-KFAC", slower.algorithm)]
    assert spd_iterations.misordered(found, 0.6) == []


def test_measured_claims_follow_the_measurements():
    networks = [LearnerNetwork(n, bits) for n, bits in ((2, 1e7), (2, 1e8), (4, 1e8))]
    for late, verdict in ((0.8, "supported"), (1.0, "contradicted")):
        found = (
            [row(network) for network in networks]
            + [row(network, "after", "spread") for network in networks]
            + [row(network, "pipelined", "balanced", late=late) for network in networks]
        )
        measured = spd_iterations.k1(found).effects[-1]
        assert len(measured.values) == 3 and measured.verdict == verdict


def apart(network, sent, steps=38, seconds=0.05, statistics=0, cores=8, timing=None, **changes):
    """A measurement of plain exchanges: every learner has handed `sent` bytes to the transport.
    timing: more of it.
    """
    run = override(
        tiny(model__cuts=[]),
        {"grad.learners": network.learners}
        | {key.replace("__", "."): value for key, value in changes.items()},
    )
    return LearnerStep(
        {
            "run": record(run),
            "run_id": run_id(run),
            "steps": steps,
            "id": "x",
            "cores": cores,
            "gradients": {"up": sent / steps},
            "timing": {
                "step_seconds": seconds,
                "spread": [seconds, seconds],
                "steps": steps,
                "parts": {"gradients": seconds / 2},
            }
            | (timing or {}),
            "wiring": {"bandwidth": network.bandwidth, "latency": network.latency},
            "transport": [
                {"gradients": sent, "statistics": statistics, "evaluation": 10**9}
                for _ in range(network.learners)
            ],
        }
    )


ROUND = 500_000  # bytes of one exchange
LATE = LearnerNetwork(4, 20e6, 0.02)


@pytest.mark.parametrize(
    ("changes", "rounds", "others", "exchanges", "share"),
    [
        ({}, 38, 3, 1, 1.0),
        ({"grad__outer__interval": 10}, 3, 3, 1, 0.1),
        ({"grad__outer__interval": 10, "grad__outer__peers": "pairs"}, 3, 1, 1, 0.1),
        ({"grad__outer__interval": 10, "grad__outer__fragments": 2}, 9, 3, 1, 0.3),
        ({"grad__compressor__kind": "powersgd"}, 38, 3, 2, 1.0),
    ],
)
def test_a_step_pays_its_share_of_an_exchange(changes, rounds, others, exchanges, share):
    """Bytes to so many others and latencies there and back, as often as learners meet; what was
    sent to score is not of a step.
    """
    base, late = (
        apart(network, rounds * ROUND, **changes) for network in (LearnerNetwork(4), LATE)
    )
    wire = Wire(20e6).seconds(others * ROUND) * ACKNOWLEDGED
    assert wire == pytest.approx(others * ROUND * 8 / 20e6, rel=0.1)
    told = ExchangeModel([base, late]).step(late)
    assert told == pytest.approx(0.05 + share * (exchanges * 0.04 + wire), rel=0.01)
    assert ExchangeModel([base, late]).step(base) == pytest.approx(0.05)
    assert ExchangeModel([late]).step(late) is None


@pytest.mark.parametrize(("changes", "share"), [({}, 1.0), ({"grad__outer__interval": 10}, 0.1)])
def test_a_latency_absorbs_what_learners_waited_for_each_other(changes, share):
    """Two latencies from one's own end on, however much earlier that is than the others' by less
    than a latency; a short latency absorbs part of it.
    """
    base = apart(LearnerNetwork(4), ROUND, timing={"waited": share * 0.01}, **changes)
    for latency, least, most in ((0.05, 0.09, 0.091), (0.02, 0.03, 0.034), (0.004, 0.002, 0.006)):
        late = apart(LearnerNetwork(4, 0.0, latency), ROUND, **changes)
        assert share * least - 1e-4 <= ExchangeModel([base, late]).step(late) - 0.05 <= share * most
    assert ExchangeModel([base]).step(base) == pytest.approx(0.05)


def test_what_is_computed_while_the_last_message_travels_is_not_waited_for():
    """All of it where links are later than it takes; no step is shorter than without links."""
    base = apart(LearnerNetwork(4), ROUND, timing={"meanwhile": 0.01})
    for latency, more in ((0.02, 0.03), (0.006, 0.002), (0.004, 0.0)):
        late = apart(LearnerNetwork(4, 0.0, latency), ROUND)
        assert ExchangeModel([base, late]).step(late) == pytest.approx(0.05 + more, abs=2e-4)


def test_a_step_is_predicted_at_the_speed_that_the_machine_had():
    """A fifth more seconds of a core for the same work: a fifth more of all but what is waited
    for.
    """
    for then, now, computing in (
        (0.03, 0.036, 0.048),
        (0.03, 0.03, 0.04),
        (None, 0.036, 0.04),
        (0.03, None, 0.04),
    ):
        base = apart(
            LearnerNetwork(4), ROUND, timing={"waited": 0.01} | ({"computed": then} if then else {})
        )
        late = apart(LearnerNetwork(4, 0.0, 0.05), ROUND, timing={"computed": now} if now else {})
        assert ExchangeModel([base, late]).step(late) == pytest.approx(computing + 0.1, rel=0.01)
        assert ExchangeModel([base, late]).step(base) == pytest.approx(0.05)


def test_what_is_not_compressed_travels_while_the_rest_is():
    """Statistics and vectors are sent before; where all layers are compressed, or none, they are
    not.
    """
    slow, pressed = (
        LearnerNetwork(2, 20e6),
        {"grad__compressor__kind": "topk", "grad__exchange": "allgather"},
    )
    steps = {}
    for name, changes in {
        "dense": {},
        "TopK": pressed,
        "all": pressed | {"grad__vectors": True},
    }.items():
        found = [
            apart(network, 38 * ROUND, statistics=38 * 50_000, **changes)
            for network in (LearnerNetwork(2), slow)
        ]
        for one in found:
            one.row["gradients"]["vector.up"] = 100_000
        steps[name] = ExchangeModel(found).step(found[1])
    wire = Wire(20e6).seconds(1) * ACKNOWLEDGED
    assert steps["dense"] - steps["TopK"] == pytest.approx(150_000 * wire)
    assert steps["all"] - steps["TopK"] == pytest.approx(100_000 * wire)


def test_what_is_used_late_travels_meanwhile_and_shards_are_not_predicted():
    outer = {"grad__outer__interval": 10}
    plain, hidden = (
        [apart(network, 3 * ROUND, **outer, **more) for network in (LearnerNetwork(4), LATE)]
        for more in ({}, {"grad__outer__overlap": 2, "timing": {"meanwhile": 0.01}})
    )
    assert ExchangeModel(plain).step(plain[1]) - ExchangeModel(hidden).step(
        hidden[1]
    ) == pytest.approx(0.1 * 2 * 0.05)
    small = [
        apart(network, 30, grad__outer__interval=10, grad__outer__overlap=9)
        for network in (LearnerNetwork(4), LATE)
    ]
    assert ExchangeModel(small).step(small[1]) == pytest.approx(0.05)
    told = [
        apart(one.network, 30, statistics=30, grad__outer__interval=10, grad__outer__overlap=9)
        for one in small
    ]
    assert ExchangeModel(told).step(told[1]) == pytest.approx(0.05 + 0.1 * 0.04, rel=1e-3), (
        "statistics are needed at once"
    )
    owned = [
        apart(network, 38 * ROUND, grad__sharded__nodes=1) for network in (LearnerNetwork(4), LATE)
    ]
    assert ExchangeModel(owned).step(owned[1]) is None


def test_whole_trainings_are_told_with_what_they_reach(store, tmp_path):
    """Seconds a step times the simulation's steps; perplexities of the seeds asked for, and none of
    the tuning's.
    """
    apart_ = override(tiny_text(), {"grad.learners": 4, "grad.outer.interval": 10})
    runs = [override(apart_, {"seed": seed}) for seed in (0, 1, 100)]
    for seed, run in enumerate(runs):
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        folder.finish(outcome(run, metrics={"test_on_ppl": 10.0 + seed}, steps=200))
    found = [
        apart(network, 3 * ROUND, grad__outer__interval=10) for network in (LearnerNetwork(4), LATE)
    ]
    for one in found:
        one.row.update(run=record(runs[0]), run_id=run_id(runs[0]))
    made = links.write_learners(found, tmp_path / "out", store, range(100))
    steps, ends = made.tables
    assert [row[3] for row in ends.texts()] == ["10.0", "10.0"] and [
        row[5:] for row in ends.texts()
    ] == [["10.50 ± 0.71", "2"]] * 2
    assert {row[4] for row in ends.texts()} == {
        "-",
        f"{200 * ExchangeModel(found).step(found[1]):.1f}",
    }
    assert len(steps.rows) == 2 and (tmp_path / "out" / "endings.png").exists()
    data = pd.read_csv(tmp_path / "out" / "measurements.csv")
    assert list(data.seconds) == [one.seconds for one in found] and list(data.latency) == [
        0.0,
        0.02,
    ]
    assert data.predicted[1] == pytest.approx(ExchangeModel(found).step(found[1]))
    assert data.gradients[0] == 4 * 3 * ROUND / 38, "of all learners, a step"

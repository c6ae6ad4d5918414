"""Tables, figures and advice from measurements; here their step times come from the timeline, so it
must find them.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import pandas as pd
import pytest

from commsweep.cli.main import main
from commsweep.config import record, run_id
from commsweep.config.execution import Wiring
from commsweep.config.override import parse
from commsweep.config.run import SCHEMA
from commsweep.errors import UserError
from commsweep.processes import pipeline
from commsweep.registry import content, plan
from commsweep.store import Store
from commsweep.timing import advice as advising
from commsweep.timing import measured_pipelines as measured
from commsweep.timing.timeline.pipelines import SCHEDULES, TORCH, Network, Times, step_seconds
from tests.helpers import linked, outcome, tiny
from tests.test_layout import ROOT

late_links = content("analysis.late_links")

links = content("analysis.links")

RATES = (1e6, 1e8, 0.0)
COMPUTE = {"dense": 0.004, "topk": 0.006}
BYTES = {"dense": 40_000, "topk": 4_000}
RUNS = {
    "dense": tiny(microbatches=4),
    "topk": linked({"kind": "topk", "ratio": 0.1}, {"kind": "topk", "ratio": 0.1}, microbatches=4),
}
HANDLING = 0.0007


def times(name: str, handling: float = 0.0) -> Times:
    return Times(
        [COMPUTE[name]] * 4,
        [2 * COMPUTE[name]] * 4,
        [0.001] * 4,
        [BYTES[name]] * 3,
        [BYTES[name]] * 3,
        handling=handling,
        cores=2,
    )


def taken(name: str, wiring: Wiring, place: str) -> dict:
    """A row as a measurement leaves it."""
    orders = SCHEDULES[wiring.schedule](4, 4)
    network = measured.Machine().network(Network(wiring.bandwidth, wiring.latency))
    seconds = step_seconds(orders, times(name, HANDLING), network, TORCH[wiring.schedule])
    part = {"F": COMPUTE[name], "B": 2 * COMPUTE[name], "U": 0.001}
    each = {what: {"seconds": one, "cpu": one} for what, one in part.items()}
    sent = [
        {
            "sent": {"fwd": 40 * BYTES[name] * (k < 3), "bwd": 40 * BYTES[name] * (k > 0)},
            "framing": {},
            "tied": 0,
        }
        for k in range(4)
    ]
    gantt = [[["F", 0, 0.0, 0.004], ["B", 0, 0.01, 0.02], ["U", 0, 0.02, 0.021]] for _ in range(4)]
    run = RUNS[name]
    return {
        "schema": SCHEMA,
        "metrics": {},
        "seconds": {},
        "id": place,
        "run_id": run_id(run),
        "status": "measured",
        "error": None,
        "steps": 10,
        "run": record(run),
        "wiring": wiring.model_dump(mode="json"),
        "transport": sent,
        "cores": 2,
        "timing": {
            "step_seconds": seconds,
            "steps": 9,
            "spread": [seconds, seconds],
            "tasks": [each] * 4,
            "gantt": gantt,
        },
    }


def evaluations(store: Store, name: str, scores: list[float]) -> None:
    """A finished simulation with these accuracies, one every 10 steps."""
    folder = store.folder(run_id(RUNS[name]))
    folder.make()
    folder.begin(RUNS[name], {})
    for turn, score in enumerate(scores):
        folder.append({"epoch": turn + 1, "step": 10 * (turn + 1), "test_on_acc": score})
    folder.finish(outcome(RUNS[name]))


def measure(made: Store) -> None:
    """Fill a store with measurements and simulations."""
    for name in RUNS:
        for wiring in [Wiring(bandwidth=rate, steps=10) for rate in RATES] + [
            Wiring(bandwidth=1e8, latency=0.02, steps=10),
            Wiring(schedule="1f1b", steps=10),
            Wiring(schedule="1f1b", bandwidth=1e6, steps=10),
        ]:
            place = pipeline.folder_of(made, RUNS[name], wiring)
            place.make()
            place.finish(taken(name, wiring, place.path.name))
    evaluations(made, "dense", [0.5, 0.9, 0.95])
    evaluations(made, "topk", [0.3, 0.8, 0.93, 0.945])


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "store")
    measure(made)
    return made


def test_the_model_finds_what_made_the_measurements(store):
    found = measured.measurements(store)
    fits = measured.models(found)
    assert len(fits) == 4
    for one in found:
        # several may give the same step
        assert fits[one.series].handling == pytest.approx(HANDLING, rel=0.3)
        assert fits[one.series].step(one.network) == pytest.approx(one.seconds, rel=0.02)


def test_what_was_measured_is_predicted_at_the_speed_that_the_machine_had(store):
    """A step taken while every part took 1.5 times as long; without a word of that it is not what
    was predicted.
    """
    found = measured.measurements(store)
    fits, one = measured.models(found), next(one for one in found if one.network.bandwidth == 1e8)
    model, slow = fits[one.series], slower(one, 1.5)
    assert slow.computed == pytest.approx(1.5 * one.computed)
    assert one.computed == pytest.approx(
        4 * (4 * 3 * COMPUTE["topk" if one.method != "dense" else "dense"] + 0.001)
    )
    assert model.measured(slow) == pytest.approx(slow.seconds, rel=0.02)
    assert model.step(slow.network) < 0.8 * slow.seconds
    assert model.measured(one) == pytest.approx(model.step(one.network))
    assert model.measured(model.base) == pytest.approx(model.base.seconds, rel=0.001)


def slower(one, pace):
    """What is measured where every part takes `pace` times as long."""
    tasks = [
        {
            what: {"seconds": pace * told["seconds"], "cpu": pace * told["cpu"]}
            for what, told in stage.items()
        }
        for stage in one.row["timing"]["tasks"]
    ]
    parts = times("topk" if one.method != "dense" else "dense", pace * HANDLING)
    parts = replace(
        parts,
        **{
            what: [pace * part for part in getattr(parts, what)]
            for what in ("forward", "backward", "update")
        },
    )
    seconds = step_seconds(
        SCHEDULES[one.schedule](4, 4),
        parts,
        measured.Machine().network(one.network),
        TORCH[one.schedule],
    )
    return measured.PipelineStep(
        one.row | {"timing": one.row["timing"] | {"step_seconds": seconds, "tasks": tasks}}
    )


def test_schedules_are_compared_at_one_speed_of_the_machine(store):
    """The machine was slow while GPipe was measured and fast while 1F1B was: both are predicted at
    the mean.
    """
    found = measured.measurements(store)
    bases = [one for one in found if one.network == Network()]
    run = bases[0].series[0]
    gpipe, f1b = (
        next(one for one in bases if one.series == (run, schedule))
        for schedule in ("gpipe", "1f1b")
    )
    others = [one for one in found if one not in (gpipe, f1b)]
    fits = measured.models([*others, slower(gpipe, 1.4), slower(f1b, 0.8)])
    for base in (gpipe, f1b):
        for one in (one for one in found if one.series == base.series):
            wanted = slower(one, 1.1).seconds
            assert fits[base.series].step(one.network) == pytest.approx(wanted, rel=0.02)
    assert fits[gpipe.series].measured(slower(gpipe, 1.4)) == pytest.approx(
        slower(gpipe, 1.4).seconds, rel=0.02
    )
    other = next(one for one in bases if one.series[0] != run)  # whose speed was as it had been
    assert fits[other.series].step(other.network) == pytest.approx(other.seconds, rel=0.02)


def test_turns_of_a_measurement_are_one_their_mean(store, tmp_path):
    """Taken again while the machine was slow, and once more while it was slower."""
    before = measured.measurements(store)
    one = next(one for one in before if one.network.bandwidth == 1e8 and not one.network.latency)
    for turn, pace in ((1, 1.3), (2, 1.6)):
        wiring = Wiring(**one.row["wiring"] | {"turn": turn})
        place = pipeline.folder_of(store, parse(one.row["run"]), wiring)
        place.make()
        place.finish(
            slower(one, pace).row
            | {"id": place.path.name, "wiring": wiring.model_dump(mode="json")}
        )
    after = measured.measurements(store)
    assert {own.row["id"] for own in after} == {own.row["id"] for own in before} and len(
        after
    ) == len(before)
    mean = next(own for own in after if own.row["id"] == one.row["id"])
    assert mean.seconds == pytest.approx(
        sum(slower(one, pace).seconds for pace in (1, 1.3, 1.6)) / 3
    )
    assert (
        mean.computed == pytest.approx(1.3 * one.computed) and mean.bytes_a_step == one.bytes_a_step
    )
    assert mean.row["timing"]["turns"] == [
        pytest.approx(slower(one, pace).seconds) for pace in (1, 1.3, 1.6)
    ]
    assert mean.row["timing"]["steps"] == 27 and mean.network == one.network
    names = [place.name for place in (store.root / "pipelines").iterdir() if len(place.name) == 12]
    with pytest.raises(UserError, match=f"1 of {len(names) + 1}"):
        links.write(store.root, "demo-links", [*names, "000000000000"], tmp_path / "other")


@pytest.mark.slow
def test_tables_and_figures_are_written_and_name_what_is_predicted(store, tmp_path):
    names = [row["id"] for row in store.pipelines()]
    made = links.write(store.root, "demo-links", names, tmp_path / "out")
    assert made.error < 0.01
    steps, target, ranks, regret = (table.texts() for table in made.tables)
    assert len(steps) == len(target) == 12 and not ranks  # two methods are no ranking
    assert sum(row[-1] == "fitted" for row in steps) == 4 and steps[0][1:3] == ["4", "1 Mbit/s"]
    # what is predicted is what made the measurements
    assert regret and all(row[-1] == "0.0 %" for row in regret)
    # 99 % of 95 % is 94.05 %: the dense run is there after 30 steps, TopK after 40.
    assert {row[3]: row[4] for row in target} == {"dense": "30", "TopK 10 %": "40"}
    wanted = {"step_time", "time_to_target", "prediction", "gantt", "bubble", "far"}
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == wanted
    for name in ("bubble", "far"):
        assert "predicted" in (tmp_path / "out" / f"{name}.svg").read_text()
    with pytest.raises(UserError, match="1 of 13 measurements are missing"):
        links.write(store.root, "demo-links", [*names, "other"], tmp_path / "out")


def test_advice_that_is_wrong_costs_what_was_measured(store):
    """At 1 Mbit/s TopK is far ahead; measured as if it were not, taking it costs that time."""
    network, found = Network(1e6), measured.measurements(store)
    fits, (_, _, steps) = measured.models(found), measured.quality(store, found)
    own = [one for one in found if one.network == network and one.schedule == "gpipe"]
    dense, topk = (
        next(one for one in own if (one.method == "dense") is is_dense)
        for is_dense in (True, False)
    )
    assert [share for *_, share in advising.regrets(own, fits, steps)] == [0.0]
    slow = measured.PipelineStep(
        topk.row | {"timing": topk.row["timing"] | {"step_seconds": 2 * dense.seconds}}
    )
    ((advised, best, share),) = advising.regrets([dense, slow], fits, steps)
    assert advised is slow and best is dense
    assert share == pytest.approx(40 * 2 / 30 - 1)  # 40 steps instead of 30, twice as long each


def test_a_method_that_never_gets_there_is_called_that(store):
    folder = store.folder(run_id(RUNS["topk"]))
    folder.append({"epoch": 4, "step": 40, "test_on_acc": 0.9})
    found = measured.measurements(store)
    table = links.target_table(found, *measured.quality(store, found))
    assert {row[3]: row[4] for row in table.texts()}["TopK 10 %"] == "not reached"
    assert advising.advise(store, RUNS["dense"], Network(1e6)).missed == ["TopK 10 %"]


@pytest.mark.parametrize(
    ("bandwidth", "latency", "best", "exact"),
    [
        (1e6, 0.0, "TopK 10 %", True),
        (0.0, 0.0, "dense", True),
        (1e8, 0.02, "dense", True),
        (2e6, 0.001, "TopK 10 %", False),
    ],
)
def test_advice_is_the_fastest_to_the_target_and_says_what_it_rests_on(
    store, bandwidth, latency, best, exact
):
    made = advising.advise(store, tiny(microbatches=4), Network(bandwidth, latency))
    first = made.choices[0]
    assert first.method == best and made.target == pytest.approx(0.9405)
    assert first.seconds == min(choice.seconds for choice in made.choices)
    if first.measured == exact:
        name = "dense" if best == "dense" else "topk"
        orders = SCHEDULES[first.schedule](4, 4)
        assert first.step_seconds == pytest.approx(
            step_seconds(
                orders,
                times(name, HANDLING),
                measured.Machine().network(Network(bandwidth, latency)),
                TORCH[first.schedule],
            ),
            rel=0.02,
        )
    assert store.pipeline(first.basis[0]).row()["run_id"] == first.basis[1]


def test_advice_names_what_predictions_do_not_tell_from_the_best():
    def choice(seconds, measured):
        return advising.Choice("dense", "gpipe", seconds, 10, measured, ("a", "b"))

    def close(*choices):
        return advising.Advice("test_on_acc", 0.9, [choice(*one) for one in choices], []).close

    assert close((1.0, False), (1.04, False), (1.06, False)) == [choice(1.04, False)]
    assert close((1.0, True), (1.04, False)) == close((1.0, False), (1.04, False))
    assert not close((1.0, True), (1.01, True)) and not close((1.0, False))


def test_advise_says_what_it_does_not_tell_apart(store, capsys):
    arguments = [
        "advise",
        "synthetic",
        "--bandwidth",
        "2Mbit",
        "--latency",
        "1ms",
        "--store",
        str(store.root),
    ]
    assert main([*arguments, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    close = [f"{one['method']}, {one['schedule']}" for one in choices if one["close"]]
    assert main(arguments) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "tell apart" in line]
    assert close and len(told) == 1 and told[0].endswith("; ".join(close))


def test_advise_on_the_command_line(store, capsys):
    arguments = ["advise", "synthetic", "--bandwidth", "1Mbit", "--store", str(store.root)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "to test accuracy 94.0 % over 1 Mbit/s" in out or "to test accuracy 94.1 %" in out
    assert out.index("best") < out.index("runner-up") and "pipelines/" in out
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choices"][0]["method"] == "TopK 10 %"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["advise", "digits", "--bandwidth", "1Mbit"], "no step times of this training"),
        (["links", "demo-link"], "unknown plan 'demo-link'; did you mean 'demo-links'?"),
        (["links", "smoke-links", "--only", "report"], "4 of 4 measurements are missing"),
        (
            ["pipeline", "synthetic", "--stages", "3"],
            "--stages 3: model.cuts=layer1,layer2,layer3 makes 4 stages",
        ),
        (["pipeline", "synthetic", "--steps", "-1"], "--steps -1"),
        (
            ["pipeline", "synthetic", "microbatches=5"],
            "microbatches=5 does not divide data.batch_size=32",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, says):
    assert main([*arguments, "--store", str(tmp_path / "s")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "a list of links is needed"),
        ("{", "no JSON file of links"),
        ('[{"bandwidth": 5}]', "says nothing; write"),
        ('[{"speed": "5Mbit"}]', 'link 0: {"speed": "5Mbit"} says nothing'),
        ('[{}, {"latency": "5"}]', "link 1: '5' is no time"),
        ('[{"bandwidth": "0Mbit"}]', "nothing arrives"),
    ],
)
def test_a_file_of_links_is_read_or_its_fault_named(tmp_path, capsys, text, says):
    path = tmp_path / "links.json"
    path.write_text(text)
    assert main(["advise", "digits", "--links", str(path)]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_ratios_by_link_on_the_command_line(store, tmp_path, capsys):
    path = tmp_path / "links.json"
    path.write_text(
        '[{"bandwidth": "1Mbit"}, {"bandwidth": "20Mbit"}, {"bandwidth": "20Mbit", "latency": '
        '"1ms"}]'
    )
    settings = ["microbatches=4", "fwd.compressor.kind=topk", "bwd.compressor.kind=topk"]
    arguments = [
        "advise",
        "synthetic",
        *settings,
        "--links",
        str(path),
        "--ratios",
        "--store",
        str(store.root),
    ]
    assert main([*arguments[:5], "--bandwidth", "1Mbit", *arguments[7:]]) == 2
    assert "--ratios needs --links FILE" in capsys.readouterr().err
    assert main([*arguments, "fwd.compressor.ratio=0.3"]) == 2
    assert "commsweep pipeline synthetic microbatches=4" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first, *others = told["ratios"].values()
    assert first < 0.1 < min(others) and told["step_seconds"] <= told["one_ratio_step_seconds"]
    assert main(arguments) == 0
    assert "ms a step with one ratio everywhere" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["fast", "10Mbyte", "-1Mbit"])
def test_a_bandwidth_has_a_unit(capsys, text):
    assert main(["advise", "digits", f"--bandwidth={text}"]) == 2
    assert "write for instance 10Mbit, 1Gbit or unlimited" in capsys.readouterr().err


def test_every_plan_is_made_of_runs_that_can_be_cut():
    from commsweep.processes import stages

    PLANS = content("sweeps.links").PLANS

    for name in PLANS:
        made = plan(name)
        assert len({(run_id(run), wiring.model_dump_json()) for run, wiring in made}) == len(made)
        assert any(wiring.bandwidth == 0 for _, wiring in made), "nothing to predict from"
        if name == "unequal-links":
            assert {len(wiring.links) for _, wiring in made} == {0, 3}
        if name != "heldout-learners":
            assert {stages.count(run) for run, _ in made} == (
                {2, 3, 4} if name == "heldout-links" else {4}
            )


def test_published_errors_of_learners_follow_from_the_published_measurements():
    folder = ROOT / "docs" / "results" / "heldout-learners"
    rows = pd.read_csv(folder / "measurements.csv")
    shaped = rows[(rows.bandwidth > 0) | (rows.latency > 0)]
    errors = (shaped.predicted / shaped.seconds - 1).abs()
    assert (folder / "errors.md").read_text() == f"{links.accuracy_text(list(errors))}\n"
    told = [
        line.split("|")
        for line in (folder / "learners.md").read_text().splitlines()
        if " ms  " in line
    ]
    assert sorted(f"{1e3 * one:.0f}" for one in rows.seconds) == sorted(
        cells[6].strip() for cells in told
    )


def test_what_is_said_of_all_predictions_follows_from_the_published_measurements():
    guide = (ROOT / "docs" / "guide" / "pipelines.md").read_text()
    for name in ("heldout-links", "heldout-advice", "heldout-learners"):
        rows = pd.read_csv(ROOT / "docs" / "results" / name / "measurements.csv")
        shaped = rows[(rows.bandwidth > 0) | (rows.latency > 0)]
        errors = sorted((shaped.predicted.astype(float) / shaped.seconds - 1).abs())
        late = errors[math.ceil(0.95 * len(errors)) - 1]
        numbers = [f"{100 * error:.1f}" for error in (median(errors), late, errors[-1])]
        (line,) = [line for line in guide.splitlines() if line.startswith(f"| [{name}]")]
        assert f"| {len(errors)} of" in line and f"| {', '.join(numbers)} % |" in line, numbers


def test_turns_agree_as_far_as_their_rankings_do():
    assert links.agreement([[1.0, 1.1], [2.0, 2.2], [3.0, 2.9]]) == "1.00"
    # (-1 + 1 - 1) / 3
    assert links.agreement([[1.0, 3.0, 1.0], [2.0, 2.0, 2.0], [3.0, 1.0, 3.0]]) == "-0.33"
    assert links.agreement([[1.0], [2.0]]) == ""


@pytest.mark.parametrize("name", ["heldout-links", "heldout-advice", "unequal-links"])
def test_published_ranks_follow_from_the_published_measurements(name):
    """Each line of ranks.md, from the seconds and predictions of measurements.csv."""
    folder = ROOT / "docs" / "results" / name
    rows = pd.read_csv(folder / "measurements.csv", dtype={"links": str}, keep_default_na=False)
    shaped = (
        rows[(rows.bandwidth > 0) | (rows.links != "")]
        if "links" in rows
        else rows[rows.bandwidth > 0]
    )
    keys = [key for key in ("schedule", "stages", "bandwidth", "latency", "links") if key in rows]
    want = []
    for _, own in shaped.groupby(keys, sort=False):
        if len(own) > 2:
            times = list(own.seconds), list(map(float, own.predicted))
            want.append([str(len(own)), links.ranked(*times), *map(str, links.in_order(*times))])
            if "turns" in rows and (rows.turns != "").any():
                want[-1].append(
                    links.agreement([[float(one) for one in told.split()] for told in own.turns])
                )
    lines = [
        [cell.strip() for cell in line.split("|")[5:-1]]
        for line in (folder / "ranks.md").read_text().splitlines()
        if line.startswith(("| gpipe", "| 1f1b"))
    ]
    assert sorted(lines) == sorted(want)


def test_late_and_punctual_steps_of_a_method_share_a_colour():
    networks = [Network(), Network(1e8, 0.01)]
    steps = {"a": 10, "b": 12, "c": None, "d": None}
    runs = {
        ("dense", "a"): {"fwd": "none"},
        ("1 step late", "b"): {"delay": {"steps": 1}, "fwd": "none"},
        ("TopK", "c"): {"fwd": "topk"},
        ("TopK; 1 step late", "d"): {"fwd": "topk", "delay": {"steps": 1}},
    }
    found = [
        SimpleNamespace(
            network=network,
            method=method,
            seconds=1 + turn,
            series=(method, "1f1b"),
            row={"run": run, "run_id": run_id},
        )
        for (method, run_id), run in runs.items()
        for turn, network in enumerate(networks)
    ]
    assert late_links.compares(found) and not late_links.compares(found[:2])
    drawn = late_links.by_link(found, {}, steps, {one: str(one.latency) for one in networks})
    lines = {line.get_label(): line for line in drawn.axes[0].get_lines()}
    assert list(lines["dense"].get_ydata()) == [1000, 2000]
    assert (
        lines["dense"].get_color() == lines["1 step late"].get_color() != lines["TopK"].get_color()
    )
    assert lines["TopK"].get_color() == lines["TopK; 1 step late"].get_color()
    until = {line.get_label(): list(line.get_ydata()) for line in drawn.axes[1].get_lines()}
    assert until == {"dense": [10, 20], "1 step late": [12, 24]}

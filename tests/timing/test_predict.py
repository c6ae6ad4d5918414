"""Predictions for other clusters: against published measurements, laws, and bad input."""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from commsweep.cli.main import main
from commsweep.errors import UserError
from commsweep.timing import allreduce, exchange_model, gpt, meter
from commsweep.timing.profile import (
    MeasuredLink,
    Profile,
    predicted,
    read_link,
    read_trace,
)
from commsweep.timing.profile import exchange as exchange_seconds
from commsweep.timing.timeline.pipelines import (
    Network,
    Times,
    interleaved,
    one_f_one_b,
    plan,
    zero_bubble,
)
from tests.test_layout import ROOT

PAGES = ROOT / "docs" / "results" / "clusters"
MEASURED = "iteration time (ms)"
A100 = gpt.read_cluster("a100-nvlink")


def error(path, column):
    rows = pd.read_csv(path)
    return 100 * (rows["predicted_ms"] / rows[column] - 1).abs()


@pytest.mark.parametrize(("name", "most"), [("single", 8), ("multi", 12)])
def test_iterations_of_others_are_met_and_the_page_says_how_well(name, most, tmp_path):
    path = PAGES / f"vtrain_{name}.csv"
    shown = pd.read_csv(path)
    assert main(["predict", "--rows", str(path), "--out", str(tmp_path / "out.csv")]) == 0
    again = pd.read_csv(tmp_path / "out.csv")
    assert np.allclose(again["predicted_ms"], shown["predicted_ms"], rtol=1e-4)
    fitted = pd.read_csv(PAGES / f"fitted_{name}.csv")
    rows = shown.merge(fitted, how="left", on=list(fitted.columns), indicator=True)
    rest = rows[rows["_merge"] == "left_only"]
    off = 100 * (rest["predicted_ms"] / rest[MEASURED] - 1).abs()
    assert off.mean() < most
    line = f"| {len(rest)} | {off.mean():.1f} % | {off.median():.1f} % | {off.quantile(0.9):.1f} %"
    assert line in (PAGES / "README.md").read_text()


def test_no_more_than_sixty_rows_are_fitted():
    assert sum(len(pd.read_csv(path)) for path in PAGES.glob("fitted_*.csv")) <= 60


def test_exchanges_of_others_are_met(tmp_path):
    path = PAGES / "exchanges.csv"
    assert main(["predict", "--rows", str(path), "--out", str(tmp_path / "out.csv")]) == 0
    again, shown = pd.read_csv(tmp_path / "out.csv"), pd.read_csv(path)
    assert np.allclose(again["predicted_ms"], shown["predicted_ms"])
    shaped = shown["bandwidth_mbit"].notna()
    rare = shown["algorithm"] != "ddp"
    off = error(path, "exchange_ms")
    assert off[shaped & rare].median() < 5 and off[shaped & rare].max() < 15
    assert off[shaped & ~rare].median() < 15
    alone = shown.dropna(subset="without_ms")
    assert (alone["predicted_without_ms"] / alone["without_ms"] - 1).abs().max() < 0.02


def test_the_meter_is_the_contests():
    vanilla, reparam = meter.seconds(8, 64, 16777216), meter.seconds(8, 64, 2.27e6)
    assert vanilla == pytest.approx((2 * 64 + 11) * (8 * 16777216 / 200e6 + 0.05))
    assert abs(vanilla / 100.475 - 1) < 0.005 and abs(reparam / 19.889 - 1) < 0.02


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_every_microbatch_passes_every_stage_once(stages, microbatches):
    for stage in range(stages):
        order = meter.schedule(stage, stages, microbatches)
        every = [(kind, i) for kind in "FB" for i in range(microbatches)]
        assert sorted(order) == sorted(every)
    # without messages the pipeline takes (m + p - 1) forwards and backwards
    free = meter.Meter(rate=1e30, latency=0.0)
    found = meter.seconds(stages, microbatches, 0.0, forward=1.0, backward=2.0, meter=free)
    assert found == pytest.approx(3 * (microbatches + stages - 1))


def shape(**changes):
    told = {
        "hidden": 2048,
        "layers": 16,
        "sequence": 1024,
        "batch": 32,
        "micro_batch": 2,
        "heads": 16,
    }
    return gpt.Shape(**(told | changes))


def seconds(**changes):
    return float(gpt.predict(shape(**changes), A100)["total"])


def test_predictions_grow_with_what_costs_time():
    assert seconds(layers=32) > seconds() and seconds(batch=64) > seconds()
    assert seconds(hidden=4096) > seconds(hidden=2048)
    assert seconds(data=4) < seconds(data=2) < seconds()
    slow = gpt.replace(A100, node_link=A100.node_link / 10)
    far = shape(data=32, batch=512)
    assert gpt.predict(far, slow)["total"] > gpt.predict(far, A100)["total"]
    parts = gpt.predict(shape(pipeline=4), A100)
    assert parts["bubble"] > 0 and gpt.predict(shape(), A100)["bubble"] == 0


def test_constants_are_found_again_from_their_own_predictions():
    random = np.random.default_rng(0)
    n = 200
    many = gpt.Shape(
        hidden=random.choice([1024, 2048, 4096], n),
        layers=random.choice([12, 24], n),
        sequence=np.full(n, 1024),
        batch=np.full(n, 64),
        micro_batch=random.choice([1, 2, 4], n),
        heads=np.full(n, 16),
        tensor=random.choice([1, 2, 4], n),
        pipeline=random.choice([1, 2], n),
        data=random.choice([1, 2], n),
    )
    told = gpt.predict(many, A100)["total"]
    start = gpt.replace(A100, flops=A100.flops / 2, memory=A100.memory * 2)
    off = gpt.predict(many, gpt.fit(many, told, start))["total"] / told - 1
    assert np.abs(off).max() < 0.02


def test_ten_thousand_rows_are_one_call():
    ones = np.ones(10_000)
    many = gpt.Shape(1024 * ones, 24, 1024, 64 * ones, 1, 16)
    assert gpt.predict(many, A100)["total"].shape == (10_000,)


def test_ddp_waits_for_its_buckets_and_rare_exchange_for_less():
    each, alone = exchange_model.steps("ddp", 1, 4, 3e7, 1e9, 0.025)
    rare, _ = exchange_model.steps("diloco", 32, 4, 3e7, 1e9, 0.025)
    eighth, _ = exchange_model.steps("diloco", 32, 4, 3e7, 1e9, 0.025, share=1 / 8)
    assert alone == 0.025 and each > rare > eighth > alone
    with pytest.raises(UserError, match="algorithm 'sgd': choose ddp"):
        exchange_model.steps("sgd", 1, 4, 3e7, 1e9, 0.025)


# Traces and links.


def event(name, begin, length, cat="cpu_op", **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "args": args}


def profile_of(path, steps=2):
    """Steps of 10 ms: 6 ms of computing, a collective of 5 ms of which 2 are beside it."""
    events = []
    for turn in range(steps):
        at = 10_000 * turn
        sizes = {"Input Dims": [[1000, 250]], "Input type": ["float"]}
        events += [
            event(f"ProfilerStep#{turn}", at, 10_000, "user_annotation"),
            event("aten::mm", at, 6_000),
            event("gloo:all_reduce", at + 4_000, 5_000, "user_annotation", **sizes),
        ]
    told = {"traceEvents": events, "distributedInfo": {"world_size": 2}}
    path.write_text(json.dumps(told))
    return path


def test_a_trace_is_read_to_the_microsecond(tmp_path):
    found = read_trace(profile_of(tmp_path / "trace.json"))
    assert found.step == pytest.approx(0.010) and found.messages == pytest.approx(0.005)
    assert found.waited == pytest.approx(0.003) and found.hidden == pytest.approx(0.002)
    assert (found.nbytes, found.collectives, found.workers, found.steps) == (1e6, 1, 2, 2)
    assert predicted(found, None) == pytest.approx(found.step)
    # 1 MB over 8 Mbit/s takes a second; 2 ms of it are hidden
    assert predicted(found, MeasuredLink(8e6)) == pytest.approx(0.007 + 1.0 - 0.002)
    # a tenth of the bytes in codes, on a CPU beside nothing
    assert predicted(found, MeasuredLink(8e6), share=0.1) == pytest.approx(0.007 + 0.1)


def test_links_of_iperf3_and_nccl_tests(tmp_path):
    end = {
        "sum_received": {"bits_per_second": 2e8},
        "streams": [{"sender": {"mean_rtt": 20000}}],
    }
    (tmp_path / "iperf.json").write_text(json.dumps({"start": {}, "end": end}))
    assert read_link(tmp_path / "iperf.json") == MeasuredLink(2e8, 0.01)
    (tmp_path / "nccl.txt").write_text(
        "# out-of-place\n#  size count type redop root time algbw busbw #wrong\n"
        "     1024    256  float  sum  -1   20.0   0.05   0.09   0\n"
        " 67108864 16777216 float sum  -1  600.0  111.8  195.7   0\n"
    )
    found = read_link(tmp_path / "nccl.txt")
    assert found.rate == pytest.approx(8e9 * 195.7) and found.latency == pytest.approx(
        20e-6 / 14  # eight ranks, by busbw over algbw: 14 rounds of a ring
    )


def test_the_better_of_two_codecs_is_named(tmp_path, capsys):
    trace = profile_of(tmp_path / "trace.json")
    end = {"sum_received": {"bits_per_second": 8e6}}
    (tmp_path / "slow.json").write_text(json.dumps({"end": end}))
    arguments = ["--trace", str(trace), "--links", str(tmp_path / "slow.json"), "--json"]
    assert main(["predict", *arguments]) == 0
    lines = {line["codec"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines["topk:0.01"]["seconds"] < lines["uniform:8"]["seconds"] < lines["none"]["seconds"]
    assert lines["none"]["limit"] == "the link"
    assert main(["advise", *arguments[:-1]]) == 0
    assert "then the limit is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"traceEvents": [', "is not whole JSON"),
        ('{"foo": 1}', "has no traceEvents"),
        ('{"traceEvents": []}', "marks no steps"),
        (
            json.dumps({"traceEvents": [event("ProfilerStep#1", 0, 9)]}),
            "has no collective",
        ),
    ],
)
def test_a_trace_that_is_none_is_one_line(content, says, tmp_path):
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(UserError, match=says):
        read_trace(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"error": "unable to connect"}', "iperf3 ended with: unable to connect"),
        ('{"end": {}}', "not from iperf3 -J"),
        ("# busbw\n", "not the output of nccl-tests"),
    ],
)
def test_a_link_that_is_none_is_one_line(content, says, tmp_path):
    (tmp_path / "link").write_text(content)
    with pytest.raises(UserError, match=says):
        read_link(tmp_path / "link")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "bert:layers=2"], "write one of 125m"),
        (["--model", "gpt:layer=2"], "did you mean 'layers'"),
        (["--model", "gpt:layers=2"], "says no hidden"),
        (["--model", "gpt:layers=2,hidden=64", "--pipeline", "4"], "the model has 2 layers"),
        (["--model", "gpt:layers=2,hidden=64", "--gpus", "3", "--tensor", "2"], "is not tensor 2"),
        (["--model", "gpt:layers=2,hidden=64", "--cluster", "h100"], "neither a file nor one of"),
        (["--rows", "nowhere.csv"], "cannot be read as a table"),
        (["--rows", "ROWS"], "no column for layers"),
        (["--rows", "BAD"], r"line 2: hidden='wide' is no number above 0"),
    ],
)
def test_bad_input_is_one_line(arguments, says, tmp_path, capsys):
    (tmp_path / "ROWS").write_text("hidden,batch\n1024,8\n")
    (tmp_path / "BAD").write_text("hidden,layers,batch\nwide,2,8\n")
    arguments = [str(tmp_path / one) if one in ("ROWS", "BAD") else one for one in arguments]
    assert main(["predict", *arguments]) != 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and __import__("re").search(says, said), said


@pytest.mark.parametrize("recompute", [True, False])
def test_idle_time_of_schedules_is_that_of_their_orders(recompute):
    """Against the simulated timeline of the same orders, with forwards of one unit."""
    p, m, v = 4, 16, 2
    inputs, weights = 1 + recompute, 1
    whole = 1 + inputs + weights
    one = Times([1.0] * p, [inputs + weights] * p, weights=weights / (inputs + weights))
    parts = Times(
        [1.0 / v] * p * v, [(inputs + weights) / v] * p * v, weights=weights / (inputs + weights)
    )
    for schedule, order, times in (
        ("1f1b", one_f_one_b(p, m), one),
        ("interleaved", interleaved(p, m, v), parts),
        ("zero-bubble", zero_bubble(p, m), one),
    ):
        made = plan(order, times, Network())
        ends = max(span.stop for span in made.run())
        idle = gpt.Choices(schedule, v, recompute).idle
        assert ends == pytest.approx(m * whole + idle * (p - 1) * whole), schedule
    # a schedule that goes on over steps fills once, however many they are
    long = max(span.stop for span in plan(one_f_one_b(p, 20 * m), one, Network()).run()) / 20
    assert long == pytest.approx(m * whole, rel=0.02)
    assert gpt.Choices("2bw").idle == 0


def test_choices_of_a_model(capsys):
    model = ["predict", "--model", "gpt:layers=24,hidden=1024", "--gpus", "16", "--pipeline", "4"]
    seconds = {}
    for more in (
        [],
        ["--schedule", "interleaved"],
        ["--schedule", "zero-bubble"],
        ["--schedule", "2bw"],
        ["--no-recompute"],
        ["--cluster", "h100-nvlink"],
        ["--collective", "nccl"],
        ["--cluster", "l40s-tcp"],
    ):
        assert main([*model, *more, "--batch", "32", "--json"]) == 0
        seconds[" ".join(more)] = json.loads(capsys.readouterr().out)["total"]
    slower = ("", "--cluster l40s-tcp", "--collective nccl")
    assert all(seconds[name] < seconds[""] for name in seconds if name not in slower)
    assert seconds["--collective nccl"] <= seconds[""]
    assert seconds["--schedule 2bw"] < seconds["--schedule interleaved"]
    assert seconds["--cluster l40s-tcp"] > seconds[""]
    slow = [*model, "--batch", "32", "--cluster", "l40s-tcp", "--codecs", "uniform:8;topk:0.01"]
    assert main([*slow, "--json"]) == 0
    every = json.loads(capsys.readouterr().out)["codecs"]
    lines, between = (
        [one for one in every if one["message"] == what] for what in ("gradients", "stages")
    )
    assert between[1]["seconds"] < between[0]["seconds"] < seconds["--cluster l40s-tcp"]
    assert lines[0]["share"] == pytest.approx(0.5, abs=0.01)
    assert lines[1]["seconds"] < lines[0]["seconds"] < seconds["--cluster l40s-tcp"]
    assert main(slow) == 0
    assert "these choices were not" not in capsys.readouterr().out
    assert main([*model, "--schedule", "2bw"]) == 0
    assert "these choices were not" in capsys.readouterr().out
    assert main([*model, "--collective", "nccl"]) == 0
    assert "summed up by a ring, as NCCL" in capsys.readouterr().out


def test_choices_that_cannot_be_are_refused(capsys):
    model = ["predict", "--model", "gpt:layers=24,hidden=1024"]
    for more, said in (
        (["--codecs", "uniform:8"], "nothing travels"),
        (["--pipeline", "4", "--schedule", "interleaved", "--chunks", "5"], "no multiple of 20"),
        (["--data", "2", "--codecs", "uniforn:8"], "did you mean 'uniform'"),
    ):
        assert main([*model, *more]) == 2
        assert said in capsys.readouterr().err


def ranks(n, nodes, **changes):
    told = {"near": 2e11, "far": 2e10, "hop": 3e-6, "far_hop": 1e-5} | changes
    return allreduce.Ranks(n, nodes, **told)


def test_an_all_reduce_by_hand():
    """16 ranks on two nodes: a ring of 30 hops of which 2 are between nodes, and two trees."""
    made = allreduce.by_algorithm(1e6, ranks(16, 2))
    assert made["ring"] == pytest.approx(2 * 15 / 16 * 1e6 / 2e10 + 28 * 3e-6 + 2 * 1e-5)
    assert made["tree"] == pytest.approx(2 * 1e6 / 0.92 / 2e10 + 14 * 3e-6 + 2 * 1e-5)
    assert made["hierarchical"] == pytest.approx(
        2 * 7 / 8 * 1e6 / 2e11 + 1e6 / 2e10 + 14 * 3e-6 + 2 * 1e-5
    )
    assert made["alltoall"] == pytest.approx(2 * 15 / 16 * 1e6 / 2e10 + 2 * 1e-5)
    assert all(one == 0 for one in allreduce.by_algorithm(1e6, ranks(1, 1)).values())


def test_nccl_takes_trees_for_small_messages_of_many_nodes_and_rings_for_large_ones():
    where = ranks(256, 32)
    small, large = (allreduce.by_algorithm(nbytes, where) for nbytes in (1e4, 1e9))
    assert allreduce.seconds("nccl", 1e4, where) == small["tree"] < small["ring"]
    assert allreduce.seconds("nccl", 1e9, where) == large["ring"] < large["tree"]
    slow = ranks(256, 32, far=2e8)  # levels carry fewer bytes between nodes
    assert allreduce.seconds("hierarchical", 1e9, slow) < allreduce.seconds("nccl", 1e9, slow)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_what_messages_between_stages_cost_is_what_the_timeline_says(stages):
    """Forwards of 1, backwards of 2, messages of half a unit; the timeline waits a little less."""
    message, m = 0.5, 32
    order, times = one_f_one_b(stages, m), Times([1.0] * stages, [2.0] * stages)
    simulated = max(s.stop for s in plan(order, times, Network(latency=message)).run())
    period = 3 + 2 * message * (stages - 1) / stages
    assert simulated == pytest.approx((m + stages - 1) * period, rel=0.01)
    # the same of a predicted iteration: its messages' part alone
    told = {"pipeline": stages, "layers": 24, "batch": 2 * m}
    free, slow = (
        gpt.predict(shape(**told), gpt.replace(A100, stage_link=link)) for link in (1e15, 1e9)
    )
    nbytes = 2.0 * shape(**told).hidden * shape(**told).sequence * shape(**told).micro_batch
    waited = (m + stages - 1) * 2 * (stages - 1) / stages * nbytes / 1e9
    assert float(slow["total"] - free["total"]) == pytest.approx(waited, rel=1e-3)


def _trace(tmp_path, events, name="trace.json", world=4):
    marks = [
        {
            "ph": "X",
            "name": f"ProfilerStep#{n}",
            "cat": "user_annotation",
            "ts": n * 1e5,
            "dur": 1e5,
        }
        for n in range(3)
    ]
    every = marks + [event | {"ts": n * 1e5 + event["ts"]} for n in range(3) for event in events]
    text = json.dumps({"traceEvents": every, "distributedInfo": {"world_size": world}})
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def _collective(kind, elements, dtype="float", at=10.0):
    args = {"Input Dims": [[elements]], "Input type": [dtype]}
    return {"ph": "X", "name": f"gloo:{kind}", "cat": "cpu_op", "ts": at, "dur": 2e4, "args": args}


@pytest.mark.parametrize(
    "dtype, size",
    [("c10::BFloat16", 2), ("c10::Half", 2), ("signed char", 1), ("long", 8), ("double", 8)],
)
def test_elements_of_a_trace_have_the_size_of_their_type(tmp_path, dtype, size):
    profile = read_trace(_trace(tmp_path, [_collective("all_reduce", 1000, dtype)], "t.json.gz"))
    assert profile.nbytes == 1000 * size and profile.itemsize == size


def test_a_type_that_is_not_known_is_named(tmp_path):
    with pytest.raises(UserError, match="element type 'quint3'"):
        read_trace(_trace(tmp_path, [_collective("all_reduce", 10, "quint3")]))


def test_bfloat16_gradients_are_not_advised_to_become_bfloat16(tmp_path, capsys):
    path = _trace(tmp_path, [_collective("all_reduce", 10**6, "c10::BFloat16")])
    assert main(["predict", "--trace", str(path), "--json"]) == 0
    lines = {line["codec"]: line["bytes"] for line in json.loads(capsys.readouterr().out)}
    assert lines["none"] == 2e6 and "cast:to=bfloat16" not in lines
    assert lines["uniform:4"] == pytest.approx(0.5e6, rel=0.1)


def test_a_gpu_s_copy_of_an_annotation_is_no_step_and_its_kernels_say_their_sizes(tmp_path):
    args = {"In msg nelems": 500, "dtype": "BFloat16", "Collective name": "allreduce"}
    kernel = {"ph": "X", "name": "ncclDevKernel_AllReduce", "cat": "kernel", "args": args}
    copies = [
        {"ph": "X", "name": "ProfilerStep#0", "cat": "gpu_user_annotation", "ts": 7, "dur": 3e4},
        {"ph": "X", "name": "nccl:all_reduce", "cat": "gpu_user_annotation", "ts": 8, "dur": 1e4},
        {"ph": "X", "name": "nccl:all_reduce", "cat": "user_annotation", "ts": 8, "dur": 10},
    ]
    profile = read_trace(_trace(tmp_path, [*copies, kernel | {"ts": 9, "dur": 1e4}]))
    assert (profile.steps, profile.step) == (3, pytest.approx(0.1))
    assert (profile.nbytes, profile.collectives) == (1000, 1)


@pytest.mark.parametrize(
    "kind, elements, seconds",
    [
        ("all_reduce", 10**6, 6.0),
        ("all_gather", 250_000, 3.0),
        ("all_to_all", 10**6, 3.0),
        ("broadcast", 10**6, 4.0),
        ("reduce_scatter", 10**6, 3.0),
    ],
)
def test_each_collective_moves_what_it_moves(tmp_path, kind, elements, seconds):
    """Four workers over 8 Mbit/s: a megabyte a second."""
    profile = read_trace(_trace(tmp_path, [_collective(kind, elements)]))
    assert exchange_seconds(MeasuredLink(8e6), profile, 4) == pytest.approx(seconds)


NCCL = """# nThread 1 nGpus 8
{ranks}#
#       size         count      type   redop    {root}time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                        (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum    {minus}33.70    0.05    0.09      0    33.10    0.05    0.09    N/A
    67108864      16777216     float     sum    {minus}600.0  111.85  195.74      0    601.0  111.60  195.30      0
"""


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("at", ["", "[1,0]<stdout>:"])
def test_columns_of_nccl_tests_are_read_by_their_names(tmp_path, root, at):
    ranks = "".join(f"#  Rank {n} Group 0 Pid 1 on host\n" for n in range(8))
    text = NCCL.format(
        root="root     " if root else "", minus="-1    " if root else "", ranks=ranks
    )
    (tmp_path / "out.txt").write_text(
        "\n".join(at + line for line in text.splitlines()) if at else text
    )
    link = read_link(tmp_path / "out.txt")
    assert link.rate == pytest.approx(8e9 * 195.74)
    one = Profile(1, 1, 1, 1024, 1, 8, 1, kinds=(("allreduce", 1, 1024.0),))
    assert exchange_seconds(link, one, 8) == pytest.approx(33.7e-6, rel=0.01)


def test_iperf_counts_what_arrives_in_the_slower_direction(tmp_path):
    udp = {"sum": {"bits_per_second": 2.858e9, "lost_percent": 66.48}}
    both = {
        "sum_received": {"bits_per_second": 9e8},
        "sum_received_bidir_reverse": {"bits_per_second": 3e8},
    }
    for end, rate in ((udp, 9.58e8), (both, 3e8)):
        (tmp_path / "iperf.json").write_text(json.dumps({"start": {}, "end": end}))
        assert read_link(tmp_path / "iperf.json").rate == pytest.approx(rate, rel=1e-3)


EXCHANGE = "algorithm,workers,parameters,compute_ms"


@pytest.mark.parametrize(
    "table, says",
    [
        (f"{EXCHANGE},bandwidth_mbit\nddp,4,1000000,10,100Mbit\n", "bandwidth_mbit='100Mbit'"),
        (f'{EXCHANGE},bandwidth_mbit\nddp,4,1000000,10,"1,000"\n', "bandwidth_mbit='1,000'"),
        (f"{EXCHANGE},bandwidth_mbit\nddp,4,1000000,10,-100\n", "bandwidth_mbit=.*-100"),
        (f"{EXCHANGE},bandwidth_mbps\nddp,4,1000000,10,100\n", "did you mean 'bandwidth_mbit'"),
        (f"{EXCHANGE},interval\nddp,,1000000,10,1\n", "workers=.*is no number"),
        ("hidden,layers,batch,gpus,tensor,pipeline\n1024,24,8,6,2,2\n", "gpus=6 is no multiple"),
    ],
)
def test_a_cell_that_is_no_number_is_named(tmp_path, table, says, capsys):
    (tmp_path / "rows.csv").write_text(table)
    assert main(["predict", "--rows", str(tmp_path / "rows.csv")]) != 0
    assert re.search(says, capsys.readouterr().err)


def test_blank_cells_of_optional_columns_say_the_default(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text(f"{EXCHANGE},interval,bandwidth_mbit\nddp,4,1000000,10,,\n")
    assert main(["predict", "--rows", str(tmp_path / "rows.csv")]) == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--meter", "protocol", "--links", "iperf.json"], "effect on --trace and --model only"),
        (["--meter", "protocol", "--link", "1Gbit"], "--link has an effect on --model only"),
        (["--model", "7b", "--link", "1Gbit", "--links", "iperf.json"], "give one of them"),
    ],
)
def test_links_without_an_effect_are_refused(options, line, capsys):
    assert main(["predict", *options]) != 0
    assert line in capsys.readouterr().err


def test_predict_and_advise_answer_with_the_same_step(capsys):
    shared = ["--model", "7b", "--gpus", "64", "--link", "200Gb/s", "--tensor", "2", "--json"]
    shared += ["--batch", "1024", "--per-node", "8"]
    assert main(["predict", *shared, "--collective", "nccl"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert main(["advise", *shared]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["seconds"] == predicted["total"]
    assert answer["share"] == pytest.approx(predicted["data"] / predicted["total"])


def test_a_cluster_file_takes_from_its_base_what_it_leaves_out(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"base": "a100-nvlink", "node_link": 25e9}')
    cluster, base = gpt.read_cluster(str(path)), gpt.read_cluster("a100-nvlink")
    assert replace(cluster, node_link=base.node_link, name=base.name, source=base.source) == base
    path.write_text('{"base": "a1000"}')
    with pytest.raises(UserError, match="base='a1000' is none of a100-nvlink"):
        gpt.read_cluster(str(path))


def test_codes_of_a_model_name_their_collective_and_none_is_all_of_the_bytes(capsys):
    model = ["predict", "--model", "gpt:layers=2,hidden=64", "--data", "4"]
    assert main([*model, "--codecs", "none; uniform:8; topk:0.01"]) == 0
    dense, code, sparse = capsys.readouterr().out.splitlines()[5:8]
    assert "100.0 % of 16-bit bytes, by ring" in dense
    assert code.endswith("by alltoall") and sparse.endswith("by gather")
    assert main([*model, "--codecs", "none", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["codecs"][0]["seconds"] == out["total"]
    assert main([*model, "--codecs", "uniform:8", "--collective", "tree"]) == 0
    assert "bytes, by tree" in capsys.readouterr().out


def test_shapes_and_traces_sum_a_code_up_in_the_same_way(tmp_path, capsys):
    """Four workers; a code of half the bytes, and one that only a gather can sum up."""
    trace = _trace(tmp_path, [_collective("all_reduce", 10**6, "c10::BFloat16")])
    profile, link = read_trace(trace), MeasuredLink(8e6)
    where = allreduce.Ranks(4, 4, math.inf, 1e6, 0.0, 0.0)
    for collective in ("ring", "alltoall", "gather"):
        seconds = exchange_seconds(link, profile, 4, 0.5, collective)
        assert seconds == pytest.approx(float(allreduce.seconds(collective, 1e6, where)))
    assert main(["predict", "--trace", str(trace), "--workers", "4", "--json"]) == 0
    sums = {line["codec"]: line["collective"] for line in json.loads(capsys.readouterr().out)}
    assert sums["uniform:4"] == "alltoall" and sums["topk:0.01"] == sums["tern"] == "gather"
    assert sums["none"] == "ring"


def test_sharded_training_gathers_weights_twice_a_microbatch(capsys):
    """A reduce-scatter and each gather are half of a ring's all-reduce."""
    shape = gpt.Shape(1024, 24, 1024, 64, 2, 16, data=8)  # four microbatches
    cluster = gpt.read_cluster("a100-nvlink")
    whole, sharded = (
        gpt.predict(shape, cluster, gpt.Choices(sharded=is_sharded)) for is_sharded in (False, True)
    )
    assert whole["gathers"] == 0
    assert sharded["data"] == pytest.approx(whole["data"] / 2)
    assert sharded["gathers"] == 0  # computing hides them
    assert sharded["optimizer"] == pytest.approx(whole["optimizer"] / 8)
    parts = ("compute", "bubble", "data", "gathers", "optimizer")
    assert sharded["total"] == pytest.approx(sum(sharded[name] for name in parts) + 4e-3, abs=4e-3)
    slow = replace(cluster, node=1, node_link=1e9)
    halved = gpt.Choices(sharded=True, weights=0.5, weight_coding=gpt.decoding(0.5))
    dense, coded = (
        gpt.predict(shape, slow, choices) for choices in (gpt.Choices(sharded=True), halved)
    )
    gathers = 2 * 4 * gpt.predict(shape, slow)["data"] / 2
    assert dense["gathers"] == pytest.approx(gathers - dense["compute"])
    coding = 2 * 4 * 1.5 * 2 * gpt.weights_of(1024, 24, 51200) / slow.memory
    expected = gathers / 2 - dense["compute"] + coding
    assert coded["gathers"] == pytest.approx(expected, rel=1e-3)  # hops are not halved
    model = ["predict", "--model", "gpt:layers=24,hidden=1024", "--data", "8", "--sharded"]
    assert main([*model, "--codecs", "uniform:8", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [line["message"] for line in out["codecs"]] == ["gradients", "weights"]
    assert main([*model, "--collective", "tree"]) != 0
    assert "are summed by ring or alltoall" in capsys.readouterr().err

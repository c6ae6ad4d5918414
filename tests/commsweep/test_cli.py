"""What a user types, and what a mistake answers: one line, a non-zero exit, no traceback."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from commsweep import bench
from commsweep.experiments.config import run_id
from commsweep.experiments.presets import preset
from commsweep.experiments.store import Store, write_json
from commsweep.main import main
from tests.helpers import tiny


def call(capsys, *args):
    code = main([str(arg) for arg in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def error(capsys, *args):
    code, out, err = call(capsys, *args)
    assert code != 0 and out == "" and err.count("\n") == 1 and "Traceback" not in err, (code, out, err)
    return err


def test_run_show_and_list(capsys, tmp_path):
    store = tmp_path / "store"
    settings = ["fwd.compressor.kind=topk", "fwd.compressor.ratio=0.2"]
    code, out, _ = call(capsys, "run", "synthetic", *settings, "--store", store, "--json")
    row = json.loads(out)
    assert code == 0 and row["run"]["fwd"]["compressor"] == {"kind": "topk", "ratio": 0.2, "scope": "sample"}
    code, out, _ = call(capsys, "run", "synthetic", *settings, "--store", store)
    assert code == 0 and "recorded earlier" in out and "traffic" in out
    code, out, _ = call(capsys, "show", row["id"][:5], "--store", store)
    assert "fwd.compressor.ratio = 0.2" in out and "epoch 2" in out
    code, out, _ = call(capsys, "list", "--store", store, "--json")
    assert [entry["id"] for entry in json.loads(out)] == [row["id"]]
    code, out, _ = call(capsys, "list", "--store", store)
    assert "TopK 20 % / dense" in out or "activations: TopK 20 %" in out


def test_a_language_model_is_run_shown_and_listed(capsys, tmp_path):
    code, out, _ = call(capsys, "run", "synthetic_text", "fwd.compressor.kind=topk", "--store", tmp_path)
    assert code == 0 and "test perplexity" in out and "tokens a second" in out and "bytes forward" in out
    code, out, _ = call(capsys, "list", "--store", tmp_path)
    assert code == 0 and "activations: TopK 10 %" in out and "%" in out.splitlines()[1]


def test_sweep_report_and_claims_end_to_end(capsys, tmp_path):
    store, out_dir = tmp_path / "store", tmp_path / "out"
    code, out, _ = call(capsys, "sweep", "plan", "smoke", "--store", store, "--json")
    plan = json.loads(out)
    assert plan["missing"] == plan["cells"] and plan["seconds"] is None
    assert plan["workers"] == len(os.sched_getaffinity(0)) or plan["workers"] >= 1
    code, out, err = call(capsys, "sweep", "launch", "smoke", "--store", store, "--workers", 1)
    assert code == 0 and f"{plan['cells']} finished" in out and "run" in err  # the bar counts runs
    code, out, _ = call(capsys, "sweep", "launch", "smoke", "--store", store)
    assert "nothing was missing" in out
    code, out, _ = call(capsys, "sweep", "status", "smoke", "--store", store, "--json")
    status = json.loads(out)
    assert status.pop("per_hour") > 0 and status == {
        "sweep": "smoke", "cells": plan["cells"], "finished": plan["cells"], "failures": {}, "seconds_left": None}
    code, out, _ = call(capsys, "report", "smoke", "--store", store, "--out", out_dir)
    assert code == 0 and "TopK both ways" in out
    page = (out_dir / "report.html").read_text()
    assert "not enough runs" in page and page.count('src="data:image/png') == 3 == page.count('alt="figure ')
    for kind in ("md", "tex", "csv"):
        assert (out_dir / "tables" / f"topk.{kind}").exists()
    assert all((out_dir / "figures" / f"{name}.pdf").exists() for name in ("convergence", "bytes", "on_off"))
    code, out, _ = call(capsys, "claims", "smoke", "--store", store, "--json")
    assert {claim["verdict"] for claim in json.loads(out)} == {"not enough runs"}
    code, out, _ = call(capsys, "sweep", "plan", "demo", "--store", store, "--probe", "--json")
    assert json.loads(out)["seconds"] > 1


def test_compress_writes_what_the_receiver_sees(capsys, tmp_path):
    x = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    np.save(tmp_path / "in.npy", x)
    args = ["compress", "--spec", '{"kind": "topk", "ratio": 0.1}', tmp_path / "in.npy", tmp_path / "out.npy"]
    code, out, _ = call(capsys, *args, "--json")
    said = json.loads(out)
    got = np.load(tmp_path / "out.npy")
    assert code == 0 and (np.count_nonzero(got, axis=1) == 10).all()
    assert said["nbytes"] == 4 * 10 * 4 + min(4 * 10 * 7 / 8, 4 * 100 / 8)
    assert said["ratio"] == said["nbytes"] / 1600
    assert said["relative_error"] == pytest.approx(np.linalg.norm(got - x) / np.linalg.norm(x), rel=1e-5)
    assert "bytes" in call(capsys, *args)[1]


def test_help_teaches(capsys):
    for args in (["--help"], ["run", "--help"], ["sweep", "launch", "--help"], ["compress", "--help"]):
        with pytest.raises(SystemExit) as done:
            main(args)
        assert done.value.code == 0
        assert len(capsys.readouterr().out) > 300


@pytest.mark.parametrize("args,message", [
    (["run", "digit"], "unknown preset 'digit'; did you mean 'digits'?"),
    (["run", "digits", "epoch=3"], "unknown setting 'epoch'; did you mean 'epochs'?"),
    (["run", "digits", "epochs"], "'epochs' is not KEY=VALUE"),
    (["run", "digits", "fwd.compressor.kind=topkk"], "did you mean 'topk'"),
    (["run", "digits", "fwd.compressor.kind=topk", "fwd.compressor.ratio=2"], "less than or equal to 1"),
    (["run", "digits", "model.cuts=[\"layer9\"]"], "'layer9' is no legal cut of resnet_small"),
    (["run", "digits", "--data-root", "/nowhere"], "--data-root '/nowhere': no such folder"),
    (["run", "digits", "--device", "tpu9"], "--device tpu9"),
    (["run", "sotu_nano", "data.block_size=9000000"], "the train text of sotu has 1 blocks"),
    (["run", "sotu_nano", "model.stages=3"], "4 blocks cannot be split equally (stages that can: 1, 2, 4)"),
    (["run", "sotu_nano", "data.name=digits"], "model.name=gpt2-nano takes text; data.name=digits are images"),
    (["run", "sotu_nano", "data.name=text"], "name the folder of text files with --data-root"),
    (["run", "sotu_nano", "bwd.compressor.kind=bottleneck"], "exists for fwd only"),
    (["sweep", "launch", "demoo"], "did you mean 'demo'"),
    (["sweep", "launch", "smoke", "--workers", "0"], "--workers 0: at least 1"),
    (["sweep", "launch", "smoke", "--retry", "lost"], "--retry lost: not an outcome"),
    (["show", "abc"], "run id 'abc' is in no run folder"),
    (["report", "demo"], "knows no sweep 'demo'"),
    (["bench", "boundry"], "did you mean 'boundary'"),
])
def test_bad_input_is_one_line(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COMMSWEEP_STORE", str(tmp_path / "store"))
    assert message in error(capsys, *args)


@pytest.mark.parametrize("content,spec,message", [
    (b"no array", '{"kind": "topk"}', "is not an array of numbers"),
    (None, '{"kind": "topk"}', "cannot read or write"),
    (np.ones(3, np.float32), "{kind: topk}", "--spec is not JSON"),
    (np.ones(3, np.float32), "3", "must be a JSON object"),
    (np.ones(3, np.float32), '{"kind": "topq"}', "did you mean 'topk'"),
    (np.ones(3, np.int64), '{"kind": "topk"}', "pass a floating-point tensor"),
    (np.array([1, np.nan], np.float32), '{"kind": "topk"}', "1 of 2 entries are NaN or infinite"),
    (np.array(["a"], dtype=object), '{"kind": "topk"}', "is not an array of numbers"),
])
def test_compress_refuses_what_it_cannot_read(content, spec, message, capsys, tmp_path):
    path = tmp_path / "in.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    assert message in error(capsys, "compress", "--spec", spec, path, tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


def test_non_finite_activations_end_with_one_line_and_a_record(capsys, tmp_path):
    code, out, _ = call(capsys, "run", "synthetic", "optim.lr=1e30", "--store", tmp_path, "--json")
    assert code == 3 and json.loads(out)["status"] == "diverged"


def test_a_newer_store_is_refused(capsys, tmp_path):
    write_json(tmp_path / "store.json", {"schema": 999})
    assert "has schema 999" in error(capsys, "list", "--store", tmp_path)


def test_a_full_disk_is_one_line_and_the_run_continues_later(capsys, tmp_path, monkeypatch):
    from commsweep.experiments import store as storing

    original = storing.RunFolder.append

    def full(self, metrics):
        if metrics["epoch"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        original(self, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(storing.RunFolder, "append", full)
        err = error(capsys, "run", "synthetic", "--store", tmp_path, "--json", "--checkpoint-every", 0)
    assert "No space left on device; free some space" in err
    store = Store(tmp_path)
    assert store.status(run_id(preset("synthetic"))) == "interrupted"
    code, out, _ = call(capsys, "run", "synthetic", "--store", tmp_path, "--json")
    assert code == 0 and json.loads(out)["status"] == "finished"
    assert [e["epoch"] for e in store.folder(run_id(tiny())).metrics()] == [1, 2]


def test_ctrl_c_leaves_the_store_whole_and_the_same_command_continues(tmp_path):
    command = ["sweep", "launch", "smoke", "--store", str(tmp_path), "--workers", "1"]
    process = subprocess.Popen([sys.executable, "-m", "commsweep", *command], text=True,
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    end = time.monotonic() + 120
    while not list(tmp_path.glob("*/done.json")):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues from it" in err and "Traceback" not in err
    done = len(list(tmp_path.glob("*/done.json")))
    assert main([*command, "--json"]) == 0
    assert 0 < done < len(Store(tmp_path).rows()) == 13


def test_bench_prints_ratio_bound_and_verdict(capsys, monkeypatch):
    results = [bench.Result("a / b", 1.02, 1.08, medians={"a": 1.0}), bench.Result("c / d", 2.0, 3.0, False)]
    monkeypatch.setattr(bench, "benches", lambda: {"boundary": lambda: results})
    code, out, _ = call(capsys, "bench", "boundary", "--json")
    assert code == 1  # the second misses its bound
    assert [(r["name"], r["holds"], r["bound"]) for r in json.loads(out)] == [("a / b", True, 1.08),
                                                                              ("c / d", False, 3.0)]
    monkeypatch.setattr(bench, "benches", lambda: {"boundary": lambda: results[:1]})
    code, out, _ = call(capsys, "bench")
    assert code == 0 and out.startswith("holds  a / b: 1.020 <= 1.08")


def test_bench_ratios_are_paired_medians():
    assert bench.paired({"a": [2, 4, 9], "b": [1, 2, 3]}, "a", "b") == 2
    calls = []
    seconds = bench.alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, 1)
    assert "".join(calls) == "ababab" and len(seconds["a"]) == 2

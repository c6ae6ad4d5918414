"""What a user types, and what a mistake answers: one line, a non-zero exit, no traceback."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from commsweep import bench
from commsweep.cli.main import main
from commsweep.config import Execution, flatten, record, run_id
from commsweep.registry import preset, presets
from commsweep.store import Store, write_json
from commsweep.training.run import build
from tests.helpers import outcome, tiny


def call(capsys, *args):
    code = main([str(arg) for arg in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def error(capsys, *args):
    code, out, err = call(capsys, *args)
    assert code != 0 and out == "" and err.count("\n") == 1 and "Traceback" not in err, (
        code,
        out,
        err,
    )
    return err


def test_run_show_and_list(capsys, tmp_path):
    store = tmp_path / "store"
    settings = ["fwd.compressor.kind=topk", "fwd.compressor.ratio=0.2"]
    code, out, _ = call(capsys, "run", "synthetic", *settings, "--store", store, "--json")
    row = json.loads(out)
    assert code == 0 and row["run"]["fwd"]["compressor"] == {
        "kind": "topk",
        "ratio": 0.2,
        "scope": "sample",
    }
    code, out, _ = call(capsys, "run", "synthetic", *settings, "--store", store)
    assert code == 0 and "recorded earlier" in out and "traffic" in out
    code, out, _ = call(capsys, "show", row["id"][:5], "--store", store)
    assert "fwd.compressor.ratio = 0.2" in out and "epoch 2" in out
    code, out, _ = call(capsys, "list", "--store", store, "--json")
    assert [entry["id"] for entry in json.loads(out)] == [row["id"]]
    code, out, _ = call(capsys, "list", "--store", store)
    assert "TopK 20 % / dense" in out or "activations: TopK 20 %" in out


def test_a_language_model_is_run_shown_and_listed(capsys, tmp_path):
    code, out, _ = call(
        capsys, "run", "synthetic_text", "fwd.compressor.kind=topk", "--store", tmp_path
    )
    assert (
        code == 0
        and "test perplexity" in out
        and "tokens a second" in out
        and "bytes forward" in out
    )
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
        "sweep": "smoke",
        "cells": plan["cells"],
        "finished": plan["cells"],
        "failures": {},
        "seconds_left": None,
    }
    code, out, _ = call(capsys, "report", "smoke", "--store", store, "--out", out_dir)
    assert code == 0 and "All settings" in out and len(out.splitlines()) <= 60
    page = (out_dir / "report.html").read_text()
    figures = len(list((out_dir / "figures").glob("*.png")))
    assert "not enough runs" in page and figures > 4
    assert page.count('src="data:image/png') == figures == page.count('alt="figure ')
    for kind in ("md", "tex", "csv"):
        assert (out_dir / "tables" / f"topk.{kind}").exists()
    drawn = {path.name for path in (out_dir / "figures").iterdir()}
    assert {"convergence.png", "score_bytes.png", "on_off.png"} <= drawn
    # other formats on demand; the caption beside each, as text and as a LaTeX figure
    assert {name.rpartition(".")[2] for name in drawn} == {"png", "txt", "tex"}
    words = ("report", "smoke", "--store", store, "--out", out_dir)
    code, _, err = call(capsys, *words, "--figure", "score_bytes", "--figures", "pdf,svg")
    assert code == 0  # beside the others
    more = {path.name for path in (out_dir / "figures").iterdir()}
    assert more - drawn == {"score_bytes.pdf", "score_bytes.svg"} and drawn <= more
    assert "did you mean 'score_bytes'" in error(capsys, *words, "--figure", "score_byts")
    assert "'gif' is none of png, pdf, svg" in error(capsys, *words, "--figures", "gif")
    code, out, _ = call(capsys, "claims", "smoke", "--store", store, "--json")
    assert {claim["verdict"] for claim in json.loads(out)} == {"not enough runs"}
    code, out, _ = call(capsys, "sweep", "plan", "demo", "--store", store, "--probe", "--json")
    assert json.loads(out)["seconds"] > 1


def test_compress_writes_what_the_receiver_sees(capsys, tmp_path):
    x = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    np.save(tmp_path / "in.npy", x)
    args = [
        "compress",
        "--spec",
        '{"kind": "topk", "ratio": 0.1}',
        tmp_path / "in.npy",
        tmp_path / "out.npy",
    ]
    code, out, _ = call(capsys, *args, "--json")
    said = json.loads(out)
    got = np.load(tmp_path / "out.npy")
    assert code == 0 and (np.count_nonzero(got, axis=1) == 10).all()
    assert said["nbytes"] == 4 * 10 * 4 + min(4 * 10 * 7 / 8, 4 * 100 / 8)
    assert said["ratio"] == said["nbytes"] / 1600
    assert said["relative_error"] == pytest.approx(
        np.linalg.norm(got - x) / np.linalg.norm(x), rel=1e-5
    )
    assert "bytes" in call(capsys, *args)[1]


def test_help_teaches(capsys):
    for args in (
        ["--help"],
        ["run", "--help"],
        ["sweep", "launch", "--help"],
        ["compress", "--help"],
    ):
        with pytest.raises(SystemExit) as done:
            main(args)
        assert done.value.code == 0
        assert len(capsys.readouterr().out) > 300


@pytest.mark.parametrize(
    "args,message",
    [
        (["run", "digit"], "unknown preset 'digit'; did you mean 'digits', 'digits_"),
        (["run", "digits", "epoch=3"], "unknown setting 'epoch'; did you mean 'epochs'?"),
        (["run", "digits", "epochs"], "'epochs' is not KEY=VALUE"),
        (["run", "digits", "fwd.compressor.kind=topkk"], "did you mean 'topk'"),
        (
            ["run", "digits", "fwd.compressor.kind=topk", "fwd.compressor.ratio=2"],
            "less than or equal to 1",
        ),
        (["run", "digits", 'model.cuts=["layer9"]'], "'layer9' is no legal cut of resnet_small"),
        (["run", "digits", "--data-root", "/nowhere"], "--data-root '/nowhere': no such folder"),
        (["run", "digits", "--device", "tpu9"], "--device tpu9"),
        (["run", "sotu_nano", "data.block_size=9000000"], "the train text of sotu has 1 blocks"),
        (
            ["run", "sotu_nano", "model.stages=3"],
            "4 blocks cannot be split equally (stages that can: 1, 2, 4)",
        ),
        (
            ["run", "sotu_nano", "data.name=digits"],
            "model.name=gpt2-nano takes text; data.name=digits are images",
        ),
        (["run", "sotu_nano", "data.name=text"], "name the folder of text files with --data-root"),
        (["run", "sotu_nano", "bwd.compressor.kind=bottleneck"], "exists for fwd only"),
        (["sweep", "launch", "demoo"], "did you mean 'demo'"),
        (["sweep", "launch", "smoke", "--workers", "0"], "--workers 0: at least 1"),
        (["sweep", "launch", "smoke", "--retry", "lost"], "--retry lost: not an outcome"),
        (["show", "abc"], "no store lies there"),
        (
            ["run", "synthetic", f"seed={2**32}"],
            "seed=4294967296: input should be less than 4294967296",
        ),
        (["run", "synthetic", "model.width=1000000000"], "model.width=1000000000"),
        (["run", "synthetic", "seed=true"], "seed=true: not a matter of true or false"),
        (
            ["run", "synthetic", "fwd.compressor.kind=topk", "fwd.compressor.ratio=true"],
            "fwd.compressor.ratio=true",
        ),
        (["run", "synthetic", "seed=1", "seed=2"], "'seed' is set more than once: seed=1, seed=2"),
        (
            ["run", "synthetic", "fwd.compressor.kind=topk", "fwd.start_step=999"],
            "fwd.start_step=999: the run has",
        ),
        (
            ["run", "synthetic", "fwd.compressor.kind=topk", "fwd.start_epoch=2"],
            "fwd.start_epoch=2: the run has 2 epochs",
        ),
        (
            [
                "run",
                "synthetic",
                "grad.learners=2",
                "grad.start_epoch=9",
                "grad.exchange=server",
                "grad.compressor.kind=sign",
            ],
            "grad.start_epoch=9: the run has 2 epochs",
        ),
        (
            ["run", "synthetic_text", "schedule.warmup=1e300"],
            "schedule.warmup=1e+300: the run has 2 epochs",
        ),
        (
            [
                "run",
                "synthetic",
                "fwd.compressor.kind=lowrank",
                "fwd.compressor.rank=1000000000000",
            ],
            "fwd.compressor.rank=",
        ),
        (
            [
                "run",
                "synthetic",
                "grad.exchange=allgather",
                "grad.compressor.kind=adacomp",
                "grad.feedback.kind=adacomp",
                "grad.compressor.conv=-3",
            ],
            "grad.compressor.conv=-3: ",
        ),
        (
            [
                "run",
                "synthetic",
                "grad.exchange=allgather",
                "grad.compressor.kind=topk",
                "grad.feedback.kind=lowpass",
                "grad.feedback.beta=2",
            ],
            "grad.feedback.beta=2: ",
        ),
        (
            [
                "run",
                "synthetic",
                "grad.exchange=allgather",
                "grad.compressor.kind=topk",
                "grad.schedule.kind=ramp",
                "grad.schedule.epochs=0",
            ],
            "grad.schedule.epochs=0: ",
        ),
        (["run", "synthetic", "--device", "meta"], "--device meta: not a device"),
        (["sweep", "plan", "smoke", "--device", "tpu"], "--device tpu: not a device"),
        (["sweep", "plan", "smoke", "--workers", "-2"], "--workers -2: at least 1"),
        (["run", "synthetic", "--store", ""], "--store '': an empty path"),
        (["report", "smoke", "--out", ""], "--out '': an empty path"),
        (["compress", "--spec", "{}", "x.npy", ""], "OUT.npy '': an empty path"),
        (["search", "synthetic", "--study", ""], "--study '': an empty name"),
        (["dashboard", "smoke", "--host", ""], "--host '': an empty name"),
        *(
            (["pipeline", "synthetic", "--patience", value], f"--patience {value}: more than 0")
            for value in ("0", "-1", "nan")
        ),
        *(
            (
                ["sweep", "launch", "smoke", "--executor", "ray", "--ray-cpus", value],
                f"--ray-cpus {value}: more than 0",
            )
            for value in ("nan", "-1")
        ),
        (["sweep", "launch", "smoke", "--timeout", "0"], "--timeout 0: more than 0"),
        (["run", "synthetic", "--checkpoint-every", "-3"], "--checkpoint-every -3: at least 0"),
        (["run", "synthetic", "--threads", "0"], "--threads 0: at least 1"),
        (
            ["run", "synthetic", "--stor", "x", "--sed=1"],
            "'--sed=1' is not understood; did you mean '--s",
        ),
        (["explain", "fwd.compressor.bit"], "did you mean 'fwd.compressor.bits'"),
        (["explain", "fwd.compressor.kind=topkk"], "no kind 'topkk'; did you mean 'topk'"),
        (["report", "demo"], "no store lies there"),
        (["bench", "boundry"], "did you mean 'boundary'"),
    ],
)
def test_bad_input_is_one_line(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COMMSWEEP_STORE", str(tmp_path / "store"))
    assert message in error(capsys, *args)


def header(text):
    """A .npy file of this header and no data."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "content,spec,message",
    [
        (b"no array", '{"kind": "topk"}', "is not an array of numbers"),
        (None, '{"kind": "topk"}', "cannot read or write"),
        (
            np.ones(3, np.float32),
            "{kind: topk}",
            "neither a compressor in a word, as topk:0.1, nor JSON",
        ),
        (np.ones(3, np.float32), "3", "no compressor '3' (write topk:0.1"),
        (np.ones(3, np.float32), "mxfp8", "did you mean 'mxfp8_e4m3' or 'mxfp8_e5m2'?"),
        (np.ones(3, np.float32), "[3]", "or a JSON object"),
        (np.ones(3, np.float32), '{"kind": "topq"}', "did you mean 'topk'"),
        (np.ones(3, np.int64), '{"kind": "topk"}', "pass a floating-point tensor"),
        (
            np.array([1, np.nan], np.float32),
            '{"kind": "topk"}',
            "1 of 2 entries are NaN or infinite",
        ),
        (np.array(["a"], dtype=object), '{"kind": "topk"}', "is not an array of numbers"),
        (b"PK\x03\x04" + bytes(40), '{"kind": "topk"}', "is not an array of numbers"),
        (header("(" * 2000), '{"kind": "topk"}', "is not an array of numbers"),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (10**15,)}"),
            '{"kind": "topk"}',
            "is not an array of",
        ),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,)}"),
            '{"kind": "topk"}',
            "is not an",
        ),
        (
            np.ones(3, np.float32),
            '{"kind": "uniform", "scale": "group", "group": 100000000000}',
            "compressor.group=",
        ),
        (np.ones(3, np.float32), '{"kind": "forward_mask"}', "forward_mask sends a gradient where"),
        (
            np.ones(3, np.float32),
            '{"kind":' * 100_000,
            "neither a compressor in a word, as topk:0.1, nor JSON",
        ),
    ],
)
def test_compress_refuses_what_it_cannot_read(content, spec, message, capsys, tmp_path):
    path = tmp_path / "in.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    assert message in error(capsys, "compress", "--spec", spec, path, tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("seed", ["-1", str(2**63), str(2**64 - 1)])
def test_seeds_of_compress_are_64_bit_numbers(seed, capsys, tmp_path):
    np.save(tmp_path / "in.npy", np.ones((2, 9), np.float32))
    args = [
        "compress",
        "--spec",
        '{"kind": "randomk"}',
        tmp_path / "in.npy",
        tmp_path / "out.npy",
        "--seed",
    ]
    assert f"--seed {seed}: from 0 to" in error(capsys, *args, seed)
    assert call(capsys, *args, str(2**63 - 1))[0] == 0


def test_settings_stand_anywhere_and_json_is_all_there_is(capsys, tmp_path):
    """A run with memories says so on stderr; what a program reads is one document."""
    feedback = [
        "fwd.compressor.kind=topk",
        "--json",
        "fwd.feedback.kind=ef",
        "--store",
        tmp_path,
        "epochs=1",
    ]
    code, out, err = call(capsys, "run", "synthetic", *feedback, "eval_every=1")
    row = json.loads(out)
    assert code == 0 and "feedback memories" in err and row["run"]["epochs"] == 1
    assert row["run"]["fwd"]["feedback"]["kind"] == "ef"


@pytest.mark.slow
def test_a_folder_called_experiments_is_the_users_own(tmp_path):
    for name in ("experiments", "sweeps", "analysis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    (tmp_path / "mine.py").write_text(
        "import torch\nimport experiments\nfrom commsweep import compressors\n"
        "y = compressors.build({'kind': 'topk', 'ratio': 0.5}).roundtrip(torch.arange(4.)[None])\n"
        "print(experiments.MINE, y.tolist())\n"
    )
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "True [[0.0, 0.0, 2.0, 3.0]]\n", done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "commsweep", "run", "synthetic", "epochs=1", "eval_every=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "finished" in done.stdout, done.stderr


def test_bytecode_is_kept_whatever_the_environment_says(tmp_path):
    code = (
        "import sys, os; from commsweep import __main__ as m; import commsweep.cli.main as c; "
        "c.main = lambda: 7; print(m.start(), sys.dont_write_bytecode, "
        "'PYTHONDONTWRITEBYTECODE' in os.environ)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.stdout == "7 False False\n", done.stderr


def test_small_models_take_one_thread_and_big_ones_all_cores_unless_told():
    cores = len(os.sched_getaffinity(0))
    for how, small, big in (
        (Execution(), 1, cores),
        (Execution(cores=3), 1, 3),
        (Execution(threads=2, cores=5), 2, 2),
    ):
        assert how.thread_count(2e7) == small and how.thread_count(5e9) == big
    before = torch.get_num_threads()
    try:
        for name in ("digits", "sotu_nano"):
            torch.set_num_threads(cores)
            build(preset(name), Execution("cpu"))
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_explain_knows_every_setting_and_kind(capsys):
    out = call(capsys, "explain", "fwd.compressor.kind=uniform")[1]
    assert (
        "q = round((x - min) / (max - min) * (2^b - 1))" in out
        and "bits = 4" in out
        and ">= 1 and <= 8" in out
    )
    assert "AQ" in out or "elements per scale" in out
    for key in {key for run in presets().values() for key in flatten(record(run))}:
        assert call(capsys, "explain", key)[0] == 0, key
    listed = call(capsys, "explain", "grad.compressor.kind")[1]
    assert all(kind in listed for kind in ("adacomp", "powersgd", "cltk"))
    assert "channels of the first stage" in call(capsys, "presets", "digits")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_offers_commands_and_presets(shell, capsys):
    out = call(capsys, "completion", shell)[1]
    assert "digits_topk" in out and "demo-gradients" in out and "pipeline" in out


def test_what_is_not_installed_is_named_with_its_extra(capsys, monkeypatch):
    def missing(_):
        raise ModuleNotFoundError("No module named 'optuna'", name="optuna")

    monkeypatch.setattr("commsweep.cli.search._search", missing)
    assert "pip install 'commsweep[search]'" in error(capsys, "search", "synthetic")


def test_a_plan_says_first_what_matters_and_how_sure_it_is(capsys, tmp_path):
    store, run = Store(tmp_path), preset("synthetic")
    folder = store.folder(run_id(run))
    folder.begin(run, {})
    folder.finish(outcome(run, seconds={"wall": 600.0}))
    first = call(capsys, "sweep", "plan", "smoke", "--store", tmp_path)[1].splitlines()
    assert (
        first[0].startswith("13 cells, 12 missing; about")
        and "as few as 1 timed run of a size; --probe" in first[0]
    )
    assert len(first) < 15
    for seed in (1, 2, 3):
        again = run.model_copy(update={"seed": seed})
        store.folder(run_id(again)).begin(again, {})
        store.folder(run_id(again)).finish(outcome(again, seconds={"wall": 2.0}))
    sure = call(capsys, "sweep", "plan", "smoke", "--store", tmp_path, "--json", "--workers", 1)[1]
    assert json.loads(sure)["seconds"] == pytest.approx(24.0)
    assert (
        call(capsys, "sweep", "plan", "smoke", "--store", tmp_path, "--cells")[1].count("seed 0")
        == 13
    )


def test_prune_spares_what_no_sweep_made_and_asks_first(capsys, tmp_path, monkeypatch):
    store = Store(tmp_path)
    for seed, by in enumerate(("sweep", "run", "search", "")):
        run = tiny(seed=seed)
        store.folder(run_id(run)).begin(run, {"by": by} if by else {})
    err = error(capsys, "sweep", "prune", "--store", tmp_path)
    assert "1 run folders would be removed; say --yes, or look first with --dry-run" in err
    assert json.loads(
        call(capsys, "sweep", "prune", "--dry-run", "--store", tmp_path, "--json")[1]
    )["removed"] == [run_id(tiny())]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert call(capsys, "sweep", "prune", "--store", tmp_path)[0] == 1 and len(store.ids()) == 4
    out = call(capsys, "sweep", "prune", "--store", tmp_path, "--yes")[1]
    assert "1 run folders were removed; 3 that no sweep made stay" in out and len(store.ids()) == 3
    call(capsys, "sweep", "prune", "--store", tmp_path, "--yes", "--all")
    assert store.ids() == []


def test_non_finite_activations_end_with_one_line_and_a_record(capsys, tmp_path):
    code, out, _ = call(capsys, "run", "synthetic", "optim.lr=1e30", "--store", tmp_path, "--json")
    assert code == 3 and json.loads(out)["status"] == "diverged"


def test_a_newer_store_is_refused(capsys, tmp_path):
    write_json(tmp_path / "store.json", {"schema": 999})
    assert "has schema 999" in error(capsys, "list", "--store", tmp_path)


def test_a_full_disk_is_one_line_and_the_run_continues_later(capsys, tmp_path, monkeypatch):
    from commsweep import store as storing

    original = storing.RunFolder.append

    def full(self, metrics, file=storing.METRICS):
        if metrics["epoch"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        original(self, metrics, file)

    with monkeypatch.context() as patch:
        patch.setattr(storing.RunFolder, "append", full)
        err = error(
            capsys, "run", "synthetic", "--store", tmp_path, "--json", "--checkpoint-every", 0
        )
    assert "No space left on device; free some space" in err
    store = Store(tmp_path)
    assert store.status(run_id(preset("synthetic"))) == "interrupted"
    code, out, _ = call(capsys, "run", "synthetic", "--store", tmp_path, "--json")
    assert code == 0 and json.loads(out)["status"] == "finished"
    assert [e["epoch"] for e in store.folder(run_id(tiny())).metrics()] == [1, 2]


@pytest.mark.slow  # the launcher's own, in tests/sweeps, is a quick one
def test_ctrl_c_leaves_the_store_whole_and_the_same_command_continues(tmp_path):
    command = ["sweep", "launch", "smoke", "--store", str(tmp_path), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "commsweep", *command],
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
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
    results = [
        bench.Result("a / b", 1.02, 1.08, medians={"a": 1.0}),
        bench.Result("c / d", 2.0, 3.0, False),
        bench.Result("e / f", 2.0, 2.1, interval=(1.5, 2.5)),
    ]
    from commsweep.bench import boundary

    monkeypatch.setattr(bench, "BENCHES", ("boundary",))
    monkeypatch.setattr(boundary, "bench", lambda: results)
    code, out, _ = call(capsys, "bench", "boundary", "--json")
    assert code == 1  # the second misses its bound
    assert [(r["name"], r["verdict"], r["bound"]) for r in json.loads(out)] == [
        ("a / b", "holds", 1.08),
        ("c / d", "missed", 3.0),
        ("e / f", "unresolved", 2.1),
    ]
    monkeypatch.setattr(boundary, "bench", lambda: [results[0], results[2]])
    code, out, _ = call(capsys, "bench")
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("holds      a / b: 1.020 (one round) <= 1.08")
    assert lines[1].startswith("unresolved e / f: 2.000 (1.50 to 2.50) <= 2.1")
    code, out, _ = call(capsys, "bench", "--table")
    assert out.startswith("## boundary")
    assert "| a / b | 1.02 | one round | at most 1.08 | holds |" in out


def test_bench_ratios_are_paired_medians():
    result = bench.compared("a / b", {"a": [2, 4, 9], "b": [1, 2, 3]}, "a", "b", 2.5)
    assert result.ratio == 2 and result.interval == (2, 3) and result.verdict == "unresolved"
    calls = []
    seconds = bench.alternate(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, 1
    )
    assert "".join(calls) == "ababab" and len(seconds["a"]) == 2


@pytest.mark.parametrize("rounds", [5, 6, 8, 9, 15, 40])
def test_intervals_of_a_bench_hold_the_median_in_95_percent(rounds):
    """Beside the binomial by hand: how often the median lies between two order statistics."""
    result = bench.of_rounds("x", [float(number) for number in range(rounds)], None)
    assert result.interval is not None
    low, high = (int(end) for end in result.interval)

    def held(low: int, high: int) -> float:
        below = range(low + 1, high + 1)
        return sum(math.comb(rounds, count) for count in below) / 2**rounds

    assert high == rounds - 1 - low
    assert held(low, high) >= 0.95 or low == 0
    assert held(low + 1, high - 1) < 0.95


@pytest.mark.parametrize("command", [["run"], ["ddp"], ["pipeline"]])
def test_more_epochs_do_not_let_the_rate_rise_again_unsaid(command, tmp_path, capsys):
    longer = [*command, "synthetic", "epochs=40", "--store", str(tmp_path)]
    assert main(longer) == 2
    assert "add schedule.t_max=40" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_usage_line_is_the_command_that_was_typed(capsys):
    with pytest.raises(SystemExit):
        main(["score", "--help"])
    assert capsys.readouterr().out.startswith("usage: commsweep score [-h]")

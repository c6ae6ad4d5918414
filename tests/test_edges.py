"""Edges that users of other programs ran into: each is one line, or right."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import commsweep as cs
from commsweep.cli.main import main
from commsweep.compressors import build
from commsweep.config import Execution, run_id
from commsweep.errors import UserError
from commsweep.integrations.measure import codec
from commsweep.launching import search as searching
from commsweep.launching.launch import register
from commsweep.registry import project
from commsweep.store import FAILED, write_json
from commsweep.training.delay import stages_of
from commsweep.training.run import execute
from tests.helpers import tiny


@pytest.mark.parametrize(
    "text, value",
    [("mxfp4,rounding=stochastic", 60000.0), ("natural", 40000.0), ("natural", 65504.0)],
)
def test_float16_saturates_near_its_end(text, value):
    x, code = torch.full((4, 256), value, dtype=torch.float16), codec(text)
    for seed in range(5):
        y = code.decode(code.encode(x, seed))
        assert bool(y.isfinite().all()) and torch.equal(y, code.roundtrip(x, seed))


def test_measuring_inside_autocast_measures_the_codec():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    for text in ("eden:8", "tah_code"):
        (plain,) = cs.measure(x, text)
        with torch.autocast("cpu", torch.bfloat16):
            (inside,) = cs.measure(x, text)
        assert inside == plain


def test_values_that_are_drawn_are_no_bias():
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    dense = {"kind": "topk", "ratio": 0.5}
    kept, drawn = (
        cs.measure(x, codec_settings)[0].bias_squared
        for codec_settings in (dense, dense | {"values": {"kind": "natural"}})
    )
    assert drawn == pytest.approx(kept, abs=0.01)


def test_a_cut_without_weights_ends_its_stage_after_the_weights_before_it():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    for cuts in (["1", "3"], ["0", "2"], ["1", "2"]):
        stages = stages_of(net, [net.get_submodule(name) for name in cuts])
        assert [stages[net[place].weight] for place in (0, 2, 4)] == [0, 1, 2]


def test_ids_of_digits_only_are_no_numbers(tmp_path):
    (tmp_path / "rows.csv").write_text("id,setting_id,seed\n012345678901,123456789012,0\n")
    rows = cs.load_rows(tmp_path / "rows.csv")
    assert list(rows.id) == ["012345678901"] and list(rows.setting_id) == ["123456789012"]


def test_more_batches_than_an_epoch_has_are_not_recorded(store):
    with pytest.raises(UserError, match=r"recalibrate=500: an epoch of training has \d+ batches"):
        execute(cs.preset("digits", recalibrate=500), store, Execution("cpu"))


def test_failed_cells_of_an_earlier_launch_are_named(store, capsys):
    run = tiny()
    row = execute(run, store, Execution("cpu"))
    folder = store.folder(run_id(run))
    folder.set_aside()
    with folder.locked():
        folder.finish(row | {"status": FAILED, "error": "broken", "metrics": {}})
    launch = ["sweep", "launch", "--base", "synthetic", "--store", str(store.root), "--workers"]
    capsys.readouterr()
    assert main([*launch, "1", "--axis", f"seed={run.seed}"]) == 1
    assert f"failed in an earlier launch ({run_id(run)}); --retry failed" in capsys.readouterr().out
    # beside a cell that is missing and ends well, too
    assert main([*launch, "1", "--axis", f"seed={run.seed},7"]) == 1
    out = capsys.readouterr().out
    assert "1 finished" in out and f"({run_id(run)}); --retry failed" in out


def test_a_torn_journal_loses_its_torn_line_only(tmp_path, capsys):
    journal = tmp_path / "s.journal"
    journal.write_text('{"a": 1}\n{"b": 2}\n{"c"')
    searching._mend_journal(tmp_path, "s")
    assert journal.read_text() == '{"a": 1}\n{"b": 2}\n'
    journal.write_text('{"a": 1}\n{"b"\n{"c": 3}\n')
    with pytest.raises(UserError, match=r"s\.journal', line 2 is damaged"):
        searching._mend_journal(tmp_path, "s")
    assert journal.read_text().count("\n") == 3


def test_a_project_above_that_others_can_write_is_not_executed(tmp_path, monkeypatch):
    inner = tmp_path / "inner"
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.py").write_text("import commsweep\n\nPRESETS = {}\n")
    inner.mkdir()
    monkeypatch.chdir(inner)
    monkeypatch.delenv("COMMSWEEP_PROJECT", raising=False)
    assert project() == tmp_path
    (tmp_path / "experiments").chmod(0o777)
    with pytest.raises(UserError, match="others own or can write.*--project"):
        project()
    monkeypatch.chdir(tmp_path)
    assert project() == tmp_path, "the folder that one works in is one's own choice"


@pytest.mark.parametrize("closed, code", [(">&-", 1), ("2>&-", 0)])
def test_closed_streams_are_no_traceback(closed, code, tmp_path):
    command = f"{sys.executable} -m commsweep presets {closed}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    if closed == ">&-":
        assert done.returncode == code and "standard output is closed" in done.stderr


@pytest.mark.slow
def test_workers_do_not_import_modules_of_the_working_folder(tmp_path):
    for name in ("random", "json", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('executed')\n")
    binary = os.path.join(os.path.dirname(sys.executable), "commsweep")
    for command in (
        ["sweep", "launch", "--base", "synthetic", "--axis", "seed=0,1", "--workers", "2"],
        ["ddp", "synthetic", "grad.learners=2"],
    ):
        done = subprocess.run(
            [binary, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:]


def test_links_beside_a_table_are_refused(tmp_path, capsys):
    assert main(["predict", "--rows", "rows.csv", "--links", "iperf.json"]) != 0
    assert "--trace and --model only" in capsys.readouterr().err


def test_tern_sends_a_constant_message_only_without_its_clip():
    x = torch.full((4, 64), 3.0)
    assert not build({"kind": "tern"}).roundtrip(x).any()
    assert torch.equal(build({"kind": "tern", "clip": 0.0}).roundtrip(x), x)


def test_a_setting_that_is_said_twice_is_asked_about(tmp_path, capsys):
    spec = '{"kind": "topk", "ratio": 0.1, "ratio": 0.5}'
    assert main(["compress", "--spec", spec, "in.npy", str(tmp_path / "out.npy")]) == 2
    assert "--spec says ratio twice" in capsys.readouterr().err


def test_a_sweep_s_name_is_one_line(tmp_path, store):
    with pytest.raises(UserError, match=r"sweep name 'a\\nb' cannot be a file name"):
        register("a\nb", [tiny()], store)


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as fault:
        write_json(tmp_path / "row.json", {})
    assert fault.value.filename == str(tmp_path / "row.json")

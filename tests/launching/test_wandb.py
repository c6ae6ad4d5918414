"""W&B is a view: what it is given equals the store, once, and its agent runs our own command. All
offline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commsweep.cli.main import main
from commsweep.config import Execution, flatten, run_id
from commsweep.config.run import setting_id
from commsweep.errors import UserError
from commsweep.launching.launch import launch, register
from commsweep.launching.views import wandb
from commsweep.launching.views.follow import Follower
from commsweep.launching.views.wandb import View, definition
from commsweep.registry import sweep
from commsweep.reporting.foreign_rows import wandb_key, wandb_records
from commsweep.store import METRICS, POINTS, Store
from tests.helpers import tiny


def finished(path):
    """The records of a file that W&B, which writes it behind our back, has ended: on a busy
    machine, in a while.
    """
    for _ in range(600):
        found = list(wandb_records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def shown(store):
    """{run id: (group, config, history, summary, exit code, name)} of all offline files of a
    store.
    """
    out = {}
    for path in sorted((store.root / ".wandb" / "wandb").glob("offline-run-*/run-*.wandb")):
        run, history, summary, code = None, [], {}, None
        for record in finished(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = record.run
            elif kind == "history":
                history.append(
                    {wandb_key(item): json.loads(item.value_json) for item in record.history.item}
                )
            elif kind == "summary":
                summary |= {
                    wandb_key(item): json.loads(item.value_json) for item in record.summary.update
                }
            elif kind == "exit":
                code = record.exit.exit_code
        config = {wandb_key(item): json.loads(item.value_json) for item in run.config.update}
        assert run.run_id not in out, "shown twice"
        out[run.run_id] = run.run_group, config, history, summary, code, run.display_name
    return out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A store with a finished and a diverged run of the sweep "two"."""
    store = Store(tmp_path_factory.mktemp("wandb") / "store")
    runs = [tiny(fwd__compressor__kind="topk", fwd__compressor__ratio=0.1), tiny(optim__lr=1e9)]
    register("two", runs, store)
    assert launch(runs, store, Execution("cpu"), 1).outcomes == {"finished": 1, "diverged": 1}
    assert View(store, "two").push([run_id(run) for run in runs]) == 2
    return store, runs


def test_what_is_shown_is_what_is_stored(recorded):
    store, runs = recorded
    good, bad = (store.folder(run_id(run)).row() for run in runs)
    group, config, history, summary, code, name = shown(store)[good["id"]]
    assert code == 0 and group == config["setting"] == setting_id(good["run"])
    assert (config["codec"], config["K"], config["feedback"]) == ("fwd=topk:0.1", 0.1, "none")
    assert name.startswith("fwd=topk:0.1 ") and "optim.lr=" in name
    assert {name: config[name] for name in flatten(good["run"])} == flatten(
        json.loads(json.dumps(good["run"]))
    )
    assert config["fwd.compressor.ratio"] == 0.1 and config["id"] == good["id"]
    evaluations = store.folder(good["id"]).metrics()
    assert [
        {name: line[name] for name in one} for one, line in zip(evaluations, history, strict=True)
    ] == evaluations
    for name in ("test_on_acc", "test_off_acc"):
        assert summary[name] == good["metrics"][name]
    assert summary["bytes.ratio"] == good["bytes"]["ratio"] and summary["status"] == "finished"
    assert shown(store)[bad["id"]][3]["status"] == "diverged" and shown(store)[bad["id"]][4] == 1


def test_a_second_push_sends_only_what_is_new(recorded, tmp_path):
    store, runs = recorded
    view = View(store, "two")
    assert view.push([run_id(run) for run in runs]) == 0
    with open(view.notes, "a") as notes:
        notes.write('["torn')
    assert len(view.replayed()) == 2
    row = store.root / run_id(runs[0]) / "done.json"
    copy = Store(tmp_path / "copy")
    copy.folder(run_id(runs[0])).begin(runs[0], {})
    (copy.root / run_id(runs[0]) / "done.json").write_text(row.read_text())
    assert View(copy, "two").push([run_id(runs[0]), "absent"]) == 1
    assert len(shown(store)) == 2


@pytest.mark.slow
def test_a_launch_shows_its_runs_and_its_report(tmp_path, capsys):
    assert (
        main(
            [
                "sweep",
                "launch",
                "smoke",
                "--store",
                str(tmp_path),
                "--workers",
                "2",
                "--wandb",
                "offline",
                "--tensorboard",
            ]
        )
        == 0
    )
    store, ids = Store(tmp_path), {run_id(run) for run in sweep("smoke")}
    seen = shown(store)
    assert seen.keys() == ids | {"report-smoke"}
    settings = {setting_id(store.folder(name).row()["run"]) for name in ids}
    assert {one[0] for one in seen.values()} == {"smoke"} | settings
    pictures = {
        name.split(".")[0]
        for line in seen["report-smoke"][2]
        for name in line
        if name.startswith("figures/")
    }
    assert "figures/on_off" in pictures
    assert main(["wandb", "push", "smoke", "--store", str(tmp_path), "--wandb", "offline"]) == 0
    assert "0 runs sent" in capsys.readouterr().out
    for name in ids:
        (folder,) = tmp_path.glob(f"{name}/tensorboard/*, seed *")
        events = EventAccumulator(str(folder)).Reload()
        for tag, file in (("bytes", METRICS), ("point_bytes", POINTS)):
            recorded = [(r["step"], r["bytes"]) for r in store.folder(name).metrics(file)]
            assert [(e.step, e.value) for e in events.Scalars(tag)] == recorded


def test_the_sweep_for_agents_names_no_path_of_this_machine():
    command = definition("smoke", Path("store"))["command"]
    assert command[:4] == ["${env}", "${interpreter}", "-m", "commsweep"] and not any(
        "/" in word for word in command
    )


@pytest.mark.slow
def test_what_wandbs_agent_runs_is_our_own_command(tmp_path):
    store = Store(tmp_path / "store")
    text = subprocess.run(
        [sys.executable, "-m", "commsweep", "wandb", "sweep", "smoke", "--store", str(store.root)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    made = yaml.safe_load(text)
    runs, values = sweep("smoke"), made["parameters"]["codecs"]["values"]
    assert made["method"] == "grid" and made["metric"]["name"] == "val_on_acc"
    assert values == [wandb.in_words(run) for run in runs]
    for turn, at in enumerate((0, 5)):
        cell = run_id(runs[at])
        macros = {
            "${env}": ["/usr/bin/env"],
            "${interpreter}": [sys.executable],
            "${args_no_hyphens}": [f"codecs={values[at]}"],
        }
        command = [word for macro in made["command"] for word in macros.get(macro, [macro])]
        environment = os.environ | {
            "WANDB_SWEEP_ID": "s1",
            "WANDB_RUN_ID": f"agents{turn}",
            "WANDB_MODE": "offline",
            "WANDB_PROJECT": "commsweep",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        config, summary = shown(store)[f"agents{turn}"][1], shown(store)[f"agents{turn}"][3]
        assert config["id"] == cell
        assert summary["test_on_acc"] == store.folder(cell).row()["metrics"]["test_on_acc"]


@pytest.mark.parametrize("name", ["demo", "smoke", "floor_optimizers", "text_width", "digits_grid"])
def test_every_cell_of_a_sweep_is_one_choice_of_its_parameters(name):
    runs = sweep(name)
    records = wandb.parameters(runs)
    for run, values in zip(runs, records, strict=True):
        assert wandb.cell_of(runs, values) == [run]
    first = definition(name, Path("store"), method="bayes")
    seeds = sorted({run.seed for run in runs})
    assert "seed" not in first["parameters"]
    assert first["command"][-3:-1] == ["--seeds", ",".join(map(str, seeds))]


def test_a_value_that_the_sweep_has_not_is_trained_too():
    runs = sweep("smoke")
    (run,) = wandb.cell_of(runs, {"codecs": wandb.in_words(runs[1]), "optim.lr": 0.0123})
    assert run.optim.lr == 0.0123 and run.fwd == runs[1].fwd
    several = wandb.cell_of(runs, {"codecs": wandb.in_words(runs[1])}, [3, 4])
    assert [run.seed for run in several] == [3, 4] and several[0].fwd == runs[1].fwd
    with pytest.raises(UserError, match="names no cell of the sweep"):
        wandb.cell_of(runs, {"codecs": "fwd=topk:0.123"})


def test_what_wandb_refuses_does_not_end_a_launch(recorded, monkeypatch):
    store, runs = recorded

    def refuse(*_):
        raise RuntimeError("quota exceeded")

    monkeypatch.setattr(View, "push", refuse)
    follower = Follower(View(store, "two"), "commsweep wandb push")
    follower.add(run_id(runs[0]))
    follower.add(run_id(runs[1]))
    assert follower.end() == "quota exceeded; later: commsweep wandb push"


@pytest.mark.parametrize(
    "command, line",
    [
        (
            ["wandb", "push", "--wandb", "online"],
            "--wandb online: not logged in to W&B; run `wandb login`",
        ),
        (["sweep", "launch", "smoke", "--wandb", "online"], "--wandb online: not logged in to W&B"),
        (["run", "synthetic", "--wandb", "online"], "--wandb online: not logged in to W&B"),
        (["wandb", "cell", "smoke", "cell=1"], "'cell=1' names no cell of sweep 'smoke'"),
        (
            ["wandb", "push", "--wandb", "offline", "--project", "a/b"],
            "--project 'a/b': a name without /",
        ),
        (
            ["wandb", "push", "--wandb", "offline", "--report", "nowhere"],
            "--report 'nowhere': no report in it",
        ),
    ],
)
def test_bad_input_is_one_line(command, line, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert main([*command, "--store", str(tmp_path / "store")]) == 2
    err = capsys.readouterr().err
    assert err.strip().splitlines()[-1].startswith(f"commsweep: {line}")
    assert not list((tmp_path / "store").glob("*/done.json"))

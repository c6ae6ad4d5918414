"""MLflow as a view: what it shows is what the store has, once, whatever is recorded anew."""

from __future__ import annotations

import sys

import pytest

from commsweep.cli.main import main
from commsweep.config import override, run_id
from commsweep.errors import UserError
from commsweep.launching.grid import seeds
from commsweep.launching.launch import register
from commsweep.launching.views.follow import Follower
from commsweep.launching.views.mlflow import View
from commsweep.registry import preset
from commsweep.store import POINTS
from tests.helpers import outcome


def filled(store):
    """Two seeds of one setting with two points each, and a diverged run."""
    run = override(preset("digits"), {"fwd": "ef+topk:0.1"})
    runs = [*seeds([run], 2), preset("digits")]
    register("two", runs, store)
    for index, run in enumerate(runs):
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        for step in (10, 20):
            point = {"epoch": step / 10, "step": step, "val_on_acc": 0.5 + step / 100}
            folder.append(point, POINTS)
        status = "diverged" if index == 2 else "finished"
        metrics = {} if index == 2 else {"test_on_acc": 0.9}
        folder.finish(outcome(run, status=status, metrics=metrics))
    return [run_id(run) for run in runs]


@pytest.mark.slow
def test_runs_are_shown_once_with_settings_points_and_outcome(store, tmp_path):
    names = filled(store)
    view = View(store, "two", str(tmp_path / "mlflow"))
    assert view.push(names) == 3 and view.push(names) == 0
    runs = view.client.search_runs([view.experiment])
    by_id = {run.data.tags["commsweep.id"]: run for run in runs}
    assert set(by_id) == set(names)
    shown = by_id[names[0]]
    expected = {"codec": "fwd=ef+topk:0.1", "K": "0.1", "feedback": "ef", "optim.kind": "sgd"}
    assert expected.items() <= shown.data.params.items()
    assert shown.data.params["setting"] == by_id[names[1]].data.params["setting"]
    assert shown.data.metrics["test_on_acc"] == 0.9
    history = view.client.get_metric_history(shown.info.run_id, "val_on_acc")
    assert [(point.step, point.value) for point in history] == [(10, 0.6), (20, 0.7)]
    assert by_id[names[2]].info.status == "FAILED" and by_id[names[2]].data.tags["status"] == (
        "diverged"
    )
    store.folder(names[0]).set_aside()  # recorded anew: it replaces the earlier run
    run = store.cells("two")[names[0]]
    folder = store.folder(names[0])
    folder.begin(override(preset("digits"), {"fwd": "ef+topk:0.1"}), {})
    folder.finish(outcome(override(preset("digits"), {"fwd": "ef+topk:0.1"}), metrics={"a": 1.0}))
    assert run and view.push(names) == 1
    assert len(view.client.search_runs([view.experiment])) == 3


@pytest.mark.slow
def test_a_launch_shows_what_it_trained_and_what_was_there(store, tmp_path, capsys):
    filled(store)
    folder = tmp_path / "mlflow"
    command = ["sweep", "launch", "two", "--store", str(store.root), "--mlflow", str(folder)]
    assert main(command) in (0, 1)  # one of its runs has diverged
    view = View(store, "two", str(folder))
    assert len(view.client.search_runs([view.experiment])) == 3


def test_what_is_wrong_is_one_line_and_ends_no_launch(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    view = View(store, "two", str(tmp_path / "mlflow"))
    with pytest.raises(UserError, match="needs MLflow: pip install"):
        view.push([])
    follower = Follower(view, "again")
    follower.add("0" * 12)
    follower.end()
    assert "needs MLflow" in follower.fault and follower.fault.endswith("later: again")

"""Rows that something else has written into, leftovers of killed processes, and what a store does
about them.
"""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest

from commsweep.cli.main import main
from commsweep.config import Execution, override, run_id
from commsweep.errors import UserError
from commsweep.launching.launch import adopt, register
from commsweep.registry import preset, sweep
from commsweep.store import Damaged, Store
from commsweep.training.run import execute
from tests.helpers import outcome, tiny


def recorded(store, run=None, **more):
    run = run or tiny()
    folder = store.folder(run_id(run))
    folder.begin(run, {"by": "sweep"})
    folder.finish(
        outcome(
            run,
            metrics={"test_on_acc": 0.5, "test_off_acc": 0.5},
            bytes={"ratio": 0.5, "total": 1},
            gradients={},
            boundaries={"layer1": {"fwd": 1, "bwd": 1}},
            steps=3,
            **more,
        )
    )
    return folder


EDITS = {
    "a flag for numbers": (("bytes",), True, "bytes is 'True'"),
    "a script for a number": (
        ("metrics", "test_on_acc"),
        "<script>",
        "metrics.test_on_acc is '<script>'",
    ),
    "a list for settings": (("run",), [], "run is"),
    "a flag for a count": (
        ("boundaries", "layer1", "fwd"),
        True,
        "boundaries.layer1.fwd is 'True'",
    ),
    "other settings": (("run", "seed"), 9, "its settings are those of run"),
    "a setting that is none": (("run", "model", "cuts"), [float("nan")], "model.cuts"),
    "text in the diagnosis": (("diagnosis",), [3], "diagnosis.0"),
    "a day for a moment": (("when",), "yesterday", "when is 'yesterday'"),
    "seconds below zero": (("seconds",), {"train": -3.0}, "seconds.train is '-3.0'"),
    "a status that is none": (("status",), "great", "status is 'great': value error, none of"),
    "an endless error": (("error",), "x" * 20_000, "at most 10000 characters"),
    "no share of bytes": (("bytes",), {"total": 1}, "no ratio in it"),
    "no bytes back": (("boundaries", "layer1"), {"fwd": 1, "x": 2}, "no bwd in it"),
    "a diagnosis of nothing": (("diagnosis",), [{"x": None}], "no boundary, no direction in it"),
    "factors without a name": (("kfac",), {"x": 1.0}, "no factors_up in it"),
    "gradients without a name": (("gradients",), {"x": 1.0}, "no up in it"),
    "more than all right": (("metrics", "test_on_acc"), 7.0, "between 0 and 1"),
    "an endless accuracy": (("metrics", "test_on_acc"), 1e300, "between 0 and 1"),
    "finished without scores": (("metrics",), {}, "it is finished and has no metrics"),
    "diverged with scores": (("status",), "diverged", "diverged and has metrics"),
    "steps without end": (("steps",), 10**40, "steps is"),
    "steps below zero": (("steps",), -3, "steps is '-3'"),
    "a speed below zero": (("speed",), {"samples_per_second": -1.0}, "speed.samples_per_second"),
    "another schema": (("schema",), 4, "it is of schema 4"),
    "no number": (("metrics", "test_on_loss"), float("nan"), "metrics.test_on_loss is 'nan'"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", EDITS)
def test_an_edited_row_is_named_by_file_and_field_and_the_rest_is_listed(what, store, capsys):
    path, value, said = EDITS[what]
    folder = recorded(store)
    other = recorded(store, tiny(seed=1))
    row = json.loads((folder.path / "done.json").read_text())
    place = row
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder.path / "done.json").write_text(json.dumps(row))
    with pytest.raises(Damaged, match="done.json' is damaged"):
        folder.row()
    register("two", [tiny(), tiny(seed=1)], store)
    for command in (
        ["list"],
        ["claims", "two"],
        ["report", "two", "--out", str(store.root.parent / "out"), "--no-page"],
        ["sweep", "status", "two"],
    ):
        assert main([*command, "--store", str(store.root)]) in (0, 2), command
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        if command == ["list"]:
            assert other.path.name in out and "damaged" in out and said in err


def test_a_row_without_a_schema_or_with_a_key_twice_is_damaged(store, capsys):
    folder = recorded(store)
    text = (folder.path / "done.json").read_text()
    for edited, said in (
        (text.replace('"schema"', '"scheme"', 1), "it says no schema"),
        (text.replace('"steps"', '"metrics": {},\n "steps"', 1), "'metrics' stands in it twice"),
    ):
        (folder.path / "done.json").write_text(edited)
        with pytest.raises(Damaged, match=said):
            folder.row()


def test_an_error_of_others_is_one_line_without_what_a_terminal_obeys(store, capsys):
    run = tiny(seed=3)
    folder = store.folder(run_id(run))
    folder.begin(run, {})
    folder.finish(outcome(run, "failed", error="a\nb\x1b[2Jc"))
    assert main(["show", run_id(run), "--store", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert "a b [2Jc" in out and "\x1b" not in out


def test_links_in_a_store_are_not_followed(store, tmp_path, capsys):
    """Neither out of it nor round in a circle."""
    recorded(store)
    elsewhere = Store(tmp_path / "elsewhere")
    other = recorded(elsewhere, tiny(seed=1))
    (store.root / other.path.name).symlink_to(other.path)
    (store.root / "circle").symlink_to(store.root)
    (store.root / "loop").symlink_to(store.root / "loop")
    assert main(["list", "--store", str(store.root)]) == 0
    out, err = capsys.readouterr()
    assert other.path.name not in out and "is a link, which a store does not follow" in err
    assert len(store.rows()) == 1


def test_an_evaluation_that_is_no_number_costs_only_itself(store, capsys):
    folder = recorded(store)
    folder.append({"epoch": 1, "step": 1, "train_loss": 1.0, "masks": {"ever": [0.5]}})
    with open(folder.path / "metrics.jsonl", "a") as handle:
        handle.write('{"epoch": 2, "train_loss": {}}\n{"epoch": 3, "test_on_loss": "<script>"}\n')
    assert [one["epoch"] for one in folder.metrics()] == [1]
    assert "train_loss of epoch 2 is no number" in capsys.readouterr().err


def test_a_line_that_is_no_evaluation_is_named_and_a_torn_last_one_is_not(store, capsys):
    folder = recorded(store)
    folder.append({"epoch": 1, "step": 1, "train_loss": 1.0})
    with open(folder.path / "metrics.jsonl", "a") as handle:
        handle.write('{"epo\n{"epoch": 2, "step"')
    assert [record["epoch"] for record in folder.metrics()] == [1]
    said = capsys.readouterr().err
    assert "line 2 is no evaluation" in said and "line 3" not in said


def test_an_outcome_without_run_json_is_found_and_shown(store, capsys):
    folder = recorded(store)
    (folder.path / "run.json").unlink()
    assert store.find(folder.path.name[:6]).run() == tiny()
    assert main(["list", "--store", str(store.root)]) == 0
    assert folder.path.name in capsys.readouterr().out


def test_a_damaged_row_does_not_keep_others_from_being_adopted(store, capsys):
    damaged = recorded(store)
    (damaged.path / "done.json").write_text("{}")
    rows = [outcome(tiny(seed=seed), adopted="rows.csv") for seed in (0, 1)]
    assert adopt("two", [tiny(), tiny(seed=1)], rows, store) == 1
    assert "is damaged" in capsys.readouterr().err
    assert store.folder(run_id(tiny(seed=1))).row()["adopted"] == "rows.csv"


def test_memory_that_runs_out_while_a_model_is_built_is_an_outcome(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big.py").write_text(
        "import torch\nfrom torch import nn\ndef net(s, c):\n    return nn.Linear(2**24, 2**26)\n"
    )
    changes = {"model.name": "own", "model.build": "big.py:net"}
    row = execute(override(preset("synthetic"), changes), store, Execution("cpu"))
    assert row["status"] == "oom" and "allocate" in row["error"] and row["steps"] == 0


def test_what_is_not_finite_is_null_in_json(store):
    folder = store.folder("x")
    folder.make()
    folder.append({"epoch": 1, "rates": {"a": float("inf")}})
    assert '"a": null' in (folder.path / "metrics.jsonl").read_text()


def test_scores_that_are_not_finite_are_an_outcome(store):
    run = tiny(optim__lr=1e-3, epochs=1, eval_every=1)
    from commsweep.training import tasks

    plain = tasks.ImageClassification.means
    try:
        tasks.ImageClassification.means = staticmethod(
            lambda total: plain(total) | {"loss": float("nan")}
        )
        row = execute(run, store, Execution("cpu"))
    finally:
        tasks.ImageClassification.means = staticmethod(plain)
    assert row["status"] == "diverged" and row["error"].startswith(
        "non-finite val_on_loss, epoch 1"
    )
    json.loads((store.folder(row["id"]).path / "done.json").read_text(), parse_constant=pytest.fail)


def test_reading_makes_no_store(tmp_path, capsys):
    for command in (
        ["list"],
        ["show", "a"],
        ["report", "x"],
        ["claims", "x"],
        ["sweep", "status", "demo"],
        ["sweep", "prune", "--dry-run"],
    ):
        assert main([*command, "--store", str(tmp_path / "typo")]) == 2
        assert "no store lies there" in capsys.readouterr().err
    assert main(["sweep", "plan", "smoke", "--store", str(tmp_path / "typo")]) == 0
    assert not (tmp_path / "typo").exists()


def test_a_store_stays_where_it_is_when_the_working_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("s")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.folder("a").make()
    assert (tmp_path / "s" / "a").is_dir() and not (tmp_path / "elsewhere" / "s").exists()


def test_what_killed_processes_left_is_swept_up(store):
    folder = recorded(store)
    other = store.folder(run_id(tiny(seed=1)))
    other.begin(tiny(seed=1), {})
    left = [
        store.root / ".removed-abc-1",
        folder.path / f".run.json.part-{socket.gethostname()}-999999999",
        folder.path / "last.3.abc.ckpt",
        folder.path / "layer1.fwd.buffer.3.abc",
    ]
    left[0].mkdir()
    kept = [
        other.path / "last.3.abc.ckpt",
        other.path / f".run.json.part-{socket.gethostname()}-{os.getpid()}",
    ]
    for path in (*left[1:], *kept):
        path.write_text("x")
    store.tidy()
    assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


def test_a_prune_that_was_killed_does_not_stop_the_next(store):
    folder = recorded(store)
    (store.root / f".removed-{folder.path.name}").mkdir()
    (store.root / f".removed-{folder.path.name}" / "done.json").write_text("{}")
    assert main(["sweep", "prune", "--yes", "--store", str(store.root)]) == 0
    assert not folder.path.exists() and not list(store.root.glob(".removed-*"))


def test_launches_at_the_same_time_name_what_both_name(store):
    runs = sweep("smoke")
    parts = [
        [run.model_copy(update={"seed": seed}) for run in runs for seed in range(n)]
        for n in (6, 3, 5, 4)
    ]
    threads = [threading.Thread(target=register, args=("smoke", part, store)) for part in parts]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(store.cells("smoke")) == 6 * len(runs)


def test_a_copy_with_fields_that_do_not_fit_is_refused(store, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="eval_every=7 does not divide"):
        execute(tiny().model_copy(update={"eval_every": 7}), store, Execution("cpu"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.py").write_text(
        "from commsweep.registry import preset\n"
        "def runs():\n    run = preset('digits').model_copy(update={'eval_every': 7})\n"
        "    return [run]\ndef twice():\n    return [preset('digits')] * 3\n"
    )
    with pytest.raises(UserError, match="eval_every=7 does not divide"):
        sweep("g.py:runs")
    assert len(sweep("g.py:twice")) == 1

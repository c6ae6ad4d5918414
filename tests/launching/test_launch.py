"""Law 6: whatever is killed, the same set of rows comes out, none lost, none twice. Real processes,
really killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commsweep.config import Execution, run_id
from commsweep.errors import UserError
from commsweep.launching.executors import local
from commsweep.launching.launch import Job, launch, missing, register, set_aside
from commsweep.registry import sweep, sweeps
from commsweep.store import Store
from tests.helpers import outcome, tiny

HOW = Execution("cpu", checkpoint_every=0)
LAUNCHER = """
import sys
from commsweep.config import Execution
from commsweep.store import Store
from commsweep.launching.launch import launch
from tests.launching.test_launch import cells
if __name__ == "__main__":
    launch(cells(), Store(sys.argv[1]), Execution("cpu", checkpoint_every=0), 2)
"""


def cells():
    """Four runs of a few seconds."""
    return [tiny(seed=seed, epochs=40, eval_every=40, schedule__t_max=40) for seed in range(4)]


def start(path, store):
    path.write_text(LAUNCHER)
    return subprocess.Popen(
        [sys.executable, str(path), str(store)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        start_new_session=True,
    )


def children(pid):
    """The worker processes of a launcher: the children of its fork server."""

    def below(parent):
        with open(f"/proc/{parent}/task/{parent}/children") as handle:
            return [int(one) for one in handle.read().split()]

    servers = [
        one for one in below(pid) if b"forkserver" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]
    return [worker for server in servers for worker in below(server)]


def dies(*_):
    """A worker that cannot start."""
    os._exit(7)


def numbers(store):
    rows = {row["id"]: row for row in store.rows()}
    return {name: (row["status"], row["metrics"]) for name, row in rows.items()}


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What comes of the cells when nothing disturbs them."""
    store = Store(tmp_path_factory.mktemp("straight"))
    launch(cells(), store, HOW, 2)
    return numbers(store)


def in_the_middle(store):
    """Both workers have saved a checkpoint of a run they are still at."""
    return len({path.parent for path in store.root.glob("*/last.*.ckpt")}) >= 2


@pytest.mark.slow  # Ctrl-C itself is tried through the command line in every run of the suite
@pytest.mark.parametrize("victim", ["ctrl-c", "launcher", "worker", "both", "ctrl-c twice"])
def test_whatever_is_killed_the_same_rows_come_out(victim, tmp_path, straight):
    store = Store(tmp_path / "store")
    process = start(tmp_path / "go.py", store.root)
    try:
        wait_for(lambda: in_the_middle(store))
        workers = children(process.pid)
        if victim in ("launcher", "both"):
            process.send_signal(signal.SIGKILL)
        if victim in ("worker", "both"):
            os.kill(workers[0], signal.SIGKILL)
        if victim == "worker":
            process.wait(timeout=200)
            row = next(row for row in store.rows() if row["status"] == "failed")
            assert row["error"] == "worker killed by SIGKILL"
            assert len(store.rows()) == 4  # its neighbour and the rest went on
            assert set_aside(cells(), store, {"failed"}) == 1
        if victim.startswith("ctrl-c"):
            process.send_signal(signal.SIGINT)
            if victim == "ctrl-c twice":
                time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) != 0
            statuses = {store.status(run_id(run)) for run in cells()}
            assert statuses == {"interrupted", "missing"}  # two were running, two had not begun
            wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    finally:
        if process.poll() is None and victim != "worker":
            process.wait(timeout=30)
    # An orphaned worker may still hold its cell; the next launcher waits for it and repeats
    # nothing.
    report = launch(cells(), store, HOW, 2)
    assert report.outcomes["failed"] == 0
    assert numbers(store) == straight
    assert len(straight) == 4


@pytest.mark.slow
def test_two_launchers_share_one_store_and_repeat_nothing(tmp_path, straight):
    store = Store(tmp_path / "store")
    both = [start(tmp_path / f"go{i}.py", store.root) for i in range(2)]
    assert [process.wait(timeout=250) for process in both] == [0, 0]
    assert numbers(store) == straight
    logs = [
        (store.folder(run_id(run)).path / "metrics.jsonl").read_text().splitlines()
        for run in cells()
    ]
    assert [len(lines) for lines in logs] == [1] * 4  # each cell was evaluated once


def test_a_cell_that_takes_too_long_is_stopped_recorded_and_continued_by_a_retry(store, straight):
    slow, quick = cells()[0], tiny()
    report = launch([slow], store, HOW, 2, timeout=0.2)  # its imports do not count
    assert report.outcomes == {"timeout": 1}
    row = store.folder(run_id(slow)).row()
    assert (
        row["status"] == "timeout"
        and "stopped after 0.2 s; --retry timeout continues" in row["error"]
    )
    assert set_aside([slow, quick], store, {"timeout"}) == 1
    assert launch([slow, quick], store, HOW, 2, timeout=200).outcomes == {"finished": 2}
    assert numbers(store)[run_id(slow)] == straight[run_id(slow)]


def test_a_damaged_outcome_is_set_aside_and_the_run_repeated(store):
    run = tiny()
    launch([run], store, HOW, 1)
    done = store.folder(run_id(run)).path / "done.json"
    whole = done.read_text()
    for damage in (whole[:40], "", "[]"):
        done.write_text(damage)
        assert store.status(run_id(run)) == "damaged"
        lines = store.mend([run_id(run)])
        assert len(lines) == 1 and "kept as done." in lines[0]
        assert missing([run], store) == [run]
    assert sorted(p.name for p in done.parent.glob("done*")) == [
        "done.1.json",
        "done.2.json",
        "done.3.json",
    ]
    done.write_text(whole)
    assert store.mend([run_id(run)]) == []


def test_prune_removes_what_no_sweep_names_and_nothing_that_runs(store):
    named, unnamed, running = tiny(seed=1), tiny(seed=2), tiny(seed=3)
    register("kept", [named], store)
    for run in (named, unnamed, running):
        store.folder(run_id(run)).begin(run, {})
    assert store.unnamed() == sorted([run_id(unnamed), run_id(running)])
    with store.folder(run_id(running)).locked():
        assert [store.remove(name) for name in (run_id(unnamed), run_id(running))] == [True, False]
    assert store.ids() == sorted([run_id(named), run_id(running)])
    assert not list(store.root.glob(".removed-*"))


def test_a_second_launch_finds_nothing_to_do_and_a_larger_grid_runs_only_what_is_new(store):
    runs = [tiny(seed=0), tiny(seed=1)]
    assert launch(runs, store, HOW, 2).outcomes == {"finished": 2}
    before = {p: p.stat().st_mtime_ns for p in store.root.glob("*/done.json")}
    assert launch(runs, store, HOW, 2).outcomes == {}
    assert launch([*runs, tiny(seed=2)], store, HOW, 2).outcomes == {"finished": 1}
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in before.items())


def test_a_cell_that_cannot_start_is_reported_and_harms_no_other(store):
    bad = tiny(model__cuts=["layer9"])
    report = launch([bad, tiny()], store, HOW, 1)
    assert report.outcomes == {"refused": 1, "finished": 1}
    assert "'layer9' is no legal cut" in report.errors[0]
    assert missing([bad, tiny()], store) == [bad]


def test_efficiency_is_a_share_of_the_workers_time(store):
    report = launch([tiny()], store, HOW, 2)
    assert report.workers == 1
    assert 0 < report.busy_seconds < report.wall_seconds
    assert report.efficiency == pytest.approx(report.busy_seconds / report.wall_seconds)


def test_workers_that_cannot_start_are_one_line_and_no_endless_loop(store, monkeypatch):
    monkeypatch.setattr(local, "_serve", dies)
    with pytest.raises(
        UserError, match="workers cannot start: worker ended with exit code 7 three times"
    ):
        launch([tiny()], store, HOW, 1)
    assert store.status(run_id(tiny())) == "missing"


def test_what_a_run_prints_goes_to_its_log(store):
    run = tiny(fwd__compressor__kind="topk", fwd__feedback__kind="ef")
    launch([run], store, HOW, 1)
    assert "feedback memories" in (store.folder(run_id(run)).path / "log.txt").read_text()


def test_the_sweeps_cells_are_noted_in_the_store(store):
    register("smoke", sweep("smoke"), store)
    noted = json.loads((store.root / "sweeps" / "smoke.json").read_text())
    assert list(noted["runs"]) == [run_id(run) for run in sweeps()["smoke"]()]
    with pytest.raises(UserError, match="cannot be a file name"):
        register("../x", [], store)


def test_a_dead_workers_cell_that_another_launcher_took_first_is_left_to_it(store, monkeypatch):
    worker = object.__new__(local._Worker)
    worker.run = cells()[0]
    worker.setting = local._Setting(Job([worker.run], store, None), 1, None)
    with store.folder(run_id(worker.run)).locked():
        assert worker._finish_cell("failed", "killed") == {"status": "busy"}
    assert worker._finish_cell("failed", "killed")["status"] == "failed"


def test_retry_takes_only_what_is_still_so_and_nobody_has(store):
    runs = cells()
    for run, status in zip(runs, ("failed", "failed", "finished"), strict=False):
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        folder.finish(outcome(run, status))
    with store.folder(run_id(runs[1])).locked():  # another launcher retries it
        assert set_aside(runs, store, {"failed"}) == 1
    assert [store.folder(run_id(run)).row() is None for run in runs[:3]] == [True, False, False]

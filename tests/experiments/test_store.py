"""The record survives torn lines, damaged files, newer schemas and full disks."""

from __future__ import annotations

import errno
import json
import os

import pytest

from commsweep.experiments import store as storing
from commsweep.experiments.config import SCHEMA, run_id
from commsweep.experiments.errors import UserError
from commsweep.experiments.store import Busy, Store, write_json
from tests.helpers import tiny


@pytest.fixture
def folder(store):
    made = store.folder(run_id(tiny()))
    made.begin(tiny(), {})
    return made


def test_status_of_a_run_through_its_life(store):
    name = run_id(tiny())
    assert store.status(name) == "missing"
    folder = store.folder(name)
    with folder.locked():
        folder.begin(tiny(), {})
        assert store.status(name) == "running"
    assert store.status(name) == "interrupted"
    folder.finish({"status": "finished"})
    assert store.status(name) == "finished"
    assert folder.run() == tiny()


def test_a_lock_is_exclusive(folder):
    with folder.locked(), pytest.raises(Busy), folder.locked():
        pass
    with folder.locked():
        pass


def test_a_line_torn_by_a_crash_costs_only_itself(folder):
    folder.append({"epoch": 1, "x": 1})
    with open(folder.path / "metrics.jsonl", "a") as handle:
        handle.write('{"epoch": 2, "x"')
    assert folder.metrics() == [{"epoch": 1, "x": 1}]
    folder.append({"epoch": 2, "x": 5})
    assert folder.metrics() == [{"epoch": 1, "x": 1}, {"epoch": 2, "x": 5}]


def test_a_repeated_epoch_counts_once_and_the_last_time(folder):
    for record in ({"epoch": 1, "x": 1}, {"epoch": 2, "x": 2}, {"epoch": 2, "x": 3}):
        folder.append(record)
    assert folder.metrics() == [{"epoch": 1, "x": 1}, {"epoch": 2, "x": 3}]
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 3  # nothing recorded is removed


def test_an_outcome_is_never_overwritten_and_retry_keeps_it(folder):
    folder.finish({"status": "failed"})
    with pytest.raises(FileExistsError):
        folder.finish({"status": "finished"})
    folder.set_aside()
    assert folder.row() is None
    folder.finish({"status": "failed", "again": True})
    folder.set_aside()
    assert json.loads((folder.path / "done.1.json").read_text()) == {"status": "failed"}
    assert json.loads((folder.path / "done.2.json").read_text())["again"]


def test_a_write_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storing.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_newer_store_is_refused(tmp_path):
    write_json(tmp_path / "store.json", {"schema": SCHEMA + 1})
    with pytest.raises(UserError, match=f"has schema {SCHEMA + 1}; this commsweep reads up to {SCHEMA}"):
        Store(tmp_path)


def test_damaged_files_are_named(store, folder):
    (folder.path / "done.json").write_text('{"status": ')
    with pytest.raises(UserError, match=r"done\.json' is damaged"):
        store.rows()


def test_find_by_prefix(store, folder):
    assert store.find(folder.path.name[:4]).path == folder.path
    for prefix in ("zz", ""):
        if prefix == "":
            store.folder("0" * 12).begin(tiny(seed=1), {})
        with pytest.raises(UserError, match=r"no run folder|ambiguous"):
            store.find(prefix)

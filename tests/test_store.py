"""The record survives torn lines, damaged files, newer schemas and full disks."""

from __future__ import annotations

import errno
import json
import os

import pytest

from commsweep import store as storing
from commsweep.cli.main import main
from commsweep.config import run_id
from commsweep.config.run import SCHEMA
from commsweep.errors import UserError
from commsweep.reporting import results
from commsweep.store import Busy, Store, write_json
from tests.helpers import outcome, tiny


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
    folder.finish(outcome(tiny()))
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
    # nothing recorded is removed
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 3


def test_an_outcome_is_never_overwritten_and_retry_keeps_it(folder):
    folder.finish(outcome(tiny(), "failed"))
    with pytest.raises(FileExistsError):
        folder.finish(outcome(tiny()))
    folder.set_aside()
    assert folder.row() is None
    folder.finish(outcome(tiny(), "failed", again=True))
    folder.set_aside()
    assert json.loads((folder.path / "done.1.json").read_text()) == outcome(tiny(), "failed")
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
    with pytest.raises(
        UserError, match=f"has schema {SCHEMA + 1}; this commsweep reads up to {SCHEMA}"
    ):
        Store(tmp_path)


DAMAGE = {
    "half a row": ("done.json", '{"status": ', "Expecting value"),
    "an empty row": ("done.json", "{}", "no id, no status, no run in it"),
    "a bare row": (
        "done.json",
        json.dumps({"id": run_id(tiny()), "status": "finished", "run": {}}),
        "metrics",
    ),
    "a list": ("done.json", "[]", "no JSON object"),
    "deep": ("done.json", "[" * 100_000, "recursion"),
    "bytes": ("done.json", b"\xff\xfe\x00", "utf"),
    "another schema": (
        "done.json",
        json.dumps(outcome(tiny()) | {"schema": SCHEMA - 1}),
        f"of schema {SCHEMA - 1}",
    ),
    "another run": (
        "done.json",
        json.dumps(outcome(tiny(seed=9))),
        f"it is of run {run_id(tiny(seed=9))}",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_row_is_named_and_everything_else_still_listed(what, store, folder, capsys):
    name, content, why = DAMAGE[what]
    (folder.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    whole = tiny(seed=1)
    for_whole = store.folder(run_id(whole))
    for_whole.begin(whole, {})
    for_whole.finish(outcome(whole, metrics={"test_on_acc": 0.5}))
    with pytest.raises(UserError, match=r"done\.json' is damaged"):
        folder.row()
    assert [row["id"] for row in store.rows()] == [run_id(whole)] and store.status(
        folder.path.name
    ) == "damaged"
    said = capsys.readouterr().err
    assert "done.json' is damaged" in said and why in said and "sweep launch sets it aside" in said
    assert main(["list", "--store", str(store.root)]) == 0
    listed = capsys.readouterr().out
    assert run_id(whole) in listed and "damaged" in listed
    assert len(results.load(store.root)) == 1


def test_a_run_that_says_nothing_is_listed_as_damaged(store, folder, capsys):
    (folder.path / "run.json").write_text("{}")
    assert main(["list", "--store", str(store.root)]) == 0
    assert "damaged" in capsys.readouterr().out
    assert main(["show", folder.path.name, "--store", str(store.root)]) == 2
    assert "run.json' is damaged (no run in it)" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"schema": null}', "{}", '{"schema": true}', "", "\0"])
def test_a_damaged_mark_of_the_store_says_how_to_mend_it(content, store):
    (store.root / "store.json").write_text(content)
    with pytest.raises(UserError, match=r"store\.json' is damaged .*mend it with: echo"):
        Store(store.root)


def test_a_missing_mark_is_not_stamped_anew(store, folder):
    (store.root / "store.json").unlink()
    with pytest.raises(UserError, match="holds runs and no store.json"):
        Store(store.root)
    assert not (store.root / "store.json").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x81", b"{}", b'{"runs": []}', b'{"runs": {"a": 1}}']
)
def test_a_damaged_sweep_is_one_line(content, store, capsys):
    (store.root / "sweeps").mkdir()
    (store.root / "sweeps" / "smoke.json").write_bytes(content)
    assert main(["report", "smoke", "--store", str(store.root)]) == 2
    assert (
        "smoke.json' is damaged" in (said := capsys.readouterr().err)
        and "sweep launch smoke writes it anew" in said
    )


def test_bad_bytes_among_the_metrics_cost_their_own_line(folder):
    folder.append({"epoch": 1, "x": 1})
    with open(folder.path / "metrics.jsonl", "ab") as handle:
        handle.write(b'\xff\xfe{}\n[1]\n{"epoch": null}\n')
    folder.append({"epoch": 2, "x": 2})
    assert [record["x"] for record in folder.metrics()] == [1, 2]


def test_an_unfinished_run_is_read_without_writing(store, folder, monkeypatch, capsys):
    """A read-only store: nothing may be opened for writing."""
    import builtins

    plain = builtins.open

    def reading(path, mode="r", *rest, **more):
        if set(mode) & set("wax+") and str(path).startswith(str(store.root)):
            raise PermissionError(errno.EROFS, "Read-only file system", str(path))
        return plain(path, mode, *rest, **more)

    monkeypatch.setattr(builtins, "open", reading)
    assert store.status(folder.path.name) == "interrupted"
    for command in (["list"], ["show", folder.path.name[:5]]):
        assert main([*command, "--store", str(store.root)]) == 0
    assert "interrupted" in capsys.readouterr().out


def test_find_by_prefix(store, folder):
    assert store.find(folder.path.name[:4]).path == folder.path
    for prefix in ("zz", ""):
        if prefix == "":
            store.folder("0" * 12).begin(tiny(seed=1), {})
        with pytest.raises(UserError, match=r"no run folder|ambiguous"):
            store.find(prefix)


def test_whole_numbers_of_a_row_stay_whole(store):
    run = tiny(seed=77)
    folder = store.folder(run_id(run))
    folder.begin(run, {})
    folder.finish(outcome(run, bytes={"ratio": 1, "total": 5}))
    assert [repr(value) for value in folder.row()["bytes"].values()] == ["1", "5"]

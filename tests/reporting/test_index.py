"""The cache of rows is never trusted over the run folders."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest

from commsweep.bench.store import generate
from commsweep.config import run_id
from commsweep.reporting import index, results
from tests.helpers import tiny


@pytest.fixture
def filled(store):
    generate(store, [tiny(seed=seed) for seed in range(5)])
    return store


def same(store):
    """What is loaded with the cache equals what is loaded without it."""
    cached = results.load(store.root)
    (store.root / index.NAME).unlink(missing_ok=True)
    fresh = results.load(store.root)
    pd.testing.assert_frame_equal(cached, fresh)
    return cached


def test_a_second_load_reads_no_folder(filled, monkeypatch):
    first = results.load(filled.root)
    assert len(first) == 5 and first.method.eq("dense").all()
    monkeypatch.setattr(
        "commsweep.store.RunFolder.row", lambda self: pytest.fail("a folder was read")
    )
    pd.testing.assert_frame_equal(results.load(filled.root), first)


def test_changed_added_and_removed_folders_are_seen(filled):
    results.load(filled.root)
    name = run_id(tiny(seed=0))
    done = filled.folder(name).path / "done.json"
    row = json.loads(done.read_text())
    row["metrics"]["test_on_acc"] = 0.123456789
    done.write_text(json.dumps(row))
    assert same(filled).set_index("id").test_on_acc[name] == 0.123456789
    filled.folder(name).set_aside()
    assert name not in set(same(filled).id)
    shutil.rmtree(filled.root / run_id(tiny(seed=1)))
    assert len(same(filled)) == 3
    generate(filled, [tiny(seed=9)])
    assert len(same(filled)) == 4


@pytest.mark.parametrize(
    "damage", [b"", b"null\n", b"{torn", b"\xff\xfe", b'"other version"\n["x", [1, 2], {}]\n']
)
def test_a_damaged_cache_changes_nothing(filled, damage):
    expected = results.load(filled.root)
    path = filled.root / index.NAME
    path.write_bytes(damage)
    pd.testing.assert_frame_equal(results.load(filled.root), expected)
    path.write_bytes(path.read_bytes()[:-40] if path.stat().st_size > 40 else damage)
    pd.testing.assert_frame_equal(results.load(filled.root), expected)


def test_rows_that_are_well_formed_and_wrong_are_read_again(filled):
    expected = results.load(filled.root)
    path = filled.root / index.NAME
    lines = path.read_text().splitlines()
    wrong = [json.loads(line) for line in lines[1:]]
    wrong[0][3] = wrong[0][3].replace("0.5", "0.9")
    wrong[1][0], wrong[2][0] = wrong[2][0], wrong[1][0]
    wrong[3][3] = "{}"
    path.write_text("\n".join([lines[0], *map(json.dumps, wrong)]) + "\n")
    pd.testing.assert_frame_equal(results.load(filled.root), expected)


def test_a_store_that_cannot_be_written_is_read_all_the_same(filled, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(index.os, "replace", refuse)
    assert len(results.load(filled.root)) == 5
    assert not list(filled.root.glob(f"{index.NAME}*"))


def test_a_damaged_folder_is_named_and_all_others_are_there(filled, capsys):
    results.load(filled.root)
    (filled.folder(run_id(tiny(seed=2))).path / "done.json").write_text("{")
    assert len(results.load(filled.root)) == 4
    assert f"{run_id(tiny(seed=2))}/done.json' is damaged" in capsys.readouterr().err
    frame = results.load(filled.root, "ten_thousand")
    assert len(frame) == 5 and frame.set_index("id").status[run_id(tiny(seed=2))] == "damaged"

"""Checkpoints that are damaged, cut or of other options never make a wrong row, and never block a
retry.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from commsweep import checkpoint
from commsweep.config import Execution, run_id
from commsweep.errors import UserError
from commsweep.store import Store
from commsweep.training.run import execute
from tests.helpers import linked, tiny

EVERY = Execution("cpu", checkpoint_every=0)
TOPK = {"kind": "topk", "ratio": 0.3}


def interrupted(run, store, how=EVERY, after=2):
    """The folder of a run that was stopped after so many epochs."""
    turns = itertools.count(1)
    with pytest.raises(KeyboardInterrupt):
        execute(run, store, how, lambda: next(turns) == after)
    return store.folder(run_id(run)).path


def run_of(epochs=4):
    return linked(TOPK, TOPK, {"kind": "aqsgd"}, {"kind": "ef"}, epochs=epochs, eval_every=1)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return execute(run_of(), Store(tmp_path_factory.mktemp("straight")), EVERY)["metrics"]


def flip(path, at=None):
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content) // 2 + 64) if at is None else [at]:
        content[place] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "both", "all but the name"])
def test_a_damaged_checkpoint_is_named_and_an_older_one_used(damage, store, straight, capfd):
    folder = interrupted(run_of(), store)
    newest, older = (path for _, path in checkpoint.saved(folder, "last"))
    if damage == "cut":
        newest.write_bytes(newest.read_bytes()[:-100])
    elif damage in ("empty", "all but the name"):
        newest.write_bytes(b"" if damage == "empty" else b"hello")
    else:
        flip(newest)
    if damage == "both":
        flip(older)
    row = execute(run_of(), store, EVERY)
    assert row["status"] == "finished" and row["metrics"] == straight
    assert f"checkpoint '{newest.name}' (or what goes with it) is damaged" in capfd.readouterr().err
    assert not list(folder.glob("*.ckpt"))


def test_a_cut_copy_of_a_memory_is_noticed(store, straight, capfd):
    how = Execution("cpu", checkpoint_every=0, buffers="mmap")
    folder = interrupted(run_of(), store, how)
    step = checkpoint.saved(folder, "last")[0][0]
    copy = next(folder.glob(f"*.buffer.{step}.*"))
    copy.write_bytes(copy.read_bytes()[:100])
    assert execute(run_of(), store, how)["metrics"] == straight
    assert "is damaged" in capfd.readouterr().err


def test_a_checkpoint_is_written_beside_its_place(store, tmp_path, monkeypatch):
    """Nothing goes through the system's temporary folder, where a kill would leave it."""
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr("tempfile.tempdir", None)
    seen = []
    replace = checkpoint.os.replace
    monkeypatch.setattr(checkpoint.os, "replace", lambda a, b: (seen.append((a, b)), replace(a, b)))
    folder = interrupted(run_of(), store)
    assert all(a.parent == b.parent for a, b in seen if str(b).endswith(".ckpt")) and not list(
        elsewhere.iterdir()
    )
    assert len(checkpoint.saved(folder, "last")) == 2


@pytest.mark.parametrize(("before", "after"), [("memory", "mmap"), ("mmap", "memory")])
def test_buffers_cannot_move_between_interruption_and_continuation(before, after, store):
    interrupted(run_of(), store, Execution("cpu", checkpoint_every=0, buffers=before))
    with pytest.raises(
        UserError, match=f"--buffers {after}.*was interrupted with --buffers {before}"
    ):
        execute(run_of(), store, Execution("cpu", buffers=after))
    assert execute(run_of(), store, Execution("cpu", buffers=before))["status"] == "finished"


@pytest.mark.slow
def test_accordions_memory_is_in_the_checkpoint_as_of_the_epochs_end(tmp_path):
    run = tiny(
        epochs=5,
        eval_every=1,
        grad__learners=2,
        grad__compressor__kind="powersgd",
        grad__feedback__kind="ef",
        grad__compressor__rank=1,
        grad__schedule__kind="accordion",
        grad__schedule__every=1,
        grad__schedule__eta=0.2,
        grad__schedule__mild=3,
    )
    straight = execute(run, Store(tmp_path / "a"), EVERY)
    for after in (1, 2, 3):
        store = Store(tmp_path / f"b{after}")
        interrupted(run, store, after=after)
        resumed = execute(run, store, EVERY)
        assert (
            resumed["metrics"] == straight["metrics"]
            and resumed["gradients"] == straight["gradients"]
        )


def test_the_names_promise_the_bytes(tmp_path):
    path = checkpoint.save({"x": torch.arange(1000)}, tmp_path, "last", 7)
    assert checkpoint.is_whole(path) and torch.load(path, weights_only=True)["x"].sum() == 499500
    flip(path, 1500)
    assert not checkpoint.is_whole(path) and not checkpoint.is_whole(tmp_path / "none.ckpt")


def test_a_checkpoint_of_an_earlier_version_is_named_and_the_run_begins_anew(
    store, straight, capfd
):
    """Rows of earlier versions are read; what their interrupted runs kept is not what this one
    continues from.
    """
    folder = interrupted(run_of(), store)
    for step, path in checkpoint.saved(folder, "last"):
        state = torch.load(path, weights_only=True)
        del state["crossings"]
        path.unlink()
        checkpoint.save(state, folder, "last", step)
    row = execute(run_of(), store, EVERY)
    assert row["status"] == "finished" and row["metrics"] == straight
    assert "is of an earlier commsweep: beginning anew" in capfd.readouterr().err

"""One run, whole: laws 1 and 6, outcomes, resume bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from commsweep.config import Execution, record, run_id
from commsweep.errors import UserError
from commsweep.store import METRICS, POINTS, Busy
from commsweep.training import run as running
from commsweep.training import tasks
from commsweep.training.run import execute
from tests.helpers import FEEDBACKS, linked, name, tiny

NOW = Execution("cpu", checkpoint_every=0)
TOPK = {"kind": "topk", "ratio": 0.1}


class Stop(Exception):
    """The moment a run is cut off."""


def weights(monkeypatch):
    """Collects the final weights and memories of each run executed."""
    kept = []
    original = running._outcome

    def spy(run, parts, *rest):
        made = original(run, parts, *rest)
        state = parts.task.state_dict()
        kept.append({key: value.clone() for key, value in state.items() if torch.is_tensor(value)})
        return made

    monkeypatch.setattr(running, "_outcome", spy)
    return kept


def numbers(row):
    return {key: value for key, value in row.items() if key not in ("seconds", "speed", "when")}


def test_a_row_says_what_ran(store):
    run = linked(TOPK, {"kind": "uniform", "bits": 4, "scale": "sample"}, {"kind": "ef21"})
    row = execute(run, store, NOW)
    assert row["status"] == "finished"
    assert row["run"] == record(run)
    assert row["id"] == run_id(run)
    folder = store.folder(row["id"])
    assert {p.name for p in folder.path.iterdir()} == {
        "run.json",
        "env.json",
        "inputs.json",
        "metrics.jsonl",
        "log.txt",
        "done.json",
        "lock",
    }
    assert [e["epoch"] for e in folder.metrics()] == [1, 2]
    assert set(row["boundaries"]) == {"layer1", "layer2", "layer3"}
    assert row["steps"] == 8 == row["boundaries"]["layer1"]["calls"]
    for mode in ("on", "off"):
        assert 0 <= row["metrics"][f"test_{mode}_acc"] <= 1
        assert (
            row["metrics"][f"best_test.test_{mode}_acc"]
            >= row["metrics"][f"best_val.test_{mode}_acc"]
        )
    env = json.loads((folder.path / "env.json").read_text())
    assert env["versions"]["torch"] == torch.__version__.split("+")[0]


def test_a_finished_run_is_not_repeated(store):
    first = execute(tiny(), store, NOW)
    assert execute(tiny(), store, NOW) == first


def test_the_same_run_twice_gives_the_same_numbers(tmp_path):
    from commsweep.store import Store

    rows = [
        execute(linked(TOPK, TOPK, data__augment="shift"), Store(tmp_path / name), NOW)
        for name in "ab"
    ]
    assert numbers(rows[0]) == numbers(rows[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("feedback", [{"kind": "none"}, *FEEDBACKS], ids=name)
@pytest.mark.parametrize("buffers", ["memory", "mmap"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    feedback, buffers, tmp_path, monkeypatch
):
    from commsweep.store import Store

    if buffers == "mmap" and feedback.get("key") != "sample" and feedback["kind"] != "aqsgd":
        pytest.skip("only sample-keyed memories lie in files")
    spec = TOPK if feedback["kind"] != "none" else {"kind": "randomk", "ratio": 0.3}
    run = linked(
        spec,
        {"kind": "topk_strict", "ratio": 0.2},
        feedback,
        None,
        epochs=4,
        eval_every=2,
        schedule__t_max=4,
        data__augment="shift",
    )
    how = Execution("cpu", buffers=buffers, checkpoint_every=0, points=7)
    kept = weights(monkeypatch)
    whole = execute(run, Store(tmp_path / "whole"), how)

    cut = Store(tmp_path / "cut")
    original = tasks.ImageClassification.on_train_batch_end

    def stop(self, *args):
        original(self, *args)
        if self.global_step == 11:  # in the middle of the third epoch
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tasks.ImageClassification, "on_train_batch_end", stop)
        with pytest.raises(KeyboardInterrupt):
            execute(run, cut, how)
    assert cut.status(run_id(run)) == "interrupted"
    assert list(cut.folder(run_id(run)).path.glob("last.*.ckpt"))
    resumed = execute(run, cut, how)
    assert numbers(resumed) == numbers(whole)
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(kept[0][key], kept[1][key]) for key in kept[0])
    for file in (METRICS, POINTS):
        a, b = (
            [record | {"seconds": 0.0} for record in s.folder(run_id(run)).metrics(file)]
            for s in (Store(tmp_path / "whole"), cut)
        )
        assert a == b and len(a) == (7 if file == POINTS else 2)
    assert not list(cut.folder(run_id(run)).path.glob("*.buffer"))


def test_divergence_is_a_recorded_outcome(store):
    row = execute(tiny(optim__lr=1e30), store, NOW)
    assert row["status"] == "diverged"
    assert "non-finite" in row["error"] and "epoch 1" in row["error"]
    assert row["metrics"] == {}
    assert store.status(row["id"]) == "diverged"


def test_divergence_names_the_boundary_that_saw_it(store, monkeypatch):
    original = running.models.build

    def poisoned(*args):
        model, modules = original(*args)
        model.layer2[0].bn2.weight.data.fill_(float("nan"))
        return model, modules

    monkeypatch.setattr(running.models, "build", poisoned)
    row = execute(linked(TOPK, TOPK), store, NOW)
    assert row["status"] == "diverged"
    assert "non-finite activation at boundary layer2" in row["error"]


def test_a_fault_is_recorded_with_its_first_line_and_traceback(store, monkeypatch):
    def broken(self, *args):
        raise ValueError("the first line\nthe second")

    monkeypatch.setattr(tasks.ImageClassification, "training_step", broken)
    row = execute(tiny(), store, NOW)
    assert (row["status"], row["error"]) == ("failed", "ValueError: the first line")
    assert "Traceback" in (store.folder(row["id"]).path / "log.txt").read_text()


@pytest.mark.parametrize(
    "path,value",
    [
        ("boundaries.layer1.fwd.start_epoch", 7),
        ("data.train.batch_size", 16),
        ("data.train.augment", "shift"),
    ],
)
def test_a_lost_setting_fails_the_run(path, value, store, monkeypatch):
    original = running.build

    def losing(*args):
        parts = original(*args)
        *names, leaf = path.split(".")
        node = parts.task.components if names[0] == "boundaries" else parts
        for part in names:
            node = getattr(node, part) if hasattr(node, part) else node[part]
        setattr(node, leaf, value)
        return parts

    monkeypatch.setattr(running, "build", losing)
    row = execute(tiny(model__cuts=["layer1"]), store, NOW)
    assert row["status"] == "failed"
    assert "settings lost" in row["error"] and leaf_name(path) in row["error"]


def leaf_name(path):
    return path.rsplit(".", 1)[1]


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError("host"),
        torch.OutOfMemoryError("device"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=repr,
)
def test_lack_of_memory_is_an_outcome_of_its_own_and_keeps_the_checkpoint(
    fault, store, monkeypatch
):
    original = tasks.ImageClassification.training_step

    def starved(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise fault
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.ImageClassification, "training_step", starved)
        row = execute(tiny(), store, NOW)
    assert row["status"] == "oom" and row["metrics"] == {}
    folder = store.folder(row["id"])
    assert list(folder.path.glob("last.*.ckpt"))
    folder.set_aside()
    assert execute(tiny(), store, NOW)["status"] == "finished"


def test_a_run_asked_to_stop_saves_a_checkpoint_first(store):
    with pytest.raises(KeyboardInterrupt):
        execute(tiny(), store, Execution("cpu", checkpoint_every=float("inf")), lambda: True)
    name = run_id(tiny())
    assert store.status(name) == "interrupted" and list(store.folder(name).path.glob("last.*.ckpt"))
    assert [e["epoch"] for e in store.folder(name).metrics()] == [1]


def test_a_boundary_called_twice_a_step_fails_the_run(store, monkeypatch):
    original = tasks.ImageClassification.logits

    def twice(self, x):
        original(self, x)
        return original(self, x)

    monkeypatch.setattr(tasks.ImageClassification, "logits", twice)
    row = execute(linked(TOPK, TOPK), store, NOW)
    assert row["status"] == "failed" and "2 fwd calls in 1 training steps" in row["error"]


def test_a_run_executed_elsewhere_is_busy(store):
    run = tiny()
    with store.folder(run_id(run)).locked(), pytest.raises(Busy):
        execute(run, store, NOW)


def test_feedback_memory_size_is_printed_before_training(store, capsys):
    execute(linked(TOPK, TOPK, {"kind": "aqsgd"}, {"kind": "ef"}), store, NOW)
    assert (
        "feedback memories: 0.1 MiB by slot, 0.2 MiB by sample (memory)" in capsys.readouterr().err
    )


def test_mixed_precision_and_channels_last_run(store):
    row = execute(
        linked(
            TOPK,
            {"kind": "uniform", "bits": 4},
            {"kind": "ef"},
            None,
            precision="bfloat16",
            channels_last=True,
        ),
        store,
        NOW,
    )
    assert row["status"] == "finished"
    assert row["run"]["precision"] == "bfloat16" and row["run"]["channels_last"]


def test_an_absent_device_is_one_clear_line(store):
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device"):
            execute(tiny(), store, Execution("cuda"))
    with pytest.raises(UserError, match="not a device"):
        execute(tiny(), store, Execution("gpu0"))


def test_training_learns(store):
    """Ten noisy patterns are learnt from pixels, dense and compressed alike."""
    for run in (
        tiny(epochs=8, schedule__t_max=8, eval_every=8),
        linked(
            {"kind": "topk", "ratio": 0.3},
            {"kind": "topk", "ratio": 0.3},
            epochs=8,
            schedule__t_max=8,
            eval_every=8,
        ),
    ):
        assert execute(run, store, NOW)["metrics"]["test_on_acc"] > 0.9

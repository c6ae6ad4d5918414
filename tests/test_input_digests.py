"""A recorded outcome is of the data it was trained on: shown, continued and reported with no
other.
"""

from __future__ import annotations

import json

import pytest

from commsweep.cli.main import main
from commsweep.config import Execution, override, run_id
from commsweep.errors import UserError
from commsweep.launching.launch import register
from commsweep.reporting import results
from commsweep.store import Store
from commsweep.training.run import execute
from tests.helpers import outcome, tiny, tiny_text

SMALL = {
    "data.name": "text",
    "data.train_blocks": 16,
    "data.eval_blocks": 4,
    "data.block_size": 16,
    "model.width": 16,
    "model.stages": 2,
}


@pytest.fixture
def roots(tmp_path):
    for name, word in (
        ("a", "the stage sends a packed tensor to its peer "),
        ("b", "another text of other words "),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "all.txt").write_text(word * 300)
    return tmp_path / "a", tmp_path / "b"


def text(**changes):
    return override(tiny_text(), SMALL | changes)


def test_an_outcome_of_one_text_is_not_shown_for_another(roots, store, capsys):
    a, b = roots
    row = execute(text(), store, Execution("cpu", data_root=a))
    assert row["inputs"].keys() == {"data"}
    assert execute(text(), store, Execution("cpu", data_root=a)) == row
    with pytest.raises(
        UserError, match=r"was recorded with other data \(digest \w+\) than --data-root '.*b' holds"
    ):
        execute(text(), store, Execution("cpu", data_root=b))
    settings = [f"{key}={value}" for key, value in SMALL.items()]
    command = ["run", "synthetic_text", *settings, "--store", str(store.root), "--data-root"]
    assert main([*command, str(b)]) == 2 and "other data" in capsys.readouterr().err
    assert main([*command, str(a)]) == 0 and "recorded earlier" in capsys.readouterr().out
    # the same name, and something else in it
    (a / "all.txt").write_text((b / "all.txt").read_text())
    assert main([*command, str(a)]) == 2


def test_a_run_is_not_continued_with_another_text(roots, store):
    a, b = roots
    asked = []
    with pytest.raises(KeyboardInterrupt):
        execute(
            text(epochs=2),
            store,
            Execution("cpu", data_root=a, checkpoint_every=0),
            stopping=lambda: asked.append(1) is None,
        )
    with pytest.raises(UserError, match="was begun with other data"):
        execute(text(epochs=2), store, Execution("cpu", data_root=b))
    assert execute(text(epochs=2), store, Execution("cpu", data_root=a))["status"] == "finished"


def test_a_loader_of_ones_own_is_asked_again(tmp_path, store, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def load(root):\n"
        "    x = np.load('x.npy')\n"
        "    y = (x[:, 0] > 0).astype(int)\n"
        "    return x[:60], y[:60], x[60:], y[60:]\n"
    )
    import numpy as np

    run = override(
        tiny(model__name="mlp", model__cuts=[]),
        {
            "data.name": "own",
            "data.load": "mine.py:load",
            "data.val_size": 10,
            "data.batch_size": 10,
        },
    )
    np.save("x.npy", np.random.default_rng(0).standard_normal((90, 4)))
    first = execute(run, store, Execution("cpu"))
    assert execute(run, store, Execution("cpu")) == first
    np.save("x.npy", np.random.default_rng(1).standard_normal((90, 4)))
    with pytest.raises(UserError, match="was recorded with other data"):
        execute(run, store, Execution("cpu"))


def test_seeds_of_different_data_are_not_pooled(store):
    runs = [tiny(seed=seed) for seed in range(3)]
    for run, digest in zip(runs, ("aa", "aa", "bb"), strict=True):
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        folder.finish(outcome(run, metrics={"test_on_acc": 0.5}, inputs={"data": digest}))
    register("mixed", runs, store)
    with pytest.raises(UserError, match="were trained on different data"):
        results.load(store.root, "mixed")
    register("alike", runs[:2], store)
    assert len(results.load(store.root, "alike")) == 2


def test_a_launch_does_not_mix_data(roots, store, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grid.py").write_text(
        "from commsweep.config import override\n"
        "from commsweep.registry import preset\n"
        "def runs():\n"
        f"    return [override(preset('synthetic_text'), {json.dumps(SMALL)} | {{'seed': s}})"
        " for s in (0, 1)]\n"
    )
    a, b = roots
    execute(text(), store, Execution("cpu", data_root=a))
    assert (
        main(["sweep", "launch", "grid.py:runs", "--store", str(store.root), "--data-root", str(b)])
        == 2
    )
    assert "was recorded with other data" in capsys.readouterr().err
    assert Store(store.root).status(run_id(text(seed=1))) == "missing"

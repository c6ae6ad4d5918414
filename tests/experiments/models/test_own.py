"""Networks and data of one's own: recorded by name and hash, cut by name, refused in one line."""

from __future__ import annotations

import json

import pytest

from commsweep.experiments.config import Execution, Run, override, parse, record, run_id
from commsweep.experiments.errors import UserError
from commsweep.experiments.store import FAILED
from commsweep.experiments.training.run import build, execute
from commsweep.main import main
from tests.helpers import tiny

CODE = """
import torch
from torch import nn

def net(sample, classes, hidden=16):
    return nn.Sequential(nn.Flatten(1), nn.Linear(sample[0].numel(), hidden), nn.ReLU(), nn.Linear(hidden, classes))

class Twice(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.flat, self.same, self.head = nn.Flatten(1), nn.ReLU(), nn.Linear(64, classes)
    def forward(self, x):
        return self.head(self.same(self.same(self.flat(x))))

def twice(sample, classes):
    return Twice(classes)

def wrong(sample, classes):
    return nn.Sequential(nn.Flatten(1), nn.Linear(sample[0].numel(), classes + 1))

def nothing(sample, classes):
    return 3

def narrow(sample, classes):
    return nn.Sequential(nn.Flatten(1), nn.Linear(7, classes))

def stumbles(sample, classes):
    return {}["x"]

def load(root):
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    return x[:60], (x[:60, 0] > 0).long(), x[60:], (x[60:, 0] > 0).long()

def halves(root):
    return [1.0], [0.5], [1.0], [1]

def uneven(root):
    return [[1.0], [2.0]], [0], [[1.0]], [1]
"""
HOW = Execution("cpu")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own(**changes) -> Run:
    return override(tiny(), {"model.name": "own", "model.build": "mine.py:net", **changes})


def test_a_run_records_name_and_hash_and_is_read_back(store):
    run = own(**{"model.cuts": ["2"], "model.options": {"hidden": 8}, "fwd.compressor.kind": "topk",
                 "data.name": "own", "data.load": "mine.py:load", "data.val_size": 10, "data.batch_size": 10})
    assert len(run.model.source) == 12 and run.model.source == run.data.source
    row = execute(run, store, HOW)
    assert row["status"] == "finished", row["error"]
    assert row["run"] == record(run) and parse(row["run"]) == run
    assert set(row["boundaries"]) == {"2"} and row["boundaries"]["2"]["fwd_dense"] == 2 * 50 * 8 * 4


def test_a_changed_file_is_another_run_and_an_old_run_is_not_continued_with_it(files):
    before = own()
    (files / "mine.py").write_text(CODE + "\n# a remark\n")
    assert run_id(own()) != run_id(before)
    with pytest.raises(UserError, match="its file has changed since the run was made"):
        build(before, HOW)


def test_cuts_are_modules_that_run_once_and_return_a_tensor():
    with pytest.raises(UserError, match=r"'9' is no legal cut of own .*\(legal: 0, 1, 2\)"):
        build(own(**{"model.cuts": ["9"]}), HOW)
    with pytest.raises(UserError, match=r"'same' is no legal cut of own.*\(legal: flat\)"):
        build(own(**{"model.build": "mine.py:twice", "model.cuts": ["same"]}), HOW)


@pytest.mark.parametrize("changes, line", [
    ({"model.build": "min.py:net"}, "model.build: 'min.py:net': there is no file 'min.py'"),
    ({"model.build": "mine.py"}, "'mine.py' names no function: write module:function or file.py:function"),
    ({"model.build": "no_such_module:net"}, "there is no module 'no_such_module'"),
])
def test_names_that_lead_nowhere_are_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        own(**changes)


@pytest.mark.parametrize("changes, line", [
    ({"model.build": "mine.py:nets"}, "has no function 'nets'; did you mean 'net'"),
    ({"model.options": {"width": 3}}, "'mine.py:net' failed: TypeError: .* keyword argument 'width'"),
    ({"model.build": "mine.py:wrong"}, r"a sample gives \(1, 11\); logits of shape \(1, 10\) are wanted"),
    ({"model.build": "mine.py:nothing"}, "returned int; a torch.nn.Module is wanted"),
    ({"model.build": "mine.py:narrow"}, r"a sample of shape \(1, 1, 8, 8\) does not pass through it \(RuntimeError"),
    ({"model.build": "mine.py:stumbles"}, r"'mine.py:stumbles' failed in line \d+: KeyError: 'x'"),
    ({"data.name": "own", "data.load": "mine.py:halves"}, "training labels must be whole numbers"),
    ({"data.name": "own", "data.load": "mine.py:uneven"}, "2 training samples and 1 labels"),
])
def test_functions_that_do_not_fit_are_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        build(own(**changes), HOW)


def test_a_file_that_does_not_import_is_one_line(files, capsys):
    (files / "broken.py").write_text("import no_such_thing\n")
    assert main(["run", "synthetic", "model.name=own", "model.build=broken.py:net", "--store", "st"]) == 2
    err = capsys.readouterr().err
    assert "broken.py' could not be imported (ModuleNotFoundError: No module named 'no_such_thing')" in err
    assert err.count("\n") == 1


def test_a_fault_within_it_is_an_outcome(files, store):
    (files / "late.py").write_text(
        "from torch import nn\nclass N(nn.Linear):\n    steps = 0\n    def forward(self, x):\n"
        "        self.steps += self.training\n        if self.steps > 3:\n"
        "            raise ValueError('mine')\n        return super().forward(x.flatten(1))\n"
        "def net(sample, classes):\n    return N(sample[0].numel(), classes)\n")
    row = execute(own(**{"model.build": "late.py:net"}), store, HOW)
    assert (row["status"], row["error"]) == (FAILED, "ValueError: mine")


def test_samples_that_are_no_images_are_refused_by_a_network_for_images():
    run = override(tiny(), {"data.name": "own", "data.load": "mine.py:load", "data.val_size": 10,
                            "data.batch_size": 10})
    with pytest.raises(UserError, match=r"samples of shape \(4,\); model.name=resnet_small takes images"):
        build(run, HOW)


def test_compression_without_a_boundary_is_refused():
    with pytest.raises(UserError, match="the model has no boundary to compress at; set model.cuts"):
        build(own(**{"fwd.compressor.kind": "topk"}), HOW)


def test_a_plan_and_what_is_shown_know_own_models_and_learners(store, capsys):
    run = own(**{"model.cuts": ["2"], "grad.learners": 2, "grad.exchange": "allgather", "grad.compressor.kind": "topk"})
    row = execute(run, store, HOW)
    assert main(["sweep", "plan", "smoke", "--store", str(store.root)]) == 0
    assert main(["show", row["id"], "--store", str(store.root)]) == 0
    assert "bytes up a step and learner, a rate of" in capsys.readouterr().out


def test_grids_of_ones_own_that_are_none(files, capsys):
    (files / "grids.py").write_text("def none():\n    return []\ndef text():\n    return ['digits']\n"
                                    "def asks(x):\n    pass\n")
    assert main(["sweep", "plan", "grids.py:asks", "--store", "st"]) == 2
    assert "'grids.py:asks' failed: TypeError: asks() missing 1 required" in capsys.readouterr().err
    assert main(["sweep", "plan", "grids.py", "--store", "st"]) == 2
    assert "write grids.py:FUNCTION" in capsys.readouterr().err
    for name in ("grids.py:none", "grids.py:text"):
        assert main(["sweep", "plan", name, "--store", "st"]) == 2
        assert "must return a list of Runs" in capsys.readouterr().err
    for words, line in ((["--base", "digits", "--axis", "x"], "--axis x: write KEY=VALUE,VALUE"),
                        (["--axis", "epochs=1"], "--axis varies a preset: name it with --base"),
                        (["demo", "--base", "digits"], "'demo' is a sweep already"),
                        ([], "name a sweep (demo")):
        assert main(["sweep", "plan", *words, "--store", "st"]) == 2
        assert line in capsys.readouterr().err


def test_an_axis_of_a_parameter_opens_its_compressor_and_says_so(files, capsys):
    assert main(["sweep", "plan", "--base", "digits", "--axis", "fwd.compressor.ratio=0.1,0.05", "--seeds", "3",
                 "--store", "st", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cells"] == 6 and "fwd.compressor.kind=topk is taken" in err

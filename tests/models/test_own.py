"""Networks and data of one's own: recorded by name and hash, cut by name, refused in one line."""

from __future__ import annotations

import json

import pytest
import torch

from commsweep.cli.main import main
from commsweep.config import Execution, Run, override, record, run_id
from commsweep.config.override import parse
from commsweep.errors import UserError
from commsweep.store import FAILED
from commsweep.training.run import build, execute
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
    run = own(
        **{
            "model.cuts": ["2"],
            "model.options": {"hidden": 8},
            "fwd.compressor.kind": "topk",
            "data.name": "own",
            "data.load": "mine.py:load",
            "data.val_size": 10,
            "data.batch_size": 10,
        }
    )
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


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"model.build": "min.py:net"}, "model.build: 'min.py:net': there is no file 'min.py'"),
        (
            {"model.build": "mine.py"},
            "'mine.py' names no function: write module:function or file.py:function",
        ),
        ({"model.build": "no_such_module:net"}, "there is no module 'no_such_module'"),
    ],
)
def test_names_that_lead_nowhere_are_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        own(**changes)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"model.build": "mine.py:nets"}, "has no function 'nets'; did you mean 'net'"),
        (
            {"model.options": {"width": 3}},
            "'mine.py:net' failed: TypeError: .* keyword argument 'width'",
        ),
        (
            {"model.build": "mine.py:wrong"},
            r"a sample gives \(1, 11\); logits of shape \(1, 10\) are wanted",
        ),
        ({"model.build": "mine.py:nothing"}, "returned int; a torch.nn.Module is wanted"),
        (
            {"model.build": "mine.py:narrow"},
            r"a sample of shape \(1, 1, 8, 8\) does not pass through it \(RuntimeError",
        ),
        (
            {"model.build": "mine.py:stumbles"},
            r"'mine.py:stumbles' failed in line \d+: KeyError: 'x'",
        ),
        (
            {"data.name": "own", "data.load": "mine.py:halves"},
            "training labels must be whole numbers",
        ),
        ({"data.name": "own", "data.load": "mine.py:uneven"}, "2 training samples and 1 labels"),
    ],
)
def test_functions_that_do_not_fit_are_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        build(own(**changes), HOW)


def test_a_file_that_does_not_import_is_one_line(files, capsys):
    (files / "broken.py").write_text("import no_such_thing\n")
    assert (
        main(["run", "synthetic", "model.name=own", "model.build=broken.py:net", "--store", "st"])
        == 2
    )
    err = capsys.readouterr().err
    assert (
        "broken.py' could not be imported (ModuleNotFoundError: No module named 'no_such_thing')"
        in err
    )
    assert err.count("\n") == 1


def test_a_fault_within_it_is_an_outcome(files, store):
    (files / "late.py").write_text(
        "from torch import nn\nclass N(nn.Linear):\n    steps = 0\n    def forward(self, x):\n"
        "        self.steps += self.training\n        if self.steps > 3:\n"
        "            raise ValueError('mine')\n        return super().forward(x.flatten(1))\n"
        "def net(sample, classes):\n    return N(sample[0].numel(), classes)\n"
    )
    row = execute(own(**{"model.build": "late.py:net"}), store, HOW)
    assert (row["status"], row["error"]) == (FAILED, "ValueError: mine")


def test_samples_that_are_no_images_are_refused_by_a_network_for_images():
    run = override(
        tiny(),
        {
            "data.name": "own",
            "data.load": "mine.py:load",
            "data.val_size": 10,
            "data.batch_size": 10,
        },
    )
    with pytest.raises(
        UserError, match=r"samples of shape \(4,\); model.name=resnet_small takes images"
    ):
        build(run, HOW)


def test_compression_without_a_boundary_is_refused():
    with pytest.raises(UserError, match="the model has no boundary to compress at; set model.cuts"):
        build(own(**{"fwd.compressor.kind": "topk"}), HOW)


def test_a_plan_and_what_is_shown_know_own_models_and_learners(store, capsys):
    run = own(
        **{
            "model.cuts": ["2"],
            "grad.learners": 2,
            "grad.exchange": "allgather",
            "grad.compressor.kind": "topk",
        }
    )
    row = execute(run, store, HOW)
    assert main(["sweep", "plan", "smoke", "--store", str(store.root)]) == 0
    assert main(["show", row["id"], "--store", str(store.root)]) == 0
    assert "bytes up a step and learner, a rate of" in capsys.readouterr().out


def test_grids_of_ones_own_that_are_none(files, capsys):
    (files / "grids.py").write_text(
        "def none():\n    return []\ndef text():\n    return ['digits']\ndef asks(x):\n    pass\n"
    )
    assert main(["sweep", "plan", "grids.py:asks", "--store", "st"]) == 2
    assert "'grids.py:asks' failed: TypeError: asks() missing 1 required" in capsys.readouterr().err
    assert main(["sweep", "plan", "grids.py", "--store", "st"]) == 2
    assert "write grids.py:FUNCTION" in capsys.readouterr().err
    for name in ("grids.py:none", "grids.py:text"):
        assert main(["sweep", "plan", name, "--store", "st"]) == 2
        assert "must return a list of Runs" in capsys.readouterr().err
    for words, line in (
        (["--base", "digits", "--axis", "x"], "--axis x: write KEY=VALUE,VALUE"),
        (["--axis", "epochs=1"], "--axis varies a preset: name it with --base"),
        (["demo", "--base", "digits"], "'demo' is a sweep already"),
        ([], "name a sweep (all of them: commsweep sweep list)"),
    ):
        assert main(["sweep", "plan", *words, "--store", "st"]) == 2
        assert line in capsys.readouterr().err


def test_an_axis_of_a_parameter_opens_its_compressor_and_says_so(files, capsys):
    assert (
        main(
            [
                "sweep",
                "plan",
                "--base",
                "digits",
                "--axis",
                "fwd.compressor.ratio=0.1,0.05",
                "--seeds",
                "3",
                "--store",
                "st",
                "--json",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert json.loads(out)["cells"] == 6 and "fwd.compressor.kind=topk is taken" in err


GOOD_X, GOOD_Y = "np.ones((90, 4))", "np.arange(90) % 2"
# what a loader returns for training samples and labels, and what is said of it; None: it is taken
# as it is
DATA = {
    "ragged": ("[[1.0], [1.0, 2.0]]", "[0, 1]", "samples are lists of different lengths"),
    "strings": ("[['a'], ['b']]", "[0, 1]", "samples are of type <U1; numbers are wanted"),
    "string labels": (GOOD_X, "['cat'] * 90", "labels are of type <U3; numbers are wanted"),
    "objects": ("np.array([{}, None], dtype=object)", "[0, 1]", "samples are of type object"),
    "sparse": (
        "torch.eye(90).to_sparse()",
        GOOD_Y,
        r"samples are a sparse tensor; call to_dense\(\)",
    ),
    "complex": ("np.ones((90, 4)) * 1j", GOOD_Y, "real and imaginary parts as two features"),
    "complex tensor": ("torch.ones(90, 4) * 1j", GOOD_Y, "samples are complex"),
    "one number": ("3.0", "[0]", "samples are one number"),
    "huge labels": (GOOD_X, "np.full(90, 2**63, np.uint64)", "which no 64-bit integer holds"),
    "one-hot": (
        GOOD_X,
        "np.eye(2)[np.arange(90) % 2].astype(int)",
        r"labels have the shape \(90, 2\).*argmax",
    ),
    "negative": (GOOD_X, "np.arange(90) - 1", "the least is -1"),
    "not finite": (
        "np.where(np.arange(360).reshape(90, 4) == 40, np.nan, 1)",
        GOOD_Y,
        "the first of them is sample 1",
    ),
    "a column": (GOOD_X, "(np.arange(90) % 2)[:, None]", None),
    "unsigned": ("np.ones((90, 4), np.uint16)", "(np.arange(90) % 2).astype(np.uint64)", None),
    "big-endian": ("np.ones((90, 4), '>f8')", "(np.arange(90) % 2).astype('>i4')", None),
    "flags": ("np.ones((90, 4), bool)", "np.arange(90) % 2 > 0", None),
    "with gradients": ("torch.ones(90, 4, requires_grad=True)", GOOD_Y, None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", DATA)
def test_what_a_loader_may_return(what, files):
    x, y, line = DATA[what]
    name = f"data_{list(DATA).index(what)}.py"
    (files / name).write_text(
        f"import numpy as np\nimport torch\ndef load(root):\n    x, y = {x}, {y}\n"
        "    return x, y, x, y\n"
    )
    run = override(
        tiny(model__name="mlp", model__cuts=[]),
        {
            "data.name": "own",
            "data.load": f"{name}:load",
            "data.val_size": 10,
            "data.batch_size": 10,
        },
    )
    if line is None:
        data = build(run, HOW).data
        assert (
            data.images.classes == 2
            and data.train.y.dtype == torch.int64
            and not data.train.x.requires_grad
        )
        return
    with pytest.raises(UserError, match=f"data.load={name}:load: training .*{line}"):
        build(run, HOW)


def test_training_and_test_samples_have_one_shape(files):
    (files / "shapes.py").write_text(
        "import numpy as np\ndef load(root):\n    y = np.arange(60) % 2\n"
        "    return np.ones((60, 4)), y, np.ones((60, 5)), y\n"
    )
    with pytest.raises(
        UserError, match=r"training samples of shape \(4,\) and test samples of shape \(5,\)"
    ):
        build(
            override(
                tiny(model__name="mlp", model__cuts=[]),
                {
                    "data.name": "own",
                    "data.load": "shapes.py:load",
                    "data.val_size": 10,
                    "data.batch_size": 10,
                },
            ),
            HOW,
        )


ENDS = {
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "posix._exit": "import posix\nposix._exit(0)",
    "no text": "class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E()",
    "beyond exceptions": "class E(BaseException):\n    pass\nraise E('mine')",
    "long": "raise ValueError('x' * 5000)",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["import", "grid", "model", "forward", "training"])
@pytest.mark.parametrize("what", ENDS)
def test_own_code_that_ends_or_raises_anything_is_one_line_and_not_a_success(
    what, where, files, store, capsys
):
    name = f"end_{list(ENDS).index(what)}_{where}.py"
    ends = ENDS[what].replace("\n", "\n            ")
    body = {
        "import": f"if True:\n            {ends}\n",
        "grid": f"def f(*a):\n            {ends}\n",
        "model": f"def f(*a):\n            {ends}\n",
        "forward": (
            "from torch import nn\n"
            "class N(nn.Linear):\n"
            "    def forward(self, x):\n"
            "        if True:\n"
            f"            {ends}\n"
            "def f(s, c):\n"
            "    return N(64, c)\n"
        ),
        "training": (
            "from torch import nn\n"
            "class N(nn.Linear):\n"
            "    n = 0\n"
            "    def forward(self, x):\n"
            "        self.n += self.training\n"
            "        if self.n > 3:\n"
            f"            {ends}\n"
            "        return super().forward(x.flatten(1))\n"
            "def f(s, c):\n"
            "    return N(64, c)\n"
        ),
    }[where]
    (files / name).write_text(body)
    if where in ("import", "grid"):
        command = ["sweep", "plan", f"{name}:f", "--store", str(store.root)]
    else:
        command = [
            "run",
            "synthetic",
            "model.name=own",
            f"model.build={name}:f",
            "--store",
            str(store.root),
        ]
    assert main(command) == (1 if where == "training" else 2)
    out, err = capsys.readouterr()
    said = (out if where == "training" else err).strip().splitlines()
    assert (
        "Traceback" not in err
        and max(map(len, said)) < 600
        and (where == "training" or len(said) == 1)
    )
    if where == "training":
        (row,) = store.rows()
        assert row["status"] == FAILED and row["error"]


def test_what_own_code_prints_is_no_part_of_json(files, store, capsys):
    (files / "loud.py").write_text(
        "from commsweep.registry import preset\nprint('hello')\n"
        "def grid():\n    print('from the grid')\n    return [preset('synthetic')]\n"
    )
    assert main(["sweep", "plan", "loud.py:grid", "--json", "--store", str(store.root)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cells"] == 1 and "hello" in err and "from the grid" in err


def test_changed_modules_that_a_file_imports_are_another_run(files, store):
    (files / "parts").mkdir()
    (files / "parts" / "__init__.py").write_text("")
    (files / "parts" / "layers.py").write_text(
        "from .size import WIDTH\nfrom torch import nn\n"
        "def hidden():\n    return nn.Linear(64, WIDTH)\n"
    )
    (files / "parts" / "size.py").write_text("WIDTH = 8\n")
    (files / "net2.py").write_text(
        "from torch import nn\nfrom parts import layers\nimport numpy\n"
        "def net(s, c):\n    hidden = layers.hidden()\n    return nn.Sequential("
        "nn.Flatten(1), hidden, nn.ReLU(), nn.Linear(hidden.out_features, c))\n"
    )
    before = own(**{"model.build": "net2.py:net"})
    assert execute(before, store, HOW)["status"] == "finished"
    (files / "parts" / "size.py").write_text("WIDTH = 12\n")
    after = own(**{"model.build": "net2.py:net"})
    assert run_id(after) != run_id(before)
    with pytest.raises(
        UserError, match=r"module that it imports \(net2.py, __init__.py, layers.py, size.py\)"
    ):
        build(before, HOW)
    assert build(after, HOW).task.model[1].out_features == 12  # and not what was imported before


def test_code_and_settings_that_a_file_reads_by_other_means_are_a_part_of_it(files, capsys):
    """By importlib, from a folder put on the path, by the file's place, and as JSON."""
    (files / "lib").mkdir()
    (files / "lib" / "wide.py").write_text("WIDTH = 8\n")
    (files / "late.py").write_text("BIAS = True\n")
    (files / "placed.py").write_text("ACT = 'ReLU'\n")
    (files / "sizes.json").write_text('{"more": 0}')
    (files / "part_1.txt").write_text("0")
    (files / "net3.py").write_text(
        "import importlib, importlib.util, json, sys\nfrom pathlib import Path\n"
        "from torch import nn\nHERE = Path(__file__).parent\n"
        "sys.path.insert(0, str(HERE / 'lib'))\nimport wide\n"
        "def net(s, c):\n"
        "    late = importlib.import_module('late')\n"
        "    spec = importlib.util.spec_from_file_location('placed', HERE / 'placed.py')\n"
        "    placed = importlib.util.module_from_spec(spec)\n    spec.loader.exec_module(placed)\n"
        "    width = wide.WIDTH + json.loads((HERE / 'sizes.json').read_text())['more']\n"
        "    width += int((HERE / f'part_{1}.txt').read_text())\n"
        "    return nn.Sequential(nn.Flatten(1), nn.Linear(64, width, bias=late.BIAS),"
        " getattr(nn, placed.ACT)(), nn.Linear(width, c))\n"
    )
    ids = set()
    for changed, text in (
        ("sizes.json", '{"more": 1}'),
        ("lib/wide.py", "WIDTH = 9\n"),
        ("late.py", "BIAS = False\n"),
        ("placed.py", "ACT = 'GELU'\n"),
    ):
        run = own(**{"model.build": "net3.py:net"})
        build(run, HOW)
        ids.add(run_id(run))
        (files / changed).write_text(text)
    run = own(**{"model.build": "net3.py:net"})
    assert len({*ids, run_id(run)}) == 5
    model = build(run, HOW).task.model
    assert model[1].out_features == 10 and model[1].bias is None
    said = capsys.readouterr().err
    assert "read 'part_1.txt', which is no part" in said and "sizes.json" not in said


def test_a_model_without_anything_to_train_is_refused(files):
    (files / "frozen.py").write_text(
        "from torch import nn\ndef net(s, c):\n    return nn.Sequential(nn.Flatten(1), "
        "nn.Linear(64, c)).requires_grad_(False)\n"
    )
    with pytest.raises(UserError, match="no parameter of the model is to be trained"):
        build(own(**{"model.build": "frozen.py:net"}), HOW)


def test_a_trial_of_the_model_leaves_it_as_it_was(files):
    (files / "norm.py").write_text(
        "from torch import nn\ndef net(s, c):\n    return nn.Sequential(nn.BatchNorm2d(1), "
        "nn.Flatten(1), nn.Dropout(0.5), nn.Linear(64, c))\n"
    )
    model = build(own(**{"model.build": "norm.py:net"}), HOW).task.model
    assert int(model[0].num_batches_tracked) == 0 and float(model[0].running_mean.abs().max()) == 0
    assert all(p.grad is None for p in model.parameters())


def test_an_axis_over_seeds_and_settings_of_a_base(files, capsys):
    plan = [
        "sweep",
        "plan",
        "--base",
        "digits",
        "optim.lr=0.02",
        "--axis",
        "seed=3,4,5",
        "--store",
        "st",
        "--json",
    ]
    assert main(plan) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == 3
    assert (
        main([*plan, "--seeds", "2"]) == 2
        and "the axis names the seeds already" in capsys.readouterr().err
    )
    assert main(["sweep", "plan", "smoke", "optim.lr=1", "--store", "st"]) == 2
    assert "'optim.lr=1' changes a preset: name it with --base" in capsys.readouterr().err
    plan = ["sweep", "plan", "--base", "digits_topk", "--store", "st"]
    assert main([*plan, "--axis", "optim.lr=0.1,0.02", "--cells"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len({line.partition("seed")[2] for line in lines}) == 2
    assert main([*plan, "--axis", "epochs=1,3"]) == 0
    assert "eval_every=1 is taken for epochs=1" in capsys.readouterr().err


def test_claims_of_ones_own_are_judged_and_a_papers_are_not(files, store, capsys):
    from commsweep.launching.launch import register
    from tests.helpers import outcome, scatter

    base = override(
        tiny(model__name="mlp", model__cuts=["layer1"]),
        {
            "data.name": "own",
            "data.load": "mine.py:load",
            "data.val_size": 10,
            "data.batch_size": 10,
        },
    )
    runs = [
        override(base, {"seed": seed} | changes)
        for seed in range(6)
        for changes in ({}, {"fwd.compressor.kind": "topk", "bwd.compressor.kind": "topk"})
    ]
    for place, run in enumerate(runs):
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        score = 0.9 - 0.3 * (place % 2) + 0.001 * place + scatter(run)
        folder.finish(outcome(run, metrics={"test_on_acc": score, "test_off_acc": score}))
    register("mine", runs, store)
    assert main(["claims", "mine", "--store", str(store.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    (files / "claims.py").write_text(
        "from commsweep.reporting.claim import Claim, DENSE, difference\n"
        "def claims(frame):\n"
        "    topk = {'fwd.compressor.kind': 'topk', 'bwd.compressor.kind': 'topk'}\n"
        "    return [Claim('mine', 'TopK costs', difference(frame, 'dense minus TopK', (DENSE, "
        "'test_on_acc'),\n"
        "            (topk, 'test_on_acc'), above=1.0))]\n"
        "def none(frame):\n"
        "    return 3\n"
    )
    assert (
        main(
            ["claims", "mine", "--store", str(store.root), "--json", "--claims", "claims.py:claims"]
        )
        == 0
    )
    (claim,) = json.loads(capsys.readouterr().out)
    assert (
        claim["claim"],
        claim["verdict"],
        claim["effects"][0]["n" if "n" in claim["effects"][0] else "by"],
    ) == ("mine", "supported", list(range(6)))
    assert main(["claims", "mine", "--store", str(store.root), "--claims", "claims.py:none"]) == 2
    assert "must return a list of Claims" in capsys.readouterr().err


def test_presets_take_settings():
    from commsweep.registry import preset

    assert (
        preset("digits", optim__lr=0.5).optim.lr
        == preset("digits", **{"optim.lr": 0.5}).optim.lr
        == 0.5
    )
    with pytest.raises(UserError, match=r"unknown setting 'lr'; did you mean 'optim.lr'\?"):
        preset("digits", lr=0.5)

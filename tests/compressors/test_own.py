"""A compressor of a user's own, in every place where a compressor is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import commsweep as cs
from commsweep.cli.main import main
from commsweep.compressors import build, message
from commsweep.config import override, run_id
from commsweep.config.compressors.spelling import spelled
from commsweep.config.override import parse_gradients
from commsweep.errors import UserError
from commsweep.integrations.measure import measure
from commsweep.registry import preset
from tests.helpers import same_bits

TEMPLATE = Path(cs.__file__).parent / "template" / "codec.py"
WORD = "mine.py:RowSigns,k=4"
BROKEN = {
    "class A:\n def encode(self, x, seed): return {}": "it has no method 'decode'",
    "class A:\n def encode(self, x, seed): return [x]\n def decode(self, parts, like): return like": (
        "encode returned list; a dict of tensors is wanted"
    ),
    "class A:\n def encode(self, x, seed): return {'x': 3}\n def decode(self, parts, like): 0": (
        "part 'x' is int; a tensor is wanted"
    ),
    "class A:\n def encode(self, x, seed): return {'x': x}\n"
    " def decode(self, parts, like): return parts['x'].flatten()": (
        r"decode returned torch.float32 \(96,\); torch.float32 \(4, 24\), like the message"
    ),
    "class A:\n def encode(self, x, seed): self.x = x; return {}\n"
    " def decode(self, parts, like): return getattr(self, 'x', like)": (
        "decode reads what encode left in self, which does not travel"
    ),
    "import torch\nclass A:\n def encode(self, x, seed): return {'x': x + torch.randn_like(x)}\n"
    " def decode(self, parts, like): return parts['x']": (
        "one message with one seed arrived as two different ones"
    ),
    "class A:\n def encode(self, x, seed): return {'x': x.mul_(2)}\n"
    " def decode(self, parts, like): return parts['x']": "encode changes the message",
    "class A:\n def encode(self, x, seed): return {'x': x}\n def bytes(self, shape): return 3\n"
    " def decode(self, parts, like): return parts['x']": (
        r"bytes\(\(4, 24\)\) says 3, and 384 bytes travel"
    ),
    "class A:\n unbiased = True\n def encode(self, x, seed): return {'x': x / 2}\n"
    " def decode(self, parts, like): return parts['x']": "it says unbiased = True, but",
    "class A:\n def encode(self, x, seed): return {'x': x.to(complex)}\n"
    " def decode(self, parts, like): return like": (
        "part 'x' is of torch.complex128; messages hold uint8, float32"
    ),
    "class A:\n def encode(self, x, seed): 1 / 0\n def decode(self, parts, like): 0": (
        r"encode failed \(ZeroDivisionError: division by zero\)"
    ),
}


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TEMPLATE.read_text())


@pytest.mark.parametrize("code", BROKEN)
def test_a_mistake_is_one_line_before_the_run(code):
    Path("broken.py").write_text(code)
    with pytest.raises(UserError, match=f"compressor 'broken.py:A': {BROKEN[code]}"):
        build({"kind": "own", "code": "broken.py:A"})


@pytest.mark.parametrize("dtype", ["int8", "int16", "bool", "float64"])
def test_parts_of_small_and_large_types_arrive_through_bytes(dtype):
    Path("typed.py").write_text(
        "import torch\nclass A:\n"
        f" def encode(self, x, seed): return {{'x': (x * 9).to(torch.{dtype})}}\n"
        " def decode(self, parts, like): return parts['x'].to(like.dtype)\n"
    )
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    sender, receiver = (build({"kind": "own", "code": "typed.py:A"}) for _ in range(2))
    address = message.Address(b"12345678")
    packed = message.pack([sender.encode(x, 1)], address)
    y = receiver.decode(message.Reader(packed, address).take(receiver, x.shape))
    assert torch.equal(y, sender.apply(x, 1)) and y.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_example_is_what_its_formula_says(dtype):
    x = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    compressor = build({"kind": "own", "code": "mine.py:RowSigns", "options": {"k": 3}})
    wanted = torch.zeros(5, 42)
    for row, values in enumerate(x.float().view(5, 42)):
        places = values.abs().topk(3).indices
        wanted[row, places] = values[places].sign() * values[places].abs().mean()
    y = compressor.roundtrip(x)
    assert y.dtype == dtype and torch.equal(y, wanted.view(5, 6, 7).to(dtype))
    assert same_bits(y, compressor.decode(compressor.encode(x)))
    assert int(compressor.bytes_sent(y)) == 5 * (3 * 4 + 4) + 2 == compressor.encode(x).nbytes


def test_a_word_means_its_settings():
    assert spelled(WORD) == {"kind": "own", "code": "mine.py:RowSigns", "options": {"k": 4}}
    assert spelled("topk:0.1,scope=last") == {"kind": "topk", "ratio": 0.1, "scope": "last"}
    assert spelled("mxfp4") == {"kind": "mx", "format": "mxfp4"}
    assert spelled("topkk:0.1") is None
    with pytest.raises(ValueError, match="'sign:3': '3' names no setting"):
        spelled("sign:3")


def test_a_run_knows_the_file_and_the_options():
    base = preset("synthetic")
    run = override(base, {"bwd.compressor": WORD})
    assert run_id(run) == run_id(override(base, {"bwd.compressor": WORD}))
    assert run_id(run) != run_id(override(run, {"bwd.compressor.options.k": 5}))
    Path("mine.py").write_text(TEMPLATE.read_text() + "# changed\n")
    assert run_id(run) != run_id(override(base, {"bwd.compressor": WORD}))
    with pytest.raises(UserError, match="has changed since the run was made"):
        build(run.bwd.compressor)


def test_runs_sweeps_and_reports_name_it(tmp_path, capsys):
    store = ["--store", str(tmp_path / "store")]
    axes = ("compressor.code=mine.py:RowSigns", "compressor.options.k=1,4", "feedback.kind=ef")
    grid = [part for axis in axes for part in ("--axis", f"bwd.{axis}")]
    launch = ["sweep", "launch", "ks", "--base", "synthetic", *grid, "--seeds", "1"]
    assert main([*launch, "--workers", "1", *store]) == 0
    assert main(["report", "ks", *store, "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "EF + RowSigns k 1" in text and "EF + RowSigns k 4" in text


@pytest.mark.slow
def test_learners_send_it_as_in_the_simulation_and_as_processes_do(tmp_path, capsys):
    changes = ["grad.learners=2", "grad.exchange=allgather", f"grad.compressor={WORD}", "epochs=1"]
    store = ["--store", str(tmp_path / "store")]
    assert main(["run", "synthetic", *changes, *store]) == 0
    assert main(["ddp", "synthetic", *changes, *store]) == 0
    assert "the same scores, bit for bit" in capsys.readouterr().out


@pytest.mark.slow
def test_stages_send_it_as_in_the_simulation(tmp_path, capsys):
    changes = [f"fwd.compressor={WORD}", "bwd.compressor=mine.py:RowSigns,k=2", "epochs=1"]
    store = ["--store", str(tmp_path / "store")]
    assert main(["run", "synthetic", *changes, *store]) == 0
    assert main(["pipeline", "synthetic", *changes, *store]) == 0
    assert "the same scores" in capsys.readouterr().out


def test_messages_whose_size_depends_on_their_values_are_simulated_only():
    Path("varies.py").write_text(
        "class Positive:\n"
        "    def encode(self, x, seed): return {'x': x[x > 0], 'where': x > 0}\n"
        "    def decode(self, parts, like):\n"
        "        y = like.clone()\n        y[parts['where']] = parts['x']\n        return y\n"
    )
    compressor = build({"kind": "own", "code": "varies.py:Positive"})
    x = torch.arange(-3.0, 5.0).view(2, 4)
    y = compressor.roundtrip(x)
    assert torch.equal(y, x.clamp(min=0)) and compressor.bytes_sent(y) == 4 * 4 + 8
    compressor.layouts(x.shape, x.dtype)
    with pytest.raises(UserError, match="simulated"):
        compressor.encode(x + 10)


def test_other_trainings_name_it():
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    (result,) = measure(x, WORD)
    assert result.bytes == 8 * (16 + 4) + 4
    assert torch.equal(cs.compress(x, WORD), build(spelled(WORD)).roundtrip(x))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with cs.Shadow(model, [WORD, "topk:0.1"], {"*": "gradients"}, every=1) as shadow:
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
    assert {row["codec"] for row in shadow.summary()} == {WORD, "topk:0.1"}


def test_a_hook_takes_the_word():
    grad = parse_gradients({"compressor": WORD, "exchange": "allgather", "learners": 2})
    assert grad.compressor.model_dump()["options"] == {"k": 4}
    with pytest.raises(UserError, match="use grad.exchange=allgather or server"):
        parse_gradients({"compressor": WORD, "learners": 2})


def test_compress_takes_the_word(tmp_path, capsys):
    import numpy as np

    np.save("x.npy", np.random.default_rng(0).normal(size=(4, 8)).astype("float32"))
    spec = json.dumps(spelled(WORD))
    assert main(["compress", "x.npy", "y.npy", "--spec", spec]) == 0
    assert (np.load("y.npy") != 0).sum() == 4 * 4

"""A compressor of a user's own, in every place where a compressor is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import commsweep as cs
from commsweep.boundary.channel import PackedReceiver, PackedSender, SimulatedSender
from commsweep.cli.main import main
from commsweep.compressors import build, message
from commsweep.config import override, run_id
from commsweep.config.compressors.spelling import spelled
from commsweep.config.override import parse_gradients
from commsweep.errors import UserError
from commsweep.integrations.measure import measure
from commsweep.registry import preset
from tests.compressors.test_controls import Mailbox
from tests.helpers import resumed, same_bits, tiny

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
        "decode reads what encode left in self, its class or its module, which does not travel"
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
    " def decode(self, parts, like): return parts['x']": "it says unbiased = True, but its bias on",
    "class A:\n def encode(self, x, seed): return {'x': x.to(complex)}\n"
    " def decode(self, parts, like): return like": (
        "part 'x' is of torch.complex128; messages hold uint8, float32"
    ),
    "class A:\n def encode(self, x, seed): 1 / 0\n def decode(self, parts, like): 0": (
        r"encode failed \(ZeroDivisionError: division by zero\)"
    ),
}

# The difference to the mean row of the last message, rounded at random.
DELTA = """import torch
class Delta:
    def begin(self, shape): return torch.zeros(shape)
    def encode(self, x, seed, kept):
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
        return {'delta': ((x - kept) * 8 + noise).floor().clamp(-128, 127).to(torch.int8)}
    def decode(self, parts, like, kept): return (parts['delta'] / 8 + kept).to(like.dtype)
    def next_kept(self, parts, like, kept):
        return self.decode(parts, like, kept).mean(0, keepdim=True)
"""
# Signs of a running mean, which only the sender knows.
SMOOTH = """import torch
class Smooth:
    def sender_state(self, shape): return torch.zeros(shape)
    def encode(self, x, seed, state):
        state.mul_(0.5).add_(x)
        return {'signs': state > 0, 'scale': state.abs().mean()}
    def decode(self, parts, like):
        return torch.where(parts['signs'], parts['scale'], -parts['scale']).to(like.dtype)
"""
DECODES = " def decode(self, parts, like): return parts['x']"
ENCODES = "import torch, os\nclass A:\n def encode(self, x, seed): {}return {{'x': {}}}\n" + DECODES
BROKEN |= {
    # tensors that arrive through a class or a module, NaN and in place, the state of the process
    "class A:\n def encode(self, x, seed): type(self).x = x.clone(); return {}\n"
    " def decode(self, parts, like): return getattr(type(self), 'x', like)": (
        "decode reads what encode left in self, its class or its module"
    ),
    "KEPT = {}\nclass A:\n def encode(self, x, seed): KEPT[0] = x.clone(); return {}\n"
    " def decode(self, parts, like): return KEPT[0]": (
        r"decode reads what encode left in self, its class or its module.*KeyError"
    ),
    ENCODES.format("", "x * float('nan')"): "decode returned 96 of 96 values that are not finite",
    ENCODES.format("x.clamp_(-9, 9); ", "x"): "encode changes the message",
    ENCODES.format("", "x.to_sparse()"): "part 'x' is sparse or on meta",
    ENCODES.format("", "x.to('meta')"): "part 'x' is sparse or on meta",
    ENCODES.format("", "x").replace("return parts['x']", "return parts['x'].to_sparse()"): (
        "decode returned a sparse or meta one"
    ),
    ENCODES.format("", "x").replace("return parts['x']", "return like.add_(parts['x'])"): (
        "decode changes like in place"
    ),
    ENCODES.format("raise SystemExit(0); ", "x"): r"encode failed \(SystemExit: 0\)",
    ENCODES.format("os._exit(0); ", "x"): r"encode failed \(RuntimeError: os._exit\(0\)",
    ENCODES.format("torch.set_default_dtype(torch.float64); ", "x"): "it changes torch's default",
    ENCODES.format("torch.manual_seed(seed); ", "x"): "it changes torch's global random numbers",
    ENCODES.format("torch.set_grad_enabled(False); ", "x"): "it changes whether gradients",
    DELTA.replace("def next_kept", "def other").replace("Delta", "A"): (
        "begin and next_kept belong together"
    ),
    DELTA.replace("self.decode(parts, like, kept).mean(0, keepdim=True)", "kept.add_(1)").replace(
        "Delta", "A"
    ): "next_kept changes the state that it is given",
    DELTA.replace(".mean(0, keepdim=True)", "").replace("Delta", "A"): (
        r"next_kept returned \[4, 24\], and begin \[1, 24\]"
    ),
    DELTA.replace(
        "return self.decode(parts, like, kept)",
        "self.n = getattr(self, 'n', 0) + 1; return self.n + self.decode(parts, like, kept)",
    ).replace("Delta", "A"): "two receivers of one message kept different states",
    DELTA.replace("torch.zeros(shape)", "None").replace("Delta", "A"): (
        "begin returned NoneType; a tensor is wanted"
    ),
}


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TEMPLATE.read_text())
    Path("states.py").write_text(DELTA + SMOOTH)


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
    nested = {"kind": "topk", "ratio": 0.1, "values": {"kind": "uniform", "bits": 3}}
    assert spelled("topk:0.1,values.kind=uniform,values.bits=3") == nested
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
@pytest.mark.parametrize("word", [WORD, "states.py:Smooth"])
def test_learners_send_it_as_in_the_simulation_and_as_processes_do(tmp_path, capsys, word):
    changes = ["grad.learners=2", "grad.exchange=allgather", f"grad.compressor={word}", "epochs=1"]
    store = ["--store", str(tmp_path / "store")]
    assert main(["run", "synthetic", *changes, *store]) == 0
    assert main(["ddp", "synthetic", *changes, *store]) == 0
    assert "the same scores, bit for bit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("word", [WORD, "states.py:Delta"])
def test_stages_send_it_as_in_the_simulation(tmp_path, capsys, word):
    changes = [f"fwd.compressor={word}", "bwd.compressor=mine.py:RowSigns,k=2", "epochs=1"]
    store = ["--store", str(tmp_path / "store")]
    assert main(["run", "synthetic", *changes, *store]) == 0
    assert main(["pipeline", "synthetic", *changes, *store]) == 0
    assert "the same scores" in capsys.readouterr().out


def test_what_both_ends_of_a_boundary_keep_is_alike_at_both():
    delta = build({"kind": "own", "code": "states.py:Delta"})
    kept, wanted = [delta.begin(torch.Size((1, 6)), 0) for _ in range(3)], torch.zeros(1, 6)
    for number in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        noise = torch.rand(4, 6, generator=torch.Generator().manual_seed(number))
        expected = ((x - wanted) * 8 + noise).floor().clamp(-128, 127) / 8 + wanted
        wanted = expected.mean(0, keepdim=True)
        simulated = SimulatedSender(delta, number, False, True, kept[0])
        sender = PackedSender(delta, number, False, True, kept[1])
        assert torch.equal(simulated.send(x), expected) and torch.equal(sender.send(x), expected)
        assert simulated.nbytes == sender.nbytes == [x.numel()]
        receiver = PackedReceiver(delta, Mailbox(sender.payloads), False, kept[2])
        assert torch.equal(receiver.receive(x.shape), expected)
        kept = [simulated.warm, sender.warm, receiver.warm]
        assert all(torch.equal(state, wanted) for state in kept)


def test_what_a_learner_keeps_of_a_layer_changes_with_its_messages():
    smooth, state = build({"kind": "own", "code": "states.py:Smooth"}), torch.zeros(1, 6)
    wanted = torch.zeros(1, 6)
    for number in range(3):
        x = torch.randn(1, 6, generator=torch.Generator().manual_seed(number))
        wanted = wanted / 2 + x
        compressor = smooth.for_message(x, state, number)
        compressor.layouts(x.shape, x.dtype)  # asks what travels; sends nothing
        assert torch.equal(compressor.apply(x, 0).sign(), wanted.sign())
        assert torch.equal(state, wanted)


def test_a_state_of_the_other_kind_of_message_is_refused():
    with pytest.raises(UserError, match="gradients of learners need sender_state"):
        build({"kind": "own", "code": "states.py:Delta"}).sender_state(torch.Size((1, 6)))
    with pytest.raises(UserError, match="a boundary needs begin"):
        build({"kind": "own", "code": "states.py:Smooth"}).begin(torch.Size((1, 6)), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"fwd.compressor": "states.py:Delta", "bwd.compressor": "states.py:Delta"},
        {
            "grad.learners": 2,
            "grad.exchange": "allgather",
            "grad.compressor": "states.py:Smooth",
            "grad.feedback.kind": "ef",
        },
    ],
    ids=["boundary", "learners"],
)
def test_states_are_resumed(tmp_path, changes):
    run = override(tiny(), changes | {"epochs": 2})
    straight = cs.run(run, store=tmp_path / "straight")
    parted = resumed(run, tmp_path / "parted")
    assert parted["metrics"] == straight["metrics"]


def test_without_gpu_true_a_class_works_on_copies_in_host_memory():
    Path("where.py").write_text(
        "class A:\n def encode(self, x, seed):\n  self.device = x.device.type\n  return {'x': x}\n"
        " def decode(self, parts, like):\n"
        "  self.device, other = like.device.type, parts['x'].device.type\n"
        "  assert self.device == other\n  return parts['x']\n"
        "class OnGPU(A):\n gpu = True\n"
    )
    for name, device in (("A", "cpu"), ("OnGPU", "cuda")):
        compressor = build({"kind": "own", "code": f"where.py:{name}"})
        with FakeTensorMode():
            sent = compressor._encode(torch.empty(3, 4, device="cuda"), 0)
            assert sent.parts["x"].device.type == compressor._decode(sent).device.type == "cuda"
        assert compressor.sender.device == compressor.receiver.device == device


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

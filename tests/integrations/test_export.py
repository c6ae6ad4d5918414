"""Codecs as files: the same bytes and values as ours, and nothing imported but torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsweep.cli.export import exported
from commsweep.cli.main import main
from commsweep.errors import UserError
from commsweep.integrations.measure import codec

CODECS = [
    "topk:0.1",
    "topk:0.6",
    "topk:1.0",
    "uniform:4",
    "uniform:1,scale=sample",
    "uniform:3,scale=group,group=16",
    "uniform:2,scale=group,group=16,rounding=stochastic",
]


def load(text):
    names: dict = {}
    exec(compile(text, "codec.py", "exec"), names)
    return names


def ours(name, x, seed):
    payload = codec(name).encode(x, seed)
    parts = [part.contiguous().view(-1).view(torch.uint8) for part in payload.parts.values()]
    return torch.cat(parts), codec(name).decode(payload)


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=10)
@given(
    shape=st.sampled_from([(1, 1), (3, 40), (2, 5, 7), (64,), (2, 3, 4, 5)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
)
def test_it_sends_our_bytes(name, shape, dtype, seed, ties):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = (x.round() if ties else x).to(dtype)
    file = load(exported(name))
    more = (seed,) if name.startswith("uniform") else ()
    payload = file["encode"](x, *more)
    theirs, seen = ours(name, x, seed)
    assert torch.equal(payload, theirs)
    arrived = file["decode"](payload, x.shape, x.dtype)
    assert torch.equal(arrived, seen) and arrived.dtype == x.dtype
    buffer, used = file["pack"](x)
    assert used == payload.numel() and not buffer[used:].any()
    with pytest.raises(ValueError, match="bytes for a message"):
        file["decode"](payload[:-1], x.shape, x.dtype)


@pytest.mark.parametrize("name", CODECS)
def test_a_boundary_compresses_both_ways(name):
    file = load(exported(name))
    x = torch.randn(4, 30, requires_grad=True)
    y = file["Boundary"].apply(x)
    y.backward(grad := torch.randn(4, 30))
    if "stochastic" not in name:
        assert torch.equal(y, ours(name, x.detach(), 0)[1])
        assert torch.equal(x.grad, ours(name, grad, 0)[1])
    assert not torch.equal(x.grad, grad) or name == "topk:1.0"


@pytest.mark.parametrize("name", ["topk:0.1", pytest.param("uniform:4", marks=pytest.mark.slow)])
def test_a_file_needs_only_torch(name, tmp_path):
    out = tmp_path / "codec.py"
    assert main(["export", name, "--out", str(out)]) == 0
    imported = {
        one.module if isinstance(one, ast.ImportFrom) else one.names[0].name
        for one in ast.walk(ast.parse(out.read_text()))
        if isinstance(one, (ast.Import, ast.ImportFrom))
    }
    assert imported == {"torch"}
    code = "import codec, torch; print(codec.encode(torch.ones(2, 8)).numel())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert int(done.stdout) > 0, done.stderr


@pytest.mark.parametrize(
    "name, said",
    [
        ("sign", "there are files of topk, uniform"),
        ("topk:0.1,scope=tensor", "no scope=tensor; choose sample"),
        ("uniform:4,scale=channel", "choose tensor, sample, group"),
        ("topk:2", "ratio"),
    ],
)
def test_what_no_file_has_is_refused(name, said):
    with pytest.raises(UserError, match=said):
        exported(name)


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "codec.py").write_text("mine")
    assert main(["export", "topk:0.1", "--out", str(tmp_path / "codec.py")]) == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "codec.py").read_text() == "mine"

"""Layers that are used in other ways than once a pass and trained whole are left to the optimizer,
and named.
"""

from __future__ import annotations

import pytest

from commsweep.config import Execution, override
from commsweep.errors import UserError
from commsweep.training.run import build, execute
from tests.helpers import tiny

CODE = """
import torch
from torch import nn

class Base(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.inside, self.head = nn.Linear(64, 16), nn.Linear(16, classes)
        self.make()
    def make(self):
        pass
    def middle(self, x):
        return x
    def forward(self, x):
        return self.head(self.middle(self.inside(x.flatten(1))))

class Twice(Base):
    def make(self):
        self.odd = nn.Linear(16, 16)
    def middle(self, x):
        return self.odd(self.odd(x).tanh())

class Unused(Base):
    def make(self):
        self.odd = nn.Linear(16, 16)

class FrozenBias(Base):
    def make(self):
        self.odd = nn.Linear(16, 16)
        self.odd.bias.requires_grad_(False)
    def middle(self, x):
        return self.odd(x)

class Keyword(Base):
    def make(self):
        self.odd = nn.Linear(16, 16)
    def middle(self, x):
        return self.odd(input=x)

class Attention(Base):
    def make(self):
        self.odd = nn.MultiheadAttention(16, 2, batch_first=True)
    def middle(self, x):
        x = x[:, None]
        return self.odd(x, x, x)[0][:, 0]

class Encoder(Base):
    def make(self):
        self.odd = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    def middle(self, x):
        return self.odd(x[:, None])[:, 0]

class Dropped(Base):
    def make(self):
        self.odd, self.n = nn.Linear(16, 16), 0
    def middle(self, x):
        self.n += self.training
        return self.odd(x) if self.n % 3 else x

def net(sample, classes, kind):
    return globals()[kind](classes)
"""
LEFT = {
    "Twice": ["odd"],
    "Unused": ["odd"],
    "FrozenBias": ["odd"],
    "Keyword": [],
    "Attention": ["odd.out_proj"],
    "Encoder": ["odd.self_attn.out_proj"],
    "Dropped": [],
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    (tmp_path / "uses.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)


def run(kind, **changes):
    return override(
        tiny(epochs=1, eval_every=1, optim__lr=0.01),
        {
            "model.name": "own",
            "model.build": "uses.py:net",
            "model.options": {"kind": kind},
            "model.cuts": [],
            "kfac.inverses_every": 2,
            **changes,
        },
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("kind", LEFT)
def test_a_layer_with_another_use_is_left_to_the_optimizer(kind, learners, store):
    asked = run(kind, **{"grad.learners": learners})
    kfac = build(asked, Execution("cpu")).task.components["kfac"]
    assert [name for name in kfac.left if name.startswith("odd")] == LEFT[kind]
    names = [layer.name for layer in kfac.layers]
    assert {"inside", "head"} <= set(names) and ("odd" in names) == (kind in ("Keyword", "Dropped"))
    row = execute(asked, store, Execution("cpu"))
    assert row["status"] == "finished", row["error"]


def test_a_keyword_is_a_position(store):
    """The same network with layer(x) and layer(input=x)."""
    plain = CODE.replace("self.odd(input=x)", "self.odd(x)")
    (store.root.parent / "plain.py").write_text(plain)
    rows = [
        execute(
            override(run("Keyword"), {"model.build": f"{name}.py:net"}), store, Execution("cpu")
        )
        for name in ("uses", "plain")
    ]
    assert rows[0]["metrics"] == rows[1]["metrics"] and rows[0]["id"] != rows[1]["id"]


def test_a_model_of_which_nothing_is_left_is_refused():
    class_ = (
        "class Frozen(Base):\n    def make(self):\n        self.inside.bias.requires_grad_(False)\n"
        "        self.head.bias.requires_grad_(False)\n"
    )
    with open("uses.py", "a") as handle:
        handle.write(class_)
    with pytest.raises(
        UserError, match="kfac: the model has no layer that it supports .*run once a pass"
    ):
        build(run("Frozen"), Execution("cpu"))

"""A new compressor is a file of settings and a file of arithmetic, found by their being there. What
carries messages asks for methods and traits, and names no member.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from torch import nn

from commsweep import compressors
from commsweep.boundary import channel
from commsweep.collectives import Simulated
from commsweep.compressors.base import Compressor
from commsweep.config.compressors.base import Compression
from commsweep.config.feedback import EFSpec
from commsweep.config.gradients import Gradients
from commsweep.data_parallel import exchange, hook, learners
from commsweep.data_parallel.exchange import Exchange
from commsweep.feedback import gradient_memories
from commsweep.store import Store
from commsweep.training import step

ROOT = Path(__file__).resolve().parents[2]


class DeltaSpec(Compression):
    """A message that depends on the last one."""

    label: ClassVar[str] = "delta"
    cost: ClassVar[str] = "2 x elements"
    kind: Literal["delta"] = "delta"


class Delta(Compressor[DeltaSpec]):
    """Arrives plus the sum of the sender's last message."""

    def __init__(self, spec, last=None):
        super().__init__(spec)
        self.last = last

    def sender_state(self, shape):
        return torch.zeros(())

    def for_message(self, x, state, number):
        before = state.clone()
        state.fill_(float(x.sum()))
        return Delta(self.spec, before)

    def apply(self, x, seed=0):
        return x + self.last

    def formula_bytes(self, shape, dtype):
        return 2 * shape.numel()


class Halving(gradient_memories.Residue):
    """A memory that compresses and remembers in one step."""

    def step(self, compressor, g):
        self.e.add_(g)
        y = self.e / 2
        self.e.sub_(y)
        return y, 7, 0

    def settle(self, m, y):
        return y


def _exchange(learners=2, feedback=None):
    spec = Gradients(learners=learners, exchange="allgather").model_copy(
        update={"compressor": DeltaSpec(), **({"feedback": feedback} if feedback else {})}
    )
    return Exchange(spec, nn.Linear(3, 2, bias=False), 0, Simulated(learners))


def test_a_compressor_with_a_memory_of_its_own_is_one_line_of_a_table(monkeypatch):
    monkeypatch.setitem(compressors.COMPRESSORS, "delta", Delta)
    made = _exchange()
    first, second = torch.ones(2, 3), torch.full((2, 3), 2.0)
    for step_number, expected in enumerate(([0.0, 0.0], [6.0, 12.0])):
        mean = made.send(0, [first, second], step_number, 0)
        # each learner's own memory: the sum of its last message, zero before the first
        want = (first + expected[0] + second + expected[1]) / 2
        assert torch.equal(mean, want)
    assert made.ledger.totals()["up"] > 0
    other = _exchange()
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.send(0, [first, second], 2, 0), made.send(0, [first, second], 2, 0))


def test_a_memory_that_compresses_in_one_step_is_one_line_of_a_table(monkeypatch):
    monkeypatch.setitem(compressors.COMPRESSORS, "delta", Delta)
    monkeypatch.setitem(gradient_memories.MEMORIES, "ef", Halving)
    made = _exchange(feedback=EFSpec())
    grads = [torch.ones(2, 3), torch.full((2, 3), 3.0)]
    assert torch.equal(made.send(0, grads, 0, 0), torch.full((2, 3), 1.0))
    assert torch.equal(made.send(0, grads, 1, 0), torch.full((2, 3), 1.5))
    made.ledger.steps = 2
    assert made.ledger.totals()["up"] == 7


@pytest.mark.parametrize("module", [channel, exchange, hook, learners, step])
def test_what_carries_messages_names_no_compressor_and_no_memory(module):
    members = {kind.__name__ for kind in compressors.COMPRESSORS.values()}
    members |= {kind.__name__ for kind in gradient_memories.MEMORIES.values()}
    members |= {"Leader", "PowerIteration", "Orthonormal", "RiceTopK"}
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & members


SETTINGS = '''
"""Half of every value."""
from pathlib import Path
from typing import ClassVar, Literal
from commsweep.config.compressors.base import Compression

class HalvesSpec(Compression):
    """Send half of every value."""
    label: ClassVar[str] = "halves"
    cost: ClassVar[str] = "4 x elements"
    kind: Literal["halves"] = "halves"
'''
ARITHMETIC = '''
"""Half of every value."""
from commsweep.compressors.base import COMPRESSORS, Compressor
from commsweep.config.compressors.halves import HalvesSpec

@COMPRESSORS.of(HalvesSpec)
class Halves(Compressor[HalvesSpec]):
    """Sends half of every value, as it is."""

    def apply(self, x, seed=0):
        return x / 2

    def formula_bytes(self, shape, dtype):
        return 4 * shape.numel()
'''
FIELD = """    clip: bool = False
    damped: Annotated[
        float | None, Field(gt=0, lt=1, description="share of a step that is taken; absent: all")
    ] = None
"""
METHOD = '''
"""A share of every outer step."""
from commsweep.data_parallel.outer.roles import STEPS, OuterSGD

@STEPS.when(lambda outer: outer.damped is not None)
class Damped(OuterSGD):
    """The outer step of a share of what arrives."""

    def step(self, arrived, rate):
        super().step({index: self.spec.damped * y for index, y in arrived.items()}, rate)
'''
USE = """
from commsweep.cli.main import main
from docs.tools.reference import compressors
from tests.helpers import COMPRESSORS
assert {"kind": "halves"} in COMPRESSORS and "| `halves` |" in compressors()
common = ["run", "synthetic", "epochs=1", "--store", "store"]
main([*common, "bwd.compressor.kind=halves"])
learners = ["model.cuts=[]", "grad.learners=2", "grad.outer.interval=2"]
main([*common, *learners])
main([*common, *learners, "grad.outer.damped=0.5"])
"""


def test_a_new_compressor_or_outer_method_is_two_files(tmp_path):
    for room in ("commsweep", "tests", "sweeps", "analysis", "experiments", "docs/tools"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    library = tmp_path / "commsweep"
    (library / "config/compressors/halves.py").write_text(SETTINGS)
    (library / "compressors/halves.py").write_text(ARITHMETIC)
    outer = library / "config/outer.py"
    outer.write_text(outer.read_text().replace("    clip: bool = False\n", FIELD))
    (library / "data_parallel/outer/damped.py").write_text(METHOD)
    outcome = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},  # nothing is compiled for the copy
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert outcome.returncode == 0, outcome.stderr
    losses = [row["metrics"]["test_on_loss"] for row in Store(tmp_path / "store").rows()]
    assert len(losses) == len(set(losses)) == 3

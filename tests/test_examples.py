"""Every example runs as it stands and prints what its head says, but for the numbers."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
QUICK = ("predict_cluster", "verdicts")
LINES = 60


def promised(name):
    """The lines of output in an example's head."""
    head = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text()))
    assert f"python examples/{name}.py" in head
    _, _, output = head.partition("Prints, with other numbers on another machine:\n\n")
    return output.splitlines()


def without_numbers(line):
    """The words of a line."""
    return re.sub(r"[-+]?\d[\d.,]*", "#", " ".join(line.split()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_tells_its_output(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= LINES
    assert promised(name)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_an_example_prints_what_its_head_says(name, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed = [without_numbers(line) for line in done.stdout.splitlines()]
    for line in promised(name):
        words = without_numbers(line)
        assert any(found.startswith(words) for found in printed), (line, done.stdout)

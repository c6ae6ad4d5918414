"""What a training command loads, and that it leaves with the right code; in processes of their
own.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("transformers", "datasets", "pandas", "scipy.signal", "torchmetrics.functional.text")
LOADS = """
import json, sys
from commsweep.lean_imports import loading
with loading():
    from commsweep.training.run import execute
heavy = [name for name in sys.argv[1:] if name in sys.modules]
import gc, torchmetrics, pytorch_lightning
from pytorch_lightning.core import module
same = torchmetrics.metric.Metric is torchmetrics.Metric is module.Metric
later = torchmetrics.functional.accuracy.__module__
print(json.dumps([heavy, same, later, gc.isenabled()]))
"""
OTHERWISE = """
import importlib, sys
from commsweep import lean_imports
real = importlib.import_module
def refuse(name, package=None):
    if name == "torchmetrics.collections":
        raise ImportError("of another version")
    return real(name, package)
importlib.import_module = refuse
with lean_imports.loading():
    import torchmetrics
print(type(torchmetrics).__name__, torchmetrics.Accuracy.__name__)
"""


def python(source, *words):
    return subprocess.run(
        [sys.executable, "-c", source, *words], capture_output=True, text=True, check=False
    )


def test_a_training_loads_no_library_that_it_does_not_use_and_any_can_be_used_later():
    told = python(LOADS, *HEAVY)
    heavy, same, later, collects = json.loads(told.stdout)
    assert heavy == []
    assert same and later == "torchmetrics.functional.classification.accuracy" and collects
    assert told.stderr == ""


@pytest.mark.slow
def test_a_version_of_torchmetrics_that_is_laid_out_otherwise_is_loaded_whole():
    assert python(OTHERWISE).stdout.split() == ["module", "Accuracy"]


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return 0", 0, "last"),
        ("return 3", 3, "last"),
        ("raise SystemExit(5)", 5, "last"),
        ("raise ValueError('x')", 1, "last"),
    ],
)
def test_a_process_leaves_with_its_code_after_all_that_is_registered(body, code, said):
    source = (
        "import atexit, sys\nfrom commsweep.lean_imports import leaving\n"
        f"def work():\n    atexit.register(print, 'last', end='')\n    {body}\n"
        "sys.exit(leaving(work))"
    )
    told = python(source)
    assert (told.returncode, told.stdout) == (code, said)
    assert ("Traceback" in told.stderr) == ("ValueError" in body)


def test_nobody_who_reads_is_no_traceback():
    line = f"{sys.executable} -m commsweep explain | head -1"
    told = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert told.stdout and told.stderr == ""


def test_content_and_reporting_load_no_torch():
    """A report of recorded runs, and all papers, tables and figures, need none."""
    program = (
        "import pkgutil, sys\n"
        "import analysis, commsweep.reporting as reporting\n"
        "from commsweep.registry import papers, sweeps\n"
        "papers(), sweeps()\n"
        "for module in pkgutil.iter_modules(reporting.__path__):\n"
        "    __import__(f'commsweep.reporting.{module.name}')\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

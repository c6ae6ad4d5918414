"""A name that does not exist is said before anything heavy is imported, by every command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMANDS = (
    ["iteration", ""],
    ["iteration", "resnet5"],
    ["flops", "nonet"],
    ["predict", "--model", "nonet", "--gpus", "8"],
    ["advise", "--model", "7b"],
    ["advise", "nonet", "--bandwidth", "1Gbit"],
    ["run", "nonet"],
    ["run", "digits", "fwd=nocodec"],
    ["sweep", "launch", "nonet"],
    ["search", "nonet"],
    ["ddp", "nonet"],
    ["pipeline", "nonet"],
    ["explain", "nonet"],
    ["bench", "nonet"],
    ["score", "nocodec"],
    ["compress", "--spec", "nocodec", "a.npy", "b.npy"],
    ["verify", "nofolder"],
    ["links", "nonet"],
    ["board", "nofolder"],
    ["report", "nonet"],
    ["claims", "nonet"],
    ["wandb", "sweep", "nonet"],
)
PROGRAM = """
import contextlib, io, json, sys
from commsweep.cli.main import main
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(words)
    heavy = [name for name in ("torch", "torchvision", "transformers") if name in sys.modules]
    assert code == 2 and said.getvalue().count("\\n") == 1 and not heavy, (words, code, heavy)
"""


def test_names_are_checked_before_anything_heavy_is_imported(tmp_path):
    """One process for all: what one of them imports is said with its words."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(COMMANDS),
        text=True,
        capture_output=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_networks_are_known_by_their_files(package):
    from commsweep.timing import networks

    module = pytest.importorskip(package)
    made = module.models.list_models(module=module.models) if package == "torchvision" else None
    names = networks.names(package)
    if made is not None:
        assert set(made) == names
    else:
        assert all(module.is_model(name) for name in sorted(names)[::50]) and len(names) > 500

"""The arrows of the architecture, the lock file, and what the repository may not say."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "experiments": set(),
    "sweeps": {"experiments"},
    "analysis": {"experiments.config", "experiments.store", "experiments.errors", "experiments.specs"},
    "commsweep": {"experiments", "sweeps", "analysis"},
}
ROOMS = ("experiments", "sweeps", "analysis")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_point_one_way(room):
    for path in (ROOT / room).rglob("*.py"):
        for name in imports(path):
            assert name.split(".")[0] not in ROOMS, f"{path.relative_to(ROOT)}: users' folders may have that name"
            first, _, name = name.partition(".")
            inside = name.split(".")[0] in ROOMS
            if first == "commsweep" and not (name.split(".")[0] == room if inside else room == "commsweep"):
                assert any(name == allowed or name.startswith(allowed + ".") for allowed in MAY_IMPORT[room]), (
                    f"{path.relative_to(ROOT)} imports {name}")


def test_one_autograd_function_and_never_the_package_lightning():
    functions = []
    for room in MAY_IMPORT:
        for path in (ROOT / room).rglob("*.py"):
            functions += re.findall(r"class \w+\(torch\.autograd\.Function\)", path.read_text())
            assert not any(name.split(".")[0] == "lightning" for name in imports(path))
    assert len(functions) == 1
    assert not re.search(r"^lightning==", (ROOT / "requirements.lock").read_text(), re.M)


def test_the_lock_pins_every_dependency_by_name_and_version_only():
    lines = (ROOT / "requirements.lock").read_text().split("\n")
    pinned = {re.split(r"[=\s]", line)[0].lower() for line in lines if line}
    assert all(re.fullmatch(r"[\w.\-\[\]]+==[\w.]+( ; .+)?", line) for line in lines if line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [one for name in extras.keys() - {"finetune"} for one in extras[name]
                                        if not one.startswith("commsweep")]
    assert {re.split(r"[>=<\[]", one)[0].lower() for one in wanted} <= pinned


def test_public_names_are_documented():
    for room in MAY_IMPORT:
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if path.name != "__init__.py" or tree.body:
                assert ast.get_docstring(tree), path
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                    assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_notebooks_hold_no_outputs():
    import json

    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), path.name


def test_ci_calls_the_readmes_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    assert subprocess.run(["test", "-x", ROOT / ".ci" / "run"]).returncode == 0

"""The arrows of the architecture, the lock file, and what the repository may not say."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The rooms from the lowest floor up: what is in one may import what is in it and below, never above.
FLOORS = (
    "experiments", "experiments.errors", "experiments.seeds", "experiments.pretrained", "experiments.sources",
    "experiments.config",
    "experiments.presets",
    "experiments.store", "experiments.checkpoint", "experiments.component", "experiments.compressors",
    "experiments.feedback", "experiments.boundary", "experiments.collectives", "experiments.second_order",
    "experiments.data_parallel", "experiments.sparsity",
    "experiments.data", "experiments.models", "experiments.inputs", "experiments.training", "experiments.processes",
    "sweeps", "analysis.timeline", "analysis", "commsweep",
)
# All that analysis sees of a run.
READS = ("experiments.errors", "experiments.config", "experiments.store", "experiments.inputs",
         "experiments.second_order.placement", "experiments.second_order.fusion", "experiments.second_order.loads",
         "experiments.sparsity.flops")
ROOMS = ("experiments", "sweeps", "analysis")
PLACES = (*ROOMS, "commsweep")
WITHOUT_TORCH = ("experiments/config", "experiments/presets", "experiments/store.py", "experiments/errors.py",
                 "experiments/inputs.py", "experiments/sources.py", "experiments/seeds.py",
                 "experiments/second_order/placement.py", "experiments/second_order/fusion.py",
                 "experiments/second_order/loads.py", "experiments/sparsity/schedule.py",
                 "experiments/sparsity/densities.py", "experiments/sparsity/flops.py", "analysis", "sweeps")


def floor(name):
    """The highest floor whose name begins a module's."""
    found = (place for place, room in enumerate(FLOORS) if name == room or name.startswith(room + "."))
    return max(found, default=None)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def named(node):
    """The modules that an import statement names, a package's own by their full names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("room", PLACES)
def test_no_import_runs_back_up(room):
    for path in (ROOT / room).rglob("*.py"):
        own = floor(module_of(path))
        assert own is not None, f"{path.relative_to(ROOT)} stands on no floor"
        for node in ast.walk(ast.parse(path.read_text())):
            for name in named(node):
                assert name.split(".")[0] not in ROOMS, f"{path.relative_to(ROOT)}: users' folders may have that name"
                inside = name.removeprefix("commsweep.")
                if name.startswith("commsweep.") and inside.split(".")[0] in ROOMS:
                    to = floor(inside)
                    assert to is None or to <= own, f"{path.relative_to(ROOT)} imports {name}, which is above it"
                    if room == "analysis" and inside.startswith("experiments."):
                        assert inside.startswith(READS), f"{path.relative_to(ROOT)} imports {name}"


def test_no_circle_of_modules():
    """Not even within a room (imports inside functions, and those for types, aside)."""
    files = {f"commsweep.{module_of(path)}".replace("commsweep.commsweep", "commsweep"): path
             for room in PLACES for path in (ROOT / room).rglob("*.py")}
    graph = {}
    for own, path in files.items():
        graph[own] = set()
        for node in ast.parse(path.read_text()).body:
            first, *more = named(node) or [""]
            modules = [name for name in more if name in files]  # from PACKAGE import MODULE
            graph[own] |= set(modules if modules else [first]) & files.keys()

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        return seen

    assert [own for own in graph if own in reached(own)] == []


def test_what_plans_and_tables_need_imports_no_torch():
    for place in WITHOUT_TORCH:
        for path in [ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                assert not any(name.split(".")[0] in ("torch", "pytorch_lightning") for name in named(node)), path


def test_one_autograd_function_and_never_the_package_lightning():
    functions = []
    for room in PLACES:
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
    for room in PLACES:
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if path.name != "__init__.py" or tree.body:
                assert ast.get_docstring(tree), path
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                    assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_ci_calls_the_readmes_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    assert subprocess.run(["test", "-x", ROOT / ".ci" / "run"]).returncode == 0

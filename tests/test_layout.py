"""The arrows of the architecture, the lock file, and what the repository may not say."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import commsweep

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "commsweep"
CONTENT = ("experiments", "sweeps", "analysis")
PLACES = (LIBRARY, *CONTENT)
# The folders and files of the library from the lowest up. Each may import itself and those before.
FLOORS = (
    "errors",
    "lean_imports",
    "child",
    "seeds",
    "checkpoint",
    "component",
    "modules",
    "config",
    "store",
    "compressors",
    "collectives",
    "feedback",
    "boundary",
    "second_order",
    "data_parallel",
    "sparsity",
    "data",
    "models",
    "input_digests",
    "training",
    "processes",
    "registry",
    "launching",
    "reporting",
    "timing",
    "bench",
    "integrations",
    "scoring",
    "api_functions",
    "cli",
    "__main__",
)
# All that reporting and timing see of a run.
READERS = ("reporting", "timing")
READ = (
    "errors",
    "config",
    "store",
    "input_digests",
    "registry",
    "reporting",
    "timing",
    "second_order.placement",
    "second_order.fusion",
    "second_order.loads",
)
WITHOUT_TORCH = (
    "config",
    "store",
    "errors",
    "input_digests",
    "seeds",
    "registry",
    "data.sources",
    "launching",
    "reporting",
    "timing",
    "second_order.placement",
    "second_order.fusion",
    "second_order.loads",
    "sparsity.schedule",
    "sparsity.densities",
    "sparsity.flops",
)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# The project that `commsweep new` copies is content.
TEMPLATE = "commsweep.template"


FILES = {module_of(path): path for place in PLACES for path in sorted((ROOT / place).rglob("*.py"))}


def imported(node):
    """The modules that an import statement names; of `from PACKAGE import MODULE` the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
        return []
    full = [f"{node.module}.{alias.name}" for alias in node.names]
    modules = [name for name in full if name in FILES]
    return modules or [node.module]


def imports(path, everywhere=True):
    """What a file imports, inside of functions too, or only at its top."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else tree.body
    return [name for node in nodes for name in imported(node)]


def part(module):
    """The folder or file of the library that a module is (of)."""
    inside = module.startswith("commsweep.") and not module.startswith(TEMPLATE)
    return module.split(".")[1] if inside else ""


def test_every_part_of_the_library_has_its_floor():
    assert {part(module) for module in FILES if part(module)} == set(FLOORS)


@pytest.mark.parametrize("module", [name for name in FILES if part(name)])
def test_no_import_runs_back_up(module):
    """Inside of functions neither: the folders have no circle for any tool that reads imports."""
    for name in imports(FILES[module]):
        assert name.split(".")[0] not in CONTENT, f"{module} imports content: {name}"
        if part(name):
            above = FLOORS.index(part(name)) > FLOORS.index(part(module))
            assert not above, f"{module} imports {name}, which is above it"
            if part(module) in READERS:
                assert name.removeprefix("commsweep.").startswith(READ), f"{module} imports {name}"


def test_content_imports_the_library_and_its_own_folder_only():
    """Relatively, so that a user's project may have folders of the same names."""
    for module, path in FILES.items():
        if module.split(".")[0] not in CONTENT:
            continue
        assert not any(name.split(".")[0] in CONTENT for name in imports(path)), module
        levels = [
            node.level
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        ]
        assert max(levels, default=0) <= 1, f"{module} reaches out of its folder"


def test_no_circle_of_modules():
    """Not even within a folder (imports inside functions, and those for types, aside)."""
    graph = {
        name: set(imports(path, everywhere=False)) & FILES.keys() for name, path in FILES.items()
    }

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for name in graph[todo.pop()] - seen:
                seen.add(name)
                todo.append(name)
        return seen

    assert [name for name in graph if name in reached(name)] == []


def test_what_plans_and_tables_need_imports_no_torch():
    for module, path in FILES.items():
        free = module.removeprefix("commsweep.").startswith(WITHOUT_TORCH) or module.startswith(
            CONTENT
        )
        names = imports(path, everywhere=False) if free else []
        assert not any(name.split(".")[0] in ("torch", "pytorch_lightning") for name in names), path


def test_the_packages_path_is_pythons_own():
    """No tool has to know more than where the package lies."""
    assert commsweep.__path__ == [str(ROOT / "commsweep")]
    assert not any("__path__" in path.read_text() for path in FILES.values())


def test_one_autograd_function_and_never_the_package_lightning():
    functions = []
    for room in PLACES:
        for path in (ROOT / room).rglob("*.py"):
            if path.parent.name == "codecs":  # files for others, which import nothing of ours
                continue
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
    wanted = project["dependencies"] + [
        one
        for name in extras.keys() - {"finetune"}
        for one in extras[name]
        if not one.startswith("commsweep")
    ]
    assert {re.split(r"[>=<\[]", one)[0].lower() for one in wanted} <= pinned


def test_public_names_are_documented():
    for room in PLACES:
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if path.name != "__init__.py" or tree.body:
                assert ast.get_docstring(tree), path
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith(
                    "_"
                ):
                    assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_ci_calls_the_readmes_test_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    assert subprocess.run(["test", "-x", ROOT / ".ci" / "run"]).returncode == 0


# Words that say nothing of what a variable holds, and the most names that may be made of them.
SAY_NOTHING = re.findall(
    r"\w+",
    "one own made said told found given known kept seen asked wanted gone got took had meant put "
    "way what here there now then other others rest beside apart alone whole part parts place "
    "places thing things turn turned begun ended every each some such any_ more less much few "
    "looks leaving",
)
MOST_VAGUE = 40
FRAGMENT = re.compile(
    r"(Of|What|As|How|Whether|Where|Those|All that|All of|Who|That|Which|Its|Their|These|Nothing"
    r"|Somebody|One|And|But|So)\b"
)
COLUMNS = re.compile(r"\S {2,}\S")


def bound(node):
    """The names that a node of a syntax tree binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    return ""


def test_names_say_what_they_hold_and_docstrings_are_sentences():
    vague, fragments, broken = [], [], []
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if bound(node).strip("_") in SAY_NOTHING:
                vague.append(f"{module}: {bound(node)}")
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            text = ast.get_docstring(node) or ""
            if FRAGMENT.match(text):
                fragments.append(f"{module}: {text[:60]}")
            lines = text.splitlines()
            if len(lines) > 2 and sum(bool(COLUMNS.search(line)) for line in lines) == 1:
                broken.append(
                    f"{module}: a table with one row, or columns set as prose: {text[:60]}"
                )
    assert not fragments and not broken
    assert len(vague) <= MOST_VAGUE, vague


def test_no_files_import_each_other_in_a_circle():
    """Imports inside of functions and for types count, too."""
    graph = {
        module: {name for name in imports(path) if name in FILES and name != module}
        for module, path in FILES.items()
        if path.name != "__init__.py"
    }
    TopologicalSorter(graph).prepare()  # a CycleError names the files

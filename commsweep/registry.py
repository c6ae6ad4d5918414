"""Finds content: the named runs, sweeps, measurement plans and analyses, by folder.

Content lies in three folders, `experiments`, `sweeps` and `analysis`. Every Python file in them may
define

    experiments/   PRESETS    name -> Run
    sweeps/        SWEEPS     name -> function that returns a list of Runs
                   PLANS      name -> function that returns a list of (Run, Wiring)
                   CALIBRATION  the plan that a machine's constants are fitted to
    analysis/      a paper: NAME, rows(frame), tables(rows), CLAIMS, FIGURES
                   PROVIDES   name -> function that a command asks for: the report of a plan
                   FINDINGS   list of commsweep.reporting.findings.Finding

The content that comes with commsweep is always there. A project of the user's own is the nearest
folder, from the working folder upwards, that has such a file, or the folder named by --project or
COMMSWEEP_PROJECT. A name that both define means the project's, and a notice says so. Files of one
folder import each other relatively (`from .text import NANO`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
import stat
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from commsweep.config import Run, override, own, record, run_id
from commsweep.config.execution import LearnerWiring, Wiring
from commsweep.config.override import parse
from commsweep.config.own import PROJECT
from commsweep.errors import UserError, nearest, notice, reason
from commsweep.store import Store

PAPER = ("NAME", "rows", "tables", "CLAIMS", "FIGURES")
# What makes a file of a folder content.
DEFINES = {
    "experiments": ("PRESETS",),
    "sweeps": ("SWEEPS", "PLANS"),
    "analysis": ("CLAIMS", "FINDINGS", "PROVIDES"),
}
SHIPPED = "commsweep_content"  # the import name of what comes with commsweep

Measurement = tuple[Run, Wiring | LearnerWiring]


def presets() -> dict[str, Run]:
    """All named Runs. Raises UserError on content that cannot be loaded."""
    return _named("experiments", "PRESETS", "a Run", lambda value: isinstance(value, Run))


def preset(name: str, **settings: Any) -> Run:
    """The Run of this name, with some settings changed: preset("digits", **{"optim.lr": 0.1}), or
    optim__lr=0.1.

    Raises UserError naming the nearest preset or setting.
    """
    presets_ = presets()
    if name not in presets_:
        raise UserError(
            f"unknown preset '{name}'{nearest(name, presets_, 3)} (all of them: commsweep presets)"
        )
    if not settings:
        return presets_[name]
    return override(
        presets_[name], {key.replace("__", "."): value for key, value in settings.items()}
    )


def sweeps() -> dict[str, Callable[[], list[Run]]]:
    """All named sweeps."""
    return _named("sweeps", "SWEEPS", "a function", callable)


def grouped(room: str, table: str, only: str = "") -> dict[str, dict[str, Any]]:
    """Content by the file that has it: {first sentence of its docstring: {name: value}}.

    only: a word that a name, or the group's sentence, must have.
    """
    groups: dict[str, dict[str, Any]] = {}
    for _, module in _modules(room):
        title = first_sentence(module.__doc__)
        for name, value in getattr(module, table, {}).items():
            if only.lower() in f"{name} {title}".lower():
                groups.setdefault(title, {})[name] = value
    return groups


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring, on one line, without its full stop."""
    line = " ".join((text or "").split())
    return re.split(r"(?<=[^.])\.\s", f"{line} ", maxsplit=1)[0].rstrip(" .")


def sweep(name: str, store: Store | None = None) -> list[Run]:
    """The runs of a sweep: a named one, "my_grid.py:grid" (a function that returns a list of Runs),
    or one that `store` holds. Raises UserError naming the nearest one.
    """
    if ":" in name:
        return _checked(name, own.call(name, ""))
    if name.endswith(".py"):
        raise UserError(
            f"'{name}' names no function: write {name}:FUNCTION, which returns a list of Runs"
        )
    sweeps_ = sweeps()
    if name in sweeps_:
        runs = sweeps_[name]()
        return runs if is_shipped(sweeps_[name].__module__) else _checked(name, runs)
    if store is not None and (store.root / "sweeps" / f"{name}.json").exists():
        return [parse(settings) for settings in store.cells(name).values()]
    raise UserError(
        f"unknown sweep '{name}'{nearest(name, sweeps_, 3)} (all of them: commsweep sweep list)"
    )


def label(name: str) -> str:
    """The name of a sweep in the store: "my_grid.grid" for "folder/my_grid.py:grid"."""
    module, colon, function = name.partition(":")
    if not colon:
        return name
    return f"{module.removesuffix('.py').replace('/', '.').rpartition('.')[2]}.{function}"


def plans() -> dict[str, Callable[[], list[Measurement]]]:
    """All named plans of measurements: runs, each with the wiring that it is measured with."""
    return _named("sweeps", "PLANS", "a function", callable)


def plan(name: str) -> list[Any]:
    """The measurements of a named plan, (Run, Wiring) or (Run, LearnerWiring). Raises UserError
    naming the nearest.
    """
    plans_ = plans()
    if name not in plans_:
        raise UserError(
            f"unknown plan '{name}'{nearest(name, plans_)} (one of: {', '.join(plans_)})"
        )
    return plans_[name]()


def calibration_plan() -> str:
    """Return the name of the plan that the constants of a machine are fitted to."""
    modules = [module for _, module in _modules("sweeps")]
    return next(module.CALIBRATION for module in modules if hasattr(module, "CALIBRATION"))


def calibration() -> list[Any]:
    """Return the measurements of that plan, (Run, Wiring)."""
    return plan(calibration_plan())


def provided(name: str) -> Callable[..., Any]:
    """Return the function that `analysis` provides to a command under this name."""
    return _named("analysis", "PROVIDES", "a function", callable)[name]


def papers() -> list[ModuleType]:
    """The modules of `analysis` that have rows, tables, claims and figures; a project's after those
    that are shipped.
    """
    modules: dict[str, ModuleType] = {}
    for path, module in _modules("analysis"):
        if not hasattr(module, "CLAIMS"):
            continue
        if missing := [name for name in PAPER if not hasattr(module, name)]:
            raise UserError(
                f"'{path}' has CLAIMS but no {missing[0]}; a paper has {', '.join(PAPER)}"
            )
        modules[module.NAME] = module
    return list(modules.values())


def is_shipped(module: str) -> bool:
    """Return whether a module of content, by its name, came with commsweep."""
    return module.startswith(f"{SHIPPED}.")


def findings() -> list[Any]:
    """All findings (commsweep.reporting.findings.Finding), in order."""
    return [
        finding for _, module in _modules("analysis") for finding in getattr(module, "FINDINGS", ())
    ]


def content(name: str) -> ModuleType:
    """A shipped module by folder and name: content("sweeps.rudakov")."""
    _package(SHIPPED, _shipped())
    return importlib.import_module(f"{SHIPPED}.{name}")


def project() -> Path | None:
    """The user's project, or None. Raises UserError when COMMSWEEP_PROJECT names none."""
    if folder_given := os.environ.get(PROJECT):
        folder = Path(folder_given).resolve()
        if not _has_content(folder):
            raise UserError(
                f"--project or {PROJECT}: '{folder_given}' has no {', '.join(DEFINES)} folder with "
                "content (commsweep new NAME makes one)"
            )
        return folder
    working = Path.cwd()
    for folder in (working, *working.parents):
        if folder == _shipped():
            return None
        if _has_content(folder):
            if folder != working:
                _check_owner(folder)
            return folder
    return None


def _check_owner(project: Path) -> None:
    """Raise UserError on a project above the working folder that somebody else could have put
    there: its files would be executed.
    """
    for folder in (project, *(project / room for room in DEFINES)):
        if not folder.exists():
            continue
        status = folder.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
            raise UserError(
                f"'{folder}' is a project above the working folder that others own or can write, "
                f"so it is not executed: chmod o-w it, or name it with --project '{project}'"
            )


def _checked(name: str, runs: Any) -> list[Run]:
    """The runs of a user's function, each once and validated again: a copy with other fields was
    not.
    """
    if (
        not isinstance(runs, list | tuple)
        or not runs
        or not all(isinstance(run, Run) for run in runs)
    ):
        raise UserError(
            f"'{name}' must return a list of Runs, at least one (see commsweep.launching.grid)"
        )
    checked = [parse(record(run)) for run in runs]
    return list({run_id(run): run for run in checked}.values())


def _named(room: str, attribute: str, kind: str, valid: Callable[[Any], bool]) -> dict[str, Any]:
    """All entries of the dictionaries of this name; a project's hide those that are shipped."""
    entries_: dict[str, Any] = {}
    origin: dict[str, Path] = {}
    hidden: dict[tuple[Path, Path], list[str]] = {}
    for path, module in _modules(room):
        entries = getattr(module, attribute, {})
        if not isinstance(entries, dict):
            raise UserError(f"'{path}': {attribute} must be a dictionary, name -> {kind}")
        for name, value in entries.items():
            if not valid(value):
                raise UserError(f"'{path}': {attribute}['{name}'] is not {kind}")
            if name in origin:
                hidden.setdefault((path, origin[name]), []).append(name)
            entries_[name] = value
            origin[name] = path
    for (path, hidden_path), names in hidden.items():
        ending = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notice(
            f"'{path}' is taken for {', '.join(names[:3])}{ending}; '{hidden_path}' has them, too"
        )
    return entries_


def _modules(room: str) -> list[tuple[Path, ModuleType]]:
    """The content of one folder, (file, module): what is shipped, then the project's."""
    modules = list(_loaded(_shipped(), room))
    folder = project()
    if folder is None:
        return modules
    # Files that its Runs name are found, and processes that are started know it.
    os.environ.setdefault(PROJECT, str(folder))
    return [*modules, *_loaded(folder, room)]


@cache
def _loaded(root: Path, room: str) -> tuple[tuple[Path, ModuleType], ...]:
    name = (
        SHIPPED
        if root == _shipped()
        else f"commsweep_project_{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"
    )
    _package(name, root)
    modules = []
    for path in _files(root, room):
        try:
            with own.guarded(str(path)):
                module = importlib.import_module(f"{name}.{room}.{path.stem}")
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a user's own code may raise anything
            if root == _shipped():
                raise
            raise UserError(f"'{path}' could not be imported ({reason(error)})") from None
        modules.append((path, module))
    return tuple(modules)


def _package(name: str, root: Path) -> None:
    """Make a folder importable under a name of its own, so that equal names of two projects do not
    collide.
    """
    if name in sys.modules:
        return
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(root)]
    sys.modules[name] = module_from_spec(spec)


@cache
def _shipped() -> Path:
    """The folder of the shipped content: beside the package in a checkout, inside of it in an
    installed wheel.
    """
    package = Path(__file__).resolve().parent
    inside = package / "content"
    return inside if inside.is_dir() else package.parent


def _has_content(root: Path) -> bool:
    return any(_files(root, room) for room in DEFINES)


@cache
def _files(root: Path, room: str) -> tuple[Path, ...]:
    """The files of a folder that define content, by name. They are read, not executed: a folder of
    this name may be somebody else's.
    """
    folder = root / room
    try:
        paths = sorted(folder.glob("*.py"))
    except OSError:
        return ()
    return tuple(path for path in paths if _defines(path, DEFINES[room]))


def _defines(path: Path, names: tuple[str, ...]) -> bool:
    """Return whether a file imports commsweep and assigns one of these names at its top level."""
    try:
        text = path.read_text(encoding="utf-8")
        if "commsweep" not in text:
            return False
        body = ast.parse(text).body
    except (OSError, SyntaxError, ValueError):
        return False
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id in names for target in targets):
            return True
    return False

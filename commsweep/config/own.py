"""Functions of a user's own that a Run or a sweep names: "package.module:function", or
"file.py:function".

A Run records the name and a hash, so that changed code is another run. The hash is of the file, of
the project's own modules that it imports, and of small text files that it names in a string; other
files that it reads are told of. Files are looked for in the working folder first, then in the
user's project. No torch here, and nothing is imported before it is called for.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import (
    cache_from_source,
    find_spec,
    module_from_spec,
    spec_from_file_location,
)
from pathlib import Path
from traceback import extract_tb
from typing import Any, NoReturn

from commsweep.config.base import settle
from commsweep.errors import UserError, nearest, notice, reason

TEXTS = (".py", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".csv", ".txt")
MOST_TEXT = 2**20  # bytes of a text file that is taken for a part of the code
AT_START = tuple(sys.path)  # own code may add to the path: what a run is must not depend on that
PROJECT = "COMMSWEEP_PROJECT"  # the folder of the user's project (commsweep.registry)


def locate(name: str) -> tuple[Path, str]:
    """(file, function) of a name. Raises UserError when there is no such file."""
    module, colon, function = name.partition(":")
    if not colon or not module or not function.isidentifier():
        raise UserError(f"'{name}' names no function: write module:function or file.py:function")
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file() and (project := os.environ.get(PROJECT)):
            path = Path(project, module)
        if not path.is_file():
            raise UserError(f"'{name}': there is no file '{module}' in '{Path.cwd()}'")
        return path, function
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with guarded(name):
            spec = find_spec(module)
    except (ImportError, ValueError) as error:
        raise UserError(f"'{name}': module '{module}' could not be found ({error})") from None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise UserError(
            f"'{name}': there is no module '{module}'; start in its folder, or name its file: "
            f"file.py:{function}"
        )
    return Path(spec.origin), function


def source(name: str) -> str:
    """First 12 hexadecimal digits of SHA-256 over the file that a name means, and over the
    project's own modules that it imports, if it imports any.
    """
    return _digest(files(locate(name)[0]))


def fill_in(spec: Any, setting: str, name: str) -> None:
    """Note in `spec.source` the hash of the file that a name means, unless the record has one.

    Raises ValueError naming the setting where there is no such file.
    """
    if not spec.source:
        try:
            settle(spec, "source", source(name))
        except UserError as error:
            raise ValueError(f"{setting}: {error}") from None


def files(path: Path) -> list[Path]:
    """A file, and all modules of the same project that it imports, directly or through others, and
    text files that one of them names; read, not imported.

    Modules of the standard library, of installed packages and of commsweep are not the project's.
    """
    path = path.resolve()
    paths, waiting = [path], [path]
    folders: list[Path] = []
    while waiting:
        file = waiting.pop()
        tree = _parsed(file)
        texts, named = _named(tree, (file.parent, path.parent, Path.cwd()))
        folders += [folder for folder in named if folder not in folders]
        for name in _imported(tree):
            texts += _of_project(name, (file.parent, path.parent, Path.cwd(), *folders))
        for text in texts:
            if text not in paths:
                paths.append(text)
                waiting += [text] * (text.suffix == ".py")
    return [path, *sorted(paths[1:])]


def _digest(paths: list[Path]) -> str:
    if len(paths) == 1:
        return hashlib.sha256(paths[0].read_bytes()).hexdigest()[:12]
    sha = hashlib.sha256()
    for path in paths:
        inside = os.path.relpath(path, paths[0].parent)  # the same wherever the project lies
        sha.update(f"{inside} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return sha.hexdigest()[:12]


def _parsed(file: Path) -> ast.Module:
    """A file's syntax; an empty one where it has mistakes, which its import will report."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _named(tree: ast.Module, bases: tuple[Path, ...]) -> tuple[list[Path], list[Path]]:
    """(small text files, folders) below one of the bases that a file names in a string; a dotted
    name stands for a module, too.
    """
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts = {node.value for node in nodes if isinstance(node.value, str)}
    files, folders = [], []
    for text in sorted(filter(_may_be_a_path, texts)):
        for base in dict.fromkeys(bases):
            modules = _below(base, text.split(".")) if text.replace(".", "").isidentifier() else []
            files += [module for module in modules if module.is_file()]
            if not os.path.exists(f"{base}/{text}"):
                continue
            path = (base / text).resolve()
            if not path.is_relative_to(base) or any(map(path.is_relative_to, _installed())):
                continue
            if path.is_dir():
                folders.append(path)
            elif path.suffix in TEXTS and path.stat().st_size <= MOST_TEXT:
                files.append(path)
    return files, folders


def _may_be_a_path(text: str) -> bool:
    """Return whether a string can be the name of a file, a folder or a module of the project."""
    return 0 < len(text) < 200 and text.isprintable() and not set(text) <= set("./ ")


def _imported(tree: ast.Module) -> list[str]:
    """Dotted names that a file imports; of "from a import b" both a and a.b. Relative ones begin
    with dots.
    """
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names.append(base)
            names += [
                f"{base}.{alias.name}" if node.module else f"{base}{alias.name}"
                for alias in node.names
            ]
    return names


def _of_project(name: str, bases: tuple[Path, ...]) -> list[Path]:
    """The files that importing a dotted name reads, if it lies in one of these folders; the first
    one for relative names.
    """
    level = len(name) - len(name.lstrip("."))
    names = name[level:].split(".") if name[level:] else []
    if level:
        folder = bases[0]
        for _ in range(level - 1):
            folder = folder.parent
        return _below(folder, names)
    if not names or names[0] in sys.stdlib_module_names or names[0] == "commsweep":
        return []
    for base in bases:
        if below := _below(base, names):
            return below
    try:
        spec = PathFinder.find_spec(names[0], AT_START) or _editable(names[0])
    except (ImportError, ValueError, AttributeError):
        return []
    origins = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    origin = Path(origins[0]) if origins and origins[0] else None
    if (
        origin is None
        or not origin.exists()
        or any(origin.is_relative_to(folder) for folder in _installed())
    ):
        return []
    return _below(origin.parent, names)


def _editable(name: str) -> ModuleSpec | None:
    """The module where an editable install has put it, which is no folder of the path."""
    finders = [finder for finder in sys.meta_path if finder is not PathFinder]
    specs = (finder.find_spec(name, None) for finder in finders)
    return next((spec for spec in specs if spec is not None), None)


def _below(base: Path, names: list[str]) -> list[Path]:
    """The files base/a/__init__.py, base/a/b.py, ... of a.b, as far as they are there."""
    paths, folder = [], base
    for name in names:
        if (folder / f"{name}.py").is_file():
            paths.append((folder / f"{name}.py").resolve())
            break
        folder = folder / name
        if not folder.is_dir():
            break
        if (folder / "__init__.py").is_file():
            paths.append((folder / "__init__.py").resolve())
    return [
        path for path in paths if not any(path.is_relative_to(folder) for folder in _installed())
    ]


@cache
def _installed() -> list[Path]:
    """Folders of the standard library and of installed packages, those of other environments on
    the path included.
    """
    folders = [
        sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    site_folders = [
        path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")
    ]
    return [Path(path).resolve() for path in (*folders, *site_folders)]


def load(name: str, function: str = "") -> Callable[..., Any]:
    """The function of a name. Raises UserError when its file cannot be imported, has no such
    function, or is not the one of hash `function`.
    """
    return _loaded(name, function)[0]


def _loaded(
    name: str, function_name: str, twin: bool = False
) -> tuple[Callable[..., Any], list[Path]]:
    """The function, and the files that its hash is of; twin: of the module loaded a second time."""
    path, function = locate(name)
    paths = files(path)
    is_now = _digest(paths)
    if function_name and function_name != is_now:
        which = (
            f"its file or a module that it imports ({', '.join(path.name for path in paths)})"
            if paths[1:]
            else ("its file")
        )
        raise UserError(
            f"'{name}': {which} has changed since the run was made (source {function_name}, now "
            f"{is_now}); bring the old one back, or make a new run"
        )
    module = (_twin if twin else _module)(path.resolve(), is_now, tuple(paths[1:]))
    value = getattr(module, function, None)
    if not callable(value):
        callables = [
            key for key, var in vars(module).items() if callable(var) and not key.startswith("_")
        ]
        raise UserError(
            f"'{name}': '{path}' has no function '{function}'{nearest(function, callables)}"
        )
    return value, paths


def call(name: str, what_for: str, *args: Any, **options: Any) -> Any:
    """Return what the function of a name returns. Raises UserError naming the line where
    it fails.
    """
    return _call(_loaded(name, what_for), name, args, options)


def call_apart(name: str, what_for: str, options: dict[str, Any]) -> Any:
    """Do as `call`, with the module loaded a second time: it shares no globals and no classes with
    the first.
    """
    return _call(_loaded(name, what_for, twin=True), name, (), options)


def _call(
    loaded: tuple[Callable[..., Any], list[Path]],
    name: str,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    function, paths = loaded
    try:
        with guarded(name), _watched(name, paths):
            return function(*args, **options)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # it may raise anything, and exit
        raise UserError(
            f"'{name}' failed{_where(error, locate(name)[0])}: {reason(error)}"
        ) from None


_opened: set[str] | None = None  # files that own code has read, while it is watched


def _note(event: str, args: tuple[Any, ...]) -> None:
    if _opened is None or event != "open" or not isinstance(args[0], str):
        return
    if not isinstance(args[1], str) or not set(args[1]) & set("wax+"):
        _opened.add(args[0])


@cache
def _hooked() -> None:
    sys.addaudithook(_note)  # it cannot be taken away again


@contextmanager
def _watched(name: str, paths: Sequence[Path]) -> Iterator[None]:
    """Say which text files of the project own code has read that its hash leaves out."""
    global _opened
    _hooked()
    before, _opened = _opened, set()
    try:
        yield
    finally:
        read, _opened = _opened, before
    home = paths[0].parent
    for path in sorted(Path(file).resolve() for file in read):
        if path.suffix not in TEXTS or path in paths or not path.is_relative_to(home):
            continue
        if path.is_file() and not any(map(path.is_relative_to, _installed())):
            notice(
                f"'{name}' read '{path.relative_to(home)}', which is no part of what the run is "
                "known by: name it in a string, and a change of it is another run"
            )


@contextmanager
def guarded(name: str) -> Iterator[None]:
    """While a user's own code runs: what it prints goes to stderr, and it cannot end the
    process.
    """
    with redirect_stdout(sys.stderr), no_exit(name):
        yield


@contextmanager
def no_exit(name: str) -> Iterator[None]:
    """While entered, os._exit raises, by any name: a process that a user's own code ends would
    leave neither a row nor a word.
    """
    system: Any = sys.modules[os.name if os.name in sys.modules else "os"]  # posix, nt
    before, owner = os._exit, os.getpid()

    def refused(code: int) -> NoReturn:
        if os.getpid() != owner:  # a child that it has forked may end
            before(code)
        raise RuntimeError(f"os._exit({code}) was called by '{name}'")

    os._exit = system._exit = refused
    try:
        yield
    finally:
        os._exit = system._exit = before


def _where(error: BaseException, path: Path) -> str:
    """ ", line 7" of the file, where an exception passed through it."""
    lines = [
        frame.lineno
        for frame in extract_tb(error.__traceback__)
        if Path(frame.filename) == path.resolve()
    ]
    return f" in line {lines[-1]}" if lines else ""


@cache
def _twin(path: Path, digest: str, imported: tuple[Path, ...]) -> Any:
    """The module loaded a second time, with modules of its project of its own."""
    first = _module(path, digest, imported)
    shared = _without(imported)
    try:
        return _executed(path, digest, imported)
    except UserError as error:  # a module may register what can be registered once only
        notice(f"{error}; this was its second import, for what receives, which shares the first")
        return first
    finally:
        _without(imported)
        sys.modules.update(shared)


@cache
def _module(path: Path, digest: str, imported: tuple[Path, ...]) -> Any:
    _without(imported)  # what it imports may have changed since it was imported last
    return _executed(path, digest, imported)


def _without(files: tuple[Path, ...]) -> dict[str, Any]:
    """Forget the imported modules of these files, and return them by name."""
    forgotten = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve() in files:
            forgotten[name] = sys.modules.pop(name)
    return forgotten


def _executed(path: Path, digest: str, imported: tuple[Path, ...]) -> Any:
    spec = spec_from_file_location(f"{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    for file in (path, *imported):
        # Python compares whole seconds and sizes: two edits of one second would run as the first.
        with suppress(OSError):
            Path(cache_from_source(str(file))).unlink(missing_ok=True)
    try:
        with guarded(str(path)), _watched(str(path), (path, *imported)):
            spec.loader.exec_module(module)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserError(f"'{path}' could not be imported ({reason(error)})") from None
    return module

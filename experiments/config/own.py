"""Functions of a user's own that a Run or a sweep names: "package.module:function", or "file.py:function".

A Run records the name and a hash of the file, so that a changed file is another run. Files are looked for in the
working folder first. No torch here, and nothing is imported before it is called for.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from typing import Any

from commsweep.experiments.errors import UserError, nearest


def locate(name: str) -> tuple[Path, str]:
    """(file, function) of a name. Raises UserError when there is no such file."""
    module, colon, function = name.partition(":")
    if not colon or not module or not function.isidentifier():
        raise UserError(f"'{name}' names no function: write module:function or file.py:function")
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise UserError(f"'{name}': there is no file '{module}' in '{Path.cwd()}'")
        return path, function
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = find_spec(module)
    except (ImportError, ValueError) as error:
        raise UserError(f"'{name}': module '{module}' could not be found ({error})") from None
    if found is None or not found.origin or not found.origin.endswith(".py"):
        raise UserError(f"'{name}': there is no module '{module}'; start in its folder, or name its file: file.py:"
                        f"{function}")
    return Path(found.origin), function


def source(name: str) -> str:
    """First 12 hexadecimal digits of SHA-256 over the file that a name means."""
    return hashlib.sha256(locate(name)[0].read_bytes()).hexdigest()[:12]


def load(name: str, wanted: str = "") -> Callable[..., Any]:
    """The function of a name. Raises UserError when its file cannot be imported, has no such function, or is not the
    one of hash `wanted`."""
    path, function = locate(name)
    is_now = source(name)
    if wanted and wanted != is_now:
        raise UserError(f"'{name}': its file has changed since the run was made (source {wanted}, now {is_now}); bring "
                        "the old one back, or make a new run")
    module = _module(path.resolve(), is_now)
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, one in vars(module).items() if callable(one) and not key.startswith("_")]
        raise UserError(f"'{name}': '{path}' has no function '{function}'{nearest(function, known)}")
    return found


def call(name: str, wanted: str, *args: Any, **options: Any) -> Any:
    """What the function of a name returns. Raises UserError naming the line where it fails."""
    function = load(name, wanted)
    try:
        return function(*args, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"'{name}' failed{_where(error, locate(name)[0])}: {_first(error)}") from None


def _where(error: BaseException, path: Path) -> str:
    """", line 7" of the file, where an exception passed through it."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    return f" in line {lines[-1]}" if lines else ""


def _first(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@cache
def _module(path: Path, digest: str) -> Any:
    spec = spec_from_file_location(f"{path.stem}_{digest}", path)
    module = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"'{path}' could not be imported ({_first(error)})") from None
    return module

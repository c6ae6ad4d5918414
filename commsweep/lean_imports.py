"""Loads the libraries of commands that train, and leaves them, in half of the time.

Two things cost more than what is needed. Python's collector looks through all objects again and
again while modules are loaded. And torchmetrics, of which Lightning uses two classes, loads
torchvision, scipy and transformers for metrics that nothing here asks for, and matplotlib for
drawings of metrics.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

METRICS = "torchmetrics"


def leaving(work: Callable[[], int]) -> int:
    """Return its exit code. When the process ends with it, loaded modules are not taken apart,
    which would take a second; an exception ends it as always.
    """
    code = 0
    returned = False

    def leave() -> None:  # registered first, so after all else that is to happen at the end
        if not returned:
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # nobody reads any more
            os._exit(code or 1)
        os._exit(code)

    atexit.register(leave)
    code = work()
    returned = True
    return code


class Partly(ModuleType):
    """A package whose own file runs at the first attribute that was not put here by hand."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(name)
        # from now on it is the package as anybody imports it
        self.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around imports: no collection meanwhile, nothing collected of what they made, and of
    torchmetrics the two classes that Lightning uses. Does nothing where they are loaded already.
    """
    if METRICS in sys.modules:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        _metrics()
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extensions complain of what is left at the end
        if collects:
            gc.enable()


def _metrics() -> None:
    """Load torchmetrics' classes without the package's own file; the whole package where a version
    is laid out otherwise.
    """
    spec = importlib.util.find_spec(METRICS)
    if spec is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = Partly
    package.__dict__["_logger"] = logging.getLogger(METRICS)  # what its modules ask of the package
    sys.modules[METRICS] = package
    try:
        _without_drawings(spec.submodule_search_locations)
        importlib.import_module(f"{METRICS}.utilities")  # first: the others lean on it in a circle
        for module_name, name in (("metric", "Metric"), ("collections", "MetricCollection")):
            package.__dict__[name] = getattr(
                importlib.import_module(f"{METRICS}.{module_name}"), name
            )
    except (ImportError, AttributeError, OSError):
        for name in [name for name in sys.modules if name.split(".")[0] == METRICS]:
            del sys.modules[name]


def _without_drawings(folders: list[str] | None) -> None:
    """Have torchmetrics find no matplotlib, by its file that says what is installed."""
    name = f"{METRICS}.utilities.imports"
    file = os.path.join((folders or [""])[0], "utilities", "imports.py")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    installed = importlib.util.module_from_spec(spec)
    sys.modules[name] = installed
    spec.loader.exec_module(installed)
    installed.__dict__["_MATPLOTLIB_AVAILABLE"] = False

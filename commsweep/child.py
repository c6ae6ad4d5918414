"""Processes that end with the one that started them, so that none computes for nobody. No torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress

PARENT = "COMMSWEEP_PARENT"  # in the environment: the process that a server of workers ends with


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent dies, so that none is left
    behind.
    """
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(1, number)


def begin_server() -> None:
    """To be called before a server of workers is started. The kernel sends its signal when the
    thread ends that started a process, so only servers of the main thread end with this process.
    """
    is_main = threading.current_thread() is threading.main_thread()
    os.environ[PARENT] = str(os.getpid()) if is_main else ""


def end_with_launcher() -> None:
    """In a server of workers: end with the process that has called `begin_server`."""
    parent = os.environ.get(PARENT, "")
    if not parent.isdigit():
        return
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):  # it has ended already
        sys.exit()

"""A cache of flattened rows beside the run folders, never trusted over them.

`.index.jsonl` holds, for each recorded outcome, when its file was last changed, its size, a
checksum, and the row. A row is taken from here only if all still agree; everything else is read
again from its folder. Deleting the file, or damaging it, changes nothing but the time of the next
load.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from zlib import crc32

from commsweep.store import Store

NAME = ".index.jsonl"


def read(store: Store, flat: Callable[[Any], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`flat(row)` of every recorded outcome by id, in order of ids. Raises UserError naming a
    damaged folder.
    """
    version = _version(flat)
    stamps = store.stamps()
    entries = _entries(store, version)
    out: dict[str, dict[str, Any]] = {}
    fresh = False
    for name in sorted(stamps):
        entry = entries.get(name)
        if entry is not None and tuple(entry[0]) == stamps[name]:
            out[name] = entry[1]
            continue
        row = store.read(name)
        if row is not None:
            out[name] = json.loads(json.dumps(flat(row)))  # as it will come out of the cache
            fresh = True
    if fresh or len(entries) != len(out):
        _write(store, version, stamps, out)
    return out


def _entries(store: Store, version: str) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    with (
        suppress(OSError, ValueError, KeyError, TypeError),
        open(store.root / NAME, encoding="utf-8") as lines,
    ):
        if json.loads(next(lines, "null")) != version:
            return {}
        for line in lines:
            name, stamp, check, text = json.loads(line)
            if crc32(f"{name}{stamp}{text}".encode()) == check:
                entries[name] = [stamp, json.loads(text)]
    return entries


def _write(
    store: Store, version: str, stamps: dict[str, tuple[int, int]], rows: dict[str, dict[str, Any]]
) -> None:
    partial = store.root / f"{NAME}.{os.getpid()}"
    with suppress(OSError):  # a store that cannot be written is read without a cache
        try:
            with open(partial, "w", encoding="utf-8") as out:
                out.write(json.dumps(version) + "\n")
                for name, row in rows.items():
                    text, stamp = json.dumps(row), list(stamps[name])
                    out.write(
                        json.dumps([name, stamp, crc32(f"{name}{stamp}{text}".encode()), text])
                        + "\n"
                    )
            os.replace(partial, store.root / NAME)
        finally:
            partial.unlink(missing_ok=True)


def _version(flat: Callable[[Any], dict[str, Any]]) -> str:
    """Changes with the code that makes the rows, so that a newer program does not read an older
    one's.
    """
    return hashlib.sha256(inspect.getsource(inspect.getmodule(flat)).encode()).hexdigest()[:16]  # type: ignore[arg-type]

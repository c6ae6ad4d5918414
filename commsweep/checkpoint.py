"""Checkpoints that say themselves whether they are whole: the name of each ends with a digest of
its bytes.

    last.<step>.<digest>.ckpt          what to continue from; the last two are kept
    <cut>.<side>.buffer.<step>.<digest>   the copy of a memory-mapped feedback memory that goes with
    it

A file is written beside its place, flushed to disk and renamed, so a kill leaves the older ones as
they were.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

KEPT = 2  # the newest, and one to fall back on


RARELY = 20  # times as long as a checkpoint takes passes at least before the next


class Pace:
    """When the next checkpoint is due: after `seconds` seconds, later where taking them would slow
    the training down; always, if that is 0.
    """

    def __init__(self, seconds: float) -> None:
        self.every, self.last, self.took = seconds, time.monotonic(), 0.0

    def due(self) -> bool:
        """Return whether it is time for the next."""
        return not self.every or time.monotonic() - self.last >= max(self.every, RARELY * self.took)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Around taking one."""
        began = time.monotonic()
        yield
        self.last = time.monotonic()
        self.took = self.last - began


def save(state: Any, folder: Path, name: str, step: int) -> Path:
    """Write a checkpoint, whole or not at all, and remove those that are no longer needed."""
    partial = folder / f".{name}.part"
    with open(partial, "wb") as raw:
        hashing = _Hashing(raw)
        torch.save(state, hashing)  # pyright: ignore[reportArgumentType]
        raw.flush()
        os.fsync(raw.fileno())
    path = folder / f"{name}.{step}.{hashing.digest()}.ckpt"
    os.replace(partial, path)
    flush_folder(folder)
    for _, old in saved(folder, name)[KEPT:]:
        old.unlink()
    return path


def saved(folder: Path, name: str) -> list[tuple[int, Path]]:
    """(step, file) of the checkpoints of this name, newest first; whether they are whole is another
    question.
    """
    numbered = [
        (int(pieces[-3]), path)
        for path in folder.glob(f"{name}.*.ckpt")
        if len(pieces := path.name.split(".")) >= 4 and pieces[-3].isdecimal()
    ]
    return sorted(numbered, key=lambda entry: (-entry[0], entry[1].name))


def is_whole(path: Path) -> bool:
    """Return whether a file has the bytes that its name promises."""
    expected = path.name.removesuffix(".ckpt").rsplit(".", 1)[-1]
    try:
        with open(path, "rb") as handle:
            return digest(handle) == expected
    except OSError:
        return False


def newest(folder: Path, name: str, copies: Iterable[Path] = ()) -> tuple[Path | None, list[str]]:
    """(the newest whole checkpoint, a line about each damaged one). `copies`: files that need a
    whole copy, too.
    """
    reasons = []
    for step, path in saved(folder, name):
        if is_whole(path) and all(
            any(map(is_whole, copy.parent.glob(f"{copy.name}.{step}.*"))) for copy in copies
        ):
            return path, reasons
        reasons.append(
            f"checkpoint '{path.name}' (or what goes with it) is damaged: going on from an "
            "older one, or from the beginning"
        )
    return None, reasons


def digest(handle: BinaryIO) -> str:
    """Return the digest of an open file's bytes, 16 hexadecimal digits."""
    return hashlib.file_digest(handle, "sha256").hexdigest()[:16]  # pyright: ignore[reportArgumentType]


def flush_folder(folder: Path) -> None:
    """Make a rename in this folder outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class CheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoints in this form; its path is FOLDER/NAME.STEP."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Do what `save` does."""
        name, _, step = Path(path).name.rpartition(".")
        save(checkpoint, Path(path).parent, name, int(step))


class _Hashing:
    """A file being written, whose bytes are hashed on the way."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw, self.hash = raw, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self.raw.write(data)

    def flush(self) -> None:
        self.raw.flush()

    def digest(self) -> str:
        return self.hash.hexdigest()[:16]

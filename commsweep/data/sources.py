"""Finds the files that a named set of texts or images is read from. No torch here: what is missing
is said at once.

A folder of texts is split by the usual names (train; valid, val, validation, dev; test), in any
case, as a file, a part of a file's name, or a folder; or, where no name says anything, each file is
cut 90, 5, 5 %. A mixture is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from commsweep.errors import UserError, notice

SPLITS = ("train", "validation", "test")
NAMES = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "val": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
SUFFIXES = (".txt", ".md", ".raw", ".tokens")
SKIPPED = re.compile(r"\.ipynb_checkpoints|__pycache__|^\.")
CIFAR_FOLDER = "cifar-10-batches-py"
Files = dict[str, list[Path]]  # by split


def split_of(path: Path, root: Path) -> str | None:
    """The split that a file's own name says, or else the nearest folder's below root; None where
    none does. Raises UserError where a name says two.
    """
    names = path.relative_to(root).parts
    for name in (path.stem, *reversed(names[:-1])):
        words = [word for word in re.split(r"[^a-z]+", name.lower()) if word]
        splits = {NAMES[word] for word in words if word in NAMES}
        if len(splits) > 1:
            raise UserError(
                f"data: '{path}' is named after two splits, {' and '.join(sorted(splits))}; "
                "rename it"
            )
        if splits:
            return splits.pop()
    return None


def text_files(root: Path | None) -> Files:
    """The files of a folder of texts by split; all of them under "" where they are cut instead.
    What went where is said on stderr. Raises UserError where there is none, or where names and cuts
    would mix.
    """
    if root is None:
        raise UserError("data.name=text: name the folder of text files with --data-root")
    paths = sorted(
        path
        for path in root.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and not any(SKIPPED.search(name) for name in path.relative_to(root).parts)
    )
    if not any(_has_text(path) for path in paths):
        looked = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise UserError(f"data.name=text: '{root}' holds no text (looked for {looked})")
    by_split: Files = {}
    for path in paths:
        by_split.setdefault(split_of(path, root) or "", []).append(path)
    if set(by_split) == {""}:
        notice(
            f"data.name=text: {_summary(by_split[''], root)} in '{root}', each cut into 90 % "
            "training, 5 % validation and 5 % test text (files or folders called train, valid "
            "and test are taken as they are)"
        )
        return by_split
    missing = [split for split in SPLITS if split not in by_split]
    unnamed = by_split.pop("", [])
    if missing or unnamed:
        summary = "; ".join(
            f"{split}: {_summary(files, root)}" for split, files in by_split.items()
        )
        wrong = (
            f"no {' and no '.join(missing)} text"
            if missing
            else f"{_summary(unnamed, root)} belongs to none"
        )
        raise UserError(
            f"data.name=text: '{root}' is split by name ({summary}), and {wrong}; name a file or "
            "folder train, valid and test, or none of them"
        )
    notice(
        "data.name=text: "
        + "; ".join(f"{split} {_summary(by_split[split], root)}" for split in SPLITS)
    )
    return by_split


def _has_text(path: Path) -> bool:
    with open(path, "rb") as handle:
        return any(chunk.strip() for chunk in iter(lambda: handle.read(1 << 16), b""))


def _summary(files: list[Path], root: Path) -> str:
    names = [str(path.relative_to(root)) for path in files]
    return (
        ", ".join(names)
        if len(names) <= 3
        else f"{', '.join(names[:2])} and {len(names) - 2} more files"
    )


def wikitext_files(name: str, root: Path, splits: tuple[str, ...] = SPLITS) -> Files:
    """The files of WikiText-2 by split. Raises UserError naming those that are not there."""
    config = "wikitext-2-raw-v1" if name == "wikitext2-raw" else "wikitext-2-v1"
    folder = root / config if (root / config).is_dir() else root
    suffix = "raw" if name == "wikitext2-raw" else "tokens"
    by_split: Files = {}
    for split in splits:
        text = folder / f"wiki.{'valid' if split == 'validation' else split}.{suffix}"
        files = [text] if text.exists() else shards(folder, split)
        if files:
            by_split[split] = files
    if lost := [split for split in splits if split not in by_split]:
        raise UserError(
            f"data.name={name}: '{folder}' has no {' and no '.join(lost)} text (looked for "
            f"wiki.train|valid|test.{suffix} and train|validation|test*.parquet)"
        )
    return by_split


def cifar_files(root: Path) -> Files | None:
    """The Parquet files of one CIFAR-10 by split, in `root` or one folder down; None where there
    are none. Raises UserError where several folders hold some, or one holds half a set.
    """
    folders = (
        [root, *sorted(path for path in root.glob("*") if path.is_dir())] if root.is_dir() else []
    )
    candidates = [
        (folder, files)
        for folder in folders
        if any((files := {split: shards(folder, split) for split in ("train", "test")}).values())
    ]
    if not candidates:
        return None
    if len(candidates) > 1 and candidates[0][0] != root:
        names = ", ".join(f"'{folder}'" for folder, _ in candidates)
        raise UserError(
            f"data: several folders hold Parquet files ({names}); name one with --data-root"
        )
    folder, files = candidates[0]
    if lost := [split for split, paths in files.items() if not paths]:
        if (root / CIFAR_FOLDER).is_dir():  # another set's files lie beside it
            return None
        raise UserError(
            f"data: '{folder}' has no {' and no '.join(lost)}*.parquet beside "
            f"{next(paths[0].name for paths in files.values() if paths)}"
        )
    return files


def shards(folder: Path, split: str) -> list[Path]:
    """A split's Parquet files in a folder, in order. Raises UserError when a numbered one is
    missing.
    """
    files = sorted(
        path for path in folder.glob("*.parquet") if re.match(rf"{split}(?![a-z])", path.name, re.I)
    )
    numbered = [
        (int(match[1]), int(match[2]))
        for path in files
        if (match := re.search(r"-(\d+)-of-(\d+)\.parquet$", path.name))
    ]
    if numbered:
        expected = {(index, numbered[0][1]) for index in range(numbered[0][1])}
        if set(numbered) != expected or len(numbered) != len(files):
            raise UserError(
                f"data: '{folder}' has {len(files)} Parquet files of {split}, and their names "
                f"promise shards 0 to {numbered[0][1] - 1}; some are missing, or of another set"
            )
    return files


def check(name: str, root: Path | None) -> None:
    """Raise UserError when the files of a set are not there. Sets that may be fetched are not
    looked for.
    """
    if name == "text":
        text_files(root)
    elif name == "wikitext2-valid" and root is not None:
        wikitext_files("wikitext2-raw", root, SPLITS[1:])
    elif name in ("wikitext2", "wikitext2-raw") and root is not None:
        wikitext_files(name, root)
    elif name == "cifar10-jpeg" and cifar_files(root or Path("data")) is None:
        raise UserError(
            "data.name=cifar10-jpeg: no train and test Parquet files in "
            f"'{root or Path('data')}'; name their folder with --data-root"
        )

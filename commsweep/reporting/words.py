"""Settings in words, for figures and pages: "new augmentation" for `data fixed_augment False`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

Entry = TypeVar("Entry")

# What the name of a setting reads as, where it tells two rows apart.
WORDS = (
    (r"data fixed_augment False", "new augmentation"),
    (r"data fixed_augment True", "fixed augmentation"),
    (r"data batch_size (\d+)", r"batch \1"),
    (r"data train_blocks (\d+)", r"\1 blocks"),
    (r"(?:fwd|bwd) group (\d+)", r"groups of \1"),
    (r"(?:fwd|bwd) scaled True", "scaled"),
    (r"(?:fwd|bwd) scaled False", "unscaled"),
    (r"optim lr ([\d.e-]+)", r"rate \1"),
    (r"optim adamw", "AdamW"),
    (r"optim sgd", "SGD"),
    (r"optim muon", "Muon"),
    (r"model (\w+)", r"\1"),
    (r"epochs (\d+)", r"\1 epochs"),
    (r"(?:model )?tied False", "untied head"),
)


def legible(label: str) -> str:
    """Return a setting's name for a legend: in words; "dense" where it begins with learners."""
    text = in_words(label)
    if re.match(r"\d+ (learners|steps? late)", text):
        return f"dense, {text}"
    return text


def in_words(label: str) -> str:
    """A label as `commsweep` records it, with its settings in words."""
    for pattern, text in WORDS:
        label = re.sub(rf"\b{pattern}\b", text, label)
    return label.replace(" (otherwise)", "")


def without_empty(
    header: Sequence[str], rows: Sequence[Sequence[Entry]]
) -> tuple[list[str], list[list[Entry]]]:
    """Return (header, rows) without the columns in which no row says anything ("" or "-")."""
    filled = [
        column
        for column in range(len(header))
        if not rows or any(row[column] not in ("", "-") for row in rows)
    ]
    return [header[column] for column in filled], [
        [row[column] for column in filled] for row in rows
    ]


LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def latex(text: str) -> str:
    """A text with what LaTeX would take for commands written out."""
    return "".join(LATEX.get(letter, letter) for letter in text)

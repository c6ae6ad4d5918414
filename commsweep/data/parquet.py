"""Parquet files in the hub's layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def read(path: Path) -> Dataset:
    """The rows of a local file, without the progress bar that `datasets` draws for it."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_parquet(str(path), keep_in_memory=True)
    finally:
        if shown:
            datasets.enable_progress_bars()

"""Samples as tensors on the device; every sample carries its index."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from commsweep.config import Run
from commsweep.config.training import ImageSet, OwnSet, TextModel
from commsweep.data import images, text
from commsweep.data.module import Batches, Blocks, ImageData

__all__ = ["Batches", "Blocks", "ImageData", "build", "forget"]


def build(
    run: Run, root: Path | None, models: Path | None, device: torch.device
) -> ImageData | Blocks:
    """A run's data on the device; a worker reads each set once. Raises UserError when it cannot be
    had.
    """
    if isinstance(run.data, OwnSet):
        return ImageData(run.data, _own_data(run.data, root), run.seed, device)  # pyright: ignore[reportArgumentType]
    if isinstance(run.data, ImageSet):
        return ImageData(run.data, _images(run.data.name, root), run.seed, device)
    assert isinstance(run.model, TextModel)
    corpus = _corpus(run.data.name, run.data.tokenizer, root, models, run.model.weights)
    return Blocks(run.data, corpus, run.seed, device)


def forget() -> None:
    """Read every set anew when it is asked for next: its files have changed."""
    for cached in (_own_data, _images, _corpus):
        cached.cache_clear()


@cache
def _own_data(spec: OwnSet, root: Path | None) -> images.Images:
    return images.load_own(spec, root)


@cache
def _images(name: str, root: Path | None) -> images.Images:
    return images.load(name, root)


@cache
def _corpus(
    name: str, tokenizer: str, root: Path | None, models: Path | None, weights: str
) -> text.Corpus:
    return text.load(name, tokenizer, root, models, weights)

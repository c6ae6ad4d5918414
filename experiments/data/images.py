"""The image sets a Run can name, as whole tensors."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from commsweep.experiments import seeds
from commsweep.experiments.config import OwnSet, own
from commsweep.experiments.data import parquet
from commsweep.experiments.errors import UserError

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # as the authors normalise
CLASSES = 10


@dataclass(frozen=True)
class Images:
    """Training and test images, normalised float32 [n, channels, side, side], and labels int64 [n]."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int = CLASSES
    source: str = ""  # hash of the file that a user's own samples came from

    @property
    def channels(self) -> int:
        return self.train_x.shape[1]


def load_own(spec: OwnSet, root: Path | None) -> Images:
    """A user's own samples. Raises UserError when the function does not return what it should."""
    made = own.call(spec.load, spec.source, root)
    if not isinstance(made, (tuple, list)) or len(made) != 4:
        parts = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise UserError(f"data.load={spec.load} returned {type(made).__name__}{parts}; a tuple of training samples, "
                        "training labels, test samples and test labels is wanted")
    x, y, test_x, test_y = (part if isinstance(part, Tensor) else torch.as_tensor(np.asarray(part)) for part in made)
    for what, samples, labels in (("training", x, y), ("test", test_x, test_y)):
        if len(samples) != len(labels) or not len(labels):
            raise UserError(f"data.load={spec.load}: {len(samples)} {what} samples and {len(labels)} labels")
        if labels.is_floating_point() or int(labels.min()) < 0:
            raise UserError(f"data.load={spec.load}: {what} labels must be whole numbers from 0 on")
    return Images(spec.load, x.float(), y.long(), test_x.float(), test_y.long(),
                  int(max(y.max(), test_y.max())) + 1, own.source(spec.load))


def load(name: str, root: Path | None = None) -> Images:
    """The set of this name; `root` is where CIFAR-10 lies or is downloaded to.

    Raises UserError when files are missing, damaged, or not what the name promises.
    """
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic()
    return _cifar(name, root)


def _digits() -> Images:
    """scikit-learn's 1,797 images of 8x8; every fifth of a fixed shuffle (360) is the test set."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    order = np.random.default_rng(seeds.FIXED).permutation(len(raw.target))
    x = torch.from_numpy(raw.images[order]).float().unsqueeze(1)
    y = torch.from_numpy(raw.target[order]).long()
    test = torch.arange(len(y)) % 5 == 0
    mean, std = x[~test].mean(), x[~test].std()
    x = (x - mean) / std
    return Images("digits", x[~test], y[~test], x[test], y[test])


def _synthetic() -> Images:
    """The tests' twin: 160 + 40 noisy pictures of ten fixed patterns, the digits' shape."""
    generator = torch.Generator().manual_seed(seeds.FIXED)
    patterns = torch.randn(CLASSES, 1, 8, 8, generator=generator)
    y = torch.arange(200) % CLASSES
    x = patterns[y] + 0.5 * torch.randn(200, 1, 8, 8, generator=generator)
    return Images("synthetic", x[:160], y[:160], x[160:], y[160:])


def _cifar(name: str, root: Path | None) -> Images:
    root = root or Path("data")
    files = [_parquet(root, split) for split in ("train", "test")]
    if all(files):
        splits = [_from_parquet(path, name) for path in files]
    elif name == "cifar10-jpeg":
        raise UserError(f"data.name=cifar10-jpeg: no train and test Parquet files in '{root}'; "
                        "name their folder with --data-root")
    else:
        splits = [_from_torchvision(root, train) for train in (True, False)]
    (train_x, train_y), (test_x, test_y) = splits
    return Images(name, _normalise(train_x), train_y, _normalise(test_x), test_y)


def _parquet(root: Path, split: str) -> Path | None:
    """train.parquet, or the hub's layout: train-00000-of-00001.parquet, maybe one or two folders down."""
    found = sorted(root.glob(f"{split}*.parquet")) or sorted(root.glob(f"*/{split}*.parquet"))
    return found[0] if found else None


def _from_parquet(path: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images and labels of one Parquet file of the hub's CIFAR-10 (columns `img` with encoded bytes, `label`)."""
    from PIL import Image

    try:
        table = parquet.read(path)
        encoded = [row["bytes"] for row in table.data.column("img").to_pylist()]
        labels = table.data.column("label").to_pylist()
        jpeg = encoded[0][:2] == b"\xff\xd8"
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in encoded])
    except Exception as error:
        raise UserError(f"data: '{path}' is not a readable CIFAR-10 Parquet file with columns img and label "
                        f"({type(error).__name__}: {str(error).splitlines()[0][:120]})") from None
    if jpeg != (name == "cifar10-jpeg"):
        kind, right = ("JPEG re-encoded", "cifar10-jpeg") if jpeg else ("exact", "cifar10")
        raise UserError(f"data.name={name}: the images in '{path}' are {kind}; set data.name={right}")
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def _from_torchvision(root: Path, train: bool) -> tuple[Tensor, Tensor]:
    from torchvision.datasets import CIFAR10

    try:
        raw = CIFAR10(str(root), train=train, download=True)
    except Exception as error:
        raise UserError(f"data.name=cifar10: not found or damaged in '{root}' and not downloadable here "
                        f"({type(error).__name__}); name a folder that holds cifar-10-batches-py or the hub's "
                        "Parquet files with --data-root") from None
    return torch.from_numpy(raw.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(raw.targets)


def _normalise(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
    return pixels.float().div_(255).sub_(mean).div_(std)

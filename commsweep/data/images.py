"""The image sets a Run can name, as whole tensors."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commsweep import seeds
from commsweep.config import own
from commsweep.config.training import OwnSet
from commsweep.data import parquet, sources
from commsweep.errors import UserError, reason

CIFAR_MEAN, CIFAR_STD = (
    (0.4914, 0.4822, 0.4465),
    (0.2023, 0.1994, 0.2010),
)  # as the authors normalise
CLASSES = 10


@dataclass(frozen=True)
class Images:
    """Training and test images, normalised float32 [n, channels, side, side], and labels int64
    [n].
    """

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

    @cached_property
    def digest(self) -> str:
        """Stands for all samples and labels."""
        sha = hashlib.sha256()
        for tensor in (self.train_x, self.train_y, self.test_x, self.test_y):
            sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return sha.hexdigest()[:12]


def load_own(spec: OwnSet, root: Path | None) -> Images:
    """A user's own samples. Raises UserError when the function does not return what it should."""
    loaded = own.call(spec.load, spec.source, root)
    if not isinstance(loaded, (tuple, list)) or len(loaded) != 4:
        count = f" of {len(loaded)}" if isinstance(loaded, (tuple, list)) else ""
        raise UserError(
            f"data.load={spec.load} returned {type(loaded).__name__}{count}; a tuple of training "
            "samples, training labels, test samples and test labels is wanted"
        )
    count = []
    for label, samples, labels in (
        ("training", loaded[0], loaded[1]),
        ("test", loaded[2], loaded[3]),
    ):
        try:
            x, y = _samples(samples), _labels(labels)
        except ValueError as error:
            raise UserError(f"data.load={spec.load}: {label} {error}") from None
        if len(x) != len(y) or not len(y):
            raise UserError(f"data.load={spec.load}: {len(x)} {label} samples and {len(y)} labels")
        count += [x, y]
    x, y, test_x, test_y = count
    if x.shape[1:] != test_x.shape[1:]:
        raise UserError(
            f"data.load={spec.load}: training samples of shape {tuple(x.shape[1:])} and test "
            f"samples of shape {tuple(test_x.shape[1:])}; all must have the same"
        )
    return Images(
        spec.load, x, y, test_x, test_y, int(max(y.max(), test_y.max())) + 1, own.source(spec.load)
    )


def _tensor(array_like: Any, label: str) -> Tensor:
    """A tensor or array of numbers; raises ValueError, saying what of them it is not."""
    if not isinstance(array_like, Tensor):
        try:
            array = np.asarray(array_like)
        except ValueError:  # numpy's own message is of array internals
            raise ValueError(
                f"{label} are lists of different lengths; give them one shape"
            ) from None
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"{label} are of type {array.dtype}; numbers are wanted"
                + (", real and imaginary parts as two features" if array.dtype.kind == "c" else "")
            )
        # torch computes with none of these
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:
            if array.size and int(array.max()) > np.iinfo(np.int64).max:
                raise ValueError(f"{label} hold {array.max()}, which no 64-bit integer holds")
            array = array.astype(np.int64)
        array_like = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))
    if array_like.layout != torch.strided:
        raise ValueError(f"{label} are a sparse tensor; call to_dense() on it")
    if array_like.is_complex():
        raise ValueError(f"{label} are complex; give real and imaginary parts as two features")
    if not array_like.dim():
        raise ValueError(f"{label} are one number; a first dimension of samples is wanted")
    return array_like.detach()


def _samples(array_like: Any) -> Tensor:
    """float32 [n, ...]; raises ValueError."""
    x = _tensor(array_like, "samples").float()
    finite = x.reshape(len(x), -1).isfinite().all(1)
    if not bool(finite.all()):
        raise ValueError(
            f"samples are not all finite: {int((~finite).sum())} of {len(x)} hold NaN or "
            f"infinity, the first of them is sample {int(finite.logical_not().nonzero()[0])}"
        )
    return x


def _labels(array_like: Any) -> Tensor:
    """int64 [n], also of a column [n, 1]; raises ValueError."""
    y = _tensor(array_like, "labels")
    if y.is_floating_point():
        raise ValueError(
            "labels must be whole numbers from 0 on; they are of a floating-point type"
        )
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dim() != 1:
        raise ValueError(
            f"labels have the shape {tuple(y.shape)}; one whole number a sample is wanted (of "
            "one-hot rows: labels.argmax(1))"
        )
    y = y.long()
    if len(y) and int(y.min()) < 0:
        raise ValueError(f"labels must be whole numbers from 0 on; the least is {int(y.min())}")
    return y


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
    # the file alone: the package would load a thousand modules
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError("data.name=digits lies in scikit-learn: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    raw = np.loadtxt(file, delimiter=",")  # 64 pixels and a label a line
    order = np.random.default_rng(seeds.FIXED).permutation(len(raw))
    x = torch.from_numpy(raw[order, :-1].reshape(-1, 1, 8, 8)).float()
    y = torch.from_numpy(raw[order, -1]).long()
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
    files = sources.cifar_files(root)
    if files is not None:
        splits = [_from_parquet(files[split], name) for split in ("train", "test")]
    elif name == "cifar10-jpeg":
        raise UserError(
            f"data.name=cifar10-jpeg: no train and test Parquet files in '{root}'; name their "
            "folder with --data-root"
        )
    else:
        splits = [_from_torchvision(root, train) for train in (True, False)]
    (train_x, train_y), (test_x, test_y) = splits
    return Images(name, _normalise(train_x), train_y, _normalise(test_x), test_y)


def _from_parquet(paths: list[Path], name: str) -> tuple[Tensor, Tensor]:
    """Images and labels of the Parquet files of a split of the hub's CIFAR-10 (columns `img` with
    encoded bytes, `label`).
    """
    shards = [_shard(path, name) for path in paths]
    return torch.cat([x for x, _ in shards]), torch.cat([y for _, y in shards])


def _shard(path: Path, name: str) -> tuple[Tensor, Tensor]:
    from PIL import Image

    try:
        table = parquet.read(path)
        encoded = [row["bytes"] for row in table.data.column("img").to_pylist()]
        labels = table.data.column("label").to_pylist()
        pixels = np.stack(
            [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in encoded]
        )
    except Exception as error:
        raise UserError(
            f"data: '{path}' is not a readable CIFAR-10 Parquet file with columns img and label "
            f"({reason(error)[:120]})"
        ) from None
    for row, label in enumerate(labels):
        if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < CLASSES:
            raise UserError(
                f"data: '{path}', row {row}: label {label!r} is none of 0 to {CLASSES - 1}"
            )
    if pixels.shape[1:] != (32, 32, 3):
        raise UserError(
            f"data: '{path}': images of {pixels.shape[1]} x {pixels.shape[2]} pixels; "
            "CIFAR-10's are 32 x 32"
        )
    jpeg = [image[:2] == b"\xff\xd8" for image in encoded]
    if any(jpeg) != all(jpeg):
        raise UserError(
            f"data: '{path}' mixes JPEG images with exact ones (first: row "
            f"{jpeg.index(not jpeg[0])}); use a set of one kind"
        )
    if jpeg[0] != (name == "cifar10-jpeg"):
        kind, right = ("JPEG re-encoded", "cifar10-jpeg") if jpeg[0] else ("exact", "cifar10")
        raise UserError(
            f"data.name={name}: the images in '{path}' are {kind}; set data.name={right}"
        )
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def _from_torchvision(root: Path, train: bool) -> tuple[Tensor, Tensor]:
    from torchvision.datasets import CIFAR10

    try:
        raw = CIFAR10(str(root), train=train, download=True)
    except Exception as error:
        raise UserError(
            f"data.name=cifar10: not found or damaged in '{root}' and not downloadable here "
            f"({type(error).__name__}); name a folder that holds cifar-10-batches-py or the "
            "hub's Parquet files with --data-root"
        ) from None
    return torch.from_numpy(raw.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(raw.targets)


def _normalise(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
    return pixels.float().div_(255).sub_(mean).div_(std)

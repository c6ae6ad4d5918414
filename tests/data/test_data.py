"""Data sets, splits, shuffles and augmentation."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value

from commsweep.config.training import ImageSet
from commsweep.data import module
from commsweep.data.images import CIFAR_MEAN, CIFAR_STD, load
from commsweep.data.module import Batches, ImageData, _moved
from commsweep.errors import UserError

CPU = torch.device("cpu")


def test_digits_are_whole_and_the_split_is_fixed():
    images = load("digits")
    assert images.train_x.shape == (1437, 1, 8, 8) and images.test_x.shape == (360, 1, 8, 8)
    assert abs(images.train_x.mean()) < 1e-5 and abs(images.train_x.std() - 1) < 1e-4
    assert torch.bincount(images.test_y).min() > 20
    seeds = [ImageData(ImageSet(), images, seed, CPU) for seed in (0, 1)]
    assert torch.equal(seeds[0].val.x, seeds[1].val.x)
    together = torch.cat([seeds[0].train.x, seeds[0].val.x]).flatten(1)
    assert len(torch.unique(together, dim=0)) == len(torch.unique(images.train_x.flatten(1), dim=0))


def test_digits_are_those_of_scikit_learn():
    """Read from its file, without its thousand modules."""
    from sklearn.datasets import load_digits

    images, raw = load("digits"), load_digits()
    x = torch.cat([images.train_x, images.test_x])
    pixels = (x - x.min()) * (16 / (x.max() - x.min()))
    lines = sorted(map(tuple, pixels.round().flatten(1).int().tolist()))
    assert lines == sorted(map(tuple, raw.data.astype(int).tolist()))
    labels = torch.cat([images.train_y, images.test_y]).bincount()
    assert labels.tolist() == torch.tensor(raw.target).bincount().tolist()


def batches(**options):
    x = torch.arange(10.0).view(10, 1, 1, 1).expand(10, 1, 4, 4).clone()
    return Batches(x, torch.arange(10), 4, **options)


def test_every_sample_once_with_its_index_and_a_short_last_batch():
    seen = list(batches(shuffle=True, seed=3))
    assert [len(y) for _, y, _ in seen] == [4, 4, 2]
    assert sorted(torch.cat([y for _, y, _ in seen]).tolist()) == list(range(10))
    for x, y, samples in seen:
        assert torch.equal(y, samples) and torch.equal(x[:, 0, 0, 0].long(), samples)
    assert len(list(batches(drop_last=True))) == 2 == len(batches(drop_last=True))


def test_the_order_follows_from_seed_and_epoch_alone():
    def order(seed, epoch):
        made = batches(shuffle=True, seed=seed)
        made.set_epoch(epoch)
        return torch.cat([s for *_, s in made]).tolist()

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_augmentation_moves_as_a_padded_crop_and_flip():
    x = torch.randn(4, 3, 8, 8)
    moves = torch.tensor([[0, 0, 0], [2, -1, 0], [0, 0, 1], [-3, 4, 1]])
    got = _moved(x, moves)
    for image, (dy, dx, flip), out in zip(x, moves.tolist(), got, strict=True):
        padded = torch.nn.functional.pad(image, (4, 4, 4, 4))[:, 4 + dy : 12 + dy, 4 + dx : 12 + dx]
        if flip:  # mirror first, then crop
            mirrored = torch.nn.functional.pad(image.flip(2), (4, 4, 4, 4))
            padded = mirrored[:, 4 + dy : 12 + dy, 4 - dx : 12 - dx]
        assert torch.equal(out, padded)


@pytest.mark.parametrize("fixed", [True, False])
def test_fixed_augmentation_repeats_every_epoch(fixed):
    made = batches(augment="crop_flip", fixed_augment=fixed, seed=1)
    made.x = torch.randn(10, 1, 8, 8)
    epochs = []
    for epoch in (0, 1):
        made.set_epoch(epoch)
        epochs.append(torch.cat([x for x, *_ in made]))
    assert torch.equal(*epochs) == fixed


@pytest.mark.parametrize(
    "size,message",
    [
        ({"val_size": 160}, "has 160 training samples"),
        ({"batch_size": 150, "val_size": 32}, "only 128 training samples remain"),
    ],
)
def test_sizes_that_do_not_fit_are_named(size, message):
    with pytest.raises(UserError, match=message):
        ImageData(ImageSet(name="synthetic", **size), load("synthetic"), 0, CPU)


def parquet(folder, pixels, kind="PNG"):
    """The hub's layout: a struct of encoded bytes and a path, and the label."""
    from PIL import Image as Pillow

    def encoded(one):
        out = io.BytesIO()
        Pillow.fromarray(one).save(out, kind)
        return {"bytes": out.getvalue(), "path": None}

    features = Features({"img": Image(), "label": Value("int64")})
    for split, part in (("train", pixels[:6]), ("test", pixels[6:])):
        Dataset.from_dict(
            {"img": [encoded(p) for p in part], "label": [i % 10 for i in range(len(part))]},
            features=features,
        ).to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))


def pixels(n=9):
    return np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)


def normal(values):
    x = torch.from_numpy(values).permute(0, 3, 1, 2).double() / 255
    return (
        (x - torch.tensor(CIFAR_MEAN).view(1, 3, 1, 1)) / torch.tensor(CIFAR_STD).view(1, 3, 1, 1)
    ).float()


def test_cifar_from_parquet_in_the_hubs_layout(tmp_path):
    parquet(tmp_path, pixels())
    images = load("cifar10", tmp_path)
    assert torch.allclose(images.train_x, normal(pixels()[:6]), atol=1e-5)
    assert torch.allclose(images.test_x, normal(pixels()[6:]), atol=1e-5)
    assert images.train_y.tolist() == list(range(6))


def test_re_encoded_images_must_be_named_so(tmp_path):
    parquet(tmp_path, pixels(), "JPEG")
    with pytest.raises(UserError, match="JPEG re-encoded; set data.name=cifar10-jpeg"):
        load("cifar10", tmp_path)
    assert load("cifar10-jpeg", tmp_path).train_x.shape == (6, 3, 32, 32)


def test_cifar_from_torchvisions_folder(tmp_path, monkeypatch):
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    parts = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for place, part in enumerate(parts):
        raw = pixels(6)[place : place + 1].transpose(0, 3, 1, 2).reshape(1, -1)
        (base / part).write_bytes(pickle.dumps({"data": raw, "labels": [place]}))
    (base / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    # The real files have known checksums; these have the same layout and other content.
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    images = load("cifar10", tmp_path)
    assert torch.allclose(images.train_x, normal(pixels(6)[:5]), atol=1e-5)
    assert images.test_y.tolist() == [5]


@pytest.mark.parametrize("content", [b"not parquet", b""])
def test_a_damaged_parquet_file_is_named(tmp_path, content):
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"train\.parquet' is not a readable CIFAR-10 Parquet file"):
        load("cifar10", tmp_path)


def test_a_missing_set_says_what_to_name(tmp_path):
    with pytest.raises(UserError, match="name their folder with --data-root"):
        load("cifar10-jpeg", tmp_path)


@pytest.mark.parametrize("augment", ["none", "shift", "crop_flip"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_made_at_once_is_the_batches_made_one_by_one(augment, drop_last, monkeypatch):
    """As on a GPU, where a batch is then a view and costs no launch."""
    monkeypatch.setattr(module, "AT_ONCE", 3)
    made = batches(augment=augment, shuffle=True, drop_last=drop_last, seed=5)
    made.x = torch.randn(10, 1, 8, 8)
    for epoch in (0, 1):
        made.set_epoch(epoch)
        made.ahead = False
        wanted = list(made)
        made.ahead = True
        seen = list(made)
        assert len(seen) == len(wanted)
        for one, other in zip(seen, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert len({x.untyped_storage().data_ptr() for x, _, _ in seen}) == 1

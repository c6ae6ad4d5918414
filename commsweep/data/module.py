"""Batches straight from tensors on the device, with augmentation per sample and epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from commsweep import seeds
from commsweep.config.training import ImageSet, OwnSet, TextSet
from commsweep.data.images import Images
from commsweep.data.text import Corpus
from commsweep.errors import UserError

# Samples [b, ...] (images [b, c, h, w] or blocks of token ids [b, t]), targets [b, ...] (labels
# [b], or the blocks themselves), sample indices [b] (host).
Batch = tuple[Tensor, Tensor, Tensor]

WHOLE = 2**32  # bytes of a set up to which an epoch's batches are made together on a GPU
AT_ONCE = 4096  # samples that are


class Batches:
    """An iterable of batches, reshuffled each epoch from (seed, epoch) alone, so a resume needs no
    state.

    Lightning calls `sampler.set_epoch` before each epoch, which is all the state there is. Only
    shuffled batches have a `sampler`: Lightning takes one on an evaluation loader for a
    DataLoader's.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        augment: str = "none",
        fixed_augment: bool = False,
        seed: int = 0,
    ) -> None:
        self.x, self.y, self.batch_size = x, y, batch_size
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.augment, self.fixed_augment = augment, fixed_augment
        if shuffle:
            self.sampler = self
        self.epoch = 0
        # who wants to know the samples of the next batch beforehand
        self.told: list[Callable[[Tensor], None]] = []
        # On a GPU a batch made for itself costs more launches than its step can hide.
        self.ahead = x.is_cuda and x.element_size() * x.numel() <= WHOLE

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order and augmentation the next iteration uses."""
        self.epoch = epoch

    def __len__(self) -> int:
        n = len(self.y)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = self._order()
        drawn_in = 0 if self.fixed_augment else self.epoch
        moves = _moves(self.augment, len(self.y), _generator(seeds.moves(self.seed, drawn_in)))
        where, device = order.to(self.x.device), self.x.device  # one copy an epoch
        moves = moves if moves is None else moves.to(device)[where]
        size = AT_ONCE if self.ahead else self.batch_size
        batches = (
            self._augmented(where[start : start + size], moves, start)
            for start in range(0, len(order), size)
        )
        if self.ahead:
            xs, ys = zip(*batches, strict=True)
            arrays = torch.cat(xs), torch.cat(ys)
            batches = zip(*(array.split(self.batch_size) for array in arrays), strict=True)
        chunks = order.split(self.batch_size)[: len(self)]
        for index, (samples, (x, y)) in enumerate(zip(chunks, batches, strict=False)):
            for tell in self.told if index + 1 < len(chunks) else ():
                tell(chunks[index + 1])
            yield x, y, samples

    def _augmented(self, where: Tensor, moves: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Return these samples as they enter the network; moves: of all, in the epoch's order."""
        x = self.x[where]
        return x if moves is None else _moved(x, moves[start : start + len(x)]), self.y[where]

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.y))
        return torch.randperm(len(self.y), generator=_generator(seeds.order(self.seed, self.epoch)))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _moves(augment: str, n: int, generator: torch.Generator) -> Tensor | None:
    """Row and column shift and mirror flag of every sample, int64 [n, 3]; None without
    augmentation.
    """
    if augment == "none":
        return None
    reach = {"shift": 1, "crop_flip": 4}[augment]
    shifts = torch.randint(-reach, reach + 1, (n, 2), generator=generator)
    flips = torch.randint(0, 2, (n, 1), generator=generator) * (augment == "crop_flip")
    return torch.cat([shifts, flips], dim=1)


def _moved(x: Tensor, moves: Tensor) -> Tensor:
    """Each image shifted (zeros come in at the edge: a padded random crop) and maybe mirrored.

    x: [b, c, h, w]; moves: [b, 3]. One gather for the whole batch.
    """
    b, c, h, w = x.shape
    rows = torch.arange(h, device=x.device) + moves[:, :1]
    columns = torch.arange(w, device=x.device).expand(b, w)
    columns = columns.where(moves[:, 2:] == 0, w - 1 - columns) + moves[:, 1:2]
    inside = ((rows >= 0) & (rows < h))[:, :, None] & ((columns >= 0) & (columns < w))[:, None, :]
    pixel = rows.clamp(0, h - 1)[:, :, None] * w + columns.clamp(0, w - 1)[:, None, :]
    picked = x.flatten(2).gather(2, pixel.flatten(1)[:, None].expand(b, c, h * w)).view(b, c, h, w)
    return picked * inside[:, None]


def _digest(*loaders: Batches) -> str:
    """Stands for all samples and targets of these loaders."""
    digest = hashlib.sha256()
    for loader in loaders:
        for tensor in (loader.x, loader.y):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ImageData(pl.LightningDataModule):
    """Train, validation and test batches of a set; the validation samples are a fixed draw from
    training.
    """

    def __init__(self, spec: ImageSet, images: Images, seed: int, device: torch.device) -> None:
        super().__init__()
        self.spec, self.images, self.source_digest = spec, images, images.digest
        n = len(images.train_y)
        if spec.val_size >= n:
            raise UserError(
                f"data.val_size={spec.val_size}: {spec.name} has {n} training samples; choose fewer"
            )
        remain = n - spec.val_size
        if spec.train_size is not None and spec.train_size > remain:
            raise UserError(
                f"data.train_size={spec.train_size}: {spec.name} has {n} training samples, of "
                f"which data.val_size={spec.val_size} are split off; choose at most {remain}"
            )
        used = spec.train_size or remain
        if spec.batch_size > used:
            raise UserError(
                f"data.batch_size={spec.batch_size}: only {used} training samples remain"
            )
        # the split never depends on the seed
        order = torch.randperm(n, generator=_generator(seeds.FIXED))
        val, train = order[: spec.val_size], order[spec.val_size : spec.val_size + used]
        size = spec.batch_size
        self.train = Batches(
            images.train_x[train].to(device),
            images.train_y[train].to(device),
            size,
            shuffle=True,
            seed=seed,
            drop_last=spec.drop_last,
            augment=spec.augment,
            fixed_augment=spec.fixed_augment,
        )
        self.val = Batches(images.train_x[val].to(device), images.train_y[val].to(device), 4 * size)
        self.test = Batches(images.test_x.to(device), images.test_y.to(device), 4 * size)

    def train_dataloader(self) -> Batches:
        return self.train

    def val_dataloader(self) -> list[Batches]:
        """Validation and test set, both scored at every evaluation; only validation selects."""
        return [self.val, self.test] if len(self.val) else [self.test]

    def digest(self) -> str:
        """Stands for all of it: two processes have the same data when theirs are equal."""
        return _digest(self.train, self.val, self.test)

    @property
    def example(self) -> Tensor:
        """Return a sample [1, channels, side, side] on the host."""
        return self.images.train_x[:1].cpu()

    @property
    def installed(self) -> ImageSet:
        """The data settings as installed, read back from the loaders."""
        train = self.train
        ran = {
            "batch_size": train.batch_size,
            "augment": train.augment,
            "fixed_augment": train.fixed_augment,
            "val_size": len(self.val.y),
            "drop_last": train.drop_last,
            "train_size": self.spec.train_size and len(train.y),
        }
        if isinstance(self.spec, OwnSet):
            return OwnSet(load=self.images.name, source=self.images.source, **ran)
        return ImageSet(name=self.images.name, **ran)  # pyright: ignore[reportArgumentType]


class Blocks(pl.LightningDataModule):
    """Train, validation and test batches of contiguous blocks of tokens; a rest shorter than a
    block is dropped.
    """

    def __init__(self, spec: TextSet, corpus: Corpus, seed: int, device: torch.device) -> None:
        super().__init__()
        self.spec, self.vocabulary, self.source_digest = spec, corpus.vocabulary, corpus.digest
        corpora = {}
        for split in ("train", "validation", "test"):
            key = "train_blocks" if split == "train" else "eval_blocks"
            count, have = getattr(spec, key), len(corpus.tokens[split]) // spec.block_size
            if not have:
                raise UserError(
                    f"data.block_size={spec.block_size}: the {split} text of {spec.name} has "
                    f"only {len(corpus.tokens[split])} tokens; choose a smaller block"
                )
            if count > have:
                raise UserError(
                    f"data.{key}={count}: the {split} text of {spec.name} has {have} blocks; "
                    "choose fewer, or 0 for all"
                )
            corpora[split] = _blocks(corpus.tokens[split], spec.block_size, count)
        if spec.batch_size > len(corpora["train"]):
            raise UserError(
                f"data.batch_size={spec.batch_size}: only {len(corpora['train'])} training blocks"
            )
        x = {split: blocks.to(device) for split, blocks in corpora.items()}
        self.train = Batches(x["train"], x["train"], spec.batch_size, shuffle=True, seed=seed)
        self.val, self.test = (
            Batches(x[split], x[split], spec.batch_size) for split in ("validation", "test")
        )

    def train_dataloader(self) -> Batches:
        return self.train

    def val_dataloader(self) -> list[Batches]:
        """Validation and test blocks, both scored at every evaluation."""
        return [self.val, self.test]

    def digest(self) -> str:
        """Do what `ImageData.digest` does."""
        return _digest(self.train, self.val, self.test)

    @property
    def example(self) -> Tensor:
        """Return a sample [1, block size] on the host."""
        return self.train.x[:1].cpu()

    @property
    def installed(self) -> TextSet:
        """The data settings as installed; the sizes are read back from the loaders."""
        spec, train = self.spec, self.train
        cap = {
            "train_blocks": spec.train_blocks and len(train.y),
            "eval_blocks": spec.eval_blocks and max(len(self.val.y), len(self.test.y)),
        }
        return spec.model_copy(
            update={"batch_size": train.batch_size, "block_size": train.x.shape[1], **cap}
        )


def _blocks(tokens: np.ndarray, size: int, count: int) -> Tensor:
    """Contiguous blocks int32 [n, size]; of more than `count` (unless 0), that many evenly spread
    ones.
    """
    n = len(tokens) // size
    blocks = tokens[: n * size].reshape(n, size)
    if 0 < count < n:
        blocks = blocks[np.linspace(0, n - 1, count).astype(np.int64)]
    return torch.from_numpy(blocks.astype(np.int32))

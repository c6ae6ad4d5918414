"""The storage of a feedback's rows: one a batch slot or sample, in memory or in a file as large as
the disk allows.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from commsweep import checkpoint
from commsweep.compressors.base import laid_out
from commsweep.compressors.base import rows as flat

AHEAD = 4  # batches that may wait to be written; more would be memory spent on a slow disk
READ = 2  # batches whose rows may have been read ahead


class Keys:
    """The memory rows that a batch owns: b slots from `first` on, or the rows of its samples.

    samples: int64 [b] on the host; the copy on `device` is made once a step. first: the place in
    the whole batch of the first sample, for a learner that has a share of it.
    """

    def __init__(self, samples: Tensor, device: torch.device, first: int = 0) -> None:
        self.samples, self.first = samples, first
        self.on_device = samples.to(device, non_blocking=True)

    def subset(self, mask: Tensor) -> Keys:
        """The keys of the rows where `mask` (host, boolean [b]) is true."""
        return Keys(self.samples[mask], self.on_device.device)


class Memory(nn.Module):
    """A tensor for each slot or sample, as a module buffer, so that checkpoints carry it.

    state: [slots, *sample shape] in `dtype`, on the model's device.
    """

    state: Tensor

    def __init__(
        self,
        slots: int,
        sample: torch.Size,
        dtype: torch.dtype,
        by_sample: bool,
        channels_last: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.slots, self.by_sample = slots, by_sample
        # made so: of a large one there is no room for a copy
        if channels_last and len(sample) == 3:
            state = torch.zeros(slots, *sample[1:], sample[0], dtype=dtype, device=device).permute(
                0, 3, 1, 2
            )
        else:
            state = torch.zeros([slots, *sample], dtype=dtype, device=device)
        self.register_buffer("state", state)

    @property
    def dtype(self) -> torch.dtype:
        """The type rows are kept in."""
        return self.state.dtype

    def read(self, keys: Keys) -> Tensor:
        """Rows of this batch: a view for slots, a copy for samples; on the batch's device."""
        return self.state[keys.on_device] if self.by_sample else self._slots(keys)

    def write(self, keys: Keys, rows: Tensor) -> None:
        """Store rows; nothing to do when they are the view that `read` gave."""
        if self.by_sample:
            with _any_order():
                flat(self.state).index_copy_(
                    0, keys.on_device, flat(laid_out(rows.to(self.dtype), self.state))
                )
            return
        slots = self._slots(keys)
        if rows.data_ptr() != slots.data_ptr():
            slots.copy_(rows)

    def _slots(self, keys: Keys) -> Tensor:
        return self.state[keys.first : keys.first + len(keys.samples)]


@contextmanager
def _any_order() -> Iterator[None]:
    """Rows that are written once each are the same in any order; a GPU's deterministic one would
    copy all of them.
    """
    deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


class MappedMemory(nn.Module):
    """Sample-keyed rows in a memory-mapped file; a thread writes them while the next step computes,
    and reads those of the step after it.

    Pages leave the process once written, so the memory in use is that of a few batches whatever the
    size of the file. A checkpoint carries the name of a copy of the file (`snapshot`), not the
    rows.
    """

    by_sample = True

    def __init__(self, slots: int, sample: torch.Size, dtype: torch.dtype, file: Path) -> None:
        super().__init__()
        self.slots, self.sample, self.dtype, self.file = slots, sample, dtype, file
        self.copy = ""
        self._waiting: deque[tuple[set[int], Future]] = deque()
        # place of each sample, and the rows
        self._ahead: deque[tuple[dict[int, int], Future]] = deque(maxlen=READ)
        self._pinned = False  # whether rows go to a GPU
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="buffer")
        # a leftover of a killed run; the checkpoint's copy holds what counts
        file.unlink(missing_ok=True)
        self._map()

    @property
    def state(self) -> Tensor:
        """All rows [slots, *sample shape], once the writer has caught up."""
        self._settle(lambda samples: True)
        return torch.from_numpy(self._rows).view(self.dtype).reshape(self.slots, *self.sample)

    def read(self, keys: Keys) -> Tensor:
        """A copy of this batch's rows on the batch's device."""
        wanted_samples, device = keys.samples.tolist(), keys.on_device.device
        self._pinned = device.type == "cuda"
        read = next(
            (
                entry
                for entry in self._ahead
                if all(sample in entry[0] for sample in wanted_samples)
            ),
            None,
        )
        if read is None:
            self._settle(lambda samples: not samples.isdisjoint(wanted_samples))
            rows = self._taken(wanted_samples)
        else:
            positions = [read[0][sample] for sample in wanted_samples]
            rows = read[1].result()
            in_order = self._pinned and positions == list(range(len(rows)))
            rows = rows if in_order else rows[positions]  # a copy here, or the one to the device
        return rows.to(device, non_blocking=True)

    def ahead(self, samples: Tensor) -> None:
        """Rows of these samples (int64 on the host) are wanted next: read them behind what computes
        now.
        """
        sample_list = samples.tolist()
        self._ahead.append(
            (
                {sample: index for index, sample in enumerate(sample_list)},
                self._writer.submit(self._taken, sample_list),
            )
        )

    def _taken(self, samples: list[int]) -> Tensor:
        rows = torch.empty(
            len(samples), self._rows.shape[1], dtype=torch.uint8, pin_memory=self._pinned
        )
        np.take(self._rows, samples, axis=0, out=rows.numpy())
        return rows.view(self.dtype).reshape(-1, *self.sample)

    def write(self, keys: Keys, rows: Tensor) -> None:
        """Hand the rows to the writer."""
        self._settle(lambda samples: len(self._waiting) >= AHEAD)
        samples = keys.samples.tolist()
        for positions, _ in self._ahead:  # what was read of them is old now
            for sample in samples:
                positions.pop(sample, None)
        rows, ready = rows.detach(), None
        # the copy to the host runs behind the computation; the writer waits for it
        if rows.device.type == "cuda":
            host = torch.empty(rows.shape, dtype=self.dtype, pin_memory=True)
            host.copy_(rows.to(self.dtype), non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        else:
            host = rows.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        self._waiting.append((set(samples), self._writer.submit(self._write, samples, host, ready)))

    def snapshot(self, tag: str) -> None:
        """Copy the file for the checkpoint about to be saved (by reference where the file system
        can).
        """
        self._settle(lambda samples: True)
        partial = self.file.with_name(f".{self.file.name}.part")
        with open(self.file, "rb") as source, open(partial, "w+b") as target:
            _copy(source, target)
            os.fsync(target.fileno())
            target.seek(0)
            self.copy = f"{self.file.name}.{tag}.{checkpoint.digest(target)}"
        os.replace(partial, self.file.with_name(self.copy))

    def drop_copies(self, steps: Collection[int]) -> None:
        """Remove the copies that go with none of the checkpoints of these steps."""
        for path in self.file.parent.glob(f"{self.file.name}.*"):
            if not any(path.name.startswith(f"{self.file.name}.{step}.") for step in steps):
                path.unlink()

    def get_extra_state(self) -> dict[str, Any]:
        return {"copy": self.copy}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._settle(lambda samples: True)
        self._ahead.clear()
        self.copy = state["copy"]
        with open(self.file.with_name(self.copy), "rb") as source, open(self.file, "r+b") as target:
            _copy(source, target)  # into the same file, which stays mapped

    def _map(self) -> None:
        row_bytes = self.sample.numel() * self.dtype.itemsize
        with open(self.file, "w+b") as handle:
            handle.truncate(max(1, self.slots * row_bytes))  # zeros that take no room until written
            self._pages = mmap.mmap(handle.fileno(), 0)
        self._rows = np.frombuffer(self._pages, np.uint8, self.slots * row_bytes).reshape(
            self.slots, row_bytes
        )

    def _write(self, samples: list[int], host: Tensor, ready: Any) -> None:
        if ready is not None:
            ready.synchronize()
        rows = host.view(torch.uint8) if host.dim() else host
        for sample, row in zip(samples, rows.reshape(len(samples), -1).numpy(), strict=True):
            self._rows[sample] = row
            start = sample * self._rows.shape[1] // mmap.PAGESIZE * mmap.PAGESIZE
            self._pages.madvise(
                mmap.MADV_DONTNEED, start, (sample + 1) * self._rows.shape[1] - start
            )

    def _settle(self, until: Callable[[set[int]], bool]) -> None:
        """Wait for the oldest writes as long as any waiting one matters."""
        while self._waiting and any(until(samples) for samples, _ in self._waiting):
            self._waiting.popleft()[1].result()


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    """The whole of an open file into another: by reference where the file system can, else by
    bytes.
    """
    try:
        while os.copy_file_range(source.fileno(), target.fileno(), 1 << 30):
            pass
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        source.seek(0)
        target.seek(0)
        shutil.copyfileobj(source, target, 1 << 22)
        target.flush()


AnyMemory = Memory | MappedMemory

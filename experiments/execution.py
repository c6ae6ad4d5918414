"""Where and how a run executes; nothing here changes a result, so nothing here is hashed. No torch at import."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from commsweep.experiments.errors import UserError

if TYPE_CHECKING:
    import torch


SMALL = 1e9  # multiplications of a step's forward pass


def check_device(name: str) -> None:
    """Raise UserError unless the name is one of a device that runs execute on."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name}: not a device; use cpu, cuda, cuda:1 or auto")


@dataclass(frozen=True)
class Execution:
    """The options of `commsweep run` and `sweep launch`."""

    device: str = "auto"  # cpu, cuda, cuda:1, or auto
    data_root: Path | None = None
    model_root: Path | None = None  # folders of pretrained weights and tokenizers, by name
    buffers: str = "memory"  # or mmap: where sample-keyed feedback memories lie
    checkpoint_every: float = 30.0  # seconds between checkpoints, taken at the end of an epoch
    progress: bool = False
    tensorboard: bool = False  # also write TensorBoard's event files into the run's folder
    threads: int | None = None  # of the computation; None: by the model's size
    cores: int | None = None  # that this process may use; None: all there are
    by: str = "run"  # who asks for the run: run, sweep or search

    def torch_device(self) -> torch.device:
        """The device meant. Raises UserError when there is none such."""
        import torch

        check_device(self.device)
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device {self.device}: no CUDA device is available here; use --device cpu")
        if device.type == "cuda" and (device.index or 0) >= (there := torch.cuda.device_count()):
            raise UserError(f"--device {self.device}: this machine has {there}, from cuda:0 on")
        return device

    def thread_count(self, work: float) -> int:
        """Threads for steps of this many multiplications. A small step gains nothing from a second thread, and beside
        a busy process waits for it, many times as long as it computes."""
        return self.threads or (1 if work < SMALL else self.cores or len(os.sched_getaffinity(0)))

    def workers(self, per_gpu: int = 1) -> int:
        """Processes to use by default: `per_gpu` a GPU where there are any, else one a CPU core."""
        if self.device != "cpu" and Path("/proc/driver/nvidia/gpus").exists():
            import torch  # seconds to import, so only where there is something to ask

            if torch.cuda.is_available():
                return torch.cuda.device_count() * per_gpu
        return len(os.sched_getaffinity(0))

"""Where and how a run executes; nothing here changes a result, so nothing here is hashed. No torch at import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from commsweep.experiments.errors import UserError

if TYPE_CHECKING:
    import torch


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

    def torch_device(self) -> torch.device:
        """The device meant. Raises UserError when there is none such."""
        import torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise UserError(f"--device {self.device}: not a device; use cpu, cuda, cuda:1 or auto") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device {self.device}: no CUDA device is available here; use --device cpu")
        return device

    def workers(self, per_gpu: int = 1) -> int:
        """Processes to use by default: `per_gpu` a GPU where there are any, else one a CPU core."""
        if self.device != "cpu" and Path("/proc/driver/nvidia/gpus").exists():
            import torch  # seconds to import, so only where there is something to ask

            if torch.cuda.is_available():
                return torch.cuda.device_count() * per_gpu
        return len(os.sched_getaffinity(0))

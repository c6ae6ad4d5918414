"""The settings that change where and when a run executes, but not its result; nothing here changes
a result, so nothing here is hashed. No torch at import.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from commsweep.config.base import Spec
from commsweep.errors import UserError

if TYPE_CHECKING:
    import torch


GRAPHS = "reduce-overhead", "max-autotune"
MODES = "default", *GRAPHS  # of --compile
MTU = 1500  # of shaped links
SMALL = 1e9  # multiplications of a step's forward pass


def check_device(name: str) -> None:
    """Raise UserError unless the name is one of a device that runs execute on."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {name}: not a device; use cpu, cuda, cuda:1 or auto")


POINTS = 10  # along a training, where nothing else is said


@dataclass(frozen=True)
class Execution:
    """The options of `commsweep run` and `sweep launch`."""

    device: str = "auto"  # cpu, cuda, cuda:1, or auto
    data_root: Path | None = None
    model_root: Path | None = None  # folders of pretrained weights and tokenizers, by name
    buffers: str = "memory"  # or mmap: where sample-keyed feedback memories lie
    checkpoint_every: float = 30.0  # seconds between checkpoints, taken at the end of an epoch
    progress: bool = False
    diagnose: bool = False  # measure what compression does to the boundaries' messages
    tensorboard: bool = False  # also write TensorBoard's event files into the run's folder
    threads: int | None = None  # of the computation; None: by the model's size
    cores: int | None = None  # that this process may use; None: all there are
    compile: str | None = None  # one of MODES: torch.compile for the blocks between boundaries
    points: int = 0  # scores along a training, of a part of the validation set (training/points.py)
    by: str = "run"  # who asks for the run: run, sweep or search

    def record(self) -> dict[str, Any]:
        """Return the settings as JSON takes them, for a process that is to execute likewise. JSON
        has no infinity: that is a word.
        """
        return {
            key: str(value.resolve()) if isinstance(value, Path) else value
            for key, value in vars(self).items()
        } | {"checkpoint_every": str(self.checkpoint_every)}

    @classmethod
    def read(cls, settings: dict[str, Any]) -> Execution:
        """Inverse of `record`."""
        typed: dict[str, Any] = {
            key: Path(settings[key])
            for key in ("data_root", "model_root")
            if settings[key] is not None
        }
        typed["checkpoint_every"] = float(settings["checkpoint_every"])
        return cls(**(settings | typed))

    def torch_device(self) -> torch.device:
        """The device meant. Raises UserError when there is none such."""
        import torch

        check_device(self.device)
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"--device {self.device}: no CUDA device is available here; use --device cpu"
            )
        if device.type == "cuda" and (device.index or 0) >= (gpus := torch.cuda.device_count()):
            raise UserError(f"--device {self.device}: this machine has {gpus}, from cuda:0 on")
        return device

    def thread_count(self, work: float) -> int:
        """Threads for steps of this many multiplications. A small step gains nothing from a second
        thread, and beside a busy process waits for it, many times as long as it computes.
        """
        return self.threads or (1 if work < SMALL else self.cores or len(os.sched_getaffinity(0)))

    def workers(self, per_gpu: int = 1) -> int:
        """Processes to use by default: `per_gpu` a GPU where there are any, else one a CPU core."""
        if self.device != "cpu" and _has_driver():
            import torch  # seconds to import, so only where there is something to ask

            if torch.cuda.is_available():
                return torch.cuda.device_count() * per_gpu
        return len(os.sched_getaffinity(0))


def _has_driver() -> bool:
    """Return whether a CUDA driver can be loaded; its folders differ between machines, containers
    and WSL.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def bucket(bandwidth: float) -> int:
    """Bytes that a link shaped to so many bits a second (not 0) lets through at once: two frames,
    or what it sends in a millisecond. A bucket that runs over while its timer is late loses the
    rate that it should have.
    """
    return max(2 * (MTU + 14), round(bandwidth / 8 * 1e-3))


class Cable(Spec):
    """A link between two processes, each way on its own."""

    bandwidth: Annotated[float, Field(ge=0, description="bits a second; 0: unlimited")] = 0.0
    latency: Annotated[float, Field(ge=0, description="seconds, one way")] = 0.0


class Wiring(Spec):
    """The way a Run's stages execute as processes; what of it changes only time is not part of the
    Run.

    bandwidth: bits a second of every link, each way (0: as the machine has it); latency: seconds
    one way; both are imposed by real shaped links. links: where they differ, that of each boundary
    from the first stage on. steps: end after so many, without an evaluation (0: the whole
    training). turn: tells measurements of the same thing apart that are taken at different times.
    """

    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    bandwidth: Annotated[float, Field(ge=0, description="bits a second; 0: unlimited")] = 0.0
    latency: Annotated[float, Field(ge=0, description="seconds, one way")] = 0.0
    steps: Annotated[int, Field(ge=0)] = 0
    threads: Annotated[int, Field(ge=1, description="of each stage")] = 1
    links: Annotated[tuple[Cable, ...], Field(exclude_if=lambda links: not links)] = ()
    turn: Annotated[int, Field(ge=0, exclude_if=lambda turn: not turn)] = 0

    @model_validator(mode="after")
    def _alike_or_not(self) -> Wiring:
        if self.links and (self.bandwidth or self.latency):
            raise ValueError(
                "links of their own leave no bandwidth or latency that all share: give one of both"
            )
        return self

    def cables(self, stages: int) -> list[Cable]:
        """The link of each boundary between so many stages. Raises UserError when there are other
        ones.
        """
        if self.links and len(self.links) != stages - 1:
            raise UserError(
                f"{len(self.links)} links for {stages - 1} boundaries: write one for each pair "
                "of neighbouring stages"
            )
        return list(self.links) or [Cable(bandwidth=self.bandwidth, latency=self.latency)] * (
            stages - 1
        )


class LearnerWiring(Spec):
    """The way a Run's learners execute as processes; nothing of it changes a result.

    placement: which learner inverts a factor of K-FAC: every one (D-KFAC), one each ("spread",
    MPD-KFAC), small ones everywhere and large ones by load ("balanced", SPD-KFAC), or a `fraction`
    of the learners precondition a layer ("shared", KAISA). small: factors below so many rows are
    small (0: where inverting is cheaper than receiving, by what is measured at the start). fusion:
    which factors travel as one message; buffer: elements of "threshold". bandwidth, latency: of
    every learner's own link to a switch, each way; imposed by real shaped links. steps: end after
    so many, without an evaluation (0: the whole training).
    """

    placement: Literal["everywhere", "spread", "balanced", "shared"] = "balanced"
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    small: Annotated[
        int, Field(ge=0, description="rows; 0: by the cost of inverting and receiving")
    ] = 0
    fusion: Literal["after", "layer", "threshold", "pipelined"] = "pipelined"
    buffer: Annotated[int, Field(ge=1, description="elements that travel together at most")] = 2**24
    bandwidth: Annotated[float, Field(ge=0, description="bits a second; 0: unlimited")] = 0.0
    latency: Annotated[float, Field(ge=0, description="seconds, one way")] = 0.0
    steps: Annotated[int, Field(ge=0)] = 0
    threads: Annotated[int, Field(ge=1, description="of each learner")] = 1

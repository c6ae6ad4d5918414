"""Boundaries put into a model: its forward is not edited, a hook on each stage's last module does the crossing."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.experiments import feedback
from commsweep.experiments.boundary import Boundary, Channel, Step
from commsweep.experiments.config import Links, Run
from commsweep.experiments.errors import UserError
from commsweep.experiments.memory import MappedMemory
from commsweep.experiments.specs import CODERS, Link


class Boundaries(nn.ModuleDict):
    """The boundaries of one model by cut name, with the step they share."""

    def __init__(self, run: Run, modules: dict[str, nn.Module], shapes: dict[str, torch.Size], n_samples: int,
                 folder: Path | None = None, only: Collection[str] | None = None) -> None:
        """only: the cuts beside one stage of a real pipeline; these are not hooked, for each has two ends."""
        super().__init__()
        self.step = Step()
        run.check_cuts(modules)
        for place, (cut, module) in enumerate(modules.items()):
            if only is not None and cut not in only:
                continue
            links = run.links(cut)
            fwd, bwd = (self._channel(run, getattr(links, side), 2 * place + (side == "bwd"), shapes[cut], n_samples,
                                      folder and folder / f"{cut}.{side}.buffer") for side in ("fwd", "bwd"))
            coder = fwd.compressor.coder(torch.Size([1, *shapes[cut]])) if run.fwd.compressor.kind in CODERS else None
            boundary = Boundary(cut, fwd, bwd, coder)
            self[cut.replace(".", "_")] = boundary
            if only is None:  # the closure, not the module, is hooked: the boundary is no child of the model
                module.register_forward_hook(partial(_hook, boundary.forward))

    def _channel(self, run: Run, link: Link, stream: int, shape: torch.Size, n_samples: int,
                 file: Path | None) -> Channel:
        memory = feedback.build(link.feedback, shape, run.data.batch_size, n_samples, run.channels_last, file)
        return Channel(link, memory, self.step, (run.seed, stream), shape)

    def snapshot(self, tag: str) -> list[MappedMemory]:
        """Copy every memory that lies in a file, for a checkpoint; returns them."""
        mapped = [module for module in self.modules() if isinstance(module, MappedMemory)]
        for memory in mapped:
            memory.snapshot(tag)
        return mapped

    def links(self) -> dict[str, Links]:
        """Every boundary's installed links, read back from the objects."""
        return {b.name.replace(".", "_"): Links(fwd=b.fwd.link, bwd=b.bwd.link) for b in self.values()}

    def check_calls(self, steps: int) -> None:
        """Each boundary is crossed once per direction and step (of each learner); all else is the harness's fault."""
        for boundary in self.values():
            for side in ("fwd", "bwd"):
                calls = getattr(boundary, side).counts.calls
                if calls != steps:
                    raise RuntimeError(f"boundary {boundary.name}: {calls} {side} calls in {steps} training steps")

    def non_finite(self) -> str | None:
        """Where the first non-finite message was seen: in that step, activations come first, in model order,
        then gradients against it. None if all were finite."""
        order = [("activation", b.name, b.fwd) for b in self.values()]
        order += [("gradient", b.name, b.bwd) for b in reversed(list(self.values()))]
        seen = [(float(channel.counts.first_bad), what, name) for what, name, channel in order
                if channel.counts.first_bad is not None]
        call, what, name = min(seen, key=lambda one: one[0], default=(math.inf, "", ""))
        return None if call == math.inf else f"non-finite {what} at boundary {name}"

    def ledger(self) -> dict[str, dict[str, int]]:
        """Bytes and calls over training: {boundary: {fwd, bwd, fwd_dense, bwd_dense, calls,
        samples}}."""
        return {b.name: {"fwd": b.fwd.counts.total(), "bwd": b.bwd.counts.total(),
                         "fwd_dense": b.fwd.counts.dense_bytes, "bwd_dense": b.bwd.counts.dense_bytes,
                         "calls": b.fwd.counts.calls, "samples": b.fwd.counts.samples} for b in self.values()}


def _hook(cross: Callable[[Tensor], Tensor], _module: nn.Module, _input: Any, output: Any) -> Any:
    """A module's output with the message crossed: a tensor, or a tuple that begins with it."""
    return (cross(output[0]), *output[1:]) if isinstance(output, tuple) else cross(output)


def message_shapes(model: nn.Module, modules: dict[str, nn.Module],
                   sample: Tensor) -> tuple[dict[str, torch.Size], int]:
    """(shape of one sample's message at every cut, multiplications of its forward pass), found by passing `sample`
    [1, ...] through the model. Only layers with a matrix of weights are counted."""
    shapes: dict[str, torch.Size] = {}
    work = 0

    def note(cut: str, x: Tensor) -> Tensor:
        shapes[cut] = x.shape[1:]
        return x

    def count(module: nn.Module, _input: Any, y: Any) -> None:
        nonlocal work
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1 and not isinstance(module, nn.Embedding):
            work += weight.numel() * y.numel() // (y.shape[1] if weight.dim() > 2 else y.shape[-1])

    hooks = [module.register_forward_hook(partial(_hook, partial(note, cut))) for cut, module in modules.items()]
    hooks += [module.register_forward_hook(count) for module in model.modules()]
    training = model.training
    with torch.no_grad():
        model.eval()(sample)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return shapes, work


def memory_bytes(run: Run, shapes: dict[str, torch.Size], n_samples: int) -> dict[str, int]:
    """Bytes of all feedback memories: {"slot": ..., "sample": ...}."""
    total = {"slot": 0, "sample": 0}
    for cut, shape in shapes.items():
        links = run.links(cut)
        for link in (links.fwd, links.bwd):
            kind = "sample" if feedback.sample_keyed(link.feedback) else "slot"
            total[kind] += feedback.memory_bytes(link.feedback, shape, run.data.batch_size, n_samples)
    return total


def check_room(need: dict[str, int], device: torch.device, folder: Path | None, copies: int = 0) -> None:
    """Raise UserError when the feedback memories (and gradients of simulated learners) cannot fit.

    `folder` holds the memory-mapped ones, if any, and `copies` of them for checkpoints.
    """
    in_memory = sum(nbytes for kind, nbytes in need.items() if kind != "sample" or not folder)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    if in_memory > free:
        raise UserError(f"the feedback memories need {gib(in_memory)} and {gib(free)} are free: "
                        "use --buffers mmap, a 16-bit feedback.buffer, fewer samples, or fewer grad.learners")
    on_disk = need["sample"] * (1 + copies)
    if folder and on_disk > (disk := shutil.disk_usage(folder).free):
        raise UserError(f"the memory-mapped feedback buffers need {gib(on_disk)} ({copies} copies for checkpoints "
                        f"included; --checkpoint-every inf makes none) and {gib(disk)} are free in '{folder}': "
                        "use a 16-bit feedback.buffer or a --store on another disk")


def gib(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

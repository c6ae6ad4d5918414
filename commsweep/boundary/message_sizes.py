"""Before boundaries are put in: what crosses each cut, and whether memory and disk have room for
what they remember.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from commsweep import compressors
from commsweep.compressors.sparse import ForwardMask
from commsweep.config import Run
from commsweep.config.feedback import sample_keyed
from commsweep.config.links import Links
from commsweep.errors import UserError
from commsweep.feedback import boundaries as feedback


def message_shapes(
    model: nn.Module, modules: dict[str, nn.Module], sample: Tensor
) -> tuple[dict[str, torch.Size], int]:
    """(shape of one sample's message at every cut, multiplications of its forward pass), found by
    passing `sample` [1, ...] through the model. Only layers with a matrix of weights are
    counted.
    """
    shapes: dict[str, torch.Size] = {}
    work = 0

    def note(cut: str, x: Tensor) -> Tensor:
        shapes[cut] = x.shape[1:]
        return x

    def count(module: nn.Module, _input: Any, y: Any) -> None:
        nonlocal work
        weight = getattr(module, "weight", None)
        # a router of experts returns several
        if not isinstance(weight, Tensor) or not isinstance(y, Tensor):
            return
        if weight.dim() > 1 and not isinstance(module, nn.Embedding):
            work += weight.numel() * y.numel() // (y.shape[1] if weight.dim() > 2 else y.shape[-1])

    hooks = [
        module.register_forward_hook(partial(crossed, partial(note, cut)))
        for cut, module in modules.items()
    ]
    hooks += [module.register_forward_hook(count) for module in model.modules()]
    training = model.training
    with torch.no_grad():
        model.eval()(sample)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return shapes, work


def message_bytes(run: Run, shapes: dict[str, torch.Size]) -> dict[str, tuple[int, int]]:
    """Bytes (forward, backward) of a microbatch's message at every cut. Raises NotImplementedError
    where they depend on the data.
    """
    sizes, rows = {}, run.data.batch_size // run.microbatches
    for cut, shape in shapes.items():
        links, message = run.links(cut), torch.Size([rows, *shape])
        fwd, bwd = (compressors.build(link.compressor) for link in (links.fwd, links.bwd))
        # the values that the forward message kept, without their places
        if isinstance(bwd, ForwardMask):
            back = fwd.layouts(message, torch.float32)[0]["values"].most_bytes
        else:
            back = bwd.formula_bytes(message, torch.float32)
        sizes[cut] = fwd.formula_bytes(message, torch.float32), back
    return sizes


def memory_bytes(
    links: dict[str, Links], shapes: dict[str, torch.Size], batch_size: int, n_samples: int
) -> dict[str, int]:
    """Bytes of all feedback memories of the boundaries at these cuts: {"slot": ..., "sample":
    ...}.
    """
    total = {"slot": 0, "sample": 0}
    for cut, cut_links in links.items():
        for link in (cut_links.fwd, cut_links.bwd):
            kind = "sample" if sample_keyed(link.feedback) else "slot"
            total[kind] += feedback.memory_bytes(link.feedback, shapes[cut], batch_size, n_samples)
    return total


def check_room(
    need: dict[str, int], device: torch.device, folder: Path | None, copies: int = 0
) -> None:
    """Raise UserError when the feedback memories (and gradients of simulated learners) cannot fit.

    `folder` holds the memory-mapped ones, if any, and `copies` of them for checkpoints.
    """
    in_memory = sum(nbytes for kind, nbytes in need.items() if kind != "sample" or not folder)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    where = f" on {device}" if device.type == "cuda" else ""
    if in_memory > free:
        raise UserError(
            f"the feedback memories need {gib(in_memory)} and {gib(free)} are free{where}: use "
            "--buffers mmap, a 16-bit feedback.buffer, fewer samples, or fewer grad.learners"
        )
    on_disk = need.get("sample", 0) * (1 + copies)
    if folder and on_disk > (disk := shutil.disk_usage(folder).free):
        raise UserError(
            f"the memory-mapped feedback buffers need {gib(on_disk)} ({copies} copies for "
            f"checkpoints included; --checkpoint-every inf makes none) and {gib(disk)} are free "
            f"in '{folder}': use a 16-bit feedback.buffer or a --store on another disk"
        )


def gib(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def crossed(cross: Callable[[Tensor], Tensor], _module: nn.Module, _input: Any, output: Any) -> Any:
    """A forward hook: the module's output with the message crossed, a tensor or a tuple that begins
    with it.
    """
    return (cross(output[0]), *output[1:]) if isinstance(output, tuple) else cross(output)

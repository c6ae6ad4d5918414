"""`commsweep bench boundary`: what compression at the boundaries costs a training step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from commsweep import compressors
from commsweep.bench import Result, alternate, compared
from commsweep.boundary.insert import Boundaries, message_shapes
from commsweep.config import Run, override
from commsweep.config.training import ImageModel
from commsweep.models import layout, resnet
from commsweep.models.cuts import chosen
from commsweep.registry import preset
from commsweep.training import arithmetic, compiled

BATCH, STEP_BATCH = 128, 32  # of a message, of a step
LINKS = {
    "dense": {},
    "topk": {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in (("kind", "topk"), ("ratio", 0.1))
    },
    "uniform": {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in (("kind", "uniform"), ("bits", 4))
    },
}


def bench() -> Iterator[Result]:
    """ResNet-18/CIFAR step at batch 32, three boundaries both ways; one compression; peak memory
    of a step.
    """
    yield from _selection()
    yield from _step()
    yield _memory()


def _selection() -> Iterator[Result]:
    """TopK 10 % of [128, 65536] against the common public way."""
    x = torch.randn(BATCH, 65536)
    ours = compressors.build({"kind": "topk", "ratio": 0.1})
    with torch.no_grad():
        seconds = alternate(
            {"public": lambda: _public(x), "ours": lambda: ours.apply(x), "copy": x.clone},
            rounds=15,
            warmup=3,
        )
    title = "TopK 10 % of [128, 65536]"
    yield compared(f"{title}: kthvalue way / ours", seconds, "public", "ours", 3.0, at_most=False)
    yield compared(f"{title}: ours / an allocating copy", seconds, "ours", "copy", 1.5)


def _public(x: Tensor) -> Tensor:
    """Threshold by kthvalue, then a mask."""
    size = x.abs()
    threshold = size.kthvalue(int(x.shape[1] * 0.9), dim=1, keepdim=True).values
    return x * (size > threshold)


def _step() -> Iterator[Result]:
    seconds = alternate(
        {name: step_of(links, batch=STEP_BATCH) for name, links in LINKS.items()}, rounds=11
    )
    for name, label, bound in (("topk", "TopK 10 %", 1.08), ("uniform", "4-bit min-max", 1.05)):
        title = f"ResNet-18 step, batch {STEP_BATCH}, {label} at 3 boundaries both ways / dense"
        yield compared(title, seconds, name, "dense", bound)


def step_of(
    changes: dict[str, Any],
    device: str = "cpu",
    batch: int = BATCH,
    samples: int = BATCH,
    compile: str | None = None,
) -> Callable[[], None]:
    """A function that makes one training step of ResNet-18 with the preset's settings changed, on
    made-up images.

    samples: of which each batch takes the next. compile: a mode of `--compile`.
    """
    run = override(preset("resnet18_corrected"), changes)
    target = torch.device(device)
    arithmetic.install(run, target)
    torch.manual_seed(0)
    model, boundaries = _staged(run, batch, samples)
    if compile is not None:
        compiled.install(model, compile, target)
    model, boundaries = model.to(target), boundaries.to(target)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=5e-4, fused=True)
    x = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last).to(target)
    y = torch.randint(0, 10, (batch,)).to(target)
    number = count()

    def step() -> None:
        step = next(number)
        boundaries.begin(
            step, torch.arange(step * batch, (step + 1) * batch) % samples, device=target
        )
        optimizer.zero_grad()
        with torch.autocast(target.type, torch.bfloat16, enabled=run.precision == "bfloat16"):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def _staged(run: Run, batch: int, samples: int) -> tuple[torch.nn.Module, Boundaries]:
    assert isinstance(run.model, ImageModel)
    model = layout.channels_last(resnet.build(run.model, 3, 10))
    modules = chosen(run.model, model, resnet.legal_cuts(model))
    return model, Boundaries(
        {cut: run.links(cut) for cut in modules},
        modules,
        message_shapes(model, modules, torch.zeros(1, 3, 32, 32))[0],
        batch,
        samples,
        run.seed,
        channels_last=True,
    )


def _memory() -> Result:
    """Peak resident memory of a fresh process that makes two steps, TopK against dense, libraries
    included.
    """
    # Not ru_maxrss: a child inherits its parent's, and this process is larger than the one
    # measured.
    code = (
        "import sys; from commsweep.bench.boundary import LINKS, step_of; step = "
        "step_of(LINKS[sys.argv[1]]); step(); step(); status = "
        "open('/proc/self/status').read(); print(status.split('VmHWM:')[1].split()[0])"
    )
    peak = {
        name: float(
            subprocess.run(
                [sys.executable, "-c", code, name], capture_output=True, text=True, check=True
            ).stdout
        )
        / 1024
        for name in ("dense", "topk")
    }
    return Result(
        "peak memory of a process that steps with TopK 10 % / dense",
        peak["topk"] / peak["dense"],
        1.15,
        medians={f"{name} MiB": value for name, value in peak.items()},
    )

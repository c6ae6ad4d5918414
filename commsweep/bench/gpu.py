"""`commsweep bench gpu`: what a GPU makes of all this, in under ten minutes, before a paper's sweep
is launched on it.

Every compressor against the CPU, kernels against a device copy of the same bytes, waits inside a
step, whole steps of ResNet-18 and GPT-2, cells at once, and the hours that `resnet18_paper` would
take. Bounds are an H200's goals.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from commsweep import compressors
from commsweep.bench import Result, text
from commsweep.bench.boundary import step_of
from commsweep.compressors import Compressor
from commsweep.config import Run
from commsweep.config.base import by_kind
from commsweep.config.compressors import CompressorSpec
from commsweep.errors import UserError
from commsweep.registry import sweep

TOPK = {
    f"{side}.compressor.{key}": value
    for side in ("fwd", "bwd")
    for key, value in (("kind", "topk"), ("ratio", 0.1))
}
STEPS: dict[str, dict[str, Any]] = {
    "dense": {},
    "TopK 10 %": TOPK,
    "4-bit groups": {
        f"{side}.compressor.{key}": value
        for side in ("fwd", "bwd")
        for key, value in (("kind", "uniform"), ("bits", 4), ("scale", "group"), ("group", 32))
    },
    "EF21 + TopK 10 %": TOPK | {"fwd.feedback.kind": "ef21", "bwd.feedback.kind": "ef21"},
    "AQ-SGD + TopK 10 %": TOPK | {"fwd.feedback.kind": "aqsgd"},
}
PRECISIONS = "float32", "tf32", "bfloat16"
# Compressors that choose and round entry by entry; the others also sum, and a GPU sums in another
# order.
EXACT = (
    "none",
    "cast",
    "topk",
    "topk_strict",
    "randomk",
    "randtopk",
    "natural",
    "uniform",
    "fixed",
    "fixed_batch",
    "e3m0",
    "threshold",
)
VARIANTS = [
    {"kind": kind, "scale": scale, "rounding": rounding}
    for kind in ("uniform", "fixed")
    for scale in ("sample", "group", "last")
    for rounding in ("nearest", "stochastic")
]
PASSES = 1.13  # of a training step and its share of evaluation, in steps
PER_EPOCH = 391


@dataclass(frozen=True)
class Sizes:
    """The amount that is measured; tests measure less."""

    rows: tuple[tuple[int, int], ...] = ((128, 65536), (128, 32768), (128, 16384), (8, 786432))
    batch: int = 128
    steps: int = 30
    seconds: float = 8.0  # of each number of cells at once
    cells: tuple[int, ...] = (1, 2, 4, 8)
    text: dict[str, Any] = field(
        default_factory=lambda: {"model.name": "gpt2", "data.block_size": 1024}
    )
    modes: tuple[str, ...] = ("default", "reduce-overhead")


def bench(device: str = "cuda", sizes: Sizes | None = None) -> Iterator[Result]:
    """Everything, in the order in which a fault would spoil the rest. Raises UserError without such
    a device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "bench gpu: no CUDA device is here; the other benches measure the CPU (commsweep bench)"
        )
    sizes = sizes or Sizes()
    yield from equality(device)
    yield from kernels(device, sizes)
    yield from waits(device, sizes)
    measured: dict[str, float] = {}
    eager = [
        (precision, None) for precision in PRECISIONS if device != "cpu" or precision != "tf32"
    ]
    yield from steps(device, sizes, eager, measured)
    rates: dict[int, float] = {}
    yield from cells(device, sizes, rates)
    yield hours(measured, rates)
    yield from text_steps(device, sizes)
    yield from steps(device, sizes, [("bfloat16", mode) for mode in sizes.modes], measured)


# Equality.


def equality(device: str) -> Iterator[Result]:
    """The largest share of entries that arrive, or are decoded from what was encoded, otherwise
    than on the CPU.
    """
    x = torch.randn(16, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1] = 0.0, (x[1] * 2).round() / 2  # zeros and ties
    examples = [
        {"kind": kind} | spec.example
        for kind, spec in by_kind(CompressorSpec).items()
        if kind not in ("forward_mask", "bottleneck", "subspace", "own")
    ]
    for spec in [*examples, *VARIANTS]:
        compressor, exact, shares = compressors.build(spec), spec["kind"] in EXACT, {}
        for dtype in (torch.float32, torch.bfloat16):
            source = x.to(dtype)
            reference = compressor.apply(source, 7).float()
            decoded = compressor.decode(compressor.encode(source.to(device), 7))
            for operation, y in (
                ("applied", compressor.apply(source.to(device), 7)),
                ("decoded", decoded),
            ):
                differs = (y.cpu().float() - reference).abs() > (
                    0.0 if exact else 1e-5 * float(x.abs().max())
                )
                shares[f"{operation} {dtype}".replace("torch.", "")] = float(differs.float().mean())
        yield Result(
            f"{' '.join(spec.values())}: entries other than the CPU's",
            max(shares.values()),
            0.0 if exact else 1e-3,
            medians=shares,
        )


# Kernels.


def kernels(device: str, sizes: Sizes) -> Iterator[Result]:
    """Times over that of a copy of the same tensor."""
    built: dict[str, Compressor] = {
        "TopK 10 %": compressors.build({"kind": "topk", "ratio": 0.1}),
        "4-bit groups of 32": compressors.build(
            {"kind": "uniform", "bits": 4, "scale": "group", "group": 32}
        ),
        "4 bits of a sample": compressors.build({"kind": "uniform", "bits": 4, "scale": "sample"}),
        "stochastic 2-bit groups": compressors.build(
            {"kind": "uniform", "bits": 2, "scale": "group", "group": 32, "rounding": "stochastic"}
        ),
    }
    # An H200 copies [128, 65536] float32 in 15.6 us: its goals are 40 us and 12 us.
    goals = {("TopK 10 %", "message"): 40 / 15.6, ("4-bit groups of 32", "message"): 12 / 15.6}
    for shape in sizes.rows:
        for dtype in (torch.float32, torch.bfloat16):
            # More of them than a cache holds.
            tensors = [torch.randn(shape, device=device).to(dtype) for _ in range(4)]
            copied = timed(torch.clone, tensors, device)
            for name, compressor in built.items():
                for label, function in (
                    ("what arrives", compressor.apply),
                    ("message", compressor._encode),
                ):
                    taken = timed(lambda x, function=function: function(x, 3), tensors, device)
                    first = shape == sizes.rows[0] and dtype is torch.float32
                    yield Result(
                        f"{name} of {list(shape)} {str(dtype).removeprefix('torch.')}, {label} / "
                        "copy",
                        taken / copied,
                        goals.get((name, label)) if first else None,
                        medians={"us": 1e6 * taken, "copy us": 1e6 * copied},
                    )


def timed(
    function: Callable[[Tensor], object], tensors: list[Tensor], device: str, rounds: int = 20
) -> float:
    """Median seconds of a call that the device takes, inputs in turn."""
    inputs, seconds = cycle(tensors), []
    for x in islice(inputs, 3 + rounds):
        if device == "cpu":
            began = time.perf_counter()
            function(x)
            seconds.append(time.perf_counter() - began)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # the calls wait in a queue, so that only the device is timed
        begin.record()
        function(x)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds[3:])


# Steps.


def waits(device: str, sizes: Sizes) -> Iterator[Result]:
    """Return whether a step of each method waits for the device anywhere."""
    for name, changes in STEPS.items():
        step = step_of(changes, device, sizes.batch, 4 * sizes.batch)
        for _ in range(6):
            step()
        waited = 0.0
        _debug("error", device)
        try:
            for _ in range(3):
                step()
        except RuntimeError:
            waited = 1.0
        finally:
            _debug("default", device)
        yield Result(f"ResNet-18 step, {name}: waits for the device", waited, 0.0)


def _debug(mode: str, device: str) -> None:
    if device != "cpu":
        torch.cuda.set_sync_debug_mode(mode)


def steps(
    device: str,
    sizes: Sizes,
    ways: Sequence[tuple[str, str | None]],
    measured: dict[str, float],
) -> Iterator[Result]:
    """Wall time of each method's step over that of the dense one; beside it the device's own time
    and its launches. `ways`: precisions and modes of `--compile`. `measured`: eager bfloat16
    seconds by method, filled in.
    """
    for precision, mode in ways:
        dense = 0.0
        for name, changes in STEPS.items():
            if mode is not None and name not in ("dense", "TopK 10 %"):
                continue
            step = step_of(
                changes | {"precision": precision}, device, sizes.batch, 4 * sizes.batch, mode
            )
            wall, busy, launches = clocked(step, device, sizes.steps)
            dense = dense or wall
            if precision == "bfloat16" and mode is None:
                measured[name] = wall
            how = precision if mode is None else f"{precision}, --compile {mode}"
            yield Result(
                f"ResNet-18 step, batch {sizes.batch}, {how}, {name} / dense",
                wall / dense,
                1.05 if name == "TopK 10 %" else None,
                medians={"wall ms": 1e3 * wall, "device ms": 1e3 * busy, "launches": launches},
            )


def text_steps(device: str, sizes: Sizes) -> Iterator[Result]:
    """The same of GPT-2 in bfloat16, four stages, 8 blocks of made-up tokens a batch."""
    dense = 0.0
    for name, changes in STEPS.items():
        step = text.gpu_step(sizes.text | changes, device)
        wall, busy, launches = clocked(step, device, sizes.steps)
        dense = dense or wall
        yield Result(
            f"{sizes.text['model.name']} step, batch 8, bfloat16, {name} / dense",
            wall / dense,
            1.05 if name == "TopK 10 %" else None,
            medians={"wall ms": 1e3 * wall, "device ms": 1e3 * busy, "launches": launches},
        )


def clocked(step: Callable[[], None], device: str, count: int) -> tuple[float, float, float]:
    """Return times of a step: (seconds, seconds that the device is busy, kernels launched)."""
    for _ in range(8):  # a memory is filled, kernels are chosen and compiled
        step()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    wall = (time.perf_counter() - began) / count
    if device == "cpu":
        return wall, wall, 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        synchronize(device)
    on_gpu = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    events = [event for event in profile.events() or () if event.device_type == on_gpu]
    return wall, sum(event.device_time for event in events) / 5e6, len(events) / 5


def synchronize(device: str) -> None:
    """Wait until the device has done all it was told."""
    if device != "cpu":
        torch.cuda.synchronize()


# Sweeps.


def cells(device: str, sizes: Sizes, rates: dict[int, float]) -> Iterator[Result]:
    """Cells an hour when so many train at once on the card, over one at a time. `rates`: steps a
    second, filled in.
    """
    command = [sys.executable, "-m", "commsweep.bench.gpu", device]
    command += [str(sizes.batch), str(sizes.seconds)]
    for several in sizes.cells:
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(several)
        ]
        for worker in workers:  # all have warmed up before any begins
            assert worker.stdout is not None
            worker.stdout.readline()
        for worker in workers:
            if worker.poll() is None:
                assert worker.stdin is not None
                worker.stdin.write("begin\n")
                worker.stdin.flush()
        outputs = [worker.communicate()[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise UserError(
                f"bench gpu: a process of {several} at once on {device} ended with an error (above)"
            )
        rates[several] = sum(float(text) for text in outputs) / sizes.seconds
        first = rates[sizes.cells[0]]
        yield Result(
            f"{several} cells at once / {sizes.cells[0]}, TopK 10 %, bfloat16",
            rates[several] / first,
            None,
            medians={"cells an hour": 3600 * rates[several] / (100 * PER_EPOCH * PASSES)},
        )


def worker(device: str, batch: int, seconds: float) -> int:
    """Steps made in these seconds, from a line on the standard input on; says when it is ready."""
    step = step_of(TOPK | {"precision": "bfloat16"}, device, batch, batch)
    for _ in range(3):
        step()
    synchronize(device)
    print("ready", flush=True)
    sys.stdin.readline()
    done, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()
        done += 1
        if done % 10 == 0:
            synchronize(device)
    synchronize(device)
    return done


def hours(measured: dict[str, float], rates: dict[int, float]) -> Result:
    """An estimate for `resnet18_paper` in bfloat16: its cells' steps as measured, as many at once
    as is best.
    """
    gain = max(rates.values()) / rates[min(rates)]
    kinds = Counter(method(run) for run in sweep("resnet18_paper"))
    seconds = (
        sum(cells * measured[name] * 100 * PER_EPOCH * PASSES for name, cells in kinds.items())
        / gain
    )
    return Result(
        "resnet18_paper in bfloat16, estimated hours",
        seconds / 3600,
        8.0,
        medians={
            "cells": float(sum(kinds.values())),
            "at once": float(max(rates, key=rates.__getitem__)),
        },
    )


def method(run: Run) -> str:
    """The measured step that is like this run's."""
    if run.fwd.feedback.kind == "aqsgd":
        return "AQ-SGD + TopK 10 %"
    if run.fwd.feedback.kind != "none":
        return "EF21 + TopK 10 %"
    if run.fwd.compressor.kind == "none" and run.bwd.compressor.kind == "none":
        return "dense"
    return (
        "4-bit groups"
        if "uniform" in (run.fwd.compressor.kind, run.bwd.compressor.kind)
        else "TopK 10 %"
    )


if __name__ == "__main__":
    print(worker(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))

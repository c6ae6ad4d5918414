"""One canonical small setting per method, which the law tests walk through."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commsweep.config import Execution, Run, flatten, override, record, run_id
from commsweep.config.base import by_kind
from commsweep.config.compressors import CompressorSpec
from commsweep.config.run import SCHEMA
from commsweep.config.training import TextModel
from commsweep.registry import preset
from commsweep.store import Store
from commsweep.training.run import build, execute, trainer
from commsweep.training.step import Task

# Settings that exercise the branches of compressors.
VARIANTS: list[dict[str, Any]] = [
    {"kind": "none"},
    {"kind": "cast", "to": "float16"},
    {"kind": "cast", "to": "bfloat16"},
    {"kind": "topk", "ratio": 0.1},
    {"kind": "topk", "ratio": 0.6},
    {"kind": "topk", "ratio": 1.0},
    {"kind": "topk", "ratio": 0.2, "scope": "tensor"},
    {"kind": "topk", "ratio": 0.3, "scope": "last"},
    {"kind": "topk_strict", "ratio": 0.1},
    {"kind": "topk_strict", "ratio": 0.7},
    {"kind": "topk_strict", "ratio": 1.0},
    {"kind": "mx"},
    {"kind": "mx", "format": "nvfp4"},
    {"kind": "mx", "format": "mxfp8_e4m3"},
    {"kind": "mx", "format": "mxfp8_e5m2"},
    {"kind": "mx", "format": "mxfp6", "rounding": "stochastic"},
    {"kind": "mx", "format": "nvfp4", "rounding": "stochastic"},
    {"kind": "eden", "bits": 1, "block": 32},
    {"kind": "eden", "bits": 4},
    {"kind": "ms_eden"},
    {"kind": "tah_code", "tile": 8},
    {"kind": "rotated", "block": 64, "code": {"kind": "uniform", "bits": 2, "scale": "sample"}},
    {"kind": "rotated", "code": {"kind": "mx", "format": "nvfp4", "rounding": "stochastic"}},
    {"kind": "rotated", "code": {"kind": "uniform", "bits": 3, "coding": "rans"}},
    {"kind": "uniform", "bits": 8, "scale": "sample", "coding": "rans"},
    {"kind": "fixed", "bits": 3, "scale": "group", "group": 8, "coding": "rans"},
    {"kind": "mx", "format": "mxfp6", "coding": "rans"},
    {"kind": "tern", "coding": "rans"},
    {"kind": "sign", "coding": "rans"},
    {"kind": "statistical", "bits": 4, "coding": "rans"},
    {"kind": "eden", "bits": 4, "coding": "rans"},
    {"kind": "randomk", "ratio": 0.25},
    {"kind": "randomk", "ratio": 0.25, "scaled": True},
    {"kind": "randtopk", "ratio": 0.2},
    {"kind": "randtopk", "ratio": 0.7, "alpha": 0.5, "scope": "last"},
    {"kind": "randtopk", "ratio": 1.0},
    {"kind": "topk", "ratio": 0.3, "values": {"kind": "uniform", "bits": 3}},
    {
        "kind": "topk",
        "ratio": 0.2,
        "scope": "tensor",
        "values": {"kind": "fixed", "bits": 4, "rounding": "stochastic"},
    },
    {
        "kind": "topk",
        "ratio": 0.5,
        "scope": "last",
        "values": {"kind": "uniform", "scale": "sample"},
    },
    {"kind": "topk", "ratio": 1.0, "values": {"kind": "cast"}},
    {
        "kind": "randomk",
        "ratio": 0.25,
        "scaled": True,
        "values": {
            "kind": "uniform",
            "bits": 2,
            "scale": "group",
            "group": 8,
            "rounding": "stochastic",
        },
    },
    {"kind": "randtopk", "ratio": 0.2, "values": {"kind": "natural"}},
    {"kind": "topk", "ratio": 0.1, "scope": "tile", "tile": 4},
    {"kind": "topk", "ratio": 0.3, "scope": "tile", "tile": 4, "per_tile": "number"},
    {
        "kind": "topk",
        "ratio": 0.3,
        "scope": "tile",
        "tile": 4,
        "per_tile": "number",
        "index_coding": "rice",
    },
    {"kind": "topk", "ratio": 0.05, "index_coding": "rice"},
    {"kind": "topk", "ratio": 0.3, "scope": "tensor", "index_coding": "rice"},
    {"kind": "topk", "ratio": 1.0, "scope": "last", "index_coding": "rice"},
    {
        "kind": "topk",
        "ratio": 0.1,
        "scope": "tile",
        "tile": 4,
        "index_coding": "rice",
        "values": {"kind": "statistical", "bits": 2},
    },
    {"kind": "tah"},
    {"kind": "tah", "tile": 8, "high_bits": 8, "low_bits": 2, "high_share": 0.3, "tau": 1.1},
    {"kind": "zero"},
    {"kind": "mean"},
    {"kind": "lowrank", "rank": 1},
    {"kind": "lowrank", "rank": 3, "warm": False},
    {"kind": "bottleneck", "width": 4},
    {"kind": "subspace", "width": 4},
    {"kind": "sign"},
    {"kind": "sign", "scale": "l2"},
    {"kind": "sign", "scale": "one"},
    {"kind": "onebit"},
    {"kind": "tern"},
    {"kind": "tern", "clip": 0.0},
    {"kind": "qsgd"},
    {"kind": "qsgd", "levels": 1, "bucket": 8},
    {"kind": "qsgd", "levels": 255, "norm": "max", "coding": "fixed"},
    {"kind": "natural"},
    {"kind": "statistical"},
    {"kind": "statistical", "bits": 4, "range": 3.0},
    {"kind": "e3m0"},
    {"kind": "threshold", "value": 0.5},
    {"kind": "dryden", "ratio": 0.2},
    {"kind": "threshold", "value": 1.9, "index_coding": "rice"},
    {"kind": "topk_strict", "ratio": 0.05, "index_coding": "rice"},
    {"kind": "sidco", "ratio": 0.02, "index_coding": "rice"},
    {"kind": "dryden", "ratio": 0.02, "index_coding": "rice"},
    {"kind": "sidco", "ratio": 0.1},
    {"kind": "sidco", "ratio": 0.05, "fit": "gpareto", "stages": 3},
    {"kind": "fixed_batch", "bits": 2},
    {"kind": "fixed_batch", "bits": 8},
    *(
        {"kind": kind, "bits": bits, "scale": scale, "rounding": rounding}
        | ({"group": 8} if scale == "group" else {})
        for kind in ("uniform", "fixed")
        for bits in (1, 3, 4, 8)
        for scale, rounding in (
            ("tensor", "nearest"),
            ("sample", "stochastic"),
            ("channel", "nearest"),
            ("last", "nearest"),
            ("group", "nearest"),
            ("group", "stochastic"),
        )
        if (kind, bits, rounding) != ("fixed", 1, "stochastic")
    ),
]
# Every compressor of a boundary: these settings, and the example of each kind that has none there.
COMPRESSORS: list[dict[str, Any]] = VARIANTS + [
    {"kind": kind} | spec.example
    for kind, spec in by_kind(CompressorSpec).items()
    if kind != "forward_mask" and kind not in {variant["kind"] for variant in VARIANTS}
]

FEEDBACKS: list[dict[str, Any]] = [
    {"kind": "ef"},
    {"kind": "ef", "key": "sample"},
    {"kind": "ef_mixed"},
    {"kind": "ef_mixed", "key": "sample"},
    {"kind": "ef21"},
    {"kind": "ef21", "key": "sample"},
    {"kind": "aqsgd"},
    {"kind": "aqsgd", "buffer": "bfloat16"},
]


def name(spec: dict[str, Any]) -> str:
    """A readable test id."""
    return "-".join(str(value) for value in spec.values())


def tiny(**changes: Any) -> Run:
    """The synthetic preset with dotted settings changed ("__" stands for ".")."""
    return override(
        preset("synthetic"), {key.replace("__", "."): value for key, value in changes.items()}
    )


def linked(
    fwd: dict[str, Any] | None = None,
    bwd: dict[str, Any] | None = None,
    fwd_feedback: dict[str, Any] | None = None,
    bwd_feedback: dict[str, Any] | None = None,
    base: Callable[..., Run] = tiny,
    **changes: Any,
) -> Run:
    """A tiny run with these compressors and feedbacks."""
    for side, part, spec in (
        ("fwd", "compressor", fwd),
        ("bwd", "compressor", bwd),
        ("fwd", "feedback", fwd_feedback),
        ("bwd", "feedback", bwd_feedback),
    ):
        changes |= {f"{side}.{part}.{key}": value for key, value in flatten(spec or {}).items()}
    return base(**changes)


def tiny_text(**changes: Any) -> Run:
    """The synthetic_text preset with dotted settings changed ("__" stands for ".")."""
    return override(
        preset("synthetic_text"), {key.replace("__", "."): value for key, value in changes.items()}
    )


def outcome(run: Run, status: str = "finished", **more: Any) -> dict[str, Any]:
    """A made-up row of this run, with all that a row must have."""
    return {
        "schema": SCHEMA,
        "id": run_id(run),
        "status": status,
        "error": None,
        "run": record(run),
        "metrics": {"test_on_acc": 0.5} if status == "finished" else {},
        "seconds": {},
        **more,
    }


def scatter(run: Run) -> float:
    """A little of a run's own: nothing is decided by scores that are all alike."""
    return 1e-11 * (int(run_id(run), 16) % 1000)


def toy(run: Run) -> Run:
    """A paper's Run shrunk to seconds: synthetic data, a narrow network, few epochs; its links
    stay.
    """
    epochs = 1 + max(run.fwd.start_epoch, run.bwd.start_epoch)
    if isinstance(run.model, TextModel):
        return override(
            run,
            {
                "model.name": "gpt2-nano",
                "model.weights": "",
                "model.stages": 4,
                "data.name": "synthetic-text",
                "data.tokenizer": "bytes",
                "data.block_size": 32,
                "data.batch_size": 8,
                "data.train_blocks": 32 if run.sparsity is None else 160,
                "data.eval_blocks": 8,
                "epochs": epochs,
                "eval_every": 1,
                "seed": 0,
            }
            | (
                {}
                if run.sparsity is None
                else {"sparsity.interval": 1}
                | ({"sparsity.width": 8} if run.sparsity.attends else {})
            ),
        )
    model = "mlp" if run.model.name == "mlp" else "resnet_small"
    changes = {
        "model.name": model,
        "model.width": 4,
        "data.name": "synthetic",
        "data.batch_size": 32,
        "data.val_size": min(run.data.val_size, 32),
        "epochs": epochs,
        "eval_every": 1,
        "seed": 0,
    }
    if run.data.train_size is not None:
        changes["data.train_size"] = 64
    return override(run, changes)


def resumed(run: Run, folder: Path, points: int = 0) -> dict[str, Any]:
    """The row of a run that was stopped after its first evaluated epoch and continued, in a store
    of its own, with so many points along it.
    """
    store, seen = Store(folder), []

    def once() -> bool:
        seen.append(True)
        return len(seen) == 1

    with pytest.raises(KeyboardInterrupt):
        execute(run, store, Execution("cpu", checkpoint_every=0, points=points), stopping=once)
    return execute(run, store, Execution("cpu", points=points))


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spawned(target: Callable[..., None], count: int, *args: Any, answers: int = 1) -> list[Any]:
    """So many things that processes of target(rank, port, answer, *args) put into their queue
    `answer`.
    """
    context, port = torch.multiprocessing.get_context("spawn"), free_port()
    queue = context.Queue()
    processes = [
        context.Process(target=target, args=(rank, port, queue, *args)) for rank in range(count)
    ]
    for one in processes:
        one.start()
    told = [queue.get(timeout=240) for _ in range(answers)]
    for one in processes:
        one.join()
    return told


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that tells -0.0 from 0.0."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(
            a.contiguous().view(kinds[a.element_size()]),
            b.contiguous().view(kinds[b.element_size()]),
        )
    )


def trained(run: Run, watch: Any = None) -> Task:
    """The task after a whole run; `watch`, a component, sees every step."""
    torch.set_num_threads(1)
    parts = build(run, Execution("cpu"))
    if watch is not None:
        parts.task.components["watch"] = watch
        watch.task = [parts.task]
    trainer(run, parts, [], False).fit(parts.task, parts.data.train, parts.data.val_dataloader())
    return parts.task

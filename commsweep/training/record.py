"""The row of a run: one form for simulated runs, pipelines and learners as processes."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from commsweep.boundary.insert import traffic
from commsweep.config import Run, record, run_id
from commsweep.config.run import SCHEMA
from commsweep.store import CONTINUABLE, FINISHED, Row
from commsweep.training.readback import Installed


def row(
    run: Run,
    status: str,
    error: str | None,
    *,
    ran: Installed | None,
    evaluations: list[dict[str, Any]],
    steps: int,
    totals: dict[str, Any],
    seconds: dict[str, float],
    device: torch.device,
    tokens: int = 0,
    tied: int = 0,
    **fields: Any,
) -> Row:
    """A Row. ran: what was installed, None before there was anything. evaluations: recorded so far.
    totals: the components' (boundaries, bytes, gradients). tokens: of a sample, for text. tied:
    bytes a step of a shared embedding's gradients. fields: what only some rows have.
    """
    shared = {"tied_per_step": tied} if tied else {}
    return {  # pyright: ignore[reportReturnType]
        "schema": SCHEMA,
        "id": run_id(run),
        "status": status,
        "error": error,
        "run": record(run) if ran is None or status in CONTINUABLE else ran.record(),
        "metrics": summarise(evaluations) if status == FINISHED else {},
        "steps": steps,
        **totals,
        "bytes": traffic(totals["boundaries"], steps) | shared,
        "speed": speed(totals["boundaries"], seconds["train"], tokens),
        "device": str(device),
        "seconds": {key: round(value, 4) for key, value in seconds.items()},
        "environment": provenance(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **fields,
    }


def summarise(evaluations: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers of a finished run.

    Plain names are the last epoch's; `best_val.*` is the test score at the epoch that validation
    chooses (first of equals), per inference mode; `best_test.*` is the authors' choice, the best of
    all evaluations on the test set itself, kept to show how far it flatters.
    """
    last = evaluations[-1]
    out = {key: value for key, value in last.items() if key.startswith(("train_", "val_", "test_"))}
    name, best = ("acc", max) if "test_on_acc" in last else ("ppl", min)
    for mode in ("on", "off"):
        score = f"test_{mode}_{name}"
        if f"val_{mode}_{name}" in last:
            chosen = best(evaluations, key=lambda e: e[f"val_{mode}_{name}"])
            out |= {f"best_val.{score}": chosen[score], f"best_val.{mode}_epoch": chosen["epoch"]}
        out[f"best_test.{score}"] = best(e[score] for e in evaluations)
    return out


def speed(ledger: dict[str, dict[str, int]], seconds: float, tokens: int) -> dict[str, float]:
    """Training throughput; of text also in tokens, with what a token costs at one boundary each
    way.
    """
    samples = max([boundary["samples"] for boundary in ledger.values()], default=0)
    out = {"samples_per_second": samples / seconds if seconds else 0.0}
    if tokens and samples:
        out["tokens_per_second"] = samples * tokens / seconds if seconds else 0.0
        for side in ("fwd", "bwd"):
            out[f"{side}_bytes_per_token"] = (
                sum(b[side] for b in ledger.values()) / len(ledger) / (samples * tokens)
            )
    return out


@cache
def provenance() -> dict[str, str]:
    """Return what the last bits of an outcome depend on beside its settings and its device."""
    capability = torch.backends.cpu.get_cpu_capability()
    facts = {
        "processor": f"{processor()}, {capability}",
        "torch": torch.__version__.split("+")[0],
        "commsweep": version("commsweep"),
    }
    commit = environment("cpu")["commit"]
    return facts | ({"commit": commit[:12]} if commit else {})


def processor() -> str:
    """The processor's maker, family and model, by which libraries choose their kernels."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        fields = {
            key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)
        }
        return " ".join(fields[key] for key in ("vendor_id", "cpu family", "model"))
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


@cache
def environment(device: str) -> dict[str, Any]:
    """Return what a run was executed with."""
    names = ("torch", "torchvision", "pytorch-lightning", "numpy", "pydantic")
    package = Path(__file__).resolve().parent
    git = ["git", "-C", str(package)]
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=False
    ).stdout
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "commit": commit or None,
        "dirty": bool(dirty.strip()),
        "versions": {name: version(name) for name in names},
    }

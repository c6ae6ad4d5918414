"""The sections of a Run that do not go together, and why: one table, read by the Run, by real
pipelines, and by the reference.

What concerns one section alone is that section's own validator (`config/*.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Run = Any  # a commsweep.config.Run, whose module reads this one
RUN, PIPELINE = "run", "real pipeline"


@dataclass(frozen=True)
class Exclusion:
    """Two things that a Run cannot have at once. `one` and `other` are names in `PRESENT`."""

    first: str
    second: str
    why: str
    mend: str


def _several_steps(run: Run) -> str:
    steps = run.grad.local_steps
    return f"grad.local_steps={steps}" if steps > 1 else ""


def _coders(run: Run) -> str:
    links = [run.fwd, *(links.fwd for links in run.at.values())]
    link_coded = next((link for link in links if link.compressor.coder), None)
    return f"fwd.compressor.kind={link_coded.compressor.kind}" if link_coded else ""


def _start_step(run: Run) -> str:
    for where, links in (("", run), *((f"at.{cut}.", links) for cut, links in run.at.items())):
        for side in ("fwd", "bwd"):
            if start := getattr(links, side).start_step:
                return f"{where}{side}.start_step={start}"
    return ""


def _layerwise(run: Run) -> str:
    compressor = run.grad.compressor
    dense_layers = compressor.joint or compressor.layerwise
    return f"grad.compressor.kind={compressor.kind}" if dense_layers else ""


def _not_elementwise(run: Run) -> str:
    return "" if run.optim.elementwise else f"optim.kind={run.optim.kind}"


def _no_gradient_steps(run: Run) -> str:
    return f"optim.kind={run.optim.kind}" if run.optim.own_exchange else ""


def _checkpointing(run: Run) -> str:
    on = getattr(run.model, "gradient_checkpointing", False)
    return "model.gradient_checkpointing=true" if on else ""


# What a Run has, as its settings say it; "" where it has not.
PRESENT: dict[str, Callable[[Run], str]] = {
    "kfac": lambda run: "kfac" if run.kfac else "",
    "sparsity": lambda run: "sparsity" if run.sparsity else "",
    "outer steps": lambda run: "grad.outer" if run.grad.outer else "",
    "shards": lambda run: "grad.sharded" if run.grad.sharded else "",
    "sums by hops": lambda run: (
        "" if run.grad.collective == "exact" else f"grad.collective={run.grad.collective}"
    ),
    "local steps": _several_steps,
    "microbatches": lambda run: f"microbatches={n}" if (n := run.microbatches) > 1 else "",
    "coder": _coders,
    "layer-wise compressor": _layerwise,
    "matrix optimizer": _not_elementwise,
    "optimizer with an exchange of its own": _no_gradient_steps,
    "gradient checkpointing": _checkpointing,
    "delay": lambda run: "delay" if run.delay else "",
    "warm start in steps": _start_step,
    "recalibration": lambda run: f"recalibrate={n}" if (n := run.recalibrate) else "",
    PIPELINE: lambda run: "a real pipeline",
}

_SHARD = "an owner knows only its shard of a layer"
_MASK = "a learner's own steps would leave the mask"
_APART = "learners that train apart have weights of their own"
_STAGE = "a stage has a part of the layers only"
_SIMULATE = "simulate it with commsweep run, or execute learners as processes with commsweep ddp"
EXCLUSIONS = (
    Exclusion("kfac", "shards", _SHARD, "set kfac=null or grad.sharded=null"),
    Exclusion("sparsity", "shards", _SHARD, "set sparsity=null or grad.sharded=null"),
    Exclusion(
        "sparsity",
        "sums by hops",
        "a hop has a part of a layer, and which of its weights live is known of whole layers",
        "leave one out",
    ),
    Exclusion("matrix optimizer", "shards", _SHARD, "set optim.kind=sgd or adamw"),
    Exclusion(
        "kfac",
        "outer steps",
        "factors and preconditioned gradients are exchanged every step",
        "leave out one of both",
    ),
    Exclusion("kfac", "local steps", "factors are exchanged every step", "set grad.local_steps=1"),
    Exclusion(
        "kfac",
        "optimizer with an exchange of its own",
        "its steps are no gradients",
        "leave one out",
    ),
    Exclusion("kfac", "microbatches", "factors are of whole batches", "set microbatches=1"),
    Exclusion(
        "kfac",
        "gradient checkpointing",
        "it passes layers forward twice",
        "set model.gradient_checkpointing=false",
    ),
    Exclusion("sparsity", "kfac", "its factors are of dense layers", "leave one out"),
    Exclusion("sparsity", "local steps", _MASK, "set grad.local_steps=1"),
    Exclusion("sparsity", "outer steps", _MASK, "set grad.outer=null"),
    Exclusion(
        "sparsity",
        "layer-wise compressor",
        "it works on whole layers, not on the live weights alone",
        "use live, topk, uniform or another compressor of single messages, with a feedback for it",
    ),
    Exclusion(
        "sparsity",
        "coder",
        "no account of FLOPs has its own products",
        "choose another compressor",
    ),
    Exclusion(
        "local steps",
        PIPELINE,
        "its learners take steps of their own with grad.outer",
        "set grad.local_steps=1",
    ),
    Exclusion("delay", "sparsity", "old weights have the masks of their time", "leave one out"),
    Exclusion(
        "delay",
        "warm start in steps",
        "stages are at different steps at a time",
        "leave one out",
    ),
    Exclusion(
        "warm start in steps",
        "coder",
        "its code is a part of the model from the first step on",
        "leave start_step out",
    ),
    Exclusion("delay", "outer steps", _APART, "set delay=null or grad.outer=null"),
    Exclusion("delay", "shards", _SHARD, "set delay=null or grad.sharded=null"),
    Exclusion("delay", "local steps", _APART, "set delay=null or grad.local_steps=1"),
    Exclusion(
        "delay",
        "coder",
        "its weights are of both stages beside a boundary",
        "choose another compressor",
    ),
    Exclusion("shards", PIPELINE, _STAGE, _SIMULATE),
    Exclusion("kfac", PIPELINE, _STAGE, _SIMULATE),
    Exclusion("sparsity", PIPELINE, "a stage does not move masks", _SIMULATE),
    Exclusion(
        "recalibration",
        PIPELINE,
        "it is an evaluation of the whole network in one process",
        "set recalibrate=null, or simulate it with commsweep run",
    ),
)


def broken(run: Run, section: str = RUN) -> str:
    """The first exclusion that a run breaks, as one line; "" where there is none. section: RUN for
    every run, PIPELINE for what a real pipeline refuses beyond that.
    """
    for rule in EXCLUSIONS:
        if (PIPELINE in (rule.first, rule.second)) != (section == PIPELINE):
            continue
        first, second = PRESENT[rule.first](run), PRESENT[rule.second](run)
        if first and second:
            return f"{first} does not go with {second}: {rule.why}; {rule.mend}"
    return ""

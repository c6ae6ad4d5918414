"""Mixed Sparsity Training (arXiv 2408.11746) at equal FLOPs: against dense training for fewer
steps, a narrower dense model, static and dynamic masks, and itself without each part; and what a
mask saves on the wire.

Every arm but the dense one is planned to cost `SHARE` of it, by its sparsity or by its steps.
"""

from __future__ import annotations

from typing import Any

from commsweep.config import Run, override
from commsweep.config.sparsity import Sparsity
from commsweep.config.training import GPT2_SIZES
from commsweep.launching.grid import seeds
from commsweep.registry import preset
from commsweep.sparsity import predicted_cost

SHARE = 0.25  # of the dense run's FLOPs: the paper's
ALL, ULTRA = "sparsity.phases.all.sparsity", "sparsity.phases.ultra.sparsity"
PRUNE = "sparsity.phases.prune.sparsity+sparsity.phases.hold.sparsity"
# What brings an arm to the share: its sparsity, or its steps (None).
KNOBS: dict[str, str | None] = {
    "static": ALL,
    "set": ALL,
    "rigl": ALL,
    "granet": PRUNE,
    "mst": ULTRA,
    "no_warmup": ULTRA,
    "no_ultra": None,
    "no_restore": ULTRA,
    "gradient_growth": ULTRA,
    "random_growth": ULTRA,
}
LINKS = {
    "fwd.compressor.kind": "topk",
    "fwd.compressor.ratio": 0.2,
    "bwd.compressor.kind": "forward_mask",
}
LEARNERS = {"grad.learners": 4}
LIVE = LEARNERS | {"grad.compressor.kind": "live"}
LIVE_TOPK = LEARNERS | {
    "grad.exchange": "allgather",
    "grad.compressor.kind": "topk",
    "grad.compressor.ratio": 0.25,
    "grad.feedback.kind": "ef",
}


def cost(run: Run) -> float:
    """FLOPs of a run, planned."""
    return predicted_cost.of_run(run)["total"]


def for_steps(run: Run, flops: float) -> Run:
    """The run for as many steps (of several epochs: epochs) as cost so many FLOPs at most."""
    size, several = run.data.batch_size, run.epochs > 1

    def lasting(n: int) -> Run:
        return override(run, {"epochs": n} if several else {"data.train_blocks": n * size})

    n = run.epochs if several else len(predicted_cost.rows(run))
    for _ in range(8):  # phases move with the steps, so that a step's cost does, a little
        n = max(1, int(n * flops / cost(lasting(n)) + 1e-9))
    return lasting(n)


def at_sparsity(run: Run, setting: str, flops: float) -> Run:
    """The run at the sparsity that costs so many FLOPs, to three digits. Raises ValueError where
    none does.
    """

    def named(thousandths: int) -> Run:
        return override(run, dict.fromkeys(setting.split("+"), thousandths / 1000))

    low, high = 0, 999
    if cost(named(high)) > flops:
        raise ValueError(f"{setting}: even 0.999 costs more than {flops:.3g} FLOPs")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cost(named(middle)) <= flops else (middle, high)
    return named(high)


def arms(
    base: Run, share: float = SHARE, names: tuple[str, ...] = tuple(KNOBS), width: int = 16
) -> dict[str, Run]:
    """The dense run and arms at `share` of its FLOPs, by name. base: the dense run, counted. width:
    of sparse attention, in tokens.
    """
    dense, like = base, _like(base)
    flops = share * cost(dense)
    out = {
        "dense": dense,
        "short": for_steps(dense, flops),
        "narrow": for_steps(narrow(dense), flops),
    }
    for name in names:
        spec = _sparsity(preset(f"sotu_nano_{name}"))
        changes = like | ({"width": width} if spec.attends else {})
        run = base.model_copy(update={"sparsity": spec.model_copy(update=changes)})
        knob = KNOBS[name]
        out[name] = for_steps(run, flops) if knob is None else at_sparsity(run, knob, flops)
    if "mst" in out:  # as sparse at any time, so that attention alone differs
        width = _sparsity(preset("sotu_nano_dense_attention")).width
        changes = {"sparsity.phases.ultra.attention": "causal", "sparsity.width": width}
        out["dense_attention"] = override(out["mst"], changes)
    return out


def _sparsity(run: Run) -> Sparsity:
    """The section of a sparse run."""
    assert run.sparsity is not None
    return run.sparsity


def _like(run: Run) -> dict[str, Any]:
    """Return what all arms have in common with a run: how often masks move, and in which layers."""
    return {"interval": _sparsity(run).interval, "modules": _sparsity(run).modules}


def narrow(run: Run) -> Run:
    """The same depth and heads at half the width: about a quarter of the FLOPs a step."""
    return override(run, {"model.width": GPT2_SIZES[run.model.name][1] // 2})


def wire(arms_: dict[str, Run]) -> list[Run]:
    """MST between learners that send all gradients, live ones, and the largest of these; dense and
    MST over compressed boundaries.
    """
    mst, dense = arms_["mst"], arms_["dense"]
    return [
        *(override(mst, setting) for setting in (LEARNERS, LIVE, LIVE_TOPK)),
        override(dense, LINKS),
        override(mst, LINKS),
    ]


SOTU = "sotu_nano_counted"


def demo_sparse() -> list[Run]:
    """A nano GPT-2 at a quarter of the dense FLOPs, 240 steps, three seeds (`make demo-sparse`)."""
    arms_ = arms(preset(SOTU), names=tuple(name for name in KNOBS if not name.endswith("_growth")))
    return seeds([*arms_.values(), *wire(arms_)], 3)


def sparse_long() -> list[Run]:
    """The same for 2,000 steps, without the wire: half an hour of two cores."""
    base = override(
        preset(SOTU),
        {"data.train_blocks": 2000 * preset(SOTU).data.batch_size, "sparsity.interval": 50},
    )
    return seeds(list(arms(base).values()), 3)


def smoke_sparse() -> list[Run]:
    """Every arm on the tests' twin, one seed."""
    base = override(
        preset("synthetic_text"),
        {
            "data.train_blocks": 192,
            "epochs": 1,
            "sparsity.interval": 1,
            "sparsity.growth": "none",
            "sparsity.drop_fraction": 0,
        },
    )
    arms_ = arms(base, 0.5, width=8)
    return [*arms_.values(), *wire(arms_)]


def gpt2_mst() -> list[Run]:
    """GPT-2 small on a GPU: dense, for fewer steps, narrow, static, RigL and MST at a quarter of
    the FLOPs.
    """
    paper = preset("gpt2_mst")
    dense = paper.model_copy(
        update={"sparsity": _sparsity(preset(SOTU)).model_copy(update=_like(paper))}
    )
    return seeds(
        [*arms(dense, names=("static", "rigl"), width=_sparsity(paper).width).values(), paper], 3
    )


SWEEPS = {
    "demo-sparse": demo_sparse,
    "sparse-long": sparse_long,
    "smoke-sparse": smoke_sparse,
    "gpt2_mst": gpt2_mst,
}

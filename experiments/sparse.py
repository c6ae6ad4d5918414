"""Sparse pre-training of GPT-2 (Mixed Sparsity Training, arXiv 2408.11746) and what it is measured
against.

`sotu_nano_mst`     4 blocks of width 64 on the embedded corpus, 240 steps: dense to 80 % sparse (a
                    tenth of the run),
                    96 % with local or strided attention, evenly back to dense over the last 8 % of
                    the run; a quarter of the dense FLOPs; one CPU core, about 10 seconds
`sotu_nano_METHOD`  the same model and steps with static, set, rigl, granet or oneshot masks of 80
                    %, or dense and
                    counted (`counted`); no_warmup, no_ultra, no_restore, dense_attention,
                    gradient_growth, random_growth: MST without a part
`gpt2_mst`          GPT-2 small from scratch (blocks of 1024, head and tied embedding sparse, AdamW
                    6e-4, bfloat16), a
                    quarter of the dense FLOPs; one GPU. The authors train on OpenWebText, 480
                    blocks a step, 600,000 steps; this trains on what `data.name` says

The paper's own schedule is not public in readable form: the released configuration names settings
that its code does not read (docs/guide/sparse.md). Lengths and sparsities of the phases are
therefore ours; what is the authors' is Erdos-Renyi densities, magnitude pruning, growth by gradient
and at random three to one, a drop fraction of 0.3 falling as a cosine, patterns 128 wide over 1024
tokens. Hardware of gpt2_mst: minutes were not yet measured.
"""

from __future__ import annotations

from typing import Any

from commsweep.config import Run, override
from commsweep.config.sparsity import Phase, Sparsity
from commsweep.config.training import AdamWSpec, LinearSpec, TextModel, TextSet

from .text import NANO

WARMUP, ULTRA, RESTORE = "warmup", "ultra", "restore"
LEVEL = 0.8  # of the methods without phases
MST = Sparsity(
    phases={
        WARMUP: Phase(until=0.1, sparsity=0.8, shape="linear"),
        ULTRA: Phase(until=0.92, sparsity=0.96, attention="local_strided"),
        RESTORE: Phase(until=1.0, sparsity=0.0, shape="linear"),
    },
    growth="mixed",
    interval=8,
    width=16,
)
STATIC = Sparsity(
    phases={"all": Phase(until=1.0, sparsity=LEVEL)},
    drop_fraction=0.0,
    growth="none",
    interval=MST.interval,
)
ANY_WIDTH = Sparsity.model_fields["width"].default  # of attention that is dense throughout


def _changed(spec: Sparsity, **changes: Any) -> Sparsity:
    return Sparsity.model_validate(spec.model_dump() | changes)


def _phases(**changes: dict[str, Any] | None) -> dict[str, Any]:
    """MST's phases, some of them changed, or left out (None)."""
    plain = {name: phase.model_dump() for name, phase in MST.phases.items()}
    return {
        name: run | (changes.get(name) or {})
        for name, run in plain.items()
        if changes.get(name, {}) is not None
    }


METHODS: dict[str, Sparsity] = {
    "counted": _changed(STATIC, phases={"all": {"until": 1.0}}),
    "static": STATIC,
    "set": _changed(STATIC, drop_fraction=0.3, growth="random"),
    "rigl": _changed(STATIC, drop_fraction=0.3, growth="gradient", drop_until=0.75),
    "granet": _changed(
        STATIC,
        drop_fraction=0.5,
        growth="gradient",
        initial_sparsity=0.5,
        phases={
            "prune": {"until": 0.5, "sparsity": LEVEL, "shape": "cubic"},
            "hold": {"until": 1.0, "sparsity": LEVEL},
        },
    ),
    "oneshot": _changed(
        STATIC, phases={"dense": {"until": 0.5}, "pruned": {"until": 1.0, "sparsity": LEVEL}}
    ),
    "mst": MST,
}
ABLATIONS: dict[str, Sparsity] = {
    "no_warmup": _changed(MST, phases=_phases(warmup=None)),
    "no_ultra": _changed(MST, phases=_phases(ultra={"sparsity": MST.phases[WARMUP].sparsity})),
    "no_restore": _changed(MST, phases=_phases(ultra={"until": 1.0}, restore=None)),
    "dense_attention": _changed(
        MST, phases=_phases(ultra={"attention": "causal"}), width=ANY_WIDTH
    ),
    "gradient_growth": _changed(MST, growth="gradient"),
    "random_growth": _changed(MST, growth="random"),
}

SOTU = override(NANO, {"data.train_blocks": 240 * NANO.data.batch_size})
GPT2 = Run(
    model=TextModel(name="gpt2", stages=1),
    data=TextSet(name="sotu", tokenizer="gpt2", block_size=1024, batch_size=12, train_blocks=1800),
    optim=AdamWSpec(lr=6e-4, beta2=0.95, weight_decay=0.1),
    schedule=LinearSpec(warmup=0.3),
    epochs=20,
    precision="bfloat16",
    sparsity=_changed(
        MST,
        phases=_phases(ultra={"sparsity": 0.905, "until": 0.82}),
        interval=25,
        width=128,
        modules="all",
    ),
)

PRESETS = {
    f"sotu_nano_{name}": SOTU.model_copy(update={"sparsity": spec})
    for name, spec in (METHODS | ABLATIONS).items()
} | {"gpt2_mst": GPT2}

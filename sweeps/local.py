"""Learners that train apart and exchange rarely: DiLoCo (arXiv 2311.08105), Streaming DiLoCo
(2501.18512), SparseLoCo (2508.15706), DeMo (2411.19870), MuLoCo (2505.23725), NoLoCo (2506.10911),
SPARTA, Dion (2504.05295), at equal tokens and counted bytes (claims L1 to L7).

`METHODS` is the list that every table shows. Inner and outer rates are the best of the grid in
`local_tuning` on a seed that no claim sees; variants of a method keep its rates.
"""

from __future__ import annotations

from typing import Any

from commsweep.config import Run, override
from commsweep.launching.grid import TUNING_SEED, product, seeds, union
from commsweep.registry import preset

Changes = dict[str, Any]
APART: Changes = {"grad.learners": 4, "grad.outer.interval": 10}
GATHER: Changes = {"grad.exchange": "allgather", "grad.compress_vectors": True}
EF: Changes = {"grad.feedback.kind": "ef"}


def _codes(kind: str, **settings: Any) -> Changes:
    return (
        GATHER
        | {"grad.compressor.kind": kind}
        | {f"grad.compressor.{key}": value for key, value in settings.items()}
    )


DILOCO = APART | {"optim.lr": 1e-2, "grad.outer.rate": 0.2}
SPARSE = (
    APART
    | _codes("topk", ratio=1 / 64, scope="tile")
    | {
        "grad.compressor.values.kind": "statistical",
        "grad.outer.momentum": 0.0,
        "grad.outer.nesterov": False,
        "grad.outer.rate": 1.0,
        "optim.lr": 1e-2,
        "grad.feedback.kind": "ef",
        "grad.feedback.decay": 0.95,
    }
)
OFTEN = SPARSE | {"grad.outer.interval": 1}
MUON: Changes = {"optim.kind": "muon", "optim.lr": 2e-2}
MULOCO = APART | _codes("statistical") | EF | MUON | {"grad.outer.rate": 0.4}
DEMO: Changes = {
    "grad.learners": 4,
    "optim.kind": "sgd",
    "optim.lr": 3e-3,
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "grad.outer.interval": 1,
    "grad.outer.rate": 1.0,
    "grad.outer.momentum": 0.0,
    "grad.outer.nesterov": False,
    "grad.outer.aggregate": "senders",
    "grad.outer.sign": True,
    "grad.feedback.kind": "ef",
    "grad.feedback.decay": 0.999,
} | _codes("topk", ratio=32 / 4096, scope="tile", per_tile="number")
PAIRS = APART | {
    "grad.outer.peers": "pairs",
    "grad.outer.momentum": 0.5,
    "grad.outer.nesterov": False,
    "optim.lr": 1e-2,
    "grad.outer.rate": 0.4,
}
SPARTA = {
    "grad.learners": 4,
    "grad.outer.interval": 1,
    "grad.outer.rate": 1.0,
    "grad.outer.momentum": 0.0,
    "grad.outer.nesterov": False,
    "grad.outer.local_update": "sent",
    "grad.compressor.kind": "randomk",
    "grad.compressor.ratio": 0.005,
    "grad.compress_vectors": True,
}
DION: Changes = {
    "grad.learners": 4,
    "grad.compressor.kind": "dion",
    "grad.feedback.kind": "decoupled",
    "optim.kind": "dion",
    "optim.lr": 2e-2,
    "optim.rest_lr": 1e-2,
    "optim.beta2": 0.95,
    "optim.weight_decay": 0.1,
}

METHODS: dict[str, Changes] = {
    "plain": {},
    "every step": {"grad.learners": 4},
    "Muon": MUON,
    "DiLoCo": DILOCO,
    "DiLoCo, every 100": DILOCO | {"grad.outer.interval": 100},
    "E3M0": DILOCO | _codes("e3m0"),
    "4 bits": DILOCO | _codes("uniform", bits=4),
    "2 bits": DILOCO | _codes("uniform", bits=2),
    "2 bits, statistical": DILOCO | _codes("statistical"),
    "2 bits, EF": DILOCO | _codes("uniform", bits=2) | EF,
    "2 bits, statistical, EF": DILOCO | _codes("statistical") | EF,
    "overlap": DILOCO | {"grad.outer.overlap": 1, "grad.outer.local_share": 0.5},
    "fragments": DILOCO
    | _codes("e3m0")
    | {"grad.outer.overlap": 1, "grad.outer.local_share": 0.5, "grad.outer.fragments": 2},
    "SparseLoCo": SPARSE,
    "SparseLoCo, senders": SPARSE | {"grad.outer.aggregate": "senders"},
    "SparseLoCo, Rice": SPARSE | {"grad.compressor.index_coding": "rice"},
    "SparseLoCo, every step": OFTEN,
    "MuLoCo": MULOCO,
    "MuLoCo, dense": APART | MUON | {"grad.outer.rate": 0.4},
    "DeMo": DEMO | {"grad.transform": "dct"},
    "DeMo, Hadamard": DEMO | {"grad.transform": "hadamard"},
    "DeMo, no transform": DEMO,
    "NoLoCo": PAIRS,
    "SPARTA": SPARTA,
    "Dion": DION,
}
# Both parallelisms at once, about 200 kB a step in all (4 % of dense): which of the two is squeezed
# harder?
BOTH: dict[str, Changes] = {
    "boundaries harder": DILOCO
    | {"grad.outer.interval": 25}
    | {
        "fwd.compressor.kind": "topk",
        "fwd.compressor.ratio": 0.2,
        "fwd.compressor.values.kind": "uniform",
        "fwd.compressor.values.bits": 4,
        "fwd.compressor.values.scale": "sample",
        "bwd.compressor.kind": "forward_mask",
        "bwd.compressor.values.kind": "uniform",
        "bwd.compressor.values.bits": 2,
        "bwd.compressor.values.scale": "group",
        "bwd.compressor.values.rounding": "stochastic",
    },
    "learners harder": DILOCO
    | _codes("statistical")
    | EF
    | {
        f"{side}.compressor.{key}": value
        for side, bits, rounding in (("fwd", 4, "nearest"), ("bwd", 2, "stochastic"))
        for key, value in (
            ("kind", "uniform"),
            ("bits", bits),
            ("scale", "group"),
            ("rounding", rounding),
        )
    },
}
MORE = (
    "4 bits",
    "fragments",
    "Muon",
    "2 bits, EF",
    "2 bits, statistical, EF",
    "SparseLoCo, Rice",
    "MuLoCo",
    "MuLoCo, dense",
    "DeMo, Hadamard",
    "every step",
    "NoLoCo",
    "SPARTA",
    "Dion",
)
LINKED = (
    "every step",
    "DiLoCo",
    "E3M0",
    "2 bits, EF",
    "overlap",
    "SparseLoCo",
    "SparseLoCo, every step",
    "DeMo",
    "NoLoCo",
    "SPARTA",
    "Dion",
)  # measured over shaped links
LEARNERS = (1, 2, 8)  # of DiLoCo, beside 4
RATES = {"optim.lr": (5e-3, 1e-2, 2e-2), "grad.outer.rate": (0.2, 0.4, 0.7, 1.0)}
TUNED: dict[str, Changes] = {
    "plain": {"optim.lr": (2.5e-3, *RATES["optim.lr"])},
    "DiLoCo": RATES,
    "SparseLoCo": RATES,
    "SparseLoCo, every step": RATES,
    "MuLoCo": RATES | {"optim.lr": (1e-2, 2e-2, 4e-2, 8e-2)},
    "Muon": {"optim.lr": (1e-2, 2e-2, 4e-2, 8e-2)},
    "DeMo": {"optim.lr": (1e-3, 3e-3, 1e-2)},
    "NoLoCo": RATES,
    "SPARTA": {"optim.lr": (2.5e-3, *RATES["optim.lr"])},
    "Dion": {"optim.lr": (1e-2, 2e-2, 4e-2, 8e-2, 0.16), "optim.rest_lr": (5e-3, 1e-2)},
}


def base() -> Run:
    """A nano GPT-2 for 200 steps of 16 blocks, shared by the learners."""
    return override(preset("sotu_nano"), {"epochs": 2})


def local_tuning() -> list[Run]:
    """Inner and outer rates of each method, on one seed; eight minutes on two cores."""
    return [
        run
        for name, axes in TUNED.items()
        for run in product(override(base(), METHODS[name] | {"seed": TUNING_SEED}), axes)
    ]


def demo_local() -> list[Run]:
    """The methods of most claims three times, and DiLoCo by the number of learners; six minutes on
    two cores.
    """
    run = base()
    return seeds(
        union(
            [override(run, run_) for name, run_ in METHODS.items() if name not in MORE],
            [override(run, DILOCO | {"grad.learners": n}) for n in LEARNERS],
        ),
        3,
    )


def local_methods() -> list[Run]:
    """The same and the other methods, and both parallelisms at once; ten minutes on two cores."""
    run = base()
    # Rice codes change nothing but the bytes.
    others_runs = [METHODS[name] for name in MORE if name != "SparseLoCo, Rice"]
    return union(
        demo_local(), seeds([override(run, run_) for run_ in (*others_runs, *BOTH.values())], 3)
    )


def smoke_local() -> list[Run]:
    """Every method on the tests' twin: seconds."""
    run = override(preset("synthetic_text"), {"epochs": 2})
    return union([override(run, run_) for run_ in (*METHODS.values(), *BOTH.values())])


SWEEPS = {
    "demo-local": demo_local,
    "local_methods": local_methods,
    "local_tuning": local_tuning,
    "smoke-local": smoke_local,
}

"""AdaComp (arXiv 1712.02679) and the methods it is measured against, on convolutions, perceptrons
and a GPT-2.

`METHODS` is the list that every table of methods shows: dotted changes by name. What a method's
paper leaves to the user (learning rate, momentum) is part of it.
"""

from __future__ import annotations

from typing import Any

from commsweep.config import Run, override
from commsweep.launching.grid import seeds, union
from commsweep.registry import preset

GATHER = {"grad.exchange": "allgather"}
EF = {"grad.feedback.kind": "ef"}
ADACOMP = GATHER | {"grad.compressor.kind": "adacomp", "grad.feedback.kind": "adacomp"}


def _ratio_of(kind: str, ratio: float, **settings: Any) -> dict[str, Any]:
    return GATHER | {"grad.compressor.kind": kind, "grad.compressor.ratio": ratio} | settings


METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "AdaComp": ADACOMP,
    "TopK 1 %": _ratio_of("topk", 0.01, **EF),
    "TopK 0.2 %": _ratio_of("topk", 0.002, **EF),
    "RandomK 1 %": _ratio_of("randomk", 0.01, **EF) | {"grad.exchange": "allreduce"},
    "threshold": GATHER | EF | {"grad.compressor.kind": "threshold", "grad.compressor.value": 0.02},
    "Dryden 1 %": _ratio_of("dryden", 0.01, **EF),
    "SIDCo 1 %": _ratio_of("sidco", 0.01, **EF),
    # The momentum is in what is sent, so the optimizer has none.
    "DGC 1 %": _ratio_of("topk", 0.01)
    | {
        "grad.feedback.kind": "dgc",
        "grad.schedule.kind": "ramp",
        "grad.schedule.epochs": 2,
        "optim.momentum": 0.0,
    },
    "CLT-k 1 %": _ratio_of("cltk", 0.01, **EF) | {"grad.exchange": "allreduce"},
    # ScaleCom's filter; its paper takes 0.1 for large batches, and beta 1 is plain error feedback.
    "ScaleCom 1 %": _ratio_of("cltk", 0.01)
    | {"grad.exchange": "allreduce", "grad.feedback.kind": "lowpass", "grad.feedback.beta": 0.1},
    "EF21 TopK 1 %": _ratio_of("topk", 0.01) | {"grad.feedback.kind": "ef21"},
    # A mean instead of a sum of the last gradients: ten times the rate makes it momentum 0.9.
    "EF21-SGDM TopK 1 %": _ratio_of("topk", 0.01)
    | {
        "grad.feedback.kind": "ef21_sgdm",
        "grad.feedback.eta": 0.1,
        "optim.momentum": 0.0,
        "optim.lr": 0.5,
    },
    "PowerSGD 2": EF | {"grad.compressor.kind": "powersgd", "grad.compressor.rank": 2},
    "Accordion PowerSGD 1-4": EF
    | {
        "grad.compressor.kind": "powersgd",
        "grad.compressor.rank": 1,
        "grad.schedule.kind": "accordion",
        "grad.schedule.mild": 4.0,
        "grad.schedule.every": 2,
    },
    # Every entry moves by the learning rate, so it has to be that of a sign method.
    "signSGD, vote": GATHER
    | {
        "grad.compressor.kind": "sign",
        "grad.compressor.scale": "one",
        "grad.vote": True,
        "grad.exchange": "server",
        "optim.lr": 0.0003,
    },
    "EF-signSGD": GATHER | EF | {"grad.compressor.kind": "sign"},
    "1-bit": GATHER | EF | {"grad.compressor.kind": "onebit"},
    "TernGrad": GATHER | {"grad.compressor.kind": "tern"},
    "QSGD 4": GATHER | {"grad.compressor.kind": "qsgd", "grad.compressor.levels": 4},
    "Local SGD, 4 steps": {"grad.local_steps": 4},
    "natural": GATHER | {"grad.compressor.kind": "natural"},
    "LoCo 4 bit": GATHER
    | {
        "grad.compressor.kind": "fixed",
        "grad.compressor.bits": 4,
        "grad.feedback.kind": "loco",
        "grad.compressor.scale": "group",
    },
}


def methods(base: Run, names: tuple[str, ...] = tuple(METHODS), learners: int = 4) -> list[Run]:
    """`base` with these methods and so many learners."""
    return [override(base, {"grad.learners": learners} | METHODS[name]) for name in names]


def robustness(
    base: Run, learners: tuple[int, ...] = (1, 4, 8), batches: tuple[int, ...] = (32, 128)
) -> list[Run]:
    """Dense and AdaComp over numbers of learners, and over minibatch sizes with four."""
    pairs = [{"grad.learners": n} for n in learners] + [
        {"grad.learners": 4, "data.batch_size": b} for b in batches
    ]
    return [override(base, pair | METHODS[name]) for pair in pairs for name in ("dense", "AdaComp")]


def both(base: Run, levels: tuple[float, ...] = (0.3, 0.1)) -> list[Run]:
    """TopK at the boundaries times gradient compression: do the losses add?"""
    links = [{}] + [
        {
            f"{side}.compressor.{key}": value
            for side in ("fwd", "bwd")
            for key, value in (("kind", "topk"), ("ratio", level))
        }
        for level in levels
    ]
    return [
        override(base, link | {"grad.learners": 4} | METHODS[name])
        for link in links
        for name in ("dense", "AdaComp")
    ]


def demo_gradients() -> list[Run]:
    """Every method on a perceptron, AdaComp's claims also on a ResNet and a GPT-2 (`make
    demo-gradients`).
    """
    resnet, mlp, gpt2 = (preset(name) for name in ("digits", "digits_mlp", "sotu_nano"))
    return seeds(
        union(
            methods(mlp),
            robustness(mlp),
            both(mlp),
            methods(resnet, ("dense", "AdaComp", "TopK 1 %")),
            methods(gpt2, ("dense", "AdaComp")),
        ),
        3,
    )


def smoke_gradients() -> list[Run]:
    """The same shape on synthetic data in seconds, for tests."""
    return union(
        methods(preset("synthetic")),
        robustness(preset("synthetic"), (1, 2), ()),
        both(preset("synthetic"), (0.3,)),
    )


def cifar_gradients() -> list[Run]:
    """ResNet-18 on CIFAR-10: every method with 8 learners, AdaComp over learners and minibatches, 3
    seeds.
    """
    base = preset("resnet18_corrected")
    return seeds(union(methods(base, learners=8), robustness(base, (1, 8, 16), (64, 256))), 3)


def adacomp_gru() -> list[Run]:
    """Characters and GRU layers, with SGD and AdamW: dense, AdaComp over learners, TopK at its
    bytes and five times as many, a learner alone, which is the floor, and a zero gradient, which
    is no step at all; three seeds; half an hour of a core.
    """
    changes = {"model.name": "gru", "model.stages": 1, "data.train_blocks": 6400}
    runs = []
    for optimizer in ({}, {"optim.kind": "sgd", "optim.lr": 0.4}):
        base = override(preset("sotu_nano"), changes | optimizer)
        runs += methods(base, ("dense", "AdaComp", "TopK 1 %", "TopK 0.2 %"))
        runs.append(
            override(base, {"grad.learners": 4} | GATHER | {"grad.compressor.kind": "zero"})
        )
        runs += methods(base, ("AdaComp",), learners=8)
        runs.append(override(base, {"data.batch_size": 4, "data.train_blocks": 1600}))
    return seeds(runs, 3, first=20)


SWEEPS = {
    "demo-gradients": demo_gradients,
    "smoke-gradients": smoke_gradients,
    "cifar_gradients": cifar_gradients,
    "adacomp_gru": adacomp_gru,
}

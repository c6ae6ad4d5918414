"""Distributed K-FAC (SPD-KFAC, arXiv 2107.06533): quality of K-FAC and SGD, both tuned, and of
coded factors; and iterations of real processes over shaped links.
"""

from __future__ import annotations

from typing import Any

from commsweep.config import Run, override, run_id
from commsweep.config.execution import LearnerWiring
from commsweep.launching.grid import seeds, union
from commsweep.registry import preset

Measurement = tuple[Run, LearnerWiring]

RATES = (0.03, 0.1, 0.3)  # of learning, for SGD and for K-FAC


def _coded(bits: int, **settings: Any) -> dict[str, Any]:
    return {
        "kfac.compressor.kind": "uniform",
        "kfac.compressor.bits": bits,
        "kfac.compressor.scale": "group",
    } | settings


# What travels of the factors; the first one is the base that the others are compared with.
FACTORS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"kfac.compressor.kind": "cast"},
    "8 bit": _coded(8),
    "4 bit": _coded(4),
    "EF + 4 bit": _coded(4, **{"kfac.feedback.kind": "ef"}),
    "4 bit, eigenvectors": _coded(4, **{"kfac.method": "eigen"}),
    "owners' data (DP-KFAC)": {"kfac.statistics": "owner"},
}
# Algorithms as wirings; S-SGD is another run.
WIRINGS: dict[str, dict[str, Any]] = {
    "d": {"fusion": "after", "placement": "everywhere"},
    "mpd": {"fusion": "after", "placement": "spread"},
    "spd": {"fusion": "pipelined", "placement": "balanced"},
}
FUSIONS = ("after", "layer", "threshold", "pipelined")
# elements, a fifth of all: so the threshold makes several messages, as it does on large networks
BUFFER = 2**17


def tuned(base: Run) -> list[Run]:
    """SGD and K-FAC, each over learning rates."""
    sgd = override(base, {"kfac": "null"})
    return [override(run, {"optim.lr": rate}) for run in (sgd, base) for rate in RATES]


def coded(base: Run) -> list[Run]:
    """K-FAC with every way of sending factors."""
    return [override(base, change) for change in FACTORS.values()]


def demo_kfac() -> list[Run]:
    """A perceptron and a small ResNet on digits, four learners, five seeds (`make demo-kfac`)."""
    images = override(
        preset("digits_kfac"),
        {
            "eval_every": 1,
            "epochs": 8,
            "schedule.t_max": 8,
            "optim.lr": 0.1,
            "data.batch_size": 256,
            "kfac.kl_clip": 0.01,
        },
    )
    plain = override(
        images,
        {"model.name": "mlp", "model.width": 128, "channels_last": False, "data.batch_size": 64},
    )
    return seeds(union(*(make(base) for base in (plain, images) for make in (tuned, coded))), 5)


def smoke_kfac() -> list[Run]:
    """The same shape on synthetic data in seconds, for tests."""
    base = override(
        preset("synthetic"),
        {"model.cuts": [], "grad.learners": 2, "kfac.damping": 0.03, "optim.lr": 0.1},
    )
    return union(tuned(base), coded(base))


def measured(
    base: Run,
    learners: int,
    bandwidths: tuple[float, ...],
    steps: int,
    fusions: tuple[float, ...] = (),
) -> list[Measurement]:
    """Every algorithm over every bandwidth, factors and inverses new in each step; `fusions`:
    bandwidths at which all fusions are compared.
    """
    plan: list[Measurement] = []
    run = override(
        base, {"kfac.factors_every": 1, "kfac.inverses_every": 1, "grad.learners": learners}
    )
    plain = override(run, {"kfac": "null"})
    for rate in bandwidths:
        plan.append((plain, LearnerWiring(bandwidth=rate, steps=steps)))
        plan += [
            (run, LearnerWiring(bandwidth=rate, steps=steps, **how)) for how in WIRINGS.values()
        ]
    plan += [
        (
            run,
            LearnerWiring(
                bandwidth=rate,
                steps=steps,
                placement="everywhere",
                fusion=fusion,
                buffer=BUFFER if fusion == "threshold" else LearnerWiring().buffer,
            ),
        )
        for rate in fusions
        for fusion in FUSIONS
    ]
    return list({(run_id(run), wiring): (run, wiring) for run, wiring in plan}.values())


def demo_measured() -> list[Measurement]:
    """A wider digits network: two learners over 300 Mbit/s, 1 Gbit/s and unlimited links, four over
    500 Mbit/s and unlimited ones.
    """
    base = override(preset("digits_kfac"), {"model.width": 12, "data.batch_size": 256})
    return measured(base, 2, (3e8, 1e9, 0.0), 20, (3e8, 1e9, 0.0)) + measured(
        base, 4, (5e8, 0.0), 20
    )


def smoke_measured() -> list[Measurement]:
    """Measurements of toy size."""
    base = override(preset("synthetic"), {"model.cuts": [], "kfac.damping": 0.03})
    return measured(base, 2, (2e8, 0.0), 12)


# What `commsweep kfac` measures; the sweep of the same name trains.
PLANS = {"demo-kfac": demo_measured, "smoke-kfac": smoke_measured}
SWEEPS = {
    "demo-kfac": demo_kfac,
    "smoke-kfac": smoke_kfac,
}

"""Distributed K-FAC (SPD-KFAC, arXiv 2107.06533): quality of K-FAC and SGD, both tuned, and of coded factors; and
iterations of real processes over shaped links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commsweep.experiments.config import LearnerWiring, Run, override, run_id
from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.presets import preset
from commsweep.sweeps.grid import seeds, union

Measurement = tuple[Run, LearnerWiring]

SGD_RATES = (0.02, 0.05, 0.1, 0.2)
KFAC_RATES = (0.02, 0.05, 0.1)


def _coded(bits: int, **more: Any) -> dict[str, Any]:
    return {"kfac.compressor.kind": "uniform", "kfac.compressor.bits": bits, "kfac.compressor.scale": "group"} | more


# What travels of the factors; the first one is the base that the others are compared with.
FACTORS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"kfac.compressor.kind": "cast"},
    "8 bit": _coded(8),
    "4 bit": _coded(4),
    "EF + 4 bit": _coded(4, **{"kfac.feedback.kind": "ef"}),
    "owner's data (DP-KFAC)": {"kfac.statistics": "owner"},
}
# Algorithms as wirings; S-SGD is another run.
WIRINGS = {"d": {"fusion": "after", "placement": "everywhere"}, "mpd": {"fusion": "after", "placement": "spread"},
           "spd": {"fusion": "pipelined", "placement": "balanced"}}
FUSIONS = ("after", "layer", "threshold", "pipelined")


def rates(base: Run) -> list[Run]:
    """SGD and K-FAC, each over learning rates."""
    sgd = override(base, {"kfac": "null"})
    return ([override(sgd, {"optim.lr": rate}) for rate in SGD_RATES]
            + [override(base, {"optim.lr": rate}) for rate in KFAC_RATES])


def coded(base: Run) -> list[Run]:
    """K-FAC with every way of sending factors."""
    return [override(base, change) for change in FACTORS.values()]


def demo_kfac() -> list[Run]:
    """Digits with four learners, three seeds (`make demo-kfac`)."""
    base = override(preset("digits_kfac"), {"eval_every": 1, "epochs": 8, "schedule.t_max": 8})
    return seeds(union(rates(base), coded(base)), 3)


def smoke_kfac() -> list[Run]:
    """The same shape on synthetic data in seconds, for tests."""
    base = override(preset("synthetic"), {"model.cuts": [], "grad.learners": 2, "kfac.damping": 0.03})
    return union(rates(base), coded(base))


def measured(base: Run, learners: tuple[int, ...], bandwidths: tuple[float, ...], steps: int,
             fusions: tuple[float, ...] = ()) -> list[Measurement]:
    """Every algorithm over every bandwidth, factors and inverses new in each step; `fusions`: bandwidths at which all
    fusions are compared. The threshold is a quarter of the factors, the small ones have up to 300 rows."""
    wanted: list[Measurement] = []
    every = override(base, {"kfac.factors_every": 1, "kfac.inverses_every": 1})
    for n in learners:
        run = override(every, {"grad.learners": n})
        plain = override(run, {"kfac": "null"})
        for rate in bandwidths:
            common = {"bandwidth": rate, "steps": steps, "small": SMALL}
            wanted.append((plain, LearnerWiring(**common)))
            wanted += [(run, LearnerWiring(**common, **how)) for how in WIRINGS.values()]
        wanted += [(run, LearnerWiring(bandwidth=rate, steps=steps, small=SMALL, placement="everywhere",
                                       fusion=fusion, buffer=BUFFER)) for rate in fusions for fusion in FUSIONS]
    return list({(run_id(run), wiring): (run, wiring) for run, wiring in wanted}.values())


SMALL, BUFFER = 300, 2**18


def demo_measured() -> list[Measurement]:
    """A wider digits network, two and four learners, 100 Mbit/s to unlimited."""
    base = override(preset("digits_kfac"), {"model.width": 16})
    return measured(base, (2, 4), (2e8, 5e8, 0.0), 24, (2e8,))


def smoke_measured() -> list[Measurement]:
    """Measurements of toy size."""
    base = override(preset("synthetic"), {"model.cuts": [], "kfac.damping": 0.03, "grad.learners": 2})
    return measured(base, (2,), (2e8, 0.0), 12)


PLANS: dict[str, tuple[Callable[[], list[Run]], Callable[[], list[Measurement]]]] = {
    "demo-kfac": (demo_kfac, demo_measured), "smoke-kfac": (smoke_kfac, smoke_measured)}


def plan(name: str) -> tuple[list[Run], list[Measurement]]:
    """The runs and the measurements of a named plan. Raises UserError naming the nearest one."""
    if name not in PLANS:
        raise UserError(f"unknown plan '{name}'{nearest(name, PLANS)} (one of: {', '.join(PLANS)})")
    runs, measurements = PLANS[name]
    return runs(), measurements()

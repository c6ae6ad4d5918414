"""What compression at the boundaries buys on links of some bandwidth and latency: runs with their wiring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commsweep.experiments.config import Run, Wiring, override
from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.presets import preset

Measurement = tuple[Run, Wiring]

BANDWIDTHS = (10e6, 100e6, 1e9, 0.0)
STEPS = 30


def _both(kind: str, **parameters: Any) -> dict[str, Any]:
    return {f"{side}.compressor.{key}": value for side in ("fwd", "bwd")
            for key, value in {"kind": kind, **parameters}.items()}


METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "8 bits": _both("uniform", bits=8),
    "4 bits": _both("uniform", bits=4),
    "TopK 10 %": _both("topk", ratio=0.1),
    "EF21 TopK 5 %": _both("topk", ratio=0.05) | {f"{side}.feedback.kind": "ef21" for side in ("fwd", "bwd")},
}


def _grid(base: Run, methods: list[str], bandwidths: tuple[float, ...], latency: float = 0.0, schedule: str = "gpipe",
          steps: int = STEPS) -> list[Measurement]:
    return [(override(base, METHODS[method]), Wiring(schedule=schedule, bandwidth=rate, latency=latency, steps=steps))
            for rate in bandwidths for method in methods]


def demo_links() -> list[Measurement]:
    """A small ResNet on digits in four stages and four microbatches: every method at 10 and 100 Mbit/s, 1 Gbit/s and
    unlimited; both schedules; two latencies."""
    base = override(preset("digits"), {"microbatches": 4})
    some = ["dense", "4 bits", "TopK 10 %"]
    return (_grid(base, list(METHODS), BANDWIDTHS) + _grid(base, some, BANDWIDTHS, schedule="1f1b")
            + _grid(base, some, (10e6, 100e6), latency=0.02))


def links_text() -> list[Measurement]:
    """A nano GPT-2 in four stages and four microbatches, whose tied embeddings cross all links, too."""
    base = override(preset("sotu_nano"), {"microbatches": 4})
    return _grid(base, ["dense", "4 bits", "TopK 10 %"], BANDWIDTHS)


def smoke_links() -> list[Measurement]:
    """Two measurements of toy size."""
    return _grid(override(preset("synthetic"), {"microbatches": 4}), ["dense", "4 bits"], (100e6, 0.0), steps=6)


PLANS: dict[str, Callable[[], list[Measurement]]] = {
    "demo-links": demo_links, "links-text": links_text, "smoke-links": smoke_links}


def plan(name: str) -> list[Measurement]:
    """The measurements of a named plan. Raises UserError naming the nearest one."""
    if name not in PLANS:
        raise UserError(f"unknown plan '{name}'{nearest(name, PLANS)} (one of: {', '.join(PLANS)})")
    return PLANS[name]()

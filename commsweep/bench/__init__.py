"""`commsweep bench`: speed as ratios, both sides timed in turn in one process, so a noisy machine
hits both.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module

from commsweep.errors import UserError, nearest


@dataclass
class Result:
    """A ratio against its bound (None: nothing is promised). `at_most` False: it must be at least
    the bound.
    """

    name: str
    ratio: float
    bound: float | None
    at_most: bool = True
    medians: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Return whether the bound is met."""
        return self.bound is None or (
            self.ratio <= self.bound if self.at_most else self.ratio >= self.bound
        )


def alternate(
    sides: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side, run in turn A B A B ... after `warmup` uncounted rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(warmup + rounds):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def paired(seconds: dict[str, list[float]], a: str, b: str) -> float:
    """Median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))


# Modules of this folder, each with `bench() -> Iterable[Result]`; a new one adds its name.
BENCHES = (
    "start",
    "codecs",
    "boundary",
    "steps",
    "text",
    "store",
    "sweep",
    "gradients",
    "hook",
    "wire",
    "kfac",
    "sparse",
    "gpu",
)


def table(name: str, results: list[Result]) -> str:
    """A bench's results in Markdown, with what its module says of how they are measured."""
    summary = (import_module(f"commsweep.bench.{name}").__doc__ or "").strip()
    lines = [f"## {name}", "", summary, "", "| measure | ratio | bound | |", "|---|---|---|---|"]
    for result in results:
        sign = "at most" if result.at_most else "at least"
        bound = "-" if result.bound is None else f"{sign} {result.bound:g}"
        verdict = "" if result.bound is None else "holds" if result.holds else "missed"
        lines.append(f"| {result.name} | {result.ratio:.2f} | {bound} | {verdict} |")
    return "\n".join(lines) + "\n"


def run(name: str | None, as_json: bool, as_table: bool = False) -> int:
    """Run one bench or all, print every ratio, exit 1 if a bound is missed."""
    if name is not None and name not in BENCHES:
        raise UserError(
            f"unknown bench '{name}'{nearest(name, BENCHES)} (one of: {', '.join(BENCHES)})"
        )
    results: list[Result] = []
    as_lines = not (as_json or as_table)
    for part_name in [name] if name else [bench for bench in BENCHES if bench != "gpu"]:
        began, before = time.perf_counter(), len(results)
        for result in import_module(f"commsweep.bench.{part_name}").bench():
            results.append(result)
            if as_lines:
                sign = "<=" if result.at_most else ">="
                bound = "" if result.bound is None else f" {sign} {result.bound:g}"
                verdict = (
                    "shown " if result.bound is None else "holds " if result.holds else "MISSED"
                )
                raw = ", ".join(f"{key} {value:.4g}" for key, value in result.medians.items())
                print(f"{verdict} {result.name}: {result.ratio:.3f}{bound}   ({raw})", flush=True)
        if as_table:
            print(table(part_name, results[before:]), flush=True)
        if as_lines:
            print(f"       bench {part_name} took {time.perf_counter() - began:.0f} s", flush=True)
    if as_json:
        print(json.dumps([asdict(result) | {"holds": result.holds} for result in results]))
    return 0 if all(result.holds for result in results) else 1

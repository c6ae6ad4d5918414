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
    the bound. `interval`: where the ratio lies with 95 %, if several rounds were measured.
    """

    name: str
    ratio: float
    bound: float | None
    at_most: bool = True
    medians: dict[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        """Return whether the bound "holds" or is "missed", "unresolved" if it lies within the
        interval, or "" without a bound.
        """
        if self.bound is None:
            return ""
        low, high = self.interval or (self.ratio, self.ratio)
        if low <= self.bound <= high and low < high:
            return "unresolved"
        met = self.ratio <= self.bound if self.at_most else self.ratio >= self.bound
        return "holds" if met else "missed"


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
    return statistics.median(_ratios(seconds, a, b))


def _ratios(seconds: dict[str, list[float]], a: str, b: str) -> list[float]:
    return [x / y for x, y in zip(seconds[a], seconds[b], strict=True)]


def compared(
    name: str,
    seconds: dict[str, list[float]],
    a: str,
    b: str,
    bound: float | None,
    at_most: bool = True,
) -> Result:
    """The result of one side over another."""
    medians = {f"{side} ms": 1e3 * statistics.median(seconds[side]) for side in (a, b)}
    return of_rounds(name, _ratios(seconds, a, b), bound, at_most, medians)


def of_rounds(
    name: str,
    ratios: list[float],
    bound: float | None,
    at_most: bool = True,
    medians: dict[str, float] | None = None,
) -> Result:
    """The median of ratios, and its 95 % interval by order statistics (fewer than six: their
    range).
    """
    from scipy.stats import binom  # it takes long to load

    ordered = sorted(ratios)
    outside = max(int(binom.ppf(0.025, len(ordered), 0.5)) - 1, 0)
    interval = ordered[outside], ordered[-1 - outside]
    return Result(name, statistics.median(ordered), bound, at_most, medians or {}, interval)


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
    lines = [f"## {name}", "", summary, ""]
    lines += ["| measure | ratio | 95 % interval | bound | |", "|---|---|---|---|---|"]
    for result in results:
        sign = "at most" if result.at_most else "at least"
        bound = "-" if result.bound is None else f"{sign} {result.bound:g}"
        cells = [result.name, f"{result.ratio:.2f}", _range(result), bound, result.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _range(result: Result) -> str:
    if result.interval is None:
        return "one round"
    low, high = result.interval
    return f"{low:.2f} to {high:.2f}"


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
                shown = {"": "shown", "missed": "MISSED"}.get(result.verdict, result.verdict)
                ratio = f"{result.ratio:.3f} ({_range(result)}){bound}"
                raw = ", ".join(f"{key} {value:.4g}" for key, value in result.medians.items())
                line = f"{shown:10} {result.name}: {ratio}" + (f"   ({raw})" if raw else "")
                print(line, flush=True)
        if as_table:
            print(table(part_name, results[before:]), flush=True)
        if as_lines:
            print(f"{'':10} bench {part_name} took {time.perf_counter() - began:.0f} s", flush=True)
    if as_json:
        print(json.dumps([asdict(result) | {"verdict": result.verdict} for result in results]))
    return 1 if any(result.verdict == "missed" for result in results) else 0

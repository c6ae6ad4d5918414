"""Ours: codes of 2025 and 2026 (microscaling formats, rotations, EDEN) against min-max codes.
Claims R1 and R2.

Losses are nats of test loss, or points of test accuracy, against another arm of the same seed,
compression on at inference.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from commsweep.reporting.claim import SLIGHT, Claim, Wanted
from commsweep.reporting.results import base, is_text, lost_against, plain, score_and_sign
from commsweep.reporting.statistics import interval
from commsweep.reporting.style import (
    Draw,
    chosen,
    distinct_looks,
    drawing,
    front_of,
    logarithmic,
    plt,
    scatter,
    size,
)
from commsweep.reporting.table import ON, PERCENT, PLAIN, SHARE, Table, cell

from .bias import NOTICEABLE, PERPLEXITY, gained

NAME = "codes"
ROTATIONS = ("rotated", "eden", "ms_eden")


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: of a sweep with a rotated code."""
    rows = plain(frame)
    kinds = rows[["fwd.compressor.kind", "bwd.compressor.kind"]]
    return rows if kinds.isin(ROTATIONS).any(axis=None) else rows.iloc[:0]


def tables(frame: pd.DataFrame) -> list[Table]:
    """Return what every code lost, and its bytes."""
    text = is_text(frame)
    score, unit, digits = ("perplexity", "nats", 3) if text else ("accuracy", "points", 2)
    called = "test perplexity a byte" if text else "test accuracy (%)"
    table = Table(
        "codes",
        f"Codes of activations and of gradients: {called}, {unit} lost, bytes",
        ["Setting", score, f"{unit} lost", "95 % interval", "seeds", "bytes (%)"],
    )
    for name, group, lost in _losses(frame):
        ends = interval(lost)
        table.rows.append(
            [
                name,
                cell(group, PERPLEXITY, PLAIN) if text else cell(group, ON, PERCENT),
                f"{sum(lost) / len(lost):.{digits}f}" if lost else "-",
                f"[{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if ends else "-",
                str(len(lost)),
                cell(group, "bytes.ratio", SHARE),
            ]
        )
    return [table]


def _losses(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame, list[float]]]:
    """(method, its rows, nats or points lost against the dense run of the same seed), least
    first.
    """
    done = frame[frame.status == "finished"]
    score = score_and_sign(frame)
    if score[0] not in done:
        return []
    done = done.assign(training=base(done, "fwd.", "bwd."))
    dense = done[done.method.str.startswith("dense")]
    done = done.assign(lost=lost_against(done, dense, ["training", "seed"], score))
    losses = []
    for method, group in done.groupby("method", sort=False):
        losses.append((str(method), group, list(group.lost.dropna())))
    return sorted(losses, key=lambda entry: sum(entry[2]) / max(1, len(entry[2])))


def _code(side: str, bits: int, rounding: str = "nearest", rotated: bool = False) -> Wanted:
    """Min-max codes of groups of 128, behind a rotation or not."""
    opposite = "bwd" if side == "fwd" else "fwd"
    inner = f"{side}.compressor.code" if rotated else f"{side}.compressor"
    values: Wanted = {
        f"{opposite}.compressor.kind": "none",
        f"{inner}.kind": "uniform",
        f"{inner}.bits": bits,
        f"{inner}.scale": "group",
        f"{inner}.rounding": rounding,
    }
    if rotated:
        values[f"{side}.compressor.kind"] = "rotated"
    return values


def r1(frame: pd.DataFrame) -> Claim:
    """A rotation before 2-bit activations."""
    rotated, four, two = _code("fwd", 2, rotated=True), _code("fwd", 4), _code("fwd", 2)
    return Claim(
        "R1",
        "A random rotation makes 2-bit activations as good as 4-bit activations without one "
        f"(within {NOTICEABLE:g} nats, {SLIGHT:g} point), and better than 2 bits without one, by "
        "as much.",
        [
            *gained(
                frame,
                "2 bit behind a rotation over 4 bit",
                rotated,
                four,
                sign="within",
                text=NOTICEABLE,
            ),
            *gained(frame, "2 bit behind a rotation over 2 bit", rotated, two, text=NOTICEABLE),
        ],
    )


def r2(frame: pd.DataFrame) -> Claim:
    """Unbiased 4-bit codes of gradients."""
    dense: Wanted = {"fwd.compressor.kind": "none", "bwd.compressor.kind": "none"}
    forward: Wanted = {"fwd.compressor.kind": "none"}
    arms: dict[str, Wanted] = {
        "EDEN 4 bit": forward | {"bwd.compressor.kind": "eden", "bwd.compressor.bits": 4},
        "MS-EDEN": forward | {"bwd.compressor.kind": "ms_eden"},
        "MXFP4 stochastic": forward
        | {"bwd.compressor.kind": "mx", "bwd.compressor.rounding": "stochastic"},
        "min-max 4 bit stochastic": _code("bwd", 4, "stochastic"),
    }
    return Claim(
        "R2",
        f"An unbiased code of 4 bits for gradients costs less than {NOTICEABLE:g} nats, or "
        f"{SLIGHT:g} point.",
        [
            effect
            for name, arm in arms.items()
            for effect in gained(
                frame, f"dense over {name}", dense, arm, sign="below", text=NOTICEABLE
            )
        ],
    )


CLAIMS = [r1, r2]


# Figures.


def codes(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """The loss of codes against their bytes, of activations and of gradients. The line joins
    what nothing with as few bytes beats. Bars: 95 % intervals of the mean.
    """
    losses = _losses(frame)
    unit = "nats" if is_text(frame) else "points"
    if len(losses) < 3:
        return None
    panels = [
        (title, [entry for entry in losses if entry[0].startswith(f"{title}:")])
        for title in ("activations", "gradients")
    ]
    panels = [(title, entries) for title, entries in panels if entries]
    if not panels:
        return None
    with drawing():
        figure, axes = plt.subplots(
            1, len(panels), figsize=size(min(2, len(panels)), 3.2), squeeze=False
        )
        for axis, (title, entries) in zip(axes[0], panels, strict=True):
            points = []
            for method, group, lost in entries:
                share = group[f"bytes.{'fwd' if title == 'activations' else 'bwd'}_ratio"].mean()
                name = method.removeprefix(f"{title}: ")
                points.append({"name": name, "x": 100 * share, "values": list(lost)})
            frame_ = pd.DataFrame(points)
            front = front_of(frame_)
            styles = distinct_looks(chosen(frame_["name"], front["name"]))
            scatter(axis, frame_, styles, front, log=False)
            axis.axhline(0, color="0.6", lw=0.7, ls=":")
            axis.set(title=title, xlabel="bytes that way (% of dense)", ylabel=f"{unit} lost")
            # marks are a panel's own, because a code has another name in each
            axis.legend(loc="upper right", fontsize="small")
            logarithmic(axis.xaxis)
    return figure


FIGURES: dict[str, Draw] = {"codes": codes}

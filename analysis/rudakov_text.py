"""The language-model section: perplexity against TopK level and against bytes a token; claims C7
and C8.

Perplexity is exp of the mean loss over all predicted tokens of the test split, at the last epoch.
Bytes a token are those of one boundary, averaged over the boundaries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from commsweep.reporting.claim import DENSE, Claim, Effect, Wanted, difference
from commsweep.reporting.results import distinct, plain
from commsweep.reporting.style import drawing, ends, legend, look, plot, plt, size
from commsweep.reporting.table import PLAIN, RATE, SHARE, Cell, Table, cell

NAME = "text"
SOURCE = "arXiv 2401.07788"
ON, OFF, LOSS = "test_on_ppl", "test_off_ppl", "test_on_loss"
BYTES = ("speed.fwd_bytes_per_token", "speed.bwd_bytes_per_token")
NOTICEABLE = 0.02  # nats: 2 % of perplexity
LARGE = 0.1
SHARED, SEPARATE = "shared mask", "separate masks"


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: one learner, text."""
    rows = plain(frame)
    return rows[rows["data.tokenizer"].notna()] if "data.tokenizer" in rows else rows.iloc[:0]


def tables(frame: pd.DataFrame) -> list[Table]:
    """TopK by level and mask, and every method by bytes."""
    return [table for table in (topk(frame), methods(frame)) if table.rows]


def topk(frame: pd.DataFrame) -> Table:
    """TopK over whole sequences at each level: the gradient with the activation's mask, or with its
    own.
    """
    table = Table(
        "topk",
        "TopK over the sequence: test perplexity",
        [
            "Masks",
            "K",
            "compressed inference",
            "dense inference",
            "seeds",
            "bytes/token fwd",
            "bytes/token bwd",
        ],
    )
    dense = frame[_fits(frame, DENSE)]
    for name, label, rows in [
        *(("dense", text, rows) for text, rows in distinct(dense, "100 %")),
        *_levels(frame),
    ]:
        if len(rows):
            table.rows.append([name, label, *_scores(rows)])
    return table if len(table.rows) > 1 else Table("topk", "", [])


def methods(frame: pd.DataFrame) -> Table:
    """Every setting of the sweep, best first: what it sends and how it scores."""
    table = Table(
        "methods",
        "All methods: test perplexity and bytes",
        [
            "Method",
            "compressed inference",
            "dense inference",
            "seeds",
            "bytes/token fwd",
            "bytes/token bwd",
            "bytes (% of dense)",
        ],
    )
    groups = list(frame.groupby("method", sort=False))
    for method, rows in sorted(
        groups, key=lambda entry: cell(entry[1], ON).mean if cell(entry[1], ON).values else math.inf
    ):
        table.rows.append([str(method), *_scores(rows), cell(rows, "bytes.ratio", SHARE)])
    return table


def c7(frame: pd.DataFrame) -> Claim:
    """20 % raises the loss, 30 % does not yet."""

    def harm(ratio: float, **region: Any) -> list[Effect]:
        return _loss(
            frame,
            f"loss, TopK {100 * ratio:g} % (shared mask) minus dense",
            _topk(ratio),
            DENSE,
            **region,
        )

    return Claim(
        "C7",
        f"TopK begins to raise the loss from K = 20 % (noticeable: {NOTICEABLE:g} nats).",
        harm(0.2, above=NOTICEABLE) + harm(0.3, below=NOTICEABLE),
    )


def c8(frame: pd.DataFrame) -> Claim:
    """Separate masks lose much against a shared one; a diverged run counts as guessing among all
    tokens.
    """
    effects = [
        effect
        for ratio in (0.2, 0.1)
        for effect in _loss(
            frame,
            f"TopK {100 * ratio:g} %: loss, separate masks minus shared",
            _topk(ratio, shared=False),
            _topk(ratio),
            above=LARGE,
        )
    ]
    return Claim(
        "C8",
        "Activations and gradients need a shared mask; separate ones can diverge (large: "
        f"{LARGE:g} nats).",
        effects,
    )


CLAIMS = [c7, c8]


def equal_bytes(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """The methods that cost about an eighth of the dense bytes, best first, inference with and
    without compression.

    Bars: 95 % intervals over seeds.
    """
    arms = (
        frame[frame["bytes.ratio"].between(0.11, 0.14)]
        if "bytes.ratio" in frame
        else frame.iloc[:0]
    )
    shown = [
        (str(method), cell(rows, ON), cell(rows, OFF))
        for method, rows in arms.groupby("method", sort=False)
    ]
    shown = [entry for entry in shown if entry[1].values]
    shown.sort(key=lambda entry: -entry[1].mean)
    if not shown:
        return None
    with drawing():
        figure, axis = plt.subplots(figsize=size(1, 0.8 + 0.22 * len(shown)))
        height = range(len(shown))
        axis.hlines(
            height,
            [on.mean for _, on, _ in shown],
            [off.mean for _, _, off in shown],
            color="0.7",
            lw=1,
            zorder=1,
        )
        scored = {
            "compressed inference": [on for _, on, _ in shown],
            "dense inference": [off for _, _, off in shown],
        }
        for label, cells in scored.items():
            means = [ends(cell.values) for cell in cells]
            style = look(label, ls="none")
            plot(axis, list(height), means, label, sideways=True, **style)
        axis.set_yticks(
            list(height), [method.replace(", ", "\n") for method, *_ in shown], fontsize="small"
        )
        dense = frame[(frame[["fwd.compressor.kind", "bwd.compressor.kind"]] == "none").all(axis=1)]
        if len(dense) and dense[ON].notna().any():
            axis.axvline(dense[ON].mean(), color="black", lw=0.8, ls="--", label="dense training")
        axis.set(xlabel="test perplexity", title="at about 1/8 of the dense bytes")
        axis.xaxis.set_major_locator(MaxNLocator(5))
        legend(figure)
    return figure


FIGURES = {"equal_bytes": equal_bytes}


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """method, family, ppl, bytes (both ways) and the cell of every setting with a finished run."""
    records = []
    for method, rows in frame.groupby("method", sort=False):
        score = cell(rows, ON)
        if score.values and all(cell(rows, name).values for name in BYTES):
            sent = sum(cell(rows, name).mean for name in BYTES)
            records.append(
                {
                    "method": method,
                    "family": family(str(method)),
                    "ppl": score.mean,
                    "bytes": sent,
                    "cell": score,
                }
            )
    return pd.DataFrame(records, columns=["method", "family", "ppl", "bytes", "cell"])


def family(method: str) -> str:
    """The method without its level."""
    words = method.partition(" (")[0].replace(",", "").split(" / ")[0].split()
    kept_words = [
        word for word in words if not word.replace(".", "").isdigit() and word not in ("%", "bit")
    ]
    return " ".join(kept_words) + (
        f" {SEPARATE}" if "TopK" in kept_words and "shared" not in kept_words else ""
    )


def _whiskers(cells: list[Cell]) -> np.ndarray:
    """Lower and upper spread; on a logarithmic axis the lower one must not reach zero."""
    spread = np.array([cell.sd or 0.0 for cell in cells])
    return np.stack([np.minimum(spread, np.array([cell.mean for cell in cells]) / 2), spread])


def _scores(rows: pd.DataFrame) -> list[Cell | str]:
    n = int((rows.status == "finished").sum())
    return [
        cell(rows, ON, PLAIN),
        cell(rows, OFF, PLAIN),
        str(n),
        *(cell(rows, name, RATE) for name in BYTES),
    ]


def _levels(frame: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(masks, level, runs) of plain TopK over sequences, shared masks first, mildest first."""
    if "fwd.compressor.ratio" not in frame:
        return []
    levels = []
    ratios = sorted(frame["fwd.compressor.ratio"].dropna().unique(), reverse=True)
    for name, shared in ((SHARED, True), (SEPARATE, False)):
        for ratio in ratios:
            rows = frame[_fits(frame, _topk(ratio, shared))]
            levels += [
                (name, text, group)
                for text, group in distinct(rows, f"{100 * ratio:g} %")
                if len(group)
            ]
    # Byte-matched arms have odd levels of their own; a level belongs here if both masks or whole
    # percents have it.
    return [level for level in levels if float(level[1].split()[0]).is_integer()]


def _topk(ratio: float, shared: bool = True) -> Wanted:
    bwd: Wanted = (
        {"bwd.compressor.kind": "forward_mask"}
        if shared
        else {"bwd.compressor.kind": ("topk", "topk_strict"), "bwd.compressor.ratio": ratio}
    )
    return {
        "fwd.compressor.kind": ("topk", "topk_strict"),
        "fwd.compressor.ratio": ratio,
        "fwd.compressor.scope": ("sample", None),
    } | bwd


def _fits(frame: pd.DataFrame, values: Wanted) -> pd.Series:
    fits = pd.Series(True, index=frame.index)
    for key, value in ({"fwd.feedback.kind": "none", "bwd.feedback.kind": "none"} | values).items():
        options = value if isinstance(value, tuple) else (value,)
        column = frame[key] if key in frame else pd.Series(np.nan, index=frame.index)
        fits &= column.isin([option for option in options if option is not None]) | (
            column.isna() & (None in options)
        )
    return fits


def _loss(frame: pd.DataFrame, label: str, a: Wanted, b: Wanted, **region: Any) -> list[Effect]:
    words = 256 if (frame["data.tokenizer"] == "bytes").all() else 50257
    a, b = (
        {key: value for key, value in arm.items() if not key.endswith("scope")} for arm in (a, b)
    )
    return difference(frame, label, (a, LOSS), (b, LOSS), unit=1.0, guess=math.log(words), **region)

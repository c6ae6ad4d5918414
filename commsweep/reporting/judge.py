"""Verdicts on rows of anybody: which columns are the score, the seed and the settings, and what
the seeds say of each pair of settings.

A setting is compared with one other, seed by seed. Effects, p-values, their correction and the
seeds that would decide are those of `claim`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from commsweep.errors import UserError, nearest
from commsweep.reporting.claim import (
    CONTRADICTED,
    SUPPORTED,
    TWO_OUTCOMES,
    Claim,
    Effect,
    Looked,
    adjust,
    adjustment,
    shown,
)
from commsweep.reporting.foreign_rows import Rows
from commsweep.reporting.statistics import far, grid_of, interval, mean_sd
from commsweep.reporting.style import INK, plt, size, styled
from commsweep.reporting.table import Table

ORDER = "order"  # --seed order: the rows of a setting are numbered as they stand
LOWER_WORDS = {
    "loss",
    "losses",
    "error",
    "err",
    "ppl",
    "perplexity",
    "nll",
    "mse",
    "mae",
    "rmse",
    "wer",
    "cer",
    "fid",
    "bpb",
    "bpc",
}
HIGHER_WORDS = {
    "acc",
    "accuracy",
    "top1",
    "top5",
    "f1",
    "auc",
    "auroc",
    "map",
    "iou",
    "miou",
    "bleu",
    "rouge",
    "reward",
    "return",
    "score",
    "recall",
    "precision",
    "psnr",
    "ssim",
    "r2",
}
SPLITS = (("test",), ("val", "valid", "validation", "eval", "dev"), (), ("train", "training"))
SEEDS = {"rng", "replicate", "rep", "repeat", "trial", "fold"}
STEPS = {"step", "steps", "global", "epoch", "iter", "iteration"}
# Of a tracker's table: what says who, when and where, and no setting.
MARGINS = {
    "id",
    "name",
    "state",
    "status",
    "created",
    "updated",
    "timestamp",
    "runtime",
    "duration",
    "time",
    "date",
    "start",
    "end",
    "host",
    "hostname",
    "user",
    "notes",
    "tags",
    "group",
    "commit",
    "path",
    "folder",
    "when",
    "job",
    "url",
    "version",
    "device",
    "gpu",
    "error",
    "exception",
    "message",
    "index",
}
IDENTITIES = {"id", "hash", "uuid", "sha"}
# Words of a status that say failure, or that the training has not ended.
FAILED = {"failed", "failure", "fail", "crashed", "crash", "killed", "error", "oom", "diverged"}
FAILED |= {"nan", "timeout", "stopped", "aborted", "cancelled", "canceled", "preempted", "lost"}
UNENDED = {"running", "pending", "queued", "scheduled", "interrupted", "missing"}
ENDED = {"finished", "completed", "complete", "done", "success", "succeeded", "ok", ""}
BASELINES = ("dense", "baseline", "control", "none", "base", "fp32", "full", "off", "false")
CLAIM = re.compile(r"^(?P<left>.+?)\s+(?P<sign><|>|=)\s+(?P<right>.+)$")
MARGIN = re.compile(r"^(?P<right>.+?)\s+(?P<sign>\+-|±|\+|-)\s+(?P<margin>[\d.]+(?:e-?\d+)?)$")
MOST_DIGITS = 6
PAIRED = 2 / 3  # share of the seeds that two settings need in common to be compared seed by seed
LABEL = 48  # characters of a setting in the figure


@dataclass(frozen=True)
class Columns:
    """The role of each column. step: of several rows of a training, the last by it counts."""

    score: str
    seed: str
    settings: tuple[str, ...]
    lower: bool  # the lower the score the better
    step: str | None = None


@dataclass
class Judged:
    """The scores of each setting by seed, and the verdicts."""

    columns: Columns
    scores: dict[str, dict[Any, float]]
    lost: dict[str, int]  # trainings without a score, by setting
    why: dict[str, Counter[str]] = field(default_factory=dict)  # they have none
    statuses: Counter[str] = field(
        default_factory=Counter
    )  # that are not known, and counted as ended
    baseline: str | None = None
    claims: list[Claim] = field(default_factory=list)

    @property
    def grid(self) -> float:
        """The step of which all scores are multiples; 0 where there is none."""
        return grid_of(score for seeds in self.scores.values() for score in seeds.values())

    @property
    def digits(self) -> int:
        """Return the digits behind the point that tell settings apart."""
        deviations = [
            mean_sd(list(seeds.values()))[1] for seeds in self.scores.values() if len(seeds) > 1
        ]
        middle = median([sd for sd in deviations if sd > 0] or [1.0])
        return min(MOST_DIGITS, max(0, 1 - math.floor(math.log10(middle))))


def columns(
    rows: Rows,
    score: str | None = None,
    seed: str | None = None,
    settings: Sequence[str] = (),
    better: str | None = None,
) -> Columns:
    """Return what each column is: as named, else by its name and values. Raises UserError on an
    unknown column, and where nothing can be guessed.
    """
    frame = rows.frame
    for option, named in (("score", score), ("seed", seed), ("setting", None)):
        for name in [named] if option != "setting" else settings:
            is_order = option == "seed" and name == ORDER
            if name is not None and not is_order and name not in frame:
                close = nearest(name, map(str, frame.columns))
                raise UserError(f"--{option} {name}: no such column{close}; {_listed(frame)}")
    score = score or _score(rows)
    if (wrong := _wrong_cell(frame[score])) is not None:
        row, text = wrong
        raise UserError(
            f"{score}: row {row} holds '{text}', which is no number; mend it, or leave it empty"
        )
    if not is_numeric_dtype(frame[score]) or is_bool_dtype(frame[score]):
        raise UserError(f"--score {score}: not a column of numbers; {_listed(frame)}")
    seed = seed or _seed(frame)
    if seed is None:
        raise UserError(
            "no column looks like a seed; name it with --seed COLUMN, or number the rows of each "
            f"setting as they stand with --seed {ORDER}; {_listed(frame)}"
        )
    step = _step(frame, {score, seed, *settings})
    chosen = tuple(settings) or _settings(rows, {score, seed, step})
    lower = better == "lower" if better else _is_lower(score)
    return Columns(score, seed, chosen, lower, step)


def judge(
    rows: Rows,
    columns: Columns,
    against: str | None = None,
    claims: Iterable[str] = (),
    earlier: Sequence[int] = (),
) -> Judged:
    """Return verdicts: on the claims, or on each setting against one.

    claims: "a < b - 0.01" of the means of settings a and b. earlier: numbers of seeds at which
    the verdicts were looked at before.
    """
    judged = _scores(rows.frame, columns)
    if not any(judged.scores.values()):
        raise UserError(f"--score {columns.score}: no row has a number there")
    names = list(judged.scores)
    claims = list(claims)
    if claims:
        judged.claims = [_claim(text, judged) for text in claims]
    elif len(names) > 1:
        judged.baseline = _setting(against, names, "--against") if against else _baseline(names)
        judged.claims = [
            _better(name, judged.baseline, judged) for name in names if name != judged.baseline
        ]
    interim = {}
    for claim in judged.claims:
        for effect in claim.effects:
            interim[claim.name, effect.what] = Looked(list(earlier), len(earlier) + 1)
    adjust(judged.claims, interim if earlier else None)
    return judged


def _scores(frame: pd.DataFrame, columns: Columns) -> Judged:
    labels = _labels(frame, columns.settings)
    seeds = frame.get(columns.seed)
    if seeds is None:  # in their order
        seeds = labels.groupby(labels).cumcount()
    numbers = range(1, len(frame) + 1)
    ends = _ends(frame)
    numbered = frame.assign(_label=labels, _seed=seeds, _end=ends, _row=numbers)
    keys = ["_label", "_seed"] if columns.step is None else ["_label", "_seed", columns.step]
    with_score = numbered if columns.step is None else numbered[numbered[columns.score].notna()]
    if with_score.duplicated(keys).any():
        groups = with_score.groupby(keys, sort=False, dropna=False)
        first, second = next(rows for _, rows in groups if len(rows) > 1).to_dict("records")[:2]
        label, seed = first["_label"], first["_seed"]
        raise UserError(
            f"rows {first['_row']} and {second['_row']} both are of setting '{label}', seed "
            f"{seed}: remove one, name the columns that tell them apart with --setting COLUMN, or "
            f"use --seed {ORDER}; {_listed(frame)}"
        )
    if columns.step is not None:
        numbered = numbered.sort_values(columns.step, kind="stable")
    scores: dict[str, dict[Any, float]] = {label: {} for label in dict.fromkeys(labels)}
    why: dict[str, Counter[str]] = {label: Counter() for label in scores}
    for (label, seed), training in numbered.groupby(["_label", "_seed"], sort=False, dropna=False):
        values = training[columns.score].dropna()
        failures = [end for end in training["_end"] if end]
        if failures:
            why[label][failures[-1]] += 1
        elif not len(values):
            why[label]["without a score"] += 1
        elif not math.isfinite(values.iloc[-1]):
            why[label]["diverged"] += 1
        else:
            scores[label][seed] = float(values.iloc[-1])
    lost = {label: counts.total() for label, counts in why.items()}
    return Judged(columns, scores, lost, why=why, statuses=_unknown(frame))


def _labels(frame: pd.DataFrame, settings: tuple[str, ...]) -> pd.Series:
    """Return the name of each row's setting: "topk", or "lr=0.1, opt=adam"."""
    if not settings:
        return pd.Series("all rows", index=frame.index)
    pieces = []
    for name in settings:
        values = frame[name].map(_value)
        bare = len(settings) == 1 and not is_numeric_dtype(frame[name])
        pieces.append(values if bare else f"{name}=" + values)
    labels = pieces[0]
    for texts in pieces[1:]:
        labels = labels + ", " + texts
    return labels


def _value(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:g}"
    return str(value)


def _statuses(frame: pd.DataFrame) -> list[str]:
    """The status of each row, "" where none is recorded."""
    name = next((name for name in frame if str(name).lower() in ("status", "state")), None)
    if name is None:
        return [""] * len(frame)
    return ["" if value is None or value != value else str(value).lower() for value in frame[name]]


def _ends(frame: pd.DataFrame) -> list[str]:
    """Why a row counts for nothing, "" where it counts: a status that says failure, or that the
    training has not ended.
    """
    return [status if status in FAILED | UNENDED else "" for status in _statuses(frame)]


def _unknown(frame: pd.DataFrame) -> Counter[str]:
    statuses = _statuses(frame)
    return Counter(status for status in statuses if status not in FAILED | UNENDED | ENDED)


# Verdicts.


def _effect(a: str, b: str, judged: Judged, sign: str, edge: float = 0.0) -> Effect:
    """Return the effect a - b, which is claimed above (>), below (<) or within (=) an edge."""
    first, second = judged.scores[a], judged.scores[b]
    shared = [seed for seed in first if seed in second]
    effect = Effect(
        f"{a} - {b}",
        above=edge if sign == ">" else None,
        below=edge if sign == "<" else None,
        within=edge if sign == "=" else None,
        digits=judged.digits,
        lost=judged.lost[a] + judged.lost[b],
        grid=judged.grid,
    )
    if judged.columns.seed == ORDER or len(shared) < PAIRED * max(len(first), len(second)):
        effect.unmatched = list(first.values()), list(second.values())
        if first and second:  # their mean is the difference of both means
            middle = mean_sd(effect.unmatched[1])[0]
            effect.values = [score - middle for score in effect.unmatched[0]]
        return effect
    effect.values = [first[seed] - second[seed] for seed in shared]
    effect.by = [int(seed) if str(seed).isdigit() else at for at, seed in enumerate(shared)]
    return effect


def _better(name: str, baseline: str, judged: Judged) -> Claim:
    effect = _effect(name, baseline, judged, "<" if judged.columns.lower else ">")
    return Claim(f"{name} against {baseline}", f"{name} is better", [effect], source="")


def _claim(text: str, judged: Judged) -> Claim:
    """Return the claim of a line such as "a < b - 0.01"."""
    names = list(judged.scores)
    matched = CLAIM.match(text.strip())
    if matched is None:
        raise UserError(
            f'--claim \'{text}\': write "A < B", "A > B + 0.5" or "A = B +- 0.5", with spaces '
            f"around the sign; settings: {', '.join(names)}"
        )
    right, sign, margin = matched["right"].strip(), matched["sign"], 0.0
    if right not in names and (edge := MARGIN.match(right)):
        right, margin = edge["right"].strip(), float(edge["margin"])
        if (edge["sign"] in ("+-", "±")) != (sign == "="):
            raise UserError(f"--claim '{text}': +- goes with =, and + or - with < or >")
        margin = -margin if edge["sign"] == "-" else margin
    if sign == "=" and margin <= 0:
        raise UserError(f"--claim '{text}': equal within what? write \"A = B +- 0.5\"")
    a = _setting(matched["left"].strip(), names, "--claim")
    if right not in names and (number := _constant(right)) is not None:
        effect = _against_number(a, number, judged, sign, margin)
        return Claim(text, "given on the command line", [effect], source="")
    b = _setting(right, names, "--claim")
    if a == b:
        raise UserError(f"--claim '{text}': compares '{a}' with itself; name two settings")
    effect = _effect(a, b, judged, sign, margin)
    return Claim(text, "given on the command line", [effect], source="")


def _constant(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _against_number(name: str, number: float, judged: Judged, sign: str, edge: float) -> Effect:
    """The effect of a setting against a constant: its scores minus that (one-sample t)."""
    effect = Effect(
        f"{name} - {number:g}",
        above=edge if sign == ">" else None,
        below=edge if sign == "<" else None,
        within=edge if sign == "=" else None,
        digits=judged.digits,
        lost=judged.lost[name],
        grid=judged.grid,
    )
    effect.values = [score - number for score in judged.scores[name].values()]
    effect.by = list(range(len(effect.values)))
    return effect


def _setting(name: str, names: list[str], option: str) -> str:
    if name not in names:
        raise UserError(
            f"{option} '{name}': no such setting{nearest(name, names)}; "
            f"settings: {', '.join(names)}"
        )
    return name


def _baseline(names: list[str]) -> str:
    for word in BASELINES:
        for name in names:
            if word in (name.lower(), *_words(name)):
                return name
    return names[0]


# Guesses.


def _words(name: str) -> list[str]:
    """Return the words of a column's name: of "val/topAcc" val, top, acc."""
    split = re.sub(r"([a-z])([A-Z])", r"\1 \2", str(name))
    return [word for word in re.split(r"[^a-z0-9]+", split.lower()) if word]


def _is_lower(score: str) -> bool:
    return bool(set(_words(score)) & LOWER_WORDS)


def _score(rows: Rows) -> str:
    """Return the first column that sounds like a score: of a test, then of validation."""
    numeric = [
        str(name)
        for name in rows.metrics or rows.frame
        if (is_numeric_dtype(rows.frame[name]) and not is_bool_dtype(rows.frame[name]))
        or _wrong_cell(rows.frame[name]) is not None
    ]
    for split in SPLITS:
        for kinds in (HIGHER_WORDS, LOWER_WORDS):
            for name in numeric:
                words = set(_words(name))
                of_split = words & set(split) if split else not words & set(SPLITS[-1])
                if words & kinds and of_split:
                    return name
    if rows.metrics and len(numeric) == 1:
        return numeric[0]
    raise UserError(
        f"no column sounds like a score; name it with --score COLUMN; {_listed(rows.frame)}"
    )


def _wrong_cell(values: pd.Series) -> tuple[int, str] | None:
    """Return (row from 1, text) of the first cell that is no number, of a column that has numbers
    otherwise; None of any other column.
    """
    if is_numeric_dtype(values):
        return None
    wrong = pd.to_numeric(values, errors="coerce").isna() & values.notna()
    if 2 * wrong.sum() >= values.notna().sum() or not wrong.any():
        return None
    row = int(wrong.to_numpy().argmax())
    return row + 1, str(values.iloc[row])


def _seed(frame: pd.DataFrame) -> str | None:
    """Return the column that sounds like a seed, else one that counts repetitions."""
    for words in ({"seed", "seeds"}, SEEDS):
        for name in map(str, frame):
            if set(_words(name)) & words:
                return name
    return None


def _step(frame: pd.DataFrame, taken: set[str]) -> str | None:
    """Return the column that counts the rows of a training, where a training has several."""
    for name in map(str, frame):
        words = [word for word in _words(name) if word not in ("trainer", "current")]
        if name not in taken and words and set(words) <= STEPS and is_numeric_dtype(frame[name]):
            return name
    return None


def _settings(rows: Rows, taken: set[str | None]) -> tuple[str, ...]:
    """Return the columns that vary and whose values come back with other seeds."""
    frame = rows.frame
    names = [str(name) for name in (rows.settings if rows.settings is not None else frame)]
    chosen = []
    for name in names:
        if name in taken or frame[name].nunique(dropna=False) < 2:
            continue
        if rows.settings is None and not _sounds_like_a_setting(frame, name):
            continue
        chosen.append(name)
    if not chosen and rows.settings is None:  # of few rows, whose words do not come back
        chosen = [
            name
            for name in names
            if name not in taken
            and not is_numeric_dtype(frame[name])
            and not set(_words(name)) & (MARGINS | IDENTITIES)
        ]
    if rows.settings is None:
        _drop_implied(frame, chosen)
    return tuple(chosen)


def _drop_implied(frame: pd.DataFrame, chosen: list[str]) -> None:
    """Remove columns that follow from the others, as bytes from a codec: the last ones first."""
    keyed = frame[chosen].astype(str)
    groups = len(keyed.drop_duplicates())
    for name in reversed(chosen.copy()):
        remaining = [column for column in chosen if column != name]
        if remaining and len(keyed[remaining].drop_duplicates()) == groups:
            chosen.remove(name)


def _sounds_like_a_setting(frame: pd.DataFrame, name: str) -> bool:
    words = set(_words(name))
    if words <= MARGINS | {"run", "of", "at"} or words & IDENTITIES:
        return False
    if is_numeric_dtype(frame[name]) and words & (HIGHER_WORDS | LOWER_WORDS | STEPS):
        return False
    return frame[name].nunique(dropna=False) <= len(frame) / 2


def _listed(frame: pd.DataFrame) -> str:
    names = [str(name) for name in frame]
    beyond = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"columns: {', '.join(names[:12])}{beyond}"


# What is shown.


def shorten(name: str, room: int) -> str:
    """Return a name of at most so many characters; what is left out is marked."""
    return name if len(name) <= room else name[: room - 3] + "..."


def verdicts(judged: Judged) -> str:
    """Return a line for each claim or comparison, its effect, verdict, and what would decide it."""
    lines = [adjustment(judged.claims), ""] if adjustment(judged.claims) else []
    for claim in judged.claims:
        for effect in claim.effects:
            sentence = effect.judged()
            if judged.baseline is not None:
                sentence = sentence.replace(SUPPORTED, "better", 1).replace(
                    CONTRADICTED, "worse", 1
                )
            number = shown(effect.values, effect.interval, effect.digits, effect.level)
            lines.append(f"- {claim.name}: {number}, {effect.seeds_text}: {sentence}")
            for name, counts in judged.why.items():
                if counts["diverged"] and not judged.scores[name] and name in effect.what:
                    lines[-1] += f"; '{name}' diverged in all {counts.total()} runs"
    return "\n".join(lines) + "\n"


def table(judged: Judged) -> Table:
    """Return a line a setting: seeds, mean with deviation, median, interval, what is unusual."""
    header = ["setting", "n", "mean ± sd", "median", "95 % of the mean", ""]
    direction = "lower" if judged.columns.lower else "higher"
    settings = Table("settings", f"{judged.columns.score} ({direction} is better)", header)
    digits = judged.digits
    for name, seeds in judged.scores.items():
        values = list(seeds.values())
        lost = ", ".join(f"{count} {reason}" for reason, count in judged.why[name].items())
        if not values:
            settings.rows.append([name, "0", "", "", "", lost])
            continue
        mean, sd = mean_sd(values)
        deviation = f" ± {sd:.{digits}f}" if len(values) > 1 else ""
        ends = interval(values)
        range_text = f"[{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]" if ends else ""
        split = TWO_OUTCOMES if far(values) > len(values) / 5 else ""
        settings.rows.append(
            [
                name,
                str(len(values)),
                f"{mean:.{digits}f}{deviation}",
                f"{median(values):.{digits}f}",
                range_text,
                ", ".join(note for note in (split, lost) if note),
            ]
        )
    return settings


@styled
def figure(judged: Judged) -> Figure:
    """Draw each seed of each setting, its median, and the interval of its mean."""
    scores = {name: list(seeds.values()) for name, seeds in judged.scores.items() if seeds}
    drawing, axis = plt.subplots(figsize=size(2, 0.6 + 0.32 * len(scores)))
    for row, (name, values) in enumerate(scores.items()):
        ink = INK[5] if name == judged.baseline else INK[0]
        axis.plot(values, [row] * len(values), "o", ms=3, color=ink, alpha=0.5, mew=0)
        axis.plot(median(values), row, "|", ms=12, color=ink)
        if ends := interval(values):
            axis.plot(ends, [row + 0.22] * 2, "-", lw=1, color=ink)
    axis.set_yticks(range(len(scores)), [shorten(name, LABEL) for name in scores])
    axis.set_ylim(len(scores) - 0.4, -0.6)
    axis.set_xlabel(
        f"{judged.columns.score}: seeds, median (bar), 95 % interval of the mean (line)"
    )
    return drawing


def values(judged: Judged) -> pd.DataFrame:
    """Return a row a training: setting, seed, score."""
    lines = []
    for name, seeds in judged.scores.items():
        for seed, score in seeds.items():
            lines.append({"setting": name, "seed": seed, judged.columns.score: score})
    return pd.DataFrame(lines)

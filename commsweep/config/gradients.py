"""Data parallelism: how many learners share a batch, and how their weight gradients travel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from commsweep.config.base import Positive, Spec, settle
from commsweep.config.compressors import (
    CastSpec,
    E3M0Spec,
    FixedPointSpec,
    GradientCompressor,
    NoCompressorSpec,
    StatisticalSpec,
    UniformSpec,
)
from commsweep.config.feedback import GradientFeedback, NoFeedbackSpec


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


class Outer(Spec):
    """Low-communication training. Learners train on weights and optimizers of their own and
    exchange every `interval` steps. The difference that a learner has moved by (its
    pseudo-gradient) travels as a gradient would, and an outer SGD (`rate`, `momentum`) takes their
    mean (DiLoCo, arXiv 2311.08105).

    fragments: parts of the model that are exchanged in turn; 1 exchanges all at once. overlap:
    steps between sending a fragment and using it (Streaming DiLoCo, arXiv 2501.18512).
    local_update: how a learner's weights follow the common ones. "mix" keeps `local_share` of its
    own. "add" adds the steps it made in the meantime (delayed averaging, arXiv 2006.00441). "sent"
    takes the common weights only where something was sent (SPARTA; rate 1, no momentum, `randomk`).
    peers: with "pairs", drawn pairs exchange weights and pseudo-gradients, and each learner has
    outer weights of its own (NoLoCo, arXiv 2506.10911, without Nesterov). The mean of the learners'
    weights is scored where they share no common weights. aggregate: the mean over all learners, or
    at each place over those that sent it (the paper and the code of SparseLoCo, arXiv 2508.15706,
    differ). clip: a message longer than the median norm over learners is scaled to it. sign: the
    outer step is a sign; with interval 1, plain SGD inside, a decaying residue and `grad.transform`
    that is DeMo (arXiv 2411.19870).
    """

    interval: Annotated[int, Field(ge=1, description="steps between exchanges")] = 16
    rate: Positive = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = True
    fragments: Annotated[
        int, Field(ge=1, description="parts of the model that are exchanged in turn")
    ] = 1
    overlap: Annotated[
        int, Field(ge=0, description="steps between sending and using a fragment")
    ] = 0
    local_update: Literal["mix", "add", "sent"] = "mix"
    local_share: Annotated[
        float, Field(ge=0, le=1, description="share of a learner's own weights when it mixes")
    ] = 0.0
    aggregate: Literal["all", "senders"] = "all"
    clip: bool = False
    sign: Annotated[
        bool, Field(description="the outer step is `rate` times the learning rate times the sign")
    ] = False
    peers: Annotated[Literal["pairs"] | None, Field(description="absent: all learners at once")] = (
        None
    )

    @model_validator(mode="after")
    def _fits(self) -> Outer:
        if self.overlap >= self.interval:
            raise ValueError(
                f"grad.outer.overlap={self.overlap}: a fragment must be used before it is sent "
                f"again; choose less than grad.outer.interval={self.interval}"
            )
        if self.local_update == "add" and (not self.overlap or self.local_share):
            raise ValueError(
                "grad.outer.local_update=add adds what a learner did while a fragment was under "
                "way: set grad.outer.overlap to at least 1 and leave out grad.outer.local_share"
            )
        if self.local_update == "sent" and (self.overlap or self.local_share or self.momentum):
            raise ValueError(
                "grad.outer.local_update=sent leaves everything but what has just been sent as "
                "it is: set grad.outer.momentum=0 and grad.outer.nesterov=false, and leave out "
                "grad.outer.overlap and grad.outer.local_share"
            )
        if self.peers == "pairs" and (self.clip or self.sign):
            raise ValueError(
                "grad.outer.peers=pairs exchanges weights as they are: leave out "
                "grad.outer.clip and grad.outer.sign"
            )
        if self.sign and self.momentum:
            raise ValueError(
                "grad.outer.sign=true takes the sign of what arrives, which leaves nothing to a "
                "momentum: set grad.outer.momentum=0 and grad.outer.nesterov=false"
            )
        if self.nesterov and not self.momentum:
            if "nesterov" in self.model_fields_set:
                raise ValueError(
                    "grad.outer.nesterov=true has no effect without grad.outer.momentum: set "
                    "grad.outer.nesterov=false"
                )
            settle(self, "nesterov", False)  # what is recorded must be read again
        return self


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


class Gradients(Spec):
    """Data parallelism: how many learners share a batch, and how their weight gradients travel.

    exchange: "allreduce" sums messages on the way, "allgather" brings every message to every
    learner, "server" sends them to a parameter server and the mean back. `vote`: the mean's sign
    instead of the mean (majority vote). Parameters of one dimension travel dense unless
    `compress_vectors`; every one does before `start_epoch`. With `local_steps` H a learner takes H
    plain SGD steps at the current rate, each on 1/H of its share, and sends the sum of their
    gradients (Local SGD; the optimizer's momentum acts on the mean of the learners). With `outer`
    learners train apart for many steps, and what they have moved by is what travels.
    """

    learners: Annotated[int, Field(ge=1, le=2**16)] = 1
    exchange: Literal["allreduce", "allgather", "server"] = "allreduce"
    compressor: GradientCompressor = NoCompressorSpec()
    feedback: GradientFeedback = NoFeedbackSpec()
    schedule: GradientSchedule = SteadySpec()
    vote: bool = False
    compress_vectors: bool = False
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

"""The settings of low-communication training, `grad.outer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from commsweep.config.base import Positive, Spec, settle
from commsweep.config.compressors.base import Compression


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
    that is DeMo (arXiv 2411.19870). first_moment, second_moment: the inner optimizers' moments are
    averaged as they are, every so many steps (DES-LOC, arXiv 2505.22549). eager: the others'
    pseudo-gradients travel until the next exchange (arXiv 2502.12996); each learner has outer
    weights of its own.
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
    eager: Annotated[
        bool | None,
        Field(
            description=(
                "a learner uses its own pseudo-gradient at once, and the others' at the next "
                "exchange; absent: all at once"
            )
        ),
    ] = None
    first_moment: Annotated[
        int | None,
        Field(
            ge=1,
            description=(
                "steps between averages of the inner optimizers' first moments (momentum); "
                "absent: each learner keeps its own"
            ),
        ),
    ] = None
    second_moment: Annotated[
        int | None,
        Field(ge=1, description="the same of AdamW's second moments; absent: each keeps its own"),
    ] = None

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
        if self.eager is False:
            settle(self, "eager", None)  # one way to say it, one id
        late = self.overlap or self.local_share or self.local_update != "mix"
        if self.eager and (late or self.peers or self.sign or self.aggregate == "senders"):
            raise ValueError(
                "grad.outer.eager=true has a learner add its own share of a mean to outer weights "
                "of its own: leave out overlap, local_update, local_share, peers, sign and "
                "aggregate of grad.outer"
            )
        if self.peers == "pairs" and (self.first_moment or self.second_moment):
            raise ValueError(
                "grad.outer.peers=pairs meets two learners at a time: leave out "
                "grad.outer.first_moment and grad.outer.second_moment, which all average"
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


def check_outer(
    outer: Outer, compressor: Compression, learners: int, exchange: str, local_steps: int
) -> None:
    """Raise ValueError on an outer step that the rest of its section contradicts."""
    kind = getattr(compressor, "kind", "")
    if local_steps > 1:
        raise ValueError(
            f"grad.local_steps={local_steps} does not go with grad.outer, in which "
            "learners take grad.outer.interval steps of their own; set grad.local_steps=1"
        )
    if outer.aggregate == "senders" and not compressor.sparsifier:
        raise ValueError(
            f"grad.outer.aggregate=senders: with grad.compressor.kind={kind} every learner "
            "sends every place, so it is the mean of all; set grad.outer.aggregate=all or a "
            "sparsifier"
        )
    if outer.local_update == "sent" and not compressor.sparsifier:
        raise ValueError(
            f"grad.outer.local_update=sent: with grad.compressor.kind={kind} every place is "
            "sent; set grad.compressor.kind=randomk or another sparsifier, or leave "
            "local_update out"
        )
    if outer.peers == "pairs":
        if learners % 2:
            raise ValueError(
                f"grad.outer.peers=pairs: grad.learners={learners} is odd, so one would be "
                "left over"
            )
        if kind != "none" or exchange == "server":
            raise ValueError(
                "grad.outer.peers=pairs sends weights from one learner to another, "
                "uncompressed: set grad.compressor.kind=none, and grad.exchange=allreduce or "
                "allgather, which makes no difference then"
            )

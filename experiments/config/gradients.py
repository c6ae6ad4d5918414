"""Data parallelism: how many learners share a batch, and how their weight gradients travel."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from commsweep.experiments.config.base import Spec
from commsweep.experiments.config.compressors import GradientCompressor, NoCompressor
from commsweep.experiments.config.feedback import GradientFeedback, NoFeedback


class Steady(Spec):
    """The same compression throughout."""

    kind: Literal["steady"] = "steady"


class Ramp(Spec):
    """DGC's warm-up: in epoch e (from 0) of the first `epochs` keep 0.25^(e + 1) where that is more than `ratio`."""

    kind: Literal["ramp"] = "ramp"
    epochs: Annotated[int, Field(ge=1)] = 4


class Accordion(Spec):
    """A layer keeps `mild` times its ratio or rank while the norm of its epoch gradient changes by more than `eta`."""

    kind: Literal["accordion"] = "accordion"
    mild: Annotated[float, Field(gt=1)] = 10.0
    eta: Annotated[float, Field(gt=0)] = 0.5
    every: Annotated[int, Field(ge=1, description="epochs between decisions")] = 10


GradientSchedule = Annotated[Steady | Ramp | Accordion, Field(discriminator="kind")]


class Gradients(Spec):
    """Data parallelism: how many learners share a batch, and how their weight gradients travel.

    exchange: "allreduce" sums messages on the way, "allgather" brings every message to every learner, "server" sends
    them to a parameter server and the mean back. `vote`: the mean's sign instead of the mean (majority vote).
    Parameters of one dimension travel dense unless `vectors`; every one does before `start_epoch`. With `local_steps`
    H a learner takes H plain SGD steps at the current rate, each on 1/H of its share, and sends the sum of their
    gradients (Local SGD; the optimizer's momentum acts on the mean of the learners).
    """

    learners: Annotated[int, Field(ge=1, le=2**16)] = 1
    exchange: Literal["allreduce", "allgather", "server"] = "allreduce"
    compressor: GradientCompressor = NoCompressor()
    feedback: GradientFeedback = NoFeedback()
    schedule: GradientSchedule = Steady()
    vote: bool = False
    vectors: bool = False
    local_steps: Annotated[int, Field(ge=1, description="SGD steps of a learner between exchanges")] = 1
    start_epoch: Annotated[int, Field(ge=0, description="first compressed epoch")] = 0

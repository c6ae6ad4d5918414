"""Real messages that ship with the package, and what codecs make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.bias import Bias, bias_of, drawn, mean_bias
from commsweep.integrations.forecast import features_of, forecast
from commsweep.integrations.measure import Measured, codec, measure
from commsweep.integrations.shadow import BACKWARD, FORWARD, PARAMETER

FILE = Path(__file__).with_name("messages.npz")
# Shipped codecs that rivals are compared with, from 16 bits to a hundredth of the entries.
RIVALS = (
    "cast:to=bfloat16",
    "mxfp8_e4m3",
    "mxfp4",
    "uniform:8,scale=group",
    "uniform:4,scale=group",
    "uniform:3,scale=group,rounding=stochastic",
    "uniform:2,scale=group",
    "uniform:2,scale=group,rounding=stochastic",
    "eden:4",
    "eden:3",
    "eden:2",
    "eden:1",
    "tern",
    "sign",
    "topk:0.3",
    "topk:0.1",
    "topk:0.05",
    "topk:0.02",
    "topk:0.01",
)
# The kind of message that shadow mode takes a role's for, and that forecasts are of.
MESSAGES = {"activations": FORWARD, "gradients": BACKWARD, "learners": PARAMETER}
DRAWS = 32  # of a message, for the bias
ALIKE = 0.05  # two codecs whose biases differ by less are ranked by error


@dataclass(frozen=True)
class Sample:
    """A message of a training: role, network and stage ("early" or "late"), and its numbers."""

    role: str
    network: str
    stage: str
    x: Tensor


@dataclass(frozen=True)
class Summary:
    """The means of a codec over the messages of a role."""

    codec: str
    role: str
    share: float  # of the bytes of float32
    error: float
    bias: float
    cosine: float
    entropy: float
    bias_low: float | None = None  # its interval, where many draws were made
    bias_high: float | None = None

    @property
    def bias_text(self) -> str:
        """The bias with its interval, where it has one."""
        if self.bias_low is None or self.bias_high is None:
            return f"{self.bias:.3f}"
        return f"{self.bias:.3f} [{self.bias_low:.3f}, {self.bias_high:.3f}]"

    @property
    def worth(self) -> str:
        """Return the forecast of worth kept, or "-" where there is none."""
        forecast_ = forecast(MESSAGES.get(self.role, ""))
        if forecast_ is None:
            return "-"
        means = {"error": self.error, "bias": self.bias, "cosine": self.cosine}
        answer = forecast_.answer(features_of(means | {"total": self.error}))
        return "-" if isinstance(answer, str) else answer.text

    @property
    def rank(self) -> tuple[float, float]:
        """Return what rivals are ranked by, less is better: the error of activations; the bias of
        gradients, which are summed over many steps, and then the error.
        """
        bias = 0.0 if self.role == "activations" else round(self.bias / ALIKE)
        return bias, self.error


@cache
def samples() -> tuple[Sample, ...]:
    """Return the shipped messages."""
    with np.load(FILE) as arrays:
        loaded = []
        for name in sorted(arrays):
            role, network, stage = name.split("/")
            loaded.append(Sample(role, network, stage, torch.from_numpy(arrays[name])))
        return tuple(loaded)


def measured(codecs: Sequence[str], role: str) -> list[tuple[Sample, Measured]]:
    """Measure codecs on all messages of a role, message after message."""
    by_codec = [_measured(name, role) for name in codecs]
    return [entry for entries in zip(*by_codec, strict=True) for entry in entries]


@cache
def _measured(name: str, role: str) -> list[tuple[Sample, Measured]]:
    return [(sample, measure(sample.x, name)[0]) for sample in samples() if sample.role == role]


def rows(measurements: Sequence[tuple[Sample, Measured]]) -> list[dict[str, Any]]:
    """Return a table row for each message and codec."""
    return [
        {"role": sample.role, "network": sample.network, "stage": sample.stage}
        | measurement.record()
        for sample, measurement in measurements
    ]


def summaries(codecs: Sequence[str], role: str) -> dict[str, Summary]:
    """Return what codecs do to the messages of a role, by codec."""
    measurements = [measurement for _, measurement in measured(codecs, role)]
    return {name: _summary(name, role, measurements) for name in codecs}


def _summary(name: str, role: str, measurements: Sequence[Measured]) -> Summary:
    its = [measurement for measurement in measurements if measurement.codec == name]
    bias = bias_on(name, role)
    error = mean(measurement.error**2 for measurement in its) ** 0.5
    return Summary(
        name,
        role,
        mean(measurement.share for measurement in its),
        error,
        bias.value,
        mean(measurement.cosine for measurement in its),
        mean(measurement.entropy for measurement in its),
        bias.low,
        bias.high,
    )


@cache
def bias_on(name: str, role: str) -> Bias:
    """Return the bias of a codec on the messages of a role, their root mean square."""
    apply = codec(name).apply
    messages = [sample.x for sample in samples() if sample.role == role]
    return mean_bias([bias_of(drawn(apply, x, DRAWS), x) for x in messages])


def rival(summary: Summary) -> Summary:
    """Return the shipped codec of at most the same bytes that ranks first on the role's
    messages; the one of the fewest bytes where all need more.
    """
    rivals = [name for name in RIVALS if name != summary.codec]
    candidates = summaries(rivals, summary.role).values()
    within = [candidate for candidate in candidates if candidate.share <= summary.share * 1.01]
    if not within:
        return min(candidates, key=lambda candidate: candidate.share)
    return min(within, key=lambda candidate: candidate.rank)

"""Is the network the bottleneck? The share of a predicted step that waits for the exchange of
gradients, and what codes of these would save.

Dense gradients are summed by the faster of ring and tree, as NCCL chooses. Codes go all-to-all, and
are rounded once each way. Where the training is sharded, the weights are gathered, too, in the same
code. Of 33 measured iterations on 8 to 64
GPUs nine in ten lay within `ERROR` of the prediction (docs/results/clusters); the range of an
answer puts all of that error on the network. Sums may reach less than the nominal rate of a link:
those of the fitted cluster reached a quarter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from commsweep.errors import UserError
from commsweep.timing.gpt import Choices, Cluster, Shape, coding, decoding, predict, weights_of

ERROR = 0.10  # of an iteration's time, for nine rows in ten
LEAST = 0.15  # share of a step from which the network is called the bottleneck
# Layers, hidden size, heads: GPT-3 (arXiv 2005.14165, table 2.1), OPT of 30 and 66 billion, and
# for 70b the shape of Llama 2 (arXiv 2307.09288).
SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 16),
    "1.3b": (24, 2048, 16),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "66b": (64, 9216, 72),
    "70b": (80, 8192, 64),
    "175b": (96, 12288, 96),
}
SEQUENCE, VOCABULARY = 2048, 51200
TOKENS = 2**21  # of an iteration, where no batch is given
STATE = 16  # bytes a weight: 16-bit weight and gradient, float32 master and two Adam states
ROOM = 80e9  # bytes of a GPU
FILLED = 0.8  # the share of it that the state may take; activations need the rest


@dataclass(frozen=True)
class Coded:
    """An iteration with gradients, or gathered weights too, in a code, and the share of the dense
    time that it saves.
    """

    codec: str
    share: float  # bytes, of 16-bit values
    seconds: float
    saves: float


@dataclass(frozen=True)
class Answer:
    """Seconds of a dense iteration, the share that waits for the network with its range, and codes
    of the gradients, the fastest first.
    """

    seconds: float
    seconds_by_part: dict[str, float]
    share: float
    low: float
    high: float
    codes: list[Coded]
    most: float  # share of the time that a code saves at most
    sharded: bool = False

    @property
    def verdict(self) -> str:
        """Return whether the network is the bottleneck."""
        if self.low >= LEAST:
            return "Yes"
        return "No" if self.high < LEAST else "Perhaps"

    def sentence(self) -> str:
        """Return the answer as one sentence."""
        text = (
            f"{self.verdict}: {_percent(self.share)} % of a step waits for the network "
            f"({_percent(self.low)} to {_percent(self.high)})"
        )
        best = self.codes[0] if self.codes else None
        messages = "gathered weights and gradients" if self.sharded else "gradients"
        if best is None or best.saves <= 0:
            return f"{text}; no code of the {messages} would save time."
        return (
            f"{text}; {messages} in {best.codec} would save {_percent(best.saves)} %, at most "
            f"{_percent(self.most)} %."
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def state_bytes(shape: Shape, sharded: bool = False) -> float:
    """Return the bytes of weights, gradients and Adam's states of a GPU, without activations."""
    weights = weights_of(shape.hidden, shape.layers / shape.pipeline, shape.vocabulary)
    return float(STATE * weights / shape.tensor / (shape.data if sharded else 1))


def memory_note(shape: Shape, sharded: bool = False) -> str:
    """Return what does not fit a GPU, as a sentence; "" where the state does."""
    need = state_bytes(shape, sharded)
    if need <= ROOM:
        return ""
    return (
        f"note: {need / 1e9:,.0f} GB of weights, gradients and Adam's states a GPU, of "
        f"{ROOM / 1e9:.0f}; set --tensor or --pipeline"
    )


def split(layers: int, hidden: int, gpus: int, per_node: int) -> tuple[int, int]:
    """Return (tensor, pipeline): the least of both with which the state fits a GPU. Raises
    UserError where it does not.
    """
    weights = weights_of(hidden, layers, VOCABULARY)
    need, tensor, pipeline = STATE * weights, 1, 1
    while need / (tensor * pipeline) > FILLED * ROOM:
        if 2 * tensor <= per_node:
            tensor *= 2
        else:
            pipeline *= 2
        if gpus % (tensor * pipeline) or pipeline > layers:
            raise UserError(
                f"--gpus {gpus}: the state of {weights / 1e9:.1f} billion weights "
                f"({need / 1e9:,.0f} GB) does not fit GPUs of {ROOM / 1e9:.0f} GB; take more"
            )
    return tensor, pipeline


def answer(
    shape: Shape,
    cluster: Cluster,
    shares: Mapping[str, float],
    sharded: bool = False,
    reached: float = 1.0,
) -> Answer:
    """Return what waits for the network, and what codes would save. shares: bytes of codes by name,
    of 16-bit values. sharded: over the data-parallel GPUs. reached: the least share of the rate
    between nodes that sums may reach; the range of the answer begins with all of it and ends there.
    """
    choices = Choices(collective="ring" if sharded else "nccl", sharded=sharded)
    slow_cluster = replace(cluster, node_link=reached * cluster.node_link)
    dense, slow = (
        {name: float(value) for name, value in predict(shape, link, choices).items()}
        for link in (cluster, slow_cluster)
    )
    total, waits = dense["total"], dense["data"] + dense["gathers"]
    error = ERROR * total
    low = max(0.0, waits - error) / (total - min(waits, error))
    slow_waits, slow_error = slow["data"] + slow["gathers"], ERROR * slow["total"]
    high = (slow_waits + slow_error) / (slow["total"] + slow_error)
    codes, most = [], 0.0
    for name, share in shares.items():
        coded = replace(
            choices,
            collective="alltoall",
            gradients=share,
            coding=coding(share, ranks=float(shape.data)),
        )
        if sharded:
            coded = replace(coded, weights=share, weight_coding=decoding(share))
        seconds = float(predict(shape, cluster, coded)["total"])
        codes.append(Coded(name, share, seconds, (total - seconds) / total))
        saves = slow["total"] - float(predict(shape, slow_cluster, coded)["total"])
        if slow_waits > 0:
            gain = saves * (1 + slow_error / slow_waits) / (slow["total"] + slow_error)
            most = max(most, min(gain, high))
    codes.sort(key=lambda coded: coded.seconds)
    return Answer(total, dense, waits / total, low, high, codes, most, sharded)

"""The published numbers of SPD-KFAC (arXiv 2107.06533), and the same iterations as predicted with
its constants.

The paper's text was not to be had: seconds are those of the first author's plotting script
(github.com/shyhuai/ kfac_pytorch, scripts/time_breakdown.py at aa79d32), whose speed-ups span
exactly the abstract's 10 to 35 %; constants are those of the same repository, each with its commit.
64 RTX 2080 Ti, 100 Gbit/s InfiniBand, intervals of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from commsweep.errors import UserError
from commsweep.second_order.loads import Load, kronecker, loads
from commsweep.timing.timeline import iterations
from commsweep.timing.timeline.iterations import FACTORS, Cluster, Item, Line, Work

GPUS = 64
BATCH = {"resnet50": 32, "resnet152": 8, "densenet201": 16, "inception_v4": 16}
TITLES = {
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "densenet201": "DenseNet-201",
    "inception_v4": "Inception-v4",
}
# Exposed seconds: forward and backward, gradients, factors, factor messages, inversion, inverse
# messages.
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "resnet50": {
        "d": (0.1320, 0.0648, 0.2115, 0.1700, 0.2742, 0),
        "mpd": (0.1320, 0.0648, 0.2115, 0.1700, 0.0512, 0.1340),
        "spd": (0.1320, 0.0648, 0.2115, 0.0981, 0.1050, 0.0641),
    },
    "resnet152": {
        "d": (0.1140, 0.1590, 0.1927, 0.4391, 0.6759, 0),
        "mpd": (0.1140, 0.1590, 0.1927, 0.4359, 0.0539, 0.4378),
        "spd": (0.1140, 0.1590, 0.1927, 0.2760, 0.2814, 0.1458),
    },
    "densenet201": {
        "d": (0.1780, 0.1863, 0.3186, 0.3317, 0.4818, 0),
        "mpd": (0.1780, 0.1863, 0.3163, 0.3502, 0.0352, 0.4680),
        "spd": (0.1780, 0.1863, 0.3163, 0.2437, 0.4023, 0.0349),
    },
    "inception_v4": {
        "d": (0.1340, 0.1329, 0.1979, 0.2903, 0.4306, 0),
        "mpd": (0.1340, 0.1329, 0.1928, 0.2950, 0.0487, 0.3439),
        "spd": (0.1340, 0.1329, 0.1928, 0.2038, 0.2539, 0.0733),
    },
}
# Seconds of factor computation, then with the exposed messages of: after, layer, threshold,
# pipelined.
PIPELINING = {
    "resnet50": (0.2115, 0.3814, 0.4174, 0.3401, 0.3096),
    "resnet152": (0.1927, 0.6285, 0.7158, 0.5371, 0.4687),
    "densenet201": (0.3163, 0.6665, 0.7714, 0.5841, 0.5600),
    "inception_v4": (0.1979, 0.4882, 0.6683, 0.4115, 0.3967),
}
# Seconds of inversion everywhere; spread, alone and with messages; balanced, alone and with
# messages.
PLACEMENT = {
    "resnet50": (0.2742, 0.0512, 0.1852, 0.1049, 0.1691),
    "resnet152": (0.6759, 0.0539, 0.4917, 0.2814, 0.4271),
    "densenet201": (0.4818, 0.0352, 0.5032, 0.4023, 0.4373),
    "inception_v4": (0.4306, 0.0487, 0.3926, 0.2539, 0.3272),
}
# Iteration with neither, pipelining, balance, both.
ABLATION = {
    "resnet50": (0.8525, 0.7806, 0.7474, 0.6755),
    "resnet152": (1.5807, 1.4176, 1.3319, 1.1689),
    "densenet201": (1.4964, 1.4061, 1.4519, 1.3615),
    "inception_v4": (1.1857, 1.0941, 1.0823, 0.9907),
}

# Published fits. All-reduce: "first" (1f192ec), "nccl" (nccl-tests, ebefd14); broadcast:
# utils.estimate_bcast_time.
REDUCE: dict[str, Line] = {"nccl": (9.29e-4, 1.4335e-9), "first": (1.22e-2, 1.45e-9)}
BROADCAST: Line = (2.55e-4, 4 * 1.8403e-10)


def exponential(rows: int) -> float:
    """The published fit of an inversion's seconds. Its sum over ResNet-50 is 2.4 times what is
    plotted.
    """
    return 3.64e-3 * math.exp(4.77e-4 * rows)


def cubic(rows: int) -> float:
    """Ours: c0 + c1 d^3 through the plotted inversion of ResNet-50 everywhere and balanced."""
    return 4.73e-4 + 4.927e-13 * rows**3


INVERSIONS = {"cubic": cubic, "exponential": exponential}


@dataclass(frozen=True)
class Setting:
    """A network on a cluster."""

    name: str
    work: Work
    cluster: Cluster
    title: str


def setting(
    name: str,
    gpus: int = GPUS,
    *,
    bandwidth: float = 0.0,
    latency: float = 0.0,
    collective: str = "",
    inversion: str = "cubic",
    reduce: str = "nccl",
    batch: int = 0,
) -> Setting:
    """A network with the published seconds of its passes and factors (of others at ResNet-50's
    rates).

    collective: "ring" or "tree" of this bandwidth (bits a second) and latency; "": the published
    fit of 64 GPUs. Raises UserError when the network is unknown, or has fewer layers than there are
    GPUs to own them.
    """
    loads_ = loads(name)
    if name in PUBLISHED:
        passes, computing, usual = PUBLISHED[name]["spd"][0], PUBLISHED[name]["spd"][2], BATCH[name]
        scale = (batch or usual) / usual
    else:
        basis, usual = loads("resnet50"), batch or 32
        base = PUBLISHED["resnet50"]["spd"]
        passes = (
            base[0]
            * sum(measurement.multiplications for measurement in loads_)
            / sum(load.multiplications for load in basis)
        )
        computing = base[2] * (
            sum(measurement.factor_multiplications for measurement in loads_)
            / sum(load.factor_multiplications for load in basis)
        )
        scale = usual / BATCH["resnet50"]
    if collective:
        network = gpus, bandwidth, latency
        lines = getattr(iterations, collective)(*network), iterations.broadcast(*network)
    elif gpus == GPUS or gpus == 1:
        lines = REDUCE[reduce], BROADCAST
    else:
        raise UserError(
            f"--gpus {gpus}: messages are published for {GPUS} GPUs; say what the network is "
            "like with --bandwidth and --latency"
        )
    return Setting(
        name,
        work(loads_, passes * scale, computing * scale),
        Cluster(gpus, *lines, INVERSIONS[inversion]),
        TITLES.get(name, name),
    )


def work(loads_: tuple[Load, ...], passes: float, computing: float) -> Work:
    """Return the work of an iteration of a network on one GPU.

    passes: seconds of forward and backward, a third and two thirds, by multiplications; computing:
    seconds of all new factors, by theirs. Both are split over the layers, for which nothing is
    published.
    """
    multiplications, all_factors = (
        sum(getattr(measurement, kind) for measurement in loads_)
        for kind in ("multiplications", "factor_multiplications")
    )
    forward, backward = [], []
    for number, measurement in enumerate(loads_):
        share, rate = (
            measurement.multiplications / multiplications,
            computing * measurement.positions / all_factors,
        )
        forward += [
            Item(rate * measurement.a**2, FACTORS, factor=2 * number),
            Item(passes / 3 * share, forward=True),
        ]
        backward += [
            Item(rate * measurement.g**2, FACTORS, factor=2 * number + 1),
            Item(passes * 2 / 3 * share, gradient=measurement.weights),
        ]
    return Work(forward + backward[::-1], kronecker(loads_))

"""Step time of a GPT on a GPU cluster, from shapes: tensor, pipeline and data parallelism.

One iteration with m microbatches on p stages:

    T = m * stage + idle * (p - 1) * other + data + optimizer + constant

stage is the time of a microbatch, forward and backward, on the stage that has the logits, other on
one that has none. A layer takes what the GPU needs, or the time to launch its kernels where that is
longer. GPU time is products at `flops`, and bytes of weights and activations at `memory`. Tensor
parallelism adds all-reduces within a layer, pipelines messages between stages, data parallelism one
all-reduce of the gradients at the end (`allreduce`). Sharded data parallelism (FSDP, ZeRO-3) has a
reduce-scatter there, and gathers the weights before each forward and each backward; both are half
of a ring. idle is 1 for Megatron's 1F1B, for which the
constants were fitted; `Choices` has other schedules. A message that takes s seconds between stages
adds 2 s (p - 1) / p to stage and to other: in 1F1B a stage waits for its microbatches to come back.

Every number of a Cluster is in seconds, bytes and floating-point operations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from commsweep.errors import UserError, nearest
from commsweep.timing import allreduce

LAUNCHES = (1, 2, 4, 8, 16)  # tensor-parallel sizes with a launch time of their own
SHARPNESS = 4.0  # how sharply the longer of GPU and launches wins: 1 adds them, infinity takes it
HALF = 2  # bytes of a value in float16 or bfloat16


@dataclass(frozen=True)
class Shape:
    """Configurations, one an entry: each field a number or an array [n]."""

    hidden: Any
    layers: Any
    sequence: Any
    batch: Any  # samples of an iteration, of all GPUs
    micro_batch: Any
    heads: Any
    tensor: Any = 1
    pipeline: Any = 1
    data: Any = 1
    vocabulary: Any = 51200

    @property
    def microbatches(self) -> Any:
        """Return the microbatches of one pipeline in an iteration."""
        return np.asarray(self.batch) / (np.asarray(self.micro_batch) * np.asarray(self.data))


@dataclass(frozen=True)
class Cluster:
    """Constants of GPUs and links; `commsweep predict --cluster FILE.json` reads them."""

    name: str = "mine"
    source: str = "given"
    node: int = 8  # GPUs of a node
    flops: float = 2.6e13  # products of a forward pass a second; a backward is in it
    memory: float = 5e11  # bytes a second
    inner: float = 1.0  # bytes of activations that a layer moves, in messages of its size
    scores: float = 3.0  # bytes of attention scores that it moves, in matrices of their size
    launch: dict[str, float] = field(default_factory=lambda: {"1": 3e-3})  # of a layer, by tensor
    tensor_link: float = 1e11  # bytes a second of an all-reduce within a node
    tensor_wait: float = 1e-5  # seconds of one
    tensor_far: float = 2e10  # the same between nodes
    node_link: float = 3e10  # bytes a second between nodes, of all GPUs of a node
    nominal_link: float | None = None  # of which its makers say so many
    data_link: float = 2e11  # bytes a second of the gradients' all-reduce within a node
    hop: float = 3.4e-6  # seconds of a hop within a node, as in NCCL's table
    far_hop: float = 1.4e-5  # seconds of one between nodes, as in NCCL's table
    stage_link: float = 1e15  # bytes a second of a message between stages; so fast it is free
    stage_wait: float = 1e-5  # seconds of a message between stages
    head: float = 1.0  # products of the logits, as a share of what their size says
    microbatch: float = 3e-4  # seconds that any microbatch costs
    optimizer: float = 6e-12  # seconds a weight
    constant: float = 4e-3  # seconds an iteration

    @property
    def reached(self) -> float:
        """Return the share of the nominal rate between nodes that sums of gradients reach."""
        return self.node_link / self.nominal_link if self.nominal_link else 1.0


@dataclass(frozen=True)
class Choices:
    """The schedule of a pipeline and the code of its gradients; the defaults are what the
    constants of a100-nvlink were fitted to.

    schedule: "interleaved" gives each device `chunks` stages (arXiv 2104.04473), "zero-bubble"
    puts off the weights' half of backwards (ZB-H1, arXiv 2401.10241), "2bw" never runs empty
    (arXiv 2006.09503). recompute: activations in the backward. gradients: bytes of a message, as a
    share of 16-bit values. coding: bytes that encoding and decoding read and write for each byte
    of gradients in 16 bits, at the cluster's memory rate. stages, stage_coding: the same of the
    messages between stages. collective: how gradients are summed up, by an
    algorithm of `allreduce`. sharded: over the data-parallel GPUs. weights, weight_coding: of the
    weights that these gather, as of the gradients.
    """

    schedule: str = "1f1b"
    chunks: int = 2
    recompute: bool = True
    gradients: float = 1.0
    coding: float = 0.0
    stages: float = 1.0
    stage_coding: float = 0.0
    collective: str = "ring"
    sharded: bool = False
    weights: float = 1.0
    weight_coding: float = 0.0

    @property
    def idle(self) -> float:
        """Return what a stage waits, as a share of what it waits in 1F1B."""
        if self.schedule == "interleaved":
            return 1 / self.chunks
        if self.schedule == "2bw":
            return 0.0
        if self.schedule == "zero-bubble":
            # units of a forward: forward, inputs' half (with what it computes again), weights'
            # half; the idle time is the first two without the third
            again = int(self.recompute)
            return (1 + 1 + again - 1) / (3 + again)
        return 1.0


def predict(shape: Shape, cluster: Cluster, choices: Choices = Choices()) -> dict[str, Any]:
    """Seconds of an iteration and of its parts [n]: total, compute (a pipeline without waiting),
    bubble, data, gathers, optimizer. data: not hidden behind computing. gathers: what computing
    does not hide of the gathers of weights, which FSDP fetches ahead, and their coding.
    """
    t, p, d = (np.asarray(split, float) for split in (shape.tensor, shape.pipeline, shape.data))
    h, S = np.asarray(shape.hidden, float), np.asarray(shape.sequence, float)
    b, L = np.asarray(shape.micro_batch, float), np.asarray(shape.layers, float)
    m, V = shape.microbatches, np.asarray(shape.vocabulary, float)
    tokens, mine = b * S, L / p
    message = tokens * h * HALF

    # forward, backward of two, and the forward once more
    work = 1.0 if choices.recompute else 0.75
    products = work * tokens * h * (24 * h + 4 * S) / t / cluster.flops
    moved = 24 * h * h / t + cluster.inner * message
    moved = moved + cluster.scores * HALF * b * np.asarray(shape.heads) * S * S / t
    within = cluster.tensor_wait + message * 2 * (t - 1) / t / cluster.tensor_link
    across = cluster.tensor_wait + message * 2 * (t - 1) / t / cluster.tensor_far
    reduces = np.where(t > 1, 4 * np.where(t > cluster.node, across, within), 0.0)
    gpu = products + moved / cluster.memory + reduces
    launch = np.select([t == size for size in LAUNCHES], [_launch(cluster, s) for s in LAUNCHES])
    launch = np.where(launch == 0, _launch(cluster, 1), launch)
    layer = (gpu**SHARPNESS + launch**SHARPNESS) ** (1 / SHARPNESS)

    overhead = mine * layer + cluster.microbatch + np.where(p > 1, 2 * cluster.stage_wait, 0.0)
    coded = choices.stage_coding * message / cluster.memory
    overhead = overhead + np.where(p > 1, 2 * coded, 0.0)  # activations and their gradients
    stage = overhead + cluster.head * 6 * tokens * h * V / t / cluster.flops
    waited = 2 * (p - 1) / p * choices.stages * message / t / cluster.stage_link
    compute = m * (stage + waited)
    bubble = choices.idle * (p - 1) * (overhead + waited)

    weights = weights_of(h, mine, V) / t
    # Ranks of one all-reduce that share a node also share its links to other nodes.
    together = np.maximum(1, np.minimum(d, cluster.node // np.minimum(t, cluster.node)))
    far = d * t > cluster.node
    where = allreduce.Ranks(
        ranks=d,
        nodes=np.where(far, d / together, 1.0),
        near=cluster.data_link,
        far=cluster.node_link * together / cluster.node,
        hop=cluster.hop,
        far_hop=cluster.far_hop,
    )
    nbytes = weights * HALF
    data = allreduce.seconds(choices.collective, choices.gradients * nbytes, where)
    gathers = np.zeros_like(data)
    if choices.sharded:
        data = data / 2
        gather = allreduce.seconds("ring", choices.weights * nbytes, where) / 2
        waited_for = np.maximum(0.0, 2 * m * gather - compute)
        coded_weights = 2 * m * choices.weight_coding * nbytes / cluster.memory
        gathers = np.where(d > 1, waited_for + coded_weights, 0.0)
    data = np.where(d > 1, data + choices.coding * nbytes / cluster.memory, 0.0)
    optimizer = cluster.optimizer * weights / (d if choices.sharded else 1.0)
    total = compute + bubble + data + gathers + optimizer + cluster.constant
    times = {"compute": compute, "bubble": bubble, "data": data, "gathers": gathers}
    return {"total": total, **times, "optimizer": optimizer}


def weights_of(hidden: Any, layers: Any, vocabulary: Any) -> Any:
    """Return the number of weights of a GPT, or of some of its layers with the embedding."""
    return 12.0 * hidden * hidden * layers + vocabulary * hidden


def coding(share: float, collective: str = "alltoall", ranks: float = 1.0) -> float:
    """Return what `Choices.coding` is of a code with such a share of 16-bit bytes. Encoding takes
    values in and codes out, decoding codes in and values out. A sum that is coded again on the way
    is encoded once, decoded twice, and encoded once more in parts; of messages gathered, all are
    decoded.
    """
    if collective == "gather":
        return (1 + share) + ranks * share + 1
    return 3 * (1 + share) + (1 + share) / ranks


def decoding(share: float) -> float:
    """Return what `Choices.weight_coding` is: owners encode their shard, all decode all."""
    return 1 + share


def _launch(cluster: Cluster, tensor: int) -> float:
    """Seconds to launch a layer's kernels; of the nearest smaller tensor-parallel size known."""
    sizes = [int(size) for size in cluster.launch if int(size) <= tensor]
    return cluster.launch[str(max(sizes))] if sizes else 0.0


GIVEN = ("name", "source", "node", "launch", "hop", "far_hop", "stage_link")
FITTED = tuple(field.name for field in fields(Cluster) if field.name not in GIVEN)


def fit(shape: Shape, seconds: np.ndarray, start: Cluster, most: int = 300) -> Cluster:
    """Constants that make the predictions' logarithms closest to the measured seconds [n] (soft
    absolute loss; all constants stay positive).
    """
    from scipy.optimize import least_squares

    sizes = [str(size) for size in LAUNCHES if np.any(np.asarray(shape.tensor) == size)]

    def cluster(values: np.ndarray) -> Cluster:
        numbers = np.exp(values)
        fitted = dict(zip(FITTED, (float(x) for x in numbers), strict=False))
        launch = dict(zip(sizes, (float(x) for x in numbers[len(FITTED) :]), strict=True))
        return replace(start, launch=start.launch | launch, **fitted)

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.log(predict(shape, cluster(values))["total"] / seconds)

    first = [getattr(start, name) for name in FITTED]
    first += [start.launch.get(size, max(start.launch.values())) for size in sizes]
    solution = least_squares(
        residuals, np.log(first), loss="soft_l1", f_scale=0.05, max_nfev=most, x_scale=1.0
    )
    return cluster(solution.x)


def read_cluster(text: str) -> Cluster:
    """A preset by name, or a JSON file with (some of) the fields of Cluster. Its field `base`
    names the preset that the others are taken from. Raises UserError on a name, a field or a number
    that does not fit.
    """
    presets = {path.stem: path for path in PRESETS.glob("*.json")}
    path = presets.get(text, Path(text))
    try:
        constants = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"--cluster '{text}': neither a file nor one of {', '.join(sorted(presets))}"
            f"{nearest(text, presets)}"
        ) from None
    except ValueError as error:
        raise UserError(f"--cluster '{text}': not JSON ({error})") from None
    names = {field.name for field in fields(Cluster)} | {BASE}
    if not isinstance(constants, dict):
        raise UserError(f"--cluster '{text}': a JSON object is needed, with {', '.join(names)}")
    for name in set(constants) - names:
        raise UserError(f"--cluster '{text}': unknown field '{name}'{nearest(name, names)}")
    for name, value in constants.items():
        if name in ("name", "source", "launch", BASE):
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise UserError(f"--cluster '{text}': {name}={value!r} is no number above 0")
    base = constants.pop(BASE, None)
    if base is None:
        return Cluster(**constants)
    if base not in presets:
        raise UserError(
            f"--cluster '{text}': {BASE}={base!r} is none of {', '.join(sorted(presets))}"
        )
    named = {"name": path.stem, "source": f"{base}, with {', '.join(constants) or 'nothing'} given"}
    return replace(read_cluster(base), **(named | constants))


BASE = "base"
PRESETS = Path(__file__).parent / "clusters"

"""Seconds of an all-reduce over GPUs of several nodes: a ring, a tree, in levels, or all-to-all.

With n ranks, g of them on each of N nodes, B bytes, `near` and `far` bytes a second within and
between nodes, and a latency a hop of each kind:

    ring           2 (n-1)/n B / slowest + 2 (n-N) hop + 2 (N-1) far_hop
    tree           2 B / (0.92 slowest)  + 2 (g-1) hop + 2 log2(N) far_hop
    hierarchical   2 (g-1)/g B / near + 2 (N-1)/N B / far + 2 (g-1) hop + 2 (N-1) far_hop
    alltoall       2 (n-1)/n B / slowest + 2 hop, of the far kind where N > 1
    gather         (n-1) B / slowest + hop, of the far kind where N > 1: everyone's message to all

The slowest link of all but the levels is `far` where N > 1. The hierarchical one scatters sums
within each node, reduces the shares between nodes and gathers within. NCCL's tuner has these
formulas of ring and tree (src/graph/tuning.cc), and takes the faster of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

TREE_RATE = 0.92  # of a ring's, in NCCL's table


@dataclass(frozen=True)
class Ranks:
    """The ranks of an all-reduce and the links between them: numbers or arrays [n]."""

    ranks: Any
    nodes: Any
    near: Any  # bytes a second within a node
    far: Any  # bytes a second that these ranks have between nodes
    hop: float  # seconds of a hop within a node
    far_hop: float  # seconds of one between nodes


def seconds(collective: str, nbytes: Any, where: Ranks) -> Any:
    """Return the seconds of one all-reduce of so many bytes [n], by one of
    `commsweep.timing.COLLECTIVES` or "gather"; 0 for a single rank.
    """
    seconds_by = by_algorithm(nbytes, where)
    if collective == "nccl":
        return np.minimum(seconds_by["ring"], seconds_by["tree"])
    return seconds_by[collective]


def by_algorithm(nbytes: Any, where: Ranks) -> dict[str, Any]:
    """Seconds of each algorithm [n]."""
    n, nodes = np.asarray(where.ranks, float), np.asarray(where.nodes, float)
    local, far = n / nodes, np.where(nodes > 1, where.far, np.inf)
    slowest = np.minimum(where.near, far)
    between = 2 * (nodes - 1) * where.far_hop
    ring = 2 * (n - 1) / n * nbytes / slowest + 2 * (n - nodes) * where.hop + between
    tree = 2 * nbytes / (TREE_RATE * slowest)
    tree = tree + 2 * (local - 1) * where.hop + 2 * np.log2(nodes) * where.far_hop
    levels = 2 * (local - 1) / local * nbytes / where.near + 2 * (nodes - 1) / nodes * nbytes / far
    levels = levels + 2 * (local - 1) * where.hop + between
    latency = np.where(nodes > 1, where.far_hop, where.hop)
    direct = 2 * (n - 1) / n * nbytes / slowest + 2 * latency
    algorithms = {"ring": ring, "tree": tree, "hierarchical": levels, "alltoall": direct}
    algorithms["gather"] = (n - 1) * nbytes / slowest + latency
    return {name: np.where(n > 1, algorithm, 0.0) for name, algorithm in algorithms.items()}

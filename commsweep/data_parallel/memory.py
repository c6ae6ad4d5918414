"""Bytes that data parallelism keeps in memory, known before a run starts."""

from __future__ import annotations

from torch import nn

from commsweep.config.gradients import Gradients
from commsweep.data_parallel.learners import exchanges_nothing
from commsweep.data_parallel.outer.roles import PEERS, UPDATES, Everybody, TakeCommon
from commsweep.feedback.gradient_memories import MEMORIES


def memory_bytes(
    spec: Gradients, model: nn.Module, n_here: int | None = None, states: int = 0
) -> int:
    """Return bytes of the learners' gradients, of what they remember, and of what is remembered of
    others; 0 without them.

    n_here: learners in this process (None: all). states: tensors that an optimizer keeps of a
    weight; where learners train apart each has an optimizer and weights of its own, beside the
    common weights and the outer momentum.
    """
    if exchanges_nothing(spec):
        return 0
    n_here, kind = spec.learners if n_here is None else n_here, MEMORIES[spec.feedback.kind]
    tensors = n_here * (1 + kind.tensors) + (spec.learners - n_here) * kind.mirrored
    tensors += 2 * (spec.sharded is not None)  # the owners' weights, and parts on their way
    if spec.outer is not None:
        peers = PEERS.of(spec.outer, Everybody)
        update = UPDATES.of(spec.outer, TakeCommon)
        # plain SGD: what it has moved by
        tensors += n_here * (1 + max(states, 1) + update.keeps_sent + peers.remembered_each)
        tensors += (n_here if peers.separate else 1) * (1 + (spec.outer.momentum > 0))
        tensors += peers.remembered
    return tensors * sum(4 * p.numel() for p in model.parameters() if p.requires_grad)

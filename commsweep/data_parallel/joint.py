"""Joint compressors, which need all learners at once: CLT-k's shared places, factors of the mean
(PowerSGD, Dion).
"""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from commsweep import compressors
from commsweep.collectives import Collectives, Parts
from commsweep.compressors import Compressor
from commsweep.compressors.bits import mask_bytes, pack_mask, taken, unpack_mask
from commsweep.compressors.lowrank import orthonormal
from commsweep.compressors.sparse import budget, keep_largest
from commsweep.config.base import Implementations
from commsweep.config.compressors.joint import CLTKSpec
from commsweep.config.compressors.lowrank import DionFactorsSpec, PowerSGDSpec

WHAT = "gradients"
Combined = tuple[Parts, list[Tensor] | None]
S = TypeVar("S", CLTKSpec, PowerSGDSpec, DionFactorsSpec)


JOINT = Implementations()


class JointCompressor(Generic[S]):
    """Base: what the learners' messages for the layers of a bucket become, and what one learner
    sends for it.
    """

    def __init__(self, spec: S) -> None:
        self.spec = spec

    @staticmethod
    def combine(
        compressors: list[Any],
        messages: Parts,
        states: list[Any],
        step: int,
        collectives: Collectives,
    ) -> Combined:
        """Given the messages [learner here][layer] and each layer's compressor and what is kept of
        it, which is changed in place: what every learner's messages arrive as, [learner][layer];
        what the optimizer sees of each, where that is not the mean.
        """
        raise NotImplementedError

    def begin(self, shape: torch.Size, seed: int) -> Tensor | None:
        """Return what all learners keep of a layer between steps, before the first one; None:
        nothing.
        """
        return None

    @property
    def outputs_as_rows(self) -> bool:
        """Return whether a layer's matrix has its outputs as rows, however it lies in memory."""
        return False

    def returned_bytes(self, shape: torch.Size) -> int | None:
        """Bytes in which a server returns the mean for a layer; None: as any other mean."""
        return None

    def nbytes(self, shape: torch.Size, learners: int) -> float:
        """Bytes a learner sends for a layer of this shape, averaged over the learners."""
        raise NotImplementedError


@JOINT.of(CLTKSpec)
class Leader(JointCompressor[CLTKSpec]):
    """CLT-k: learner (step mod n) picks its k largest places and broadcasts them; all send those
    (arXiv 2104.11125).

    nbytes = 4 k, and the leader's indices, ceil(k ceil(log2 d) / 8) (or a bitmask), shared among
    the learners.
    """

    @staticmethod
    def combine(
        compressors: list[Any],
        messages: Parts,
        states: list[Any],
        step: int,
        collectives: Collectives,
    ) -> Combined:
        sizes = [m.numel() for m in messages[0]]
        budgets = [
            budget(compressor.spec.ratio, n)
            for compressor, n in zip(compressors, sizes, strict=True)
        ]
        leader, chosen = step % collectives.learners, {}

        def choice(i: int) -> list[Tensor]:
            chosen[i] = [
                keep_largest(m.reshape(1, -1), k)[1]
                for m, k in zip(messages[i], budgets, strict=True)
            ]
            return [pack_mask(mask, k) for mask, k in zip(chosen[i], budgets, strict=True)]

        packed = collectives.broadcast(choice, leader, WHAT).wait()
        masks = (
            chosen[collectives.here.index(leader)]
            if leader in collectives.here
            # the others check theirs
            else [
                unpack_mask(values_packed, 1, n, k)
                for values_packed, n, k in zip(packed, sizes, budgets, strict=True)
            ]
        )
        values = collectives.gather(
            [
                [
                    taken(m.reshape(1, -1), mask, k)[0]
                    for m, mask, k in zip(messages, masks, budgets, strict=True)
                ]
                for messages in messages
            ],
            WHAT,
        ).wait()
        return (
            [
                [
                    tensor.new_zeros(mask.numel()).masked_scatter_(mask[0], tensor).reshape(m.shape)
                    for tensor, mask, m in zip(tensors, masks, messages[0], strict=True)
                ]
                for tensors in values
            ],
            None,
        )

    def nbytes(self, shape: torch.Size, learners: int) -> float:
        n = shape.numel()
        k = budget(self.spec.ratio, n)
        return 4 * k + mask_bytes(1, n, k) / learners


RankT = TypeVar("RankT", PowerSGDSpec, DionFactorsSpec)


@JOINT.of(PowerSGDSpec)
class PowerIteration(JointCompressor[RankT]):
    """PowerSGD: P = orth(mean of M_l Q), Q = mean of M_l^T P; all receive P Q^T (Vogels 2019, Alg.
    1).

    M [out, rest] is a layer's gradient. nbytes = 4 min(rank, out, rest) (out + rest). Q is the next
    step's start.
    """

    @staticmethod
    def combine(
        compressors: list[Any],
        messages: Parts,
        states: list[Any],
        step: int,
        collectives: Collectives,
    ) -> Combined:
        p, q = PowerIteration.factors(compressors, messages, states, collectives)
        _keep(states, q)
        y = [(a @ b.mT).reshape(m.shape) for a, b, m in zip(p, q, messages[0], strict=True)]
        return [y] * collectives.learners, None

    @staticmethod
    def factors(
        compressors: list[Any],
        messages: Parts,
        states: list[Any],
        collectives: Collectives,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """P and Q of every layer."""
        matrices = [[m.reshape(len(m), -1) for m in messages] for messages in messages]
        # A factor may be kept for a higher rank than this step's.
        starts = [
            q[:, : compressor.rank(m.shape)]
            for compressor, q, m in zip(compressors, states, matrices[0], strict=True)
        ]
        left = collectives.all_reduce(
            [[m @ q for m, q in zip(learner, starts, strict=True)] for learner in matrices], WHAT
        )
        p = [orthonormal(product) for product in left.wait()]
        return p, collectives.all_reduce(
            [
                [m.mT @ product for m, product in zip(learner, p, strict=True)]
                for learner in matrices
            ],
            WHAT,
        ).wait()

    def rank(self, shape: torch.Size) -> int:
        """Return the rank of the factors of a layer [out, ...]."""
        assert isinstance(self.spec, PowerSGDSpec)
        return min(self.spec.rank, shape[0], shape.numel() // shape[0])

    def returned_bytes(self, shape: torch.Size) -> int:
        return round(self.nbytes(shape, 1))

    def begin(self, shape: torch.Size, seed: int) -> Tensor:
        """The first Q [rest, rank]."""
        return torch.randn(
            shape.numel() // shape[0],
            self.rank(shape),
            generator=torch.Generator().manual_seed(seed),
        )

    def nbytes(self, shape: torch.Size, learners: int) -> float:
        return 4 * self.rank(shape) * (shape[0] + shape.numel() // shape[0])


@JOINT.of(DionFactorsSpec)
class Orthonormal(PowerIteration[DionFactorsSpec]):
    """Dion: P = orth(mean of M_l Q), R = mean of M_l^T P, Q = R with columns of length one (arXiv
    2504.05295).

    M_l [m, n] is a learner's own momentum of a layer with m outputs and n inputs. All receive P
    R^T, of which their momenta lose a share; the optimizer sees sqrt(m / n) P Q^T. All that travels
    is linear in M, so it is what Dion makes of the mean momentum. nbytes = 4 r (m + n), r =
    ceil(fraction min(m, n)).
    """

    @staticmethod
    def combine(
        compressors: list[Any],
        messages: Parts,
        states: list[Any],
        step: int,
        collectives: Collectives,
    ) -> Combined:
        p, r = PowerIteration.factors(compressors, messages, states, collectives)
        lengths = [torch.linalg.vector_norm(factor, dim=0) for factor in r]
        q = [
            torch.where(length > 0, factor / length.clamp(min=1e-30), before)
            for factor, length, before in zip(r, lengths, states, strict=True)
        ]
        _keep(states, q)
        arrived = [a @ b.mT for a, b in zip(p, r, strict=True)]
        updates = [a @ b.mT.mul((len(a) / len(b)) ** 0.5) for a, b in zip(p, q, strict=True)]
        return [arrived] * collectives.learners, updates

    @property
    def outputs_as_rows(self) -> bool:
        return self.spec.rows == "outputs"

    def rank(self, shape: torch.Size) -> int:
        return math.ceil(self.spec.fraction * min(shape[0], shape.numel() // shape[0]))


def _keep(states: list[Tensor], factors: list[Tensor]) -> None:
    """Begin the next step from these factors; columns beyond their rank stay for a higher one."""
    for state, factor in zip(states, factors, strict=True):
        state[:, : factor.shape[1]] = factor


def build(spec: Any) -> Compressor | JointCompressor[Any]:
    """The compressor of a spec, joint ones included."""
    return JOINT[spec.kind](spec) if spec.kind in JOINT else compressors.build(spec)

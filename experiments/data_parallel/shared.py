"""Messages that the learners make together: CLT-k's shared places and PowerSGD's factors of the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.experiments.compressors.bits import mask_bytes, pack_mask, unpack_mask
from commsweep.experiments.compressors.sparse import keep_largest, kept
from commsweep.experiments.specs import CLTK, PowerSGD


class Here:
    """All learners are in this process. `real.Wire` is the same across processes."""

    def gather(self, parts: list[Tensor]) -> list[Tensor]:
        """Every learner's tensor, given those of the learners here."""
        return parts

    def from_leader(self, parts: list[Tensor], leader: int) -> Tensor:
        """The leader's tensor, given those of the learners here."""
        return parts[leader]

    @property
    def learners(self) -> int | None:
        """How many there are in all; None: as many as messages."""
        return None


class Together:
    """Base: what all learners' messages become at once, and what one learner sends for it."""

    def __init__(self, spec: CLTK | PowerSGD) -> None:
        self.spec = spec

    def combine(self, messages: list[Tensor], warm: Tensor | None, step: int,
                wire: Here) -> tuple[list[Tensor], Tensor | None]:
        """What every learner's message arrives as, given those of the learners here; the state for the next step."""
        raise NotImplementedError

    def nbytes(self, shape: torch.Size, learners: int) -> float:
        """Bytes a learner sends for a layer of this shape, averaged over the learners."""
        raise NotImplementedError


class Leader(Together):
    """CLT-k: learner (step mod n) picks its k largest places and broadcasts them; all send those (arXiv 2104.11125).

    nbytes = 4 k, and the leader's indices, ceil(k ceil(log2 d) / 8) (or a bitmask), shared among the learners.
    """

    def combine(self, messages: list[Tensor], warm: Tensor | None, step: int,
                wire: Here) -> tuple[list[Tensor], Tensor | None]:
        n = messages[0].numel()
        k = kept(self.spec.ratio, n)
        leader = step % (wire.learners or len(messages))
        packed = wire.from_leader([pack_mask(keep_largest(m.reshape(1, -1), k)[1], k) for m in messages], leader)
        mask = unpack_mask(packed, 1, n, k)[0]
        values = wire.gather([m.reshape(-1)[mask] for m in messages])
        return [one.new_zeros(n).masked_scatter_(mask, one).reshape(messages[0].shape) for one in values], None

    def nbytes(self, shape: torch.Size, learners: int) -> float:
        n = shape.numel()
        k = kept(self.spec.ratio, n)
        return 4 * k + mask_bytes(1, n, k) / learners


class PowerIteration(Together):
    """PowerSGD: P = orth(mean of M_l Q), Q = mean of M_l^T P; all receive P Q^T (Vogels 2019, Alg. 1).

    M [out, rest] is a layer's gradient. nbytes = 4 min(rank, out, rest) (out + rest). Q is the next step's start.
    """

    def combine(self, messages: list[Tensor], warm: Tensor | None, step: int,
                wire: Here) -> tuple[list[Tensor], Tensor | None]:
        matrices = [message.reshape(len(message), -1) for message in messages]
        rank = min(self.spec.rank, *matrices[0].shape)  # the factor may be kept for a higher one
        p = torch.linalg.qr(_mean(wire.gather([m @ warm[:, :rank] for m in matrices]))).Q
        q = _mean(wire.gather([m.mT @ p for m in matrices]))
        y = (p @ q.mT).reshape(messages[0].shape)
        return [y] * (wire.learners or len(messages)), q

    def begin(self, shape: torch.Size, seed: int) -> Tensor:
        """The first Q [rest, rank]."""
        rest = shape.numel() // shape[0]
        rank = min(self.spec.rank, shape[0], rest)
        return torch.randn(rest, rank, generator=torch.Generator().manual_seed(seed))

    def nbytes(self, shape: torch.Size, learners: int) -> float:
        rest = shape.numel() // shape[0]
        return 4 * min(self.spec.rank, shape[0], rest) * (shape[0] + rest)


def _mean(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts))

"""Low-rank messages: two thin factors found by one power iteration (PowerSGD, Vogels et al. 2019,
Alg. 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.compressors import draws
from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, payload
from commsweep.compressors.features import columns, matrix, tensor
from commsweep.config.compressors.lowrank import LowRankSpec

CHOLESKY_RANK = 16  # below it Householder's QR is as fast
CONDITION = 1e4  # float64's rounding times its square is below float32's


@COMPRESSORS.of(LowRankSpec)
class LowRank(Compressor[LowRankSpec]):
    """M [n, d] (rows: tokens or pixels) -> P = orth(M Q), Q' = M^T P; decoded P Q'^T.

    Q is random, or with `warm` the last message's Q', which both ends have: it goes in with a
    message, and the next one's comes out (`apply_from`, `encode_from`, `next_kept`). nbytes = (n
    + d) * min(rank, n, d) * itemsize. The iteration runs in float32. Feedback is a setting of its
    own (PowerSGD's is "ef").
    """

    def begin(self, shape: torch.Size, seed: int) -> Tensor | None:
        """The first Q [d, rank] of a channel whose messages have this shape; None when every
        message starts anew.
        """
        size = torch.Size([columns(shape), min(self.spec.rank, columns(shape))])
        return draws.normal(size, seed, torch.device("cpu")) if self.spec.warm else None

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return tensor(_product(*self._factors(x, seed, None)), x)

    def apply_from(self, x: Tensor, memory: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """(what arrives of x when the iteration begins from `memory`, the factor to begin the next
        message from).
        """
        p, q = self._factors(x, 0, memory)
        return tensor(_product(p, q), x), _next(q, memory)

    def encode_from(self, x: Tensor, memory: Tensor, seed: int) -> Payload:
        """The payload of `apply_from`."""
        return self._payload(x, *self._factors(x, 0, memory))

    def next_kept(self, payload: Payload, memory: Tensor) -> Tensor:
        """Return what both ends begin the next message from, after one that began from `memory`."""
        return _next(payload.parts["q"], memory)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        d = columns(shape)
        n = shape.numel() // d
        return (n + d) * min(self.spec.rank, n, d) * dtype.itemsize

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        d = columns(shape)
        n = shape.numel() // d
        rank = min(self.spec.rank, n, d)
        return [{"p": Field(dtype, (n, rank)), "q": Field(dtype, (d, rank))}]

    def _factors(self, x: Tensor, seed: int, start: Tensor | None) -> tuple[Tensor, Tensor]:
        m = matrix(x).float()
        rank = min(self.spec.rank, *m.shape)
        q = draws.normal(torch.Size([m.shape[1], rank]), seed, x.device) if start is None else start
        p = orthonormal(m @ q[:, :rank])
        return p.to(x.dtype), (m.mT @ p).to(x.dtype)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        return self._payload(x, *self._factors(x, seed, None))

    @staticmethod
    def _payload(x: Tensor, p: Tensor, q: Tensor) -> Payload:
        return payload(x, p=p.contiguous(), q=q.contiguous())

    def _decode(self, payload: Payload) -> Tensor:
        return tensor(_product(payload.parts["p"], payload.parts["q"]), payload)


def orthonormal(factor: Tensor) -> Tensor:
    """Orthonormal columns that span those of a factor [rows, rank].

    A tall factor on the CPU takes a Cholesky QR in float64 (Stathopoulos and Wu 2002), which is
    1 to 6 times as fast as Householder's on two threads. Its error grows with the squared condition
    number, so a factor whose columns are nearly dependent takes Householder's.
    """
    rows, rank = factor.shape
    if factor.device.type == "cpu" and rank >= CHOLESKY_RANK and rows >= 2 * rank:
        exact = factor.double()
        upper, failed = torch.linalg.cholesky_ex(exact.mT @ exact, upper=True)
        if not failed:
            identity = torch.eye(rank, dtype=torch.float64)
            inverse = torch.linalg.solve_triangular(upper, identity, upper=True)
            if upper.norm() * inverse.norm() < CONDITION:
                return (exact @ inverse).to(factor.dtype)
    return torch.linalg.qr(factor).Q


def _next(q: Tensor, start: Tensor) -> Tensor:
    """A message that was too small for the rank leaves the factor as it was."""
    return q.float() if q.shape == start.shape else start


def _product(p: Tensor, q: Tensor) -> Tensor:
    return (p.contiguous().float() @ q.contiguous().float().mT).to(p.dtype)

"""Low-rank messages: two thin factors found by one power iteration (PowerSGD, Vogels et al. 2019, Alg. 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.experiments.compressors.base import Compressor, Field, Payload, payload
from commsweep.experiments.compressors.features import columns, matrix, tensor


class LowRank(Compressor):
    """M [n, d] (rows: tokens or pixels) -> P = orth(M Q), Q' = M^T P; decoded P Q'^T.

    Q is random, or with `warm` the last message's Q', which both ends have; `warmed` binds it. nbytes =
    (n + d) * min(rank, n, d) * itemsize. The iteration runs in float32. Feedback is a setting of its own
    (PowerSGD's is "ef").
    """

    start: Tensor | None = None
    next: Tensor | None = None

    def begin(self, shape: torch.Size, seed: int) -> Tensor | None:
        """The first Q [d, rank] of a channel whose messages have this shape; None when every message starts anew."""
        d = columns(shape)
        return _random(d, min(self.spec.rank, d), seed, torch.device("cpu")) if self.spec.warm else None

    def warmed(self, q: Tensor) -> LowRank:
        """This compressor begun from q; after a message its `next` is what to begin the next one from."""
        bound = LowRank(self.spec)
        bound.start = q
        return bound

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return tensor(_product(*self._factors(x, seed)), x)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        d = columns(shape)
        n = shape.numel() // d
        return (n + d) * min(self.spec.rank, n, d) * dtype.itemsize

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        d = columns(shape)
        n = shape.numel() // d
        rank = min(self.spec.rank, n, d)
        return [{"p": Field(dtype, (n, rank)), "q": Field(dtype, (d, rank))}]

    def _factors(self, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        m = matrix(x).float()
        rank = min(self.spec.rank, *m.shape)
        q = self.start if self.start is not None else _random(m.shape[1], rank, seed, x.device)
        p = torch.linalg.qr(m @ q[:, :rank]).Q
        back = (m.mT @ p).to(x.dtype)
        self._begin_next(back)
        return p.to(x.dtype), back

    def _begin_next(self, back: Tensor) -> None:
        """Both ends begin the next message from what this one carries."""
        self.next = back.float() if self.start is None or back.shape == self.start.shape else self.start

    def _encode(self, x: Tensor, seed: int) -> Payload:
        p, q = self._factors(x, seed)
        return payload(x, p=p.contiguous(), q=q.contiguous())

    def _decode(self, payload: Payload) -> Tensor:
        self._begin_next(payload.parts["q"])
        return tensor(_product(payload.parts["p"], payload.parts["q"]), payload)


def _product(p: Tensor, q: Tensor) -> Tensor:
    return (p.contiguous().float() @ q.contiguous().float().mT).to(p.dtype)


def _random(d: int, rank: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(d, rank, generator=torch.Generator(device).manual_seed(seed), device=device)

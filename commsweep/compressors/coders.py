"""Linear coders: a short code crosses instead of the activation, and its gradient comes back, as
short.

code = (x - a) E and y = code D + a, per position, with x [positions, d], E [d, r], D [r, d]. Unlike
the other compressors they are a part of the model: autograd runs through E and D, and the boundary
lies between them.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from commsweep import seeds
from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, payload
from commsweep.compressors.features import columns, matrix, tensor
from commsweep.config.compressors.coders import BottleneckSpec, SubspaceSpec

CoderT = TypeVar("CoderT", BottleneckSpec, SubspaceSpec)


class Coder(nn.Module):
    """E and D at run time, as trained parameters or as fixed buffers; `anchored`: a is the token's
    embedding.
    """

    encoder: Tensor
    decoder: Tensor

    def __init__(self, encoder: Tensor, trained: bool, anchored: bool) -> None:
        super().__init__()
        self.anchored = anchored
        for name, weight in (("encoder", encoder), ("decoder", encoder.mT.contiguous())):
            if trained:
                self.register_parameter(name, nn.Parameter(weight.clone()))
            else:
                self.register_buffer(name, weight.clone())

    def encode(self, x: Tensor, anchor: Tensor | None = None) -> Tensor:
        """x of any shape -> code [positions, r], or [batch, ..., r] for a sequence."""
        x = x if anchor is None else x - anchor
        code = matrix(x) @ self.encoder.to(x.dtype)
        return code if x.dim() in (0, 4) else code.reshape(*x.shape[:-1], -1)

    def decode(self, code: Tensor, like: Tensor | Payload, anchor: Tensor | None = None) -> Tensor:
        """Return what the receiver uses, of `like`'s shape."""
        y = tensor(code.reshape(-1, code.shape[-1]) @ self.decoder.to(code.dtype), like)
        return y if anchor is None else y + anchor


class Frozen(nn.Module):
    """Embeddings as they were when training began: of tokens [vocabulary, d], and of places
    [positions, d] or none.
    """

    tokens: Tensor
    places: Tensor | None

    def __init__(self, tokens: Tensor, positions: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("tokens", tokens.detach().clone(), persistent=False)
        self.register_buffer(
            "places", None if positions is None else positions.detach().clone(), persistent=False
        )

    def forward(self, numbers: Tensor) -> Tensor:
        """Return what entered the first block then: numbers [batch, sequence] -> [batch, sequence,
        d].
        """
        x = self.tokens[numbers]
        return x if self.places is None else x + self.places[: numbers.shape[1]]


class CoderCompressor(Compressor[CoderT]):
    """A coder as at the start of training, without an anchor: E orthonormal, D = E^T.

    nbytes = positions * min(width, d) * itemsize.
    """

    trained = anchored = False

    def coder(self, shape: torch.Size) -> Coder:
        """The module for messages of this shape; the same at every boundary."""
        return Coder(basis(columns(shape), self.spec.width), self.trained, self.anchored)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        d = columns(shape)
        return shape.numel() // d * min(self.spec.width, d) * dtype.itemsize

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        d = columns(shape)
        width = min(self.spec.width, d)
        flat = len(shape) in (0, 4)
        return [
            {"code": Field(dtype, (shape.numel() // d, width) if flat else (*shape[:-1], width))}
        ]

    @torch.no_grad()
    def _encode(self, x: Tensor, seed: int) -> Payload:
        return payload(x, code=self.coder(x.shape).to(x.device).encode(x))

    @torch.no_grad()
    def _decode(self, payload: Payload) -> Tensor:
        return self.coder(payload.shape).to(payload.device).decode(payload.parts["code"], payload)


@COMPRESSORS.of(BottleneckSpec)
class Bottleneck(CoderCompressor[BottleneckSpec]):
    """E and D trained with the model (the "ae" of Bian et al., arXiv 2301.02654). They begin as a
    projection (ours).
    """

    trained = True


@COMPRESSORS.of(SubspaceSpec)
class Subspace(CoderCompressor[SubspaceSpec]):
    """E = U, D = U^T fixed, a = the embedding of the token (arXiv 2506.01260: c = U^T (h -
    E[token])).

    With `constrain`, attention and MLP output weights of the blocks before the last boundary are
    projected onto span(U) after every step, so without dropout the code loses nothing. Ours: U is
    random and never moved, the anchor is what enters the first block, and no gradient flows through
    it.
    """

    anchored = True


def basis(d: int, width: int) -> Tensor:
    """Orthonormal columns [d, min(width, d)], the same in every run."""
    noise = torch.randn(
        d, d, generator=torch.Generator().manual_seed(seeds.basis(d)), dtype=torch.float64
    )
    return torch.linalg.qr(noise).Q[:, : min(width, d)].float().contiguous()

"""Orthonormal transforms of tiles: what is large after one may be spread out before it (DeMo, arXiv
2411.19870).

A tile [a, b] becomes A X B^T with A, B orthonormal, so lengths are kept and the inverse is A^T Y B.
A vector is transformed in runs of up to a tile's side.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from commsweep.compressors.sparse import TILE, tiles

KINDS = ("dct", "hadamard")


@lru_cache(maxsize=64)
def matrix(kind: str, n: int) -> Tensor:
    """The transform of n entries, float32 [n, n]: DCT-II, or Sylvester's Hadamard matrix of the
    greatest power of two that divides n, repeated.
    """
    if kind == "dct":
        index = torch.arange(n, dtype=torch.float64)
        basis = torch.cos(math.pi / n * (index + 0.5) * index[:, None]) * math.sqrt(2 / n)
        basis[0] /= math.sqrt(2)
        return basis.float()
    size = n & -n
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / math.sqrt(size)] * (n // size)).float()


@lru_cache(maxsize=64)
def matrix_on(kind: str, n: int, device: torch.device) -> Tensor:
    """`matrix` on a device, where it stays: no message waits for a copy."""
    return matrix(kind, n).to(device)


def transformed(x: Tensor, kind: str, side: int = TILE, back: bool = False) -> Tensor:
    """x [*layer] with every tile transformed, or transformed back; a new tensor of x's shape."""
    _, down, a, across, b = tiles(torch.Size([1, *x.shape]), side, side)
    left, right = (matrix(kind, n).to(x.device) for n in (a, b))
    tiles_ = x.reshape(down, a, across, b).transpose(1, 2)
    product = left.mT @ tiles_ @ right if back else left @ tiles_ @ right.mT
    return product.transpose(1, 2).reshape(x.shape)

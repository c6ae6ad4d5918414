"""A message as a matrix [positions, features]: a sequence's features are its last axis, an image's
its channels, those of a convolution's gradient [1, out, in, height, width] its output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.compressors.base import Payload, channels_last


def columns(shape: torch.Size) -> int:
    """Number of features of a message of this shape."""
    return shape[1] if len(shape) >= 4 else shape[-1] if shape else 1


def matrix(x: Tensor) -> Tensor:
    """x as [positions, features]."""
    return (x.movedim(1, -1) if x.dim() >= 4 else x).reshape(-1, columns(x.shape))


def tensor(m: Tensor, like: Tensor | Payload) -> Tensor:
    """Inverse of `matrix`, in the memory layout of `like`."""
    shape = like.shape
    if len(shape) < 4:
        return m.reshape(shape)
    y = m.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    last = like.channels_last if isinstance(like, Payload) else channels_last(like)
    return y if last else y.contiguous()

"""The functions that all codec files need: `commsweep export` writes it at the end of each."""

import torch
from torch import Tensor


def rows_of(shape: torch.Size) -> tuple[int, int]:
    """(samples, values of a sample); a vector is one sample."""
    samples = shape[0] if len(shape) > 1 else 1
    return samples, shape.numel() // samples


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes of so many bits, one after the other, the first in the low bits: uint8."""
    shifts = torch.arange(bits, device=codes.device)
    stream = (codes.reshape(-1, 1).long() >> shifts & 1).to(torch.uint8).view(-1)
    stream = torch.nn.functional.pad(stream, (0, -stream.numel() % 8)).view(-1, 8)
    weights = torch.arange(8, device=codes.device, dtype=torch.uint8)
    return (stream << weights).sum(1, dtype=torch.uint8)


def unpacked(data: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `packed`: int64 [count]."""
    stream = data[:, None] >> torch.arange(8, device=data.device, dtype=torch.uint8) & 1
    stream = stream.view(-1)[: count * bits].view(count, bits).long()
    return (stream << torch.arange(bits, device=data.device)).sum(1)

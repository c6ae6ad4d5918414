"""Draws of random compressors: pure functions of a seed and an entry's number, equal on every
device.

SplitMix64 (Steele, Lea and Flood 2014) at a counter: word i of a stream is mix(start + (i + 1) *
GAMMA), start = mix(seed), all modulo 2^64, so any part of a stream can be computed anywhere, in any
order, and nothing is kept. Entry j of n has the low half of word j if j < h = ceil(n / 2), else the
high half of word j - h. Plain integer operations; the kernels do the same.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commsweep import seeds
from commsweep.compressors.kernels import cpu, gpu


def uniform(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """float32 of this shape: multiples of 2^-24 in [0, 1)."""
    n = shape.numel()
    if cpu.numba is not None and device.type == "cpu":
        return cpu.uniform_draws(n, seeds.start(seed)).reshape(shape)
    if device.type == "cuda" and gpu.usable(out := torch.empty(n, device=device)):
        return gpu.draw_uniform(out, seeds.start(seed)).reshape(shape)
    both = words(-(-n // 2), seed, device)
    bits = torch.cat([both & 0xFFFFFFFF, _right(both, 32)])[:n]
    return (bits >> 8).to(torch.float32).mul_(2.0**-24).reshape(shape)


def words(n: int, seed: int, device: torch.device) -> Tensor:
    """int64 [n], 64 random bits each; no two of a stream are equal, so they order without ties."""
    if cpu.numba is not None and device.type == "cpu":
        return cpu.word_draws(n, seeds.start(seed))
    z = (
        torch.arange(1, n + 1, device=device)
        .mul_(seeds.signed(seeds.GAMMA))
        .add_(seeds.signed(seeds.start(seed)))
    )
    for shift, factor in seeds.ROUNDS:
        z = z.bitwise_xor_(_right(z, shift)).mul_(seeds.signed(factor))
    return z.bitwise_xor_(_right(z, seeds.LAST))


def normal(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """float32 of this shape, mean 0 and variance 1: sums of twelve uniform numbers of 16 bits
    (Irwin-Hall), which are the same everywhere, unlike logarithms and cosines. Within +-6; kurtosis
    2.9. Entry j of n: words j, n + j, 2 n + j.
    """
    n = shape.numel()
    if cpu.numba is not None and device.type == "cpu":
        return cpu.normal_draws(n, seeds.start(seed)).reshape(shape)
    drawn = words(3 * n, seed, device).view(3, n)
    # two sums of six in each
    pairs = ((drawn & cpu.EVEN) + (_right(drawn, 16) & cpu.EVEN)).sum(0)
    return (
        ((pairs & 0xFFFFFFFF) + (pairs >> 32) - cpu.MEAN)
        .to(torch.float32)
        .mul_(2.0**-16)
        .reshape(shape)
    )


def smallest(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    """Boolean [n], true at k places; every choice is as likely."""
    order = words(n, seed, device)
    if device.type == "cpu":  # a partition takes a third of the time
        return order <= int(np.partition(order.numpy(), k - 1)[k - 1])
    return order <= order.topk(k, largest=False, sorted=False).values.amax()


def _right(z: Tensor, bits: int) -> Tensor:
    """z shifted right as a number without a sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)

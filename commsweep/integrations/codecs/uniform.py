"""Min-max codes: each group of values is rounded to 2^BITS levels. Needs only torch.

    payload = encode(x, seed)                # uint8, what travels
    y = decode(payload, x.shape, x.dtype)    # what the receiver sees
    padded, used = pack(x, backward=False)   # of a fixed size, and how much of it is used
    y = Boundary.apply(x)                    # both ways inside a model: activations, then gradients

The first axis counts samples; a vector is one. Payload: codes, then the lowest and the highest
value of each group, float32. Written by commsweep, whose `uniform` sends the same bytes.
"""

import torch
from torch import Tensor

from commsweep.integrations.codecs.packing import packed, rows_of, unpacked

BITS = 4
SCALE = "tensor"  # tensor, sample or group: what shares a range
GROUP = 128  # consecutive values of a sample, where SCALE is group
ROUNDING = "nearest"  # or stochastic, which has no bias; then give every message another seed


def encode(x: Tensor, seed: int = 0) -> Tensor:
    """The payload of x [samples, ...], of any floating-point type: uint8."""
    samples, row = rows_of(x.shape)
    groups = split(x.detach().float().reshape(samples, row))
    low, high = groups.amin(1), groups.amax(1)
    gain, _ = affine(low, high)
    codes = (groups - low[:, None]).mul_(gain[:, None])
    if ROUNDING == "stochastic":
        codes = codes.add_(draws(codes.numel(), seed, x.device).view(codes.shape)).floor_()
    else:
        codes = codes.round_()
    codes = codes.clamp_(max=2**BITS - 1).view(samples, -1)[:, :row]
    scales = torch.stack([low, high]).view(-1).view(torch.uint8)
    return torch.cat([packed(codes, BITS), scales])


def decode(payload: Tensor, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what the receiver sees. Raises ValueError when the payload has another length."""
    if payload.numel() != nbytes(shape):
        raise ValueError(f"{payload.numel()} bytes for a message of {nbytes(shape)}")
    samples, row = rows_of(shape)
    size = -(-samples * row * BITS // 8)
    low, high = payload[size:].clone().view(torch.float32).view(2, -1)
    codes = unpacked(payload[:size], BITS, samples * row).view(samples, row)
    _, step = affine(low, high)
    values = split(codes).float().mul_(step[:, None]).add_(low[:, None])
    return values.view(samples, -1)[:, :row].reshape(shape).to(dtype)


def pack(t: Tensor, backward: bool = False, seed: int = 0) -> tuple[Tensor, int]:
    """(a buffer of uint8 of the size of t, zero after the payload; bytes used)."""
    payload = encode(t, seed)
    buffer = payload.new_zeros(max(t.numel() * t.element_size(), payload.numel()))
    buffer[: payload.numel()] = payload
    return buffer, payload.numel()


def unpack(
    buffer: Tensor, used: int, shape: torch.Size, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Inverse of `pack`, for the receiver."""
    return decode(buffer[:used], shape, dtype)


class Boundary(torch.autograd.Function):
    """Compresses what passes: activations forward, their gradients backward."""

    messages = 0  # each draws anew

    @staticmethod
    def forward(ctx, x):
        """Return what the next stage sees of x."""
        Boundary.messages += 1
        return decode(encode(x, Boundary.messages), x.shape, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        """Return what the stage before sees of the gradient."""
        Boundary.messages += 1
        return decode(encode(grad, Boundary.messages), grad.shape, grad.dtype)


def groups_of(samples: int, row: int) -> int:
    """Return how many groups share a range."""
    return {"tensor": 1, "sample": samples, "group": samples * -(-row // GROUP)}[SCALE]


def nbytes(shape: torch.Size) -> int:
    """Bytes of a message of this shape."""
    return -(-shape.numel() * BITS // 8) + 8 * groups_of(*rows_of(shape))


def split(flat: Tensor) -> Tensor:
    """[samples, row] as [groups, values]; the last group of a sample repeats its last value."""
    if SCALE == "group" and (short := -flat.shape[1] % GROUP):
        flat = torch.cat([flat, flat[:, -1:].expand(-1, short)], dim=1)
    rows = flat.numel() // GROUP if SCALE == "group" else groups_of(*flat.shape)
    return flat.reshape(rows, -1)


def affine(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """(codes per unit, units per code); a constant group has code 0 only."""
    spread = high - low
    gain = (2**BITS - 1) / spread
    step = spread / torch.full_like(spread, 2**BITS - 1)
    return gain.masked_fill(gain.isinf() & (spread < 1), 0), step


def draws(n: int, seed: int, device: torch.device) -> Tensor:
    """float32 [n] in [0, 1), the same on every device: SplitMix64 at a counter."""
    word = 2**64 - 1

    def right(z, bits):
        return z >> bits & (1 << 64 - bits) - 1

    def signed(number):
        return number - (number >> 63 << 64)

    start = seed & word
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        start = (start ^ start >> shift) * factor & word
    start ^= start >> 31
    z = torch.arange(1, -(-n // 2) + 1, device=device) * signed(0x9E3779B97F4A7C15) + signed(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ right(z, shift)) * signed(factor)
    z = z ^ right(z, 31)
    bits = torch.cat([z & 0xFFFFFFFF, right(z, 32)])[:n]
    return (bits >> 8).float() * 2.0**-24

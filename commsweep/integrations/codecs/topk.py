"""TopK: the largest magnitudes of each sample travel, and where they are. Needs only torch.

    payload = encode(x)                      # uint8, what travels
    y = decode(payload, x.shape, x.dtype)    # what the receiver sees
    padded, used = pack(x, backward=False)   # of a fixed size, and how much of it is used
    y = Boundary.apply(x)                    # both ways inside a model: activations, then gradients

The first axis counts samples; a vector is one. Payload: kept values in order, then the shorter of
packed indices and a bitmask. Written by commsweep, whose `topk` sends the same bytes.
"""

import torch
from torch import Tensor

from commsweep.integrations.codecs.packing import packed, rows_of, unpacked

RATIO = 0.1  # share of a sample's entries that travels


def encode(x: Tensor) -> Tensor:
    """The payload of x [samples, ...], of any floating-point type: uint8."""
    samples, row = rows_of(x.shape)
    flat = x.detach().reshape(samples, row)
    k = kept(row)
    order = flat.abs().sort(dim=1, descending=True, stable=True).indices  # ties: the first place
    mask = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order[:, :k], True)
    positions = mask.nonzero()[:, 1].view(samples, k)
    values = flat.gather(1, positions).contiguous().view(-1).view(torch.uint8)
    return torch.cat([values, packed_places(mask, positions)])


def decode(payload: Tensor, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what the receiver sees. Raises ValueError when the payload has another length."""
    samples, row = rows_of(shape)
    k = kept(row)
    size = samples * k * dtype.itemsize
    if payload.numel() != nbytes(shape, dtype):
        raise ValueError(f"{payload.numel()} bytes for a message of {nbytes(shape, dtype)}")
    values = payload[:size].clone().view(dtype).view(samples, k)
    if k == row:
        return values.view(shape)
    if indices_win(samples, row, k):
        positions = unpacked(payload[size:], index_bits(row), samples * k).view(samples, k)
    else:
        mask = unpacked(payload[size:], 1, samples * row).view(samples, row)
        positions = mask.nonzero()[:, 1].view(samples, k)
    out = torch.zeros(samples, row, dtype=dtype, device=payload.device)
    return out.scatter_(1, positions, values).view(shape)


def pack(t: Tensor, backward: bool = False) -> tuple[Tensor, int]:
    """(a buffer of uint8 of the size of t, zero after the payload; bytes used)."""
    payload = encode(t)
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

    @staticmethod
    def forward(ctx, x):
        """Return what the next stage sees of x."""
        return decode(encode(x), x.shape, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        """Return what the stage before sees of the gradient."""
        return decode(encode(grad), grad.shape, grad.dtype)


def kept(row: int) -> int:
    """Entries that travel of a sample of so many."""
    return max(1, round(RATIO * row))


def nbytes(shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes of a message of this shape."""
    samples, row = rows_of(shape)
    k = kept(row)
    place_bytes = -(-samples * (k * index_bits(row) if indices_win(samples, row, k) else row) // 8)
    return samples * k * dtype.itemsize + (0 if k == row else place_bytes)


def packed_places(mask: Tensor, positions: Tensor) -> Tensor:
    """Return where the mask is true, in the shorter of two codings: uint8."""
    samples, row = mask.shape
    if positions.shape[1] == row:
        return torch.empty(0, dtype=torch.uint8, device=mask.device)
    if indices_win(samples, row, positions.shape[1]):
        return packed(positions, index_bits(row))
    return packed(mask, 1)


def indices_win(samples: int, row: int, k: int) -> bool:
    """Return whether packed indices are no longer than a bitmask."""
    return -(-samples * k * index_bits(row) // 8) <= -(-samples * row // 8)


def index_bits(row: int) -> int:
    """Bits of a place among so many."""
    return max(row - 1, 0).bit_length()

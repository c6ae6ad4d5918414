"""Packing integers of b bits, and masks, into bytes (little endian: the first code fills the low
bits).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.kernels import gpu, packing
from commsweep.errors import UserError


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take: ceil(count * bits / 8)."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Non-negative integer codes [n] below 2**bits -> uint8 [ceil(n * bits / 8)]."""
    codes = codes.reshape(-1)
    if packing.usable(codes):
        return packing.pack_codes(codes, bits)
    if gpu.usable(codes):
        return gpu.pack_codes(codes, bits)
    shifts = torch.arange(bits, device=codes.device)
    stream = ((codes.reshape(-1, 1).long() >> shifts) & 1).to(torch.uint8).reshape(-1)
    stream = torch.nn.functional.pad(stream, (0, -stream.numel() % 8)).reshape(-1, 8)
    return (stream << torch.arange(8, device=codes.device, dtype=torch.uint8)).sum(
        1, dtype=torch.uint8
    )


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack`: int64 codes [count]. Raises UserError unless there are just as many bytes
    as they need.
    """
    check_length(packed, bits, count)
    if packing.usable(packed):
        return packing.unpack_codes(packed, bits, count)
    if gpu.usable(packed):
        return gpu.unpack_codes(packed, bits, count)
    stream = (packed.reshape(-1, 1) >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
    stream = stream.reshape(-1)[: count * bits].reshape(count, bits).long()
    return (stream << torch.arange(bits, device=packed.device)).sum(1)


def unpack_small(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of `pack` for at most 8 bits: uint8 codes [count]. Raises UserError as `unpack`
    does.
    """
    if not packing.usable(packed):
        return unpack(packed, bits, count).to(torch.uint8)
    check_length(packed, bits, count)
    return packing.unpack_bytes(packed, bits, count)


def unpack_flags(packed: Tensor, count: int) -> Tensor:
    """Inverse of `pack` for one bit: booleans [count]. Raises UserError as `unpack` does."""
    check_length(packed, 1, count)
    return (
        packing.unpack_flags(packed, count)
        if packing.usable(packed)
        else unpack(packed, 1, count).bool()
    )


def check_length(packed: Tensor, bits: int, count: int) -> None:
    """Raise UserError unless there are just as many bytes as codes need."""
    if packed.numel() != packed_bytes(count, bits):
        raise UserError(f"{packed.numel()} bytes for {count} codes of {bits} bits")


def index_bits(size: int) -> int:
    """Bits of one index into `size` places: ceil(log2(size))."""
    return max(size - 1, 0).bit_length()


def mask_bytes(n_rows: int, row: int, k: int) -> int:
    """Bytes that name `k` places in each of `n_rows` rows of `row` places.

    The smaller of packed indices (kept * ceil(log2 row) bits a row) and a bitmask (row bits a row);
    zero when every place is kept, because there is nothing to say.
    """
    if k == row:
        return 0
    return min(packed_bytes(n_rows * k, index_bits(row)), packed_bytes(n_rows * row, 1))


def pack_mask(mask: Tensor, k: int) -> Tensor:
    """A boolean mask [rows, row] with `k` places true in every row -> its smaller coding, as
    uint8.
    """
    n_rows, row = mask.shape
    if k == row:
        return torch.empty(0, dtype=torch.uint8, device=mask.device)
    if indices_win(n_rows, row, k):
        return pack(columns_of(mask, k), index_bits(row))
    return pack(mask, 1)


def columns_of(mask: Tensor, k: int) -> Tensor:
    """The columns, int64 [rows, k], of a boolean mask [rows, row] that is true k times a row."""
    n_rows, row = mask.shape
    if mask.device.type == "cpu":
        flat_indices = torch.from_numpy(np.flatnonzero(mask.numpy())).view(n_rows, k)
        return flat_indices - row * torch.arange(n_rows)[:, None] if n_rows > 1 else flat_indices
    return taken(torch.arange(row, device=mask.device).expand_as(mask), mask, k)


def row_counts(mask: Tensor) -> Tensor:
    """The number of true entries in each row of a boolean mask [rows, row], int64 [rows]."""
    n_rows, row = mask.shape
    if mask.device.type == "cpu" and n_rows <= row:  # long rows: eight times faster than a sum
        return torch.tensor([np.count_nonzero(flags) for flags in mask.numpy()])
    return mask.sum(1)


def taken(flat: Tensor, memory: Tensor, k: int) -> Tensor:
    """The entries of flat [rows, n] where `memory`, which is true k times in each row, in order:
    [rows, k].
    """
    if flat.device.type == "cpu":
        return flat[memory].view(-1, k)
    # what is not kept falls into the last column; no device is waited for
    out = flat.new_empty(len(flat), k + 1)
    return out.scatter_(1, (memory.cumsum(1) - 1).where(memory, k), flat)[:, :k].contiguous()


def unpack_mask(packed: Tensor, n_rows: int, row: int, k: int) -> Tensor:
    """Inverse of `pack_mask`. Raises UserError when the bytes do not name `k` places of each
    row, in order.
    """
    if k == row:
        return torch.ones(n_rows, row, dtype=torch.bool, device=packed.device)
    if not indices_win(n_rows, row, k):
        mask = unpack_flags(packed, n_rows * row).reshape(n_rows, row)
        if not (row_counts(mask) == k).all():
            raise UserError(f"a bitmask does not keep {k} of {row} entries in every row")
        return mask
    columns = unpack(packed, index_bits(row), n_rows * k).reshape(n_rows, k)
    check_columns(columns, row)
    return torch.zeros(n_rows, row, dtype=torch.bool, device=packed.device).scatter_(
        1, columns, True
    )


def check_columns(columns: Tensor, row: int) -> None:
    """Raise UserError unless the columns [rows, k] ascend in every row and lie below `row`."""
    if not ((columns[:, 1:] > columns[:, :-1]).all() and (columns[:, -1:] < row).all()):
        raise UserError(f"packed places do not ascend within their row of {row} entries")


def indices_win(n_rows: int, row: int, k: int) -> bool:
    """Return whether packed indices are no longer than a bitmask."""
    return packed_bytes(n_rows * k, index_bits(row)) <= packed_bytes(n_rows * row, 1)

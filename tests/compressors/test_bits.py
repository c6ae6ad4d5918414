"""Packing is exact for every width, and masks take the smaller coding."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from commsweep.compressors.bits import (
    index_bits,
    mask_bytes,
    pack,
    pack_mask,
    packed_bytes,
    unpack,
    unpack_mask,
)
from commsweep.compressors.kernels import packing


@given(bits=st.integers(1, 24), data=st.data())
def test_pack_inverts_and_fills_whole_bytes(bits, data):
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=60)))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(len(codes), bits) == -(-len(codes) * bits // 8)
    assert torch.equal(unpack(packed, bits, len(codes)), codes)


def test_one_bit_packing_is_numpys_little_endian():
    mask = np.random.default_rng(0).integers(0, 2, 77)
    assert np.array_equal(
        pack(torch.from_numpy(mask), 1).numpy(), np.packbits(mask, bitorder="little")
    )


@given(rows=st.integers(1, 5), row=st.integers(1, 40), data=st.data())
def test_masks_survive_in_the_smaller_coding(rows, row, data):
    kept = data.draw(st.integers(1, row))
    places = torch.stack([torch.randperm(row)[:kept] for _ in range(rows)])
    mask = torch.zeros(rows, row, dtype=torch.bool).scatter_(1, places, True)
    packed = pack_mask(mask, kept)
    assert torch.equal(unpack_mask(packed, rows, row, kept), mask)
    as_indices, as_bits = -(-rows * kept * index_bits(row) // 8), -(-rows * row // 8)
    assert (
        packed.numel()
        == mask_bytes(rows, row, kept)
        == (0 if kept == row else min(as_indices, as_bits))
    )


@given(rows=st.integers(1, 4), row=st.integers(2, 200), data=st.data())
def test_values_are_spread_over_the_places_of_a_bitmask(rows, row, data):
    kept = data.draw(st.integers(1, row))
    places = torch.stack([torch.randperm(row)[:kept].sort().values for _ in range(rows)])
    mask = torch.zeros(rows, row, dtype=torch.bool).scatter_(1, places, True)
    values, packed = torch.randn(rows * kept), pack(mask.flatten(), 1)
    wanted = torch.zeros(rows, row).masked_scatter_(mask, values)
    assert torch.equal(packing.spread_bits(values, packed, rows, row, kept), wanted)
    flip = data.draw(st.integers(0, rows * row - 1))
    packed[flip // 8] ^= 1 << flip % 8
    assert packing.spread_bits(values, packed, rows, row, kept) is None


def test_index_bits():
    assert [index_bits(n) for n in (1, 2, 3, 4, 5, 65536, 65537)] == [0, 1, 2, 2, 3, 16, 17]

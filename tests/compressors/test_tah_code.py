"""TAH-Quant's authors' codec, against tiles worked by hand."""

from __future__ import annotations

import pytest
import torch

from commsweep.compressors import build


def test_it_has_the_bits_that_the_paper_quotes():
    codec = build({"kind": "tah_code"})
    shape = torch.Size([1, 1024, 4096])
    bits = 8 * codec.formula_bytes(shape, torch.float32) / shape.numel()
    assert bits == pytest.approx(4.41, abs=0.005)
    # int(1024 * (1 - 0.8)) is 204
    assert codec._low(1024) == 204


def test_a_tile_by_hand():
    """No outlier: z = -3, s = 7 / 7 = 1; codes are whole numbers above -3, 2.4 is rounded to 2."""
    x = torch.tensor([[4.0, -3.0, 2.4, 0.0, 1.0, 3.0, -2.0, -1.0]])[None]
    codec = build({"kind": "tah_code", "tile": 8, "high_bits": 3, "high_share": 1.0})
    assert codec.roundtrip(x).flatten().tolist() == [4.0, -3.0, 2.0, 0.0, 1.0, 3.0, -2.0, -1.0]


def test_an_outlier_goes_to_the_front_and_is_spread():
    """One entry of 8 in a tile of 8: after the swap every entry is 8 / sqrt(8), z holds it all."""
    x = torch.zeros(1, 1, 8)
    x[..., 5] = 8.0
    codec = build({"kind": "tah_code", "tile": 8, "high_share": 1.0})
    payload = codec.encode(x)
    assert int(payload.parts["rotated"][0]) & 1 == 1
    assert payload.parts["ranges"][0, 0, 0].item() == pytest.approx(8 / 8**0.5, rel=1e-3)
    assert int(payload.parts["places"][0]) & 7 == 5
    y = codec.decode(payload)
    assert y[0, 0, 5] == pytest.approx(8.0, rel=1e-3) and y.abs().sum() == pytest.approx(
        8, rel=1e-2
    )


def test_tokens_of_low_entropy_get_few_bits():
    """Of ten tokens int(10 * (1 - 0.8)) = 1: the one whose features are one large number."""
    x = torch.randn(1, 10, 64, generator=torch.Generator().manual_seed(0))
    x[0, 3] = 0.01 * x[0, 3]
    x[0, 3, 7] = 5.0
    payload = build({"kind": "tah_code"}).encode(x)
    assert int(payload.parts["tokens"][0]) == 1 << 3


def test_a_tile_of_zeros_is_marked_and_stays_zero():
    payload = build({"kind": "tah_code", "tile": 8}).encode(torch.zeros(1, 2, 8))
    assert int(payload.parts["rotated"][0]) == 3
    assert not build({"kind": "tah_code", "tile": 8}).decode(payload).any()


def test_more_bits_are_less_error():
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    errors = [
        float((build({"kind": "tah_code", "high_bits": bits}).roundtrip(x) - x).norm())
        for bits in (4, 6, 8)
    ]
    assert errors == sorted(errors, reverse=True)

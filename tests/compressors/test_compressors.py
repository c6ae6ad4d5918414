"""Law 3: every compressor, on every shape of input, against its stated formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsweep import seeds
from commsweep.compressors import build
from commsweep.compressors.base import all_finite
from commsweep.compressors.kernels import cpu
from commsweep.errors import UserError
from tests.helpers import COMPRESSORS, name, same_bits

each = pytest.mark.parametrize("spec", COMPRESSORS, ids=name)


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    image = torch.randn(4, 6, 5, 7, generator=g)
    return {
        "image": image,
        "relu": image.relu(),
        "channels_last": image.to(memory_format=torch.channels_last),
        "not_contiguous": torch.randn(8, 6, 4, generator=g).transpose(1, 2),
        "sequence": torch.randn(2, 9, 16, generator=g),
        "zeros": torch.zeros(3, 4),
        "negative_zeros": -torch.zeros(3, 4),
        "constant": torch.full((3, 5), 2.5),
        "one": torch.tensor([3.0]),
        "scalar": torch.tensor(-2.0),
        "one_sample": torch.randn(1, 33, generator=g),
        "ties": torch.randint(-2, 3, (4, 33), generator=g).float(),
        "bfloat16": torch.randn(4, 50, generator=g).bfloat16(),
        "float16": torch.randn(4, 50, generator=g).half(),
        "tiny": torch.randn(4, 50, generator=g) * 1e-38,
    }


@each
@pytest.mark.parametrize("kind", inputs())
def test_payload_and_roundtrip_agree_and_bytes_are_the_formula(spec, kind):
    x, compressor = inputs()[kind], build(spec)
    before = x.clone()
    payload = compressor.encode(x, seed=5)
    decoded, direct = compressor.decode(payload), compressor.roundtrip(x, seed=5)
    assert decoded.shape == direct.shape == x.shape
    assert decoded.dtype == direct.dtype == x.dtype
    assert same_bits(decoded, direct)
    assert same_bits(x, before), "the input was changed"
    assert payload.nbytes == int(compressor.bytes_sent(direct))
    assert payload.nbytes == sum(
        part.numpy().nbytes if part.dtype != torch.bfloat16 else 2 * part.numel()
        for part in payload.parts.values()
    )


@each
@given(data=st.data())
def test_laws_hold_for_any_values(spec, data):
    values = st.floats(-(2.0**60), 2.0**60, width=32)
    x = torch.from_numpy(
        data.draw(
            hnp.arrays(
                np.float32, hnp.array_shapes(min_dims=1, max_dims=4, max_side=9), elements=values
            )
        )
    )
    compressor = build(spec)
    if spec["kind"] == "fixed_batch":
        # its float16 scale overflows above: a documented defect of the authors' operator
        x = x.clamp(-60000, 60000)
    payload = compressor.encode(x, seed=1)
    direct = compressor.roundtrip(x, seed=1)
    assert same_bits(compressor.decode(payload), direct)
    assert payload.nbytes == int(compressor.bytes_sent(direct))
    assert direct.isfinite().all()


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_a_clear_error_and_stays_visible_without_the_check(spec, bad):
    x = torch.randn(3, 40)
    x[1, 7] = bad
    compressor = build(spec)
    for call in (compressor.encode, compressor.roundtrip):
        with pytest.raises(UserError, match="1 of 120 entries"):
            call(x)
    # A blind one may not choose the entry; a cast to 16 bits saturates an infinity; all others must
    # show it.
    if not compressor.spec.blind and spec.get("values", spec)["kind"] != "cast":
        assert not compressor.apply(x).isfinite().all()


@pytest.mark.parametrize("x", [torch.zeros(0, 3), torch.arange(4)], ids=["empty", "integers"])
def test_what_cannot_be_compressed_is_refused(x):
    with pytest.raises(UserError, match="cannot compress"):
        build({"kind": "topk"}).encode(x)


@each
def test_kernels_equal_the_torch_path(spec, monkeypatch):
    for x in inputs().values():
        compressor = build(spec)
        fast = compressor.roundtrip(x, seed=3)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "numba", None)
            assert same_bits(fast, compressor.roundtrip(x, seed=3))


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "topk", "ratio": 0.1},
        {"kind": "uniform", "bits": 4},
        {"kind": "uniform", "bits": 4, "scale": "sample"},
        {"kind": "sign"},
        {"kind": "tern"},
        {"kind": "qsgd"},
    ],
    ids=name,
)
def test_threads_change_nothing(spec):
    x, compressor = torch.randn(5, 40000), build(spec)  # large enough to be shared out
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = compressor.apply(x)
        torch.set_num_threads(3)
        assert same_bits(one, compressor.apply(x))
    finally:
        torch.set_num_threads(threads)


# Values against independent references.


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["image", "relu", "ties", "sequence"])
def test_topk_keeps_exactly_k_largest_and_of_ties_the_first(ratio, kind):
    x = inputs()[kind]
    y = build({"kind": "topk", "ratio": ratio}).masked(x)[0].flatten(1).numpy()
    mask = build({"kind": "topk", "ratio": ratio}).masked(x)[1].flatten(1).numpy()
    flat = x.flatten(1).numpy()
    k = max(1, round(ratio * flat.shape[1]))
    for row, kept, got in zip(flat, mask, y, strict=True):
        # stable: the lowest index first among equals
        order = np.argsort(-np.abs(row), kind="stable")[:k]
        assert sorted(order) == list(np.flatnonzero(kept))
        assert np.array_equal(got, np.where(kept, row, 0))


@given(
    x=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 200)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    k=st.integers(1, 200),
)
def test_radix_selection_equals_sorting(x, k):
    k = min(k, x.shape[1])
    got, mask = cpu.topk_rows(torch.from_numpy(x), k, False, True)
    for row, kept in zip(np.abs(x), mask.numpy(), strict=True):
        assert list(np.flatnonzero(kept)) == sorted(np.argsort(-row, kind="stable")[:k])
    assert np.array_equal(got.numpy(), np.where(mask.numpy(), x, 0))


@pytest.mark.parametrize("kind", ["random", "ties", "few values", "constant", "not finite"])
@pytest.mark.parametrize(
    "shape", [(1, 2, 64, 3, 64), (2, 1, 50, 2, 60), (3, 1, 1, 1, 2049), (1, 1, 1, 2, 9001)]
)
def test_tiles_of_which_few_entries_stay_equal_sorting(shape, kind):
    """Candidates from groups' maxima are all that can be among the k largest, whatever lies in the
    others.
    """
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=draws)
    x = {
        "random": x,
        "ties": (4 * x).round(),
        "few values": (x > 2).float() * x.sign(),
        "constant": torch.ones(shape),
        "not finite": x.masked_fill(x > 2.5, torch.nan).masked_fill(x < -2.5, -torch.inf),
    }[kind]
    n = shape[2] * shape[4]
    tiles = x.transpose(2, 3).reshape(-1, n)
    for k in (1, 7, n // 64, n // 16):
        assert cpu.few_rows(n, k) == (4 * k <= 2048)
        values, columns = cpu.topk_tiles(x, k) if cpu.few_rows(n, k) else (None, None)
        rows, mask = cpu.topk_rows(tiles, k, False, True)
        strict, _ = cpu.topk_rows(tiles, k, True, False)
        bits = tiles.view(torch.int32).numpy() & 0x7FFFFFFF
        for place, row in enumerate(bits):
            wanted = sorted(np.argsort(-row, kind="stable")[:k])
            assert list(np.flatnonzero(mask[place].numpy())) == wanted
            edge = row[np.argsort(-row, kind="stable")[k - 1]]
            assert np.array_equal(
                np.flatnonzero(strict[place].numpy().view(np.int32)), np.flatnonzero(row > edge)
            )
            if columns is not None:
                assert columns[place].tolist() == wanted
                assert same_bits(values[place], tiles[place][wanted])
        if columns is not None:
            assert same_bits(
                cpu.put_tiles(values, columns, shape).transpose(2, 3).reshape(-1, n), rows
            )


@pytest.mark.parametrize(
    "kind", ["random", "relu", "ties", "heavy", "constant", "not finite", "sorted"]
)
def test_long_rows_are_selected_as_sorting_does(kind):
    """The estimated threshold is mended until exactly k entries reach it, or others find it."""
    x = torch.randn(3, 20011, generator=torch.Generator().manual_seed(1))
    x = {
        "random": x,
        "relu": x.clamp(min=0),
        "ties": (50 * x).round(),
        "heavy": x.sign() * x.abs() ** 9,
        "constant": torch.full_like(x, -2.0),
        "sorted": x.sort(1).values,
        "not finite": x.masked_fill(x > 2.5, torch.nan).masked_fill(x < -2.5, torch.inf),
    }[kind]
    bits = x.view(torch.int32).numpy() & 0x7FFFFFFF
    for k in (1, 13, 200, 2001, 10000, 19000, 20010):
        rows, mask = cpu.topk_rows(x, k, False, True)
        for row, kept in zip(bits, mask.numpy(), strict=True):
            assert np.array_equal(
                np.flatnonzero(kept), np.sort(np.argsort(-row, kind="stable")[:k])
            )
        assert same_bits(rows, torch.where(mask, x, torch.zeros(())))


def test_few_coded_values_of_tiles_are_the_same_on_every_path(monkeypatch):
    x = torch.randn(1, 128, 192)
    for spec in (
        {"scope": "tile"},
        {"scope": "sample", "ratio": 0.01},
        {"scope": "tensor", "ratio": 0.01},
    ):
        one = build({"kind": "topk", "ratio": 1 / 64, "values": {"kind": "statistical"}} | spec)
        fast, slow = one.masked(x, 0, want_mask=False)[0], one.masked(x, 0)[0]
        assert same_bits(fast, slow) and same_bits(fast, one.decode(one.encode(x)))


@pytest.mark.parametrize("scope,rows", [("sample", 4), ("tensor", 1), ("last", 4 * 6 * 5)])
def test_topk_scopes_count_by_row(scope, rows):
    x = inputs()["image"]
    _, mask = build({"kind": "topk", "ratio": 0.3, "scope": scope}).masked(x)
    d = x.numel() // rows
    assert (mask.reshape(rows, d).sum(1) == max(1, round(0.3 * d))).all()


def test_topk_payload_bytes_by_hand():
    # 128 samples of 65,536: k = 6,554 values of 4 bytes; indices of 16 bits cost 13,108 a row, a
    # bitmask 8,192.
    sizes = torch.Size([128, 64, 32, 32])
    assert build({"kind": "topk", "ratio": 0.1}).formula_bytes(sizes, torch.float32) == 128 * (
        6554 * 4 + 8192
    )
    # at 2 % (1,311 values) the indices win
    assert build({"kind": "topk", "ratio": 0.02}).formula_bytes(sizes, torch.float32) == 128 * (
        1311 * 4 + 1311 * 2
    )
    assert (
        build({"kind": "topk", "ratio": 1.0}).formula_bytes(sizes, torch.float32)
        == sizes.numel() * 4
    )


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("kind", ["image", "relu", "ties"])
def test_strict_topk_is_the_authors_threshold_rule(ratio, kind):
    x = inputs()[kind]
    got = build({"kind": "topk_strict", "ratio": ratio}).roundtrip(x)
    flat = x.flatten(1)
    low = int(flat.shape[1] * (1 - ratio))
    threshold = flat.abs().kthvalue(low, dim=1, keepdim=True).values
    assert torch.equal(got, (flat * (flat.abs() > threshold)).view_as(x) + 0.0)


def test_strict_topk_keeps_fewer_on_sparse_maps_as_reported():
    x = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).relu()
    x[:, :700] = 0  # more zeros than the share dropped: the threshold is zero
    kept = (build({"kind": "topk_strict", "ratio": 0.5}).roundtrip(x) != 0).float().mean()
    assert kept < 0.25


@pytest.mark.parametrize("bits", range(1, 9))
def test_uniform_is_the_authors_formula_in_float64(bits):
    x = inputs()["image"]
    got = build({"kind": "uniform", "bits": bits}).roundtrip(x).double()
    wide = x.double()
    lo, hi, n = wide.min(), wide.max(), 2**bits - 1
    want = lo + torch.round(n * (wide - lo) / (hi - lo)) / n * (hi - lo)
    step = (hi - lo) / n
    differs = (got - want).abs() > 1e-5 * (hi - lo)
    # only where float32 lands on the other side of a rounding edge
    assert differs.float().mean() < 0.001
    assert ((got - wide).abs() <= step / 2 * 1.0001).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("scale", ["tensor", "sample", "channel", "group"])
def test_fixed_point_is_its_formula_in_float64(bits, scale):
    x = inputs()["image"]
    extra = {"group": 10} if scale == "group" else {}
    got = build({"kind": "fixed", "bits": bits, "scale": scale, **extra}).roundtrip(x).double()
    wide, half = x.double(), 2 ** (bits - 1)
    groups = {
        "tensor": wide.reshape(1, -1),
        "sample": wide.flatten(1),
        "channel": wide.transpose(0, 1).flatten(1),
        "group": wide.reshape(-1, 10),
    }[scale]
    s = groups.abs().amax(1, keepdim=True)
    want = (groups / s * half).round().clamp(-half, half - 1) / half * s
    if scale == "channel":
        want = want.reshape(6, 4, 5, 7).transpose(0, 1)
    assert ((got - want.reshape(x.shape)).abs() > 1e-5 * s.max()).float().mean() < 0.002


@pytest.mark.parametrize("scale", ["tensor", "sample", "channel", "group"])
def test_uniform_scale_scopes_share_a_range(scale):
    x = inputs()["image"]
    extra = {"group": 10} if scale == "group" else {}
    y = build({"kind": "uniform", "bits": 1, "scale": scale, **extra}).roundtrip(x)
    groups = {
        "tensor": y.reshape(1, -1),
        "sample": y.flatten(1),
        "channel": y.transpose(0, 1).flatten(1),
        "group": y.reshape(-1, 10),
    }[scale]
    source = {
        "tensor": x.reshape(1, -1),
        "sample": x.flatten(1),
        "channel": x.transpose(0, 1).flatten(1),
        "group": x.reshape(-1, 10),
    }[scale]
    # one bit: every value is the minimum or the maximum
    for got, was in zip(groups, source, strict=True):
        assert (
            torch.isclose(got[:, None], torch.stack([was.min(), was.max()]), atol=1e-6).any(1).all()
        )


def test_quantized_bytes_by_hand():
    shape = torch.Size([4, 6, 5, 7])  # 840 elements, 210 a sample
    cases = [
        ("tensor", 420 + 8),
        ("sample", 420 + 4 * 8),
        ("channel", 420 + 6 * 8),
        ("group", 420 + 4 * 2 * 8),
    ]
    for scale, nbytes in cases:  # a group of 128: two a sample
        assert (
            build({"kind": "uniform", "bits": 4, "scale": scale}).formula_bytes(
                shape, torch.float32
            )
            == nbytes
        )


@pytest.mark.parametrize("kind", ["uniform", "fixed"])
def test_stochastic_rounding_is_unbiased_and_nearest_is_not(kind):
    x = torch.full((1, 4000), 0.3)
    x[0, 0], x[0, 1] = -1.0, 1.0
    spec = {"kind": kind, "bits": 2, "rounding": "stochastic"}
    means = torch.stack([build(spec).roundtrip(x, seed)[0, 2:].mean() for seed in range(20)])
    assert abs(means.mean() - 0.3) < 4 * means.std() / math.sqrt(20) + 1e-3
    assert abs(build(spec | {"rounding": "nearest"}).roundtrip(x)[0, 2:].mean() - 0.3) > 0.02
    assert same_bits(build(spec).roundtrip(x, 7), build(spec).roundtrip(x, 7))
    assert not same_bits(build(spec).roundtrip(x, 7), build(spec).roundtrip(x, 8))


def test_fixed_batch_is_the_authors_formula_with_a_half_scale():
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    got = build({"kind": "fixed_batch", "bits": 4}).roundtrip(x)
    flat = x.flatten(1)
    s = flat.abs().max(dim=0).values
    q = torch.clip(torch.round(2**3 * flat / (s + 1e-6)), -(2**3), 2**3 - 1)
    assert torch.allclose(got.flatten(1), q / 2**3 * s.half().float(), atol=1e-6)
    # D14 of the facts: at batch 8, 4-bit codes plus half-precision scales are 6 bits an element
    assert (
        build({"kind": "fixed_batch", "bits": 4}).formula_bytes(x.shape, x.dtype) * 8 / x.numel()
        == 6
    )
    # D15: gradients far below the epsilon vanish
    assert (build({"kind": "fixed_batch", "bits": 8}).roundtrip(x * 1e-9) == 0).all()


def test_randomk_scaled_is_unbiased_and_positions_are_shared_by_the_batch():
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    scaled = build({"kind": "randomk", "ratio": 0.25, "scaled": True})
    draws = torch.stack([scaled.roundtrip(x, seed) for seed in range(2000)])
    assert (draws.mean(0) - x).abs().max() < 5 * (draws.std(0) / math.sqrt(2000)).max()
    y = build({"kind": "randomk", "ratio": 0.25}).roundtrip(x, 3)
    assert ((y != 0).sum(1) == 5).all()
    assert ((y != 0) == (y != 0)[0]).all()


def test_forward_mask_sends_values_only():
    x, g = torch.randn(4, 50), torch.randn(4, 50)
    _, mask = build({"kind": "topk", "ratio": 0.2}).masked(x)
    shared = build({"kind": "forward_mask"}).given(mask)
    payload = shared.encode(g)
    assert payload.nbytes == 4 * 10 * 4 == int(shared.bytes_sent(shared.roundtrip(g)))
    assert same_bits(shared.decode(payload), shared.roundtrip(g))
    assert torch.equal(shared.roundtrip(g) != 0, mask)


@pytest.mark.parametrize(
    "spec,message",
    [
        ({"kind": "topkk"}, "did you mean 'topk'"),
        ({"kind": "topk", "ration": 0.1}, "did you mean 'ratio'"),
        ({"kind": "topk", "ratio": 0}, "compressor.ratio=0: input should be greater than 0"),
        (
            {"kind": "topk", "ratio": 1.5},
            "compressor.ratio=1.5: input should be less than or equal to 1",
        ),
        (
            {"kind": "uniform", "bits": 9},
            "compressor.bits=9: input should be less than or equal to 8",
        ),
        ({"kind": "fixed", "bits": 0}, "compressor.bits=0"),
        ({}, "kind"),
    ],
)
def test_a_wrong_spec_is_one_clear_line(spec, message):
    with pytest.raises(UserError) as caught:
        build(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# What audits found.


@given(
    seed=st.integers(0, 1000),
    bits=st.integers(2, 8),
    size=st.sampled_from([1e-7, 1e-3, 1.0, 300.0]),
)
def test_the_authors_fixed_point_divides_by_the_rounded_scale(seed, bits, size):
    """Against their rule in plain float64: s is float16 before it divides."""
    x = size * torch.randn(6, 11, generator=torch.Generator().manual_seed(seed))
    s = x.abs().amax(0).half()
    half = 2 ** (bits - 1)
    wanted = (x * half / (s.float() + 1e-6)).round().clamp(-half, half - 1) / half * s.float()
    assert torch.equal(build({"kind": "fixed_batch", "bits": bits}).roundtrip(x), wanted + 0.0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_stochastic_fixed_point_has_no_bias_at_either_end(bits):
    x = torch.tensor([[1.0, 0.99, 0.9, -1.0, -0.7, 0.0, 0.31]])
    made = build({"kind": "fixed", "bits": bits, "scale": "sample", "rounding": "stochastic"})
    mean = torch.stack([made.roundtrip(x, seed) for seed in range(4000)]).mean(0)
    step = 2.0 / 2**bits * 2
    assert torch.allclose(mean, x, atol=4 * step / 2 / 4000**0.5)


def test_one_bit_fixed_point_cannot_be_without_bias():
    with pytest.raises(UserError, match="one bit has no code above zero"):
        build({"kind": "fixed", "bits": 1, "rounding": "stochastic"})


def test_a_tensor_that_wants_a_gradient_is_refused():
    x = torch.randn(3, 8, requires_grad=True)
    made = build({"kind": "topk"})
    for call in (made.roundtrip, made.encode):
        with pytest.raises(UserError, match="requires a gradient"):
            call(x)
    with torch.no_grad():
        assert torch.equal(made.roundtrip(x), made.roundtrip(x.detach()))


def test_draws_of_different_seeds_places_and_steps_never_meet():
    every = {
        seeds.draw(purpose, seed, place, step)
        for purpose in range(4)
        for seed in (0, 1, 65536, 2**32 - 1)
        for place in range(16)
        for step in (0, 1, 2**31, 2**40)
    }
    assert len(every) == 4 * 4 * 16 * 4 and all(0 <= one < 2**63 for one in every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sum_that_is_too_large_is_no_entry_that_is(dtype):
    large = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(large) and all_finite(-large)
    for bad in (float("inf"), -float("inf"), float("nan")):
        spoiled = large.clone()
        spoiled[3] = bad
        assert not all_finite(spoiled)
    assert not all_finite(torch.tensor([float("inf"), -float("inf")], dtype=dtype))

"""Entropy coding: against a decoder of whole numbers without end, the entropy, and bent bytes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commsweep.boundary.diagnosis import MessageStatistics
from commsweep.compressors import build, rans
from commsweep.compressors.bits import pack
from commsweep.compressors.kernels import cpu
from commsweep.config import override
from commsweep.errors import UserError
from tests.helpers import same_bits, tiny

CODES = st.integers(1, 8).flatmap(
    lambda bits: st.tuples(
        st.just(bits),
        st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=300),
        st.sampled_from([1, 7, 400]),
    )
)


def counts_of(codes, bits):
    return torch.from_numpy(np.bincount(codes, minlength=1 << bits))


def read_slowly(stream, table, count):
    """The stream's codes by Python's own integers, from the definition."""
    states = [int.from_bytes(stream[8 * i : 8 * i + 8].tobytes(), "little") for i in range(4)]
    words = [
        int.from_bytes(stream[i : i + 4].tobytes(), "little") for i in range(32, len(stream), 4)
    ]
    whole = int(sum(table))
    starts = [sum(table[:code]) for code in range(len(table) + 1)]
    codes = []
    for i in range(count):
        slot = states[i % 4] % whole
        code = max(c for c in range(len(table)) if starts[c] <= slot and table[c])
        states[i % 4] = int(table[code]) * (states[i % 4] // whole) + slot - int(starts[code])
        if states[i % 4] < 2**31:
            states[i % 4] = states[i % 4] * 2**32 + words.pop(0)
        codes.append(code)
    assert states == [2**31] * 4 and not any(words)
    return codes


@given(CODES)
def test_codes_are_read_back_by_us_and_by_the_definition(drawn):
    bits, some, times = drawn
    codes = np.array(some * times, np.uint8)
    counts = counts_of(codes, bits)
    table = rans.frequencies(counts).numpy()
    rare = bool((counts[counts > 0] * 4096 < counts.sum()).any())
    assert table.sum() in ((4096, 32768) if rare else (4096,))
    assert ((table > 0) == (counts.numpy() > 0)).all()
    stream = rans.encode(codes, table)
    assert len(stream) + 2 * 2**bits == int(rans.coded_bytes(counts))
    assert (rans.decode(stream, table, len(codes)) == codes).all()
    if times < 400:
        assert read_slowly(stream, table, len(codes)) == codes.tolist()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [0.05, 0.12, 0.5])
def test_streams_come_near_the_entropy(bits, width):
    n = 200_000
    values = np.random.default_rng(0).normal(2**bits / 2, width * 2**bits, n)
    codes = np.clip(np.rint(values), 0, 2**bits - 1).astype(np.uint8)
    counts = counts_of(codes, bits)
    share = counts.numpy() / n
    entropy = -sum(p * np.log2(p) for p in share if p)
    assert float(rans.entropy(counts)) == pytest.approx(entropy, rel=1e-5)
    stream = rans.encode(codes, rans.frequencies(counts).numpy())
    assert entropy <= 8 * len(stream) / n <= entropy * 1.01 + 0.005


@given(CODES, st.data())
def test_bent_streams_are_refused_or_are_other_codes_of_the_same_table(drawn, data):
    bits, some, _ = drawn
    codes = np.array(some, np.uint8)
    table = rans.frequencies(counts_of(codes, bits)).numpy()
    stream = rans.encode(codes, table)
    bent = stream.copy()
    bent[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        made = rans.decode(bent, table, len(codes))
    except UserError:
        return
    # Codes in another order have the same table; then the stream is theirs, and only theirs.
    assert (rans.encode(made, table) == bent).all()


def test_symbols_rarer_than_1_in_4096_cost_little():
    """Of 65,536 codes of 8 bits all but 254 are one, and each other code occurs once."""
    codes = np.full(65_536, 7, np.uint8)
    others = [code for code in range(256) if code != 7]
    codes[np.arange(255) * 257] = others
    table = rans.frequencies(counts_of(codes, 8)).numpy()
    stream = rans.encode(codes, table)
    assert table.sum() == 32768 and (rans.decode(stream, table, len(codes)) == codes).all()
    needed = 65_536 * float(rans.entropy(counts_of(codes, 8))) / 8
    assert len(stream) < needed + 100


@pytest.mark.parametrize("length", [0, 31, 33, 36])
def test_streams_of_a_wrong_length_are_refused(length):
    with pytest.raises(UserError, match="no rANS stream of 50 codes"):
        table = np.array([4095, 1], np.int64)
        rans.decode(np.zeros(length, np.uint8), table, 50)
    with pytest.raises(UserError, match="no rANS stream"):
        rans.decode(np.zeros(40, np.uint8), np.array([4095, 2], np.int64), 50)


def test_a_message_is_never_longer_than_its_packed_codes_and_shorter_where_codes_are_skewed():
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))
    plain, coded = (
        build({"kind": "uniform", "bits": 4, "scale": "sample", "coding": coding})
        for coding in (None, "rans")
    )
    assert same_bits(plain.apply(x), coded.apply(x))
    told = coded.encode(x)
    assert set(told.parts) == {"coded", "table", "scales"}
    assert int(coded.bytes_sent(x)) == told.nbytes < 0.8 * plain.encode(x).nbytes
    even = torch.linspace(-1, 1, 64).reshape(1, -1)
    assert same_bits(plain.apply(even), coded.apply(even))
    assert int(coded.bytes_sent(even)) == coded.encode(even).nbytes == plain.encode(even).nbytes


def test_a_table_that_is_not_the_messages_is_refused():
    coded = build({"kind": "uniform", "bits": 2, "coding": "rans"})
    told = coded.encode(torch.randn(2000, generator=torch.Generator().manual_seed(0)))
    table = told.parts["table"].clone()
    table[0] += 1
    with pytest.raises(UserError):
        coded.decode(replace(told, parts=told.parts | {"table": table}))


def test_counts_are_the_same_where_nothing_may_be_waited_for():
    codes = torch.randint(0, 8, (999,), generator=torch.Generator().manual_seed(0))
    packed = pack(codes, 3)
    here = rans.counted(packed, 3, 999)
    with mock.patch.object(cpu, "numba", None):
        assert torch.equal(rans.counted(packed, 3, 999), here)


@pytest.mark.parametrize(
    ("compressor", "most"),
    [
        ({"kind": "uniform", "bits": 4, "scale": "sample"}, 4),
        ({"kind": "uniform", "bits": 4, "scale": "sample", "coding": "rans"}, 4),
        ({"kind": "rotated", "code": {"kind": "fixed", "bits": 4}}, 4),
        ({"kind": "sign"}, 1),
        ({"kind": "topk"}, None),
    ],
)
def test_diagnosis_says_the_entropy_of_codes(compressor, most):
    made, watch = build(compressor), MessageStatistics()
    x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(0))
    watch.record(x, y := made.apply(x, 3), [(made, x, 3, y)], warm=False)
    seen = watch.take()
    if most is None:
        assert "entropy" not in seen
        return
    codes = made.encode(x, 3)
    assert 0.7 * most < seen["entropy"] <= most
    if compressor.get("coding"):
        coded = 8 * codes.parts["coded"].numel() / x.numel()
        assert seen["entropy"] < coded < 1.03 * seen["entropy"] + 0.06


def test_coding_of_kept_values_is_one_line():
    values = {"values.kind": "uniform", "values.coding": "rans"}
    topk = {"kind": "topk"} | values
    with pytest.raises(UserError, match=r"values.coding=rans.*leave it out"):
        override(tiny(), {f"fwd.compressor.{name}": value for name, value in topk.items()})

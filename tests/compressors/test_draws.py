"""The draws: published numbers, one value on every path, and what random numbers must look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from commsweep import seeds
from commsweep.compressors import draws
from commsweep.compressors.kernels import cpu

CPU, N = torch.device("cpu"), 1 << 18


def size(*dims) -> torch.Size:
    return torch.Size(dims)


def plain(function, *args):
    """Without the kernels, as any other device computes it."""
    compiled, cpu.numba = cpu.numba, None
    try:
        return function(*args, CPU)
    finally:
        cpu.numba = compiled


@pytest.mark.parametrize(
    "start, words",
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]),
    ],
)
def test_words_are_those_published_for_splitmix64(monkeypatch, start, words):
    monkeypatch.setattr(seeds, "start", lambda seed: start)
    for made in (draws.words(3, 0, CPU), plain(draws.words, 3, 0)):
        assert [word % 2**64 for word in made.tolist()] == words


@given(st.integers(0, 70_000), st.integers(0, 2**63 - 1))
def test_kernels_draw_what_plain_operations_draw(n, seed):
    for draw in (draws.uniform, draws.normal):
        assert torch.equal(draw(size(n), seed, CPU), plain(draw, size(n), seed))
    assert torch.equal(draws.words(n, seed, CPU), plain(draws.words, n, seed))


@given(st.integers(1, 999), st.integers(0, 2**63 - 1), st.data())
def test_uniform_numbers_are_the_halves_of_words_that_the_text_says(n, seed, data):
    j, half = data.draw(st.integers(0, n - 1)), -(-n // 2)
    word = draws.words(half, seed, CPU)[j % half].item() % 2**64
    bits = word % 2**32 if j < half else word >> 32
    assert draws.uniform(size(n), seed, CPU)[j] == (bits >> 8) / 2**24


@pytest.mark.parametrize("seed", [0, 1, 2, seeds.draw(seeds.BOUNDARY, 0, 3, 17)])
def test_uniform_numbers_are_uniform_and_know_nothing_of_each_other(seed):
    u = draws.uniform(size(N), seed, CPU).double().numpy()
    assert u.min() >= 0 and u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    for low in (u, u * 256 % 1, u * 65536 % 1):  # also the lower bits, which few tests see
        cells = np.floor(low * 256).astype(int)
        assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > 1e-3
        for ahead in (1, 2, 64, N // 2):  # N // 2 on is the other half of the same word
            pairs = np.bincount(cells[:-ahead] // 16 * 16 + cells[ahead:] // 16, minlength=256)
            assert stats.chisquare(pairs).pvalue > 1e-3
    runs = np.diff(np.flatnonzero(np.diff(u > 0.5)))  # lengths of runs on one side: geometric
    assert abs(runs.mean() - 2) < 0.02


def test_streams_of_seeds_beside_each_other_are_independent():
    many = torch.stack([draws.uniform(size(4096), seed, CPU) for seed in range(64)]).double()
    together = torch.corrcoef(torch.cat([many, draws.uniform(size(4096), 2**63 - 1, CPU)[None]]))
    assert (together - torch.eye(65)).abs().max() < 5 / 4096**0.5
    first = many[:, 0].numpy()  # one draw of each stream
    assert stats.kstest(first, "uniform").pvalue > 1e-3


def test_every_bit_of_a_word_is_set_half_the_time_and_turns_with_every_bit_of_the_seed():
    words = draws.words(N, 5, CPU).numpy().view(np.uint64)
    shares = [np.mean(words >> np.uint64(bit) & np.uint64(1)) for bit in range(64)]
    assert np.abs(np.array(shares) - 0.5).max() < 5 * 0.5 / N**0.5
    for bit in range(0, 63, 7):
        other = draws.words(4096, 5 ^ 1 << bit, CPU).numpy().view(np.uint64) ^ words[:4096]
        turned = np.unpackbits(other.view(np.uint8)).mean()
        assert abs(turned - 0.5) < 5 * 0.5 / (64 * 4096) ** 0.5


def test_words_of_a_stream_are_all_different():
    assert len(torch.unique(draws.words(N, 9, CPU))) == N


def test_normal_numbers_are_normal_but_for_their_kurtosis():
    z = draws.normal(size(N), 3, CPU).double()
    assert abs(z.mean()) < 5 / N**0.5 and abs(z.var() - 1) < 5 * (2 / N) ** 0.5
    assert abs((z**4).mean() - (3 - 0.1)) < 5 * (96 / N) ** 0.5  # 3 - 6 / (5 * 12)
    assert abs((z**3).mean()) < 5 * (15 / N) ** 0.5
    assert abs(torch.corrcoef(torch.stack([z[:-1], z[1:]]))[0, 1]) < 5 / N**0.5


@pytest.mark.parametrize("n, k", [(1, 1), (7, 7), (50, 5), (50, 49)])
def test_every_place_is_chosen_as_often(n, k):
    made = torch.stack([draws.smallest(n, k, seed, CPU) for seed in range(4000)])
    assert (made.sum(1) == k).all()
    assert torch.equal(made[3], plain(draws.smallest, n, k, 3))
    if k < n:  # without replacement the counts vary by less than chi-square says
        expected = 4000 * k / n
        chi = ((made.sum(0) - expected) ** 2 / (expected * (1 - k / n))).sum() * (n - 1) / n
        assert stats.chi2.sf(chi, n - 1) > 1e-3 and stats.chi2.cdf(chi, n - 1) > 1e-3

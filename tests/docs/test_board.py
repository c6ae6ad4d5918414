"""Codes of two papers, each a file of at most 60 lines, as a user would enter them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from commsweep.compressors import build
from commsweep.compressors.bias import is_biased
from commsweep.scoring import laws

BOARD = Path(__file__).parents[2] / "docs" / "board"
CODES = {"three_lc": "ThreeLC", "count_sketch": "CountSketch"}


def code(name: str, **options):
    """Return a code of the board with these options."""
    path = BOARD / name / "codec.py"
    return build({"kind": "own", "code": f"{path}:{CODES[name]}", "options": options})


@pytest.mark.slow  # a quarter of a minute: sketches are drawn many times
def test_every_entry_is_a_short_file_that_keeps_all_laws():
    assert sorted(CODES) == sorted(path.parent.name for path in BOARD.glob("*/codec.py"))
    for name, cls in CODES.items():
        path = BOARD / name / "codec.py"
        assert len(path.read_text().splitlines()) <= 60
        assert [law for law in laws.check(f"{path}:{cls}") if not law.holds] == []


def reference_3lc(values: list[int]) -> list[int]:
    """Return the bytes of 3LC by its description, one after the other."""
    trits = [value + 1 for value in values] + [1] * (-len(values) % 5)
    groups = []
    for start in range(0, len(trits), 5):
        number = 0
        for trit in trits[start : start + 5]:
            number = 3 * number + trit
        groups.append(number)
    written, position = [], 0
    while position < len(groups):
        run = 0
        while position + run < len(groups) and groups[position + run] == 121 and run < 14:
            run += 1
        written.append(243 + run - 2 if run > 1 else groups[position])
        position += max(1, run)
    return written


@pytest.mark.parametrize("density", [0.0, 0.002, 0.02, 0.3, 1.0])
def test_3lc_is_the_papers_bytes(density):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 333, generator=generator).sign()
    x = x * (torch.rand(x.shape, generator=generator) < density)
    payload = code("three_lc").encode(x, 0)
    expected = reference_3lc([int(value) for value in x.flatten()])
    assert payload.parts["bytes"].tolist() == expected
    assert torch.equal(code("three_lc").decode(payload), x)


def test_3lc_rounds_by_its_factor():
    """As the test vectors of google-research/federated: exact at 1, zeros at a large factor."""
    x = torch.ones(1, 3)
    assert torch.equal(code("three_lc").apply(x), x)
    assert not code("three_lc", s=1e4).apply(x).any()
    assert code("three_lc").encode(x).nbytes == 5  # a byte and a scale


def test_a_count_sketch_reads_large_entries_back():
    x = torch.zeros(1, 2000)
    x[0, 17], x[0, 901] = 5.0, -3.0
    sketch = code("count_sketch", ratio=0.1)
    payload = sketch.encode(x, 1)
    assert payload.nbytes == 4 * 3 * round(0.1 * 2000 / 3) + 8
    y = sketch.decode(payload)
    assert y[0, 17] == pytest.approx(5.0) and y[0, 901] == pytest.approx(-3.0)
    draws = torch.stack([sketch.apply(x, seed) for seed in range(400)])
    assert not is_biased(draws, x)

"""Every law catches a class that breaks it, and shipped codecs keep them all."""

from __future__ import annotations

import pytest
import torch

from commsweep.compressors.own import is_biased
from commsweep.scoring import laws
from commsweep.scoring.samples import RIVALS

HALF = "    def encode(self, x, seed):\n        return {'x': x / 2}\n"
SAME = "    def decode(self, parts, like):\n        return parts['x'].to(like.dtype)\n"


def outcome(tmp_path, monkeypatch, body: str) -> dict[str, laws.Law]:
    """Return the laws of a class with these methods, by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"import torch\nclass Code:\n{body}")
    return {law.name: law for law in laws.check("mine.py:Code")}


@pytest.mark.parametrize("codec", [*RIVALS[::4], "uniform:4,coding=rans"])
def test_shipped_codecs_keep_all(codec):
    assert [law for law in laws.check(codec) if not law.holds] == []


@pytest.mark.parametrize(
    ("encode", "law", "seen"),
    [
        ("{'x': x.nan_to_num() / x.abs().mean().clamp(max=1e9)}", "zeros arrive finite", "zeros"),
        ("{'x': x / x.std()}", "equal numbers arrive finite", "equal numbers"),
        (
            "{'x': x + torch.rand(1) if x.shape == (2, 5, 64) else x}",
            "a second instance decodes it",
            "second instance",
        ),
        (
            "{'x': x, 'y': torch.rand(1) * 0 if self.LATER.pop(0) else torch.zeros(1)}",
            "the same seed gives the same message",
            "global random numbers",
        ),
    ],
)
def test_a_broken_law_is_named(tmp_path, monkeypatch, encode, law, seen):
    later = (
        "    LATER = [0] * 9 + [1] * 9999\n" if "LATER" in encode else ""
    )  # after the first check
    body = later + f"    def encode(self, x, seed):\n        return {encode}\n{SAME}"
    broken = outcome(tmp_path, monkeypatch, body)[law]
    assert not broken.holds and seen in broken.note


def test_what_is_no_law_is_noted(tmp_path, monkeypatch):
    found = outcome(tmp_path, monkeypatch, HALF + SAME)
    assert all(law.holds for law in found.values())
    assert found["bias as declared"].note.startswith("biased")
    assert "0.5 of the message's length" in found["bias as declared"].note
    hidden = "    def encode(self, x, seed):\n        return {'x': x.nan_to_num(0.0, 0.0, 0.0)}\n"
    found = outcome(tmp_path, monkeypatch, hidden + SAME)
    assert "diverged" in found["NaN and infinity do not stop it"].note


def test_rare_outcomes_are_no_bias():
    """A code whose mean is right, although most entries never drew their rare value."""
    x = torch.full((4, 24), 0.001)
    draws = (torch.rand(400, 4, 24, generator=torch.Generator().manual_seed(0)) < x).float()
    assert not is_biased(draws, x)
    assert is_biased(draws + 0.001, x)
    assert is_biased(0.9 * torch.randn(400, 1, 1) * torch.zeros(1) + 0.9 * x.expand(400, 4, 24), x)

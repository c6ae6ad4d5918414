"""Every law catches a class that breaks it, and shipped codecs keep them all."""

from __future__ import annotations

import pytest
import torch

from commsweep.compressors.bias import (
    Bias,
    bias_of,
    hard_messages,
    is_biased,
    mean_bias,
    worst_bias,
)
from commsweep.errors import UserError
from commsweep.integrations.measure import codec
from commsweep.scoring import laws
from commsweep.scoring.samples import RIVALS

HALF = "    def encode(self, x, seed):\n        return {'x': x / 2}\n"
SAME = "    def decode(self, parts, like):\n        return parts['x'].to(like.dtype)\n"


def outcome(tmp_path, monkeypatch, body: str) -> dict[str, laws.Law]:
    """Return the laws of a class with these methods, by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"import torch\nclass Code:\n{body}")
    return {law.name: law for law in laws.check("mine.py:Code")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*RIVALS[::4], "uniform:4,coding=rans"])
def test_shipped_codecs_keep_all(name):
    assert [law for law in laws.check(name) if not law.holds] == []


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
        ("{'x': x * 0}", "something arrives", "every message arrives as zeros"),
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
    assert "0.500 [0.500, 0.500] of the length" in found["bias as declared"].note
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


@pytest.mark.parametrize("bias", [0.0, 0.03, 0.3])
def test_a_bias_is_estimated_without_one_and_its_interval_holds(bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, generator=generator)
    shift = torch.randn(2000, generator=generator)
    shift *= bias * x.norm() / shift.norm()
    biases = []
    for _ in range(40):
        noise = torch.randn(60, 2000, generator=generator) * x.norm() / 2000**0.5
        biases.append(bias_of(x + shift + noise, x))
    assert all(each.low <= bias <= each.high for each in biases)
    assert mean_bias(biases).square == pytest.approx(bias**2, abs=1e-3)
    assert max(each.high for each in biases) < bias + 0.08


def test_a_clipped_code_is_biased_the_more_the_heavier_the_tails():
    """TernGrad clipped at 2.5 root mean squares a row: 0.05 of normal rows, 0.35 of Student's t."""
    messages = hard_messages()
    values = {name: worst_bias(codec("tern").apply, {name: x})[1] for name, x in messages.items()}
    assert values["normal"].value == pytest.approx(0.054, abs=0.004)
    assert values["heavy-tailed"].value == pytest.approx(0.35, abs=0.02)
    assert values["spiked"].value > 0.5
    for name in ("eden:2", "uniform:2,scale=group,rounding=stochastic"):
        _, bias, certain = worst_bias(codec(name).apply, messages)
        assert not certain and bias.high < 0.05
    assert Bias(0.0009, 0.0001).text == "0.030 [0.022, 0.036]"


def test_a_codec_that_says_it_is_unbiased_must_be_so_on_heavy_tails(tmp_path, monkeypatch):
    """Clipping at four root mean squares hardly shows on normal rows, and much on others."""
    encode = (
        "    unbiased = True\n    def encode(self, x, seed):\n"
        "        most = 4 * x.square().mean().sqrt()\n"
        "        return {'x': x.clamp(-most, most)}\n"
    )
    with pytest.raises(UserError, match="it says unbiased = True, but its bias on spiked rows"):
        outcome(tmp_path, monkeypatch, encode + SAME)

"""Speed through packed bytes; how long it takes is not asserted."""

from __future__ import annotations

import torch

from commsweep.integrations.measure import codec
from commsweep.scoring import speed
from commsweep.scoring.speed import Speed


def test_bytes_are_those_of_the_packed_message(monkeypatch):
    monkeypatch.setattr(speed, "NUMBERS", 2**14)
    found = speed.measured(["uniform:4", "none"], "gradients", rounds=1)
    assert 0.124 < found["uniform:4"].share < 0.13 and 1.0 <= found["none"].share < 1.01
    assert found["none"].both == found["none"].encode + found["none"].decode > 0


def test_what_is_timed_is_the_message(monkeypatch):
    monkeypatch.setattr(speed, "NUMBERS", 2**14)
    x = speed._message("gradients").cpu()
    assert x.numel() == 2**14
    compressor = codec("uniform:4")
    packed = speed._pack(compressor, x)
    assert torch.equal(speed._decoding("uniform:4", x, packed)(), compressor.apply(x, 1))


def test_messages_of_any_size_are_timed_by_their_parts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "NUMBERS", 2**14)
    (tmp_path / "mine.py").write_text(
        "class Positive:\n"
        "    def encode(self, x, seed):\n"
        "        return {'at': (x.flatten() > 0).nonzero()[:, 0].short()}\n"
        "    def decode(self, parts, like):\n"
        "        y = like.flatten().clone()\n"
        "        y[parts['at'].long()] = 1\n"
        "        return y.view_as(like)\n"
    )
    found = speed.measured(["mine.py:Positive"], "gradients", rounds=1)["mine.py:Positive"]
    assert 0.2 < found.share < 0.3 and found.decode > 0


def test_the_fastest_is_one_of_at_most_the_bytes():
    speeds = {
        "a": Speed("a", 1.0, 1.0, 0.5),
        "b": Speed("b", 2.0, 2.0, 0.1),
        "c": Speed("c", 9.0, 0.1, 0.1),
    }
    assert speed.fastest(speeds, ["a", "b", "c"], 0.2) == speeds["b"]
    assert speed.fastest(speeds, ["a", "b", "c"], 0.9) == speeds["a"]
    assert speed.fastest(speeds, ["a"], 0.2) is None

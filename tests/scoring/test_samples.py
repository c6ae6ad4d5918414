"""The shipped messages, and the rival that a codec is compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from commsweep.integrations import forecast
from commsweep.scoring import ROLES, samples


def test_every_role_has_an_early_and_a_late_message_of_three_networks():
    found = {(sample.role, sample.network, sample.stage) for sample in samples.samples()}
    networks = ("resnet", "nano-gpt2", "smollm2")
    assert found == {(r, n, s) for r in ROLES for n in networks for s in ("early", "late")}
    assert samples.FILE.stat().st_size < 6 * 2**20
    for sample in samples.samples():
        assert sample.x.dtype == torch.float32 and sample.x.isfinite().all() and sample.x.any()


def test_means_over_messages_are_those_of_their_measurements():
    role = "gradients"
    summary = samples.summaries(["topk:0.1"], role)["topk:0.1"]
    squares = []
    for sample in samples.samples():
        if sample.role == role:
            flat = sample.x.reshape(len(sample.x), -1)
            k = round(0.1 * flat.shape[1])
            kept = torch.zeros_like(flat).scatter(1, flat.abs().topk(k).indices, 1.0) * flat
            squares.append(float((flat - kept).norm() / flat.norm()) ** 2)
    assert summary.error == pytest.approx((sum(squares) / len(squares)) ** 0.5, rel=1e-3)
    assert summary.bias == pytest.approx(summary.error)  # nothing is drawn
    known = forecast.forecast("activation gradients")
    assert known is not None
    features = {"error": summary.error, "bias": summary.bias, "distance": 1 - summary.cosine}
    answer = known.answer(features | {"total": summary.error})
    assert summary.worth == ("-" if isinstance(answer, str) else answer.text)


def test_a_rival_sends_at_most_the_bytes_and_ranks_first():
    for codec in ("uniform:2,scale=group", "topk:0.1"):
        summary = samples.summaries([codec], "gradients")[codec]
        rival = samples.rival(summary)
        others = samples.summaries([n for n in samples.RIVALS if n != codec], "gradients")
        within = [other for other in others.values() if other.share <= 1.01 * summary.share]
        assert rival.codec != codec and rival.share <= 1.01 * summary.share
        assert all(rival.rank <= other.rank for other in within)
    tiny = samples.rival(replace(summary, share=1e-6))
    assert tiny.codec == "topk:0.01"  # none sends so little: the one of the fewest bytes


def test_bias_ranks_gradients_and_error_activations():
    biased = samples.Summary("a", "gradients", 0.1, 0.3, 0.3, 1.0, 8.0)
    noisy = replace(biased, codec="b", error=0.8, bias=0.0)
    assert noisy.rank < biased.rank
    assert replace(noisy, role="activations").rank > replace(biased, role="activations").rank

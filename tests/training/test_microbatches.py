"""Microbatches: the gradient of a batch from its parts, one message a part."""

from __future__ import annotations

import pytest
import torch

from commsweep.config import Execution, override
from commsweep.errors import UserError
from commsweep.store import Store
from commsweep.training.run import build, execute
from commsweep.training.step import microbatches
from tests.helpers import linked, tiny, tiny_text, trained

HOW = Execution(device="cpu")


def test_parts_cover_the_batch_in_order_and_weigh_what_they_hold():
    for batch, count in ((64, 4), (41, 4), (5, 5), (7, 1)):
        shares = microbatches(batch, count)
        assert [
            row for share in shares for row in range(share.rows.start, share.rows.stop)
        ] == list(range(batch))
        assert sum(share.weight for share in shares) == pytest.approx(count)
        assert [(share.turn, share.of) for share in shares] == [
            (turn, count) for turn in range(count)
        ]


@pytest.mark.parametrize(
    "more",
    [{"grad__learners": 2}, {"grad__learners": 2, "grad__outer__interval": 3}],
    ids=["every step", "apart"],
)
def test_learners_cut_their_rows_into_microbatches(more):
    """Of a network without batch statistics a learner's gradient is the same; every message is
    counted.
    """
    whole, parts = (
        trained(
            tiny_text(
                optim__kind="sgd",
                optim__lr=0.1,
                epochs=1,
                eval_every=1,
                microbatches=m,
                data__train_blocks=30,
                data__batch_size=8,
                **more,
            )
        )
        for m in (1, 2)
    )
    for (name, a), (_, b) in zip(
        whole.model.named_parameters(), parts.model.named_parameters(), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5 * float(a.abs().max())), name
    calls = [task.totals()["boundaries"]["block0"]["calls"] for task in (whole, parts)]
    assert calls == [8, 16] and [one.whole for one in parts.divide(8)] == [False, True] * 2
    assert sum(one.share for one in parts.divide(6) if one.learner == 0) == pytest.approx(1.0)


def test_the_gradient_is_the_batchs_for_a_network_without_batch_statistics():
    """float64 sums of another order: 1e-5 of the largest weight."""
    whole, parts = (
        trained(
            tiny_text(
                optim__kind="sgd",
                optim__lr=0.1,
                epochs=1,
                eval_every=1,
                microbatches=m,
                data__train_blocks=30,
                data__batch_size=8,
            )
        )
        for m in (1, 4)
    )
    for (name, a), (_, b) in zip(
        whole.model.named_parameters(), parts.model.named_parameters(), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-5 * float(a.abs().max())), name
    assert parts.train_loss == pytest.approx(whole.train_loss, rel=1e-5)


def test_every_part_is_a_message_and_the_row_says_so(tmp_path):
    run = linked(
        {"kind": "topk", "ratio": 0.5},
        None,
        {"kind": "ef21"},
        microbatches=4,
        epochs=1,
        eval_every=1,
    )
    row = execute(run, Store(tmp_path), HOW)
    assert row["run"]["microbatches"] == 4
    assert {one["calls"] for one in row["boundaries"].values()} == {4 * row["steps"]}


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    run = linked(
        {"kind": "topk", "ratio": 0.5}, None, {"kind": "ef"}, microbatches=2, epochs=2, eval_every=1
    )
    whole = execute(run, Store(tmp_path / "a"), HOW)
    asked = []
    with pytest.raises(KeyboardInterrupt):
        execute(run, Store(tmp_path / "b"), HOW, stopping=lambda: asked.append(1) or True)
    assert execute(run, Store(tmp_path / "b"), HOW)["metrics"] == whole["metrics"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"microbatches": 3}, "microbatches=3 does not divide data.batch_size=32"),
        (
            {"microbatches": 32, "grad.learners": 2},
            "microbatches=32 does not divide the 16 rows of a learner",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes, says):
    with pytest.raises(UserError, match=says):
        override(tiny(), changes)


def test_a_last_batch_with_fewer_rows_than_parts_is_refused():
    with pytest.raises(UserError, match="the last batch of an epoch has 1 rows"):
        build(tiny_text(data__train_blocks=33, data__batch_size=8, microbatches=2), HOW)

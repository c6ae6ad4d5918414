"""The step in its order: components hear of every moment, once, and where the weights are what."""

from __future__ import annotations

import pytest
import torch

from commsweep.component import Component
from commsweep.config import Execution, override
from commsweep.errors import UserError
from commsweep.training.run import build, trainer
from tests.helpers import linked, tiny

HOW = Execution("cpu")


class Listening(Component):
    """Notes what it hears, and what the gradients and weights were then."""

    def __init__(self, model) -> None:
        super().__init__()
        self.heard, self._model = [], [model]

    def note(self, what, moment=None):
        p = next(self._model[0].parameters())
        self.heard.append(
            (what, moment and moment.step, p.grad is not None, float(p.detach().sum()))
        )

    def before_pass(self, moment, one, samples, device):
        assert len(samples) == one.size
        self.note("before pass", moment)

    def after_pass(self, moment, one):
        self.note("after pass", moment)

    def after_backward(self, moment):
        self.note("after backward", moment)

    def after_step(self, moment):
        self.note("after step", moment)

    def epoch_ended(self, epoch):
        self.note("epoch ended")

    def before_scoring(self, epoch, number, compress):
        self.note(f"before scoring {compress}")


def heard(run):
    parts = build(run, HOW)
    listening = parts.task.components["listening"] = Listening(parts.task.model)
    trainer(run, parts, [], False).fit(parts.task, parts.data.train, parts.data.val_dataloader())
    return listening.heard, parts


@pytest.mark.parametrize(
    "changes, passes",
    [
        ({}, 1),
        ({"microbatches": 4}, 4),
        ({"grad__learners": 2}, 2),
        ({"grad__learners": 2, "grad__local_steps": 2}, 4),
    ],
)
def test_moments_come_in_their_order(changes, passes):
    notes, parts = heard(tiny(epochs=1, eval_every=1, **changes))
    steps = len(parts.data.train)
    one = ["before pass", "after pass"] * passes + ["after backward", "after step"]
    names = [what for what, *_ in notes]
    scoring = [name for name in names if name.startswith("before scoring")]
    assert [name for name in names if not name.startswith("before scoring")] == one * steps + [
        "epoch ended"
    ]
    batches = sum(len(loader) for loader in parts.data.val_dataloader())
    assert scoring == ["before scoring True"] * batches  # nothing is compressed: once is enough
    assert [step for what, step, *_ in notes if what == "after step"] == list(range(steps))


def test_batches_are_scored_once_until_compression_begins_and_twice_then():
    notes, parts = heard(linked({"kind": "topk"}, fwd__start_epoch=1, epochs=2, eval_every=1))
    batches = sum(len(loader) for loader in parts.data.val_dataloader())
    scoring = [what for what, *_ in notes if what.startswith("before scoring")]
    assert (
        scoring
        == ["before scoring True"] * batches
        + ["before scoring True", "before scoring False"] * batches
    )
    scores = parts.task.scores
    assert scores["test_on_loss"] != scores["test_off_loss"]
    plain = heard(tiny(epochs=1, eval_every=1))[1].task.scores
    assert plain.keys() == scores.keys() and plain["test_on_loss"] == plain["test_off_loss"]
    only = linked(None, {"kind": "topk"})
    assert only.scores_alike(0) and not linked({"kind": "topk"}).scores_alike(0)
    assert not override(tiny(), {"at.layer1.fwd.compressor.kind": "topk"}).scores_alike(0)


def test_gradients_are_there_after_the_backward_and_weights_move_in_the_step():
    notes, _ = heard(tiny(epochs=1, eval_every=1))
    before, after, backward, step = notes[:4]
    assert [one[2] for one in (before, after, backward)] == [False, True, True]
    assert before[3] == after[3] == backward[3] != step[3]


def test_rates_move_when_the_schedule_says_so():
    """Cosine once an epoch, linear once a step, both from the first step on."""
    for run, changes in (
        (tiny(epochs=2, eval_every=1, optim__lr=0.4), 1),
        (
            tiny(
                epochs=2, eval_every=1, optim__lr=0.4, schedule__kind="linear", schedule__warmup=0
            ),
            8,
        ),
    ):
        seen = []

        class Rate(Component):
            def before_pass(self, moment, *_, seen=seen):
                seen.append(moment.rate)

        parts = build(run, HOW)
        parts.task.components["rate"] = Rate()
        trainer(run, parts, [], False).fit(
            parts.task, parts.data.train, parts.data.val_dataloader()
        )
        assert seen[0] == 0.4 and len(set(seen)) - 1 == (changes if changes == 1 else len(seen) - 1)


def test_a_gradient_is_clipped_after_the_exchange():
    from tests.helpers import tiny_text

    run = tiny_text(epochs=1, optim__clip=1e-3)
    norms = []

    class Norm(Component):
        def after_step(self, moment):
            grads = [p.grad for p in parts.task.parameters() if p.grad is not None]
            norms.append(float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))))

    parts = build(run, HOW)
    parts.task.components["norm"] = Norm()
    trainer(run, parts, [], False).fit(parts.task, parts.data.train, parts.data.val_dataloader())
    assert all(norm == pytest.approx(1e-3, rel=1e-2) for norm in norms)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"data.batch_size": 9, "data.val_size": 15},
            "the last batch of an epoch has 1 row .*data.drop_last=true",
        ),
        (
            {"data.batch_size": 2, "grad.learners": 2},
            "a batch has 2 rows for 2 passes, .*set data.batch_size",
        ),
        ({"data.batch_size": 9, "data.val_size": 15, "data.drop_last": True}, None),
        ({"data.batch_size": 9, "data.val_size": 15, "model.name": "mlp"}, None),
    ],
)
def test_a_single_row_for_a_batchnorm_is_said_before_the_run(changes, line):
    run = override(tiny(), changes)
    if line is None:
        assert build(run, Execution("cpu"))
        return
    with pytest.raises(UserError, match=line):
        build(run, Execution("cpu"))

"""Law 1, for one process and for many: a setting that did not reach the objects is named."""

from __future__ import annotations

import pytest

from commsweep.config import Execution, override, record
from commsweep.training.readback import nothing_lost
from commsweep.training.run import build, installed, trainer
from tests.helpers import linked, tiny, tiny_text

TOPK = {"kind": "topk", "ratio": 0.1}


@pytest.mark.parametrize(
    "run",
    [
        tiny(),
        tiny(microbatches=4, channels_last=True, precision="bfloat16"),
        tiny_text(model__dropout=0.1),
        linked(TOPK, {"kind": "uniform"}, {"kind": "aqsgd"}, {"kind": "ef"}),
        tiny_text(microbatches=2, optim__clip=0.5),
        linked(
            TOPK,
            None,
            None,
            None,
            at__layer2__fwd__compressor__ratio=0.4,
            model__cuts=["layer1", "layer2"],
        ),
        override(tiny(), {"grad.learners": 4, "grad.local_steps": 2}),
        tiny(model__name="mlp", model__cuts=[]),
    ],
)
def test_what_was_asked_is_read_back_from_the_objects(run):
    run = override(run, {"epochs": 1, "eval_every": 1})
    parts = build(run, Execution("cpu"))
    made = trainer(run, parts, [], False)
    made.fit(parts.task, parts.data.train, parts.data.val_dataloader())
    assert installed(run, parts, made).record() == record(run)


@pytest.mark.parametrize(
    "setting, value",
    [
        ("optim.lr", 0.5),
        ("schedule.t_max", 3),
        ("data.batch_size", 8),
        ("seed", 4),
        ("epochs", 9),
        ("fwd.compressor.kind", "topk"),
        ("model.width", 5),
        ("grad.learners", 2),
        ("precision", "bfloat16"),
    ],
)
def test_one_process_that_differs_is_enough_and_the_setting_is_named(setting, value):
    run = tiny()
    other = override(run, {setting: value})
    with pytest.raises(
        RuntimeError, match=f"settings lost on the way to the run: .*{setting}: asked"
    ):
        nothing_lost(run, record(run), record(other), record(run))
    nothing_lost(run, record(run), record(run))


def test_a_measurement_that_ends_early_is_not_asked_for_its_epochs():
    nothing_lost(
        tiny(),
        record(tiny(epochs=4, eval_every=4)),
        only=lambda key: key not in ("epochs", "eval_every"),
    )

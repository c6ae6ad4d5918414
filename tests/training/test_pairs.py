"""Every section of a Run with every other: both train and resume to the same numbers, or one line
refuses the pair.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import combinations
from typing import Any

import pytest
import torch

from commsweep.config import Execution, override
from commsweep.errors import UserError
from commsweep.store import Store
from commsweep.training.run import build, execute, trainer
from tests.helpers import resumed, tiny_text

SMALL = {
    "model.width": 16,
    "model.stages": 2,
    "data.train_blocks": 16,
    "data.eval_blocks": 4,
    "data.block_size": 16,
    "data.batch_size": 8,
    "epochs": 2,
    "eval_every": 1,
    "optim.lr": 1e-3,
}
GATHER = {"grad.learners": 2, "grad.exchange": "allgather"}
TOPK = GATHER | {"grad.compressor.kind": "topk", "grad.feedback.kind": "ef"}
SECTIONS: dict[str, dict[str, Any]] = {
    "boundaries": {
        "fwd.compressor.kind": "topk",
        "fwd.compressor.ratio": 0.5,
        "fwd.feedback.kind": "ef",
        "bwd.compressor.kind": "uniform",
    },
    "one boundary": {"at.block1.fwd.compressor.kind": "uniform", "model.stages": 4},
    "coder": {"fwd.compressor.kind": "subspace"},
    "learners": TOPK,
    "outer": {"grad.learners": 2, "grad.outer.interval": 1},
    "sharded": {"grad.learners": 2, "grad.sharded.nodes": 1},
    "local steps": {"grad.learners": 2, "grad.local_steps": 2},
    "kfac": {"kfac.inverses_every": 2},
    "sparsity": {"sparsity.phases.all.sparsity": 0.5, "sparsity.interval": 1},
    "microbatches": {"microbatches": 2},
    "bfloat16": {"precision": "bfloat16"},
    "checkpointing": {"model.gradient_checkpointing": True},
    "dropout": {"model.dropout": 0.1},
    "untied, controls": {
        "model.tied": False,
        "fwd.compressor.kind": "mean",
        "bwd.compressor.kind": "zero",
    },
    "delay": {"delay.kind": "stages", "delay.lookahead": 0.9},
    "layers": TOPK
    | {"grad.layers.mlp.match": ["*.mlp.*"], "grad.layers.mlp.compressor.kind": "uniform"},
}
UNDER_BFLOAT16: dict[str, dict[str, Any]] = {
    "powersgd": {
        "grad.learners": 2,
        "grad.compressor.kind": "powersgd",
        "grad.feedback.kind": "ef",
    },
    "dion": {
        "grad.learners": 2,
        "grad.compressor.kind": "dion",
        "grad.feedback.kind": "decoupled",
        "optim.kind": "dion",
    },
    "adacomp": GATHER | {"grad.compressor.kind": "adacomp", "grad.feedback.kind": "adacomp"},
    "dct": TOPK | {"grad.transform": "dct"},
    "hadamard": TOPK | {"grad.transform": "hadamard"},
    "kfac eigen": {"kfac.method": "eigen", "kfac.kl_clip": 0},
    "sampled": {"kfac.fisher": "sampled", "model.stages": 1},
    "static masks": {
        "sparsity.phases.all.sparsity": 0.5,
        "sparsity.growth": "none",
        "sparsity.drop_fraction": 0,
    },
    "muon": {"optim.kind": "muon"},
    "bottleneck": {"fwd.compressor.kind": "bottleneck", "fwd.compressor.width": 4},
}
PAIRS = [*combinations(SECTIONS, 2), *((name, "bfloat16") for name in UNDER_BFLOAT16)]
TOGETHER = (
    "metrics",
    "steps",
    "boundaries",
    "gradients",
    "kfac",
    "flops",
    "masks",
)  # of a row: what training made


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=["+".join(pair) for pair in PAIRS])
def test_a_pair_trains_and_resumes_to_the_same_numbers_or_is_refused(one, other, tmp_path):
    known = SECTIONS | UNDER_BFLOAT16
    try:
        run = override(tiny_text(), SMALL | known[one] | known[other])
        row = execute(run, Store(tmp_path / "whole"), Execution("cpu"))
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return
    assert row["status"] == "finished", row["error"]
    # points along the training change nothing of it
    continued = resumed(run, tmp_path / "continued", points=3)
    assert {key: continued.get(key) for key in TOGETHER} == {key: row.get(key) for key in TOGETHER}


def test_components_compute_in_float32_under_bfloat16():
    """Only forward passes are in the low precision: preconditioning within autocast was 5e-3
    away.
    """
    torch.set_num_threads(1)
    run = override(
        tiny_text(), SMALL | {"kfac.kl_clip": 0, "precision": "bfloat16", "optim.kind": "sgd"}
    )
    parts = build(run, Execution("cpu"))
    kfac, seen = parts.task.components["kfac"], []
    precondition = kfac._precondition

    def compared(rate: float) -> None:
        wanted = [layer.g_inverse @ layer.gradient() @ layer.a_inverse for layer in kfac.layers]
        precondition(rate)
        seen.extend(
            float((layer.gradient() - want).norm() / want.norm().clamp(min=1e-30))
            for layer, want in zip(kfac.layers, wanted, strict=True)
        )
        assert not torch.is_autocast_enabled("cpu")

    kfac._precondition = compared
    trainer(run, parts, [], False).fit(parts.task, parts.data.train, parts.data.val_dataloader())
    assert len(seen) > 8 and max(seen) < 1e-6


def test_learners_with_weights_of_their_own_are_cast_each_for_themselves():
    """Autocast keeps casts of parameters, and two learners' weights go through the same
    parameters.
    """
    torch.set_num_threads(1)
    run = override(
        tiny_text(),
        SMALL
        | {
            "precision": "bfloat16",
            "grad.learners": 2,
            "grad.outer.interval": 4,
            "model.stages": 1,
        },
    )
    parts = build(run, Execution("cpu"))
    task, seen = parts.task, []
    forward = task.logits

    def noted(x: torch.Tensor) -> torch.Tensor:
        logits = forward(x)
        if task.training:
            seen.append((deepcopy(task.model.state_dict()), x, logits.detach()))
        return logits

    task.logits = noted
    trainer(run, parts, [], False).fit(task, parts.data.train, parts.data.val_dataloader())
    assert len(seen) == 8
    for weights, x, logits in seen:
        task.model.load_state_dict(weights)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(task.model(input_ids=x).logits, logits)

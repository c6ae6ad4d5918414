"""Optimizers: Muon beside torch's own, as a run installs it."""

from __future__ import annotations

import copy

import pytest
import torch

from commsweep.experiments.config import Execution, override, record
from commsweep.experiments.errors import UserError
from commsweep.experiments.training import optim
from commsweep.experiments.training.run import build, execute
from tests.helpers import same_bits, tiny_text

MUON = {"optim.kind": "muon", "optim.lr": 0.01, "optim.weight_decay": 0.1, "schedule.kind": "constant"}


def test_muon_takes_matrices_and_adamw_the_rest():
    """Against torch's two optimizers by hand; embeddings and what is tied to them are the rest."""
    run = override(tiny_text(epochs=1), MUON)
    model = build(run, Execution("cpu")).task
    twin = copy.deepcopy(model)
    ours = optim.optimizer(run, list(model.parameters()), optim.embedded(model))
    embeddings = optim.embedded(twin)
    matrices = [p for p in twin.parameters() if p.dim() == 2 and id(p) not in embeddings]
    rest = [p for p in twin.parameters() if all(p is not one for one in matrices)]
    assert len(embeddings) == 2 and len(matrices) == 4 * run.model.stages  # tokens and places; a block's four matrices
    theirs = [torch.optim.Muon(matrices, 0.01, 0.1, 0.95, adjust_lr_fn="match_rms_adamw"),
              torch.optim.AdamW(rest, 0.01, (0.9, 0.95), weight_decay=0.1, fused=True)]
    for turn in range(3):
        if turn == 2:  # from a checkpoint
            kept = ours.state_dict()
            ours = optim.optimizer(run, list(model.parameters()), optim.embedded(model))
            ours.load_state_dict(kept)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(turn))
            other.grad = one.grad.clone()
        ours.param_groups[0]["lr"] = ours.param_groups[1]["lr"] = 0.01 / (turn + 1)
        for part in theirs:
            part.param_groups[0]["lr"] = 0.01 / (turn + 1)
            part.step()
        ours.step()
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_run_with_muon_is_what_it_says_and_muon_without_a_matrix_is_one_line(store):
    run = override(tiny_text(epochs=1), MUON | {"grad.learners": 2, "grad.outer.interval": 2})
    row = execute(run, store, Execution("cpu"))
    assert row["status"] == "finished" and row["run"] == record(run)
    with pytest.raises(UserError, match="no matrix beside embeddings"):
        optim.optimizer(run, [torch.nn.Parameter(torch.ones(3))])

"""The row of learners as processes is of the whole run: what the simulation records, and not one
learner's part.
"""

from __future__ import annotations

import pytest

from commsweep.config import Execution, override
from commsweep.config.execution import LearnerWiring
from commsweep.config.override import parse_gradients
from commsweep.data_parallel.ledger import Ledger
from commsweep.processes import ddp
from commsweep.store import POINTS
from commsweep.training.run import execute
from tests.helpers import tiny_text

SMALL = {
    "model.width": 16,
    "model.stages": 2,
    "data.train_blocks": 16,
    "data.eval_blocks": 4,
    "data.block_size": 16,
    "data.batch_size": 8,
    "epochs": 2,
    "eval_every": 1,
    "grad.learners": 2,
}
RUNS = {
    "microbatches": {"microbatches": 2, "fwd.compressor.kind": "topk"},
    "dropout, bytes by data": {
        "model.dropout": 0.1,
        "microbatches": 2,
        "grad.exchange": "allgather",
        "grad.compressor.kind": "qsgd",
        "fwd.compressor.kind": "threshold",
    },
    "masks and microbatches": {
        "microbatches": 2,
        "sparsity.phases.all.sparsity": 0.5,
        "sparsity.interval": 1,
    },
    "outer in bfloat16": {"precision": "bfloat16", "grad.outer.interval": 2},
    "a tree in 4 bits": {
        "grad.learners": 4,
        "grad.collective": "tree",
        "grad.compressor": "uniform:4,rounding=stochastic,scale=group,group=16",
    },
    "a ring in 8 bits after local steps": {
        "grad.collective": "ring",
        "grad.compressor": "uniform:8",
        "grad.outer.interval": 2,
    },
    "owners in MXFP8 and K-FAC": {
        "grad.collective": "alltoall",
        "grad.compressor": "mxfp8_e5m2",
        "grad.compress_vectors": True,
        "kfac.inverses_every": 2,
    },
    "kfac": {
        "kfac.inverses_every": 2,
        "kfac.compressor.kind": "uniform",
        "kfac.compressor.bits": 8,
    },
}
SAME = ("run", "metrics", "steps", "boundaries", "bytes", "gradients", "kfac", "flops", "masks")


@pytest.mark.parametrize(
    "names",
    [
        ["dropout, bytes by data"],
        ["a tree in 4 bits"],
        pytest.param(list(RUNS), marks=pytest.mark.slow),
    ],
)
def test_a_row_of_processes_is_the_simulations(names, store):
    how, runs = (
        Execution("cpu", points=3),
        [override(tiny_text(), SMALL | RUNS[name]) for name in names],
    )
    rows = ddp.execute([(run, LearnerWiring()) for run in runs], store, how)
    for name, run, row in zip(names, runs, rows, strict=True):
        simulated = execute(run, store, how)
        assert {key: row.get(key) for key in SAME} == {key: simulated.get(key) for key in SAME}, (
            name
        )
        real, recorded = (
            store.learners(row["id"]).metrics(),
            store.folder(simulated["id"]).metrics(),
        )
        points = [
            [record | {"seconds": 0} for record in folder.metrics(POINTS)]
            for folder in (store.learners(row["id"]), store.folder(simulated["id"]))
        ]
        assert points[0] == points[1] and len(points[0]) == 3, name
        for one, other in zip(real, recorded, strict=True):
            rates = one.pop("rates", {}), other.pop("rates", {})
            assert one | {"seconds": 0} == other | {"seconds": 0}, name
            assert rates[0] == pytest.approx(rates[1])


def test_flops_do_not_depend_on_how_a_batch_is_shared_out(store):
    """With learners and microbatches together they were divided by the microbatches."""
    spent = []
    for shared in (
        {"grad.learners": 1},
        {"grad.learners": 2, "microbatches": 2},
        {"microbatches": 4},
    ):
        run = override(
            tiny_text(),
            SMALL
            | {
                "sparsity.phases.all.sparsity": 0.5,
                "sparsity.growth": "none",
                "sparsity.drop_fraction": 0,
            }
            | shared,
        )
        spent.append(execute(run, store, Execution("cpu"))["flops"]["total"])
    assert spent[0] == spent[1] == spent[2]


def test_what_hops_say_of_themselves_is_a_mean_over_the_learners():
    """Bytes at boundaries are summed up; a hop's are of a learner."""
    ledger = Ledger([], parse_gradients({"learners": 2, "exchange": "allgather"}), 2)
    reports = [
        {"boundaries": {"a": {"fwd": n}}, "gradients": {"up": 0, "inside": 4.0 * n}} for n in (1, 3)
    ]
    totals = ddp.totals_of(reports, ledger)
    assert totals["boundaries"] == {"a": {"fwd": 4}} and totals["gradients"]["inside"] == 8.0

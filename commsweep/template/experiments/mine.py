"""Runs of your own.

`mine`       three linear layers on four noisy clusters, two boundaries; a second of a CPU core
`mine_topk`  the same, the 10 % largest entries of every message
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.config.training import ConstantSpec, OwnModel, OwnSet

MINE = Run(
    model=OwnModel(build="mine.py:net", options={"hidden": 64}, cuts=("2", "4")),
    data=OwnSet(load="mine.py:load", batch_size=64, val_size=200),
    schedule=ConstantSpec(),
    epochs=4,
    eval_every=2,
)

PRESETS = {
    "mine": MINE,
    "mine_topk": override(
        MINE,
        {
            "fwd.compressor.kind": "topk",
            "fwd.compressor.ratio": 0.1,
            "bwd.compressor.kind": "topk",
            "bwd.compressor.ratio": 0.1,
        },
    ),
}

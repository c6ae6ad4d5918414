"""ResNet-18 on CIFAR-10, briefly and for real. Slow, and needs the data: COMMSWEEP_CIFAR names
their folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commsweep.config import Execution, override
from commsweep.registry import preset
from commsweep.training.run import build, execute

FOLDER = os.environ.get("COMMSWEEP_CIFAR")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not FOLDER, reason="set COMMSWEEP_CIFAR to a folder with the hub's CIFAR-10 Parquet files"
)
def test_resnet18_learns_with_compressed_boundaries(store):
    name = os.environ.get("COMMSWEEP_CIFAR_NAME", "cifar10-jpeg")
    run = override(
        preset("resnet18_corrected_topk"), {"data.name": name, "epochs": 1, "schedule.t_max": 1}
    )
    how = Execution("auto", Path(FOLDER))
    parts = build(run, how)
    assert sum(p.numel() for p in parts.task.model.parameters()) == 11_173_962
    row = execute(run, store, how)
    assert row["status"] == "finished"
    assert row["metrics"]["test_on_acc"] > 0.3  # 352 steps from scratch
    assert row["bytes"]["ratio"] == pytest.approx(0.131, abs=0.005)  # 10 % of values, and a bitmask

"""One process of a real pipeline that works through a list of runs; the tests start one a stage."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from commsweep.config import Execution
from commsweep.config.execution import Wiring
from commsweep.config.override import parse
from commsweep.errors import UserError
from commsweep.processes.pipeline_row import trained
from commsweep.processes.trainer import Trainer, connect
from commsweep.store import RunFolder


def main(root: Path) -> None:
    """Every run of root/runs.json; rows, weights and losses go to root/0, root/1, ... Some go on
    from what another one has left there.
    """
    how = Execution(device="cpu", checkpoint_every=0.0, points=3)
    device = None
    for place, (run, wiring, after) in enumerate(json.loads((root / "runs.json").read_text())):
        run, folder = parse(run), RunFolder(root / str(place))
        folder.path.mkdir(exist_ok=True)
        device = device or connect(run, how, 60)
        if after is not None and dist.get_rank() == 0:
            for name in (
                *(root / str(after)).glob("*.ckpt"),
                *(root / str(after)).glob("metrics.jsonl"),
            ):
                shutil.copy(name, folder.path)
        dist.barrier()
        try:
            row = trained(Trainer(run, Wiring(**wiring), how, folder, device, keep_weights=True))
        except UserError as error:
            row = {"error": str(error)}
        if dist.get_rank() == 0:
            (folder.path / "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Real processes equal the simulation bit for bit, and what they hand to the transport is what the
ledger counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import pytorch_lightning as pl
import torch

from commsweep.compressors import message
from commsweep.config import Execution, Run, record
from commsweep.models.causal_lm import tied_bytes
from commsweep.store import POINTS, RunFolder
from commsweep.training.points import Points
from commsweep.training.run import build, trainer
from tests.helpers import COMPRESSORS, FEEDBACKS, free_port, linked, name, tiny, tiny_text

STAGES = 4
IMAGES = {"epochs": 2, "eval_every": 1}
TEXT = {"base": tiny_text, "model__stages": 4, "epochs": 1, "eval_every": 1}
TOPK, UNIFORM = {"kind": "topk", "ratio": 0.2}, {"kind": "uniform", "bits": 4, "scale": "channel"}
MASK = {"kind": "forward_mask"}


def cases() -> dict[str, tuple]:
    """A representative set, and `LATER`, which the slow tests have: {name: (run, wiring)}."""
    runs = {
        "dense": tiny(**IMAGES),
        "topk-uniform": linked(TOPK, UNIFORM, **IMAGES),
        "ef-ef_mixed": linked(TOPK, TOPK, {"kind": "ef"}, {"kind": "ef_mixed"}, **IMAGES),
        "aqsgd-ef21": linked(
            UNIFORM, TOPK, {"kind": "aqsgd"}, {"kind": "ef21"}, data__drop_last=True, **IMAGES
        ),
        "mask": linked(
            {"kind": "topk_strict", "ratio": 0.2},
            MASK,
            {"kind": "ef21"},
            channels_last=True,
            **IMAGES,
        ),
        "bottleneck": linked({"kind": "bottleneck", "width": 3}, UNIFORM, **IMAGES),
        "microbatches": linked(
            TOPK, UNIFORM, {"kind": "ef"}, {"kind": "ef21"}, microbatches=4, **IMAGES
        ),
        "bottleneck-microbatches": linked(
            {"kind": "bottleneck", "width": 3}, microbatches=4, **IMAGES
        ),
        # The second epoch's batches mix samples that were seen with new ones.
        "aqsgd-mask": linked(
            TOPK, MASK, {"kind": "aqsgd"}, data__batch_size=48, data__drop_last=True, **IMAGES
        ),
        "text-microbatches": linked(
            TOPK, UNIFORM, microbatches=3, data__batch_size=12, precision="bfloat16", **TEXT
        ),
        "text": linked(TOPK, MASK, **TEXT),
        "text-subspace": linked(
            {"kind": "subspace", "width": 16, "frozen": True},
            UNIFORM | {"scale": "last"},
            microbatches=2,
            **TEXT,
        ),
        "text-aqsgd": linked(
            UNIFORM | {"scale": "last"},
            UNIFORM,
            {"kind": "aqsgd"},
            {"kind": "ef"},
            **TEXT | {"epochs": 2},
        ),
    }
    runs |= late()
    made = {key: (run, wiring(run)) for key, run in runs.items()}
    return made | {"1f1b": (runs["microbatches"], {"schedule": "1f1b"})}


def late() -> dict[str, Run]:
    """Gradients of old weights: pipelines that do not run empty between steps."""
    return {
        "late": linked(
            TOPK,
            UNIFORM,
            {"kind": "ef"},
            {"kind": "ef21"},
            microbatches=2,
            delay__kind="stages",
            delay__lookahead=1,
            **IMAGES,
        ),
        "late-aqsgd": linked(
            UNIFORM,
            TOPK,
            {"kind": "aqsgd"},
            {"kind": "ef21"},
            data__drop_last=True,
            delay__steps=1,
            **IMAGES,
        ),
        "late-text": linked(
            TOPK,
            UNIFORM,
            microbatches=3,
            data__batch_size=12,
            precision="bfloat16",
            optim__clip=0.5,
            delay__steps=2,
            **TEXT | {"epochs": 2},
        ),
        "late-text-stages": linked(TOPK, MASK, delay__kind="stages", **TEXT),
        "late-many": tiny(
            microbatches=8,
            delay__steps=1,
            data__batch_size=40,
            data__drop_last=True,
            **IMAGES,
        ),
    }


def wiring(run) -> dict[str, str]:
    """How it must be executed."""
    return {"schedule": "1f1b"} if run.delay else {}


LATER = (
    "dense",
    "topk-uniform",
    "text-subspace",
    "late-text",
    "ef-ef_mixed",
    "bottleneck",
    "aqsgd-mask",
    "text",
    "microbatches",
    "text-microbatches",
    "late-aqsgd",
    "late-text-stages",
    "late-many",
)
QUICK = [key for key in cases() if key not in LATER]


def start(root, runs: list[tuple]) -> None:
    """Train all runs (with a wiring, and the place of another one to go on from) with one process a
    stage.
    """
    (root / "runs.json").write_text(
        json.dumps(
            [
                (run.model_dump(mode="json"), wiring, *(after or (None,)))
                for run, wiring, *after in runs
            ]
        )
    )
    env = os.environ | {
        "WORLD_SIZE": str(STAGES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.pipeline_process", str(root)],
            env=env | {"RANK": str(rank)},
        )
        for rank in range(STAGES)
    ]
    try:
        assert [process.wait(280) for process in processes] == [0] * STAGES
    finally:
        for process in processes:
            process.kill()


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.epochs: list[float] = []

    def on_train_batch_end(self, trainer, task, outputs, *_) -> None:
        self.seen.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer, task) -> None:
        self.epochs.append(task.train_loss)


def simulate(run):
    """(task, losses of every step, mean losses of every epoch) of the run in this process, on one
    thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts, losses = build(run, Execution(device="cpu")), Losses()
        made = trainer(run, parts, [losses], False)
        made.fit(parts.task, parts.data.train, parts.data.val_dataloader())
        parts.task.points = Points(run, parts.data, 3)
        losses.point = parts.task.point()
    finally:
        torch.set_num_threads(threads)
    return parts.task, losses


def check(run, folder) -> None:
    """Losses of every step, scores, final weights and the ledger are the simulation's."""
    task, losses = simulate(run)
    row = json.loads((folder / "row.json").read_text())
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    made = [loss for epoch in steps for loss in epoch["losses"]]
    weights = torch.load(folder / "weights.pt", weights_only=True)
    ours = {f"model.{key}": one for key, one in task.model.state_dict().items()}
    ours |= {
        f"boundaries.{key}": one for key, one in task.components["boundaries"].named_parameters()
    }
    if getattr(run.model, "tied", False) is None:  # the embedding's, by another name
        ours.pop("model.lm_head.weight", None)
    assert row["bytes"].get("tied_per_step", 0) == tied_bytes(run, task.model)
    assert weights.keys() == ours.keys()
    if run.microbatches == 1:
        assert made == losses.seen
    for key, one in ours.items():
        assert torch.equal(one, weights[key]), key
    metrics = {key: value for key, value in row["metrics"].items() if not key.startswith("best")}
    assert metrics == {"train_loss": losses.epochs[-1], **task.scores}
    assert row["boundaries"] == task.components["boundaries"].ledger()
    assert row["run"] == record(run)  # read back from what every stage installed
    check_bytes(row)
    check_points(losses.point, row, folder)


def check_points(expected, row, folder) -> None:
    """The last point along the training is what the simulation scores at its end."""
    points = RunFolder(folder).metrics(POINTS)
    if row["run"].get("delay") and row["run"]["delay"]["steps"]:
        assert not points  # passes of several steps are under way at once
        return
    assert points[-1]["step"] == expected["step"] == row["steps"]
    assert len(points) == 3 == row["points"]["count"]
    for key in expected.keys() - {"seconds", "train_loss"}:
        assert points[-1][key] == expected[key], key


def check_bytes(row) -> None:
    """What was handed to send is the ledger's payload bytes and the stated framing, each way at
    every boundary.
    """
    calls = 0
    for place, sent in enumerate(row["boundaries"].values()):
        for way, stage in (("fwd", place), ("bwd", place + 1)):
            transport = row["transport"][stage]
            assert transport["sent"][way] == sent[way] + transport["framing"][way] > 0
            assert transport["framing"][way] >= message.HEADER * sent["calls"]
        calls = max(calls, sent["calls"])
    assert calls == row["steps"] * row["run"]["microbatches"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipelines")
    start(root, [cases()[key] for key in QUICK])
    return root


@pytest.mark.xdist_group("pipelining")
@pytest.mark.parametrize("case", QUICK)
def test_processes_equal_the_simulation_bit_for_bit(trained, case):
    run, _ = cases()[case]
    check(run, trained / str(QUICK.index(case)))


@pytest.mark.xdist_group("pipelining")
def test_late_passes_go_on_from_step_to_step(trained):
    """In the time of one step the first stage passes microbatches of one step forward and those of
    an earlier one backward.
    """
    run, _ = cases()["late"]
    row = json.loads((trained / str(QUICK.index("late")) / "row.json").read_text())
    first = row["timing"]["gantt"][0]
    steps = {
        way: {chunk // run.microbatches for what, chunk, *_ in first if what == way} for way in "FB"
    }
    assert steps["F"] and steps["B"] and steps["F"] != steps["B"]


def every() -> list[tuple[str, object]]:
    """Each compressor both ways, and each feedback with two compressors, on images and on text."""
    made = [
        *((key, cases()[key][0]) for key in LATER),
        ("bfloat16", linked(TOPK, {"kind": "cast"}, precision="bfloat16", **IMAGES)),
        ("random", linked({"kind": "randomk"}, {"kind": "qsgd"}, **IMAGES)),
        ("untied", linked({"kind": "topk"}, {"kind": "zero"}, model__tied=False, **TEXT)),
        (
            "warm-up",
            linked(
                {"kind": "lowrank"},
                {"kind": "sign"},
                fwd__start_epoch=1,
                bwd__start_step=2,
                **IMAGES,
            ),
        ),
    ]
    for base in (IMAGES, TEXT):
        kind = "text" if base is TEXT else "images"
        for spec in COMPRESSORS:
            if spec["kind"] != "subspace" or base is TEXT:
                spec = spec | ({"frozen": True} if spec["kind"] == "subspace" else {})
                back = {"kind": "sign"} if spec["kind"] in ("bottleneck", "subspace") else spec
                made.append((f"{kind}-{name(spec)}", linked(spec, back, **base)))
        for feedback in FEEDBACKS:
            for spec in ({"kind": "topk", "ratio": 0.3}, {"kind": "uniform", "bits": 4}):
                if spec["kind"] == "topk" or feedback["kind"] != "ef_mixed":
                    made.append(
                        (
                            f"{kind}-{name(feedback)}-{spec['kind']}",
                            linked(spec, spec, feedback, feedback, **base | {"epochs": 2}),
                        )
                    )
        for spec in (
            {"kind": "topk", "ratio": 0.3},
            {"kind": "topk_strict", "ratio": 0.3},
            {"kind": "randomk"},
            {"kind": "randtopk"},
        ):
            made.append((f"{kind}-mask-{spec['kind']}", linked(spec, MASK, **base)))
    return made


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_compressor_and_feedback_equals_the_simulation(tmp_path):
    runs = every()
    for begin in range(0, len(runs), 40):
        part = runs[begin : begin + 40]
        root = tmp_path / str(begin)
        root.mkdir()
        start(root, [(run, wiring(run)) for _, run in part])
        for place, (title, run) in enumerate(part):
            print(title, flush=True)
            check(run, root / str(place))

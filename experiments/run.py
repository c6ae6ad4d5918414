"""One Run in, one recorded row out."""

from __future__ import annotations

import logging
import math
import platform
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers import Logger

from commsweep.experiments import checkpoint, models, tasks
from commsweep.experiments import data as datasets
from commsweep.experiments.config import SCHEMA, Run, flatten, run_id
from commsweep.experiments.data import Blocks, ImageData
from commsweep.experiments.data_parallel import learners
from commsweep.experiments.errors import Diverged, Stopped, UserError, notice
from commsweep.experiments.execution import Execution
from commsweep.experiments.memory import MappedMemory
from commsweep.experiments.pipeline import Boundaries, check_room, gib, memory_bytes, message_shapes
from commsweep.experiments.specs import Spec
from commsweep.experiments.store import CONTINUABLE, DIVERGED, FAILED, FINISHED, OOM, Row, RunFolder, Store
from commsweep.experiments.tasks import CHECK_EVERY, Task, installed

CONTINUE = "last"  # name of a run's checkpoints


def execute(run: Run, store: Store, how: Execution | None = None, stopping: Callable[[], bool] = lambda: False) -> Row:
    """Train, evaluate and record `run`; a recorded run is returned as it stands, an interrupted one continued.

    Divergence, lack of memory and faults are outcomes and are recorded. `stopping` is asked after each epoch;
    once it says yes, a checkpoint is saved and KeyboardInterrupt raised. Raises UserError (nothing recorded)
    when the run cannot start, and `store.Busy` when another process executes it.
    """
    how = how or Execution()
    folder = store.folder(run_id(run))
    with folder.locked():
        if (row := folder.row()) is not None:
            return row
        started = time.perf_counter()
        parts = build(run, how, folder.path)
        folder.begin(run, environment(str(parts.device)) | {"threads": torch.get_num_threads(), "by": how.by})
        row = _outcome(run, parts, folder, how, stopping)
        row["seconds"]["wall"] = time.perf_counter() - started
        folder.finish(row)
        if row["status"] not in CONTINUABLE:
            for left in ("*.ckpt", "*.buffer*", ".*.part"):
                for path in folder.path.glob(left):
                    path.unlink()
        return row


@dataclass
class Parts:
    """The objects of one run."""

    task: Task
    data: ImageData | Blocks
    device: torch.device
    memory: dict[str, int]


def build(run: Run, how: Execution, folder: Path | None = None, rank: int | None = None) -> Parts:
    """Model, boundaries and data of a run. Raises UserError when they cannot exist or do not fit."""
    quiet()
    device = how.torch_device()
    data = datasets.build(run, how.data_root, how.model_root, device)
    pl.seed_everything(run.seed, verbose=False)
    model, modules = models.build(run, data, how.model_root)
    if run.channels_last:
        model = model.to(memory_format=torch.channels_last)
    shapes, work = message_shapes(model, modules, data.example)
    torch.set_num_threads(how.thread_count(work * run.data.batch_size))
    n = len(data.train.y)
    tasks.check_microbatches(run, n, data.train.drop_last)
    need = memory_bytes(run, shapes, n) | {"learners": learners.memory_bytes(run.grad, model)}
    if folder is not None:
        _check_buffers(how, folder, need["sample"])
    on_disk = folder if how.buffers == "mmap" else None
    check_room(need, device, on_disk, copies=0 if math.isinf(how.checkpoint_every) else 3)
    boundaries = Boundaries(run, modules, shapes, n, on_disk)
    return Parts(tasks.build(run, model, boundaries, rank), data, device, need)


def trainer(run: Run, parts: Parts, callbacks: list[pl.Callback], progress: bool,
            tensorboard: Path | None = None, **options: Any) -> pl.Trainer:
    """A Lightning Trainer with this run's settings. The store is the record; TensorBoard gets a copy where asked."""
    made = pl.Trainer(
        **{"accelerator": "gpu" if parts.device.type == "cuda" else "cpu",
           "devices": [parts.device.index or 0] if parts.device.type == "cuda" else 1} | options,
        max_epochs=run.epochs, check_val_every_n_epoch=run.eval_every,
        precision="bf16-mixed" if run.precision == "bfloat16" else "32-true",
        gradient_clip_val=getattr(run.optim, "clip", 0.0) or None, deterministic="warn",
        logger=_tensorboard(tensorboard) if tensorboard else False, log_every_n_steps=CHECK_EVERY,
        enable_checkpointing=any(isinstance(one, Checkpoint) for one in callbacks),
        enable_model_summary=False, enable_progress_bar=progress,
        num_sanity_val_steps=0, use_distributed_sampler=False, callbacks=callbacks,
        plugins=[checkpoint.CheckpointIO()])
    # Deterministic mode would fill every new tensor with NaN, at the price of a pass over memory each.
    torch.utils.deterministic.fill_uninitialized_memory = False
    return made


def _tensorboard(folder: Path) -> Logger:
    from pytorch_lightning.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(folder.parent, name=folder.name, version="tensorboard")
    except ModuleNotFoundError:
        raise UserError("--tensorboard needs TensorBoard: pip install 'commsweep[tensorboard]'") from None


class Recorder(Checkpoint):
    """Appends each evaluation to the store and keeps a checkpoint to continue from.

    Lightning calls its Checkpoint callbacks after the task's own end of an epoch, which belongs into the checkpoint.
    """

    def __init__(self, folder: RunFolder, every: float, stopping: Callable[[], bool]) -> None:
        self.folder, self.every, self.saved, self.stopping = folder, every, time.monotonic(), stopping

    def on_validation_end(self, trainer: pl.Trainer, task: Task) -> None:
        record = {"epoch": task.current_epoch + 1, "step": task.global_step, "train_loss": task.train_loss,
                  **task.scores, "bytes": sum(b["fwd"] + b["bwd"] for b in task.boundaries.ledger().values()),
                  "seconds": round(task.seconds["train"], 4),
                  **task.learners.evaluation()}
        self.folder.append(record)
        with open(self.folder.path / "log.txt", "a") as log:
            log.write(" ".join(f"{key}={value:.5g}" for key, value in record.items() if key != "rates") + "\n")

    def on_train_epoch_end(self, trainer: pl.Trainer, task: Task) -> None:
        if trainer.current_epoch + 1 >= trainer.max_epochs:
            return
        stop = self.stopping()
        if stop or time.monotonic() - self.saved >= self.every:
            mapped = task.boundaries.snapshot(str(trainer.global_step))
            trainer.save_checkpoint(self.folder.path / f"{CONTINUE}.{trainer.global_step}")
            steps = [step for step, _ in checkpoint.kept(self.folder.path, CONTINUE)]
            for memory in mapped:  # only now is an older copy useless
                memory.drop_copies(steps)
            self.saved = time.monotonic()
        if stop:
            raise Stopped


def _outcome(run: Run, parts: Parts, folder: RunFolder, how: Execution, stopping: Callable[[], bool]) -> Row:
    """Fit and describe what came of it; Ctrl-C passes through and leaves the run to be continued."""
    made = trainer(run, parts, [Recorder(folder, how.checkpoint_every, stopping)], how.progress,
                   folder.path if how.tensorboard else None)
    status, error = FINISHED, None
    begun = _continue_from(parts, folder)
    if sum(parts.memory.values()):
        print(f"feedback memories: {gib(parts.memory['slot'])} by slot, {gib(parts.memory['sample'])} by sample "
              f"({how.buffers}), {gib(parts.memory['learners'])} of learners", file=sys.stderr, flush=True)
    try:
        made.fit(parts.task, parts.data.train, parts.data.val_dataloader(),
                 ckpt_path=begun and str(begun), weights_only=True)
        _nothing_lost(run, installed(run, parts.task, parts.data, made))
    except Diverged as outcome:
        status, error = DIVERGED, str(outcome)
    except (SystemExit, Stopped):  # Lightning ends so after Ctrl-C
        raise KeyboardInterrupt from None
    except OSError:
        raise  # the store cannot be written: nothing could be recorded either
    except Exception as fault:
        status = OOM if _out_of_memory(fault) else FAILED
        error = f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}"
        with open(folder.path / "log.txt", "a") as log:
            log.write(traceback.format_exc())
    return _row(run, parts, folder, made, status, error)


def _continue_from(parts: Parts, folder: RunFolder) -> Path | None:
    """The checkpoint to go on from; damaged ones are named in the log and on stderr."""
    mapped = [one.file for one in parts.task.boundaries.modules() if isinstance(one, MappedMemory)]
    path, said = checkpoint.newest(folder.path, CONTINUE, mapped)
    for line in said:
        notice(f"run {folder.path.name}: {line}")
        with open(folder.path / "log.txt", "a") as log:
            log.write(line + "\n")
    return path


def _check_buffers(how: Execution, folder: Path, by_sample: int) -> None:
    """Raise UserError when an interrupted run kept its memories elsewhere."""
    if not by_sample or not checkpoint.kept(folder, CONTINUE):
        return
    before = "mmap" if any(folder.glob("*.buffer.*")) else "memory"
    if before != how.buffers:
        raise UserError(f"--buffers {how.buffers}: run {folder.name} was interrupted with --buffers {before}, and its "
                        f"checkpoint has the memories there; continue it with --buffers {before}")


def _out_of_memory(fault: Exception) -> bool:
    """Whether memory ran out, on a GPU or on the host (where torch raises a plain RuntimeError)."""
    return isinstance(fault, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(fault)


def _row(run: Run, parts: Parts, folder: RunFolder, made: pl.Trainer, status: str, error: str | None) -> Row:
    ran = run.model_dump(mode="json")
    if made.optimizers and status not in CONTINUABLE:
        ran = _dump(installed(run, parts.task, parts.data, made))
    ledger = parts.task.boundaries.ledger()
    return {
        "schema": SCHEMA, "id": run_id(run), "status": status, "error": error, "run": ran,
        "metrics": summarise(folder.metrics()) if status == FINISHED else {},
        "steps": made.global_step, "boundaries": ledger, "bytes": traffic(ledger),
        "gradients": parts.task.learners.totals(),
        "speed": _speed(ledger, parts),
        "memory_bytes": parts.memory, "device": str(parts.device),
        "seconds": {key: round(value, 4) for key, value in parts.task.seconds.items()},
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def summarise(evaluations: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers of a finished run.

    Plain names are the last epoch's; `best_val.*` is the test score at the epoch that validation chooses
    (first of equals), per inference mode; `best_test.*` is the authors' choice, the best of all
    evaluations on the test set itself, kept to show how far it flatters.
    """
    last = evaluations[-1]
    out = {key: value for key, value in last.items() if key not in ("epoch", "step", "bytes", "seconds", "rates")}
    name, best = ("acc", max) if "test_on_acc" in last else ("ppl", min)
    for mode in ("on", "off"):
        score = f"test_{mode}_{name}"
        if f"val_{mode}_{name}" in last:
            chosen = best(evaluations, key=lambda e: e[f"val_{mode}_{name}"])
            out |= {f"best_val.{score}": chosen[score], f"best_val.{mode}_epoch": chosen["epoch"]}
        out[f"best_test.{score}"] = best(e[score] for e in evaluations)
    return out


def traffic(ledger: dict[str, dict[str, int]]) -> dict[str, float]:
    """Bytes per step over all boundaries, each way, and what share of the dense bytes that is."""
    out: dict[str, float] = {}
    for side in ("fwd", "bwd"):
        sent = sum(boundary[side] for boundary in ledger.values())
        dense = sum(boundary[f"{side}_dense"] for boundary in ledger.values())
        steps = max([boundary["calls"] for boundary in ledger.values()], default=0)
        out |= {f"{side}_per_step": sent / steps if steps else 0.0, f"{side}_ratio": sent / dense if dense else 1.0}
    dense = sum(b["fwd_dense"] + b["bwd_dense"] for b in ledger.values())
    out["total"] = sum(b["fwd"] + b["bwd"] for b in ledger.values())
    out["ratio"] = out["total"] / dense if dense else 1.0
    return out


def _speed(ledger: dict[str, dict[str, int]], parts: Parts) -> dict[str, float]:
    """Training throughput; of text also in tokens, with what a token costs at one boundary each way."""
    samples = max([boundary["samples"] for boundary in ledger.values()], default=0)
    seconds = parts.task.seconds["train"]
    out = {"samples_per_second": samples / seconds if seconds else 0.0}
    if isinstance(parts.data, Blocks) and samples:
        tokens = samples * parts.data.train.x.shape[1]
        out["tokens_per_second"] = tokens / seconds if seconds else 0.0
        for side in ("fwd", "bwd"):
            out[f"{side}_bytes_per_token"] = sum(b[side] for b in ledger.values()) / len(ledger) / tokens
    return out


def _nothing_lost(run: Run, ran: dict[str, Any]) -> None:
    """Law 1: what is logged is what ran. Raises when a setting did not reach the objects."""
    asked, got = flatten(run.model_dump(mode="json")), flatten(_dump(ran))
    lost = [f"{key}: asked {asked.get(key)}, installed {got.get(key)}"
            for key in sorted(asked.keys() | got.keys()) if asked.get(key) != got.get(key)]
    if lost:
        raise RuntimeError("settings lost on the way to the run: " + "; ".join(lost))


def _dump(ran: dict[str, Any]) -> dict[str, Any]:
    """Installed settings as a Run would be stored; not validated, for a lost setting may be no valid one."""
    return {key: part.model_dump(mode="json") if isinstance(part, Spec) else _dump(part) if isinstance(part, dict)
            else part for key, part in ran.items()}


@cache
def environment(device: str) -> dict[str, Any]:
    """What a run was executed with."""
    names = ("torch", "torchvision", "pytorch-lightning", "numpy", "pydantic")
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    return {
        "python": platform.python_version(), "machine": platform.machine(), "device": device,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "commit": commit or None, "dirty": bool(dirty.strip()),
        "versions": {name: version(name) for name in names},
    }


@cache
def quiet() -> None:
    """Lightning's banners and advice for other set-ups say nothing about a run."""
    for chatty in ("pytorch_lightning", "huggingface_hub"):  # the hub's retries end in one line of ours
        logging.getLogger(chatty).setLevel(logging.ERROR)
    for noise in (".*does not have many workers.*", ".*dataloader.*", ".*isinstance.*LeafSpec.*",
                  ".*GPU available but not used.*", ".*lr_scheduler.step.*", ".*srun.*", ".*sync_dist=True.*"):
        warnings.filterwarnings("ignore", noise)


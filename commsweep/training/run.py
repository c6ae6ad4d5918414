"""Executes a Run and records a row."""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment  # pyright: ignore[reportPrivateImportUsage]
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import nn

from commsweep import checkpoint, input_digests, models
from commsweep.boundary.insert import Boundaries
from commsweep.boundary.message_sizes import check_room, gib, memory_bytes, message_shapes
from commsweep.collectives import Collectives
from commsweep.component import Component, Pass
from commsweep.config import Execution, Run, own, record, run_id
from commsweep.config.compressors.coders import SubspaceSpec
from commsweep.config.execution import LearnerWiring
from commsweep.config.labels import title
from commsweep.config.override import parse
from commsweep.config.training import OwnModel
from commsweep.data import load as datasets
from commsweep.data.module import Batch, Blocks, ImageData
from commsweep.data_parallel.layers import Layer
from commsweep.data_parallel.learners import Learners
from commsweep.data_parallel.memory import memory_bytes as learner_memory
from commsweep.data_parallel.outer.training import Clip, LocalTraining
from commsweep.data_parallel.shards import Shards
from commsweep.errors import Diverged, Stopped, UserError, notice, reason
from commsweep.models.causal_lm import tied_bytes
from commsweep.models.module_calls import calls
from commsweep.second_order import preconditioner as second_order
from commsweep.second_order.preconditioner import Preconditioner
from commsweep.sparsity import training as sparsity
from commsweep.store import (
    CONTINUABLE,
    DIAGNOSIS,
    DIVERGED,
    FAILED,
    FINISHED,
    OOM,
    POINTS,
    Row,
    RunFolder,
    Store,
)
from commsweep.training import arithmetic, compiled, delay, optim
from commsweep.training.delay import Delayed
from commsweep.training.points import Points
from commsweep.training.readback import Installed, model_of, nothing_lost
from commsweep.training.recalibration import Recalibration
from commsweep.training.record import environment, row
from commsweep.training.step import CHECK_EVERY, Task, check_microbatches, check_norms, microbatches
from commsweep.training.subspace import SubspaceTraining
from commsweep.training.tasks import kind

NAME = 200  # characters of a folder's name
CONTINUE = "last"  # name of a run's checkpoints
FORM = "crossings"  # what a checkpoint of this version has, and one of an earlier one has not


def execute(
    run: Run,
    store: Store,
    execution: Execution | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Row:
    """Train, evaluate and record `run`; a recorded run is returned as it stands, an interrupted one
    continued.

    Divergence, lack of memory and faults are outcomes and are recorded. `stopping` is asked after
    each epoch; once it says yes, a checkpoint is saved and KeyboardInterrupt raised. Raises
    UserError (nothing recorded) when the run cannot start, and `store.Busy` when another process
    executes it.
    """
    execution = execution or Execution()
    run = parse(record(run))  # a copy with fields replaced was not checked
    folder = store.folder(run_id(run))
    with folder.locked():
        if (recorded := folder.row()) is not None:
            input_digests.check(folder, run, recorded, execution)
            return recorded
        started = time.perf_counter()
        device = execution.torch_device()
        execution = replace(execution, points=folder.points(execution.points))
        surroundings = environment(str(device)) | {
            "points": execution.points,
            "threads": torch.get_num_threads(),
            "by": execution.by,
            "compile": execution.compile,
        }
        try:
            built = build(run, execution, folder.path)
        except Exception as fault:
            if not _out_of_memory(fault):
                raise
            folder.begin(run, surroundings)
            row_ = _unbuilt(run, fault, device, time.perf_counter() - started)
            folder.finish(row_)
            return row_
        input_digests.keep(folder, run, execution, built.inputs)
        folder.begin(run, surroundings | {"threads": torch.get_num_threads()})
        try:
            row_ = _outcome(run, built, folder, execution, stopping)
        finally:  # the next run of this process needs the room
            del built
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        row_["seconds"]["wall"] = time.perf_counter() - started
        folder.finish(row_)
        if row_["status"] not in CONTINUABLE:
            folder.drop_checkpoints()
        return row_


@dataclass
class Parts:
    """The objects of one run. modules: by cut, those that a boundary follows."""

    task: Task
    modules: dict[str, nn.Module]
    data: ImageData | Blocks
    device: torch.device
    memory: dict[str, int]
    inputs: dict[str, str]  # digests of what was loaded


def build(
    run: Run,
    execution: Execution,
    folder: Path | None = None,
    collectives: Collectives | None = None,
    wiring: LearnerWiring | None = None,
) -> Parts:
    """Model, components and data of a run. Raises UserError when they cannot exist or do not fit.

    collectives: between processes, where each has a learner of its own; None: all learners are
    here. wiring: of these.
    """
    quiet()
    device = execution.torch_device()
    arithmetic.install(run, device)
    data = datasets.build(run, execution.data_root, execution.model_root, device)
    if run.recalibrate is not None and run.recalibrate > len(data.train):
        raise UserError(
            f"recalibrate={run.recalibrate}: an epoch of training has {len(data.train)} batches, "
            f"so no more can be gathered; set recalibrate={len(data.train)} or fewer"
        )
    pl.seed_everything(run.seed, verbose=False)
    model, modules = models.build(run, data, execution.model_root)
    loaded = input_digests.digests(run, data, model)
    run.check_cuts(modules)
    shapes, work = message_shapes(model, modules, data.example)
    torch.set_num_threads(execution.thread_count(work * run.data.batch_size))
    n, links = len(data.train.y), {cut: run.links(cut) for cut in modules}
    check_microbatches(run, n, data.train.drop_last)
    run.check_starts(len(data.train) * run.epochs)
    need = _memory(run, model, modules, shapes, n, collectives)
    if folder is not None:
        _check_buffers(execution, folder, need["sample"])
    on_disk = folder if execution.buffers == "mmap" else None
    check_room(need, device, on_disk, copies=0 if math.isinf(execution.checkpoint_every) else 3)
    boundaries = Boundaries(
        links,
        modules,
        shapes,
        run.data.batch_size,
        n,
        run.seed,
        set_apart=run.at,
        channels_last=run.channels_last,
        folder=on_disk,
        device=device,
    )
    data.train.told += [memory.ahead for memory in boundaries.mapped()]
    if execution.diagnose:
        boundaries.watch()
    trained = nn.ModuleDict({"model": model, "boundaries": boundaries})  # coders learn, too
    steps = len(data.train) * run.epochs
    shared = sharing(run, trained, optim.embedded(trained), steps, collectives)
    components: dict[str, Component] = {"boundaries": boundaries, "learners": shared}
    components |= _sections(run, model, modules, trained, data, boundaries, shared, wiring)
    divide = divided(run, shared)
    with boundaries.bypassed():
        check_norms(run, model, data.example, divide, n, data.train.drop_last)
    if execution.compile is not None:
        compiled.install(model, execution.compile, device)
    task = kind(run)(run, model, components, divide)
    if execution.points and not (wiring and wiring.steps):
        task.points = Points(run, data, execution.points)
    return Parts(task, modules, data, device, need, loaded)


def _memory(
    run: Run,
    model: nn.Module,
    modules: dict[str, nn.Module],
    shapes: dict[str, torch.Size],
    n: int,
    collectives: Collectives | None,
) -> dict[str, int]:
    """Return the bytes that each section of a run remembers; n: training samples."""
    links = {cut: run.links(cut) for cut in modules}
    need = memory_bytes(links, shapes, run.data.batch_size, n) | {
        "learners": learner_memory(
            run.grad, model, collectives and len(collectives.here), optim.states(run)
        )
    }
    if run.kfac is not None:
        learners_here = run.grad.learners if collectives is None else len(collectives.here)
        need["kfac"] = second_order.memory_bytes(run.kfac, model, learners_here)
    if run.delay is not None:
        need["delay"] = delay.memory_bytes(run.delay, model, modules)
    if run.sparsity is not None:
        need["masks"] = sparsity.memory_bytes(model, run.grad.compressor.kind != "none")
    return need


def _sections(
    run: Run,
    model: nn.Module,
    modules: dict[str, nn.Module],
    trained: nn.ModuleDict,
    data: datasets.ImageData | datasets.Blocks,
    boundaries: Boundaries,
    shared: Learners,
    wiring: LearnerWiring | None,
) -> dict[str, Component]:
    """Return the components of the sections that a run has, in the order in which they act."""
    components: dict[str, Component] = {}
    if isinstance(run.fwd.compressor, SubspaceSpec) and boundaries:
        components["subspace"] = coder = SubspaceTraining(run, model, boundaries)
        if run.fwd.compressor.constrain:
            coder.check(model, data.example)
    if run.kfac is not None:
        terms = tokens(data) - 1 if tokens(data) else 1
        with boundaries.bypassed():
            calls_ = calls(model, data.example)
        components["kfac"] = Preconditioner(
            run.kfac,
            model,
            terms,
            run.seed,
            shared.exchange and shared.exchange.collectives,
            wiring,
            calls_,
        )
        second_order.name_left_out(components["kfac"].left)
    if run.delay is not None:
        components["delay"] = Delayed(run.delay, model, modules)
    if run.recalibrate is not None:
        components["recalibration"] = Recalibration(model, run.recalibrate)
    if run.sparsity is not None:
        with boundaries.bypassed():  # products of a compressor are not the model's
            components["sparsity"] = sparsity.SparseTraining(
                run.sparsity,
                model,
                trained,
                data.example,
                len(data.train) * run.epochs,
                run.seed,
                shared.exchange,
            )
    return components


def sharing(
    run: Run,
    model: nn.Module,
    embeddings: Collection[int],
    steps: int,
    collectives: Collectives | None = None,
    network_layers: dict[int, Layer] | None = None,
    clip: Clip | None = None,
) -> Learners:
    """Return how the learners of a run train together. embeddings: identities of these among the
    model's parameters. steps: of the whole training. network_layers, clip: where the model is one
    stage of a network, that network's layers by the identity of their parameters, and what shortens
    a gradient of which one stage has a part only.
    """
    common = run.grad, model, run.seed, run.data.batch_size
    if run.grad.sharded is not None:
        return Shards(*common, collectives, run.microbatches)
    if run.grad.outer is None:
        return Learners(*common, collectives, run.microbatches, network_layers)
    if most := getattr(run.optim, "clip", 0.0):
        clip = clip or partial(nn.utils.clip_grad_norm_, max_norm=most)
    return LocalTraining(
        *common,
        partial(optim.optimizer, run, embeddings=embeddings),
        clip if most else None,
        steps,
        collectives,
        run.microbatches,
        network_layers,
        plain=run.optim.kind == "sgd" and not run.optim.momentum,
    )


def divided(run: Run, shared: Learners) -> Callable[[int], list[Pass]]:
    """The passes that a batch of so many rows is worked on in."""
    in_parts = shared.exchange is None and run.microbatches > 1
    return partial(microbatches, count=run.microbatches) if in_parts else shared.passes


def trainer(
    run: Run,
    built: Parts,
    callbacks: list[pl.Callback],
    progress: bool,
    tensorboard: Path | None = None,
    steps: int = 0,
) -> pl.Trainer:
    """A Lightning Trainer with this run's settings. The store is the record; TensorBoard gets a
    copy where asked.

    steps: end after so many (0: after the run's epochs).
    """
    on_gpu, index = built.device.type == "cuda", built.device.index or 0
    trainer_ = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=[index] if on_gpu else 1,
        strategy=OneDevice(torch.device("cuda", index) if on_gpu else built.device),
        max_epochs=-1 if steps else run.epochs,
        max_steps=steps or -1,
        check_val_every_n_epoch=run.eval_every,
        precision="bf16-mixed" if run.precision == "bfloat16" else "32-true",
        deterministic="warn",
        logger=_tensorboard(run, tensorboard) if tensorboard else False,
        log_every_n_steps=CHECK_EVERY,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_model_summary=False,
        enable_progress_bar=progress,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=callbacks,
        plugins=[checkpoint.CheckpointIO(), Alone()],
    )
    # Deterministic mode would fill every new tensor with NaN, at the price of a pass over memory
    # each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return trainer_


class OneDevice(SingleDeviceStrategy):
    """Lightning's strategy for one device, without the hooks and the precision around a whole step.

    A `Task` has no such hooks, and they take three percent of a small step.
    """

    def batch_to_device(self, batch: Batch, device: Any = None, dataloader_idx: int = 0) -> Batch:
        task: Any = self.lightning_module
        return task.transfer_batch_to_device(batch, self.root_device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        task: Any = self.lightning_module
        return task.training_step(*args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        return optimizer.step()


class Alone(LightningEnvironment):
    """A training in one process, whatever Slurm, torchrun or MPI have said to the process."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return 1

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return 0

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


def installed(run: Run, built: Parts, trainer_: pl.Trainer) -> Installed:
    """The objects that a training consisted of, once it has begun."""
    task = built.task
    sections = {
        name: settings
        for component in task.components.values()
        for name, settings in component.installed().items()
    }
    cuts = tuple(boundary.name for boundary in task.components["boundaries"].values())
    shares = len(task.components["learners"].here) * sections["grad"].local_steps
    autocast = torch.bfloat16 if "bf16" in str(trainer_.precision) else torch.float32
    return Installed(
        run,
        model_of(run, task.model, cuts),
        task.model,
        built.data,
        trainer_.optimizers[0],
        task.clip,
        trainer_.lr_scheduler_configs[0].scheduler,
        sections,
        max(1, len(task.divide(built.data.train.batch_size)) // shares),
        trainer_.max_epochs,  # pyright: ignore[reportArgumentType]
        trainer_.check_val_every_n_epoch,  # pyright: ignore[reportArgumentType]
        arithmetic.installed(autocast),
    )


def _tensorboard(run: Run, folder: Path) -> Logger:
    """Return a writer of event files, in a folder named by the run's setting and seed."""
    from pytorch_lightning.loggers import TensorBoardLogger

    version = title(record(run)).replace("/", "-")  # "min-max 4 / 8 bit"; a file's name
    if len(version) > NAME:
        version = f"{version[: NAME - 20]}..., seed {run.seed}"
    try:
        return TensorBoardLogger(folder, name="tensorboard", version=version)
    except ModuleNotFoundError:
        raise UserError(
            "--tensorboard needs TensorBoard: pip install 'commsweep[tensorboard]'"
        ) from None


class Recorder(Checkpoint):
    """Appends each evaluation to the store and keeps a checkpoint to continue from.

    Lightning calls its Checkpoint callbacks after the task's own end of an epoch, which belongs
    into the checkpoint.
    """

    def __init__(self, folder: RunFolder, seconds: float, stopping: Callable[[], bool]) -> None:
        self.folder, self.pace, self.stopping = folder, checkpoint.Pace(seconds), stopping

    def on_train_batch_end(
        self, trainer: pl.Trainer, task: Task, outputs: Any, batch: Batch, number: int
    ) -> None:
        if task.points is not None and task.points.due(task.global_step):
            self.folder.append(task.point(), POINTS)

    def on_validation_end(self, trainer: pl.Trainer, task: Task) -> None:
        record = task.evaluation()
        self.folder.append(record)
        if diagnosis := task.components["boundaries"].diagnosis():
            self.folder.append(
                {"epoch": record["epoch"], "step": record["step"], "messages": diagnosis}, DIAGNOSIS
            )
        with open(self.folder.path / "log.txt", "a", encoding="utf-8") as log:
            log.write(
                " ".join(
                    f"{key}={value:.5g}"
                    for key, value in record.items()
                    if not isinstance(value, dict)
                )
                + "\n"
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, task: Task) -> None:
        if trainer.current_epoch + 1 >= (trainer.max_epochs or 0):
            return
        stop = self.stopping()
        if stop or self.pace.due():
            with self.pace.taken():
                mapped = task.components["boundaries"].snapshot(str(trainer.global_step))
                trainer.save_checkpoint(self.folder.path / f"{CONTINUE}.{trainer.global_step}")
                steps = [step for step, _ in checkpoint.saved(self.folder.path, CONTINUE)]
                for memory in mapped:  # only now is an older copy useless
                    memory.drop_copies(steps)
        if stop:
            raise Stopped


def _outcome(
    run: Run, built: Parts, folder: RunFolder, execution: Execution, stopping: Callable[[], bool]
) -> Row:
    """Fit and describe what came of it; Ctrl-C passes through and leaves the run to be
    continued.
    """
    trainer_ = trainer(
        run,
        built,
        [Recorder(folder, execution.checkpoint_every, stopping)],
        execution.progress,
        folder.path if execution.tensorboard else None,
    )
    status, error = FINISHED, None
    checkpoint_ = _continue_from(built, folder)
    if sum(built.memory.values()):
        print(
            f"feedback memories: {gib(built.memory['slot'])} by slot, "
            f"{gib(built.memory['sample'])} by sample ({execution.buffers}), "
            f"{gib(built.memory['learners'])} of learners"
            + "".join(
                f"; {gib(built.memory[kind])} of {name}"
                for kind, name in (("kfac", "K-FAC"), ("masks", "masks"))
                if kind in built.memory
            ),
            file=sys.stderr,
            flush=True,
        )
    own_code = own.no_exit(run.model.build) if isinstance(run.model, OwnModel) else nullcontext()
    try:
        with own_code:
            trainer_.fit(
                built.task,
                built.data.train,
                built.data.val_dataloader(),
                ckpt_path=checkpoint_ and str(checkpoint_),
                weights_only=True,
            )
        nothing_lost(run, installed(run, built, trainer_).record())
    except Diverged as outcome:
        status, error = DIVERGED, str(outcome)
    except OSError:
        raise  # the store cannot be written: nothing could be recorded either
    except BaseException as fault:  # a user's own model may raise anything
        if _stopped(fault):
            raise KeyboardInterrupt from None
        status, error = OOM if _out_of_memory(fault) else FAILED, reason(fault)
        with open(folder.path / "log.txt", "a", encoding="utf-8") as log:
            log.write(traceback.format_exc())
    ran = (
        installed(run, built, trainer_)
        if trainer_.optimizers and status not in CONTINUABLE
        else None
    )
    diagnosis = folder.metrics(DIAGNOSIS)
    return row(
        run,
        status,
        error,
        ran=ran,
        evaluations=folder.metrics(),
        steps=trainer_.global_step,
        totals=built.task.totals(),
        seconds=built.task.seconds,
        device=built.device,
        tokens=tokens(built.data),
        tied=tied_bytes(run, built.task.model),
        memory_bytes=built.memory,
        inputs=built.inputs,
        **({"diagnosis": diagnosis[-1]["messages"]} if diagnosis else {}),
        **({"points": built.task.points.plan} if built.task.points else {}),
    )


def _stopped(fault: BaseException) -> bool:
    """Return whether somebody asked for the end: by Ctrl-C, after which Lightning exits, by
    SIGTERM, or after an epoch.
    """
    return isinstance(fault, (KeyboardInterrupt, Stopped, SIGTERMException)) or (
        isinstance(fault, SystemExit) and isinstance(fault.__context__, KeyboardInterrupt)
    )


def tokens(data: ImageData | Blocks) -> int:
    """Tokens of a sample; 0 of an image."""
    return data.train.x.shape[1] if isinstance(data, Blocks) else 0


def _continue_from(built: Parts, folder: RunFolder) -> Path | None:
    """The checkpoint to go on from; damaged ones are named in the log and on stderr."""
    mapped = [memory_.file for memory_ in built.task.components["boundaries"].mapped()]
    path, reason = checkpoint.newest(folder.path, CONTINUE, mapped)
    if path is not None and FORM not in torch.load(
        path, map_location="cpu", weights_only=True, mmap=True
    ):
        reason.append(f"checkpoint '{path.name}' is of an earlier commsweep: beginning anew")
        path = None
    for line in reason:
        notice(f"run {folder.path.name}: {line}")
        with open(folder.path / "log.txt", "a", encoding="utf-8") as log:
            log.write(line + "\n")
    return path


def _check_buffers(execution: Execution, folder: Path, by_sample: int) -> None:
    """Raise UserError when an interrupted run kept its memories elsewhere."""
    if not by_sample or not checkpoint.saved(folder, CONTINUE):
        return
    before = "mmap" if any(folder.glob("*.buffer.*")) else "memory"
    if before != execution.buffers:
        raise UserError(
            f"--buffers {execution.buffers}: run {folder.name} was interrupted with --buffers "
            f"{before}, and its checkpoint has the memories there; continue it with --buffers "
            f"{before}"
        )


def _out_of_memory(fault: BaseException | None) -> bool:
    """Return whether memory ran out, on a GPU or on the host (where torch raises a plain
    RuntimeError), be it in own code whose fault was told in other words.
    """
    if fault is None:
        return False
    memory = isinstance(fault, (torch.OutOfMemoryError, MemoryError))
    return memory or "can't allocate memory" in reason(fault) or _out_of_memory(fault.__context__)


def _unbuilt(run: Run, fault: Exception, device: torch.device, seconds: float) -> Row:
    """The row of a run for whose model or data there was no memory."""
    return row(
        run,
        OOM,
        reason(fault),
        ran=None,
        evaluations=[],
        steps=0,
        totals={"boundaries": {}, "gradients": {}},
        seconds={"train": 0.0, "wall": seconds},
        device=device,
    )


@cache
def quiet() -> None:
    """Lightning's banners and advice for other set-ups say nothing about a run."""
    for chatty in (
        "pytorch_lightning",
        "huggingface_hub",
    ):  # the hub's retries end in one line of ours
        logging.getLogger(chatty).setLevel(logging.ERROR)
    for noise in (
        ".*does not have many workers.*",
        ".*dataloader.*",
        ".*isinstance.*LeafSpec.*",
        ".*GPU available but not used.*",
        ".*lr_scheduler.step.*",
        ".*srun.*",
        ".*sync_dist=True.*",
        ".*smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", noise)

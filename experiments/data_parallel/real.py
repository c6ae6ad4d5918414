"""The same learners as processes: DistributedDataParallel with a communication hook that sends packed payloads.

Every process has one learner. What it hands to the collective is the serialised payloads of a bucket's layers; what
it gets are all learners' payloads, which it decodes and averages in the learners' order, as the simulation does.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commsweep.experiments.compressors import wire
from commsweep.experiments.compressors.base import Payload
from commsweep.experiments.config import Links, Run
from commsweep.experiments.data_parallel.exchange import mean
from commsweep.experiments.data_parallel.learners import Learners
from commsweep.experiments.data_parallel.shared import Here, Together
from commsweep.experiments.errors import UserError
from commsweep.experiments.execution import Execution
from commsweep.experiments.feedback import sample_keyed
from commsweep.experiments.pipelining.launch import free_port
from commsweep.experiments.specs import Link

PATIENCE = timedelta(minutes=5)


class Wire(Here):
    """Collectives between the learners' processes; counts what is handed to them."""

    def __init__(self) -> None:
        self.sent = 0

    @property
    def learners(self) -> int:
        return dist.get_world_size()

    def gather(self, parts: list[Tensor]) -> list[Tensor]:
        mine = parts[0].contiguous()
        self.sent += mine.numel() * mine.element_size()
        out = [torch.empty_like(mine) for _ in range(self.learners)]
        dist.all_gather(out, mine)
        return out

    def from_leader(self, parts: list[Tensor], leader: int) -> Tensor:
        mine = parts[0].contiguous()  # bytes, as many at every learner
        self.sent += mine.numel() * mine.element_size() * (dist.get_rank() == leader)
        dist.broadcast(mine, leader)
        return mine

    def gather_bytes(self, mine: Tensor) -> list[Tensor]:
        """Every learner's bytes (uint8), whatever their lengths."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.learners)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]))
        lengths = [int(size) for size in sizes]
        padded = torch.nn.functional.pad(mine, (0, max(lengths) - mine.numel()))
        self.sent += padded.numel() + 8
        out = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(out, padded)
        return [one[:length] for one, length in zip(out, lengths, strict=True)]


class Process:
    """The state of the hook: this process's learner, and of the others what a receiver must remember."""

    def __init__(self, learners: Learners) -> None:
        self.learners, self.exchange, self.wire = learners, learners.exchange, Wire()
        self.rank, self.digest = dist.get_rank(), wire.digest(str(learners.spec))
        self.places = {id(p): place for place, p in enumerate(self.exchange.trained)}
        self.step = self.epoch = 0
        self.waiting: list[tuple[int, Any, Tensor | None, Payload]] = []  # layers of a bucket: place, how, m, payload

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's hook: the bucket's gradients become what the optimizer is to see."""
        # In the bucket a gradient lies as its parameter does; the views that the bucket gives say nothing of that.
        views = [grad.as_strided(p.shape, p.stride(), grad.storage_offset())
                 for grad, p in zip(bucket.gradients(), bucket.parameters(), strict=True)]
        grads = [grad * self.learners.weight if self.learners.weight != 1 else grad.clone() for grad in views]
        places = [self.places[id(p)] for p in bucket.parameters()]
        done: dict[int, Tensor] = {}
        for place, grad in zip(places, grads, strict=True):
            layer, exchange = self.exchange.layers[place], self.exchange
            if layer.dense or self.epoch < exchange.spec.start_epoch:
                memories = [every[place] for every in exchange.memories]
                arrived = self.wire.gather([memories[self.rank].dense(grad)])
                for learner, memory in enumerate(memories):
                    if memory.mirrored and learner != self.rank:
                        memory.saw(arrived[learner])
                done[place] = mean(arrived)
                exchange.ledger.dense(place, 1)
                continue
            method = exchange.method(place, self.epoch)
            if exchange.looks_ahead:
                y, *_ = method.step(exchange.memories[self.rank][place].e, grad, exchange.spec.feedback.scale - 1)
                self._waits(place, method, None, method.pack(y[None]))
                continue
            message = exchange.memories[self.rank][place].offer(grad)
            if isinstance(method, Together):
                arrived, warm = method.combine([message], getattr(exchange, f"warm{place}", None), self.step, self.wire)
                exchange.keep_warm(place, warm)
                exchange.ledger.sent(place, round(method.nbytes(layer.shape, self.wire.learners)))
                done[place] = self._settle(place, message, arrived)
                continue
            payload = method.encode(message[None], exchange.draw(place, self.rank, self.step))
            self._waits(place, method, message, payload)
        if self.waiting:
            packed = [payload for *_, payload in self.waiting]
            where = wire.Place(self.digest, self.step)
            readers = [wire.Reader(text, where) for text in self.wire.gather_bytes(wire.pack(packed, where))]
            for place, method, message, own in self.waiting:
                arrived = [method.decode(reader.take(method, own.shape))[0] for reader in readers]
                self.exchange.ledger.sent(place, own.nbytes, self.exchange.entries(arrived[self.rank]))
                done[place] = self._settle(place, message, arrived)
            for reader in readers:
                reader.finish()
            self.waiting = []
        for place, grad in zip(places, views, strict=True):
            grad.copy_(done[place])
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _waits(self, place: int, method: Any, message: Tensor | None, payload: Payload) -> None:
        self.waiting.append((place, method, message, payload))

    def _settle(self, place: int, message: Tensor | None, arrived: list[Tensor]) -> Tensor:
        """The gradient for the optimizer; without `message` the residue is settled already."""
        used = []
        for learner, y in enumerate(arrived):
            memory = self.exchange.memories[learner][place]
            own = learner == self.rank and message is not None
            used.append(memory.settle(message, y) if own or memory.mirrored else y)
        return self.exchange.merge(place, used)


def hook(state, bucket):  # type: ignore[no-untyped-def]
    """DDP's communication hook."""
    return state.reduce(bucket)


hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}  # DDP looks at the types


def learn(rank: int, run: Run, how: Execution, port: int, answer: Connection) -> None:
    """One learner's process: train, and (rank 0) send the outcome through `answer`."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import LightningEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    from commsweep.experiments.run import build, trainer

    how = replace(how, cores=max(1, len(os.sched_getaffinity(0)) // run.grad.learners))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0",
                   "WORLD_SIZE": str(run.grad.learners)}
    try:
        dist.init_process_group("gloo", rank=rank, world_size=run.grad.learners, timeout=PATIENCE)
        _agree(run)
        parts = build(run, how, rank=rank)
        process = Process(parts.task.learners)

        class Hooked(pl.Callback):
            def on_train_start(self, trainer: pl.Trainer, task: pl.LightningModule) -> None:
                trainer.strategy.model.register_comm_hook(process, hook)  # Lightning does so on GPUs only

            def on_train_batch_start(self, trainer: pl.Trainer, task: pl.LightningModule, *_: Any) -> None:
                process.step, process.epoch = task.global_step, task.current_epoch

        class Losses(pl.Callback):
            seen: list[dict[str, float]] = []

            def on_validation_end(self, trainer: pl.Trainer, task: Any) -> None:
                self.seen.append({"epoch": task.current_epoch + 1, "train_loss": task.train_loss, **task.scores})

        ignored = [name for name, _ in parts.task.named_buffers() if not name.startswith("model.")]
        parts.task._ddp_params_and_buffers_to_ignore = ignored  # every learner has memories of its own
        strategy = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo",
                               timeout=PATIENCE)
        losses = Losses()
        made = trainer(run, parts, [Hooked(), losses], how.progress and rank == 0, accelerator="cpu",
                       devices=run.grad.learners, strategy=strategy)
        made.fit(parts.task, parts.data.train, parts.data.val_dataloader())
        state = {name: one.clone() for name, one in parts.task.model.state_dict().items()}
        answer.send({"rank": rank, "evaluations": losses.seen, "steps": made.global_step, "sent": process.wire.sent,
                     "gradients": parts.task.learners.totals(), "seconds": parts.task.seconds["train"],
                     "weights": {name: one.numpy() for name, one in state.items()} if rank == 0 else None})
    except UserError as error:
        answer.send({"rank": rank, "error": str(error)})
    finally:
        answer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _agree(run: Run) -> None:
    """Raise UserError unless all processes execute the same run."""
    from commsweep.experiments.config import run_id

    ids: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ids, run_id(run))
    if len(set(ids)) > 1:
        raise UserError(f"the learners' configurations differ (runs {', '.join(map(str, ids))}); start all with the "
                        "same settings")


def check(run: Run) -> None:
    """Raise UserError for runs that processes would train otherwise than the simulation does."""
    if run.grad.local_steps > 1:
        raise UserError(f"grad.local_steps={run.grad.local_steps}: processes exchange every step's gradients; simulate "
                        "local steps with commsweep run")
    places = {"": Links(fwd=run.fwd, bwd=run.bwd)} | {f"at.{cut}.": links for cut, links in run.at.items()}
    for place, links in places.items():
        for side in ("fwd", "bwd"):
            link: Link = getattr(links, side)
            if sample_keyed(link.feedback):
                raise UserError(f"{place}{side}.feedback.kind={link.feedback.kind} remembers samples, which come to "
                                "another learner each epoch, and processes do not share memories: simulate it with "
                                "commsweep run, or key it by slot")
            if getattr(link.compressor, "warm", False):
                raise UserError(f"{place}{side}.compressor.warm=true begins from the last message of all learners, "
                                "which processes do not share: simulate it with commsweep run, or set warm=false")


def execute(run: Run, how: Execution) -> dict[str, Any]:
    """Train with one process a learner on this machine; rank 0's evaluations, the weights, bytes handed to gloo.

    Raises UserError when a process fails; all others are ended then.
    """
    import multiprocessing as mp
    from multiprocessing.connection import wait

    check(run)
    context = mp.get_context("spawn")
    port, pipes, processes = free_port(), [], []
    for rank in range(run.grad.learners):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=learn, args=(rank, run, how, port, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    answers: dict[int, dict[str, Any]] = {}
    try:
        left = list(pipes)
        while left:
            for pipe in wait(left):
                left.remove(pipe)
                try:
                    answer = pipe.recv()
                except EOFError:
                    rank = pipes.index(pipe)
                    processes[rank].join()
                    raise UserError(f"learner {rank} ended with exit code {processes[rank].exitcode}; all others were "
                                    "ended") from None
                if "error" in answer:
                    raise UserError(answer["error"])
                answers[answer["rank"]] = answer
    finally:
        for process in processes:
            if process.is_alive() and len(answers) < len(processes):
                process.kill()
            process.join()
    return answers[0] | {"sent": [answers[rank]["sent"] for rank in sorted(answers)]}

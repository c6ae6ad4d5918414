"""Compressed gradients in a training loop of one's own: a communication hook for
DistributedDataParallel.

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    hook = CompressionHook(model, "ef+topk:0.01")
    hook.attach(ddp)  # then the loop as it was; hook.totals()["up"] is what a learner sent a step
    torch.save(hook.state_dict(), path)  # what was remembered, beside model and optimizer

The exchange runs while the backward goes on: the hook returns a future at once, and a thread
encodes, sends and decodes the buckets in order.

Types: what is compressed is computed, remembered and sent in float32, whatever the gradients are;
what travels dense keeps its type. With a GradScaler give `scaler=scaler`: gradients reach a hook
scaled, and what is remembered of one step would be too large or too small in the next one if the
scale changed in between.

A step in which any learner has a gradient that is not finite leaves every memory as it was, and all
learners get infinite gradients, so that all of their scalers skip it. A parameter that no learner
used in a step (find_unused_parameters=True) sends nothing: DistributedDataParallel would throw away
what arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commsweep.collectives import Processes, gathered_states, needs_group
from commsweep.config.gradients import Gradients
from commsweep.config.override import in_codec, parse_gradients
from commsweep.data_parallel.exchange import Exchange
from commsweep.data_parallel.narrow import NarrowBucket, stretches
from commsweep.errors import UserError

SPARSE = (nn.Embedding, nn.EmbeddingBag)  # layers whose gradients may be sparse


class CompressionHook(nn.Module):
    """A communication hook: the learners of a process group exchange messages instead of
    DistributedDataParallel's all-reduce.

    A hook of a model for each process, made after the process group. Its `state_dict` holds what
    this process remembers; every process keeps its own.
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: dict[str, Any] | str,
        feedback: dict[str, Any] | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **gradients: Any,
    ) -> None:
        """compressor ("topk:0.1", with its feedback "ef+topk:0.1", or settings), feedback,
        gradients: as of a Run's `grad`, such as exchange="server", or collective="ring" for sums
        that travel in codes.
        group: the process group that DistributedDataParallel was given (None: of all processes).
        scaler: of the loss, if there is one.

        Raises UserError on settings that do not go together.
        """
        super().__init__()
        exact = gradients.get("collective", "exact") == "exact"
        settings = {"exchange": "allgather" if exact else "allreduce", "compressor": compressor}
        if isinstance(compressor, str):
            settings |= in_codec(compressor)
        settings |= gradients | ({"feedback": feedback} if feedback else {})
        # what is misspelt is said whatever else is missing
        spec = parse_gradients({"learners": 2} | settings)
        if spec.outer is not None or spec.sharded is not None:
            raise UserError(
                f"{'outer' if spec.outer else 'sharded'}: a hook sees gradients only; leave it "
                "out, or train with commsweep ddp"
            )
        needs_group("a CompressionHook")
        spec = parse_gradients({"learners": dist.get_world_size(group)} | settings)
        self.group, self.scaler = group, scaler
        # A group of the hook's own: its messages are sent from a thread beside the backward, and
        # must not change places with those that DistributedDataParallel sends itself.
        self._lane: Any = dist.new_group(
            dist.get_process_group_ranks(group or dist.group.WORLD),
            backend=dist.get_backend(group),
            use_local_synchronization=True,
        )
        self._thread = ThreadPoolExecutor(1, "commsweep-hook")
        self.exchange = Exchange(spec, model, seed, Processes(group=self._lane))
        self.places = {id(p): index for index, p in enumerate(self.exchange.trained)}
        self.step = self.epoch = 0  # the epoch is the loop's to say, where a schedule asks for it
        # A compressor may drop an infinite value, and then no scaler would skip the step.
        self._looks = spec.compressor.kind != "none"
        # whether anything of a layer is kept between steps
        self._keeps = [any(True for _ in self.exchange.states(i)) for i in self.places.values()]
        # what was remembered before this step, by layer; room that is used again
        self._before: dict[int, list[Tensor]] = {}
        self._changed: list[int] = []  # layers of which this step has changed what is remembered
        self._skips = False  # whether something in this step was not finite
        # the type of 16 bits in which messages travel, where nothing else is done to them
        self._cast = _cast(spec) if not any(self._keeps) else None
        self._narrow: dict[tuple[int, ...], NarrowBucket] = {}  # by the layers of a bucket
        # layers used here since the last step; None: DistributedDataParallel does not look for
        # unused ones
        self._used: set[int] | None = None

    def attach(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Have it take the place of the all-reduce. Raises UserError on a model that is not wrapped
        in it.
        """
        if not isinstance(ddp, nn.parallel.DistributedDataParallel):
            raise UserError(
                "attach takes a torch.nn.parallel.DistributedDataParallel, not "
                f"{type(ddp).__name__}: for FSDP2's fully_shard use "
                "commsweep.integrations.fsdp.compress_fsdp; DataParallel and FSDP1 have no hook"
            )
        if ddp.process_group is not (self.group or dist.group.WORLD):
            raise UserError(
                "the hook and the DistributedDataParallel have different process groups; give "
                "both the same: CompressionHook(..., group=...)"
            )
        for name, module in ddp.module.named_modules():
            if isinstance(module, SPARSE) and module.sparse and module.weight.requires_grad:
                raise UserError(_sparse(f"{name}.weight"))
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self.places:
                raise UserError(
                    f"'{name}' was not a trained parameter when the hook was made: make the hook "
                    "of the model that DistributedDataParallel wraps, once all that trains does"
                )
        if ddp.find_unused_parameters or ddp.static_graph:
            self._note_used()
        try:
            ddp.register_comm_hook(self, _exchanged)
        except RuntimeError as error:
            raise UserError(
                f"this DistributedDataParallel has a hook already ({error}); wrap the model anew"
            ) from None

    def _note_used(self) -> None:
        """Have each backward note the layers that it reaches, before their gradients are sent."""
        used: set[int] = set()
        for index, parameter in enumerate(self.exchange.trained):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: used.add(index))
        self._used = used

    def totals(self) -> dict[str, Any]:
        """Bytes a step, by name, as in a run's row."""
        return self.exchange.ledger.totals()

    def report(self) -> str:
        """Return a sentence on what travelled."""
        totals = self.totals()
        return (
            f"gradients between {self.exchange.spec.learners} processes: "
            f"{totals['up']:,.0f} bytes a step and process, {totals['rate']:.1f} times fewer than "
            f"uncompressed, in {self.exchange.ledger.steps} steps"
        )

    def gathered_states(self) -> list[dict[str, Any]]:
        """Return the `state_dict` of each process, on the host; every process must ask for it."""
        return gathered_states(dict(self.state_dict()), self.group)

    def get_extra_state(self) -> dict[str, int]:
        learners = self.exchange.spec.learners
        return {"step": self.step, "epoch": self.epoch, "learners": learners}

    def set_extra_state(self, state: dict[str, int]) -> None:
        learners = self.exchange.spec.learners
        if state.get("learners", learners) != learners:
            raise UserError(
                f"the hook's state is a state of {state['learners']} processes, and the process "
                f"group has {learners}: resume with as many, or begin with a new hook"
            )
        self.step, self.epoch = state["step"], state["epoch"]

    def begin(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start the exchange of a dist.GradBucket; its buffer, once the means are in it.

        The backward goes on meanwhile. Buckets are exchanged one after the other, in the order in
        which all processes fill them.
        """
        buffer, last = bucket.buffer(), bucket.is_last()
        if buffer.is_sparse:
            raise UserError(_sparse("a parameter"))
        views = {
            self.places[id(p)]: _as_it_lies(p, grad)
            for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }
        if self._sums:
            return self._summed(views, buffer, last)
        if self._cast is not None and self._used is None and buffer.dtype == torch.float32:
            return self._narrowed(views, buffer, last)
        cuda = buffer.device.type == "cuda"
        done: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if cuda else None
        )
        filled = torch.cuda.current_stream(buffer.device).record_event() if cuda else None

        def work() -> None:
            try:
                if filled is not None:
                    torch.cuda.current_stream(buffer.device).wait_event(filled)
                with torch.no_grad():
                    self.exchanged(views, buffer)
                if last:
                    self.ended()
                done.set_result(buffer)
            except BaseException as error:
                done.set_exception(error)  # pyright: ignore[reportArgumentType]

        self._thread.submit(work)
        return done

    @property
    def _sums(self) -> bool:
        """Return whether nothing is compressed or remembered in this step: gradients can be summed
        up.
        """
        dense = self.exchange.spec.compressor.kind == "none"
        return (dense or self.epoch < self.exchange.spec.start_epoch) and not any(self._keeps)

    def _summed(
        self, views: dict[int, Tensor], buffer: Tensor, last: bool
    ) -> torch.futures.Future[Tensor]:
        """Return the sums that DistributedDataParallel itself would make, and count them."""
        for index, grad in views.items():
            self.exchange.ledger.dense(index, 1, grad.element_size())
        if last:
            self.ended()
        buffer.div_(dist.get_world_size(self._lane))
        work: Any = dist.all_reduce(buffer, group=self._lane, async_op=True)
        return work.get_future().then(lambda arrived: arrived.value()[0])

    def _narrowed(
        self, views: dict[int, Tensor], buffer: Tensor, last: bool
    ) -> torch.futures.Future[Tensor]:
        """Send a bucket in 16 bits, and count it; its mean, to the bits that messages for single
        layers give.
        """
        layers, scale = tuple(views), self._scale
        if (bucket := self._narrow.get(layers)) is None:
            wide = [self._plain(index) for index in layers]
            layout = stretches(list(views.values()), wide, buffer)
            bucket = self._narrow[layers] = NarrowBucket(layout, self._cast)  # pyright: ignore[reportArgumentType]
        for index, grad in views.items():
            if self._plain(index):
                self.exchange.ledger.dense(index, 1, grad.element_size())
            else:
                self.exchange.messages[index] += 1
                self.exchange.ledger.sent(index, 2 * grad.numel())
        packed = bucket.pack(buffer, scale)
        arrived = packed.new_empty(dist.get_world_size(self._lane) * len(packed))
        work: Any = dist.all_gather_into_tensor(arrived, packed, group=self._lane, async_op=True)
        if last:
            self.ended()

        def average(_: Any) -> Tensor:
            bucket.average(arrived.split(len(packed)), buffer, scale)
            return buffer

        return work.get_future().then(average)

    def exchanged(self, views: dict[int, Tensor], buffer: Tensor) -> None:
        """Put the mean of what arrives of these layers' gradients, views of a buffer, into their
        place.
        """
        if self._looks and (self._skips or not self._finite(buffer)):
            self._skip(views.values())
            return
        views = self._layers_due(views)
        if not views:
            return
        taken = {index: self._taken(index, grad) for index, grad in views.items()}
        for index in views:
            if self._keeps[index]:
                self._note(index)
        tensors: list[Tensor | None] = [None] * len(self.exchange.trained)
        for index, grad in taken.items():
            tensors[index] = grad
        for index, merged in self.exchange.begin(
            [tensors], self.step, self.epoch, views.keys()
        )().items():
            views[index].copy_(merged if self._plain(index) else merged * self._scale)

    def _layers_due(self, views: dict[int, Tensor]) -> dict[int, Tensor]:
        """The layers that some learner used in this step; the gradients of the others become 0."""
        if self._used is None:
            return views
        used = torch.tensor([float(index in self._used) for index in views])
        used = used.to(next(iter(views.values())).device)
        dist.all_reduce(used, dist.ReduceOp.MAX, self._lane)
        layers_due = {}
        for (index, view), anywhere in zip(views.items(), used.tolist(), strict=True):
            if anywhere:
                layers_due[index] = view
            else:
                view.zero_()
        return layers_due

    def ended(self) -> None:
        """All gradients of a step have been exchanged."""
        if self._used is not None:
            self._used.clear()
        self._changed, self._skips = [], False
        self.step += 1
        self.exchange.ledger.steps += 1

    @property
    def _scale(self) -> float:
        return self.scaler.get_scale() if self.scaler is not None else 1.0

    def _plain(self, index: int) -> bool:
        """Return whether a layer travels as it is and nothing of it is remembered."""
        dense = self.exchange.layers[index].dense or self.epoch < self.exchange.spec.start_epoch
        return dense and not self._keeps[index]

    def _taken(self, index: int, grad: Tensor) -> Tensor:
        """Return what the exchange is given of a gradient, which only reads it: in float32 and not
        scaled where it is compressed.
        """
        if self._plain(index):
            return grad.clone()
        return grad.float() if self._scale == 1 else grad.float() / self._scale

    def _finite(self, buffer: Tensor) -> bool:
        """Return whether these gradients of all learners are; the same answer at each."""
        # Where one is not, their sum is not. A sum that is too large for its type is looked into.
        return self._everywhere(buffer.sum(dtype=torch.float32).isfinite()) or self._everywhere(
            buffer.isfinite().all()
        )

    def _everywhere(self, flag: Tensor) -> bool:
        """Return whether a flag is true at all learners."""
        flags = flag.float()
        dist.all_reduce(flags, dist.ReduceOp.MIN, self._lane)
        return bool(flags)

    def _note(self, index: int) -> None:
        """Copy what is remembered of a layer, before this step changes it."""
        states = list(self.exchange.states(index))
        room = self._before.get(index)
        if room is None:
            self._before[index] = [state.clone() for state in states]
        else:
            for saved, state in zip(room, states, strict=True):
                saved.copy_(state)
        self._changed.append(index)

    def _skip(self, views: Iterable[Tensor]) -> None:
        """Forget what this step has remembered so far, and let the scalers of all learners skip
        it.
        """
        for index in self._changed:
            for state, saved in zip(self.exchange.states(index), self._before[index], strict=True):
                state.copy_(saved)
        self._changed, self._skips = [], True
        for view in views:
            view.fill_(torch.inf)


def _as_it_lies(p: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient of a bucket as the parameter lies in memory: a transposed one, or one in
    channels_last, is not contiguous, and a bucket holds it in the order of its memory.
    """
    if p.is_contiguous() or torch.empty_like(p, device="meta").stride() != p.stride():
        return grad  # the second: with gaps, which no bucket has
    return grad.as_strided(p.shape, p.stride(), grad.storage_offset())


def _cast(spec: Gradients) -> torch.dtype | None:
    """The type of 16 bits in which every compressed gradient travels; None: not so, or more is
    done to messages or to their mean.
    """
    name = spec.compressor.entry_type
    plain = spec.exchange == "allgather" and spec.collective == "exact" and not spec.vote
    varied = spec.layers or spec.transform or spec.start_epoch or spec.schedule.kind != "steady"
    return getattr(torch, name) if name is not None and plain and not varied else None


def _sparse(name: str) -> str:
    return (
        f"the gradient of {name} is sparse, which a CompressionHook does not send: make the "
        "embedding with sparse=False"
    )


@torch.no_grad()
def _exchanged(hook: CompressionHook, bucket):  # torch reads annotations as types
    """Return what DistributedDataParallel calls with each full dist.GradBucket."""
    return hook.begin(bucket)

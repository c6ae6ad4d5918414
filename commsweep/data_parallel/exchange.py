"""The exchange of weight gradients between learners: compressed, sent and averaged, every byte
counted.

A learner's message for a layer is what it would send to others; what the optimizer sees is the mean
of what arrives. Whether the other learners are in this process or in processes of their own is the
collectives' matter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commsweep import seeds
from commsweep.collectives import Collectives, Decided, Message, Simulated, mean
from commsweep.compressors import Compressor, message
from commsweep.compressors.live_entries import LiveEntries
from commsweep.compressors.sparse import TILE
from commsweep.compressors.transform import transformed
from commsweep.config.gradients import Gradients
from commsweep.data_parallel import hops
from commsweep.data_parallel.joint import JointCompressor, build
from commsweep.data_parallel.layers import Layer, layers
from commsweep.data_parallel.ledger import Ledger
from commsweep.data_parallel.schedules import Accordion, greatest, scheduled
from commsweep.feedback import gradient_memories as feedback
from commsweep.modules import Modules

# what the optimizer sees of the layers of a bucket, once it is there
Arrival = Callable[[], list[Tensor]]
WHAT = "gradients"


class Merge:
    """A change of the messages of a layer, or of their mean."""

    def messages(self, arrived: list[Tensor]) -> list[Tensor]:
        """Return the messages of all learners as they enter the mean."""
        return arrived

    def mean(self, mean: Tensor, arrived: list[Tensor]) -> Tensor:
        """Return the mean as it is used; arrived: what it was made of."""
        return mean


class Exchange(nn.Module):
    """The exchange of one model's gradients: residues of the learners here, what is sent, and its
    ledger.
    """

    def __init__(
        self,
        spec: Gradients,
        model: nn.Module,
        seed: int,
        collectives: Collectives | None = None,
        network_layers: dict[int, Layer] | None = None,
    ) -> None:
        """network_layers: the layers of the network that the model is one stage of, by the identity
        of their parameters.
        """
        super().__init__()
        self.spec, self.seed = spec, seed
        self.collectives = collectives or Simulated(spec.learners)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.layers = layers(model, spec, network_layers)
        self.memories: Modules[Any] = Modules(
            self._memories(learner) for learner in range(self.collectives.learners)
        )
        # by group of layers; "": of all others
        self.bases: dict[str, Any] = {
            group: build(spec.compressor_of(group)) for group in ("", *spec.layers)
        }
        for index, layer in enumerate(self.layers):
            if not layer.dense:
                self.register_buffer(f"kept{index}", self._first_state(index))
        self._join_devices()
        self.merges: Sequence[Merge] = ()
        self.messages = [0] * len(self.layers)  # compressed ones of a learner, of each layer
        self.accordion = Accordion(spec, self.layers) if spec.schedule.kind == "accordion" else None
        self.ledger = Ledger(self.layers, spec, len(self.collectives.here))
        self.digest = message.digest(str(spec))
        self.collected: list[list[Tensor]] = []
        self.live: dict[int, Tensor] = {}  # of layers with masks: flat places of their live weights
        self._summed: list[Tensor] = []  # of the local steps of the learner whose turn it is
        self._shared: list[Tensor] = []

    def _join_devices(self) -> None:
        """Move what is kept of a layer to where its parameter is, unless that is nowhere yet."""
        for index, parameter in enumerate(self.trained):
            if parameter.is_meta:
                continue
            for memories in self.memories:
                memories[index].to(parameter.device)
            if (state := self._state(index)) is not None:
                self._buffers[f"kept{index}"] = state.to(parameter.device)

    def _first_state(self, index: int) -> Tensor | None:
        """Return what the compressor of a layer keeps between messages, before the first one: of
        all learners together where it is a joint one, else of each learner here.
        """
        base = self.base(index)
        if isinstance(base, JointCompressor):
            layer = self.layers[index]
            shape = layer.shape[::-1] if self._as_matrix(index) else layer.shape
            compressor: Any = greatest(self.spec, base)
            return compressor.begin(
                torch.Size(shape), seeds.draw(seeds.GRADIENT_FACTOR, self.seed, layer.place)
            )
        state = base.sender_state(torch.Size([1, *self.layers[index].shape]))
        if state is None:
            return None
        return torch.stack([state] * len(self.collectives.here))

    def base(self, index: int) -> Any:
        """The compressor of a layer before any schedule: a Compressor or a JointCompressor."""
        return self.bases[self.layers[index].group]

    def states(self, index: int) -> Iterable[Tensor]:
        """Return all that is kept of a layer between steps, by memories and by the compressor."""
        for memories in self.memories:
            yield from memories[index].buffers()
        if (state := self._state(index)) is not None:
            yield state

    def _state(self, index: int) -> Tensor | None:
        return getattr(self, f"kept{index}", None)

    def _memories(self, learner: int) -> nn.ModuleList:
        """Return the memories of a learner here, one a layer; of another one only what its
        receivers must.
        """
        make = feedback.build if learner in self.collectives.here else feedback.mirror
        return nn.ModuleList(
            make(self.spec.feedback, layer.shape, self.spec.learners, layer.dense)
            for layer in self.layers
        )

    @property
    def installed(self) -> Gradients:
        """The settings as installed, read back from the objects."""
        memory = self.memories[self.collectives.here[0]]
        remembered = [
            memory for memory, layer in zip(memory, self.layers, strict=True) if not layer.dense
        ]
        return self.spec.model_copy(
            update={
                "learners": len(self.memories),
                "compressor": self.bases[""].spec,
                "layers": {
                    name: group.model_copy(update={"compressor": self.bases[name].spec})
                    for name, group in self.spec.layers.items()
                },
                "feedback": remembered[0].spec if remembered else self.spec.feedback,
            }
        )

    @torch.no_grad()
    def step_locally(self, rate: float) -> None:
        """A learner's SGD step on its own weights; its gradients are summed until it is
        collected.
        """
        if not self._summed:
            self._shared = [p.detach().clone() for p in self.trained]
            self._summed = [torch.zeros_like(p) for p in self.trained]
        for p, total in zip(self.trained, self._summed, strict=True):
            if p.grad is not None:
                total += p.grad
                p.sub_(p.grad, alpha=rate)
                p.grad = None

    @torch.no_grad()
    def collect(self, weight: float) -> None:
        """Take the gradients of the next learner from the parameters; `weight` is its share of the
        batch times n.
        """
        grads = []
        for index, p in enumerate(self.trained):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            if self._summed:  # back to the weights that all learners share
                grad = self._summed[index].add_(grad)
                p.copy_(self._shared[index])
            grads.append(grad if weight == 1 else grad * weight)
            p.grad = None
        self._summed, self._shared = [], []
        self.collected.append(grads)

    def reduce(self, step: int, epoch: int) -> None:
        """Give the parameters the mean of what arrives of the collected gradients.

        A bucket is prepared while the one before it travels.
        """
        learners, self.collected = self.collected, []
        self.ledger.steps += 1
        under_way: list[tuple[list[int], Arrival]] = []
        for bucket in self.buckets(epoch):
            under_way.append(
                (
                    bucket,
                    self.start(
                        bucket,
                        [[tensors[index] for index in bucket] for tensors in learners],
                        step,
                        epoch,
                    ),
                )
            )
            if len(under_way) > 1:
                self._give(*under_way.pop(0))
        for bucket, arrival in under_way:
            self._give(bucket, arrival)

    def begin(
        self, learners: list[list[Tensor | None]], step: int, epoch: int, among: Collection[int]
    ) -> Callable[[], dict[int, Tensor]]:
        """Send what the learners here have to say [learner here][layer] of these layers; what
        arrives, by layer.
        """
        under_way = [
            (
                bucket,
                self.start(
                    bucket,
                    [[tensors[index] for index in bucket] for tensors in learners],  # pyright: ignore[reportArgumentType]
                    step,
                    epoch,
                ),
            )
            for bucket in self.buckets(epoch, among)
        ]
        return lambda: {
            index: merged
            for bucket, arrival in under_way
            for index, merged in zip(bucket, arrival(), strict=True)
        }

    def _give(self, bucket: list[int], arrival: Arrival) -> None:
        for index, merged in zip(bucket, arrival(), strict=True):
            p = self.trained[index]
            # A fused optimizer walks through memory: a gradient must lie there as its parameter
            # does.
            p.grad = merged if merged.stride() == p.stride() else torch.empty_like(p).copy_(merged)

    def buckets(self, epoch: int, among: Collection[int] | None = None) -> Iterator[list[int]]:
        """Layers that travel together: of one way (dense, each learner's own message, or one of the
        joint compressors), in order, up to the collectives' size; of all layers, or `among` these.
        """
        chosen = range(len(self.layers)) if among is None else sorted(among)
        ways = {index: self._group_of(index, epoch) for index in chosen}
        for group in sorted(set(ways.values())):
            bucket, size = [], 0
            for index in chosen:
                if ways[index] != group:
                    continue
                layer = self.layers[index]
                if bucket and size + layer.dense_bytes > self.collectives.bucket:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(index)
                size += layer.dense_bytes
            if bucket:
                yield bucket

    def _group_of(self, index: int, epoch: int) -> tuple[int, str]:
        """Return how a layer travels, in the order in which the ways take their turns."""
        if self.layers[index].dense or epoch < self.spec.start_epoch:
            return 0, ""
        base = self.base(index)
        return (2, base.spec.kind) if isinstance(base, JointCompressor) else (1, "")

    def send(self, index: int, grads: list[Tensor], step: int, epoch: int) -> Tensor:
        """The mean of what arrives of a layer's gradients, given those of the learners here."""
        return self.start([index], [[grad] for grad in grads], step, epoch)()[0]

    def start(self, bucket: list[int], grads: list[list[Tensor]], step: int, epoch: int) -> Arrival:
        """Send the gradients [learner here][layer] of a bucket."""
        if self.layers[bucket[0]].dense or epoch < self.spec.start_epoch:
            return self._start_dense(bucket, grads)
        compressors = [self.compressor(index, epoch) for index in bucket]
        if isinstance(compressors[0], JointCompressor):
            return self._start_joint(bucket, compressors, grads, step)
        if self.spec.collective != hops.EXACT:
            return self._start_hops(bucket, compressors, grads, step)
        return self._start_own(bucket, compressors, grads, step)

    def _start_dense(self, bucket: list[int], grads: list[list[Tensor]]) -> Arrival:
        learners_here = self.collectives.here
        under_way = self.collectives.gather(
            [
                [
                    self.memories[learner][index].dense(grad)
                    for index, grad in zip(bucket, tensors, strict=True)
                ]
                for learner, tensors in zip(learners_here, grads, strict=True)
            ],
            WHAT,
        )

        def arrival() -> list[Tensor]:
            merged = []
            for index, messages in zip(bucket, zip(*under_way.wait(), strict=True), strict=True):
                for learner, grad in enumerate(messages):
                    if learner not in learners_here:
                        self.memories[learner][index].saw(grad)
                self.ledger.dense(index, len(learners_here), messages[0].element_size())
                merged.append(mean(list(messages)))
            return merged

        return arrival

    def _start_joint(
        self,
        bucket: list[int],
        compressors: list[Any],
        grads: list[list[Tensor]],
        step: int,
    ) -> Arrival:
        offered = self._offered(bucket, grads)
        messages = [
            [self._by_outputs(index, m) for index, m in zip(bucket, row, strict=True)]
            for row in offered
        ]
        states = [self._state(index) for index in bucket]
        arrived, used = type(compressors[0]).combine(
            compressors, messages, states, step, self.collectives
        )
        arrived = [
            [self._by_outputs(index, y) for index, y in zip(bucket, messages, strict=True)]
            for messages in arrived
        ]
        if used is not None:
            used = [self._by_outputs(index, y) for index, y in zip(bucket, used, strict=True)]
        n, n_here = self.collectives.learners, len(self.collectives.here)
        for index, compressor in zip(bucket, compressors, strict=True):
            nbytes = round(compressor.nbytes(self.layers[index].shape, n) * n_here)
            self.ledger.sent(index, nbytes, messages=n_here)

        def arrival() -> list[Tensor]:
            merged = [
                self._settled(
                    index, [row[at] for row in offered], [messages[at] for messages in arrived]
                )
                for at, index in enumerate(bucket)
            ]
            return merged if used is None else used

        return arrival

    def _as_matrix(self, index: int) -> bool:
        """Return whether a joint compressor takes a layer transposed, because its rows are the
        layer's outputs.
        """
        return self.layers[index].turned and self.base(index).outputs_as_rows

    def _by_outputs(self, index: int, x: Tensor) -> Tensor:
        """A layer's matrix as the compressor takes it, or from there back."""
        return x.mT if self._as_matrix(index) else x

    def _start_own(
        self, bucket: list[int], compressors: list[Any], grads: list[list[Tensor]], step: int
    ) -> Arrival:
        learners_here = self.collectives.here
        offered: list[list[Tensor]] = []
        messages: list[list[Message]] = []
        for index_, tensors in enumerate(grads):
            offered.append([])
            messages.append([])
            for index, compressor, grad in zip(bucket, compressors, tensors, strict=True):
                m, sent = self._message(index, index_, compressor, grad, step)
                offered[index_].append(m)
                messages[index_].append(sent)
        for index in bucket:
            self.messages[index] += 1
        under_way = self.collectives.share(messages, message.Address(self.digest, step), WHAT)

        def arrival() -> list[Tensor]:
            learner_messages, merged = under_way.wait(), []
            for at, index in enumerate(bucket):
                arrived = [message[at] for message in learner_messages]
                for learner, messages_ in zip(learners_here, messages, strict=True):
                    self.ledger.sent(
                        index,
                        messages_[at].nbytes,
                        self._entries(index, messages_[at], arrived[learner]),
                        of=self._numel(index),
                    )
                merged.append(self._settled(index, [row[at] for row in offered], arrived))
            return merged

        return arrival

    def _start_hops(
        self, bucket: list[int], compressors: list[Any], grads: list[list[Tensor]], step: int
    ) -> Arrival:
        """Sum the gradients of a bucket in codes that every hop rounds again."""

        def draw(at: int, learner: int, hop: int) -> int:
            number = self.layers[bucket[at]].place
            return seeds.draw(seeds.EXCHANGE, self.seed, number, learner, step, hop)

        address = message.Address(self.digest, step)
        sum_ = hops.Hops(self.collectives, compressors, draw, address)
        summed = sum_.reduce(self.spec.collective, grads)
        for index, counts in zip(bucket, summed.sent, strict=True):
            self.messages[index] += 1
            for count in counts:
                self.ledger.sent_parts(index, count)
        return lambda: summed.means

    def _message(
        self, index: int, learner_at: int, compressor: Compressor, grad: Tensor, step: int
    ) -> tuple[Tensor, Message]:
        """Return what the learner here of this turn offers of a layer's gradient, and its
        message.
        """
        learner = self.collectives.here[learner_at]
        memory = self.memories[learner][index]
        if (decided := memory.step(compressor, grad)) is not None:
            return decided[0], Decided(compressor, *decided)
        m = memory.offer(grad)
        x = self._transformed(index, m)
        if (state := self._state(index)) is not None:
            compressor = compressor.for_message(x[None], state[learner_at], self.messages[index])
        return m, Message(compressor, x, self._draw(index, learner, step))

    def _offered(self, bucket: list[int], grads: list[list[Tensor]]) -> list[list[Tensor]]:
        """Return what the learners here have to say of their gradients, [learner here][layer]."""
        return [
            [
                self.memories[learner][index].offer(grad)
                for index, grad in zip(bucket, tensors, strict=True)
            ]
            for learner, tensors in zip(self.collectives.here, grads, strict=True)
        ]

    def _settled(self, index: int, offered: list[Tensor], arrived: list[Tensor]) -> Tensor:
        """The gradient for the optimizer; every memory has heard what arrived of its learner's
        message.
        """
        own_messages = dict(zip(self.collectives.here, offered, strict=True))
        back = [self._transformed(index, y, back=True) for y in arrived]
        used = [
            self.memories[learner][index].settle(own_messages.get(learner), y)
            for learner, y in enumerate(back)
        ]
        # a memory uses what it has become, not what came
        if self.spec.transform is None or used[0] is not back[0]:
            return self.merge(index, used)
        # where places are those that were sent
        return self._transformed(index, self.merge(index, arrived), back=True)

    def _transformed(self, index: int, x: Tensor, back: bool = False) -> Tensor:
        """A layer's message as it is compressed, or from there back."""
        if self.spec.transform is None:
            return x
        return transformed(
            x, self.spec.transform, getattr(self.base(index).spec, "tile", None) or TILE, back
        )

    def _numel(self, index: int) -> int:
        """Entries of a layer's messages: those that live."""
        return len(self.live[index]) if index in self.live else self.layers[index].shape.numel()

    def _entries(self, index: int, sent: Message, y: Tensor) -> Tensor | int:
        """Entries of a message that arrives as y, where each learner chooses its places."""
        if sent.entries is not None:
            return sent.entries
        return torch.count_nonzero(y) if self.base(index).spec.own_places else 0

    def merge(self, index: int, used: list[Tensor]) -> Tensor:
        """The gradient that the optimizer sees; and what a server would send back."""
        for change in self.merges:
            used = change.messages(used)
        merged = mean(used)
        for change in self.merges:
            merged = change.mean(merged, used)
        if self.spec.vote:
            size = mean([y.abs() for y in used])
            merged = torch.where(merged >= 0, size, -size)
        if self.spec.exchange == "server":
            base = self.base(index)
            joint = isinstance(base, JointCompressor)
            nbytes = base.returned_bytes(merged.shape) if joint else None
            self.ledger.back(index, merged, self._numel(index), nbytes)
        if self.accordion is not None:
            self.accordion.add(index, merged)
        return merged

    def compressor(self, index: int, epoch: int) -> Compressor | JointCompressor:
        """Return what a layer's messages go through in this epoch."""
        scheduled_ = scheduled(
            self.spec,
            self.base(index),
            epoch,
            self.accordion is not None and self.accordion.mild[index],
        )
        return (
            LiveEntries(scheduled_, self.live[index], self.layers[index].shape)  # pyright: ignore[reportArgumentType]
            if index in self.live
            else scheduled_
        )

    def _draw(self, index: int, learner: int, step: int) -> int:
        """Seed of a message; learners that must choose the same places share theirs."""
        return seeds.draw(
            seeds.EXCHANGE,
            self.seed,
            self.layers[index].place,
            0 if self.base(index).spec.shared_draw else learner,
            step,
        )

    def epoch_ended(self, epoch: int) -> None:
        """Let Accordion decide."""
        if self.accordion is not None:
            self.accordion.decide(epoch)

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.state(),
            "messages": self.messages,
            "accordion": self.accordion.state() if self.accordion else {},
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.ledger.load(state["ledger"])
        self.messages = state["messages"]
        if self.accordion is not None:
            self.accordion.load(state["accordion"])

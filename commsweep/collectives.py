"""The messages between learners: gather, broadcast and all-reduce, simulated in one process or
between processes.

Whoever exchanges something hands in the parts of the learners that are here and gets what all
learners would have; the code around it is the same for both kinds. Parts are lists of tensors,
[learner here][tensor], so that many small ones travel as one. Sums are taken in the learners'
order, because sums of floats depend on it: both kinds end with the same bits.
"""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from commsweep.compressors import Compressor, message
from commsweep.compressors.base import Payload
from commsweep.errors import UserError

T = TypeVar("T")
Parts = list[list[Tensor]]
BUCKET = 25 * 2**20  # bytes of dense gradients that travel together, as in DistributedDataParallel


class Handle(Generic[T]):
    """Something under way; `wait` returns it."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self.wait = finish


class Message:
    """A learner's message for one layer x [*layer]: through a compressor, with a seed."""

    entries: int | Tensor | None = None  # in it, where its maker has counted them

    def __init__(self, compressor: Compressor, x: Tensor, seed: int) -> None:
        self.compressor, self.x, self.seed = compressor, x, seed
        self.nbytes: int | Tensor = 0

    def arrive(self) -> Tensor:
        """Return what its receivers see; nothing is packed."""
        y = self.compressor.apply(self.x[None], self.seed)
        self.nbytes = self.compressor.bytes_sent(y)
        return y[0]

    def pack(self) -> Payload:
        """Return what travels. Unchecked: a value that is not finite must reach whoever looks for
        it.
        """
        payload = self.compressor._encode(self.x[None], self.seed)
        self.nbytes = payload.nbytes
        return payload


def _by_sample(compressor: Compressor, x: Tensor) -> bool:
    """Return whether a batch of such tensors is coded each sample by itself, and without draws."""
    spec = compressor.spec
    if compressor.seeded:
        return False
    if spec.kind == "mx":  # whose blocks reach over samples, and NVFP4's scale over all
        return spec.format != "nvfp4" and x.numel() % spec.block == 0
    # scales of a tensor and of a channel reach over samples
    by_row = spec.kind == "uniform" and spec.scale not in ("tensor", "channel")
    return spec.kind == "cast" or by_row


def arrive_together(messages: list[Message]) -> list[Tensor]:
    """Return what arrives of messages that have one compressor and one shape. They are coded as the
    samples of one batch where that gives the same bits.
    """
    compressor = messages[0].compressor
    if not _by_sample(compressor, messages[0].x):
        return [sent.arrive() for sent in messages]
    y = compressor.apply(torch.stack([sent.x for sent in messages]), 0)
    for sent in messages:
        sent.nbytes = compressor.bytes_sent(y[:1])
    return list(y)


class Decided(Message):
    """A message whose maker knows already what arrives: y [*layer], of `nbytes`, with so many
    entries.
    """

    def __init__(
        self, compressor: Any, y: Tensor, nbytes: int | Tensor, entries: int | Tensor
    ) -> None:
        super().__init__(compressor, y, 0)
        self.nbytes, self.entries = nbytes, entries

    def arrive(self) -> Tensor:
        return self.x

    def pack(self) -> Payload:
        payload = self.compressor.pack(self.x[None])  # pyright: ignore[reportAttributeAccessIssue]
        self.nbytes = payload.nbytes
        return payload


def gathered(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every process of a group (None: of all) says, as JSON has it (tuples become
    lists); not counted.

    Processes exchange JSON and the bytes of tensors only: a pickle could run code of whoever sent
    it.
    """
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    return [
        json.loads(bytes(gathered_byte.numpy())) for gathered_byte in _gathered_bytes(text, group)
    ]


def gathered_tensors(
    mine: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> list[dict[str, Tensor]]:
    """Every process's named tensors, which may differ in number and shape; on the host."""
    layouts = gathered(
        [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in mine.items()
        ],
        group,
    )
    joined = _joined([tensor.cpu() for tensor in mine.values()])
    buffers = _gathered_bytes(joined, group)
    return [
        dict(
            zip(
                (name for name, _, _ in layout),
                _parted(
                    received,
                    [torch.empty(shape, dtype=getattr(torch, kind)) for _, kind, shape in layout],
                ),
                strict=True,
            )
        )
        for layout, received in zip(layouts, buffers, strict=True)
    ]


def gathered_states(
    mine: dict[str, Any], group: dist.ProcessGroup | None = None
) -> list[dict[str, Any]]:
    """Every process's state of tensors and plain values, on the host."""
    file = io.BytesIO()
    torch.save(mine, file)
    sent = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return [
        torch.load(io.BytesIO(bytes(came.numpy())), map_location="cpu", weights_only=True)
        for came in _gathered_bytes(sent, group)
    ]


def _gathered_bytes(mine: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every process's bytes, uint8 [any], on the host."""
    device = torch.device("cuda" if str(dist.get_backend(group)) == "nccl" else "cpu")
    sizes = [
        torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine.to(device)
    buffers = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(buffers, padded, group)
    return [buffer[:length].cpu() for buffer, length in zip(buffers, lengths, strict=True)]


def told_by_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The first process's value, as JSON has it."""
    return gathered(value if dist.get_rank(group) == 0 else None, group)[0]


class Collectives:
    """Base: the learners there are, those of this process, and the bytes handed to a transport, by
    what they were.
    """

    bucket = 0  # bytes of layers that go together; 0: each for itself
    waited = 0.0  # seconds of this process for what was under way
    # that it computed since it sent its last message, before it waited for what answers it
    meanwhile = 0.0

    def __init__(self, learners: int, learners_here: tuple[int, ...]) -> None:
        self.learners, self.here = learners, learners_here
        self.sent: Counter[str] = Counter()
        # of these, what says where a message belongs and ends
        self.framing: Counter[str] = Counter()

    def gather(self, tensors: Parts, label: str) -> Handle[Parts]:
        """Every learner's tensors, [learner][tensor]; all have the same shapes."""
        raise NotImplementedError

    def broadcast(
        self,
        tensors: Callable[[int], list[Tensor]],
        leader: int,
        label: str,
        among: tuple[int, ...] | None = None,
    ) -> Handle[list[Tensor]]:
        """The leader's tensors; `parts(i)` makes those of the i-th learner here, of the leader's
        shapes.

        among: the learners that get them (None: all); the others must not ask.
        """
        raise NotImplementedError

    def share(
        self,
        messages: list[list[Message]],
        address: message.Address,
        label: str,
        even: bool = False,
    ) -> Handle[Parts]:
        """Return what arrives of every learner's messages, [learner][layer]. Raises UserError on
        bytes that are none.

        even: all learners' messages are of one length, which needs not be told first.
        """
        raise NotImplementedError

    def scatter(
        self, messages: list[dict[int, list[Message]]], address: message.Address, label: str
    ) -> Handle[list[Parts]]:
        """An all-to-all: messages [learner here]{to whom: [layer]}, each of a length that its shape
        says, to as many others, or none, as one has messages from. [learner here][from whom, in
        order][layer] of what arrives.
        """
        raise NotImplementedError

    def pass_on(
        self,
        messages: list[list[Message]],
        to: Sequence[Sequence[int]],
        address: message.Address,
        label: str,
    ) -> Handle[Parts]:
        """Send the messages [learner here][layer] to some other learners or none; to: these, of
        every learner, so that each hears of one at most. All messages of a layer have a length that
        their shape says. What arrives at the learners here, [learner here][layer]; empty where
        nobody sends.
        """
        raise NotImplementedError

    def swap(self, tensors: Parts, partners: list[int], label: str) -> Handle[Parts]:
        """Return the tensors of each learner's partner; partners: of every learner, each other's.
        All have the same shapes.
        """
        raise NotImplementedError

    def agree(self, value: T) -> T:
        """The first learner's value, small and as JSON has it."""
        return value

    def all_reduce(self, tensors: Parts, label: str) -> Handle[list[Tensor]]:
        """The mean of the learners' tensors, in their order."""
        gathered = self.gather(tensors, label)
        return Handle(lambda: [mean(list(column)) for column in zip(*gathered.wait(), strict=True)])


class Simulated(Collectives):
    """All learners are in this process, and nothing travels."""

    def __init__(self, learners: int) -> None:
        super().__init__(learners, tuple(range(learners)))

    def gather(self, tensors: Parts, label: str) -> Handle[Parts]:
        return Handle(lambda: tensors)

    def broadcast(
        self,
        tensors: Callable[[int], list[Tensor]],
        leader: int,
        label: str,
        among: tuple[int, ...] | None = None,
    ) -> Handle[list[Tensor]]:
        sent = tensors(leader)
        return Handle(lambda: sent)

    def share(
        self,
        messages: list[list[Message]],
        address: message.Address,
        label: str,
        even: bool = False,
    ) -> Handle[Parts]:
        arrived = [[payload.arrive() for payload in message] for message in messages]
        return Handle(lambda: arrived)

    def scatter(
        self, messages: list[dict[int, list[Message]]], address: message.Address, label: str
    ) -> Handle[list[Parts]]:
        arrived: list[Parts] = []
        for to in self.here:
            rows = [outbox[to] for outbox in messages if to in outbox]
            columns = [arrive_together(list(column)) for column in zip(*rows, strict=True)]
            arrived.append([list(row) for row in zip(*columns, strict=True)])
        return Handle(lambda: arrived)

    def pass_on(
        self,
        messages: list[list[Message]],
        to: Sequence[Sequence[int]],
        address: message.Address,
        label: str,
    ) -> Handle[Parts]:
        arrived: Parts = [[] for _ in self.here]
        senders = [k for k, receivers in enumerate(to) if receivers]
        for column in zip(*(messages[sender] for sender in senders), strict=True):
            for sender, y in zip(senders, arrive_together(list(column)), strict=True):
                for receiver in to[sender]:
                    arrived[receiver].append(y)
        return Handle(lambda: arrived)

    def swap(self, tensors: Parts, partners: list[int], label: str) -> Handle[Parts]:
        return Handle(lambda: [tensors[partner] for partner in partners])


def needs_group(label: str) -> None:
    """Raise UserError unless this process belongs to a process group, which `label` needs."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            f"{label} belongs to a process group, and there is none: call "
            "torch.distributed.init_process_group first"
        )


class Processes(Collectives):
    """Collectives between processes, each with one learner, over torch.distributed."""

    bucket = BUCKET

    def __init__(self, ring: bool = False, group: dist.ProcessGroup | None = None) -> None:
        """ring: sums go round one; slower over links with a latency, but many large ones beside
        computing flow evenly, and take what their sizes say. group: of processes that are learners
        to each other; None: all.
        """
        super().__init__(dist.get_world_size(group), (dist.get_rank(group),))
        self.ring, self.group, self._posts = ring, group, 0
        # gloo's sends and receives know the host's memory only, whatever the tensors are on
        self._by_host = str(dist.get_backend(group)) != "nccl"
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def among(self, groups: list[tuple[int, ...]]) -> None:
        """Make it possible to broadcast among some learners only; all processes must name the same
        groups.
        """
        for group in groups:
            if 1 < len(group) < self.learners and group not in self._groups:
                self._groups[group] = dist.new_group([self._rank(learner) for learner in group])  # pyright: ignore[reportArgumentType]

    def _rank(self, learner: int) -> int:
        """Return the rank of a learner's process among all processes."""
        return learner if self.group is None else dist.get_global_rank(self.group, learner)

    def gather(self, label: Parts, tensors: str) -> Handle[Parts]:
        mine = _joined(label[0])
        self.sent[tensors] += mine.numel()
        under_way = self._round(mine) if self.ring else self._exchanged(mine)
        return Handle(lambda: [_parted(buffer, label[0]) for buffer in under_way.wait()])

    def _round(self, mine: Tensor) -> Handle[list[Tensor]]:
        """The learners' bytes, all of as many as one's own, round a ring."""
        buffers = [torch.empty_like(mine) for _ in range(self.learners)]
        work = dist.all_gather(buffers, mine, self.group, async_op=True)

        def finish() -> list[Tensor]:
            self._wait(work)
            return buffers

        return Handle(finish)

    def scatter(
        self, messages: list[dict[int, list[Message]]], address: message.Address, label: str
    ) -> Handle[list[Parts]]:
        rank, mine = self.here[0], messages[0]
        payloads = {to: [message.pack() for message in outbox] for to, outbox in mine.items()}
        packed = {to: message.pack(payloads_to, address) for to, payloads_to in payloads.items()}
        came = {to: torch.empty_like(sent) for to, sent in packed.items()} | {rank: packed[rank]}
        ranks = [to for to in self._other_ranks() if to in packed]
        for to in ranks:
            self._count(label, packed[to].numel(), payloads[to])
        under_way = self._posted(packed, came, ranks)

        def finish() -> list[Parts]:
            under_way.wait()
            return [
                [self._read(came[k], mine[rank], payloads[rank], address) for k in sorted(came)]
            ]

        return Handle(finish)

    def pass_on(
        self,
        messages: list[list[Message]],
        to: Sequence[Sequence[int]],
        address: message.Address,
        label: str,
    ) -> Handle[Parts]:
        rank, mine = self.here[0], messages[0]
        sender = next((k for k, receivers in enumerate(to) if rank in receivers), None)
        if sender is None and not to[rank]:
            return Handle(lambda: [[]])
        # packed where nothing is sent, too: its length is that of what arrives
        payloads = [sent.pack() for sent in mine]
        packed = message.pack(payloads, address)
        out, into = dict.fromkeys(to[rank], packed), dict.fromkeys(to[rank], packed[:0])
        if sender is not None:
            out.setdefault(sender, packed[:0])
            into[sender] = torch.empty_like(packed)
        for _ in to[rank]:
            self._count(label, packed.numel(), payloads)
        under_way = self._posted(out, into, list(out))

        def finish() -> Parts:
            under_way.wait()
            if sender is None:
                return [[]]
            return [self._read(into[sender], mine, payloads, address)]

        return Handle(finish)

    def swap(self, label: Parts, partners: list[int], tensors: str) -> Handle[Parts]:
        mine, partner = _joined(label[0]), partners[self.here[0]]
        self.sent[tensors] += mine.numel()
        under_way = self._exchanged(mine, ranks=[partner])
        return Handle(lambda: [_parted(under_way.wait()[partner], label[0])])

    def _exchanged(
        self, mine: Tensor, sizes: list[int] | None = None, ranks: list[int] | None = None
    ) -> Handle[list[Tensor]]:
        """The learners' bytes, each of as many as one's own or of these sizes; everyone sends
        straight to everyone, or to these others.

        As many bytes as a ring takes, in one round instead of learners - 1.
        """
        rank, n = self.here[0], self.learners
        buffers = [
            mine if k == rank else mine.new_empty(mine.numel() if sizes is None else sizes[k])
            for k in range(n)
        ]
        ranks = self._other_ranks() if ranks is None else ranks
        under_way = self._posted(dict.fromkeys(ranks, mine), dict(enumerate(buffers)), ranks)

        def finish() -> list[Tensor]:
            under_way.wait()
            return buffers

        return Handle(finish)

    def _other_ranks(self) -> list[int]:
        """The other learners, from the next one on, so that not all begin with the same."""
        return [(self.here[0] + shift) % self.learners for shift in range(1, self.learners)]

    def _posted(
        self, out: dict[int, Tensor], into: dict[int, Tensor], ranks: list[int]
    ) -> Handle[None]:
        """To each of these others its bytes, and theirs into `into`; empty ones are not sent.

        Receives are posted before anything is sent: the word that one waits for a message must not
        itself wait behind what one sends.
        """
        moved = self._by_host and any(self._elsewhere(tensor) for tensor in out.values())
        landing = {
            k: into[k].new_empty(into[k].shape, device="cpu") if moved else into[k] for k in ranks
        }
        posted = [
            dist.P2POp(dist.irecv, landing[k], self._rank(k), self.group)
            for k in reversed(ranks)
            if into[k].numel()
        ]
        posted += [
            dist.P2POp(dist.isend, out[k].cpu() if moved else out[k], self._rank(k), self.group)
            for k in ranks
            if out[k].numel()
        ]
        self._posts += 1
        post, began, waited = self._posts, time.perf_counter(), self.waited
        works = dist.batch_isend_irecv(posted) if posted else []

        def finish() -> None:
            if works and post == self._posts:
                self.meanwhile += time.perf_counter() - began - (self.waited - waited)
            self._wait(*works)
            if moved:
                for k in ranks:
                    into[k].copy_(landing[k])

        return Handle(finish)

    @staticmethod
    def _elsewhere(tensor: Tensor) -> bool:
        """Return whether a tensor is not in the host's memory."""
        return tensor.device.type != "cpu"

    def _wait(self, *works: dist.Work) -> None:
        began = time.perf_counter()
        for work in works:
            work.wait()
        self.waited += time.perf_counter() - began

    def broadcast(
        self,
        tensors: Callable[[int], list[Tensor]],
        leader: int,
        label: str,
        among: tuple[int, ...] | None = None,
    ) -> Handle[list[Tensor]]:
        sent = tensors(0)
        if among is not None and len(among) == 1:
            return Handle(lambda: sent)
        mine, leads = _joined(sent), leader in self.here
        self.sent[label] += mine.numel() * leads
        if self.ring:
            work = dist.broadcast(
                mine,
                self._rank(leader),
                self._groups.get(among, self.group) if among else self.group,
                async_op=True,
            )
            under_way = Handle(lambda: self._wait(work))  # pyright: ignore[reportArgumentType]
        else:  # down a tree it would take a latency more for each of its levels
            ranks = (
                [k for k in self._other_ranks() if among is None or k in among]
                if leads
                else [leader]
            )
            ours, theirs = (mine, mine[:0]) if leads else (mine[:0], mine)
            under_way = self._posted(
                dict.fromkeys(ranks, ours), dict.fromkeys(ranks, theirs), ranks
            )

        def finish() -> list[Tensor]:
            under_way.wait()
            return _parted(mine, sent)

        return Handle(finish)

    def agree(self, value: T) -> T:
        return told_by_first(value, self.group)

    def share(
        self,
        messages: list[list[Message]],
        address: message.Address,
        label: str,
        even: bool = False,
    ) -> Handle[Parts]:
        even = even or all(_even(message) for message in messages[0])
        payloads = [message.pack() for message in messages[0]]
        mine = message.pack(payloads, address)
        self._count(label, mine.numel(), payloads)
        lengths = (
            None if even else self._exchanged(torch.tensor([mine.numel()], device=mine.device))
        )
        under_way = self._exchanged(mine) if even else None
        if not even:
            self.sent["lengths"] += 8

        def finish() -> Parts:
            arrived = under_way
            if arrived is None:
                assert lengths is not None
                arrived = self._exchanged(mine, [int(length) for length in lengths.wait()])
            return [self._read(text, messages[0], payloads, address) for text in arrived.wait()]

        return Handle(finish)

    def _count(self, label: str, packed: int, payloads: list[Payload]) -> None:
        """Note a message of so many bytes that is handed to the transport."""
        self.sent[label] += packed
        self.framing[label] += message.framing(payloads)

    @staticmethod
    def _read(
        text: Tensor, messages: list[Message], payloads: list[Payload], address: message.Address
    ) -> list[Tensor]:
        reader = message.Reader(text, address)
        arrived = [
            message.compressor.decode(reader.take(message.compressor, payload.shape))[0]
            for message, payload in zip(messages, payloads, strict=True)
        ]
        reader.finish()
        return arrived


def _even(message: Message) -> bool:
    """Return whether messages of its shape are all of one length, which then needs not be told."""
    try:
        return (
            message.compressor.formula_bytes(torch.Size([1, *message.x.shape]), message.x.dtype)
            >= 0
        )
    except NotImplementedError:
        return False


def mean(tensors: list[Tensor]) -> Tensor:
    """The mean in the order given; of one, or of one tensor that arrived from all, itself. Sums of
    16 bits are made in 32, because that of many learners may be none of 16.
    """
    if all(tensor is tensors[0] for tensor in tensors):
        return tensors[0]
    kind = tensors[0].dtype
    if kind in (torch.float16, torch.bfloat16):
        return summed([tensor.float() for tensor in tensors]).div_(len(tensors)).to(kind)
    return summed(tensors).div_(len(tensors))


def summed(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in the order given; a new tensor."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def sliced(x: Tensor, count: int) -> Tensor:
    """A layer as [count, elements], padded with zeros."""
    flat = x.reshape(-1)
    return functional.pad(flat, (0, -len(flat) % count)).view(count, -1)


def _joined(tensors: list[Tensor]) -> Tensor:
    """Tensors of any types as bytes, one after the other; a new tensor."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat(
        [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    )


def _parted(joined: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Inverse of `_joined`, of the shapes, types and layouts in memory of `like`."""
    out, at = [], 0
    for tensor in like:
        n = tensor.numel() * tensor.element_size()
        piece = joined[at : at + n].clone().view(tensor.dtype).reshape(tensor.shape)
        out.append(torch.empty_like(tensor).copy_(piece))
        at += n
    return out

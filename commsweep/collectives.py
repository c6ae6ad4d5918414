"""What learners say to each other: gather, broadcast and all-reduce, simulated in one process or
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
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
    """One learner's message for one layer x [*layer]: through a compressor, with a seed."""

    entries: int | Tensor | None = None  # in it, where its maker has counted them

    def __init__(self, compressor: Compressor, x: Tensor, seed: int) -> None:
        self.compressor, self.x, self.seed = compressor, x, seed
        self.nbytes: int | Tensor = 0

    def arrive(self) -> Tensor:
        """What its receivers see; nothing is packed."""
        y = self.compressor.apply(self.x[None], self.seed)
        self.nbytes = self.compressor.bytes_sent(y)
        return y[0]

    def pack(self) -> Payload:
        """What travels. Unchecked: a value that is not finite must reach whoever looks for it."""
        payload = self.compressor._encode(self.x[None], self.seed)
        self.nbytes = payload.nbytes
        return payload


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
    """What every process of a group (None: of all) says, as JSON has it (tuples become lists); not
    counted.

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
    every = gathered(
        [
            [name, str(one.dtype).removeprefix("torch."), list(one.shape)]
            for name, one in mine.items()
        ],
        group,
    )
    parts = _gathered_bytes(_joined([one.cpu() for one in mine.values()]), group)
    return [
        dict(
            zip(
                (name for name, _, _ in told),
                _parted(
                    part,
                    [torch.empty(shape, dtype=getattr(torch, kind)) for _, kind, shape in told],
                ),
                strict=True,
            )
        )
        for told, part in zip(every, parts, strict=True)
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
    every = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(every, padded, group)
    return [one[:length].cpu() for one, length in zip(every, lengths, strict=True)]


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

    def __init__(self, learners: int, here: tuple[int, ...]) -> None:
        self.learners, self.here = learners, here
        self.sent: Counter[str] = Counter()
        # of these, what says where a message belongs and ends
        self.framing: Counter[str] = Counter()

    def gather(self, parts: Parts, what: str) -> Handle[Parts]:
        """Every learner's tensors, [learner][tensor]; all have the same shapes."""
        raise NotImplementedError

    def broadcast(
        self,
        parts: Callable[[int], list[Tensor]],
        leader: int,
        what: str,
        among: tuple[int, ...] | None = None,
    ) -> Handle[list[Tensor]]:
        """The leader's tensors; `parts(i)` makes those of the i-th learner here, of the leader's
        shapes.

        among: the learners that get them (None: all); the others must not ask.
        """
        raise NotImplementedError

    def share(
        self, messages: list[list[Message]], address: message.Address, what: str, even: bool = False
    ) -> Handle[Parts]:
        """What arrives of every learner's messages, [learner][layer]. Raises UserError on bytes
        that are none.

        even: all learners' messages are of one length, which needs not be told first.
        """
        raise NotImplementedError

    def scatter(
        self, messages: list[dict[int, list[Message]]], address: message.Address, what: str
    ) -> Handle[list[Parts]]:
        """An all-to-all: messages [learner here]{to whom: [layer]}, each of a length that its shape
        says, to as many others, or none, as one has messages from. [learner here][from whom, in
        order][layer] of what arrives.
        """
        raise NotImplementedError

    def swap(self, parts: Parts, partners: list[int], what: str) -> Handle[Parts]:
        """Of each learner here its partner's tensors; partners: of every learner, each other's. All
        have the same shapes.
        """
        raise NotImplementedError

    def agree(self, value: T) -> T:
        """The first learner's value, small and as JSON has it."""
        return value

    def all_reduce(self, parts: Parts, what: str) -> Handle[list[Tensor]]:
        """The mean of the learners' tensors, in their order."""
        every = self.gather(parts, what)
        return Handle(lambda: [mean(list(column)) for column in zip(*every.wait(), strict=True)])


class Simulated(Collectives):
    """All learners are in this process, and nothing travels."""

    def __init__(self, learners: int) -> None:
        super().__init__(learners, tuple(range(learners)))

    def gather(self, parts: Parts, what: str) -> Handle[Parts]:
        return Handle(lambda: parts)

    def broadcast(
        self,
        parts: Callable[[int], list[Tensor]],
        leader: int,
        what: str,
        among: tuple[int, ...] | None = None,
    ) -> Handle[list[Tensor]]:
        made = parts(leader)
        return Handle(lambda: made)

    def share(
        self, messages: list[list[Message]], address: message.Address, what: str, even: bool = False
    ) -> Handle[Parts]:
        arrived = [[one.arrive() for one in own] for own in messages]
        return Handle(lambda: arrived)

    def scatter(
        self, messages: list[dict[int, list[Message]]], address: message.Address, what: str
    ) -> Handle[list[Parts]]:
        arrived = [
            [[one.arrive() for one in own[to]] for own in messages if to in own] for to in self.here
        ]
        return Handle(lambda: arrived)

    def swap(self, parts: Parts, partners: list[int], what: str) -> Handle[Parts]:
        return Handle(lambda: [parts[partner] for partner in partners])


def needs_group(what: str) -> None:
    """Raise UserError unless this process belongs to a process group, which `what` needs."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UserError(
            f"{what} belongs to a process group, and there is none: call "
            "torch.distributed.init_process_group first"
        )


class Processes(Collectives):
    """One learner a process, over torch.distributed."""

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
        """Of a learner's process among all there are."""
        return learner if self.group is None else dist.get_global_rank(self.group, learner)

    def gather(self, parts: Parts, what: str) -> Handle[Parts]:
        mine = _joined(parts[0])
        self.sent[what] += mine.numel()
        under_way = self._round(mine) if self.ring else self._exchanged(mine)
        return Handle(lambda: [_parted(one, parts[0]) for one in under_way.wait()])

    def _round(self, mine: Tensor) -> Handle[list[Tensor]]:
        """The learners' bytes, all of as many as one's own, round a ring."""
        every = [torch.empty_like(mine) for _ in range(self.learners)]
        work = dist.all_gather(every, mine, self.group, async_op=True)

        def finish() -> list[Tensor]:
            self._wait(work)
            return every

        return Handle(finish)

    def scatter(
        self, messages: list[dict[int, list[Message]]], address: message.Address, what: str
    ) -> Handle[list[Parts]]:
        own, mine = self.here[0], messages[0]
        payloads = {to: [one.pack() for one in every] for to, every in mine.items()}
        packed = {to: message.pack(every, address) for to, every in payloads.items()}
        came = {other: torch.empty_like(one) for other, one in packed.items()} | {own: packed[own]}
        others = [to for to in self._others() if to in packed]
        for to in others:
            self._count(what, packed[to].numel(), payloads[to])
        under_way = self._posted(packed, came, others)

        def finish() -> list[Parts]:
            under_way.wait()
            return [[self._read(came[k], mine[own], payloads[own], address) for k in sorted(came)]]

        return Handle(finish)

    def swap(self, parts: Parts, partners: list[int], what: str) -> Handle[Parts]:
        mine, other = _joined(parts[0]), partners[self.here[0]]
        self.sent[what] += mine.numel()
        under_way = self._exchanged(mine, others=[other])
        return Handle(lambda: [_parted(under_way.wait()[other], parts[0])])

    def _exchanged(
        self, mine: Tensor, sizes: list[int] | None = None, others: list[int] | None = None
    ) -> Handle[list[Tensor]]:
        """The learners' bytes, each of as many as one's own or of these sizes; everyone sends
        straight to everyone, or to these others.

        As many bytes as a ring takes, in one round instead of learners - 1.
        """
        own, n = self.here[0], self.learners
        every = [
            mine if k == own else mine.new_empty(mine.numel() if sizes is None else sizes[k])
            for k in range(n)
        ]
        others = self._others() if others is None else others
        under_way = self._posted(dict.fromkeys(others, mine), dict(enumerate(every)), others)

        def finish() -> list[Tensor]:
            under_way.wait()
            return every

        return Handle(finish)

    def _others(self) -> list[int]:
        """The other learners, from the next one on, so that not all begin with the same."""
        return [(self.here[0] + turn) % self.learners for turn in range(1, self.learners)]

    def _posted(
        self, out: dict[int, Tensor], into: dict[int, Tensor], others: list[int]
    ) -> Handle[None]:
        """To each of these others its bytes, and theirs into `into`; empty ones are not sent.

        Receives are posted before anything is sent: the word that one waits for a message must not
        itself wait behind what one sends.
        """
        moved = self._by_host and any(self._elsewhere(one) for one in out.values())
        landing = {
            k: into[k].new_empty(into[k].shape, device="cpu") if moved else into[k] for k in others
        }
        posted = [
            dist.P2POp(dist.irecv, landing[k], self._rank(k), self.group)
            for k in reversed(others)
            if into[k].numel()
        ]
        posted += [
            dist.P2POp(dist.isend, out[k].cpu() if moved else out[k], self._rank(k), self.group)
            for k in others
            if out[k].numel()
        ]
        self._posts += 1
        turn, began, waited = self._posts, time.perf_counter(), self.waited
        works = dist.batch_isend_irecv(posted) if posted else []

        def finish() -> None:
            if works and turn == self._posts:
                self.meanwhile += time.perf_counter() - began - (self.waited - waited)
            self._wait(*works)
            if moved:
                for k in others:
                    into[k].copy_(landing[k])

        return Handle(finish)

    @staticmethod
    def _elsewhere(tensor: Tensor) -> bool:
        """Whether a tensor is not in the host's memory."""
        return tensor.device.type != "cpu"

    def _wait(self, *works: dist.Work) -> None:
        began = time.perf_counter()
        for work in works:
            work.wait()
        self.waited += time.perf_counter() - began

    def broadcast(
        self,
        parts: Callable[[int], list[Tensor]],
        leader: int,
        what: str,
        among: tuple[int, ...] | None = None,
    ) -> Handle[list[Tensor]]:
        own = parts(0)
        if among is not None and len(among) == 1:
            return Handle(lambda: own)
        mine, leads = _joined(own), leader in self.here
        self.sent[what] += mine.numel() * leads
        if self.ring:
            work = dist.broadcast(
                mine,
                self._rank(leader),
                self._groups.get(among, self.group),  # pyright: ignore[reportArgumentType, reportCallIssue]
                async_op=True,  # pyright: ignore[reportArgumentType, reportCallIssue]
            )
            under_way = Handle(lambda: self._wait(work))  # pyright: ignore[reportArgumentType]
        else:  # down a tree it would take a latency more for each of its levels
            others = (
                [k for k in self._others() if among is None or k in among] if leads else [leader]
            )
            ours, theirs = (mine, mine[:0]) if leads else (mine[:0], mine)
            under_way = self._posted(
                dict.fromkeys(others, ours), dict.fromkeys(others, theirs), others
            )

        def finish() -> list[Tensor]:
            under_way.wait()
            return _parted(mine, own)

        return Handle(finish)

    def agree(self, value: T) -> T:
        return told_by_first(value, self.group)

    def share(
        self, messages: list[list[Message]], address: message.Address, what: str, even: bool = False
    ) -> Handle[Parts]:
        even = even or all(_even(one) for one in messages[0])
        payloads = [one.pack() for one in messages[0]]
        mine = message.pack(payloads, address)
        self._count(what, mine.numel(), payloads)
        lengths = (
            None if even else self._exchanged(torch.tensor([mine.numel()], device=mine.device))
        )
        under_way = self._exchanged(mine) if even else None
        if not even:
            self.sent["lengths"] += 8

        def finish() -> Parts:
            arrived = under_way or self._exchanged(mine, [int(one) for one in lengths.wait()])  # pyright: ignore[reportOptionalMemberAccess]
            return [self._read(text, messages[0], payloads, address) for text in arrived.wait()]

        return Handle(finish)

    def _count(self, what: str, packed: int, payloads: list[Payload]) -> None:
        """Note a message of so many bytes that is handed to the transport."""
        self.sent[what] += packed
        self.framing[what] += message.framing(payloads)

    @staticmethod
    def _read(
        text: Tensor, messages: list[Message], own: list[Payload], address: message.Address
    ) -> list[Tensor]:
        reader = message.Reader(text, address)
        arrived = [
            one.compressor.decode(reader.take(one.compressor, payload.shape))[0]
            for one, payload in zip(messages, own, strict=True)
        ]
        reader.finish()
        return arrived


def _even(one: Message) -> bool:
    """Whether messages of its shape are all of one length, which then needs not be told."""
    try:
        return one.compressor.formula_bytes(torch.Size([1, *one.x.shape]), one.x.dtype) >= 0
    except NotImplementedError:
        return False


def mean(parts: list[Tensor]) -> Tensor:
    """The mean in the order given; of one, itself."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts))


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
    for one in like:
        n = one.numel() * one.element_size()
        part = joined[at : at + n].clone().view(one.dtype).reshape(one.shape)
        out.append(torch.empty_like(one).copy_(part))
        at += n
    return out

"""A boundary between two stages: compress forward, compress backward, count bytes and calls.

`_Crossing` is the only autograd.Function of the project. Downstream sees C_fwd(x), upstream gets
C_bwd(gradient): a straight-through estimate, which is what a real pipeline computes. A channel has
one end where both stages are simulated (`cross`), and two where they are processes (`post` and
`arrive`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from commsweep import compressors, seeds
from commsweep.boundary.diagnosis import CompressedMessage, MessageStatistics
from commsweep.compressors import Compressor, Payload, Sparsifier, message
from commsweep.compressors.base import channels_last
from commsweep.compressors.coded import Coded, CodedForwardMask
from commsweep.compressors.coders import Coder, Frozen
from commsweep.compressors.sparse import FixedK
from commsweep.config.links import Link
from commsweep.errors import UserError
from commsweep.feedback.boundaries import Feedback
from commsweep.feedback.memory import Keys


@dataclass
class Step:
    """The facts of a step that all boundaries of a model share; the task sets it before
    each batch.
    """

    training: bool = False
    compress: bool = True  # False: evaluation with compression off
    epoch: int = 0
    steps: int = 0  # optimizer steps before it; of an evaluation, before the last one of training
    # global step in training, batch number in evaluation: the seed of random compressors
    number: int = 0
    keys: Keys = field(
        default_factory=lambda: Keys(torch.zeros(0, dtype=torch.int64), torch.device("cpu"))
    )
    anchor: Tensor | None = None  # what entered the first block, for coders that measure from there
    # the embeddings that they measure from instead, and the tokens there are
    frozen: Frozen | None = None
    tokens: Tensor | None = None


class Channel(nn.Module):
    """A direction of a boundary: a Link at run time, with its counters."""

    warm: Tensor | None

    def __init__(
        self, link: Link, feedback: Feedback, step: Step, stream: tuple[int, int], shape: torch.Size
    ) -> None:
        """stream: the run's seed and the channel's number, from which its draws follow."""
        super().__init__()
        self.compressor = compressors.build(link.compressor)
        # What both ends keep between messages; None for most compressors.
        self.register_buffer(
            "warm",
            self.compressor.begin(torch.Size([1, *shape]), seeds.draw(seeds.FACTOR, *stream)),
        )
        self.stretch = 1.0  # elements of the activation for one of its code
        self.feedback, self.start_epoch = feedback, link.start_epoch
        self.start_step = link.start_step
        self.step, self.stream = step, stream
        self.counts = Counts()
        self.watch: MessageStatistics | None = None  # of a run that is diagnosed

    @property
    def link(self) -> Link:
        """The Link as installed: read from the objects, not from the Run they were built for."""
        return Link(
            compressor=self.compressor.spec,
            feedback=self.feedback.spec,
            start_epoch=self.start_epoch,
            start_step=self.start_step,
        )

    def cross(
        self, x: Tensor, want_mask: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(what arrives for x, the mask of a sparsifier if wanted). `mask`: that of the forward
        message.
        """
        y, sending = self._send(SimulatedSender, x, want_mask, mask)
        return y, sending.mask

    def post(
        self, x: Tensor, want_mask: bool = False, mask: Tensor | None = None
    ) -> tuple[list[Payload], Tensor | None]:
        """The sender's end: (the payloads of x's message, the mask if wanted)."""
        _, sending = self._send(PackedSender, x, want_mask, mask)
        return sending.payloads, sending.mask

    def arrive(
        self,
        reader: message.Reader,
        shape: torch.Size,
        want_mask: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The receiver's end: (what a message of this shape says, its mask if wanted). Raises
        UserError on other bytes.
        """
        step, compressor = self.step, self._compressor(mask)
        receiving = PackedReceiver(
            compressor if step.training else compressor.at_inference(), reader, want_mask, self.warm
        )
        if self._dense:
            y = receiving.receive_dense(shape)
            if step.training:
                self.feedback.saw_dense(y, step.keys)
        elif not step.training:
            y = receiving.receive(shape)
        else:
            y = self.feedback.receive(receiving, shape, step.keys)
            self._keep_warm(receiving.warm)
        reader.finish()
        return y, receiving.mask

    def most_bytes(self, shape: torch.Size, dtype: torch.dtype, mask: Tensor | None = None) -> int:
        """Bytes that the next message has at most, its framing included."""
        if self._dense:
            return message.most_bytes(_DENSE, shape, dtype)
        compressor = self._compressor(mask)
        if not self.step.training:
            return message.most_bytes(compressor.at_inference(), shape, dtype)
        return self.feedback.most_bytes(compressor, shape, dtype, self.step.keys)

    @property
    def plain(self) -> bool:
        """Return whether every message travels as it is, with nothing remembered or looked at."""
        kind, feedback = self.compressor.spec.kind, self.feedback.spec.kind
        return kind == "none" and feedback == "none" and self.watch is None

    @property
    def _dense(self) -> bool:
        """Return whether messages travel as they are: compression off, or not begun."""
        step = self.step
        early = step.epoch < self.start_epoch or step.steps < (self.start_step or 0)
        return early or not step.compress

    def _send(
        self, kind: type[SenderT], x: Tensor, want_mask: bool, mask: Tensor | None
    ) -> tuple[Tensor, SenderT]:
        step, compressor = self.step, self._compressor(mask)
        sending = kind(
            compressor if step.training else compressor.at_inference(),
            0 if self._dense else self._seed(),
            want_mask and step.training,
            self.feedback.needs_arrival,
            self.warm,
        )
        if not step.training:
            return (sending.send_dense(x) if self._dense else sending.send(x)), sending
        self.counts.saw(x, self.stretch)
        if self._dense:
            self.feedback.saw_dense(x, step.keys)
            y = sending.send_dense(x)
        else:
            # With a coder, the boundary looks at what enters it and comes out.
            watch = None if self.compressor.spec.coder else self.watch
            if watch is not None and watch.wants():
                sending.compressed = []
            y = self.feedback.send(sending, x, step.keys)
            self._keep_warm(sending.warm)
            if watch is not None and sending.compressed is not None:
                watch.record(x, y, sending.compressed, warm=sending.warm is not None)
        self.counts.sent(sending)
        return y, sending

    def get_extra_state(self) -> dict[str, Any]:
        return self.counts.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.counts = Counts(**state)

    def _compressor(self, mask: Tensor | None) -> Compressor:
        if self.compressor.spec.coder:  # x is the code already
            return _DENSE
        if not self.compressor.spec.shares_mask:
            return self.compressor
        return self.compressor.given(mask) if mask is not None else _DENSE

    def _keep_warm(self, factor: Tensor | None) -> None:
        if factor is None or self.warm is None:
            return
        if factor.shape != self.warm.shape:
            raise UserError(
                f"compressor {self.compressor.spec.label} keeps {list(factor.shape)} for the next "
                f"message, but begin() gave {list(self.warm.shape)}: what is kept has one shape, "
                "whatever the batch"
            )
        self.warm.copy_(factor)

    def _seed(self) -> int:
        return seeds.draw(seeds.BOUNDARY, *self.stream, self.step.number, self.step.training)


SenderT = TypeVar("SenderT", bound="SimulatedSender")
RING = 64  # messages whose sums wait on the device before they are looked at together


@dataclass
class Counts:
    """Bytes and calls of one channel over training; kept in checkpoints."""

    calls: int = 0
    samples: int = 0
    nbytes: int = 0
    dense_bytes: int = 0
    # bytes that depend on data, summed without a sync
    on_device: Tensor | None = field(default=None, repr=False)
    # of the last messages; finite only if all terms are
    _sums: Tensor | None = field(default=None, repr=False)
    # call of the first non-finite one before these, or infinity
    _bad: Tensor | None = field(default=None, repr=False)

    def saw(self, x: Tensor, stretch: float = 1.0) -> None:
        """A training message x arrived at the sender; dense, it would be `stretch` times as
        long.
        """
        slot = self.calls % RING
        if self._sums is None:
            self._sums = torch.zeros(RING, device=x.device)
        elif slot == 0:
            self._bad = self.first_bad
            self._sums.zero_()
        # one launch a message
        torch.sum(x, tuple(range(x.dim())), dtype=torch.float32, out=self._sums[slot])
        self._count(x, stretch)

    def saw_plain(self, x: Tensor) -> None:
        """A training message as it is was sent. Nothing looks at its values: what is not finite in
        it reaches the loss.
        """
        self._count(x)
        self.nbytes += x.numel() * x.element_size()

    def _count(self, x: Tensor, stretch: float = 1.0) -> None:
        self.calls += 1
        self.samples += x.shape[0]
        self.dense_bytes += round(x.numel() * x.element_size() * stretch)

    @property
    def first_bad(self) -> Tensor | None:
        """The call of the first message that was not finite, or infinity, on the device; None
        before any message.
        """
        if self._sums is None:
            return None
        calls = (
            torch.arange(1.0, RING + 1, device=self._sums.device) + (self.calls - 1) // RING * RING
        )
        bad = calls.where(~self._sums.isfinite(), torch.inf).amin()
        return bad if self._bad is None else torch.minimum(self._bad, bad)

    def sent(self, sending: SimulatedSender) -> None:
        """Add what the message cost."""
        for nbytes in sending.nbytes:
            if isinstance(nbytes, Tensor):
                self.on_device = nbytes if self.on_device is None else self.on_device + nbytes
            else:
                self.nbytes += nbytes

    def total(self) -> int:
        """Bytes sent so far (waits for the device when they depend on data)."""
        return self.nbytes + (0 if self.on_device is None else int(self.on_device))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "calls": self.calls,
            "samples": self.samples,
            "nbytes": self.total(),
            "dense_bytes": self.dense_bytes,
        }


class SimulatedSender:
    """A message being sent: compresses and notes what left (a `Sender` of the feedbacks)."""

    def __init__(
        self,
        compressor: Compressor,
        seed: int,
        want_mask: bool,
        needs_arrival: bool = True,
        warm: Tensor | None = None,
    ) -> None:
        """needs_arrival: whether the sender itself needs what arrives. warm: the factor that a
        low-rank message begins from, and afterwards the one that the next begins from.
        """
        self.compressor, self.seed, self.want_mask, self.needs_arrival, self.warm = (
            compressor,
            seed,
            want_mask,
            needs_arrival,
            warm,
        )
        self.mask: Tensor | None = None
        self.nbytes: list[int | Tensor] = []
        # What was compressed, where a run is diagnosed.
        self.compressed: list[CompressedMessage] | None = None

    def send(self, x: Tensor) -> Tensor:
        """Compress x; returns what arrives."""
        if self.want_mask and isinstance(self.compressor, Sparsifier):
            y, self.mask = self.compressor.masked(x, self.seed)
        elif self.warm is not None:
            y, self.warm = self.compressor.apply_from(x, self.warm, self.seed)
        else:
            y = self.compressor.apply(x, self.seed)
        self.nbytes.append(self.compressor.bytes_sent(y))
        self._note(self.compressor, x, self.seed, y)
        return y

    def send_remembered(self, x: Tensor, memory: Tensor, kind: int) -> Tensor | None:
        """Return what arrives of x and a feedback's memory, which is changed, where one kernel does
        it all; else None.
        """
        if self.want_mask or self.compressed is not None:
            return None
        y = self.compressor.remembered(x, memory, kind)
        if y is not None:
            self.nbytes.append(self.compressor.bytes_sent(y))
        return y

    def send_halves(self, x: Tensor, e: Tensor) -> Tensor:
        """Signal and residue as two payloads at half the budget each; returns their sum."""
        half = self.compressor.halved()
        halves = half.apply(x, self.seed), half.apply(e, self.seed + 1)
        self.nbytes += [half.bytes_sent(half_sent) for half_sent in halves]
        self._note(half, x, self.seed, halves[0])
        self._note(half, e, self.seed + 1, halves[1])
        return halves[0] + halves[1]

    def send_dense(self, x: Tensor) -> Tensor:
        """x as it is."""
        self.nbytes.append(x.numel() * x.element_size())
        return x

    def _note(self, compressor: Compressor, u: Tensor, seed: int, y: Tensor) -> None:
        if self.compressed is not None:
            # a feedback goes on to change u in place
            self.compressed.append((compressor, u.clone(), seed, y))

    def sent_rows(self, rows: Tensor, batch: int) -> None:
        """Note that these rows of a batch were compressed; the others travel dense, which
        keeps all of them.
        """
        self.mask = _widened(self.mask, rows, batch)


class PackedSender(SimulatedSender):
    """A message to another process: keeps the payloads that are to travel."""

    def __init__(
        self,
        compressor: Compressor,
        seed: int,
        want_mask: bool,
        needs_arrival: bool = True,
        warm: Tensor | None = None,
    ) -> None:
        super().__init__(compressor, seed, want_mask, needs_arrival, warm)
        self.payloads: list[Payload] = []

    def send(self, x: Tensor) -> Tensor:
        if self.warm is None:
            payload = self._post(self.compressor, x, self.seed)
        else:
            payload = self._posted(self.compressor.encode_from(x, self.warm, self.seed))
        if self.want_mask and isinstance(self.compressor, Sparsifier):
            self.mask = self.compressor.mask(payload)
        y = self.compressor.decode_from(payload, self.warm) if self.needs_arrival else x
        if self.warm is not None:
            self.warm = self.compressor.next_kept(payload, self.warm)
        return y

    def send_remembered(self, x: Tensor, memory: Tensor, kind: int) -> Tensor | None:
        return None

    def send_halves(self, x: Tensor, e: Tensor) -> Tensor:
        half = self.compressor.halved()
        halves = self._post(half, x, self.seed), self._post(half, e, self.seed + 1)
        return half.decode(halves[0]) + half.decode(halves[1])

    def send_dense(self, x: Tensor) -> Tensor:
        self._post(_DENSE, x, 0)
        return x

    def _post(self, compressor: Compressor, x: Tensor, seed: int) -> Payload:
        # unchecked: a bad value must reach whoever looks for it
        return self._posted(compressor._encode(x, seed))

    def _posted(self, payload: Payload) -> Payload:
        self.payloads.append(payload)
        self.nbytes.append(payload.nbytes)
        return payload


class PackedReceiver:
    """The other end of `PackedSender` (a `Receiver` of the feedbacks)."""

    def __init__(
        self,
        compressor: Compressor,
        reader: message.Reader,
        want_mask: bool,
        warm: Tensor | None = None,
    ) -> None:
        self.compressor, self.reader, self.want_mask, self.warm = (
            compressor,
            reader,
            want_mask,
            warm,
        )
        self.mask: Tensor | None = None

    def receive(self, shape: torch.Size) -> Tensor:
        """Return what the next payload says."""
        payload = self.reader.take(self.compressor, shape)
        if self.want_mask and isinstance(self.compressor, Sparsifier):
            self.mask = self.compressor.mask(payload)
        y = self.compressor.decode_from(payload, self.warm)
        if self.warm is not None:
            self.warm = self.compressor.next_kept(payload, self.warm)
        return y

    def receive_halves(self, shape: torch.Size) -> Tensor:
        """Signal and residue, summed."""
        half = self.compressor.halved()
        halves = [half.decode(self.reader.take(half, shape)) for _ in range(2)]
        return halves[0] + halves[1]

    def receive_dense(self, shape: torch.Size) -> Tensor:
        """A tensor as it was."""
        return _DENSE.decode(self.reader.take(_DENSE, shape))

    def sent_rows(self, rows: Tensor, batch: int) -> None:
        """Do what `SimulatedSender.sent_rows` does."""
        self.mask = _widened(self.mask, rows, batch)


def _widened(mask: Tensor | None, rows: Tensor, batch: int) -> Tensor | None:
    """A mask of some rows as one of the whole batch, true in the others; in the layout of the
    part.
    """
    if mask is None:
        return None
    full = torch.ones((batch, *mask.shape[1:]), dtype=torch.bool, device=mask.device).to(
        memory_format=torch.channels_last if channels_last(mask) else torch.contiguous_format
    )
    full[rows] = mask
    return full


class Boundary(nn.Module):
    """Forward and backward channel around one crossing; `forward` is called by a hook on the
    stage's last module.
    """

    def __init__(self, name: str, fwd: Channel, bwd: Channel, coder: Coder | None = None) -> None:
        super().__init__()
        self.name, self.fwd, self.bwd, self.coder = name, fwd, bwd, coder
        # hears what enters a coder and comes out of it
        self.looked: Callable[[Tensor, Tensor], None] | None = None
        if isinstance(bwd.compressor, CodedForwardMask):
            assert isinstance(fwd.compressor, FixedK | Coded)  # a Run with another one is refused
            bwd.compressor.forward = fwd.compressor

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next stage sees of x. Where both ways are plain it is x itself, and the
        bytes follow from its shape.
        """
        if self.coder is None and self.fwd.plain and self.bwd.plain:
            if self.fwd.step.training:
                self.fwd.counts.saw_plain(x)
                if torch.is_grad_enabled() and x.requires_grad:
                    self.bwd.counts.saw_plain(x)
            return x
        with _as_it_is(x):
            if self.coder is None or not self.codes:
                return self._cross(x)
            y = self.decode(self._cross(self.encode(x)), x)
            if self.looked is not None:
                self.looked(x, y)
            watch = self.fwd.watch
            if watch is not None and self.fwd.step.training and watch.wants():
                watch.looked(x, y)
            return y

    def encode(self, x: Tensor) -> Tensor:
        """The code that crosses for x; measured from frozen embeddings, with the tokens' numbers as
        one more feature.
        """
        step = self.fwd.step
        frozen = self._frozen
        coder = self._coder
        if frozen:
            assert step.tokens is not None, "the task sets them before each batch"
            # float32 holds every number below 2^24
            code = coder.encode(x, frozen(step.tokens))
            code = torch.cat([code.float(), step.tokens[..., None].float()], -1)
        else:
            code = coder.encode(x, step.anchor if coder.anchored else None)
        self.fwd.stretch = self.bwd.stretch = x.numel() / code.numel()
        return code

    def decode(self, code: Tensor, like: Tensor | Payload) -> Tensor:
        """Return what the receiver makes of it, of `like`'s shape; whoever sends it on knows the
        tokens from then on.
        """
        step, coder, frozen = self.fwd.step, self._coder, self._frozen
        if frozen is None:
            return coder.decode(code, like, step.anchor if coder.anchored else None)
        step.tokens = code.detach()[..., -1].round().long()
        return coder.decode(code[..., :-1], like, frozen(step.tokens)).to(like.dtype)

    @property
    def _coder(self) -> Coder:
        assert self.coder is not None, "only boundaries with a coder encode"
        return self.coder

    @property
    def extra(self) -> int:
        """Features of a code beside the coder's own."""
        return int(self._frozen is not None)

    @property
    def _frozen(self) -> Frozen | None:
        return self.fwd.step.frozen if self.coder is not None and self.coder.anchored else None

    @property
    def codes(self) -> bool:
        """Return whether the coder is in use: not with compression off, nor before its
        first epoch.
        """
        return self.fwd.step.compress and self.fwd.step.epoch >= self.fwd.start_epoch

    def _cross(self, x: Tensor) -> Tensor:
        return crossing(
            x,
            lambda x: self.fwd.cross(x, want_mask=self.shares_mask),
            lambda grad, mask: self.bwd.cross(grad, mask=mask)[0],
        )

    @property
    def shares_mask(self) -> bool:
        """Return whether the backward reuses the forward mask."""
        return self.bwd.compressor.spec.shares_mask


def _as_it_is(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which a message keeps its type, whatever the model computes in."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


There = Callable[[Tensor], tuple[Tensor, Tensor | None]]
Back = Callable[[Tensor, Tensor | None], Tensor]


def crossing(x: Tensor, destination: There, back: Back) -> Tensor:
    """Return destination(x), whose second value is kept for the way back: the gradient of x is
    back(gradient, kept).
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Crossing.apply(x, destination, back)
    return destination(x)[0]


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, destination: There, back: Back) -> Tensor:
        y, ctx.kept = destination(x)
        ctx.back = back
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        with _as_it_is(grad):
            return ctx.back(grad, ctx.kept), None, None


_DENSE = compressors.build({"kind": "none"})

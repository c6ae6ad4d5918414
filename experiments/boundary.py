"""A boundary between two stages: compress forward, compress backward, count bytes and calls.

`_Crossing` is the only autograd.Function of the project. Downstream sees C_fwd(x), upstream gets
C_bwd(gradient): a straight-through estimate, which is what a real pipeline computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from experiments import compressors
from experiments.compressors import Compressor, Sparsifier
from experiments.compressors.coders import Coder
from experiments.compressors.lowrank import LowRank
from experiments.feedback import Feedback
from experiments.memory import Keys
from experiments.specs import CODERS, ForwardMask, Link


@dataclass
class Step:
    """What all boundaries of a model must know of the step they are in; the task sets it before each batch."""

    training: bool = False
    compress: bool = True  # False: evaluation with compression off
    epoch: int = 0
    number: int = 0  # global step in training, batch number in evaluation: the seed of random compressors
    keys: Keys | None = None
    anchor: Tensor | None = None  # what entered the first block, for coders that measure from there


class Channel(nn.Module):
    """One direction of a boundary: a Link at run time, with its counters."""

    def __init__(self, link: Link, feedback: Feedback, step: Step, stream: int, shape: torch.Size) -> None:
        super().__init__()
        self.compressor = compressors.build(link.compressor)
        warm = self.compressor.begin(torch.Size([1, *shape])) if isinstance(self.compressor, LowRank) else None
        self.register_buffer("warm", warm)  # the factor both ends begin from; None for all other compressors
        self.stretch = 1.0  # elements of the activation for one of its code
        self.feedback, self.start_epoch = feedback, link.start_epoch
        self.step, self.stream = step, stream
        self.counts = Counts()

    @property
    def link(self) -> Link:
        """The Link as installed: read from the objects, not from the Run they were built for."""
        return Link(compressor=self.compressor.spec, feedback=self.feedback.spec, start_epoch=self.start_epoch)

    def cross(self, x: Tensor, want_mask: bool = False, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(what arrives for x, the mask of a sparsifier if wanted). `mask`: that of the forward message."""
        step = self.step
        if not step.compress or (step.epoch < self.start_epoch and not step.training):
            return x, None
        compressor = self._compressor(mask)
        if not step.training:
            return Sending(compressor.at_inference(), self._seed(), False).send(x), None
        sending = Sending(compressor, self._seed(), want_mask)
        self.counts.saw(x, self.stretch)
        if step.epoch < self.start_epoch:
            self.feedback.saw_dense(x, step.keys)
            y = sending.send_dense(x)
        else:
            y = self.feedback.send(sending, x, step.keys)
            if self.warm is not None:
                self.warm.copy_(compressor.next)
        self.counts.sent(sending)
        return y, sending.mask

    def get_extra_state(self) -> dict[str, Any]:
        return self.counts.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.counts = Counts(**state)

    def _compressor(self, mask: Tensor | None) -> Compressor:
        if self.warm is not None:
            return self.compressor.warmed(self.warm)
        if self.compressor.spec.kind in CODERS:  # x is the code already
            return _DENSE
        if not isinstance(self.compressor.spec, ForwardMask):
            return self.compressor
        return self.compressor.given(mask) if mask is not None else _DENSE

    def _seed(self) -> int:
        """A well-mixed function of stream and step (SplitMix64), the same again after a resume."""
        z = (self.stream << 40 ^ self.step.number << 1 ^ self.step.training) & _WORD
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _WORD
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _WORD
        return (z ^ z >> 31) >> 1


@dataclass
class Counts:
    """Bytes and calls of one channel over training; kept in checkpoints."""

    calls: int = 0
    samples: int = 0
    nbytes: int = 0
    dense_bytes: int = 0
    on_device: Tensor | None = field(default=None, repr=False)  # bytes that depend on data, summed without a sync
    first_bad: Tensor | None = field(default=None, repr=False)  # call of the first non-finite message, or infinity

    def saw(self, x: Tensor, stretch: float = 1.0) -> None:
        """A training message x arrived at the sender; dense, it would be `stretch` times as long."""
        self.calls += 1
        self.samples += x.shape[0]
        self.dense_bytes += round(x.numel() * x.element_size() * stretch)
        # A sum is finite only if all terms are; one cheap reduction, no synchronisation.
        bad = torch.where(x.sum(dtype=torch.float32).isfinite(), torch.inf, float(self.calls))
        self.first_bad = bad if self.first_bad is None else torch.minimum(self.first_bad, bad)

    def sent(self, sending: Sending) -> None:
        """What the message cost."""
        for nbytes in sending.nbytes:
            if isinstance(nbytes, Tensor):
                self.on_device = nbytes if self.on_device is None else self.on_device + nbytes
            else:
                self.nbytes += nbytes

    def total(self) -> int:
        """Bytes sent so far (waits for the device when they depend on data)."""
        return self.nbytes + (0 if self.on_device is None else int(self.on_device))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"calls": self.calls, "samples": self.samples, "nbytes": self.total(), "dense_bytes": self.dense_bytes}


class Sending:
    """The wire of one message: compresses and notes what left (see `feedback.Wire`)."""

    def __init__(self, compressor: Compressor, seed: int, want_mask: bool) -> None:
        self.compressor, self.seed, self.want_mask = compressor, seed, want_mask
        self.mask: Tensor | None = None
        self.nbytes: list[int | Tensor] = []

    def send(self, x: Tensor) -> Tensor:
        """Compress x; returns what arrives."""
        if self.want_mask and isinstance(self.compressor, Sparsifier):
            y, self.mask = self.compressor.masked(x, self.seed)
        else:
            y = self.compressor.apply(x, self.seed)
        self.nbytes.append(self.compressor.bytes_sent(y))
        return y

    def send_halves(self, x: Tensor, e: Tensor) -> Tensor:
        """Signal and residue as two payloads at half the budget each; returns their sum."""
        half = self.compressor.halved()
        parts = half.apply(x, self.seed), half.apply(e, self.seed + 1)
        self.nbytes += [half.bytes_sent(part) for part in parts]
        return parts[0] + parts[1]

    def send_dense(self, x: Tensor) -> Tensor:
        """x as it is."""
        self.nbytes.append(x.numel() * x.element_size())
        return x


class Boundary(nn.Module):
    """Forward and backward channel around one crossing; `forward` is called by a hook on the stage's last module."""

    def __init__(self, name: str, fwd: Channel, bwd: Channel, coder: Coder | None = None) -> None:
        super().__init__()
        self.name, self.fwd, self.bwd, self.coder = name, fwd, bwd, coder

    def forward(self, x: Tensor) -> Tensor:
        """What the next stage sees of x."""
        with torch.autocast(x.device.type, enabled=False):  # a message is what it is, whatever the model computes in
            if self.coder is None or not self._codes():
                return self._cross(x)
            anchor = self.fwd.step.anchor if self.coder.anchored else None
            code = self.coder.encode(x, anchor)
            self.fwd.stretch = self.bwd.stretch = x.numel() / code.numel()
            return self.coder.decode(self._cross(code), x, anchor)

    def _codes(self) -> bool:
        """Whether the coder is in use: not with compression off, nor before its first epoch."""
        return self.fwd.step.compress and self.fwd.step.epoch >= self.fwd.start_epoch

    def _cross(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return _Crossing.apply(x, self)
        return self.fwd.cross(x)[0]

    @property
    def shares_mask(self) -> bool:
        """Whether the backward reuses the forward mask."""
        return isinstance(self.bwd.compressor.spec, ForwardMask)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary) -> Tensor:
        y, ctx.mask = boundary.fwd.cross(x, want_mask=boundary.shares_mask)
        ctx.boundary = boundary
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.autocast(grad.device.type, enabled=False):
            return ctx.boundary.bwd.cross(grad, mask=ctx.mask)[0], None


_DENSE = compressors.build({"kind": "none"})
_WORD = 2**64 - 1

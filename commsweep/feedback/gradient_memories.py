"""The memories of a learner for a layer's gradient: `offer` what to send, `settle` with what
arrived.

Notation: g the new gradient, m what is compressed, y what arrives of it.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from commsweep.config.base import Implementations
from commsweep.config.feedback import (
    AdaCompResidueSpec,
    Correction,
    DecoupledSpec,
    EF21GradientSpec,
    EF21SGDMSpec,
    LoCoSpec,
    LowPassSpec,
    MomentumCorrectionSpec,
    NoFeedbackSpec,
    ResidueSpec,
)

S = TypeVar("S", bound=Correction)
Step = tuple[Tensor, int | Tensor, int | Tensor]  # what arrives, its bytes, its entries


MEMORIES = Implementations()


@MEMORIES.of(NoFeedbackSpec)
class GradientMemory(nn.Module, Generic[S]):
    """The memory that remembers nothing: m = g."""

    tensors = 0  # of the layer's size that it holds
    # whether the receivers of a learner's messages hold one, too
    mirrored = False
    # whether it holds the momentum that the optimizer then has not, for dense parameters, too
    carries = False

    def __init__(self, spec: S, shape: torch.Size, learners: int) -> None:
        super().__init__()
        self.spec, self.learners = spec, learners

    def step(self, compressor: Any, g: Tensor) -> Step | None:
        """Compression and memory in one step, where they need each other: what arrives, its bytes
        and its entries. None: `offer`, compress and `settle` one after the other.
        """
        return None

    def offer(self, g: Tensor) -> Tensor:
        """m, to be compressed."""
        return g

    def settle(self, m: Tensor, y: Tensor) -> Tensor:
        """y arrived for m; returns what the mean is taken of."""
        return y

    def dense(self, g: Tensor) -> Tensor:
        """Return what travels for g uncompressed (a vector, or before the first compressed epoch),
        and is used as it is.
        """
        return g


@MEMORIES.of(ResidueSpec)
class Residue(GradientMemory[S]):
    """m = g + e; e <- m - y, so that sum(y) + e == sum(g) at any time; or m = g + decay e, which
    forgets.
    """

    e: Tensor
    tensors = 1

    def __init__(self, spec: S, shape: torch.Size, learners: int) -> None:
        super().__init__(spec, shape, learners)
        self.register_buffer("e", torch.zeros(shape))

    def offer(self, g: Tensor) -> Tensor:
        decay = getattr(self.spec, "decay", None)
        return self.e.add_(g) if decay is None else torch.add(g, self.e, alpha=decay, out=self.e)

    def settle(self, m: Tensor, y: Tensor) -> Tensor:
        y = y.clone() if y.data_ptr() == m.data_ptr() else y  # everything was kept
        self.e.sub_(y)
        return y


@MEMORIES.of(AdaCompResidueSpec)
class LookAhead(Residue[AdaCompResidueSpec]):
    """AdaComp's residue, which the selection reads: e <- e + g; H = e + (scale - 1) g decides what
    is sent; e <- e - y.
    """

    def step(self, compressor: Any, g: Tensor) -> Step:
        return compressor.step(self.e, g, self.spec.scale - 1)

    def settle(self, m: Tensor, y: Tensor) -> Tensor:
        """`step` has taken y out of e."""
        return y


@MEMORIES.of(DecoupledSpec)
class Decoupled(Residue[DecoupledSpec]):
    """m = e + g, a learner's own momentum; e <- m - (1 - momentum) y (Dion)."""

    def settle(self, m: Tensor, y: Tensor) -> Tensor:
        self.e.sub_(y, alpha=1 - self.spec.momentum)
        return y


@MEMORIES.of(LowPassSpec)
class LowPass(Residue[LowPassSpec]):
    """m = g + e; e <- (1 - beta) e + beta (m - y) (ScaleCom; beta 1 is error feedback)."""

    def offer(self, g: Tensor) -> Tensor:
        return self.e + g

    def settle(self, m: Tensor, y: Tensor) -> Tensor:
        self.e.mul_(1 - self.spec.beta).add_(m - y, alpha=self.spec.beta)
        return y


@MEMORIES.of(LoCoSpec)
class LoCo(Residue[LoCoSpec]):
    """m = g + e; e <- beta e + (1 - beta) (m - y), stored in 8 bits with one scale a layer (arXiv
    2407.04480).

    An average of errors: it does not telescope. Zero every `reset` steps.
    """

    steps: Tensor

    def __init__(self, spec: LoCoSpec, shape: torch.Size, learners: int) -> None:
        super().__init__(spec, shape, learners)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def offer(self, g: Tensor) -> Tensor:
        return self.e + g

    def settle(self, m: Tensor, y: Tensor) -> Tensor:
        e = self.e.mul(self.spec.beta).add_(m - y, alpha=1 - self.spec.beta)
        step = (e.abs().amax() / 127).clamp(min=1e-30)
        self.steps += 1
        self.e.copy_((e / step).round_().mul_(step * (self.steps % self.spec.reset != 0)))
        return y


@MEMORIES.of(MomentumCorrectionSpec)
class MomentumCorrection(GradientMemory[MomentumCorrectionSpec]):
    """u <- mu u + g; v <- v + u; m = v; both zero where something was sent (DGC, Lin 2018).

    The optimizer's own momentum should be zero then. Clipping to `clip` / sqrt(learners) comes
    first.
    """

    u: Tensor
    v: Tensor
    tensors, carries = 2, True

    def __init__(self, spec: MomentumCorrectionSpec, shape: torch.Size, learners: int) -> None:
        super().__init__(spec, shape, learners)
        self.register_buffer("u", torch.zeros(shape))
        self.register_buffer("v", torch.zeros(shape))

    def offer(self, g: Tensor) -> Tensor:
        return self.v.add_(self._accelerated(g))

    def dense(self, g: Tensor) -> Tensor:
        """u itself: the optimizer has no momentum, so what travels dense must have it, too."""
        return self._accelerated(g).clone()

    def _accelerated(self, g: Tensor) -> Tensor:
        if self.spec.clip:
            norm = torch.linalg.vector_norm(g)
            g = g * (self.spec.clip / self.learners**0.5 / norm.clamp(min=1e-30)).clamp(max=1.0)
        return self.u.mul_(self.spec.momentum).add_(g)

    def settle(self, m: Tensor, y: Tensor) -> Tensor:
        y = y.clone() if y.data_ptr() == m.data_ptr() else y
        unsent = y == 0
        self.u.mul_(unsent)
        self.v.mul_(unsent)
        return y


class Unremembered(nn.Module):
    """Another learner's, of which its receivers need nothing."""

    def settle(self, _m: None, y: Tensor) -> Tensor:
        """Return what is used of y."""
        return y

    def saw(self, y: Tensor) -> None:
        """y travelled uncompressed."""


class Mirror(nn.Module):
    """Another learner's A of EF21, which its receivers must have, too: A <- A + y is what is
    used.
    """

    a: Tensor

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(shape))

    def settle(self, _m: Tensor | None, y: Tensor) -> Tensor:
        """Return what is used of y."""
        return self.a.add_(y).clone()

    def saw(self, y: Tensor) -> None:
        """y travelled uncompressed: both ends go on from it."""
        self.a.copy_(y)


@MEMORIES.of(EF21GradientSpec)
class EF21Memory(GradientMemory[S]):
    """m = g - A; A <- A + y is what is used (Richtarik 2021)."""

    a: Tensor
    tensors, mirrored = 1, True

    def __init__(self, spec: S, shape: torch.Size, learners: int) -> None:
        super().__init__(spec, shape, learners)
        self.register_buffer("a", torch.zeros(shape))

    def offer(self, g: Tensor) -> Tensor:
        return g - self.a

    def settle(self, m: Tensor, y: Tensor) -> Tensor:
        return self.a.add_(y).clone()

    def dense(self, g: Tensor) -> Tensor:
        self.a.copy_(g)
        return g


@MEMORIES.of(EF21SGDMSpec)
class EF21SGDMMemory(EF21Memory[EF21SGDMSpec]):
    """v <- (1 - eta) v + eta g; m = v - A; A <- A + y is what is used (Fatkhullin 2023). The first
    v is the first g.
    """

    v: Tensor
    begun: Tensor
    tensors, carries = 2, True

    def __init__(self, spec: EF21SGDMSpec, shape: torch.Size, learners: int) -> None:
        super().__init__(spec, shape, learners)
        self.register_buffer("v", torch.zeros(shape))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    def offer(self, g: Tensor) -> Tensor:
        return self._running(g) - self.a

    def dense(self, g: Tensor) -> Tensor:
        """The running mean itself."""
        return super().dense(self._running(g).clone())

    def _running(self, g: Tensor) -> Tensor:
        self.v.copy_(torch.where(self.begun, torch.lerp(self.v, g, self.spec.eta), g))
        self.begun.fill_(True)
        return self.v


def build(spec: Correction, shape: torch.Size, learners: int, dense: bool) -> GradientMemory:
    """Return what a learner remembers of a layer; `dense`: which travels as it is."""
    return _kind(spec, dense)(spec, shape, learners)


def mirror(
    spec: Correction, shape: torch.Size, learners: int, dense: bool
) -> Unremembered | Mirror:
    """Return what the others must remember of it."""
    return Mirror(shape) if _kind(spec, dense).mirrored else Unremembered()


def _kind(spec: Correction, dense: bool) -> type[GradientMemory]:
    kind = MEMORIES[spec.kind]
    return GradientMemory if dense and not kind.carries else kind

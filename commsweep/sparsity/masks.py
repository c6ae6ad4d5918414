"""Masks of weights: which are zero, which are pruned and which grow. A mask is kept as what it
takes away (`dead`).

    score   |w|,  |w| + mest |g|,  |w g|,  |w / g|            (lowest go; MEST arXiv 2110.14032, the
            others' authors)
    growth  largest |g| of a dense gradient, at random, or both; the random part is a function of
            seed, layer and step

How many live is known beforehand, so that places are chosen by `topk` and nothing is counted on the
device. Random numbers are drawn on the host and copied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from commsweep import seeds
from commsweep.config.sparsity import Sparsity

NEVER = -1.0  # below every score


def first_mask(weight: Tensor, live: int, spec: Sparsity, seed: int, layer: int) -> Tensor:
    """Return what a first mask with so many live weights takes away, boolean, of the weight's
    shape.
    """
    score = (
        weight.detach().abs().flatten()
        if spec.initial_mask == "magnitude"
        else _random(weight, seed, layer, 0)
    )
    return ~_largest(score, live).view(weight.shape)


def chosen(
    weight: Tensor,
    grad: Tensor | None,
    dead: Tensor,
    counts: tuple[int, int],
    spec: Sparsity,
    seed: int,
    layer: int,
    step: int,
) -> tuple[Tensor, Tensor]:
    """(pruned, grown) of an update, boolean, of the weight's shape; they share a place only with
    `regrow`.

    counts: how many of each. grad: dense; needed where a score or growth is by gradients.
    """
    prune, grow = counts
    out = dead.flatten()
    score = _score(weight, grad, spec).masked_fill_(out, torch.inf)
    pruned = _largest(score.neg_(), prune) if prune else torch.zeros_like(out)
    candidates = out | pruned if spec.regrow else out
    return pruned.view(dead.shape), _grown(
        weight, grad, candidates, grow, spec, seed, layer, step
    ).view(dead.shape)


def _score(weight: Tensor, grad: Tensor | None, spec: Sparsity) -> Tensor:
    size = weight.detach().abs().flatten()
    if spec.score == "magnitude":
        return size
    assert grad is not None  # asked for where the score is a gradient's
    slope = grad.abs().flatten()
    if spec.score == "mest":
        return size.add_(slope, alpha=spec.mest)
    if spec.score == "sensitivity":
        return size.mul_(slope)
    return size.div_(slope.clamp(min=torch.finfo(slope.dtype).tiny)).clamp_(
        max=torch.finfo(slope.dtype).max
    )


def _grown(
    weight: Tensor,
    grad: Tensor | None,
    candidates: Tensor,
    grow: int,
    spec: Sparsity,
    seed: int,
    layer: int,
    step: int,
) -> Tensor:
    if not grow:
        return torch.zeros_like(candidates)
    shares = {"gradient": 1.0, "random": 0.0, "none": 0.0, "mixed": spec.mixed / (1 + spec.mixed)}
    by_gradient = round(grow * shares[spec.growth])
    grown = torch.zeros_like(candidates)
    if by_gradient:
        assert grad is not None  # asked for where growth is by gradients
        grown = _largest(grad.abs().flatten().masked_fill(~candidates, NEVER), by_gradient)
    if grow > by_gradient:
        left = candidates & ~grown
        grown = grown | _largest(
            _random(weight, seed, layer, step).masked_fill_(~left, NEVER), grow - by_gradient
        )
    return grown


def _largest(score: Tensor, count: int) -> Tensor:
    """True at so many of the largest entries of score [n]."""
    return torch.zeros(score.shape, dtype=torch.bool, device=score.device).scatter_(
        0, score.topk(count, sorted=False).indices, True
    )


def _random(weight: Tensor, seed: int, layer: int, step: int) -> Tensor:
    """Uniform in [0, 1): the same for every learner, whichever process it is in."""
    generator = torch.Generator().manual_seed(seeds.draw(seeds.MASKS, seed, layer, step))
    return torch.rand(weight.numel(), generator=generator).to(weight.device)


class Mask(nn.Module):
    """The mask of one layer's weight, and what became of it."""

    dead: Tensor
    ever: Tensor

    def __init__(self, name: str, weight: nn.Parameter, dead: Tensor) -> None:
        super().__init__()
        self.name, self._weight = name, [weight]  # in a list: it is the model's
        self.register_buffer("dead", dead)
        self.register_buffer("ever", ~dead)  # was alive at some time
        self.live = dead.numel() - int(dead.sum())
        self.grown = 0  # over the training

    @property
    def weight(self) -> nn.Parameter:
        """The layer's."""
        return self._weight[0]

    @property
    def partial(self) -> bool:
        """Return whether anything is dead."""
        return self.live < self.dead.numel()

    @torch.no_grad()
    def move(self, pruned: Tensor, grown: Tensor, counts: tuple[int, int]) -> Tensor:
        """Take away and give: weights that are dead or grow are zero. Returns where these are."""
        self.dead.logical_or_(pruned).logical_and_(~grown)
        zero = self.dead | grown
        self.weight.masked_fill_(zero, 0.0)
        self.ever.logical_or_(grown)
        prune, grow = counts
        self.live += grow - prune
        self.grown += grow
        return zero

    def places(self) -> Tensor:
        """Flat indices of the live weights, in order, int64 [live]."""
        return torch.nonzero_static(~self.dead.flatten(), size=self.live)[:, 0]

    def get_extra_state(self) -> dict[str, int]:
        return {"live": self.live, "grown": self.grown}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.live, self.grown = state["live"], state["grown"]

"""The bias of a code: how far the mean of many draws of a message lies from the message.

Of n draws with errors d_i the mean of d_i . d_j over i != j estimates the square of the bias
without a bias of its own (a U-statistic); its deviation comes from leaving out a draw at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commsweep.errors import UserError

DRAWS = 400  # of a message
MORE = 4  # times as many where these leave open whether a bias matters
MATTERS = 0.03
SIGMAS = 4.0  # of an interval: many messages are tried
SHAPE = (16, 512)


@dataclass(frozen=True)
class Bias:
    """Squares of a bias relative to the message's length: the estimate and its deviation."""

    square: float
    deviation: float

    @property
    def value(self) -> float:
        """The bias, as a part of the message's length."""
        return math.sqrt(max(0.0, self.square))

    @property
    def low(self) -> float:
        """The lower end of its interval."""
        return math.sqrt(max(0.0, self.square - SIGMAS * self.deviation))

    @property
    def high(self) -> float:
        """The upper end of its interval."""
        return math.sqrt(max(0.0, self.square + SIGMAS * self.deviation))

    @property
    def text(self) -> str:
        """The bias with its interval: "0.048 [0.044, 0.052]"."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bias_of(draws: Tensor, x: Tensor) -> Bias:
    """The bias of draws [n, *x] of a message x; one draw: nothing is random, and the error is the
    bias. Raises UserError where a draw is not finite, ValueError on two draws.
    """
    if len(draws) == 2:
        raise ValueError("two draws have no deviation")
    errors = (draws - x).reshape(len(draws), -1).double()
    if not bool(errors.isfinite().all()):
        raise UserError("a message arrives with values that are not finite")
    length = float(x.double().norm()) ** 2 or 1.0
    n = len(errors)
    if n == 1:
        return Bias(float((errors**2).sum()) / length, 0.0)
    products = errors @ errors.T / length
    products.fill_diagonal_(0.0)
    total, of_each = float(products.sum()), products.sum(1)
    square = total / (n * (n - 1))
    left_out = (total - 2 * of_each) / ((n - 1) * (n - 2))
    deviation = float(((left_out - left_out.mean()) ** 2).sum() * (n - 1) / n) ** 0.5
    return Bias(square, deviation)


def mean_bias(biases: Sequence[Bias]) -> Bias:
    """The root mean square of biases, as one."""
    n = len(biases)
    deviation = math.sqrt(sum(bias.deviation**2 for bias in biases)) / n
    return Bias(sum(bias.square for bias in biases) / n, deviation)


def hard_messages() -> dict[str, Tensor]:
    """Messages [16, 512] on which a code that looks unbiased may not be, by name: normal rows, rows
    with heavy tails (Student's t with 3 degrees of freedom), and normal rows with a spike each.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(SHAPE, generator=generator)
    squares = torch.randn((3, *SHAPE), generator=generator).square().sum(0)
    spiked = torch.randn(SHAPE, generator=generator)
    spiked[torch.arange(len(spiked)), torch.arange(len(spiked)) * 31] = 50.0
    return {
        "normal": normal,
        "heavy-tailed": torch.randn(SHAPE, generator=generator) * (3 / squares).sqrt(),
        "spiked": spiked,
    }


def drawn(apply: Callable[[Tensor, int], Tensor], x: Tensor, draws: int) -> Tensor:
    """Send a message x under so many seeds. Returns the arrived messages [draws, *x]; [1, *x] where
    the code draws nothing.
    """
    first = [apply(x, seed) for seed in range(2)]
    if torch.equal(*first):
        return first[0][None]
    return torch.stack([*first, *(apply(x, seed) for seed in range(2, draws))])


def worst_bias(
    apply: Callable[[Tensor, int], Tensor],
    messages: dict[str, Tensor],
    draws: int = DRAWS,
    factor: int = MORE,
) -> tuple[str, Bias, bool]:
    """Draw each of the messages many times through `apply(x, seed)`, and `factor` times as often
    where the bias may still be one that matters.

    Returns the name of the message whose bias is the largest that is certain (else the largest that
    is possible), that bias, and whether it is certain.
    """
    outcomes = []
    for name, x in messages.items():
        arrived = drawn(apply, x, draws)
        bias = bias_of(arrived, x)
        if factor > 1 and bias.low == 0 and bias.high > MATTERS and len(arrived) > 1:
            arrived = drawn(apply, x, draws * factor)
            bias = bias_of(arrived, x)
        certain = bias.low > 0 or (len(arrived) > 1 and is_biased(arrived, x))
        outcomes.append((certain, bias.low, bias.high, name, bias))
    certain, _, _, name, bias = max(outcomes, key=lambda outcome: outcome[:3])
    return name, bias, certain


def is_biased(draws: Tensor, x: Tensor) -> bool:
    """Return whether the mean of many draws [n, *x] of a message x is not x.

    Compared along x and along 32 random directions, where a code's rare outcomes count with its
    frequent ones; along none may the mean be further off than five standard errors.
    """
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(32, x.numel(), generator=generator)
    directions = torch.cat([x.reshape(1, -1), directions])
    away = (draws - x).reshape(len(draws), -1) @ directions.T
    error = away.std(0) / len(draws) ** 0.5
    rounding = 1e-5 * x.norm() * directions.norm(dim=1)
    return bool((away.mean(0).abs() > 5 * error + rounding).any())

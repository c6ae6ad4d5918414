"""`commsweep bench kfac`: factors, steps and inversions beside the same by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from commsweep.bench import Result, alternate, compared
from commsweep.component import Moment, Pass
from commsweep.config.second_order import KFAC
from commsweep.config.training import ImageModel
from commsweep.models import resnet
from commsweep.second_order import factors
from commsweep.second_order.layer import KFACLayer
from commsweep.second_order.preconditioner import Preconditioner

BATCH, WIDTH, STEPS = 64, 32, 10
# of the factor that is inverted: the largest of ResNet-50's that all SPD placements invert
# everywhere
ROWS = 1152


def bench() -> Iterator[Result]:
    """Yield factors, inversions and steps, beside the same by hand."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield _factor()
        yield _inversion()
    yield from _steps()


def _factor() -> Result:
    conv, x = nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.randn(BATCH, 64, 32, 32)
    seconds = alternate(
        {
            "ours": lambda: factors.input_factor(factors.inputs(conv, x), False, "expand"),
            "hand": lambda: _product(unfold(x, 3, padding=1)),
        },
        rounds=9,
        warmup=2,
    )
    title = "A of a 3x3 convolution, 64 channels / its unfold and symmetric product by hand"
    return compared(title, seconds, "ours", "hand", 1.3)


def _product(columns: Tensor) -> Tensor:
    """Sum over samples [n, d, s] of c c^T."""
    product = columns.new_zeros(columns.shape[1], columns.shape[1])
    for column in columns:
        product.addmm_(column, column.mT)
    return product


def _inversion() -> Result:
    layer, spec = KFACLayer("fc", nn.Linear(ROWS, 8, bias=False)), KFAC(split="direct")
    sample = torch.randn(2 * ROWS, ROWS)
    full = sample.mT @ sample / len(sample)
    layer.a.copy_(full)
    layer.taken = 1.0
    damped = full + spec.damping * torch.eye(ROWS)
    seconds = alternate(
        {
            "ours": lambda: layer.inverse("a", spec),
            "torch": lambda: torch.cholesky_inverse(torch.linalg.cholesky(damped)),
        },
        rounds=15,
        warmup=3,
    )
    title = f"inverse of a factor of {ROWS} rows / torch's cholesky and cholesky_inverse"
    return compared(title, seconds, "ours", "torch", 1.2)


class _Training:
    """ResNet-18 on a batch of random images: plain steps, and steps with K-FAC."""

    def __init__(self, spec: KFAC | None) -> None:
        torch.manual_seed(0)
        self.net = resnet.build(ImageModel(name="resnet18", width=WIDTH), 3, 10)
        self.kfac = Preconditioner(spec, self.net, 1) if spec else None
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        self.x, self.y, self.steps = (
            torch.randn(BATCH, 3, 32, 32),
            torch.randint(0, 10, (BATCH,)),
            0,
        )

    def __call__(self) -> None:
        """Take a step."""
        batch, moment = (
            Pass(slice(0, BATCH), BATCH, 1.0),
            Moment(self.steps, 0, 1e-3, self.steps, self.steps + 1),
        )
        self.optimizer.zero_grad()
        if self.kfac is not None:
            self.kfac.before_pass(moment, batch, self.y, self.x.device)
        cross_entropy(self.net(self.x), self.y).backward()
        if self.kfac is not None:
            self.kfac.before_exchange(moment)
            self.kfac.after_backward(moment)
        self.optimizer.step()
        self.steps += 1

    def at(self, step: int) -> Callable[[], None]:
        """The step that comes after so many, again and again."""

        kfac = self.kfac
        assert kfac is not None

        def again() -> None:
            kfac.steps = step
            self()

        return again


def _steps() -> Iterator[Result]:
    """Averages over ten steps, from each kind of step timed by itself."""
    plain, rare, often = (
        _Training(spec)
        for spec in (
            None,
            KFAC(factors_every=STEPS, inverses_every=STEPS),
            KFAC(factors_every=1, inverses_every=STEPS),
        )
    )
    hand = _ByHand(_Training(None).net, plain.x)
    seconds = alternate(
        {
            "plain": plain,
            "new": rare.at(0),
            "old": rare.at(1),
            "factors new": often.at(1),
            "factors by hand": hand.factors,
            "inverses by hand": hand.inverses,
            "gradients by hand": hand.gradients,
        },
        rounds=3,
    )
    turns = [
        dict(zip(seconds, round_, strict=True)) for round_ in zip(*seconds.values(), strict=True)
    ]
    seconds["every 10"] = [
        (round_["new"] + (STEPS - 1) * round_["old"]) / STEPS for round_ in turns
    ]
    seconds["every 1"] = [
        (round_["new"] + (STEPS - 1) * round_["factors new"]) / STEPS for round_ in turns
    ]
    fixed = [
        round_["plain"] + round_["gradients by hand"] + round_["inverses by hand"] / STEPS
        for round_ in turns
    ]
    for name, share in (("every 10", 1 / STEPS), ("every 1", 1.0)):
        seconds[f"{name} by hand"] = [
            fixed_share + share * round_["factors by hand"]
            for fixed_share, round_ in zip(fixed, turns, strict=True)
        ]
    title = "K-FAC step of a ResNet-18 of half width, batch 64"
    for name, label in (
        ("every 10", "factors and inverses every 10"),
        ("every 1", "factors in every one"),
    ):
        by_hand = f"{name} by hand"
        hand_title = f"{title}, {label} / plain step and the same by hand"
        yield compared(hand_title, seconds, name, by_hand, 1.2)
    plain_title = f"{title}, factors and inverses every 10 / plain step"
    yield compared(plain_title, seconds, "every 10", "plain", None)


class _ByHand:
    """The unfolds, products and inverses of all factors of a network, and the products with its
    gradients, without anything around them.
    """

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.seen: list[tuple[nn.Module, Tensor, Tensor]] = []
        for module in net.modules():
            if factors.supported(module):
                module.register_forward_hook(
                    lambda module, into, out: self.seen.append(
                        (module, into[0].detach(), out.detach())
                    )
                )
        net(x)
        self.damped = [[torch.eye(d) for d in factors.sizes(module)] for module, _, _ in self.seen]
        self.made: list[list[Tensor]] = []

    @torch.no_grad()
    def factors(self) -> None:
        for module, into, out in self.seen:
            if isinstance(module, nn.Conv2d):
                _product(
                    unfold(into, module.kernel_size, module.dilation, module.padding, module.stride)  # pyright: ignore[reportArgumentType]
                )
                _product(out.flatten(2))
            else:
                _product(into.mT[None])
                _product(out.mT[None])

    @torch.no_grad()
    def inverses(self) -> None:
        self.made = [
            [torch.cholesky_inverse(torch.linalg.cholesky(factor)) for factor in pair]
            for pair in self.damped
        ]

    @torch.no_grad()
    def gradients(self) -> None:
        for (module, _, _), (a, g) in zip(self.seen, self.made, strict=True):
            grad = factors.weight_matrix(module)
            bias: Any = module.bias
            _ = g @ (grad if bias is None else torch.cat([grad, bias[:, None]], 1)) @ a

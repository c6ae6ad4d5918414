"""A network's layers as K-FAC sees them: factors, multiplications and weights, read from the real model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from commsweep.analysis.timeline.iterations import FACTORS, Item, Work
from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.second_order import factors
from commsweep.experiments.second_order.placement import Factor

SIZE = {"inception_v4": 299, "inception_v3": 299}  # pixels of a side; 224 else


@dataclass(frozen=True)
class LayerLoad:
    """One layer: rows of A and G, positions of one sample, weights (with its bias)."""

    name: str
    a: int
    g: int
    positions: int
    weights: int

    @property
    def multiplications(self) -> int:
        """Of one sample's forward."""
        return self.positions * self.weights


@lru_cache
def layers(name: str) -> tuple[LayerLoad, ...]:
    """The Linear and Conv2d layers of a network of torchvision's, or of timm's where that is installed, in the order in
    which they run. Nothing is computed. Raises UserError when there is no such network."""
    with torch.device("meta"):
        net, x = _network(name).eval(), torch.empty(1, 3, SIZE.get(name, 224), SIZE.get(name, 224))
        found: list[LayerLoad] = []

        def ran(called: str) -> object:
            def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                a, g = factors.sizes(module)
                positions = output[0].numel() // g
                found.append(LayerLoad(called, a, g, positions, a * g))

            return hook

        for called, module in net.named_modules():
            if factors.supported(module):
                module.register_forward_hook(ran(called))
        net(x)
    return tuple(found)


def _network(name: str) -> nn.Module:
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name in known:
        return torchvision.models.get_model(name, weights=None, **({"init_weights": False} if name in (
            "googlenet", "inception_v3") else {}))
    try:
        import timm
    except ModuleNotFoundError:
        timm = None
    if timm is not None and timm.is_model(name):
        return timm.create_model(name, pretrained=False)
    hint = "" if timm is not None else "; more come with timm: pip install timm"
    raise UserError(f"unknown network '{name}'{nearest(name, known)} (any classifier of torchvision's{hint})")


def work(name: str, batch: int, passes: float, computing: float) -> Work:
    """One iteration of a network on one GPU.

    passes: seconds of forward and backward, a third and two thirds, by multiplications; computing: seconds of all new
    factors, by theirs (rows x d^2). Both are split over the layers, for which nothing is published.
    """
    found = layers(name)
    whole = sum(one.multiplications for one in found)
    factor_work = sum(batch * one.positions * (one.a**2 + one.g**2) for one in found)
    forward, backward = [], []
    for turn, one in enumerate(found):
        share = one.multiplications / whole
        rate = computing * batch * one.positions / factor_work
        forward += [Item(rate * one.a**2, FACTORS, factor=2 * turn), Item(passes / 3 * share, forward=True)]
        backward += [Item(rate * one.g**2, FACTORS, factor=2 * turn + 1),
                     Item(passes * 2 / 3 * share, gradient=one.weights)]
    return Work(forward + backward[::-1], [Factor(turn, side, size) for turn, one in enumerate(found)
                                           for side, size in (("A", one.a), ("G", one.g))])

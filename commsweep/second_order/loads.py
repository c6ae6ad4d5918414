"""A network's layers as K-FAC sees them: factors, multiplications and weights, read from the real
model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from commsweep.errors import UserError, nearest
from commsweep.second_order.placement import Factor, factors_of

if TYPE_CHECKING:
    from torch import nn

SIDE = {"inception_v4": 299, "inception_v3": 299}  # pixels; 224 else


@dataclass(frozen=True)
class Load:
    """The work of one layer: rows of A and G (with a bias, one more of A), positions of
    one sample.
    """

    name: str
    a: int
    g: int
    positions: int

    @property
    def weights(self) -> int:
        """Elements of its gradient."""
        return self.a * self.g

    @property
    def multiplications(self) -> int:
        """Return the multiplications of a forward of one sample."""
        return self.positions * self.weights

    @property
    def factor_multiplications(self) -> int:
        """Return the multiplications of one sample's part in new factors."""
        return self.positions * (self.a**2 + self.g**2)


@lru_cache
def loads(name: str) -> tuple[Load, ...]:
    """The Linear and Conv2d layers of a network of torchvision's, or of timm's where that is
    installed, in the order in which they run. Nothing is computed. Raises UserError when there is
    no such network.
    """
    import torch  # seconds to import, so only where a network is asked for

    from commsweep.second_order import factors

    loads: list[Load] = []

    def ran(called: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def hook(module: nn.Module, _: Any, output: torch.Tensor) -> None:
            a, g = factors.sizes(module)
            loads.append(Load(called, a, g, output[0].numel() // g))

        return hook

    with torch.device("meta"):
        net, x = _network(name).eval(), torch.empty(1, 3, SIDE.get(name, 224), SIDE.get(name, 224))
        for called, module in net.named_modules():
            if factors.supported(module):
                module.register_forward_hook(ran(called))
        net(x)
    return tuple(loads)


def kronecker(loads_: tuple[Load, ...]) -> list[Factor]:
    """A and G of every layer."""
    return factors_of([size for load in loads_ for size in (load.a, load.g)])


def _network(name: str) -> nn.Module:
    import torchvision

    models_known = torchvision.models.list_models(module=torchvision.models)
    if name in models_known:
        return torchvision.models.get_model(
            name,
            weights=None,
            **({"init_weights": False} if name in ("googlenet", "inception_v3") else {}),
        )
    try:
        with warnings.catch_warnings():  # about its own use of torch
            warnings.simplefilter("ignore")
            import timm
    except ModuleNotFoundError:
        timm = None
    if timm is not None and timm.is_model(name):
        return timm.create_model(name, pretrained=False)
    hint = "" if timm is not None else "; more come with timm: pip install timm"
    raise UserError(
        f"unknown network '{name}'{nearest(name, models_known)} (any classifier of "
        f"torchvision's{hint})"
    )

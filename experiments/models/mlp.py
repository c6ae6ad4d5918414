"""A perceptron of three hidden layers: fully connected layers only, in four stages."""

from __future__ import annotations

from torch import Tensor, nn

from experiments.config import ImageModel
from experiments.errors import UserError, nearest

LAYERS = ("layer1", "layer2", "layer3")


class MLP(nn.Module):
    """Flattened images through three hidden layers of `width` units to `classes` logits."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        sizes = (inputs, width, width)
        for name, size in zip(LAYERS, sizes, strict=True):
            setattr(self, name, nn.Sequential(nn.Linear(size, width), nn.ReLU()))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x [b, c, h, w] -> logits [b, classes]."""
        x = x.flatten(1)
        for name in LAYERS:
            x = getattr(self, name)(x)
        return self.fc(x)


def cut_points(spec: ImageModel, model: nn.Module) -> dict[str, nn.Module]:
    """The hidden layers named in spec.cuts, in model order. Raises UserError on any other."""
    for cut in spec.cuts:
        if cut not in LAYERS:
            raise UserError(f"model.cuts: '{cut}' is no legal cut of mlp{nearest(cut, LAYERS)} (legal: "
                            f"{', '.join(LAYERS)})")
    order = [LAYERS.index(cut) for cut in spec.cuts]
    if order != sorted(set(order)):
        raise UserError(f"model.cuts: {', '.join(spec.cuts)} must follow the model's order, each at most once")
    return {cut: model.get_submodule(cut) for cut in spec.cuts}

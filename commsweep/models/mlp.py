"""A perceptron of three hidden layers: fully connected layers only, in four stages."""

from __future__ import annotations

from torch import Tensor, nn

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

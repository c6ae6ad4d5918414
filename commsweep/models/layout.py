"""A network whose images lie in memory with the channels last."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WHOLE = 16  # float32 values in a vector register of AVX-512; of AVX2: 8


class Thinned(nn.Conv2d):
    """A 1x1 convolution with strides that takes the pixels it reads first and then has none.

    The same function. oneDNN (3.13, in torch 2.15) gathers those pixels itself for the weights'
    gradient; where channels lie last and do not fill a register it writes behind its buffer (its
    issue 6035), and the process dies later, of a broken heap, or learns from wrong gradients.
    """

    def forward(self, x: Tensor) -> Tensor:
        down, right = self.stride
        return functional.conv2d(x[..., ::down, ::right], self.weight, self.bias)


def channels_last(model: nn.Module) -> nn.Module:
    """The network itself, laid out with the channels last."""
    thin(model)
    return model.to(memory_format=torch.channels_last)


def thin(model: nn.Module) -> None:
    """Do what a network needs wherever its images may come to lie with the channels last, as in
    compiled blocks.
    """
    for module in model.modules():
        if (
            type(module) is nn.Conv2d
            and module.kernel_size == (1, 1)
            and module.stride != (1, 1)
            and module.groups == 1
            and module.padding == (0, 0)
            and module.in_channels < WHOLE
        ):
            module.__class__ = Thinned

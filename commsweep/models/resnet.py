"""ResNet-18 for 32x32 images and a small twin for 8x8 digits, both on torchvision's ResNet.

The CIFAR stem is a 3x3 convolution of stride 1 without pooling; initial weights are PyTorch's
defaults, as in the widely used CIFAR ResNet-18 (11,173,962 parameters) that the authors trained.
"""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from commsweep.config.training import ImageModel


def build(spec: ImageModel, channels: int, classes: int) -> nn.Module:
    """Four stages of widths w, 2w, 4w, 8w: two blocks each (resnet18, w = 64) or one
    (resnet_small).
    """
    with torch.random.fork_rng(devices=[]):
        net = _Stages(spec, channels, classes)
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return net


class _Stages(ResNet):
    """torchvision's ResNet with layers of these widths, and without its own ones, which it would
    fill first.
    """

    def __init__(self, spec: ImageModel, channels: int, classes: int) -> None:
        nn.Module.__init__(self)
        self._norm_layer = nn.BatchNorm2d
        self.inplanes, self.dilation, self.groups, self.base_width = spec.width, 1, 1, 64
        self.conv1 = nn.Conv2d(channels, spec.width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(spec.width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity()
        blocks = 2 if spec.name == "resnet18" else 1
        for stage in range(4):
            layer = self._make_layer(
                BasicBlock, spec.width * 2**stage, blocks, stride=1 if stage == 0 else 2
            )
            setattr(self, f"layer{stage + 1}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(spec.width * 8, classes)


def legal_cuts(net: nn.Module) -> list[str]:
    """Modules a boundary may follow, in order: the stem ("maxpool"), every block, the pooled
    features.

    The last block of a stage goes by the stage's name: "layer1", not "layer1.1".
    """
    names = ["maxpool"]
    for stage in range(1, 5):
        last = len(getattr(net, f"layer{stage}")) - 1
        names += [f"layer{stage}.{block}" for block in range(last)] + [f"layer{stage}"]
    return [*names, "avgpool"]

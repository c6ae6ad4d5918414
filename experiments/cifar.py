"""The middle scale between digits and a GPU: 32x32 colour images through a small ResNet.

`cifar_small`       resnet_small of width 16 (701,000 parameters) on 10,000 CIFAR-10 images, batches
                    of 64, 8 epochs,
                    cosine annealed to zero, random crops and flips; two minutes of a CPU core;
                    accuracy about 0.65
`cifar_small_jpeg`  the same with the JPEG copy of CIFAR-10, which rows and tables name as such:
                    never compare its
                    numbers with published ones

Four stages, three boundaries, as the paper's ResNet-18. 2,000 images are for validation; the test
set is whole.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.config.training import CosineSpec, ImageModel, ImageSet

SMALL = Run(
    model=ImageModel(name="resnet_small", width=16),
    data=ImageSet(
        name="cifar10", batch_size=64, augment="crop_flip", val_size=2000, train_size=10_000
    ),
    schedule=CosineSpec(t_max=8),
    epochs=8,
    eval_every=4,
    channels_last=True,
)

PRESETS = {"cifar_small": SMALL, "cifar_small_jpeg": override(SMALL, {"data.name": "cifar10-jpeg"})}

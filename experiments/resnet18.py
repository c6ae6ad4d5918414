"""ResNet-18 on CIFAR-10, four stages (arXiv 2401.07788, the image-classification tables).

Hardware: one GPU; data stay on the device. Minutes: not yet measured on a GPU here; `sweep plan
NAME --probe` measures some steps on yours and extrapolates. What to expect: the paper's numbers are
not public in readable form, so none is quoted; its findings are claims C1 to C6 of `commsweep
claims`.

`resnet18_paper`      the authors' choices: SGD 0.01, cosine over 200 epochs stopped at 100, batch
                      128 with
                      the last short batch dropped in training, no validation split (so best-on-test
                      is all there is, besides the last epoch), one augmentation drawn per epoch.
`resnet18_topk`       the same with the strict TopK of their notebook: 5 % forward, 10 % backward.
`resnet18_corrected`  annealed schedule (100 of 100), 5,000 validation images, every sample used.
`resnet18_fast`       corrected, with bfloat16 autocast.
`resnet18_jpeg`       that with the JPEG copy of CIFAR-10, which rows and tables name as such.
`resnet18_short_jpeg` that in 8 epochs, at a higher learning rate.

Unlike theirs, the test set is always scored whole (they drop its last 16 images).
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.config.compressors.sparse import TopKSpec, TopKStrictSpec
from commsweep.config.links import Link
from commsweep.config.training import CosineSpec, ImageModel, ImageSet, SGDSpec

PAPER = Run(
    model=ImageModel(name="resnet18", width=64),
    data=ImageSet(name="cifar10", batch_size=128, augment="crop_flip", val_size=0, drop_last=True),
    optim=SGDSpec(lr=0.01, momentum=0.9, weight_decay=5e-4),
    schedule=CosineSpec(t_max=200),
    epochs=100,
    channels_last=True,
)

CORRECTED = PAPER.model_copy(
    update={
        "data": ImageSet(name="cifar10", batch_size=128, augment="crop_flip", val_size=5000),
        "schedule": CosineSpec(t_max=100),
    }
)

FAST = CORRECTED.model_copy(update={"precision": "bfloat16"})

PRESETS = {
    "resnet18_paper": PAPER,
    "resnet18_topk": PAPER.model_copy(
        update={
            "fwd": Link(compressor=TopKStrictSpec(ratio=0.05)),
            "bwd": Link(compressor=TopKStrictSpec(ratio=0.1)),
        }
    ),
    "resnet18_corrected": CORRECTED,
    "resnet18_corrected_topk": CORRECTED.model_copy(
        update={
            "fwd": Link(compressor=TopKSpec(ratio=0.1)),
            "bwd": Link(compressor=TopKSpec(ratio=0.1)),
        }
    ),
    "resnet18_fast": FAST,
    "resnet18_jpeg": override(FAST, {"data.name": "cifar10-jpeg"}),
    "resnet18_short_jpeg": override(
        FAST, {"data.name": "cifar10-jpeg", "epochs": 8, "schedule.t_max": 8, "optim.lr": 0.05}
    ),
}

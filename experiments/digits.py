"""Small ResNet on images that need no download.

`digits`      scikit-learn's 1,797 images of 8x8; one CPU core, about 4 seconds; test accuracy
              about 0.98
`digits_mlp`  the same images through a perceptron of 128 hidden units; 3 seconds; test accuracy
              about 0.97
`synthetic`   the tests' twin: ten noisy patterns; a second

Both keep the paper's shape: four stages, three boundaries, SGD with momentum, cosine schedule
(annealed to zero).
"""

from __future__ import annotations

from commsweep.config import Run
from commsweep.config.training import CosineSpec, ImageModel, ImageSet

DIGITS = Run(
    model=ImageModel(name="resnet_small", width=8),
    data=ImageSet(name="digits", batch_size=64, val_size=180),
    schedule=CosineSpec(t_max=10),
    epochs=10,
    eval_every=2,
    channels_last=True,
)

SYNTHETIC = Run(
    model=ImageModel(name="resnet_small", width=4),
    data=ImageSet(name="synthetic", batch_size=32, val_size=32),
    schedule=CosineSpec(t_max=2),
    epochs=2,
    eval_every=1,
)

PRESETS = {
    "digits": DIGITS,
    "digits_topk": DIGITS.model_validate(
        DIGITS.model_dump()
        | {side: {"compressor": {"kind": "topk", "ratio": 0.1}} for side in ("fwd", "bwd")}
    ),
    "digits_mlp": DIGITS.model_copy(
        update={"model": ImageModel(name="mlp", width=128), "channels_last": False}
    ),
    "synthetic": SYNTHETIC,
}

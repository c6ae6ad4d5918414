"""Ours: must a gradient be compressed more mildly than an activation, or without bias? (claims F1)

One grid for images and text: the same bits over scales with nearest and with stochastic rounding,
sparsifiers with and without bias, with and without error feedback, gradients and activations apart;
images also with AdamW. Launch with --diagnose, which measures error and bias of the messages: some
claims compare settings by these.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.launching.grid import product, seeds, union
from commsweep.registry import preset

ROUNDINGS = ("nearest", "stochastic")


def rounded(
    base: Run, side: str, bits: tuple[int, ...], scales: tuple[str | int, ...]
) -> list[Run]:
    """Min-max codes of one direction by bits, scale and rounding; a number is a scale for so many
    elements.
    """
    runs = []
    for scale in scales:
        grouped = {f"{side}.compressor.scale": ("group",), f"{side}.compressor.group": (scale,)}
        runs += product(
            base,
            {
                f"{side}.compressor.kind": ("uniform",),
                f"{side}.compressor.bits": bits,
                **(grouped if isinstance(scale, int) else {f"{side}.compressor.scale": (scale,)}),
                f"{side}.compressor.rounding": ROUNDINGS,
            },
        )
    return runs


def gradients(base: Run, side: str = "bwd") -> list[Run]:
    """Sparsifiers and low-bit codes of gradients, activations dense: with bias (TopK, unscaled
    RandomK, sign) and without (scaled RandomK, TernGrad, QSGD).
    """
    kind, ratio, feedback = (
        f"{side}.compressor.kind",
        f"{side}.compressor.ratio",
        f"{side}.feedback.kind",
    )
    return [
        *product(base, {kind: ("topk",), ratio: (0.5, 0.1, 0.05), feedback: ("none", "ef")}),
        *product(
            base,
            {kind: ("randomk",), ratio: (0.5, 0.1), f"{side}.compressor.scaled": (False, True)},
        ),
        *product(base, {kind: ("tern", "sign")}),
        *product(base, {kind: ("qsgd",), f"{side}.compressor.levels": (1,)}),
    ]


def masks(base: Run, ratio: float = 0.2) -> list[Run]:
    """The gradient of a sparse activation: dense, a TopK of its own, the
    activation's mask, that mask with values of 2 bits without bias.
    """
    forward = override(base, {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": ratio})
    return [
        forward,
        *product(forward, {"bwd.compressor.kind": ("topk",), "bwd.compressor.ratio": (ratio,)}),
        *product(forward, {"bwd.compressor.kind": ("forward_mask",)}),
        *product(
            forward,
            {
                "bwd.compressor.kind": ("forward_mask",),
                "bwd.compressor.values.kind": ("uniform",),
                "bwd.compressor.values.bits": (2,),
                "bwd.compressor.values.scale": ("group",),
                "bwd.compressor.values.rounding": ROUNDINGS,
            },
        ),
    ]


def text_bias() -> list[Run]:
    """Bias or mildness on a nano GPT-2 with AdamW, 5 seeds; half an hour on two cores."""
    base = preset("sotu_nano")
    return seeds(
        union(
            [base],
            rounded(base, "bwd", (2, 4), ("tensor", "sample", 128, 32)),
            gradients(base),
            rounded(base, "fwd", (2,), ("tensor", 128)),
            masks(base),
        ),
        5,
    )


def cifar_bias(base: str = "cifar_small") -> list[Run]:
    """Bias or mildness on 10,000 CIFAR-10 images with SGD, and the core of it with AdamW; under
    three hours on two cores. Three seeds, two more where differences are small.
    """
    sgd = preset(base)
    adamw = override(sgd, {"optim.kind": "adamw", "optim.lr": 0.003, "optim.weight_decay": 0.05})
    both = [
        [
            run,
            *rounded(run, "bwd", (2,), ("tensor", 128)),
            *product(run, {"bwd.compressor.kind": ("topk",), "bwd.compressor.ratio": (0.1, 0.05)}),
            *product(run, {"bwd.compressor.kind": ("tern",)}),
        ]
        for run in (sgd, adamw)
    ]
    grid = union(
        *both,
        rounded(sgd, "bwd", (2,), ("tensor", "sample", 1024, 128, 32)),
        rounded(sgd, "bwd", (4,), ("tensor", 128)),
        gradients(sgd),
        rounded(sgd, "fwd", (2,), ("tensor", 128)),
        masks(sgd),
    )
    close = union(
        [sgd],
        rounded(sgd, "bwd", (2,), (128,)),
        rounded(sgd, "fwd", (2,), (128,)),
        product(sgd, {"bwd.compressor.kind": ("topk",), "bwd.compressor.ratio": (0.05,)}),
    )
    return seeds(grid, 3) + seeds(close, 2, first=3)


def cifar_bias_jpeg() -> list[Run]:
    """`cifar_bias` with the JPEG copy of the images."""
    return cifar_bias("cifar_small_jpeg")


def smoke_bias() -> list[Run]:
    """The grid of both on the tests' twins, one seed: seconds."""
    text, image = preset("synthetic_text"), preset("synthetic")
    return union(
        *(
            [run, *rounded(run, "bwd", (2,), ("tensor", 128)), *gradients(run), *masks(run)]
            for run in (text, image)
        )
    )


SWEEPS = {
    "text_bias": text_bias,
    "cifar_bias": cifar_bias,
    "cifar_bias_jpeg": cifar_bias_jpeg,
    "smoke-bias": smoke_bias,
}

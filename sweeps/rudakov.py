"""Rudakov et al., arXiv 2401.07788: compression of activations and gradients between stages.

The same grids serve the embedded digits in minutes and ResNet-18 on CIFAR-10 on a GPU; only the
base Run, the levels and the number of seeds differ.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.launching.grid import in_bfloat16, product, seeds, union
from commsweep.registry import preset

K_LEVELS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
FWD_KIND, BWD_KIND = "fwd.compressor.kind", "bwd.compressor.kind"
BOTH_KINDS = f"{FWD_KIND}+{BWD_KIND}"
WARM = "fwd.start_epoch+bwd.start_epoch"
BOTH_RATIOS = "fwd.compressor.ratio+bwd.compressor.ratio"


def topk(base: Run, levels: tuple[float, ...] = K_LEVELS, kind: str = "topk") -> list[Run]:
    """TopK both ways at each level; every run scores with compression on and off."""
    return product(base, {BOTH_KINDS: (kind,), BOTH_RATIOS: levels})


def quantization(
    base: Run, fwd_bits: tuple[int, ...], bwd_bits: tuple[int, ...], scale: str = "tensor"
) -> list[Run]:
    """Min-max codes, every pair of forward and backward bits. Scale "tensor" is the authors'
    batch-wide range.
    """
    return product(
        base,
        {
            BOTH_KINDS: ("uniform",),
            "fwd.compressor.scale+bwd.compressor.scale": (scale,),
            "fwd.compressor.bits": fwd_bits,
            "bwd.compressor.bits": bwd_bits,
        },
    )


def one_sided(base: Run, bits: tuple[int, ...], scale: str) -> list[Run]:
    """The same bits on activations only, then on gradients only: which of them bears compression
    better?
    """
    return [
        run
        for side in ("fwd", "bwd")
        for run in product(
            base,
            {
                f"{side}.compressor.kind": ("uniform",),
                f"{side}.compressor.scale": (scale,),
                f"{side}.compressor.bits": bits,
            },
        )
    ]


def feedback(
    base: Run,
    levels: tuple[float, ...],
    kinds: tuple[str, ...] = ("ef", "ef_mixed", "ef21"),
    kind: str = "topk",
) -> list[Run]:
    """TopK both ways with an error feedback both ways."""
    return product(
        base,
        {BOTH_KINDS: (kind,), BOTH_RATIOS: levels, "fwd.feedback.kind+bwd.feedback.kind": kinds},
    )


def aqsgd(base: Run, levels: tuple[float, ...], kind: str = "topk") -> list[Run]:
    """AQ-SGD with TopK on activations, plain TopK on gradients."""
    return product(
        base, {BOTH_KINDS: (kind,), BOTH_RATIOS: levels, "fwd.feedback.kind": ("aqsgd",)}
    )


def demo() -> list[Run]:
    """Twelve settings of the paper on the embedded digits, and the control that sends nothing back,
    eight seeds, which decide most claims; minutes on two cores (`make demo`).
    """
    base = override(preset("digits"), {"recalibrate": 20})
    grid = union(
        [base, override(base, {"bwd.compressor.kind": "zero"})],
        topk(base, (0.3, 0.1, 0.05, 0.02)),
        one_sided(base, (2,), "tensor"),
        quantization(base, (2,), (8,)),
        feedback(base, (0.1,), ("ef", "ef21")),
        aqsgd(base, (0.3, 0.1)),
    )
    return seeds(grid, 8)


def digits_methods() -> list[Run]:
    """Every method of the paper on the embedded digits, three seeds; five minutes on two cores."""
    base = preset("digits")
    grid = union(
        [base],
        topk(base),
        quantization(base, (2, 4), (2, 4, 8)),
        one_sided(base, (2, 4), "tensor"),
        one_sided(base, (2,), "group"),
        feedback(base, (0.3, 0.1)),
        aqsgd(base, (0.3, 0.1, 0.02)),
    )
    close = union(
        [base], topk(base, (0.1, 0.05)), feedback(base, (0.1,), ("ef21",)), aqsgd(base, (0.1,))
    )
    return seeds(grid, 3) + seeds(close, 2, first=3)


def digits_core() -> list[Run]:
    """The comparisons of the paper's claims, on the embedded digits, with the seeds that decided
    them; five minutes on two cores.
    """
    base = preset("digits")
    return union(
        seeds([base, *topk(base, (0.1, 0.05))], 30),
        seeds(one_sided(base, (4,), "tensor") + one_sided(base, (2,), "group"), 24),
        seeds(one_sided(base, (2,), "tensor") + feedback(base, (0.1,), ("ef", "ef21")), 15),
        seeds(aqsgd(base, (0.3, 0.1)), 12),
        seeds(quantization(base, (2,), (8,)), 8),
    )


def digits_grid() -> list[Run]:
    """The rest of the paper's grids on the embedded digits, beside dense and nothing sent, five
    seeds: all pairs of bits, AQ-SGD and EF-mixed by K, warm starts; ten minutes of a core.
    """
    base = preset("digits")
    bits = (2, 4, 6, 8)
    warm = product(base, {BOTH_KINDS: ("topk",), BOTH_RATIOS: (0.1, 0.05), WARM: (1, 2, 5)})
    grid = union(
        [base, override(base, {BWD_KIND: "zero"}), override(base, {FWD_KIND: "zero"})],
        quantization(base, bits, bits),
        topk(base, (0.5, 0.2, 0.1, 0.05, 0.02)),
        aqsgd(base, (0.5, 0.2, 0.05, 0.02)),
        feedback(base, (0.5, 0.2, 0.05), ("ef_mixed",)),
        warm,
    )
    return seeds(grid, 5, first=20)


def cifar_small(base: str = "cifar_small") -> list[Run]:
    """The paper's core questions on 10,000 CIFAR-10 images; an hour and a half on two cores.

    Three seeds everywhere, two more where a claim compares small differences or wants equivalence.
    """
    new = preset(base)
    fixed = override(new, {"data.fixed_augment": True})
    aq = union([fixed], aqsgd(new, (0.3, 0.1)), aqsgd(fixed, (0.3, 0.1)))
    grid = union(
        [new],
        topk(new, (0.3, 0.1, 0.05, 0.02)),
        feedback(new, (0.1,)),
        one_sided(new, (2, 4), "tensor"),
        one_sided(new, (2, 4), "group"),
        quantization(new, (2,), (8,)),
        aq,
    )
    close = union(
        [new],
        topk(new, (0.1, 0.05)),
        feedback(new, (0.1,), ("ef21",)),
        one_sided(new, (4,), "tensor"),
        one_sided(new, (2, 4), "group"),
        aq,
    )
    return seeds(grid, 3) + seeds(close, 2, first=3)


def cifar_small_jpeg() -> list[Run]:
    """`cifar_small` with the JPEG copy of the images."""
    return cifar_small("cifar_small_jpeg")


def smoke() -> list[Run]:
    """The demo's methods on the tests' synthetic twin, one seed, two epochs: seconds."""
    base = preset("synthetic")
    return union(
        [base],
        topk(base, (0.5, 0.1)),
        quantization(base, (4,), (4, 8)),
        one_sided(base, (2,), "tensor"),
        one_sided(base, (2,), "group"),
        feedback(base, (0.1,)),
        aqsgd(base, (0.1,)),
    )


def resnet18_quantization() -> list[Run]:
    """The bit-width grid, 5 seeds."""
    return seeds(_quantization(preset("resnet18_paper")), 5)


def resnet18_topk() -> list[Run]:
    """TopK 50 to 2 %, 5 seeds, with the uncompressed baseline."""
    base = preset("resnet18_paper")
    return seeds([base, *topk(base, kind="topk_strict")], 5)


def resnet18_feedback() -> list[Run]:
    """TopK with EF, EF-mixed and EF21, 5 seeds."""
    return seeds(feedback(preset("resnet18_paper"), K_LEVELS[2:], kind="topk_strict"), 5)


def resnet18_aqsgd() -> list[Run]:
    """AQ-SGD with TopK under the authors' augmentation and with each sample's augmentation fixed, 5
    seeds.
    """
    base = preset("resnet18_paper")
    fixed = override(base, {"data.fixed_augment": True})
    return seeds(aqsgd(base, K_LEVELS, "topk_strict") + aqsgd(fixed, K_LEVELS, "topk_strict"), 5)


def resnet18_paper() -> list[Run]:
    """The whole grid of the paper with the authors' choices, 5 seeds."""
    return union(resnet18_topk(), resnet18_quantization(), resnet18_feedback(), resnet18_aqsgd())


def resnet18_corrected() -> list[Run]:
    """The same questions with the corrected choices, 5 seeds: annealed rate, validation split,
    exact TopK.
    """
    base = preset("resnet18_corrected")
    fixed = override(base, {"data.fixed_augment": True})
    return seeds(
        union(
            [base],
            topk(base),
            _quantization(base),
            feedback(base, K_LEVELS[2:]),
            aqsgd(base, K_LEVELS),
            aqsgd(fixed, K_LEVELS),
        ),
        5,
    )


def resnet18_core_jpeg() -> list[Run]:
    """The paper's core on a GPU with the JPEG copy of CIFAR-10, by value, seed after seed: TopK,
    codes, EF, EF21 and AQ-SGD in bfloat16, 3 seeds.
    """
    base = preset("resnet18_jpeg")
    fixed = override(base, {"data.fixed_augment": True})
    codes = [
        run
        for scale in ("tensor", "group")
        for bits in ((4, 8), (8, 4), (2, 8))
        for run in quantization(base, bits[:1], bits[1:], scale)
    ]
    return seeds(
        union(
            [base],
            topk(base, (0.3, 0.1, 0.05, 0.02)),
            feedback(base, (0.1,), ("ef21", "ef")),
            codes,
            aqsgd(base, (0.3, 0.1)),
            [fixed],
            aqsgd(fixed, (0.3, 0.1)),
        ),
        3,
    )


def resnet18_short_jpeg() -> list[Run]:
    """The paper's first questions about ResNet-18 in 8 epochs of the JPEG copy of CIFAR-10, by
    value, seed after seed: ten minutes of a GPU; bfloat16, 3 seeds.
    """
    base = preset("resnet18_short_jpeg")
    fixed = override(base, {"data.fixed_augment": True})
    codes = [
        run
        for scale in ("tensor", "group")
        for bits in ((4, 8), (8, 4))
        for run in quantization(base, bits[:1], bits[1:], scale)
    ]
    return seeds(
        union(
            [base],
            topk(base, (0.1, 0.3, 0.02)),
            feedback(base, (0.1,), ("ef21", "ef")),
            codes,
            aqsgd(base, (0.1,)),
            [fixed],
            aqsgd(fixed, (0.1,)),
        ),
        3,
    )


def resnet18_paper_bf16() -> list[Run]:
    """`resnet18_paper` in bfloat16."""
    return in_bfloat16(resnet18_paper())


def resnet18_corrected_bf16() -> list[Run]:
    """`resnet18_corrected` in bfloat16."""
    return in_bfloat16(resnet18_corrected())


def _quantization(base: Run) -> list[Run]:
    return union(
        quantization(base, (2, 4, 6, 8), (2, 4, 6, 8)),
        one_sided(base, (2, 3, 4), "tensor"),
        one_sided(base, (2, 3, 4), "group"),
    )


SWEEPS = {
    "demo": demo,
    "digits_methods": digits_methods,
    "digits_core": digits_core,
    "digits_grid": digits_grid,
    "smoke": smoke,
    "cifar_small": cifar_small,
    "cifar_small_jpeg": cifar_small_jpeg,
    "resnet18_quantization": resnet18_quantization,
    "resnet18_topk": resnet18_topk,
    "resnet18_feedback": resnet18_feedback,
    "resnet18_aqsgd": resnet18_aqsgd,
    "resnet18_paper": resnet18_paper,
    "resnet18_corrected": resnet18_corrected,
    "resnet18_paper_bf16": resnet18_paper_bf16,
    "resnet18_corrected_bf16": resnet18_corrected_bf16,
    "resnet18_core_jpeg": resnet18_core_jpeg,
    "resnet18_short_jpeg": resnet18_short_jpeg,
}

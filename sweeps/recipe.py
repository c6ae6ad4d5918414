"""Ours: what to use forward and what backward at equal bytes, which feedback makes dense inference
lossless, and when the losses of boundaries and learners add (claims F3, F4, F5). Launch with
--diagnose.
"""

from __future__ import annotations

from typing import Any

from commsweep.config import Run, override
from commsweep.launching.grid import product, seeds, union
from commsweep.registry import preset

from .adacomp import METHODS

Changes = dict[str, Any]


def code(bits: int, rounding: str = "nearest", group: int = 128) -> Changes:
    """Min-max codes with a range of their own for every `group` elements."""
    return {"kind": "uniform", "bits": bits, "scale": "group", "group": group, "rounding": rounding}


def kept_share(ratio: float, bits: int = 0) -> Changes:
    """TopK; `bits`: of its values, with a range a sample."""
    values = (
        {"values.kind": "uniform", "values.bits": bits, "values.scale": "sample"} if bits else {}
    )
    return {"kind": "topk", "ratio": ratio} | values


MASK: Changes = {"kind": "forward_mask"}
MASK_2: Changes = MASK | {
    "values.kind": "uniform",
    "values.bits": 2,
    "values.scale": "group",
    "values.rounding": "stochastic",
}
TERN: Changes = {"kind": "tern"}
# By direction, from an eighth of the dense bytes down.
FORWARD = (
    kept_share(0.1),
    kept_share(0.2, 4),
    kept_share(0.1, 4),
    code(4),
    code(2),
    {"kind": "tah"},
    {"kind": "randtopk", "ratio": 0.1},
)
BACKWARD = (kept_share(0.1), code(4, "stochastic"), code(2), code(2, "stochastic"), TERN)
# (forward, backward): ours, and what the papers use.
PAIRS = (
    (code(4), code(2, "stochastic")),
    (code(2), code(2, "stochastic")),
    (code(4), TERN),
    (kept_share(0.2, 4), MASK_2),
    (kept_share(0.1, 4), MASK_2),
    (kept_share(0.2, 4), code(2, "stochastic")),
    (kept_share(0.1), MASK),
    (kept_share(0.3), kept_share(0.3)),
    (kept_share(0.1), kept_share(0.1)),
    (kept_share(0.05), kept_share(0.05)),
    ({"kind": "tah"}, code(4)),
)


def pair(base: Run, fwd: Changes | None = None, bwd: Changes | None = None) -> Run:
    """`base` with these compressors."""
    changes = {
        f"{side}.compressor.{key}": value
        for side, spec in (("fwd", fwd), ("bwd", bwd))
        for key, value in (spec or {}).items()
    }
    return override(base, changes)


def ranking(base: Run) -> list[Run]:
    """Forward alone, backward alone, and pairs."""
    return [
        *(pair(base, code) for code in FORWARD),
        *(pair(base, None, code) for code in BACKWARD),
        *(pair(base, *both) for both in PAIRS),
    ]


def remembered(base: Run) -> list[Run]:
    """AQ-SGD as published: few bits of each sample's change forward, few bits backward."""
    return [override(pair(base, code(2), code(2, "stochastic")), {"fwd.feedback.kind": "aqsgd"})]


def feedback(base: Run, ratio: float = 0.1) -> list[Run]:
    """TopK both ways with every error feedback, keyed by the slot of a batch and by sample."""
    both = pair(base, kept_share(ratio), kept_share(ratio))
    return [
        both,
        *product(
            both,
            {
                "fwd.feedback.kind+bwd.feedback.kind": ("ef", "ef_mixed", "ef21"),
                "fwd.feedback.key+bwd.feedback.key": ("slot", "sample"),
            },
        ),
    ]


def additive(base: Run) -> list[Run]:
    """Two ways at the boundaries times two of the learners' gradients, each with none."""
    links = [
        base,
        pair(base, kept_share(0.1, 4), MASK_2),
        pair(base, kept_share(0.1), kept_share(0.1)),
    ]
    return [
        override(link, {"grad.learners": 4} | METHODS[name])
        for link in links
        for name in ("dense", "AdaComp", "TernGrad")
    ]


def cifar_recipe(base: str = "cifar_small") -> list[Run]:
    """The choice of codes forward and backward, feedbacks by key, boundaries times learners, on
    10,000 CIFAR-10 images; three seeds, under two hours on two cores.
    """
    run = preset(base)
    return seeds(union([run], ranking(run), remembered(run), feedback(run), additive(run)), 3)


def cifar_recipe_jpeg() -> list[Run]:
    """`cifar_recipe` with the JPEG copy of the images."""
    return cifar_recipe("cifar_small_jpeg")


def text_recipe() -> list[Run]:
    """The same on a nano GPT-2, five seeds; a quarter of an hour on two cores. (One epoch, so no
    memory by sample.)
    """
    run = preset("sotu_nano")
    return seeds(union([run], ranking(run), additive(run)), 5)


def smoke_recipe() -> list[Run]:
    """The same on the tests' twin, one seed: seconds."""
    run = preset("synthetic")
    return union([run], ranking(run), remembered(run), feedback(run), additive(run))


SWEEPS = {
    "text_recipe": text_recipe,
    "cifar_recipe": cifar_recipe,
    "cifar_recipe_jpeg": cifar_recipe_jpeg,
    "smoke-recipe": smoke_recipe,
}

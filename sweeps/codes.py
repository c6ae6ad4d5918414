"""Ours: codes of 2025 and 2026, of activations and of gradients: 1,600 steps of text, 24 epochs of
images (R1, R2).
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.registry import preset

from .recipe import TERN, Changes, code, pair

STOCHASTIC = "stochastic"


def rotated(inner: Changes) -> Changes:
    """A code behind a random rotation."""
    return {"kind": "rotated"} | {f"code.{name}": value for name, value in inner.items()}


def eden(bits: int) -> Changes:
    """EDEN; one bit is DRIVE."""
    return {"kind": "eden", "bits": bits}


def mx(format_: str, rounding: str = "nearest") -> Changes:
    """A microscaling format."""
    return {"kind": "mx", "format": format_, "rounding": rounding}


def text_codes() -> list[Run]:
    """Dense, seven codes of gradients and five of activations, three seeds, 1,600 steps of a nano
    GPT-2; an hour of a core.
    """
    base = override(preset("sotu_nano"), {"data.train_blocks": 25600})
    gradients = (
        code(4, STOCHASTIC),
        mx("mxfp4", STOCHASTIC),
        {"kind": "ms_eden"},
        eden(4),
        code(2, STOCHASTIC),
        eden(2),
        TERN,
    )
    activations = (
        code(4),
        rotated(code(2)),
        code(2),
        eden(2),
        mx("mxfp4"),
    )
    arms = [base]
    arms += [pair(base, None, gradient) for gradient in gradients]
    arms += [pair(base, activation) for activation in activations]
    return [arm.model_copy(update={"seed": seed}) for seed in range(3) for arm in arms]


def image_codes() -> list[Run]:
    """Dense, four codes of gradients and four of activations, three seeds, 24 epochs of 10,000
    CIFAR-10 images; two hours of a core.
    """
    length = {"epochs": 24, "schedule.t_max": 24, "eval_every": 12}
    base = override(preset("cifar_small_jpeg"), length)
    gradients = (code(2, STOCHASTIC), eden(2), {"kind": "ms_eden"}, TERN)
    activations = (code(4), mx("mxfp4"), code(2), rotated(code(2)))
    arms = [base]
    arms += [pair(base, None, gradient) for gradient in gradients]
    arms += [pair(base, activation) for activation in activations]
    return [arm.model_copy(update={"seed": seed}) for seed in range(3) for arm in arms]


SWEEPS = {"text_codes": text_codes, "image_codes": image_codes}

"""Ours: does an effect last? The same arms on trainings of growing length and width, at learning
rates of their own, and with BatchNorm's statistics gathered anew.

Text: 100, 400 and 1,600 steps of a nano GPT-2, 32 to 128 features. Images: 2, 8 and 24 epochs of
10,000 CIFAR-10 images.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.launching.grid import seeds
from commsweep.registry import preset

from .recipe import MASK_2, TERN, code, kept_share, pair

TEXT_BLOCKS = (1600, 6400, 25600)  # of 64 bytes, sixteen a step
IMAGE_EPOCHS = (2, 8, 24)
HELD_OUT = 100  # the seed that chooses a rate; the other seeds judge it
RATES = (0.00125, 0.0025, 0.005, 0.01)  # the preset has the third
WIDTHS = (32, 64, 128)
SCALE_SEED = 70  # the first of the law of scale


def _text_arms(base: Run) -> list[Run]:
    """Dense; gradients in 2 bits with and without bias, signs, TopK with and without feedback;
    activations in 2 bits; TopK both ways; the recipe of `text_recipe`.
    """
    topk = pair(base, None, kept_share(0.1))
    return [
        base,
        pair(base, None, code(2)),
        pair(base, None, code(2, "stochastic")),
        pair(base, None, TERN),
        topk,
        override(topk, {"bwd.feedback.kind": "ef"}),
        pair(base, code(2)),
        pair(base, kept_share(0.1), kept_share(0.1)),
        pair(base, kept_share(0.2, 4), MASK_2),
    ]


def text_length() -> list[Run]:
    """Nine arms, three lengths, five seeds; an hour of two cores."""
    base = preset("sotu_nano")
    runs = []
    for seed in range(5):
        for blocks in TEXT_BLOCKS:
            for arm in _text_arms(override(base, {"data.train_blocks": blocks})):
                runs.append(arm.model_copy(update={"seed": seed}))
    return runs


def _image_arms(base: Run) -> list[Run]:
    """Dense, TopK both ways, with EF21, and the recipe."""
    topk = pair(base, kept_share(0.1), kept_share(0.1))
    feedback = {"fwd.feedback.kind": "ef21", "bwd.feedback.kind": "ef21"}
    return [base, topk, override(topk, feedback), pair(base, kept_share(0.2, 4), MASK_2)]


def image_length() -> list[Run]:
    """Four arms, three lengths, three seeds, on the JPEG copy; an hour and a half of two cores."""
    base = preset("cifar_small_jpeg")
    runs = []
    for epochs in IMAGE_EPOCHS:
        length = {"epochs": epochs, "schedule.t_max": epochs, "eval_every": epochs // 2}
        for seed in range(3):
            for arm in _image_arms(base):
                runs.append(override(arm, length | {"seed": seed}))
    return runs


def gradient_arms(base: Run) -> list[Run]:
    """Dense; gradients in 2 bits without bias; by TopK; by TopK with error feedback."""
    topk = pair(base, None, kept_share(0.1))
    return [
        base,
        pair(base, None, code(2, "stochastic")),
        topk,
        override(topk, {"bwd.feedback.kind": "ef"}),
    ]


def text_rates() -> list[Run]:
    """Dense gradients, 2 bits without bias, TopK, TopK with error feedback; four learning rates,
    400 steps; a held-out seed that chooses the rate and three that judge; half an hour of two
    cores.
    """
    base = override(preset("sotu_nano"), {"data.train_blocks": 6400})
    arms = gradient_arms(base)
    runs = []
    for seed in (HELD_OUT, *range(3)):
        for rate in RATES:
            for arm in arms:
                runs.append(override(arm, {"optim.lr": rate, "seed": seed}))
    return runs


def text_width() -> list[Run]:
    """Dense, gradients by TopK and in 2 bits without bias, the recipe; three widths, 400 steps,
    three seeds; half an hour of two cores.
    """
    runs = []
    for width in WIDTHS:
        base = at_width(width, 0.005, TEXT_BLOCKS[1])
        arms = [
            base,
            pair(base, None, code(2, "stochastic")),
            pair(base, None, kept_share(0.1)),
            pair(base, kept_share(0.2, 4), MASK_2),
        ]
        for seed in range(3):
            for arm in arms:
                runs.append(override(arm, {"seed": seed}))
    return runs


def at_width(width: int, rate: float, blocks: int) -> Run:
    """A nano GPT-2 of a width, with a rate that falls with the width, as in muP. rate: at 64."""
    changes = {"model.width": width, "optim.lr": rate * 64 / width, "data.train_blocks": blocks}
    return override(preset("sotu_nano"), changes)


def text_scale_rates() -> list[Run]:
    """Dense, three widths and three learning rates, 400 steps, one seed that chooses the rate; ten
    minutes of a core.
    """
    runs = []
    for width in WIDTHS:
        for rate in (0.005, 0.01, 0.02):
            run = at_width(width, rate, TEXT_BLOCKS[1])
            runs.append(run.model_copy(update={"seed": HELD_OUT}))
    return runs


def _unbiased_arms(base: Run) -> list[Run]:
    """Dense, nothing sent, and gradients by five codes without bias."""
    codes = (
        {"kind": "zero"},
        code(4, "stochastic"),
        code(2, "stochastic"),
        TERN,
        {"kind": "randomk", "ratio": 0.25, "scaled": True},
        {"kind": "eden", "bits": 2},
    )
    return [base, *(pair(base, None, changes) for changes in codes)]


def text_scale() -> list[Run]:
    """Seven arms of a nano GPT-2 at three widths, each at the rate that `text_scale_rates` chose,
    400 steps with up to three seeds, 1,600 with one; 1,600 steps at a fourth width, which a law of
    the others foretold; three hours of two cores. Launch with --diagnose.
    """
    short, long = [], []
    for width in WIDTHS:
        short += _unbiased_arms(at_width(width, 0.01, TEXT_BLOCKS[1]))
        long += _unbiased_arms(at_width(width, 0.01, TEXT_BLOCKS[2]))
    beyond = _unbiased_arms(at_width(2 * WIDTHS[-1], 0.01, TEXT_BLOCKS[2]))
    return seeds([*short, *long, *beyond], 1, SCALE_SEED) + seeds(short, 2, SCALE_SEED + 1)


def image_recalibrated() -> list[Run]:
    """TopK 10 and 5 % both ways, scored a third time after BatchNorm met 50 dense batches; five
    seeds; half an hour of two cores.
    """
    base = override(preset("cifar_small_jpeg"), {"recalibrate": 50})
    runs = []
    for seed in range(5):
        for ratio in (0.1, 0.05):
            arm = pair(base, kept_share(ratio), kept_share(ratio))
            runs.append(override(arm, {"seed": seed}))
    return runs


SWEEPS = {
    "text_length": text_length,
    "text_rates": text_rates,
    "text_width": text_width,
    "text_scale_rates": text_scale_rates,
    "text_scale": text_scale,
    "image_length": image_length,
    "image_recalibrated": image_recalibrated,
}

"""Ours: does an effect last? The same arms on trainings of growing length.

Text: 100, 400 and 1,600 steps of a nano GPT-2. Images: 8, 24 and 72 epochs of 10,000 CIFAR-10
images.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.registry import preset

from .recipe import MASK_2, TERN, code, kept, pair

TEXT_BLOCKS = (1600, 6400, 25600)  # of 64 bytes, sixteen a step
IMAGE_EPOCHS = (8, 24, 72)


def _text_arms(base: Run) -> list[Run]:
    """Dense; gradients in 2 bits with and without bias, signs, TopK with and without feedback;
    activations in 2 bits; TopK both ways; the recipe of `text_recipe`.
    """
    topk = pair(base, None, kept(0.1))
    return [
        base,
        pair(base, None, code(2)),
        pair(base, None, code(2, "stochastic")),
        pair(base, None, TERN),
        topk,
        override(topk, {"bwd.feedback.kind": "ef"}),
        pair(base, code(2)),
        pair(base, kept(0.1), kept(0.1)),
        pair(base, kept(0.2, 4), MASK_2),
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
    topk = pair(base, kept(0.1), kept(0.1))
    feedback = {"fwd.feedback.kind": "ef21", "bwd.feedback.kind": "ef21"}
    return [base, topk, override(topk, feedback), pair(base, kept(0.2, 4), MASK_2)]


def image_length() -> list[Run]:
    """Four arms, three lengths, three seeds, on the JPEG copy; five hours of two cores."""
    base = preset("cifar_small_jpeg")
    runs = []
    for epochs in IMAGE_EPOCHS:
        length = {"epochs": epochs, "schedule.t_max": epochs, "eval_every": epochs // 2}
        for seed in range(3):
            for arm in _image_arms(base):
                runs.append(override(arm, length | {"seed": seed}))
    return runs


SWEEPS = {"text_length": text_length, "image_length": image_length}

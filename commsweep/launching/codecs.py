"""Codecs in words, "topk:0.1; uniform:2; ef+topk:0.01", as settings of the messages of a role."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from commsweep.config import Run, override
from commsweep.config.compressors.spelling import separated
from commsweep.config.gradients import exchange_of
from commsweep.errors import UserError

# Where a role's messages have their settings.
SIDES = {"activations": "fwd", "gradients": "bwd", "learners": "grad", "pseudo-gradients": "grad"}
DENSE, CONTROL = "none", "zero"
NO_FEEDBACK = "none"


def listed(text: str) -> list[str]:
    """Return the codecs of a list, separated by semicolons. Raises UserError on an empty one, and
    on a codec named twice.
    """
    codecs = [word.strip() for word in text.split(";") if word.strip()]
    if not codecs:
        raise UserError(f"--codecs '{text}': name some, as \"topk:0.1; uniform:2; ef+topk:0.01\"")
    for codec in codecs:
        if codecs.count(codec) > 1:
            raise UserError(f"--codecs: '{codec}' is named twice; name it once")
    return codecs


def changes(role: str, codec: str, feedback: str = NO_FEEDBACK, prefix: str = "") -> dict[str, Any]:
    """Return the settings of a codec in a role. prefix: "at.layer1." of one boundary, "" of all.

    Learners' messages differ from what `override` makes of grad=CODEC: all codecs of a comparison
    are gathered and code vectors, too, so that their bytes mean the same.
    """
    side = f"{prefix}{SIDES[role]}"
    settings: dict[str, Any] = {side: codec if feedback == NO_FEEDBACK else f"{feedback}+{codec}"}
    if side == "grad" and codec != DENSE:
        settings |= {"grad.exchange": exchange_of(None), "grad.compress_vectors": True}
    return settings


def runs(base: Run, codecs: Iterable[str], roles: Iterable[str]) -> list[Run]:
    """Return a run a codec, in all of the roles at once, behind a dense one and, at boundaries, one
    in which nothing is sent. Raises UserError where they do not go together.
    """
    roles = list(roles)
    between_learners = any(SIDES[role] == "grad" for role in roles)
    if between_learners and base.grad.learners < 2:
        raise UserError(
            "--role learners: the preset has one learner, who sends nothing; add grad.learners=4"
        )
    controls = [DENSE] if between_learners else [DENSE, CONTROL]
    settings = []
    for text in dict.fromkeys([*controls, *codecs]):
        codec, feedback = separated(text)
        merged: dict[str, Any] = {}
        for role in roles:
            merged |= changes(role, codec, feedback)
        settings.append(override(base, merged))
    return settings

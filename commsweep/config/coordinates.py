"""A run's codec in words, K, bits and feedback, from its settings under dotted names: what tables
and dashboards draw a grid by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from commsweep.config.gradients import Gradients
from commsweep.config.links import Link

# a setting of a codec, which its word has
CODEC_SETTING = re.compile(r"(fwd|bwd|grad|at\..+)\.(compressor|feedback)\b")
SIDES = {"fwd": Link, "bwd": Link, "grad": Gradients}
DENSE = "dense"
# the settings of a side that say it: the share of entries kept, and bits of a value
SHARES = ("compressor.ratio",)
BITS = ("compressor.bits", "compressor.values.bits")


def codecs(row: Mapping[str, Any]) -> dict[str, Any]:
    """The codec of each side of a row in words, K, bits and feedback."""
    words = {side: _word(row, side) for side in SIDES}
    sent = [f"{side}={word}" for side, word in words.items() if word not in ("none", "")]
    feedbacks = [row.get(f"{side}.feedback.kind") for side in SIDES]
    named = [kind for kind in feedbacks if isinstance(kind, str) and kind != "none"]
    return {
        "codec": " ".join(sent) or DENSE,
        **{f"{side}.codec": word for side, word in words.items()},
        "K": _first(row, SHARES),
        "bits": _first(row, BITS),
        "feedback": named[0] if named else "none",
    }


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    for side in SIDES:
        for name in names:
            value = row.get(f"{side}.{name}")
            if not _absent(value):
                return float(value)  # pyright: ignore[reportArgumentType]
    return None


def _word(row: Mapping[str, Any], side: str) -> str:
    """The codec of a side in one word; of settings that no version has any more, its kind."""
    settings: dict[str, Any] = {}
    for name, value in row.items():
        if not name.startswith((f"{side}.compressor.", f"{side}.feedback.")) or _absent(value):
            continue
        section, *inner, last = name.split(".")[1:]
        target = settings.setdefault(section, {})
        for key in inner:
            target = target.setdefault(key, {})
        target[last] = value
    kind = settings.get("compressor", {}).get("kind", "none")
    learners = {"learners": 2, "exchange": "allgather"} if side == "grad" else {}
    try:
        return SIDES[side].model_validate(settings | learners).word
    except (ValidationError, ValueError):
        return str(kind)


def _absent(value: Any) -> bool:
    """True of None, and of the NaN that a table has instead."""
    return value is None or value != value

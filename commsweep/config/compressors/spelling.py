"""A compressor in one word: "topk:0.1", "uniform:4,rounding=stochastic", "mxfp4",
"mine.py:RowSigns,k=4".
"""

from __future__ import annotations

import re
from typing import Any, get_args

from commsweep.config.base import Spec, kinds_of
from commsweep.config.compressors.base import Compression
from commsweep.config.compressors.own import OwnCodeSpec
from commsweep.config.compressors.values.mx import MXSpec

MAIN = ("ratio", "bits", "rank", "levels")  # what a number without a name means
FORMATS = get_args(MXSpec.model_fields["format"].annotation)
OWN = re.compile(r"[^:,=\s]+:[A-Za-z_]\w*")


def spelled(text: str) -> dict[str, Any] | None:
    """Return the settings that a word means; None where it begins with no kind of compressor.

    Raises ValueError naming a part that is no setting.
    """
    specs_by_kind = {spec.model_fields["kind"].default: spec for spec in kinds_of(Compression)}
    head, _, settings_text = text.partition(",")
    kind, _, first = head.partition(":")
    if kind not in specs_by_kind and OWN.fullmatch(head):
        options = _pairs(text, settings_text, "option")
        return {"kind": "own", "code": head} | ({"options": options} if options else {})
    if first:
        settings_text = f"{first},{settings_text}" if settings_text else first
    if kind in FORMATS:
        return {"kind": "mx", "format": kind} | _settings(text, settings_text, MXSpec)
    if kind not in specs_by_kind or specs_by_kind[kind] is OwnCodeSpec:
        return None
    return {"kind": kind} | _settings(text, settings_text, specs_by_kind[kind])


def in_full(value: Any) -> Any:
    """Return the settings that a word means, and anything else as it is."""
    settings = spelled(value) if isinstance(value, str) else None
    return value if settings is None else settings


def _settings(text: str, settings_text: str, spec: type[Spec]) -> dict[str, Any]:
    main = next((name for name in MAIN if name in spec.model_fields), None)
    return _pairs(text, settings_text, "setting", main)


def _pairs(text: str, settings_text: str, owner: str, main: str | None = None) -> dict[str, Any]:
    """Return the values of "NAME=VALUE,..." by name, of nested settings by section and name; a
    first value may stand for `main`.
    """
    values: dict[str, Any] = {}
    for position, piece in enumerate(filter(None, settings_text.split(","))):
        name, has_name, value = piece.partition("=")
        if not has_name:
            if position or main is None:
                raise ValueError(f"'{text}': '{piece}' names no {owner}; write NAME=VALUE")
            name, value = main, piece
        section = values
        *sections, leaf = name.split(".")
        for outer in sections:
            section = section.setdefault(outer, {})
        section[leaf] = _value(value)
    return values


def _value(text: str) -> Any:
    for cast in (int, float):
        try:
            return cast(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text, text)

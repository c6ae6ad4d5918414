"""A codec in one word: a compressor, "topk:0.1", "uniform:4,rounding=stochastic", "mxfp4",
"mine.py:RowSigns,k=4", behind its feedback, if it has one: "ef+topk:0.1", "ef,key=sample+topk:0.1".
"""

from __future__ import annotations

import re
from typing import Any, get_args

from pydantic import ValidationError

from commsweep.config.base import Spec, kinds_of
from commsweep.config.compressors.base import Compression
from commsweep.config.compressors.own import OwnCodeSpec
from commsweep.config.compressors.values.mx import MXSpec
from commsweep.config.feedback import Correction
from commsweep.errors import nearest

MAIN = ("ratio", "bits", "rank", "levels")  # what a number without a name means
FORMATS = get_args(MXSpec.model_fields["format"].annotation)
OWN = re.compile(r"[^:,=\s]+:[A-Za-z_]\w*")


COMMA = re.compile(r",(?![^{}]*\})")  # outside of braces
BRACES = re.compile(r"\{([^{}]*)\}")


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


def separated(text: str) -> tuple[str, str]:
    """Return (the compressor, its feedback) of a codec: of "ef+topk:0.1" ("topk:0.1", "ef"); the
    feedback "none" where there is none.
    """
    feedback, plus, compressor = text.partition("+")
    feedback = feedback.strip()
    kinds = {spec.model_fields["kind"].default for spec in kinds_of(Correction)}
    if not plus or feedback.partition(",")[0] not in kinds:
        return text.strip(), "none"
    return compressor.strip(), feedback


def codec(text: str) -> dict[str, dict[str, Any]]:
    """Return the settings that a codec means, by "compressor" and "feedback".

    Raises ValueError naming a part that is no setting, or the nearest kind to one that is none.
    """
    word, feedback = separated(text)
    compressor = spelled(word)
    if compressor is None:
        raise ValueError(unknown(text))
    kind, _, settings = feedback.partition(",")
    return {
        "compressor": compressor,
        "feedback": {"kind": kind} | _pairs(text, settings, "setting"),
    }


def unknown(text: str) -> str:
    """Return the message about a word that names no codec, with the nearest name."""
    feedback, plus, word = text.rpartition("+")
    kind = re.split("[:,]", word.strip(), maxsplit=1)[0]
    kinds = [spec.model_fields["kind"].default for spec in kinds_of(Compression)]
    if plus and kind in kinds:
        feedbacks = [spec.model_fields["kind"].default for spec in kinds_of(Correction)]
        return f"'{text}': no feedback '{feedback.strip()}'{nearest(feedback.strip(), feedbacks)}"
    names = [*(name for name in kinds if name != "own"), *FORMATS]
    longer = [f"'{name}'" for name in names if kind and name.startswith(kind)]
    hint = f"; did you mean {' or '.join(longer)}?" if longer else nearest(kind, names)
    return (
        f"'{text}': no compressor '{kind}'{hint} (write topk:0.1, ef+topk:0.1, "
        "uniform:4,rounding=stochastic or file.py:Class)"
    )


def listed(text: str) -> list[str]:
    """The codecs of a list with commas between them: a piece NAME=VALUE belongs to the one before
    it, and braces stand for each of their alternatives, as in a shell: "{,ef+}topk:{0.1,0.05}".

    Raises ValueError where braces do not match.
    """
    words: list[str] = []
    for piece in COMMA.split(text):
        if words and "=" in piece:
            words[-1] += f",{piece}"
        else:
            words.append(piece.strip())
    return [full for word in words for full in _alternatives(word)]


def _alternatives(word: str) -> list[str]:
    """A word with each alternative of its braces in turn, those of the first pair outermost."""
    braces = BRACES.search(word)
    if braces is None:
        if "{" in word or "}" in word:
            raise ValueError(f"'{word}': braces do not match; write {{A,B}}, not within another")
        return [word]
    alternatives: list[str] = []
    for alternative in braces[1].split(","):
        alternatives += _alternatives(word[: braces.start()] + alternative + word[braces.end() :])
    return alternatives


def in_words(compressor: Spec, feedback: Spec | None = None) -> str:
    """Return the word that `codec` reads as these settings."""
    word = _word(compressor)
    if feedback is None or feedback.model_fields["kind"].default == "none":
        return word
    return f"{_word(feedback)}+{word}"


def _word(spec: Spec) -> str:
    settings = spec.model_dump(mode="json", exclude_none=True)
    kind = settings.pop("kind")
    if isinstance(spec, OwnCodeSpec):
        return ",".join([spec.code, *(f"{key}={_text(v)}" for key, v in spec.options.items())])
    if isinstance(spec, MXSpec):
        kind = settings.pop("format")
    values = _flat(settings)
    main = next((name for name in MAIN if name in values), None)
    for name in values.keys() - {main}:  # what is left out is what the kind has by itself
        fewer = {key: value for key, value in values.items() if key != name}
        if _means(spec, fewer):
            values = fewer
    pieces = [f"{kind}:{_text(values.pop(main))}" if main else kind]
    return ",".join([*pieces, *(f"{name}={_text(value)}" for name, value in values.items())])


def _means(spec: Spec, values: dict[str, Any]) -> bool:
    """Return whether flat settings are a record's, defaults filled in."""
    tree: dict[str, Any] = {"kind": spec.model_fields["kind"].default}
    if isinstance(spec, MXSpec):
        tree["format"] = spec.format
    for name, value in values.items():
        node = tree
        *sections, leaf = name.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    try:
        return type(spec).model_validate(tree) == spec
    except ValidationError:
        return False


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            values |= _flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = value
    return values


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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

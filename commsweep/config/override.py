"""`override`: the one way to change a setting by name. The command line, grids, searches and
dashboards all go through it, and a name or value it does not know is an error that says the nearest
valid one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, TypeGuard, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from commsweep.config.base import Spec, kinds_of
from commsweep.config.compressors.base import Compression
from commsweep.config.compressors.spelling import codec, separated, spelled
from commsweep.config.gradients import Gradients, check_gradients, exchange_of
from commsweep.config.links import Link, Links
from commsweep.config.renames import current_name, current_names
from commsweep.config.run import Run, links_fit, record
from commsweep.config.training import boundary_names
from commsweep.errors import UserError, nearest, notice

CODEC = re.compile(r"fwd|bwd|grad|at\.[^.]+\.(fwd|bwd)")  # the settings that take one in a word


def parse(settings: dict[str, Any], kind: type[Run] = Run) -> Run:
    """A Run from its nested dict; every mistake in it becomes one UserError line."""
    try:
        return kind.model_validate(current_names(settings))
    except ValidationError as error:
        raise UserError(explain(error)) from None


def parse_gradients(settings: dict[str, Any]) -> Gradients:
    """An exchange of gradients outside of a Run. Raises UserError as `parse` does."""
    try:
        spec = Gradients.model_validate(settings)
        check_gradients(spec, spec.learners * spec.local_steps)
    except ValidationError as error:
        raise UserError(explain(error, "grad")) from None
    except ValueError as error:
        raise UserError(str(error)) from None
    return spec


def in_codec(word: str) -> dict[str, dict[str, Any]]:
    """Return the settings of a codec in one word, by "compressor" and "feedback". Raises UserError
    on a word that names none.
    """
    try:
        return codec(word)
    except ValueError as error:
        raise UserError(f"codec {error}") from None


def parse_links(settings: Links | dict[str, Any], where: str = "") -> Links:
    """The links of a boundary outside of a Run; where: what they are called. Raises UserError as
    `parse` does.
    """
    try:
        links = Links.model_validate(settings)
        links_fit(f"{where}." if where else "", links)
    except ValidationError as error:
        raise UserError(explain(error, where.partition(".")[0])) from None
    except ValueError as error:
        raise UserError(str(error)) from None
    return links


def explain(error: ValidationError, root: str = "") -> str:
    """A validation error as one line; `root` names what was validated when it is not a whole
    Run.
    """
    return "; ".join(_explain(dict(problem), root) for problem in error.errors()[:3])


def override(run: Run, changes: dict[str, Any]) -> Run:
    """A new Run with dotted settings changed; text values are read as JSON where they are JSON.

    Changing a `kind` (or `name`) to one with other parameters drops those of the old one, so
    {"fwd.compressor.kind": "uniform", "fwd.compressor.bits": 4} works whatever stood there before.
    Naming a setting of an absent section opens that section; setting the section itself to null
    closes it. A codec in one word, {"fwd": "ef+topk:0.1"}, sets compressor and feedback. Learners'
    messages that cannot be added up on the way take grad.exchange=allgather, where none is set.
    Raises UserError on unknown names.
    """
    tree, kind = record(run), type(run)
    changes = _with_codecs({_current(key): value for key, value in changes.items()})
    for key, value in changes.items():
        if _literal(value) is None and (
            conflict := next((change for change in changes if change.startswith(f"{key}.")), None)
        ):
            raise UserError(
                f"'{key}' is left out and set at once, by {conflict}; give one of the two"
            )
    # A boundary of its own begins from what holds everywhere, so that comes first; kinds come
    # before parameters.
    for key in sorted(
        changes,
        key=lambda name: (
            name.startswith("at."),
            not name.endswith((".kind", ".name")),
            name.count("."),
        ),
    ):
        _set(tree, key, _literal(changes[key]), kind, changes)
    _evaluate_last(tree, changes)
    _choose_exchange(tree, changes)
    return parse(tree, kind)


def _with_codecs(changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes with codecs in one word, fwd=ef+topk:0.1, as the settings that they mean."""
    written: dict[str, Any] = {}
    for key, value in changes.items():
        if not CODEC.fullmatch(key) or not isinstance(_literal(value), str):
            written[key] = value
            continue
        for section in ("compressor", "feedback"):
            for setting in (f"{key}.{section}", f"{key}.{section}.kind"):
                if setting in changes:
                    raise UserError(f"{key}={value} and {setting} both say the {section}; give one")
        try:
            settings = codec(value)
        except ValueError as error:
            raise UserError(f"{key}={error}") from None
        written[f"{key}.compressor"] = separated(value)[0]
        for name, setting in settings["feedback"].items():
            written.setdefault(f"{key}.feedback.{name}", setting)
    return written


def _choose_exchange(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    """Let learners' messages that cannot be added up on the way be gathered, where nobody has said
    how they travel.
    """
    grad = tree.get("grad")
    if not isinstance(grad, dict) or "grad.exchange" in changes or grad.get("sharded") is not None:
        return
    if grad.get("exchange") != "allreduce" or grad.get("collective", "exact") != "exact":
        return
    groups = grad.get("layers") or {}
    compressors = [grad.get("compressor"), *(group.get("compressor") for group in groups.values())]
    if any(
        exchange_of(compressor or {"kind": "none"}) == "allgather" for compressor in compressors
    ):
        grad["exchange"] = "allgather"


def _in_full(key: str, word: str) -> dict[str, Any] | None:
    """The settings of a compressor in one word, such as "topk:0.1"; None where it is none."""
    try:
        return spelled(word)
    except ValueError as error:
        raise UserError(f"{key}={error}") from None


def _current(key: str) -> str:
    """A setting under its name of today; says so where it is another."""
    name = current_name(key)
    if name != key:
        notice(f"{key} is named {name} now")
    return name


def _evaluate_last(tree: dict[str, Any], changes: dict[str, Any]) -> None:
    """Choose how often to evaluate a run of other epochs, where it is not said and would not
    evaluate the last one.
    """
    epochs, eval_every = tree.get("epochs"), tree.get("eval_every")
    if "epochs" not in changes or "eval_every" in changes:
        return
    if not _is_count(epochs) or not _is_count(eval_every) or epochs % eval_every == 0:
        return
    tree["eval_every"] = next(n for n in range(min(eval_every, epochs), 0, -1) if epochs % n == 0)
    notice(
        f"eval_every={tree['eval_every']} is taken for epochs={epochs}, of which {eval_every} "
        "is no "
        "divisor"
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _set(
    tree: dict[str, Any], key: str, value: Any, kind: type[Run], names_given: Iterable[str]
) -> None:
    *path, leaf = key.split(".")
    if path[:1] == ["at"] and len(path) > 1:
        path[1] = _boundary(path[1], tree)
        key = ".".join([*path, leaf])
    if path[:1] == ["at"] and len(path) < 3:
        raise UserError(f"'{key}': write at.BOUNDARY.fwd=topk:0.1 or the like")
    node, spec, field, names = tree, kind, None, iter(path)
    for piece in names:
        parent, field = field, spec.model_fields.get(piece)
        if field is not None and get_origin(field.annotation) is dict and not members(field):
            node[piece] = {**node.get(piece, {}), leaf: value}  # arguments of a user's own code
            return
        if field is None or not members(field):
            hint = _elsewhere(parent, piece, node) or _like(key, _settings_of(tree, kind))
            raise UserError(f"unknown setting '{key}'{hint}")
        if piece not in node:  # an absent section is opened
            kinds = tags(members(field)[0], discriminator(field))
            named = field.get_default() if get_origin(field.annotation) is dict else {}
            # of records by name a default one stays if it is named
            prefix = key.split(f".{piece}.")[0] + f".{piece}."
            node[piece] = (
                {field.discriminator: kinds[0]}
                if kinds
                else {
                    name: element.model_dump(mode="json", exclude_none=True)
                    for name, element in named.items()
                    if any(f"{setting}.".startswith(f"{prefix}{name}.") for setting in names_given)
                }
            )
        node = node[piece]
        if get_origin(field.annotation) is dict:  # records by names that the user gives
            if (name := next(names, None)) is None:
                if leaf not in node and value is None:
                    raise UserError(
                        f"'{key}': there is no '{leaf}' in {'.'.join(path)} "
                        f"({', '.join(node) or 'none'})"
                    )
                if value is not None:
                    raise UserError(
                        f"'{key}': write {key}.SETTING=VALUE, or {key}=null to leave it out"
                    )
                node.pop(leaf)
                return
            fresh = (
                {"fwd": deepcopy(tree["fwd"]), "bwd": deepcopy(tree["bwd"])}
                if piece == "at"
                else {}
            )
            node = node.setdefault(name, fresh)
        spec = _member(field, node)
    if value is None and leaf in spec.model_fields and optional(spec.model_fields[leaf]):
        node.pop(leaf, None)
        return
    if leaf in spec.model_fields and members(leaf_field := spec.model_fields[leaf]):
        name = "NAME." if get_origin(leaf_field.annotation) is dict else ""
        chosen = [
            tag for member in members(leaf_field) for tag in tags(member, discriminator(leaf_field))
        ]
        if leaf == "compressor" and isinstance(value, str) and (settings := _in_full(key, value)):
            node[leaf] = settings
            return
        if isinstance(value, str) and chosen:
            if value in chosen:
                _set(tree, f"{key}.{leaf_field.discriminator}", value, kind, names_given)
                return
            raise UserError(
                f"'{key}' is a section, and '{value}' none of its "
                f"kinds{nearest(value, chosen)}; write {key}.{leaf_field.discriminator}=... "
                "(commsweep "
                f"explain {key}.{leaf_field.discriminator})"
            )
        raise UserError(
            f"'{key}' is a section: write {key}.{name}SETTING=VALUE"
            + (f", or {key}=null to leave it out" if optional(leaf_field) else "")
        )
    if leaf not in spec.model_fields:
        raise UserError(
            "unknown setting "
            f"'{key}'{_elsewhere(field, leaf, node) or _like(key, _settings_of(tree, kind))}"
        )
    if leaf in ("build", "load"):
        node.pop("source", None)  # the hash is of another file's function
    if field and leaf == field.discriminator and _member(field, {leaf: value}) is not spec:
        node.clear()
    node[leaf] = value


def _boundary(name: str, tree: dict[str, Any]) -> str:
    """Return a boundary's name, where it is given by its number from 1 on."""
    model = tree.get("model", {})
    names = boundary_names(model)
    if not name.isdigit() or name in (names or ()):
        return name
    if names is None:
        raise UserError(
            f"at.{name}: the boundaries of model.name={model.get('name')} have no numbers before "
            "it is loaded; name the block before it, as at.block9"
        )
    if not 0 < int(name) <= len(names):
        raise UserError(
            f"at.{name}: the boundaries are 1 to {len(names)} ({', '.join(names) or 'none'})"
        )
    return names[int(name) - 1]


def _like(key: str, options: list[str]) -> str:
    """A hint at the settings that end as an unknown one without sections does, or else at the
    nearest.
    """
    same = [option for option in options if option.endswith(f".{key}")][:3]
    if not same:
        return nearest(key, options)
    return "; did you mean " + " or ".join(f"'{match}'" for match in same) + "?"


def _elsewhere(field: FieldInfo | None, leaf: str, node: dict[str, Any]) -> str:
    """A hint when another member of the union has that parameter."""
    if (
        field is None
        or not field.discriminator
        or not any(leaf in member.model_fields for member in members(field))
    ):
        return ""
    siblings = [name for name in _member(field, node).model_fields if name != field.discriminator]
    owners = [
        tag
        for member in members(field)
        if leaf in member.model_fields
        for tag in tags(member, discriminator(field))
    ]
    return (
        f": {node.get(discriminator(field), '...')} has {', '.join(siblings) or 'no parameters'}; "
        f"{leaf} belongs to {field.discriminator}={'|'.join(owners)}"
    )


def members(field: FieldInfo) -> tuple[type[Spec], ...]:
    """The records a setting may be: several for a union, one for a section, none for a plain
    value.
    """
    options = get_args(field.annotation) or (field.annotation,)
    return tuple(
        option for option in options if isinstance(option, type) and issubclass(option, Spec)
    )


def optional(field: FieldInfo) -> bool:
    """Return whether a section may be absent."""
    return bool(members(field)) and type(None) in get_args(field.annotation)


def _member(field: FieldInfo, node: dict[str, Any]) -> type[Spec]:
    """The record that `node` is, by its kind or name; the first one when it names none."""
    tag = node.get(discriminator(field)) if field.discriminator else None
    return next(
        (member for member in members(field) if tag in tags(member, discriminator(field))),
        members(field)[0],
    )


def discriminator(field: FieldInfo) -> str:
    """The setting that tells the members of a union apart; "" where there is one member."""
    return field.discriminator if isinstance(field.discriminator, str) else ""


def tags(member: type[Spec], discriminator: str | None) -> tuple[str, ...]:
    """The kinds (or names) by which a union's member is chosen."""
    return get_args(member.model_fields[discriminator].annotation) if discriminator else ()


def _settings_of(tree: dict[str, Any], spec: type[Spec] = Run, prefix: str = "") -> list[str]:
    """Every dotted setting that exists, given the kinds and names in `tree`."""
    keys = []
    for name, field in spec.model_fields.items():
        node = tree.get(name)
        if get_origin(field.annotation) is dict and members(field):
            keys += [
                setting
                for key, record in (field.get_default() if node is None else node).items()
                for setting in _settings_of(
                    dict(record), members(field)[0], f"{prefix}{name}.{key}."
                )
            ]
            continue
        absent = optional(field) and node is None
        if absent or (members(field) and isinstance(node, dict)):
            section: Any = {} if absent else node
            keys += _settings_of(section, _member(field, section), f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _literal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False}.get(value, value)


FORMS = {
    "float_parsing": "a number, such as 0.1 or 10%",
    "int_parsing": "a whole number",
    "bool_parsing": "true or false",
    "model_attributes_type": 'a kind, or a JSON object with one, such as \'{"kind": "topk"}\'',
    "tuple_type": 'a JSON list, such as \'["layer1", "layer2"]\'',
    "dict_type": "a JSON object, such as '{\"a\": 1}'",
}


def _explain(problem: dict[str, Any], root: str) -> str:
    """Return a pydantic error as: where, what was given, what is allowed."""
    where = ".".join(
        [root] * bool(root) + [str(step) for step in problem["loc"] if step not in _KINDS]
    )
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    value_given = problem.get("input")
    if problem["type"] == "flag":
        name, value = problem["ctx"]["name"], json.dumps(problem["ctx"]["value"])
        return (
            f"{where}{'.' * bool(where)}{name}={value}: {problem['msg']}; give a value of its kind"
        )
    if problem["type"] == "extra_forbidden":
        return (
            f"unknown setting '{where}'{nearest(where.split('.')[-1], _siblings(problem['loc']))}"
        )
    if problem["type"] == "union_tag_invalid":
        value_given, options = (
            problem["ctx"]["tag"],
            problem["ctx"]["expected_tags"].replace("'", "").split(", "),
        )
        tag = problem["ctx"]["discriminator"].strip("'")
        if value_given in {spec.model_fields["kind"].default for spec in kinds_of(Compression)}:
            return (
                f"{where}.{tag}={value_given}: this compressor is not for here; those that are: "
                f"commsweep explain {where}.{tag}"
            )
        return (
            f"unknown {where}.{tag} '{value_given}'{nearest(value_given, options, 3)} (all of "
            "them: "
            f"commsweep explain {where}.{tag})"
        )
    if problem["type"] == "literal_error":
        options = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        suggestion = nearest(str(value_given), options)
        return f"{where}={value_given}: not one of {', '.join(options)}{suggestion}"
    if problem["type"] in FORMS:
        return f"{where}={value_given}: write {FORMS[problem['type']]}"
    if problem["type"] == "missing":
        return f"setting '{where}' is missing: write {where}=VALUE"
    return f"{where}={value_given}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    """Field names valid beside an unknown one: those of the union member, or of the section, or of
    Run.
    """
    for step in reversed(loc[:-1]):
        if step in _KINDS:
            return list(_KINDS[step].model_fields)
        if step in Run.model_fields:
            return list(members(Run.model_fields[step])[0].model_fields)
    return list(Run.model_fields)


_KINDS = {
    tag: member
    for spec in (Run, Link, Gradients)
    for field in spec.model_fields.values()
    if field.discriminator
    for member in members(field)
    for tag in tags(member, discriminator(field))
}

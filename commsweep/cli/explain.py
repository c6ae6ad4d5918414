"""`commsweep explain`: what a setting means, which values it takes, and what they bring with
them.
"""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from commsweep.config import Run
from commsweep.config.base import Spec
from commsweep.config.compressors.base import Compression
from commsweep.config.override import discriminator, members, tags
from commsweep.errors import UserError, nearest


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "explain",
        help="what a setting means and takes",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Explain a setting, a section of settings, or a kind with all its parameters.",
        epilog=(
            "examples:\n"
            "  commsweep explain                                # the sections of a run\n"
            "  commsweep explain fwd.compressor.kind            # every compressor of a "
            "boundary\n"
            "  commsweep explain fwd.compressor.kind=uniform    # one of them, with its "
            "parameters\n"
            "  commsweep explain topk                           # a kind, wherever it stands\n"
            "  commsweep explain schedule.t_max"
        ),
    )
    parser.add_argument(
        "setting",
        nargs="?",
        default="",
        metavar="SETTING[=VALUE]",
        help="a dotted setting, a kind, or a preset (default: the sections of a run)",
    )
    parser.set_defaults(command=_explain)


def _explain(args: argparse.Namespace) -> int:
    path, _, value = args.setting.partition("=")
    print(
        "\n".join(
            _by_name(path)
            if path and not value and "." not in path and path not in Run.model_fields
            else explain(path, value)
        )
    )
    return 0


def _by_name(name: str) -> list[str]:
    """Lines about what is called so: a kind, wherever it stands, or a preset. Raises UserError when
    nothing is.
    """
    from commsweep.registry import preset, presets

    if name in presets():
        run = preset(name)
        return [
            f"{name}, a preset: {run.model.name} on {run.data.name}, {run.epochs} epochs; "
            f"settings with their meaning: commsweep presets {name}"
        ]
    kinds_by_name = kinds()
    if name not in kinds_by_name:
        suggestions = nearest(name, [*presets(), *kinds_by_name, *Run.model_fields], 3)
        raise UserError(
            f"'{name}' is no setting, kind or preset{suggestions} (commsweep explain lists the "
            "sections of a run, commsweep presets the presets)"
        )
    lines: list[str] = []
    for owner in dict.fromkeys(owner for _, owner in kinds_by_name[name]):
        where = [path for path, kind_owner in kinds_by_name[name] if kind_owner is owner]
        lines += ["" for _ in lines[:1]] + [
            ", ".join(f"{path}={name}" for path in where),
            "",
            *_record(owner),
        ]
    return lines


def kinds() -> dict[str, list[tuple[str, type[Spec]]]]:
    """Return every kind and name that a union's member is chosen by: the settings that choose it,
    and its record.
    """
    by_name: dict[str, list[tuple[str, type[Spec]]]] = {}

    def look(owner: type[Spec], path: str) -> None:
        for key, field in owner.model_fields.items():
            name = ".NAME" if get_origin(field.annotation) is dict else ""
            for member in members(field):
                for tag in tags(member, discriminator(field)):
                    by_name.setdefault(str(tag), []).append(
                        (f"{path}{key}{name}.{field.discriminator}", member)
                    )
                if key != "at":  # as fwd and bwd
                    look(member, f"{path}{key}{name}.")

    look(Run, "")
    return {kind: list(dict.fromkeys(owners)) for kind, owners in by_name.items()}


def explain(path: str, value: str = "") -> list[str]:
    """Lines about a dotted setting ("": the run itself). Raises UserError on an unknown one."""
    owners: list[type[Spec]] = [Run]
    field: FieldInfo | None = None
    names = [piece for piece in path.split(".") if piece]
    named = False  # whether a name that the user gives comes next
    for index, name in enumerate(names):
        if named:
            named = False
            continue
        fields = [
            (owner, owner.model_fields[name]) for owner in owners if name in owner.model_fields
        ]
        if not fields:
            options = [
                ".".join([*names[:index], name]) for owner in owners for name in owner.model_fields
            ]
            above = ".".join(names[:index])
            raise UserError(
                f"unknown setting '{path}'{nearest(path, options, 3)} (all of them: commsweep "
                f"explain{' ' * bool(above)}{above})"
            )
        owner, field = fields[0]
        below = members(field)
        if not below and name in ("kind", "name") and len(owners) > 1:
            return _choices(owners, name, value, ".".join(names[:index]))
        if not below:
            if index + 1 < len(names):
                raise UserError(f"'{'.'.join(names[: index + 1])}' is a value, not a section")
            lines = [
                _line(path, owner.model_fields[name], kind_of(owner)).strip() for owner, _ in fields
            ]
            return lines + (
                []
                if owner is Run or len(fields) > 1
                else ["", inspect.cleandoc(owner.__doc__ or "")]
            )
        owners, named = list(below), get_origin(field.annotation) is dict
    if field is not None and len(owners) > 1:
        return _choices(owners, discriminator(field) or "kind", value, path)
    return _record(owners[0])


def kind_of(owner: type[Spec]) -> str:
    """Return how a union's member is called; "" for other records."""
    for key in ("kind", "name"):
        if key in owner.model_fields and (names := get_args(owner.model_fields[key].annotation)):
            return "/".join(map(str, names))
    return ""


def _choices(owners: list[type[Spec]], key: str, value: str, path: str = "") -> list[str]:
    named = {tag: owner for owner in owners for tag in tags(owner, key)}
    if value:
        if value not in named:
            raise UserError(
                f"no {key} '{value}'{nearest(value, named, 3)} (all of them: commsweep explain "
                f"{path}{'.' * bool(path)}{key})"
            )
        return _record(named[value])
    width = max(map(len, named))
    return [f"{tag:{width}}  {_first(owner)}" for tag, owner in named.items()] + [
        "",
        f"its parameters: commsweep explain {path or '...'}{'.' * bool(path)}{key}=VALUE",
    ]


def _first(owner: type[Spec]) -> str:
    return (owner.__doc__ or "").strip().split("\n")[0]


def _record(owner: type[Spec]) -> list[str]:
    doc = "\n".join(line.strip() for line in (owner.__doc__ or "").strip().split("\n"))
    lines = [doc, ""]
    if issubclass(owner, Compression):
        lines += [f"Use: {owner.use}", f"Bytes: {owner.cost}", ""]
    return lines + [_line(name, field, "") for name, field in owner.model_fields.items()]


def _line(name: str, field: FieldInfo, kind: str) -> str:
    default = (
        ""
        if members(field) or field.annotation is dict
        else " (to be given)"
        if field.is_required()
        else f" = {shown(field.get_default())}"
    )
    facts = ", ".join(fact for fact in (f"of {kind}" if kind else "", said_of(field)) if fact)
    return f"  {name + default:28} {facts}".rstrip()


def shown(value: Any) -> str:
    """A value as a command line takes it."""
    return (
        json.dumps(list(value) if isinstance(value, tuple) else value)
        if not isinstance(value, Spec)
        else "..."
    )


def said_of(field: FieldInfo) -> str:
    """A setting's meaning and range in a few words."""
    below = members(field)
    if below:
        kinds = [tag for bound in below for tag in tags(bound, discriminator(field))]
        inside = ", ".join(kinds or below[0].model_fields)
        if get_origin(field.annotation) is dict:
            return f"{field.description}; each with {inside}"
        return f"a section: {inside}"
    options = get_args(field.annotation)
    words = [field.description] if field.description else []
    if options and all(
        isinstance(option, (str, int)) and not isinstance(option, type) for option in options
    ):
        words += ["one of " + ", ".join(map(str, options))] if len(options) > 1 else []
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {limit}"
        for constraint in field.metadata
        for key, sign in signs.items()
        if (limit := getattr(constraint, key, None)) is not None
    ]
    kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        field.annotation, ""
    )
    if bounds or (kind and not words):
        words.append(" ".join([kind, " and ".join(bounds)]).strip())
    return "; ".join(words)


def meaning(run: Run, path: str) -> str:
    """A setting's meaning and range, given the kinds that a run has."""
    node: Any = run
    *sections, leaf = path.split(".")
    for section in sections:
        node = node[section] if isinstance(node, dict) else getattr(node, section)
    return said_of(type(node).model_fields[leaf]) if isinstance(node, Spec) else ""

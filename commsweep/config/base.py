"""The base of every record of settings: frozen, checked, and closed to fields it does not know."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from commsweep.errors import UserError

Positive = Annotated[float, Field(gt=0)]
Implementation = TypeVar("Implementation", bound=type)
PERCENT = re.compile(r"[0-9]+(\.[0-9]*)? ?%")
Count = Annotated[int, Field(ge=1, le=10**9)]


class Spec(BaseModel):
    """A frozen record that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _words_mean_values(cls, values: Any) -> Any:
        """Read "10%" of a number as 0.1, and a kind's name in a section's place as that kind."""
        words = {}
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if field is None or not isinstance(value, str):
                continue
            if field.annotation in (float, float | None) and PERCENT.fullmatch(value):
                words[name] = float(value.rstrip("% ")) / 100
            elif field.discriminator == "kind" and value in _kind_names(field.annotation):
                words[name] = {"kind": value}
        return values | words if words else values

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if (
                isinstance(value, bool)
                and field is not None
                and field.annotation not in (bool, bool | None)
            ):
                raise PydanticCustomError(
                    "flag", "not a matter of true or false", {"name": name, "value": value}
                )
        return values


def _kind_names(union: Any) -> set[Any]:
    """Return the names of the kinds of a union of settings, or of none."""
    fields = [getattr(member, "model_fields", {}).get("kind") for member in get_args(union)]
    return {field.default for field in fields if field is not None}


def settle(spec: Spec, name: str, value: Any) -> None:
    """Set a field of a frozen record while it is validated: a value that follows from others."""
    object.__setattr__(spec, name, value)


class Implementations(dict[str, Any]):
    """The classes that carry out settings, by the kind of the settings."""

    def __missing__(self, kind: str) -> Any:
        raise UserError(f"'{kind}' has settings, but no class under a decorator `of(...)` for them")

    def of(self, *specs: type[Spec]) -> Callable[[Implementation], Implementation]:
        """Return a decorator that names a class as what carries these settings out."""

        def register(implementation: Implementation) -> Implementation:
            for spec in specs:
                self[spec.model_fields["kind"].default] = implementation
            return implementation

        return register


def define(package: str, file: str) -> None:
    """Import every module of a package, so that what it defines is known; file: its __init__."""
    for module in pkgutil.iter_modules([str(Path(file).parent)]):
        importlib.import_module(f"{package}.{module.name}")


def union(family: type[Spec], trait: str) -> Any:
    """Return the union of all kinds of a family, defined so far, that have a trait."""
    return Union[tuple(spec for spec in kinds_of(family) if getattr(spec, trait))]  # noqa: UP007


def kinds_of(family: type[Spec]) -> list[type[Spec]]:
    """Return every record of a family that has a kind of its own, in the order of definition."""
    field = family.model_fields.get("kind")
    specs = [family] if field is not None and not field.is_required() else []
    for member in family.__subclasses__():
        specs += kinds_of(member)
    return specs


def by_kind(union: Any) -> dict[str, Any]:
    """The members of a union of settings by their kind."""
    return {
        get_args(member.model_fields["kind"].annotation)[0]: member
        for member in get_args(get_args(union)[0])
    }

"""What every record of settings is: frozen, checked, and closed to fields it does not know."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=10**9)]


class Spec(BaseModel):
    """A frozen record that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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


def settle(spec: Spec, name: str, value: Any) -> None:
    """Set a field of a frozen record while it is validated: a value that follows from others."""
    object.__setattr__(spec, name, value)


def by_kind(union: Any) -> dict[str, Any]:
    """The members of a union of settings by their kind."""
    return {
        get_args(member.model_fields["kind"].annotation)[0]: member
        for member in get_args(get_args(union)[0])
    }

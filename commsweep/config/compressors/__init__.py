"""The compressors a Run can name, with their parameters: a module a family, found by their being
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from commsweep.config.base import Spec, by_kind, define, union
from commsweep.config.compressors.base import Compression, group_fits
from commsweep.config.compressors.spelling import in_full

define(__name__, __file__)
if TYPE_CHECKING:
    CompressorSpec = GradientCompressor = Compression
else:
    CompressorSpec = Annotated[
        union(Compression, "crosses"), Field(discriminator="kind"), BeforeValidator(in_full)
    ]
    GradientCompressor = Annotated[
        union(Compression, "exchanged"), Field(discriminator="kind"), BeforeValidator(in_full)
    ]


def values_fit(name: str, compressor: Spec) -> None:
    """Refuse a code of kept values, or of a rotated message, that means nothing for them."""
    for field, label in (("values", "kept values have"), ("code", "a rotated message has")):
        code = getattr(compressor, field, None)
        if code is None:
            continue
        group_fits(f"{name}.compressor.{field}", code)
        if field == "values" and getattr(code, "coding", None):
            raise ValueError(
                f"{name}.compressor.values.coding={code.coding}: the bytes of kept values must "
                "follow from their number; leave it out"
            )
        if getattr(code, "scale", "") in ("channel", "last"):
            raise ValueError(
                f"{name}.compressor.{field}.scale={code.scale}: {label} no channels; "
                "use tensor, sample or group"
            )


def kinds(union: Any, trait: str) -> str:
    """The kinds of a union's members that have a trait, for people."""
    return ", ".join(kind for kind, spec in by_kind(union).items() if getattr(spec, trait))

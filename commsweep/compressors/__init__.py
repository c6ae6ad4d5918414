"""Tensor -> payload -> tensor: pure and stateless. `build` turns a spec (or its dict) into the
compressor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from commsweep.compressors.base import COMPRESSORS, Compressor, Payload
from commsweep.compressors.coded import Coded, CodedForwardMask
from commsweep.compressors.rans import Ranged
from commsweep.compressors.rotation import Rotated
from commsweep.compressors.sparse import FixedK, RiceTopK, Sparsifier
from commsweep.config.base import define
from commsweep.config.compressors import CompressorSpec
from commsweep.config.compressors.base import CodeSpec, Compression
from commsweep.config.compressors.rotation import RotatedSpec
from commsweep.config.compressors.sparse import ForwardMaskSpec, Selection, TopKSpec
from commsweep.config.override import explain
from commsweep.errors import UserError

define(__name__, __file__)

_SPECS: TypeAdapter[Compression] = TypeAdapter(CompressorSpec)

__all__ = ["COMPRESSORS", "Compressor", "Payload", "Sparsifier", "build"]


def build(spec: Compression | dict[str, Any] | str) -> Compressor:
    """Return the compressor of a spec such as {"kind": "topk", "ratio": 0.1}, or "topk:0.1".

    The result has `encode(x)`, `decode(payload)`, `roundtrip(x)`; `payload.nbytes` is what would
    travel. Raises UserError when the kind or a parameter is unknown or out of range.
    """
    if isinstance(spec, dict | str):
        try:
            spec = _SPECS.validate_python(spec)
        except ValidationError as error:
            raise UserError(explain(error, "compressor")) from None
    if isinstance(spec, CodeSpec) and spec.coding is not None:
        return Ranged(spec, build(spec.model_copy(update={"coding": None})))
    if isinstance(spec, RotatedSpec):
        return Rotated(spec, build(spec.code))
    rice = isinstance(spec, TopKSpec) and spec.index_coding == "rice"
    kind = cast(Callable[[Any], Compressor[Any]], RiceTopK if rice else COMPRESSORS[spec.kind])
    if not isinstance(spec, Selection) or spec.values is None:
        return kind(spec)
    values = build(spec.values)
    if isinstance(spec, ForwardMaskSpec):
        return CodedForwardMask(spec, values)
    sparsifier = kind(spec.model_copy(update={"values": None}))
    assert isinstance(sparsifier, FixedK)  # every Selection keeps a number that its shape says
    return Coded(spec, sparsifier, values)

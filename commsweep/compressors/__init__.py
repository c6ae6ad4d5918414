"""Tensor -> payload -> tensor: pure and stateless. `build` turns a spec (or its dict) into the
compressor.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from commsweep.compressors.adacomp import AdaComp
from commsweep.compressors.base import Compressor, Payload
from commsweep.compressors.coded import Coded, CodedForwardMask
from commsweep.compressors.coders import Bottleneck, Subspace
from commsweep.compressors.controls import Mean, Zero
from commsweep.compressors.dense import Cast, Dense
from commsweep.compressors.levels import E3M0, QSGD, Natural, OneBit, Sign, Statistical, Tern
from commsweep.compressors.lowrank import LowRank
from commsweep.compressors.mx import MX
from commsweep.compressors.quantize import FixedBatch, FixedPoint, Uniform
from commsweep.compressors.rans import Ranged
from commsweep.compressors.rotation import Eden, MSEden, Rotated
from commsweep.compressors.sparse import (
    FixedK,
    ForwardMask,
    RandomK,
    RandTopK,
    RiceTopK,
    Sparsifier,
    TopK,
    TopKStrict,
)
from commsweep.compressors.tah import TAH
from commsweep.compressors.tah_code import TAHCode
from commsweep.compressors.thresholds import Dryden, Periodic, SIDCo, Threshold
from commsweep.config import (
    CodeSpec,
    Compression,
    CompressorSpec,
    ForwardMaskSpec,
    RotatedSpec,
    Selection,
    TopKSpec,
    explain,
)
from commsweep.errors import UserError

KINDS: dict[str, type[Compressor[Any]]] = {
    "none": Dense,
    "zero": Zero,
    "mean": Mean,
    "live": Dense,
    "cast": Cast,
    "topk": TopK,
    "topk_strict": TopKStrict,
    "randomk": RandomK,
    "randtopk": RandTopK,
    "forward_mask": ForwardMask,
    "uniform": Uniform,
    "fixed": FixedPoint,
    "fixed_batch": FixedBatch,
    "mx": MX,
    "eden": Eden,
    "ms_eden": MSEden,
    "rotated": Rotated,
    "tah": TAH,
    "tah_code": TAHCode,
    "lowrank": LowRank,
    "sign": Sign,
    "onebit": OneBit,
    "tern": Tern,
    "qsgd": QSGD,
    "natural": Natural,
    "statistical": Statistical,
    "e3m0": E3M0,
    "threshold": Threshold,
    "dryden": Dryden,
    "sidco": SIDCo,
    "periodic": Periodic,
    "adacomp": AdaComp,
    "bottleneck": Bottleneck,
    "subspace": Subspace,
}

_SPECS: TypeAdapter[Compression] = TypeAdapter(CompressorSpec)

__all__ = ["KINDS", "Compressor", "Payload", "Sparsifier", "build"]


def build(spec: Compression | dict[str, Any]) -> Compressor:
    """The compressor of a spec such as {"kind": "topk", "ratio": 0.1}.

    The result has `encode(x)`, `decode(payload)`, `roundtrip(x)`; `payload.nbytes` is what would
    travel. Raises UserError when the kind or a parameter is unknown or out of range.
    """
    if isinstance(spec, dict):
        try:
            spec = _SPECS.validate_python(spec)
        except ValidationError as error:
            raise UserError(explain(error, "compressor")) from None
    if isinstance(spec, CodeSpec) and spec.coding is not None:
        return Ranged(spec, build(spec.model_copy(update={"coding": None})))
    if isinstance(spec, RotatedSpec):
        return Rotated(spec, build(spec.code))
    rice = isinstance(spec, TopKSpec) and spec.index_coding == "rice"
    kind: type[Compressor[Any]] = RiceTopK if rice else KINDS[spec.kind]
    if not isinstance(spec, Selection) or spec.values is None:
        return kind(spec)  # pyright: ignore[reportArgumentType]
    values = build(spec.values)
    if isinstance(spec, ForwardMaskSpec):
        return CodedForwardMask(spec, values)
    sparsifier = kind(spec.model_copy(update={"values": None}))  # pyright: ignore[reportArgumentType]
    assert isinstance(sparsifier, FixedK)  # every Selection keeps a number that its shape says
    return Coded(spec, sparsifier, values)

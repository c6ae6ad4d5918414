"""Messages that send every value: as it is, or in a 16-bit type."""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, laid_out, payload
from commsweep.config.compressors.base import Compression
from commsweep.config.compressors.dense import LiveSpec, NoCompressorSpec
from commsweep.config.compressors.values.cast import CastSpec


@COMPRESSORS.of(NoCompressorSpec, LiveSpec)
class Dense(Compressor[Compression]):
    """No compression; nbytes = elements * itemsize."""

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return x

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() * dtype.itemsize

    def _encode(self, x: Tensor, seed: int) -> Payload:
        return payload(x, values=x.clone())

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [{"values": Field(dtype, tuple(shape))}]

    def _decode(self, payload: Payload) -> Tensor:
        return laid_out(payload.parts["values"], payload)


@COMPRESSORS.of(CastSpec)
class Cast(Compressor[CastSpec]):
    """Round to `to` and back; nbytes = 2 * elements. float16 saturates at its largest value
    (65504).
    """

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return self._narrow(x).to(x.dtype)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 2 * shape.numel()

    def _narrow(self, x: Tensor) -> Tensor:
        to = getattr(torch, self.spec.to)
        # An overflow would turn a finite activation into an infinity; clamp keeps NaN, and bfloat16
        # (range of float32) only overflows by rounding up its very last step.
        limit = min(torch.finfo(to).max, torch.finfo(x.dtype).max)
        return x.clamp(-limit, limit).to(to)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        return payload(x, values=self._narrow(x))

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [{"values": Field(getattr(torch, self.spec.to), tuple(shape))}]

    def _decode(self, payload: Payload) -> Tensor:
        return laid_out(payload.parts["values"].to(payload.dtype), payload)

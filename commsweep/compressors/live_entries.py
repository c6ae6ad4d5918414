"""A compressor of some entries only: those that both ends know to live."""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.compressors.base import Compressor, Field, Payload
from commsweep.config.compressors.dense import NoCompressorSpec


class LiveEntries(Compressor[NoCompressorSpec]):
    """Another compressor over a message's live entries, one after the other; what arrives elsewhere
    is zero.

    A message is [1, *shape]; positions: flat indices of its live entries, in order, int64. nbytes:
    the inner compressor's for [1, live], because where these lie is known.
    """

    def __init__(self, inner: Compressor, positions: Tensor, shape: torch.Size) -> None:
        super().__init__(inner.spec)
        self.inner, self.places, self.shape = inner, positions, shape

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return self._spread(self.inner.apply(self.gathered(x), seed))

    def for_message(self, x: Tensor, state: Tensor, number: int) -> LiveEntries:
        inner = self.inner.for_message(self.gathered(x), state, number)
        return LiveEntries(inner, self.places, self.shape)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.inner.formula_bytes(torch.Size((1, len(self.places))), dtype)

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        return self.inner.bytes_sent(self.gathered(y))

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        """Return the layouts of a payload, whose shape is [1, live]."""
        return self.inner.layouts(shape, dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """The live entries [1, live] of a message."""
        return x.reshape(-1).index_select(0, self.places)[None]

    def _spread(self, live: Tensor) -> Tensor:
        out = live.new_zeros(self.shape.numel())
        return out.index_copy_(0, self.places, live[0]).view(1, *self.shape)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        return self.inner._encode(self.gathered(x), seed)

    def _decode(self, payload: Payload) -> Tensor:
        return self._spread(self.inner._decode(payload))

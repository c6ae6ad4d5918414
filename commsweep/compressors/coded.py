"""Sparsifiers whose kept values travel in a code of their own: TopK with 4-bit values, a shared
mask with 2-bit ones.

The codec is any compressor whose bytes follow from the shape, and sees the kept values of a message
as a matrix [rows, k], in the order in which they would travel uncoded: scale "sample" is one of a
row, "tensor" one of the message. nbytes = those of the places + those of the codec for [rows, k].
"""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep import seeds
from commsweep.compressors.base import (
    Compressor,
    Field,
    Payload,
    laid_out,
    payload,
    row_shape,
    rows,
    unrows,
)
from commsweep.compressors.bits import taken
from commsweep.compressors.kernels import cpu
from commsweep.compressors.sparse import FixedK, ForwardMask, RiceTopK, Sparsifier, TopK, scatter
from commsweep.config.compressors.sparse import ForwardMaskSpec, Selection
from commsweep.errors import UserError

PREFIX = "values."  # of the codec's parts


class Coded(Sparsifier[Selection]):
    """A sparsifier that keeps the same number of every row, and a codec of what it keeps."""

    _place_bytes: Tensor | int = (
        0  # bytes of the last message's places, where they depend on the data
    )

    def __init__(self, spec: Selection, inner: FixedK, codec: Compressor) -> None:
        """spec: of both; inner, codec: built from its parts."""
        super().__init__(spec)
        self.inner, self.codec = inner, codec

    def halved(self) -> Coded:
        half = self.inner.halved()
        assert isinstance(half, FixedK)
        return Coded(half.spec.model_copy(update={"values": self.spec.values}), half, self.codec)

    def at_inference(self) -> Compressor:
        inner = self.inner.at_inference()
        if inner is self.inner:
            return self
        assert isinstance(inner, FixedK)
        return Coded(self.spec, inner, self.codec)

    def masked(
        self, x: Tensor, seed: int = 0, want_mask: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.inner, TopK) and not isinstance(self.inner, RiceTopK) and not want_mask:
            k, cut = self.inner.kept_shape(x.shape)[1], self.inner.tiles(x.shape)
            if cpu.usable(x) and cpu.few_rows(cut[2] * cut[4], k):
                chosen, columns = cpu.topk_tiles(self.inner.as_tiles(x), k)
                y = cpu.put_tiles(self.codec.apply(chosen, _codes(seed)), columns, cut)
                return self.inner.from_tiles(y, x), None
        flat, chosen = self.inner.kept_rows(x, seed)
        # a value may arrive as zero: only now are the places known
        if isinstance(self.inner, RiceTopK):
            self._place_bytes = self.inner.place_bytes(chosen)
        sent = self.codec.apply(
            taken(flat, chosen, self.inner.kept_shape(x.shape)[1]), _codes(seed)
        )
        y = self.inner.from_rows(scattered(sent * self.inner.gain(x.shape), chosen), x)
        return y, self.inner.from_rows(chosen, x) if want_mask else None

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        n_rows, k = chosen = self.inner.kept_shape(shape)
        position_bytes = self.inner.formula_bytes(shape, dtype) - n_rows * k * dtype.itemsize
        return position_bytes + self.codec.formula_bytes(torch.Size(chosen), dtype)

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        if not isinstance(self.inner, RiceTopK):
            return super().bytes_sent(y)
        return self._place_bytes + self.codec.formula_bytes(
            torch.Size(self.inner.kept_shape(y.shape)), y.dtype
        )

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        values = self.codec.layouts(torch.Size(self.inner.kept_shape(shape)), dtype)
        return [
            _named(layout) | {name: field for name, field in form.items() if name != "values"}
            for layout in values
            for form in self.inner.layouts(shape, dtype)
        ]

    def mask(self, payload: Payload) -> Tensor:
        return self.inner.mask(payload)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        fields = dict(self.inner._encode(x, seed).parts)
        values = self.codec._encode(
            fields.pop("values").reshape(self.inner.kept_shape(x.shape)), _codes(seed)
        )
        return payload(x, **_named(values.parts), **fields)

    def _decode(self, payload: Payload) -> Tensor:
        values = _decoded(self.codec, payload, torch.Size(self.inner.kept_shape(payload.shape)))
        chosen = self.inner.as_rows(laid_out(self.inner.mask(payload), payload))
        return self.inner.from_rows(
            scatter((values * self.inner.gain(payload.shape)).reshape(-1), chosen), payload
        )


class CodedForwardMask(ForwardMask):
    """The gradient where the forward message kept the activation, its values coded.

    `forward` is the forward direction's sparsifier, which says how many there are.
    """

    forward: FixedK | Coded | None = None

    def __init__(self, spec: ForwardMaskSpec, codec: Compressor) -> None:
        super().__init__(spec)
        self.codec = codec

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        size = self._row_shape(x.shape)
        flat, chosen = (tensor.reshape(size[0], -1) for tensor in (rows(x), self._rows(x)))
        return unrows(
            scattered(self.codec.apply(taken(flat, chosen, size[1]), _codes(seed)), chosen).reshape(
                row_shape(x.shape)
            ),
            x,
        )

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.codec.formula_bytes(self._row_shape(shape), dtype)

    def bytes_sent(self, y: Tensor) -> int:
        return self.formula_bytes(y.shape, y.dtype)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [_named(form) for form in self.codec.layouts(self._row_shape(shape), dtype)]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        values = rows(x)[self._rows(x)].reshape(self._row_shape(x.shape))
        return payload(x, **_named(self.codec._encode(values, _codes(seed)).parts))

    def _decode(self, payload: Payload) -> Tensor:
        values = _decoded(self.codec, payload, self._row_shape(payload.shape))
        return unrows(scatter(values.reshape(-1), self._rows(payload)), payload)

    def _row_shape(self, shape: torch.Size) -> torch.Size:
        """Samples, and kept entries of each; one row where their number is of the whole tensor."""
        inner = self.forward.inner if isinstance(self.forward, Coded) else self.forward
        assert inner is not None, "bound to the forward direction when the boundary is built"
        n_rows, k = inner.kept_shape(shape)
        samples = row_shape(shape)[0] if n_rows > 1 else 1
        return torch.Size([samples, n_rows * k // samples])


def scattered(values: Tensor, kept_values: Tensor) -> Tensor:
    """Inverse of `taken`, zeros elsewhere."""
    if cpu.usable(values):
        return scatter(values.reshape(-1), kept_values)
    return values.gather(1, (kept_values.cumsum(1) - 1).clamp(0, values.shape[1] - 1)).where(
        kept_values, values.new_zeros(())
    )


def _codes(seed: int) -> int:
    """The codec's draws are its own, not those that chose the places."""
    return seeds.draw(seeds.VALUES, seed)


def _named(fields: dict) -> dict:
    return {PREFIX + name: tensor for name, tensor in fields.items()}


def _decoded(codec: Compressor, payload_: Payload, shape: torch.Size) -> Tensor:
    fields = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in payload_.parts.items()
        if name.startswith(PREFIX)
    }
    if not fields:
        raise UserError("a payload without its values")
    return codec._decode(Payload(fields, shape, payload_.dtype, payload_.device))

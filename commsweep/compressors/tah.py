"""Tiles, rotation of outliers, and a bit budget by token: TAH-Quant, arXiv 2506.01352.

What the paper leaves open was chosen here: a token's entropy is that of |x_i| / sum |x| over its
features, and tokens of high entropy get the high bits; scales are bfloat16 (float16 would lose
small gradients); codes are rounded to nearest; the one-bit flags of rotated tiles and of tokens
with high bits travel and are counted. The paper swaps the outlier to the front before rotating;
here it stays, because every column of a Hadamard matrix spreads it evenly, and so its place need
not travel.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, payload
from commsweep.compressors.bits import pack, packed_bytes, unpack, unpack_flags
from commsweep.config.compressors.tah import TAHSpec


@COMPRESSORS.of(TAHSpec)
class TAH(Compressor[TAHSpec]):
    """Per tile t of a token: t' = t H / sqrt(n) if max|t| > tau second|t|, else t; s = max|t'|;
    with b bits a token q = clip(round(t' / s * 2^(b-1)), -2^(b-1), 2^(b-1) - 1).

    The last axis holds the features; `share` of the tokens of every sample get `high` bits, the
    others `low`. nbytes = ceil(high tokens * D * high / 8) + ceil(low tokens * D * low / 8) + 2 *
    tiles + ceil(tiles / 8) + ceil(tokens / 8), with D the features rounded up to whole tiles.
    """

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        codes, scales, rotated, high = self._quantized(x)
        return self._values(codes, scales, rotated, high, x.shape, x.dtype)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        samples, tokens, d = _tokens(shape)
        tiles = -(-d // self.spec.tile)
        high = samples * self._high(tokens)
        low, width = samples * tokens - high, tiles * self.spec.tile
        tiles *= samples * tokens
        return (
            packed_bytes(high * width, self.spec.high_bits)
            + packed_bytes(low * width, self.spec.low_bits)
            + 2 * tiles
            + packed_bytes(tiles, 1)
            + packed_bytes(samples * tokens, 1)
        )

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        samples, tokens, d = _tokens(shape)
        tiles, high = -(-d // self.spec.tile), samples * self._high(tokens)
        rows, width = samples * tokens, tiles * self.spec.tile
        counts = {
            "high": packed_bytes(high * width, self.spec.high_bits),
            "low": packed_bytes((rows - high) * width, self.spec.low_bits),
        }
        return [
            {
                **{name: Field(torch.uint8, (count,)) for name, count in counts.items()},
                "scales": Field(torch.bfloat16, (rows, tiles)),
                "rotated": Field(torch.uint8, (packed_bytes(rows * tiles, 1),)),
                "tokens": Field(torch.uint8, (packed_bytes(rows, 1),)),
            }
        ]

    def _high(self, tokens: int) -> int:
        return round(self.spec.high_share * tokens)

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """codes [samples * tokens, tiles, n], scales and rotated [samples * tokens, tiles], high
        [samples * tokens].
        """
        samples, tokens, d = _tokens(x.shape)
        flat = x.reshape(samples * tokens, d).float()
        tiles = pad(flat, (0, -d % self.spec.tile)).unflatten(1, (-1, self.spec.tile))
        size = tiles.abs()
        largest = size.amax(-1, keepdim=True)
        rotated = (size.mul_(self.spec.tau) >= largest).sum(-1) == 1  # none but the largest itself
        tiles = torch.where(rotated[..., None], tiles @ _hadamard(self.spec.tile, x.device), tiles)
        scales = tiles.abs().amax(-1).bfloat16()
        high = self._rich(flat.reshape(samples, tokens, d))
        half = self._half(high)
        s = scales.float()[..., None]
        codes = (tiles / s.where(s != 0, s.new_ones(()))).mul_(half).round_()
        return torch.minimum(torch.maximum(codes, -half), half - 1).add_(0.0), scales, rotated, high

    def _rich(self, x: Tensor) -> Tensor:
        """Return which tokens of x [samples, tokens, d] get the high bits; of equal ones
        the first.
        """
        size = x.abs()
        total = size.sum(-1)
        # -sum p log p with p = |x_i| / total, without a pass to form p; a token of zeros has none.
        entropy = (torch.special.entr(size).sum(-1) / total + total.log()).nan_to_num(0.0)
        order = entropy.argsort(dim=1, descending=True, stable=True)[:, : self._high(x.shape[1])]
        return torch.zeros_like(entropy, dtype=torch.bool).scatter_(1, order, True).flatten()

    def _half(self, high: Tensor) -> Tensor:
        """2^(b-1) of every token, [tokens, 1, 1]."""
        low, rich = 2.0 ** (self.spec.low_bits - 1), 2.0 ** (self.spec.high_bits - 1)
        return torch.where(high, rich, low).float()[:, None, None]

    def _values(
        self,
        codes: Tensor,
        scales: Tensor,
        rotated: Tensor,
        high: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Tensor:
        tiles = (codes / self._half(high)).mul_(scales.float()[..., None])
        tiles = torch.where(
            rotated[..., None], tiles @ _hadamard(self.spec.tile, codes.device), tiles
        )
        return tiles.flatten(1)[:, : _tokens(shape)[2]].reshape(shape).to(dtype)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        codes, scales, rotated, high = self._quantized(x)
        samples, tokens, _ = _tokens(x.shape)
        rich, fields = samples * self._high(tokens), {}
        # as many as known beforehand: no device is waited for
        order = (~high).to(torch.uint8).argsort(stable=True)
        for name, which, bits in (
            ("high", order[:rich], self.spec.high_bits),
            ("low", order[rich:], self.spec.low_bits),
        ):
            fields[name] = pack(codes[which].flatten().long() + 2 ** (bits - 1), bits)
        return payload(
            x, **fields, scales=scales, rotated=pack(rotated.flatten(), 1), tokens=pack(high, 1)
        )

    def _decode(self, payload: Payload) -> Tensor:
        fields, scales = payload.parts, payload.parts["scales"]
        high = unpack_flags(fields["tokens"], len(scales))
        rotated = unpack_flags(fields["rotated"], scales.numel()).reshape(scales.shape)
        codes = torch.empty(*scales.shape, self.spec.tile, device=scales.device)
        for name, which, bits in (
            ("high", high, self.spec.high_bits),
            ("low", ~high, self.spec.low_bits),
        ):
            count = int(which.sum()) * scales.shape[1] * self.spec.tile
            codes[which] = (
                (unpack(fields[name], bits, count) - 2 ** (bits - 1))
                .float()
                .reshape(-1, *codes.shape[1:])
            )
        return self._values(codes, scales, rotated, high, payload.shape, payload.dtype)


def _tokens(shape: torch.Size) -> tuple[int, int, int]:
    """(samples, tokens of a sample, features); a tensor of two axes is one sample of tokens."""
    if len(shape) < 2:
        return 1, 1, shape.numel()
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    return shape[0], shape[1:-1].numel(), shape[-1]


@lru_cache
def _hadamard(n: int, device: torch.device) -> Tensor:
    """Sylvester's matrix over sqrt(n): symmetric, and its own inverse."""
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h / n**0.5).to(device)

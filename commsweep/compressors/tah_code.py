"""TAH-Quant as its authors coded it (heguangxin/TAH-Quant, read at b119bbb), which differs from the
paper and so from `tah`.

The place of a tile's pivot travels for every tile, not only for rotated ones, so that the length of
a message follows from its shape: the 4.41 bits an element that the paper quotes are this length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, payload
from commsweep.compressors.bits import pack, packed_bytes, unpack, unpack_flags
from commsweep.compressors.tah import _tokens
from commsweep.compressors.transform import matrix_on
from commsweep.config.compressors.tah import TAHCodeSpec
from commsweep.errors import UserError

LEAST = 1e-30  # of a sum and of a scale


@COMPRESSORS.of(TAHCodeSpec)
class TAHCode(Compressor[TAHCodeSpec]):
    """Per tile of a token: if first >= 2 second (largest magnitudes), the largest changes places
    with entry 0 and t <- t H / sqrt(n); z = min t, s = (max t - z) / (2^b - 1); q = round((t - z) /
    s). z and s travel in float16.

    The first int(S (1 - share)) tokens of a sample in rising order of entropy get `low` bits, all
    others `high`. nbytes = ceil(high tokens * D * high / 8) + ceil(low tokens * D * low / 8) + 4 *
    tiles + ceil(tiles log2(n) / 8) + ceil(tiles / 8) + ceil(tokens / 8), D as of TAH.
    """

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return sum(field.most_bytes for field in self.layouts(shape, dtype)[0].values())

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        samples, tokens, d = _tokens(shape)
        tiles, low = -(-d // self.spec.tile), samples * self._low(tokens)
        rows, width = samples * tokens, tiles * self.spec.tile
        lengths = {
            "low": packed_bytes(low * width, self.spec.low_bits),
            "high": packed_bytes((rows - low) * width, self.spec.high_bits),
            "places": packed_bytes(rows * tiles, self._place_bits),
            "rotated": packed_bytes(rows * tiles, 1),
            "tokens": packed_bytes(rows, 1),
        }
        form = {name: Field(torch.uint8, (length,)) for name, length in lengths.items()}
        form["ranges"] = Field(torch.float16, (rows, tiles, 2))
        return [form]

    @property
    def _place_bits(self) -> int:
        return int(math.log2(self.spec.tile))

    def _low(self, tokens: int) -> int:
        """Tokens of a sample with few bits; 204 of 1,024 at a share of 0.8, as floats have it."""
        return int(tokens * (1 - self.spec.high_share))

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        codes, zeros, scales, rotated, outliers, _ = self._coded(x)
        y = self._values(codes, zeros, scales, rotated, outliers, x.shape)
        return y.to(x.dtype)

    def _encode(self, x: Tensor, seed: int) -> Payload:
        codes, zeros, scales, rotated, outliers, low = self._coded(x)
        # as many as known beforehand: no device is waited for
        samples, tokens, _ = _tokens(x.shape)
        rare, order = samples * self._low(tokens), (~low).to(torch.uint8).argsort(stable=True)
        codes = codes.long()
        return payload(
            x,
            low=pack(codes[order[:rare]].flatten(), self.spec.low_bits),
            high=pack(codes[order[rare:]].flatten(), self.spec.high_bits),
            places=pack(outliers.view(-1), self._place_bits),
            rotated=pack(rotated.flatten(), 1),
            tokens=pack(low, 1),
            ranges=torch.stack([zeros, scales], -1),
        )

    def _decode(self, payload: Payload) -> Tensor:
        samples, tokens, d = _tokens(payload.shape)
        tiles, n = -(-d // self.spec.tile), self.spec.tile
        rows = samples * tokens
        fields = payload.parts
        low = unpack_flags(fields["tokens"], rows)
        count = samples * self._low(tokens)
        if int(low.sum()) != count:
            raise UserError(f"TAH: {int(low.sum())} tokens are marked, and {count} have few bits")
        width = tiles * n
        codes = torch.empty(rows, width, dtype=torch.int64, device=low.device)
        codes[low] = unpack(fields["low"], self.spec.low_bits, count * width).view(count, width)
        common = rows - count
        codes[~low] = unpack(fields["high"], self.spec.high_bits, common * width).view(
            common, width
        )
        outliers = unpack(fields["places"], self._place_bits, rows * tiles).view(rows, tiles)
        rotated = unpack_flags(fields["rotated"], rows * tiles).view(rows, tiles)
        zeros, scales = fields["ranges"].view(rows, tiles, 2).unbind(-1)
        y = self._values(
            codes.view(rows, tiles, n).float(), zeros, scales, rotated, outliers, payload.shape
        )
        return y.to(payload.dtype)

    def _coded(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """codes [tokens, tiles, n]; zero points, scales, rotated, places [tokens, tiles]; low
        [tokens].
        """
        samples, tokens, d = _tokens(x.shape)
        flat, n = x.reshape(samples * tokens, d).float(), self.spec.tile
        tiles = pad(flat, (0, -d % n)).unflatten(1, (-1, n))
        size = tiles.abs()
        outliers = size.argmax(-1)
        first, second = size.topk(2, -1).values.unbind(-1)
        rotated = first >= 2 * second
        swapped = _swapped(tiles, outliers) @ matrix_on("hadamard", n, x.device)
        tiles = torch.where(rotated[..., None], swapped, tiles)
        low = self._poor(flat.view(samples, tokens, d))
        most = self._most(low)
        zeros = tiles.amin(-1)
        scales = ((tiles.amax(-1) - zeros) / most[..., 0]).clamp(min=LEAST)
        codes = ((tiles - zeros[..., None]) / scales[..., None]).round()
        codes = torch.minimum(codes.clamp(min=0), most)
        return codes, _half(zeros), _half(scales), rotated, outliers, low

    def _most(self, low: Tensor) -> Tensor:
        """The largest code of every token, [tokens, 1, 1]."""
        low_levels, many = 2.0**self.spec.low_bits - 1, 2.0**self.spec.high_bits - 1
        return torch.where(low, low_levels, many).float()[:, None, None]

    def _poor(self, x: Tensor) -> Tensor:
        """Return which tokens of x [samples, tokens, d] get few bits; of equal ones the first."""
        p = x.abs() / (x.abs().sum(-1, keepdim=True) + LEAST)
        entropy = -(p * (p + LEAST).log()).sum(-1)
        order = entropy.argsort(dim=1, stable=True)[:, : self._low(x.shape[1])]
        return torch.zeros_like(entropy, dtype=torch.bool).scatter_(1, order, True).flatten()

    def _values(
        self,
        codes: Tensor,
        zeros: Tensor,
        scales: Tensor,
        rotated: Tensor,
        outliers: Tensor,
        shape: torch.Size,
    ) -> Tensor:
        tiles = codes * scales.float()[..., None] + zeros.float()[..., None]
        spun = _swapped(tiles @ matrix_on("hadamard", self.spec.tile, tiles.device), outliers)
        tiles = torch.where(rotated[..., None], spun, tiles)
        return tiles.flatten(1)[:, : _tokens(shape)[2]].reshape(shape)


def _half(x: Tensor) -> Tensor:
    """In float16; what is finite stays finite (the authors' code overflows)."""
    most = torch.finfo(torch.float16).max
    return torch.where(torch.isfinite(x), x.clamp(-most, most), x).half()


def _swapped(tiles: Tensor, outliers: Tensor) -> Tensor:
    """Entry 0 of every tile and the one at its place, changed."""
    at, out = outliers[..., None], tiles.clone()
    out[..., :1] = tiles.gather(-1, at)
    return out.scatter(-1, at, tiles[..., :1])

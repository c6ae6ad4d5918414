"""3LC (Lim, Andersen and Kaminsky, MLSys 2019): three values, five to a byte, runs of zeros short.

Every message has one scale, `s` times its largest size. A value is -1, 0 or 1 of that, rounded to
the nearest; a greater `s` makes more zeros. The paper adds error feedback: `feedback.kind=ef`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ZEROS = 121  # the byte of five zeros: 1 + 3 + 9 + 27 + 81
RUN = 243  # the byte of two such bytes; 255 stands for fourteen
LONGEST = 14


class ThreeLC:
    """Values in base 3, five a byte (3^5 = 243); bytes 243 to 255 are runs of five zeros."""

    def __init__(self, s: float = 1.0) -> None:
        self.s = s

    def encode(self, x: Tensor, seed: int) -> dict[str, Tensor]:
        """Return the bytes of a message and its scale."""
        flat = x.reshape(-1).float()
        scale = self.s * flat.abs().max()
        trits = (flat / scale.clamp(min=1e-30)).round().clamp(-1, 1) + 1
        trits = torch.nn.functional.pad(trits, (0, -len(trits) % 5), value=1.0)
        weights = torch.tensor([81.0, 27.0, 9.0, 3.0, 1.0], device=x.device)
        return {"bytes": _shorten((trits.view(-1, 5) @ weights).long()), "scale": scale.view(1)}

    def decode(self, parts: dict[str, Tensor], like: Tensor) -> Tensor:
        """Return the values of a message."""
        codes = parts["bytes"].long()
        runs = (codes - RUN + 2).clamp(min=1)
        codes = codes.where(codes < RUN, ZEROS).repeat_interleave(runs)
        powers = torch.tensor([81, 27, 9, 3, 1], device=codes.device)
        values = (codes[:, None] // powers % 3 - 1).reshape(-1)[: like.numel()]
        return (values * parts["scale"]).reshape(like.shape).to(like.dtype)


def _shorten(codes: Tensor) -> Tensor:
    """Replace runs of the byte of five zeros by bytes that count them, at most fourteen each."""
    values, lengths = codes.unique_consecutive(return_counts=True)
    # only this byte's runs are shortened: every other byte stands as often as it is there
    repeats = lengths.where(values != ZEROS, 1)
    counts = lengths.where(values == ZEROS, 1).repeat_interleave(repeats)
    values = values.repeat_interleave(repeats)
    pieces = -(-counts // LONGEST)
    first = pieces.cumsum(0) - pieces
    number = torch.arange(int(pieces.sum()), device=codes.device) - first.repeat_interleave(pieces)
    left = counts.repeat_interleave(pieces) - LONGEST * number
    size = left.clamp(max=LONGEST)
    return values.repeat_interleave(pieces).where(size < 2, RUN - 2 + size).to(torch.uint8)

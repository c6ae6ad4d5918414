"""Gradients of a bucket that travel in 16 bits: cast, gathered and averaged a run of layers at a
time, without a message for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stretch:
    """Neighbouring layers of a bucket that travel alike: elements `start` to `stop` of its buffer.

    wide: in their own type; else in 16 bits.
    """

    start: int
    stop: int
    wide: bool


def stretches(views: Sequence[Tensor], wide: Sequence[bool], buffer: Tensor) -> list[Stretch]:
    """Join the layers of a bucket, views of its buffer, to as few stretches as there are."""
    found: list[Stretch] = []
    places = sorted(
        (view.storage_offset() - buffer.storage_offset(), view.numel(), travels_wide)
        for view, travels_wide in zip(views, wide, strict=True)
    )
    for travels_wide, group in groupby(places, key=lambda place: place[2]):
        for start, length, _ in group:
            if found and found[-1].wide == travels_wide and found[-1].stop == start:
                found[-1] = Stretch(found[-1].start, start + length, travels_wide)
            else:
                found.append(Stretch(start, start + length, travels_wide))
    return found


class NarrowBucket:
    """The message of a bucket: its wide stretches, its narrow ones in 16 bits, and whether all of
    its values are finite.
    """

    def __init__(self, layout: list[Stretch], to: torch.dtype) -> None:
        """to: torch.float16 or torch.bfloat16."""
        self.to, self.layout = to, layout
        self.wide = sum(part.stop - part.start for part in layout if part.wide)
        self.narrow = sum(part.stop - part.start for part in layout if not part.wide)

    def pack(self, buffer: Tensor, scale: float) -> Tensor:
        """The message of a float32 buffer [elements], as bytes; narrow gradients are divided by
        `scale` first. Values beyond the range of 16 bits saturate, as `Cast` has them.
        """
        length = 4 * self.wide + 2 * self.narrow + 1
        # of whole words, so that the message of the next learner begins with one
        packed = buffer.new_empty(length + -length % 4, dtype=torch.uint8)
        wide, narrow, flag = self._parts(packed)
        low, high = torch.aminmax(buffer)
        flag.copy_((low.isfinite() & high.isfinite()).view(1))
        limit = min(torch.finfo(self.to).max, torch.finfo(buffer.dtype).max)
        at = {True: 0, False: 0}
        for part in self.layout:
            values, size = buffer[part.start : part.stop], part.stop - part.start
            place = slice(at[part.wide], at[part.wide] + size)
            at[part.wide] += size
            if part.wide:
                wide[place] = values
                continue
            if scale != 1:
                values = values / scale
            if buffer.device.type != "cpu" or max(-float(low), float(high)) / scale > limit:
                values = values.clamp(-limit, limit)
            narrow[place] = values
        return packed

    def average(self, arrived: Sequence[Tensor], buffer: Tensor, scale: float) -> None:
        """Put the mean of these messages, one of each learner, into a buffer; infinities, where a
        value of any learner is not finite.
        """
        messages = [self._parts(packed) for packed in arrived]
        if not bool(torch.stack([flag for _, _, flag in messages]).all()):
            buffer.fill_(torch.inf)
            return
        at = {True: 0, False: 0}
        for part in self.layout:
            mean, size = buffer[part.start : part.stop], part.stop - part.start
            place = slice(at[part.wide], at[part.wide] + size)
            at[part.wide] += size
            for learner, (wide, narrow, _) in enumerate(messages):
                values = (wide if part.wide else narrow)[place]
                if learner:
                    mean.add_(values)
                else:
                    mean.copy_(values)
            mean.div_(len(messages))
            if scale != 1 and not part.wide:
                mean.mul_(scale)

    def _parts(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The wide values, the narrow ones, and the flag in a message."""
        first, second = 4 * self.wide, 4 * self.wide + 2 * self.narrow
        return (
            packed[:first].view(torch.float32),
            packed[first:second].view(self.to),
            packed[second : second + 1],
        )

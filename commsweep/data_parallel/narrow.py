"""Gradients of a bucket that travel in 16 bits: cast, gathered and averaged a run of layers at a
time, without a message for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def stretches(views: Sequence[Tensor], are_wide: Sequence[bool], buffer: Tensor) -> list[Stretch]:
    """Join the layers of a bucket, views of its buffer, to as few stretches as there are."""
    joined: list[Stretch] = []
    layers = []
    for view, is_wide in zip(views, are_wide, strict=True):
        layers.append((view.storage_offset() - buffer.storage_offset(), view.numel(), is_wide))
    for start, length, is_wide in sorted(layers):
        before = joined[-1] if joined else None
        if before is not None and before.wide == is_wide and before.stop == start:
            joined[-1] = Stretch(before.start, start + length, is_wide)
        else:
            joined.append(Stretch(start, start + length, is_wide))
    return joined


class NarrowBucket:
    """The message of a bucket: its wide stretches, its narrow ones in 16 bits, and whether all of
    its values are finite.
    """

    def __init__(self, layout: list[Stretch], to: torch.dtype) -> None:
        """to: torch.float16 or torch.bfloat16."""
        self.to = to
        self.wide = self.narrow = 0  # elements
        # Of each stretch: where it stands in the buffer, where in the message, and whether wide.
        self.slices: list[tuple[slice, slice, bool]] = []
        for stretch in layout:
            size, start = stretch.stop - stretch.start, self.wide if stretch.wide else self.narrow
            in_buffer, in_message = slice(stretch.start, stretch.stop), slice(start, start + size)
            self.slices.append((in_buffer, in_message, stretch.wide))
            if stretch.wide:
                self.wide += size
            else:
                self.narrow += size

    def pack(self, buffer: Tensor, scale: float) -> Tensor:
        """The message of a float32 buffer [elements], as bytes; narrow gradients are divided by
        `scale` first. Values beyond the range of 16 bits saturate, as `Cast` has them.
        """
        length = 4 * self.wide + 2 * self.narrow + 1
        # of whole words, so that the message of the next learner begins with one
        packed = buffer.new_empty(length + -length % 4, dtype=torch.uint8)
        wide, narrow, flag = self._split(packed)
        low, high = torch.aminmax(buffer)
        flag.copy_((low.isfinite() & high.isfinite()).view(1))
        limit = min(torch.finfo(self.to).max, torch.finfo(buffer.dtype).max)
        may_saturate = (
            buffer.device.type != "cpu"  # there a look at the values would wait for the device
            or max(-float(low), float(high)) / scale > limit
        )
        for in_buffer, in_message, is_wide in self.slices:
            values = buffer[in_buffer]
            if is_wide:
                wide[in_message] = values
                continue
            if scale != 1:
                values = values / scale
            if may_saturate:
                values = values.clamp(-limit, limit)
            narrow[in_message] = values
        return packed

    def average(self, arrived: Sequence[Tensor], buffer: Tensor, scale: float) -> None:
        """Put the mean of these messages, one of each learner, into a buffer; infinities, where a
        value of any learner is not finite.
        """
        messages = [self._split(packed) for packed in arrived]
        if not bool(torch.stack([flag for _, _, flag in messages]).all()):
            buffer.fill_(torch.inf)
            return
        for in_buffer, in_message, is_wide in self.slices:
            mean = buffer[in_buffer]
            for learner, (wide, narrow, _) in enumerate(messages):
                values = (wide if is_wide else narrow)[in_message]
                if learner:
                    mean.add_(values)
                else:
                    mean.copy_(values)
            mean.div_(len(messages))
            if scale != 1 and not is_wide:
                mean.mul_(scale)

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The wide values, the narrow ones, and the flag in a message."""
        first, second = 4 * self.wide, 4 * self.wide + 2 * self.narrow
        return (
            packed[:first].view(torch.float32),
            packed[first:second].view(self.to),
            packed[second : second + 1],
        )

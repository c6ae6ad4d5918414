"""Streaming DiLoCo (arXiv 2501.18512): fragments of the model are exchanged in turn, each at a time
of its own, and may be used `overlap` steps after they were sent. A learner then keeps a share alpha
of its own weights: theta <- alpha theta + (1 - alpha) ref.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from commsweep.config.gradients import Outer
from commsweep.data_parallel.outer.diloco import TakeCommon
from commsweep.errors import UserError


class Mix(TakeCommon):
    """A learner keeps `local_share` of its own weights."""

    def apply(self, own: Tensor, common: Tensor, arrived: Tensor, sent: Tensor) -> None:
        own.lerp_(common, 1 - self.spec.local_share)


def fragments(names: Sequence[str], outer: Outer) -> list[tuple[int, list[int]]]:
    """(offset in steps, places of its parameters) of each fragment: block i belongs to fragment i
    mod `fragments`, what is in no block (embeddings, heads) is one of its own. One fragment holds
    everything.

    A parameter's block is the part of its name up to the first number. Raises UserError where there
    are fewer blocks.
    """
    if outer.fragments == 1:
        return [(0, list(range(len(names))))]
    blocks: dict[str, list[int]] = {}
    rest: list[int] = []
    for place, name in enumerate(names):
        found = re.match(r"(.*?(?:^|\.)\d+)\.", name)
        (blocks.setdefault(found[1], []) if found else rest).append(place)
    if len(blocks) < outer.fragments:
        raise UserError(
            f"grad.outer.fragments={outer.fragments}: the model has {len(blocks)} blocks, so "
            "some fragments would be empty; choose no more"
        )
    every = [
        [place for own in list(blocks.values())[turn :: outer.fragments] for place in own]
        for turn in range(outer.fragments)
    ] + ([rest] if rest else [])
    return [(turn * outer.interval // len(every), own) for turn, own in enumerate(every)]

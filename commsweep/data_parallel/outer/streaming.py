"""Streaming DiLoCo (arXiv 2501.18512): fragments of the model are exchanged in turn, each at a time
of its own, and may be used `overlap` steps after they were sent. A learner then keeps a share alpha
of its own weights: theta <- alpha theta + (1 - alpha) ref.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from commsweep.config.outer import Outer
from commsweep.data_parallel.outer.roles import UPDATES, TakeCommon
from commsweep.errors import UserError


@UPDATES.when(lambda outer: outer.local_update == "mix" and outer.local_share)
class Mix(TakeCommon):
    """The mix of common weights with a share `local_share` of a learner's own."""

    shares_statistics = False

    def apply(self, weights: Tensor, common: Tensor, arrived: Tensor, sent: Tensor) -> None:
        weights.lerp_(common, 1 - self.spec.local_share)


def fragments(names: Sequence[str], outer: Outer) -> list[tuple[int, list[int]]]:
    """Return (offset in steps, numbers of its parameters) of each fragment.

    Block i belongs to fragment i mod `fragments`; what is in no block (embeddings, heads) is one
    more. A parameter's block is the part of its name up to the first number. Raises UserError where
    there are fewer blocks than fragments.
    """
    if outer.fragments == 1:
        return [(0, list(range(len(names))))]
    blocks: dict[str, list[int]] = {}
    outside: list[int] = []
    for number, name in enumerate(names):
        block = re.match(r"(.*?(?:^|\.)\d+)\.", name)
        (blocks.setdefault(block[1], []) if block else outside).append(number)
    if len(blocks) < outer.fragments:
        raise UserError(
            f"grad.outer.fragments={outer.fragments}: the model has {len(blocks)} blocks, so "
            "some fragments would be empty; choose no more"
        )
    members = []
    for first in range(outer.fragments):
        turns = list(blocks.values())[first :: outer.fragments]
        members.append([number for block in turns for number in block])
    if outside:
        members.append(outside)
    return [
        (index * outer.interval // len(members), numbers) for index, numbers in enumerate(members)
    ]

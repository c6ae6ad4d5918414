"""Eager updates (arXiv 2502.12996): a learner uses its own pseudo-gradient at once, and those of
the others an exchange later, when they have had a whole interval to travel.

D_m(t) = d_m(t) / M + (mean_j y_j(t-1) - d_m(t-1) / M), with d_m the pseudo-gradient and y_m what
arrives of it: in the end a learner's share of everything is y / M. After the last exchange nothing
is left for later: D_m = mean_j y_j(t) + (mean_j y_j(t-1) - d_m(t-1) / M).
"""

from __future__ import annotations

from torch import Tensor

Layers = dict[int, Tensor]


def merged(now: list[Layers], before: tuple[Layers, list[Layers]] | None) -> list[Layers]:
    """D of each learner here. now: what it uses at once. before: what arrived of the last exchange,
    and what each used of it at once.
    """
    made = [dict(layers) for layers in now]
    if before is not None:
        mean, sent = before
        for layers, theirs in zip(made, sent, strict=True):
            for index in layers:
                layers[index] = layers[index] + (mean[index] - theirs[index])
    return made

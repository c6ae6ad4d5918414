"""Choosing where an image model is cut."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from commsweep.config.training import ImageModel, OwnModel
from commsweep.errors import UserError, nearest


def chosen(
    spec: ImageModel | OwnModel, model: nn.Module, legal: Sequence[str]
) -> dict[str, nn.Module]:
    """The modules named in spec.cuts, in model order. Raises UserError on a cut that is not
    legal.
    """
    for cut in spec.cuts:
        if cut not in legal:
            raise UserError(
                f"model.cuts: '{cut}' is no legal cut of {spec.name}{nearest(cut, legal)} "
                f"(legal: {', '.join(legal)})"
            )
    order = [legal.index(cut) for cut in spec.cuts]
    if order != sorted(set(order)):
        raise UserError(
            f"model.cuts: {', '.join(spec.cuts)} must follow the model's order, each at most once"
        )
    return {cut: model.get_submodule(cut) for cut in spec.cuts}

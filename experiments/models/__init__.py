"""The networks of a run and where each may be cut."""

from __future__ import annotations

from torch import nn

from experiments.config import Model
from experiments.errors import UserError, nearest
from experiments.models import resnet


def build(spec: Model, channels: int, classes: int) -> nn.Module:
    """The network of a spec, freshly initialised from the global random state."""
    return resnet.build(spec, channels, classes)


def cut_points(spec: Model, model: nn.Module) -> dict[str, nn.Module]:
    """The modules named in spec.cuts, in model order. Raises UserError on a cut that is not legal."""
    legal = resnet.legal_cuts(model)
    for cut in spec.cuts:
        if cut not in legal:
            raise UserError(f"model.cuts: '{cut}' is no legal cut of {spec.name}{nearest(cut, legal)} "
                            f"(legal: {', '.join(legal)})")
    order = [legal.index(cut) for cut in spec.cuts]
    if order != sorted(set(order)):
        raise UserError(f"model.cuts: {', '.join(spec.cuts)} must follow the model's order, each at most once")
    return {cut: model.get_submodule(cut) for cut in spec.cuts}

"""The networks of a run and where each may be cut."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from commsweep.config import Run
from commsweep.config.training import ImageModel, OwnModel
from commsweep.errors import UserError
from commsweep.models import cuts, layout, mlp, own, resnet

if TYPE_CHECKING:
    from commsweep.data.module import Blocks, ImageData


def build(
    run: Run, data: ImageData | Blocks, root: Path | None = None
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A run's network, initialised from the global random state, and the modules a boundary
    follows, in order.

    `root` holds folders of pretrained weights. Raises UserError on an illegal cut or unusable
    weights.
    """
    model, modules = _build(run, data, root)
    return layout.channels_last(model) if run.channels_last else model, modules


def _build(
    run: Run, data: ImageData | Blocks, root: Path | None
) -> tuple[nn.Module, dict[str, nn.Module]]:
    if isinstance(run.model, OwnModel):
        model = own.build(run.model, data.example, data.images.classes)  # pyright: ignore[reportAttributeAccessIssue]
        return model, cuts.chosen(run.model, model, own.legal_cuts(model, data.example))
    if isinstance(run.model, ImageModel) and run.model.name == "mlp":
        perceptron = mlp.MLP(data.images.train_x[0].numel(), run.model.width, data.images.classes)  # pyright: ignore[reportAttributeAccessIssue]
        return perceptron, cuts.chosen(run.model, perceptron, mlp.LAYERS)
    if isinstance(run.model, ImageModel):
        if data.example.dim() != 4:
            raise UserError(
                f"data.name={run.data.name}: samples of shape {tuple(data.example.shape[1:])}; "
                f"model.name={run.model.name} takes images [channels, height, width]"
            )
        model = resnet.build(run.model, data.images.channels, data.images.classes)  # pyright: ignore[reportAttributeAccessIssue]
        return model, cuts.chosen(run.model, model, resnet.legal_cuts(model))
    from commsweep.models import causal_lm  # transformers takes seconds to import

    model = causal_lm.build(run.model, data.vocabulary, run.data.block_size, root)  # pyright: ignore[reportAttributeAccessIssue]
    return model, causal_lm.cut_points(run.model, model)

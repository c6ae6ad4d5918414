"""The networks of a run and where each may be cut."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from commsweep.compressors.base import channels_last
from commsweep.config import Run
from commsweep.config.training import OwnModel, TextModel, TextSet
from commsweep.data.module import Blocks, ImageData
from commsweep.errors import UserError
from commsweep.models import cuts, layout, mlp, own, resnet


def build(
    run: Run, data: ImageData | Blocks, root: Path | None = None
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A run's network, initialised from the global random state, and the modules a boundary
    follows, in order.

    `root` holds folders of pretrained weights. Raises UserError on an illegal cut or unusable
    weights.
    """
    model, modules = _build(run, data, root)
    if run.channels_last:
        layout.channels_last(model)
        if not any(channels_last(parameter) for parameter in model.parameters()):
            raise UserError(
                "channels_last=true has no effect on this network, which has no convolution of "
                "several input channels; set channels_last=false"
            )
    return model, modules


def _build(
    run: Run, data: ImageData | Blocks, root: Path | None
) -> tuple[nn.Module, dict[str, nn.Module]]:
    if isinstance(run.model, TextModel):
        return _text_model(run, data, root)
    assert isinstance(data, ImageData)
    if isinstance(run.model, OwnModel):
        model = own.build(run.model, data.example, data.images.classes)
        return model, cuts.chosen(run.model, model, own.legal_cuts(model, data.example))
    if run.model.name == "mlp":
        perceptron = mlp.MLP(data.images.train_x[0].numel(), run.model.width, data.images.classes)
        return perceptron, cuts.chosen(run.model, perceptron, mlp.LAYERS)
    if data.example.dim() != 4:
        raise UserError(
            f"data.name={run.data.name}: samples of shape {tuple(data.example.shape[1:])}; "
            f"model.name={run.model.name} takes images [channels, height, width]"
        )
    model = resnet.build(run.model, data.images.channels, data.images.classes)
    return model, cuts.chosen(run.model, model, resnet.legal_cuts(model))


def _text_model(
    run: Run, data: ImageData | Blocks, root: Path | None
) -> tuple[nn.Module, dict[str, nn.Module]]:
    from commsweep.models import causal_lm  # transformers takes seconds to import

    assert isinstance(run.model, TextModel)
    assert isinstance(run.data, TextSet) and isinstance(data, Blocks)
    model = causal_lm.build(run.model, data.vocabulary, run.data.block_size, root)
    return model, causal_lm.cut_points(run.model, model)

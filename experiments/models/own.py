"""A network of a user's own, and where it may be cut: behind any module that runs once and returns a tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from commsweep.experiments.config import OwnModel, own
from commsweep.experiments.errors import UserError


def build(spec: OwnModel, sample: Tensor, classes: int) -> nn.Module:
    """What the function makes of a sample [1, ...] and the number of classes. Raises UserError when that is no network
    of such samples."""
    function = own.load(spec.build, spec.source)
    try:
        model = function(sample, classes, **spec.options)
    except TypeError as error:
        raise UserError(f"model.build={spec.build}: {error}; it is called as function(sample, classes, **options)"
                        ) from None
    if not isinstance(model, nn.Module):
        raise UserError(f"model.build={spec.build} returned {type(model).__name__}; a torch.nn.Module is wanted")
    shape = tuple(_passed(model, sample).shape)
    if shape != (1, classes):
        raise UserError(f"model.build={spec.build}: a sample gives {shape}; logits of shape {(1, classes)} are wanted")
    model.made_by = spec.model_copy(update={"source": own.source(spec.build)})  # read back when the run has finished
    return model


def legal_cuts(model: nn.Module, sample: Tensor) -> list[str]:
    """Modules that a boundary may follow, in the order in which they end."""
    seen: dict[str, list[bool]] = {}
    hooks = [module.register_forward_hook(lambda _m, _i, out, name=name: seen.setdefault(name, []).append(
        isinstance(out, Tensor))) for name, module in model.named_modules() if name]
    try:
        _passed(model, sample)
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, calls in seen.items() if calls == [True]]


@torch.no_grad()
def _passed(model: nn.Module, sample: Tensor) -> Tensor:
    training = model.training
    try:
        return model.eval()(sample)
    finally:
        model.train(training)

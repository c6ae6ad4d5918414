"""A network of a user's own, and where it may be cut: behind any module that runs once and returns a tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from commsweep.experiments.config import OwnModel, own
from commsweep.experiments.errors import UserError


def build(spec: OwnModel, sample: Tensor, classes: int) -> nn.Module:
    """What the function makes of a sample [1, ...] and the number of classes. Raises UserError when that is no network
    of such samples."""
    model = own.call(spec.build, spec.source, sample, classes, **spec.options)
    if not isinstance(model, nn.Module):
        raise UserError(f"model.build={spec.build} returned {type(model).__name__}; a torch.nn.Module is wanted")
    try:
        shape = tuple(_passed(model, sample).shape)
    except Exception as error:
        raise UserError(f"model.build={spec.build}: a sample of shape {tuple(sample.shape)} does not pass through it "
                        f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})") from None
    if shape != (1, classes):
        raise UserError(f"model.build={spec.build}: a sample gives {shape}; logits of shape {(1, classes)} are wanted")
    model.made_by = spec.model_copy(update={"source": own.source(spec.build)})  # read back when the run has finished
    return model


def legal_cuts(model: nn.Module, sample: Tensor) -> list[str]:
    """Modules that a boundary may follow, in the order in which they end; not the one that makes the logits."""
    seen: dict[str, list[object]] = {}
    hooks = [module.register_forward_hook(lambda _m, _i, out, name=name: seen.setdefault(name, []).append(out))
             for name, module in model.named_modules() if name]
    try:
        logits = _passed(model, sample)
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, (out, *more) in seen.items() if not more and isinstance(out, Tensor) and out is not logits]


@torch.no_grad()
def _passed(model: nn.Module, sample: Tensor) -> Tensor:
    training = model.training
    try:
        return model.eval()(sample)
    finally:
        model.train(training)

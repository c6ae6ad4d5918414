"""A network of a user's own, and where it may be cut: behind any module that runs once and returns
a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from commsweep.config import own
from commsweep.config.training import OwnModel
from commsweep.errors import UserError, reason
from commsweep.models.module_calls import undisturbed


def build(spec: OwnModel, sample: Tensor, classes: int) -> nn.Module:
    """Return what the function makes of a sample [1, ...] and the number of classes. Raises
    UserError when that is no network of such samples.
    """
    model = own.call(spec.build, spec.source, sample, classes, **spec.options)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model.build={spec.build} returned {type(model).__name__}; a torch.nn.Module is wanted"
        )
    try:
        with own.no_exit(spec.build):
            shape = tuple(_passed(model, sample).shape)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(
            f"model.build={spec.build}: a sample of shape {tuple(sample.shape)} does not pass "
            f"through it ({reason(error)})"
        ) from None
    if shape != (1, classes):
        raise UserError(
            f"model.build={spec.build}: a sample gives {shape}; logits of shape {(1, classes)} "
            "are wanted"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"model.build={spec.build}: no parameter of the model is to be trained; set "
            "requires_grad"
        )
    _try(spec, model, sample, classes)
    # read back when the run has finished
    model.made_by = spec.model_copy(update={"source": own.source(spec.build)})  # pyright: ignore[reportArgumentType]
    return model


def _try(spec: OwnModel, model: nn.Module, sample: Tensor, classes: int) -> None:
    """Pass two samples forward and backward as in training, and leave everything as it was. Raises
    UserError.
    """
    try:
        with own.no_exit(spec.build), undisturbed(model):
            logits = model(sample.repeat_interleave(2, 0))
            if logits.shape != (2, classes):
                raise ValueError(
                    f"logits of shape {(2, classes)} are wanted, and {tuple(logits.shape)} came"
                )
            nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long)).backward()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(
            f"model.build={spec.build}: two samples of shape {tuple(sample.shape[1:])} do not "
            f"pass through it in training ({reason(error)})"
        ) from None


def legal_cuts(model: nn.Module, sample: Tensor) -> list[str]:
    """Modules that a boundary may follow, in the order in which they end; not the one that makes
    the logits.
    """
    calls: dict[str, list[object]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, out, name=name: calls.setdefault(name, []).append(out)
        )
        for name, module in model.named_modules()
        if name
    ]
    try:
        logits = _passed(model, sample)
    finally:
        for hook in hooks:
            hook.remove()
    return [
        name
        for name, (out, *later) in calls.items()
        if not later and isinstance(out, Tensor) and out is not logits
    ]


@torch.no_grad()
def _passed(model: nn.Module, sample: Tensor) -> Tensor:
    training = model.training
    try:
        return model.eval()(sample)
    finally:
        model.train(training)

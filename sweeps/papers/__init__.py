"""Named sweeps: one function a table or figure, each a list of Runs."""

from __future__ import annotations

from collections.abc import Callable

from commsweep.experiments.config import Run
from commsweep.experiments.errors import UserError, nearest
from commsweep.sweeps.papers import adacomp, rudakov, rudakov_text

SWEEPS: dict[str, Callable[[], list[Run]]] = {
    "demo": rudakov.demo,
    "smoke": rudakov.smoke,
    "resnet18_quantization": rudakov.resnet18_quantization,
    "resnet18_topk": rudakov.resnet18_topk,
    "resnet18_feedback": rudakov.resnet18_feedback,
    "resnet18_aqsgd": rudakov.resnet18_aqsgd,
    "resnet18_paper": rudakov.resnet18_paper,
    "resnet18_corrected": rudakov.resnet18_corrected,
    "demo-text": rudakov_text.demo_text,
    "smoke-text": rudakov_text.smoke_text,
    "gpt2_paper": rudakov_text.gpt2_paper,
    "gpt2_aqsgd": rudakov_text.gpt2_aqsgd,
    "gpt2_matched": rudakov_text.gpt2_matched,
    "finetune": rudakov_text.finetune,
    "demo-gradients": adacomp.demo_gradients,
    "smoke-gradients": adacomp.smoke_gradients,
    "cifar_gradients": adacomp.cifar_gradients,
}


def sweep(name: str) -> list[Run]:
    """The runs of a named sweep. Raises UserError naming the nearest one."""
    if name not in SWEEPS:
        raise UserError(f"unknown sweep '{name}'{nearest(name, SWEEPS)} (one of: {', '.join(SWEEPS)})")
    return SWEEPS[name]()

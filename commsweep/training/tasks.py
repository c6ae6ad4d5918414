"""The tasks of a training: the loss of a batch, and how it is scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from commsweep.component import Component, Pass
from commsweep.config import Run
from commsweep.config.training import TextModel
from commsweep.training.step import Task


class ImageClassification(Task):
    """Cross-entropy over classes; accuracy is the share of all samples."""

    def logits(self, x: Tensor) -> Tensor:
        return self.model(laid_out(self.run, x))

    @staticmethod
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(logits, y)

    @staticmethod
    def score(logits: Tensor, y: Tensor) -> Tensor:
        logits = logits.float()
        correct = (logits.argmax(1) == y).sum()
        return _sums(cross_entropy(logits, y, reduction="sum"), correct, len(y))

    @staticmethod
    def means(total: list[float]) -> dict[str, float]:
        loss, correct, n = total
        return {"acc": correct / n, "loss": loss / n}


class LanguageModelling(Task):
    """Next-token cross-entropy; perplexity is exp of the mean over all predicted tokens of a
    split.
    """

    def __init__(
        self,
        run: Run,
        model: Any,
        components: dict[str, Component],
        divide: Callable[[int], list[Pass]],
    ) -> None:
        super().__init__(run, model, components, divide)
        head, self._tied, self._head = (
            model.get_output_embeddings(),
            model.get_input_embeddings().weight,
            None,
        )
        self._head_name = next(
            (f"{name}.weight" for name, module in model.named_modules() if module is head), ""
        )
        if (
            run.microbatches == 1
            or not isinstance(run.model, TextModel)
            or run.model.stages == 1
            or getattr(head, "weight", None) is not self._tied
        ):
            self._tied = None

    def logits(self, x: Tensor) -> Tensor:
        if self._head is None:
            return self.model(input_ids=x).logits
        return torch.func.functional_call(
            self.model, {self._head_name: self._head}, (), {"input_ids": x}, tie_weights=False
        ).logits

    # In a pipeline the first and the last stage hold the tied embeddings, and each sums its own
    # gradients over the microbatches. Sums of floats depend on their order, and AdamW divides small
    # ones by their size, so it is the same order here: the head's use has a gradient of its own
    # until the last microbatch.

    def begin_gradient(self) -> None:
        if self._tied is not None:
            self._head = self._tied.detach().requires_grad_()

    def end_gradient(self) -> None:
        super().end_gradient()
        if self._head is not None and self._tied is not None:
            head = self._head.grad.div_(self.run.microbatches) if self.engine else self._head.grad
            self._tied.grad = head + self._tied.grad
            self._head = None

    @staticmethod
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return _entropy(logits, y, "mean")

    @staticmethod
    def labels(classes: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y[:, :1], classes[:, :-1]], 1)  # a row of logits is of the next token

    @staticmethod
    def score(logits: Tensor, y: Tensor) -> Tensor:
        return _sums(_entropy(logits, y, "sum"), y[:, 1:].numel())

    @staticmethod
    def means(total: list[float]) -> dict[str, float]:
        loss = total[0] / total[1]
        return {"loss": loss, "ppl": math.exp(min(loss, 700.0))}


def kind(run: Run) -> type[Task]:
    """Return what a run trains."""
    return LanguageModelling if isinstance(run.model, TextModel) else ImageClassification


def laid_out(run: Run, x: Tensor) -> Tensor:
    """Images in the run's memory layout."""
    return x.contiguous(memory_format=torch.channels_last) if run.channels_last else x


def _entropy(logits: Tensor, y: Tensor, reduction: str) -> Tensor:
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten().long(), reduction=reduction
    )


def _sums(loss: Tensor, *numbers: Tensor | int) -> Tensor:
    """Return a float32 vector, built on the loss's device without waiting for it."""
    tensors = [
        number if isinstance(number, Tensor) else torch.full((), float(number), device=loss.device)
        for number in numbers
    ]
    return torch.stack([loss.float(), *(tensor.float() for tensor in tensors)])

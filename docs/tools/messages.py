"""Real messages of three trainings, as `commsweep score` measures codecs on them.

`python -m docs.tools.messages` trains three networks on embedded data without compression and
writes `commsweep/scoring/messages.npz`: for each of four roles, an early and a late message of each
network, in float32. SmolLM2-135M (Apache License 2.0) needs `requirements-finetune.txt`; the
addresses that it and the nano GPT-2 read are in the public domain; the digits are scikit-learn's
(CC BY 4.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import commsweep.scoring
from commsweep import models
from commsweep.config import Run, override
from commsweep.data import load
from commsweep.registry import preset
from commsweep.training import optim, tasks

FILE = Path(commsweep.scoring.__file__).with_name("messages.npz")
MOST = 2**15  # numbers of a message that are kept


@dataclass(frozen=True)
class Training:
    """A network, and the steps at which its messages are kept.

    spacing: steps between two messages of pseudo-gradients.
    """

    name: str
    run: Run
    early: int
    late: int
    spacing: int


def trainings() -> list[Training]:
    """Return the three trainings of the file."""
    nano = override(preset("sotu_nano"), {"data.train_blocks": 6400})
    return [
        Training("resnet", preset("digits"), early=10, late=160, spacing=16),
        Training("nano-gpt2", nano, early=16, late=380, spacing=16),
        Training("smollm2", preset("smollm2"), early=2, late=24, spacing=4),
    ]


def messages(training: Training) -> dict[str, Tensor]:
    """Return the messages of a training by role and stage: "gradients/nano-gpt2/late"."""
    run, device = training.run, torch.device("cpu")
    torch.manual_seed(run.seed)
    data = load.build(run, None, None, device)
    model, modules = models.build(run, data)
    model.train()
    task = tasks.kind(run)
    optimizer = optim.optimizer(run, list(model.parameters()), optim.embedded(model))
    crossing: dict[str, Tensor] = {}
    middle = list(modules.values())[len(modules) // 2]

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        crossing["forward"] = y.detach().clone()
        y.register_hook(lambda gradient: crossing.update(backward=gradient.detach().clone()))

    middle.register_forward_hook(keep)
    weight = _largest(model)
    arrays_by_name: dict[str, Tensor] = {}
    before: dict[str, Tensor] = {}
    moments = {training.early: "early", training.late: "late"}
    for step, (x, y) in enumerate(_batches(run, data)):
        for moment, when in moments.items():
            name = f"{training.name}/{when}"
            if step == moment:
                before[name] = weight.detach().clone()
            if step == moment + training.spacing:
                arrays_by_name[f"pseudo-gradients/{name}"] = _cut(before[name] - weight.detach())
        if step > training.late + training.spacing:
            break
        optimizer.zero_grad()
        output = model(tasks.laid_out(run, x))
        task.loss(getattr(output, "logits", output), y).backward()
        if (when := moments.get(step)) is not None:
            name = f"{training.name}/{when}"
            arrays_by_name[f"activations/{name}"] = _cut(crossing["forward"])
            arrays_by_name[f"gradients/{name}"] = _cut(crossing["backward"])
            assert weight.grad is not None
            arrays_by_name[f"learners/{name}"] = _cut(weight.grad)
        optimizer.step()
    return arrays_by_name


def _batches(run: Run, data: load.ImageData | load.Blocks) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all epochs."""
    loader = data.train_dataloader()
    for epoch in range(run.epochs):
        loader.set_epoch(epoch)
        for x, y, _ in loader:
            yield x, y


def _largest(model: nn.Module) -> nn.Parameter:
    """Return the largest weight that is no embedding's."""
    embeddings = optim.embedded(model)
    weights = [p for p in model.parameters() if p.dim() > 1 and id(p) not in embeddings]
    return max(weights, key=lambda weight: weight.numel())


def _cut(x: Tensor) -> Tensor:
    """Return the first rows of a message, at most `MOST` numbers; a single sample is cut, too."""
    rows = x[: max(1, MOST // x[0].numel())]
    if rows.numel() > MOST:
        rows = rows[:, : MOST // rows[0, 0].numel()]
    return rows.contiguous().float()


def main() -> None:
    """Write the file anew."""
    arrays: dict[str, np.ndarray] = {}
    for training in trainings():
        for name, message in messages(training).items():
            arrays[name] = message.numpy()
            print(f"{name:34} {tuple(message.shape)}  |x| = {float(message.norm()):.3g}")
    np.savez(FILE, allow_pickle=False, **dict(sorted(arrays.items())))
    print(f"{FILE.name}: {len(arrays)} messages, {FILE.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

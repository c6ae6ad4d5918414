"""`commsweep bench sparse`: what masks and sparse attention cost and save in time, beside the dense
way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from commsweep.bench import Result, alternate, compared
from commsweep.component import Moment, Pass
from commsweep.config import Execution, override
from commsweep.registry import preset
from commsweep.sparsity.attention import attend
from commsweep.training.run import build

HEADS, HEAD, BAND = 12, 64, 128  # GPT-2 small's attention
TOKENS = (1024, 4096)
BOUNDS = {("local", 1024): 0.8, ("local", 4096): 0.3}  # of the others nothing is promised
ROWS, WIDTH = (
    1024,
    768,
)  # of the linear layer: GPT-2 small's first of a block's perceptron, a block of tokens
LEVELS = (0.8, 0.9, 0.95)


def bench() -> Iterator[Result]:
    """Steps with masks, updates, attention, linear layers; on a GPU weights of which two in four
    are zero, too.
    """
    yield from _steps()
    for tokens in TOKENS:
        yield from _attention(tokens)
    yield from _linear()
    if torch.cuda.is_available():
        yield from _two_in_four()


def _steps() -> Iterator[Result]:
    """A step of GPT-2 micro (batch 8, blocks of 256), four fifths of its weights zero, and updates
    of all its masks, beside the dense step.
    """
    sparse = {"sparsity.phases.all.sparsity": 0.8, "sparsity.interval": 1000}
    updates = {
        growth: _update_of(sparse | {"sparsity.interval": 1, "sparsity.growth": growth})
        for growth in ("gradient", "mixed")
    }
    seconds = alternate(
        {"dense": _step_of({}), "masks": _step_of(sparse), **updates}, rounds=13, warmup=2
    )
    for side, label, bound in (
        ("masks", "GPT-2 micro step, 80 % zero / dense", 1.05),
        *(
            (growth, f"update of all masks, {growth} growth / dense step", 1.0)
            for growth in updates
        ),
    ):
        yield compared(label, seconds, side, "dense", bound)


def _task(settings: dict[str, Any]) -> tuple:
    run = override(
        preset("sotu_micro"),
        {"data.batch_size": 8, "data.train_blocks": 8192, "data.eval_blocks": 8} | settings,
    )
    built = build(run, Execution("cpu", threads=torch.get_num_threads()))
    task = built.task.train()
    optimizer = torch.optim.AdamW(task.parameters(), 1e-4, fused=True)
    for component in task.components.values():
        component.configured(optimizer)
    return task, optimizer, next(iter(built.data.train))


def _step_of(settings: dict[str, Any]) -> Callable[[], object]:
    """Return a training step in its order, without Lightning around it."""
    task, optimizer, (x, y, samples) = _task(settings)
    number, pass_ = count(1), Pass(slice(0, len(y)), len(y), 1.0)

    def step() -> None:
        moment = Moment(next(number), 0, 1e-4, 0, 0)
        optimizer.zero_grad()
        for component in task.components.values():
            component.before_pass(moment, pass_, samples, x.device)
        task.loss(task.logits(x), y).backward()
        for component in task.components.values():
            component.before_exchange(moment)
        for component in task.components.values():
            component.after_backward(moment)
        optimizer.step()

    return step


def _update_of(settings: dict[str, Any]) -> Callable[[], object]:
    """The exchange's moments of a step in which all masks move, gradients being there."""
    task, optimizer, (x, y, samples) = _task(settings)
    training, number = task.components["sparsity"], count(1)
    task.components["boundaries"].begin(0, samples)
    task.loss(task.logits(x), y).backward()
    optimizer.step()
    grads = [mask.weight.grad.clone() for mask in training.masks]

    def update() -> None:
        moment = Moment(next(number), 0, 1e-4, 0, 0)
        for mask, grad in zip(training.masks, grads, strict=True):
            mask.weight.grad.copy_(grad)
        training.before_exchange(moment)
        training.after_backward(moment)

    training._rows = 8
    return update


def _attention(tokens: int) -> Iterator[Result]:
    q, k, v = (torch.randn(1, HEADS, tokens, HEAD, requires_grad=True) for _ in range(3))
    slope = torch.randn(1, HEADS, tokens, HEAD)

    def both(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), (q, k, v), slope)

    kinds = ("local", "strided", "fixed", "local_strided")
    sides = {"dense": both(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))} | {
        kind: both(lambda kind=kind: attend(kind, q, k, v, BAND)) for kind in kinds
    }
    seconds = alternate(sides, rounds=7, warmup=2)
    for kind in kinds:
        title = f"attention, {tokens} tokens, {kind} {BAND}, forward and backward / dense causal"
        yield compared(title, seconds, kind, "dense", BOUNDS.get((kind, tokens)))


def _linear() -> Iterator[Result]:
    """Forward of one layer: zeros in a dense matrix cost what other numbers do; torch's CSR skips
    them.
    """
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(4 * WIDTH, WIDTH)
    masked = {level: weight * (torch.rand_like(weight) >= level) for level in LEVELS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is called a beta
        rows = {level: weight.to_sparse_csr() for level, weight in masked.items()}
        sides: dict[str, Callable[[], object]] = {"dense": lambda: linear(x, weight)}
        sides |= {
            f"masked {level}": lambda level=level: linear(x, masked[level]) for level in LEVELS
        }
        sides |= {f"CSR {level}": lambda level=level: (rows[level] @ x.T).T for level in LEVELS}
        with torch.no_grad():
            seconds = alternate(sides, rounds=9, warmup=2)
    for level in LEVELS:
        for kind in ("masked", "CSR"):
            title = f"linear layer, {100 * level:g} % zero, {kind} / dense"
            yield compared(title, seconds, f"{kind} {level}", "dense", None)


def _two_in_four() -> Iterator[Result]:
    """Forward of one layer in half precision with two of four neighbours zero, which such a GPU's
    units skip.
    """
    from torch.sparse import to_sparse_semi_structured

    weight = torch.randn(4 * WIDTH, WIDTH, device="cuda", dtype=torch.float16)
    keep = torch.tensor([0, 0, 1, 1], device="cuda", dtype=torch.bool).tile(4 * WIDTH, WIDTH // 4)
    x = torch.randn(8 * ROWS, WIDTH, device="cuda", dtype=torch.float16)
    packed = to_sparse_semi_structured(weight * keep)

    def timed(product: Callable[[], Tensor]) -> Callable[[], object]:
        def multiply() -> None:
            product()
            torch.cuda.synchronize()

        return multiply

    seconds = alternate(
        {"dense": timed(lambda: linear(x, weight)), "2:4": timed(lambda: linear(x, packed))}, 50, 10
    )
    title = "linear layer on a GPU, two of four zero / dense"
    yield compared(title, seconds, "2:4", "dense", None)

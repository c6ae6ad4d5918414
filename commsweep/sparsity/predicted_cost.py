"""Predicts what a training will cost, before anything is trained. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from commsweep.config import Run
from commsweep.config.sparsity import Sparsity
from commsweep.config.training import GPT2_SIZES, TextModel, TextSet
from commsweep.errors import UserError
from commsweep.sparsity import densities, flops
from commsweep.sparsity.flops import Account, Attention, NetworkShape, Product
from commsweep.sparsity.schedule import Schedule, moved

BYTES = 256  # tokens of data.tokenizer=bytes
VOCABULARY = {"bytes": BYTES, "gpt2": 50257}


def gpt2(
    depth: int, width: int, heads: int, vocabulary: int, tokens: int, modules: str = "blocks"
) -> NetworkShape:
    """A GPT-2 with these sizes over blocks of so many tokens: 12 width^2 weights a block, and a
    tied head.
    """
    products = []
    for block in range(depth):
        for name, shape in (
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("mlp.c_fc", (width, 4 * width)),
            ("mlp.c_proj", (4 * width, width)),
        ):
            products.append(Product(f"transformer.h.{block}.{name}", shape, prod(shape), tokens))
    products.append(
        Product(
            "lm_head",
            (vocabulary, width),
            vocabulary * width,
            tokens,
            head=True,
            masked=modules == "all",
        )
    )
    return NetworkShape(tuple(products), Attention(depth, heads, width // heads, tokens))


def network(run: Run) -> NetworkShape:
    """Return the shape of the network of a Run that trains a GPT-2 from scratch. Raises UserError
    for others.
    """
    if not isinstance(run.model, TextModel) or run.model.name not in GPT2_SIZES:
        raise UserError(
            f"model.name={run.model.name}: FLOPs are planned for GPT-2 from scratch "
            f"({', '.join(GPT2_SIZES)}); a run of any model with the section sparsity counts "
            "its own"
        )
    data = run.data
    assert isinstance(data, TextSet), "a language model is trained on text"
    if data.tokenizer not in VOCABULARY:
        raise UserError(
            f"data.tokenizer={data.tokenizer}: FLOPs are planned for {', '.join(VOCABULARY)}"
        )
    depth, width, heads = GPT2_SIZES[run.model.name]
    shape = gpt2(
        depth,
        run.model.width or width,
        heads,
        VOCABULARY[data.tokenizer],
        data.block_size,
        run.sparsity.modules if run.sparsity else "blocks",
    )
    if not run.model.gradient_checkpointing:
        return shape
    # is not repeated, because nothing behind it needs that
    last = "" if run.model.dropout else "mlp.c_proj"
    return NetworkShape(
        tuple(
            product
            if product.head or (last and product.name.endswith(last))
            else replace(product, again=True)
            for product in shape.products
        ),
        shape.attention and replace(shape.attention, again=True),
    )


def planned(
    spec: Sparsity, of: NetworkShape, steps: int, samples: Sequence[int] = (1,), share: float = 1.0
) -> dict[str, float]:
    """`Account.totals` of a run of so many steps. Raises UserError as such a run would.

    samples: of the steps of an epoch. share: of a step's samples that growth needs dense gradients
    of.
    """
    schedule, account = Schedule(spec, steps), Account(of)
    shapes = [masked_layer.shape for masked_layer in of.masked]
    targets: dict[float, list[int]] = {}
    live, alike, pairs = densities.live(shapes, spec, schedule.target(0)), 0, 0.0
    for step in range(steps):
        kinds_now, rows = attending(spec, of, schedule, step), samples[step % len(samples)]
        if not schedule.updates(step) and kinds_now == pairs:
            alike += rows  # samples of steps that cost the same
            continue
        account.add(alike, live, pairs)
        alike, pairs, counts = 0, kinds_now, [(0, 0)] * len(live)
        if schedule.updates(step):
            if (target := schedule.target(step)) not in targets:
                targets[target] = densities.live(shapes, spec, target)
            to = targets[target]
            counts = [
                moved(density, aim, prod(shape), schedule.drop(step), spec.regrow)
                for density, aim, shape in zip(live, to, shapes, strict=True)
            ]
        dense = [spec.by_gradient and grow > 0 for _, grow in counts]
        account.add(rows, live, kinds_now, dense, share)
        for (prune, grow), shape in zip(counts, shapes, strict=True):
            account.updated(flops.update(prod(shape), prune, grow, spec.growth))
        live = [density + grow - prune for density, (prune, grow) in zip(live, counts, strict=True)]
    account.add(alike, live, pairs)
    return account.totals(live, attending(spec, of, schedule, steps - 1))


def attending(spec: Sparsity, of: NetworkShape, schedule: Schedule, step: int) -> float:
    """Attending pairs on average over layers and heads in a step."""
    phase = schedule.at(step).phase
    return of.attending(phase.attention, phase.alternate_attention, spec.width, spec.alternate)


def rows(run: Run) -> list[int]:
    """Samples of the steps of an epoch. Raises UserError where a text run takes all blocks there
    are.
    """
    assert isinstance(run.data, TextSet)
    if not run.data.train_blocks:
        raise UserError(
            "data.train_blocks=0 takes all there are, which a plan does not know: give --steps"
        )
    steps, remainder = divmod(run.data.train_blocks, run.data.batch_size)
    return [run.data.batch_size] * steps + [remainder] * bool(remainder)


def of_run(run: Run, steps: int = 0) -> dict[str, float]:
    """`planned` of a whole run, or of so many full steps."""
    leads = run.grad.compressor.kind != "none"
    return planned(
        run.sparsity or Sparsity(),
        network(run),
        steps or len(rows(run)) * run.epochs,
        [run.data.batch_size] if steps else rows(run),
        1 / run.grad.learners if leads else 1.0,
    )

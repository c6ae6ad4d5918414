"""`commsweep flops`: what a training costs, by part, before anything is trained."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from commsweep.cli.options import count, number
from commsweep.config import override
from commsweep.config.sparsity import Phase, Sparsity
from commsweep.config.training import GPT2_SIZES
from commsweep.errors import UserError, nearest

if TYPE_CHECKING:
    from commsweep.sparsity.flops import NetworkShape

TOKENS = {"gpt2": (50304, 1024)}  # vocabulary (nanoGPT's, padded) and block of the published model
STEPS = 1000  # of a training that is the same throughout
NAMES = {
    "linear": "linear layers, live weights",
    "head": "head",
    "attention": "attention, pairs that attend",
    "growth": "dense gradients for growth",
    "topology": "updates of the masks",
}


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    parser = commands.add_parser(
        "flops",
        help="floating-point operations of a training, by part, without training",
        description=(
            "Count a training's FLOPs by part: linear layers at their live weights, head, "
            "attention by pairs of tokens, dense gradients of growth, topology updates; beside "
            "the dense training. NAME is a preset that trains a GPT-2 from scratch (its phases "
            "over its steps, with settings changed as in commsweep run), or a size, gpt2-nano, "
            "gpt2-micro or gpt2, which is then trained with the same masks throughout, as "
            "--block, --sparsity and the like say. Matrix products count two operations a pair; "
            "norms, softmax and the optimizer are left out."
        ),
    )
    parser.add_argument("model", metavar="NAME", help="a preset, or a GPT-2 by its size")
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the run, such as sparsity.phases.all.sparsity=0.8",
    )
    parser.add_argument(
        "--block", type=count, metavar="TOKENS", help="of a sample (default: as the model has)"
    )
    parser.add_argument(
        "--sparsity",
        type=number(0, 0.9999, included=True),
        metavar="SHARE",
        help="of the weights that are zero, throughout",
    )
    parser.add_argument(
        "--attention",
        choices=("causal", "local", "strided", "local_strided", "fixed"),
        help="pairs that attend, throughout (default: causal)",
    )
    parser.add_argument(
        "--width", type=count, metavar="TOKENS", help="band and stride of attention (default: 128)"
    )
    parser.add_argument(
        "--head", action="store_true", help="the head (and the tied embedding) is sparse, too"
    )
    parser.add_argument(
        "--steps", type=count, help="of the training (default: the preset's; any, by size)"
    )
    parser.add_argument(
        "--vocabulary", type=count, help="rows of the head (default: 50,304 for gpt2, else 256)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(command=_flops)


def _flops(args: argparse.Namespace) -> int:
    from commsweep.sparsity import flops

    network, spec, totals, steps, samples = (_by_size if args.model in GPT2_SIZES else _by_preset)(
        args
    )
    attention = network.attention
    assert attention is not None  # every text model has some
    tokens = samples * attention.tokens
    dense = flops.Account(network).dense_step()
    palm = {
        "weights": 6 * _weights(network) / 1e6,
        "attention": 3 * attention.forward(attention.tokens**2) / attention.tokens / 1e6,
    }
    if args.json:
        print(
            json.dumps(
                {
                    "steps": steps,
                    "tokens": tokens,
                    "parts": {operation: totals[operation] for operation in flops.PARTS},
                    "dense_parts": {
                        operation: dense[operation] * samples for operation in flops.PARTS
                    },
                    **{key: value for key, value in totals.items() if key not in flops.PARTS},
                    "rule_mflop_per_token": palm,
                }
            )
        )
        return 0
    rows = [
        (name, totals[operation] / tokens / 1e6, dense[operation] / attention.tokens / 1e6)
        for operation, name in NAMES.items()
    ]
    rows.append(("total", totals["total"] / tokens / 1e6, totals["dense"] / tokens / 1e6))
    print(f"MFLOP a token of training, {steps:,} steps, {tokens:,} tokens (planned)\n")
    print(f"{'part':<32}{'this':>10}{'dense':>10}")
    for name, share, total in rows:
        print(f"{name:<32}{share:>10.2f}{total:>10.2f}")
    head = next(product for product in network.products if product.head)
    how = "sparse too" if head.masked and spec.modules == "all" else "dense"
    print(
        "\n"
        f"of the dense training: {totals['relative']:.4f} with the head ({how}; "
        f"{100 * totals['head_share']:.1f} % of the dense training), "
        f"{totals['relative_without_head']:.4f} without it"
    )
    print(f"a forward pass of the final model: {totals['inference_relative']:.4f} of dense")
    print(
        "attention counts pairs that attend; with all T^2 pairs, as 6 N + 12 L H Q T does, "
        f"dense is {palm['weights']:.2f} + {palm['attention']:.2f} MFLOP a token"
    )
    if how == "dense" and totals["head_share"] > 0.25:
        print(
            "a quarter of the dense training is out of reach while the head is dense and "
            "counted: --head makes it sparse"
        )
    return 0


def _weights(network: NetworkShape) -> int:
    """Parameters of a GPT-2 but its positions: products, and two norms a block and one at the end,
    without biases.
    """
    attention = network.attention
    assert attention is not None, "a GPT-2 has attention"
    norms = (2 * attention.layers + 1) * attention.heads * attention.head
    return sum(product.numel for product in network.products) + norms


def _by_size(args: argparse.Namespace) -> tuple[NetworkShape, Sparsity, dict[str, float], int, int]:
    """A GPT-2 of this size, as sparse from its first step to its last; and as `_by_preset`."""
    from commsweep.sparsity.predicted_cost import BYTES, gpt2, planned

    if args.settings:
        raise UserError(
            f"'{args.settings[0]}' is a setting of a run, and {args.model} is a size: use "
            "--sparsity and the like, or a preset"
        )
    vocabulary, block = TOKENS.get(args.model, (BYTES, 64))
    block = args.block or block
    width = args.width or 128
    if args.attention not in (None, "causal") and width > block:
        raise UserError(f"--width {width}: wider than --block {block}; choose a smaller --width")
    if args.width and args.attention in (None, "causal"):
        raise UserError("--width has no effect without --attention")
    depth, features, heads = GPT2_SIZES[args.model]
    spec = Sparsity(
        phases={
            "all": Phase(
                until=1.0, sparsity=args.sparsity or 0.0, attention=args.attention or "causal"
            )
        },
        drop_fraction=0.0,
        modules="all" if args.head else "blocks",
        width=width,
    )
    network = gpt2(depth, features, heads, args.vocabulary or vocabulary, block, spec.modules)
    steps = args.steps or STEPS
    return network, spec, planned(spec, network, steps), steps, steps


def _by_preset(
    args: argparse.Namespace,
) -> tuple[NetworkShape, Sparsity, dict[str, float], int, int]:
    """A preset's model, its section sparsity, the plan over its phases, steps and samples."""
    from commsweep.cli.runs import changes
    from commsweep.registry import preset, presets
    from commsweep.sparsity import predicted_cost

    if args.model not in presets():
        raise UserError(
            f"'{args.model}' is neither a preset nor a "
            f"GPT-2{nearest(args.model, [*presets(), *GPT2_SIZES])} (sizes: "
            f"{', '.join(GPT2_SIZES)})"
        )
    for name in ("block", "sparsity", "attention", "width", "head", "vocabulary"):
        if getattr(args, name):
            raise UserError(
                f"--{name} is for a GPT-2 by its size; of a preset change settings, such as "
                "sparsity.phases.all.sparsity=0.8"
            )
    run = override(preset(args.model), changes(args.settings))
    totals = predicted_cost.of_run(run, args.steps or 0)
    steps = args.steps or len(predicted_cost.rows(run)) * run.epochs
    samples = (
        args.steps * run.data.batch_size
        if args.steps
        else sum(predicted_cost.rows(run)) * run.epochs
    )
    return predicted_cost.network(run), run.sparsity or Sparsity(), totals, steps, samples

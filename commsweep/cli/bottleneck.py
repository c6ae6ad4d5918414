"""`commsweep advise --model`: is the network the bottleneck of a GPT on a cluster?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from commsweep.cli.options import count
from commsweep.cli.pipeline import bandwidth
from commsweep.cli.predict import gpt_fields, linked, share_of
from commsweep.errors import UserError

if TYPE_CHECKING:
    from commsweep.timing.gpt import Shape

CODECS = ("uniform:8,scale=group,group=128", "uniform:4,scale=group,group=128")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `print_answer`."""
    parser.add_argument(
        "--model",
        metavar="SIZE",
        help=(
            "instead of a preset: is the network the bottleneck of a GPT of this size? 125m to "
            "175b, or gpt:layers=32,hidden=4096; with --gpus and --link"
        ),
    )
    parser.add_argument("--gpus", type=count, help="of --model: all GPUs")
    parser.add_argument(
        "--per-node", type=count, default=8, metavar="N", help="of --model (default: 8)"
    )
    parser.add_argument(
        "--link",
        type=bandwidth,
        metavar="RATE",
        help=(
            "of --model: nominal rate from a node to others, as 200Gbit; or what you measured, by "
            "--links FILE of iperf3 -J"
        ),
    )
    for name in ("tensor", "pipeline", "batch"):
        parser.add_argument(
            f"--{name}", type=count, metavar="N", help="of --model: as for commsweep predict"
        )
    parser.add_argument(
        "--sharded",
        action="store_true",
        help="of --model: with FSDP (ZeRO-3), which gathers weights, too",
    )
    parser.add_argument(
        "--cluster", default="a100-nvlink", help="of --model: constants (default: a100-nvlink)"
    )


def print_answer(args: argparse.Namespace) -> int:
    """Print whether the network is the bottleneck, in a sentence and a table."""
    from commsweep.timing import bottleneck, gpt

    if args.preset is not None or args.trace is not None:
        raise UserError("--model goes without a preset and without --trace")
    if args.gpus is None or (args.link is None and not args.links):
        raise UserError("--model needs --gpus N, and --link 200Gbit or --links FILE of iperf3 -J")
    if args.gpus % args.per_node and args.gpus > args.per_node:
        raise UserError(f"--gpus {args.gpus} is no multiple of --per-node {args.per_node}")
    shape = _gpt(args)
    constants = gpt.read_cluster(args.cluster)
    cluster = linked(constants, args)
    shares = {codec: share_of(codec) for codec in CODECS}
    reached = constants.reached if args.link else 1.0  # a measured rate was reached
    answer = bottleneck.answer(shape, cluster, shares, args.sharded, reached)
    if args.json:
        print(
            json.dumps({"answer": answer.verdict, "sentence": answer.sentence()} | asdict(answer))
        )
        return 0
    print(answer.sentence())
    print(
        f"\n{args.gpus} GPUs, {args.per_node} a node, "
        f"{8 * cluster.node_link / 1e9:g} Gbit/s between nodes; "
        f"tensor {shape.tensor} x pipeline {shape.pipeline} x data {shape.data}; "
        f"{shape.batch:,} samples of {shape.sequence:,} tokens; {shape.layers} layers of "
        f"{shape.hidden:,}"
    )
    if reached < 1:
        print(
            f"the range goes from the whole rate to {100 * reached:.0f} % of it, which sums "
            f"reached on {constants.name}; measure yours with iperf3 and --links"
        )
    summed = "rings, weights gathered twice a microbatch" if args.sharded else "as NCCL chooses"
    print(f"  dense: {1e3 * answer.seconds:,.0f} ms a step, sums {summed}")
    for name in ("compute", "bubble", "data", *(("gathers",) if args.sharded else ())):
        label = {"data": "gradients", "gathers": "weights"}.get(name, name)
        print(f"    {label:10} {100 * answer.seconds_by_part[name] / answer.seconds:5.1f} %")
    for coded in answer.codes:
        print(
            f"  {coded.codec:40} {1e3 * coded.seconds:8,.0f} ms  saves {100 * coded.saves:5.1f} %, "
            f"{100 * coded.share:.0f} % of the bytes"
        )
    print("codes go all-to-all, with coding at the memory rate of the cluster (not measured)")
    print("gradients are summed after the backward; a trainer that overlaps both waits less")
    if args.sharded:
        print("weights are fetched ahead beside computing, as FSDP does; what it hides is no wait")
    print(
        f"predicted; constants from {constants.source}; nine in ten of 33 measured iterations lay "
        f"within {100 * bottleneck.ERROR:.0f} %"
    )
    if note := bottleneck.memory_note(shape, args.sharded):
        print(note)
    return 0


def _gpt(args: argparse.Namespace) -> Shape:
    """Return the shape of --model on its GPUs. Raises UserError where they do not fit."""
    from commsweep.timing import bottleneck
    from commsweep.timing.gpt import Shape

    fields = gpt_fields(args.model)
    layers, hidden, heads = fields["layers"], fields["hidden"], fields["heads"]
    sequence = fields.get("seq", bottleneck.SEQUENCE)
    vocabulary = fields.get("vocabulary", bottleneck.VOCABULARY)
    if args.tensor or args.pipeline:
        tensor, pipeline = args.tensor or 1, args.pipeline or 1
    else:
        # a shard of each GPU holds the state
        tensor, pipeline = 1, 1
        if not args.sharded:
            tensor, pipeline = bottleneck.split(layers, hidden, args.gpus, args.per_node)
    if args.gpus % (tensor * pipeline):
        raise UserError(f"--gpus {args.gpus} is no multiple of {tensor} x {pipeline}")
    data = args.gpus // (tensor * pipeline)
    batch = args.batch or max(1, bottleneck.TOKENS // sequence // data) * data
    if batch % data:
        raise UserError(f"--batch {batch} is no multiple of data-parallel {data}")
    return Shape(hidden, layers, sequence, batch, 1, heads, tensor, pipeline, data, vocabulary)

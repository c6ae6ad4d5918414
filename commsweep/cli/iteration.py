"""`commsweep iteration`: one iteration of distributed K-FAC, predicted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from commsweep.cli.options import count, whole_number
from commsweep.cli.pipeline import bandwidth, seconds
from commsweep.errors import UserError, nearest


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    parser = commands.add_parser(
        "iteration",
        help="predict an iteration of distributed K-FAC on a cluster",
        description=(
            "Predict one iteration of a network on a cluster, by algorithm: exposed seconds of "
            "each part, and a figure of what happens when. Without --bandwidth messages cost "
            "what is published for 64 GPUs (SPD-KFAC, arXiv 2107.06533; 100 Gbit/s); published "
            "bars stand beside where there are any."
        ),
    )
    parser.add_argument(
        "network",
        help=(
            "a classifier of torchvision, such as resnet50, resnet152, densenet201; with timm "
            "installed (commsweep[networks]) inception_v4 and its others"
        ),
    )
    parser.add_argument(
        "--algorithm",
        default="spd,mpd,d",
        metavar="NAME,NAME",
        help="of s-sgd, s-sgd+dear, d, mpd, spd, dp, d+pipelining, d+balance (default: spd,mpd,d)",
    )
    parser.add_argument("--gpus", type=count, default=64, help="(default: 64)")
    parser.add_argument("--batch", type=count, help="images a GPU (default: as published, else 32)")
    parser.add_argument(
        "--every",
        type=count,
        default=1,
        metavar="STEPS",
        help="factors and inverses are new every so many iterations (default: 1)",
    )
    parser.add_argument(
        "--bandwidth",
        type=bandwidth,
        metavar="RATE",
        help="of a GPU's link: 10Gbit, 100Gbit, unlimited",
    )
    parser.add_argument(
        "--latency", type=seconds, default=0.0, metavar="TIME", help="of a hop: 5us, 0.1ms"
    )
    parser.add_argument(
        "--collective", choices=("ring", "tree"), help="of --bandwidth (default: ring)"
    )
    parser.add_argument(
        "--fit",
        choices=("nccl", "first"),
        help="published all-reduce to use: of nccl-tests (the default) or the first fit",
    )
    parser.add_argument(
        "--inversion",
        choices=("cubic", "exponential"),
        default="cubic",
        help=(
            "cost of inverting: ours through the plotted seconds (the default) or the published fit"
        ),
    )
    parser.add_argument(
        "--small",
        type=whole_number(0),
        metavar="ROWS",
        help=(
            "of balanced placement: factors below are inverted everywhere (default: where that "
            "is cheaper; plotted run: 1400)"
        ),
    )
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="png, pdf or svg (default: out/NETWORK.png)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(command=_iteration)


def _iteration(args: argparse.Namespace) -> int:
    from commsweep.timing import networks

    networks.check(args.network)
    from commsweep.registry import provided
    from commsweep.timing.timeline.iterations import ALGORITHMS

    names = [name for name in args.algorithm.split(",") if name]
    for name in names or [""]:
        if name not in ALGORITHMS:
            raise UserError(
                f"--algorithm '{name}' is unknown{nearest(name, ALGORITHMS)} (of: "
                f"{', '.join(ALGORITHMS)})"
            )
    has_network = args.bandwidth is not None
    if not has_network and (args.latency or args.collective):
        raise UserError(
            f"--{'latency' if args.latency else 'collective'} goes with --bandwidth: without it "
            "messages cost what is published"
        )
    if has_network and args.fit:
        raise UserError(
            "--fit names what is published of messages, which --bandwidth puts aside: leave one out"
        )
    prediction = provided("iteration")(
        args.network,
        names,
        args.gpus,
        args.every,
        args.small,
        published=not has_network and not args.batch and args.every == 1,
        bandwidth=args.bandwidth or 0.0,
        latency=args.latency,
        collective=(args.collective or "ring") if has_network else "",
        inversion=args.inversion,
        reduce=args.fit or "nccl",
        batch=args.batch or 0,
    )
    path = args.figure or Path("out") / f"{args.network}.png"
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--figure {path}: its name must end in .png, .pdf or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    prediction.figure().savefig(path)
    if args.json:
        print(
            json.dumps(
                {
                    "network": args.network,
                    "gpus": args.gpus,
                    "figure": str(path),
                    "predicted": prediction.record(),
                }
            )
        )
    else:
        print(prediction.table.markdown() + f"figure {path}")
    return 0

"""`commsweep kfac`: a plan of K-FAC runs and measured iterations; `commsweep iteration`: one
iteration, predicted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from commsweep.cli.ddp import measure, measured
from commsweep.cli.options import count, folder, number, whole, writable
from commsweep.cli.pipeline import bandwidth, seconds
from commsweep.cli.runs import execution_options
from commsweep.errors import UserError, nearest
from commsweep.store import Store


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommands."""
    parser = commands.add_parser(
        "kfac",
        parents=[shared, execution_options()],
        help="measure iterations of distributed K-FAC, and report",
        description=(
            "Measure the steps of D-, MPD- and SPD-KFAC as real processes over shaped links "
            "(Linux, root), skipping what STORE/learners already holds; then write tables, "
            "figures, verdicts and a page from that and from the sweep of the same name "
            "(commsweep sweep launch PLAN trains it): published, predicted and measured "
            "iterations, epochs and bytes to a target, quality of coded factors."
        ),
    )
    parser.add_argument("plan", help="demo-kfac or smoke-kfac")
    parser.add_argument("--out", type=folder, help="folder to write to (default: out/PLAN)")
    parser.add_argument("--only", choices=("measure", "report"), help="do one of the two parts")
    parser.add_argument(
        "--patience",
        type=number(0, 1e6),
        default=120.0,
        metavar="SECONDS",
        help="silence of the others after which a learner gives up (default: 120)",
    )
    parser.set_defaults(command=_kfac, program="commsweep kfac")
    one = commands.add_parser(
        "iteration",
        help="predict an iteration of distributed K-FAC on a cluster",
        description=(
            "Predict one iteration of a network on a cluster, by algorithm: exposed seconds of "
            "each part, and a figure of what happens when. Without --bandwidth messages cost "
            "what is published for 64 GPUs (SPD-KFAC, arXiv 2107.06533; 100 Gbit/s); published "
            "bars stand beside where there are any."
        ),
    )
    one.add_argument(
        "network",
        help=(
            "a classifier of torchvision, such as resnet50, resnet152, densenet201; with timm "
            "installed (commsweep[networks]) inception_v4 and its others"
        ),
    )
    one.add_argument(
        "--algorithm",
        default="spd,mpd,d",
        metavar="NAME,NAME",
        help="of s-sgd, s-sgd+dear, d, mpd, spd, dp, d+pipelining, d+balance (default: spd,mpd,d)",
    )
    one.add_argument("--gpus", type=count, default=64, help="(default: 64)")
    one.add_argument("--batch", type=count, help="images a GPU (default: as published, else 32)")
    one.add_argument(
        "--every",
        type=count,
        default=1,
        metavar="STEPS",
        help="factors and inverses are new every so many iterations (default: 1)",
    )
    one.add_argument(
        "--bandwidth",
        type=bandwidth,
        metavar="RATE",
        help="of a GPU's link: 10Gbit, 100Gbit, unlimited",
    )
    one.add_argument(
        "--latency", type=seconds, default=0.0, metavar="TIME", help="of a hop: 5us, 0.1ms"
    )
    one.add_argument(
        "--collective", choices=("ring", "tree"), help="of --bandwidth (default: ring)"
    )
    one.add_argument(
        "--fit",
        choices=("nccl", "first"),
        help="published all-reduce to use: of nccl-tests (the default) or the first fit",
    )
    one.add_argument(
        "--inversion",
        choices=("cubic", "exponential"),
        default="cubic",
        help=(
            "cost of inverting: ours through the plotted seconds (the default) or the published fit"
        ),
    )
    one.add_argument(
        "--small",
        type=whole(0),
        metavar="ROWS",
        help=(
            "of balanced placement: factors below are inverted everywhere (default: where that "
            "is cheaper; plotted run: 1400)"
        ),
    )
    one.add_argument(
        "--figure", type=Path, metavar="FILE", help="png, pdf or svg (default: out/NETWORK.png)"
    )
    one.add_argument("--json", action="store_true", help="print JSON for programs")
    one.set_defaults(command=_iteration)


def _kfac(args: argparse.Namespace) -> int:
    from commsweep.registry import plan

    measurements, store = plan(args.plan), Store(args.store)
    if not any(run.kfac for run, _ in measurements):
        raise UserError(
            f"plan '{args.plan}' measures no K-FAC; use commsweep links {args.plan} instead"
        )
    writable(args.out or Path("out") / args.plan)
    if args.only in (None, "measure"):
        measure(args, measurements, store)
    if args.only in (None, "report"):
        return _report(args, measurements, store)
    return 0


def _report(args: argparse.Namespace, measurements: list, store: Store) -> int:
    from commsweep.registry import papers
    from commsweep.reporting import report
    from commsweep.reporting.claim import markdown
    from commsweep.timing import kfac_report

    found = measured(args, measurements, store)
    paper = next(paper for paper in papers() if hasattr(paper, "beside"))
    made = report.write(
        args.store,
        args.plan,
        args.out or Path("out") / args.plan,
        beside=lambda frame, curves: paper.beside(found, frame, curves),
    )
    if args.json:
        print(
            json.dumps(
                {
                    "folder": str(made.folder),
                    "tables": [table.name for table in made.tables],
                    "claims": {claim.name: claim.verdict for claim in made.claims},
                }
            )
        )
        return 0
    print("\n".join(table.markdown() for table in made.tables[:-1]))
    print(markdown(made.claims, made.note))
    print(f"{kfac_report.accuracy(found)}\nwritten to {made.folder}, page {made.page}")
    return 0


def _iteration(args: argparse.Namespace) -> int:
    from commsweep.timing import spd_kfac
    from commsweep.timing.iteration_table import table, timelines
    from commsweep.timing.timeline.iterations import ALGORITHMS

    names = [name for name in args.algorithm.split(",") if name]
    for name in names or [""]:
        if name not in ALGORITHMS:
            raise UserError(
                f"--algorithm '{name}' is unknown{nearest(name, ALGORITHMS)} (of: "
                f"{', '.join(ALGORITHMS)})"
            )
    given = args.bandwidth is not None
    if not given and (args.latency or args.collective):
        raise UserError(
            f"--{'latency' if args.latency else 'collective'} goes with --bandwidth: without it "
            "messages cost what is published"
        )
    if given and args.fit:
        raise UserError(
            "--fit names what is published of messages, which --bandwidth puts aside: leave one out"
        )
    setting = spd_kfac.setting(
        args.network,
        args.gpus,
        bandwidth=args.bandwidth or 0.0,
        latency=args.latency,
        collective=(args.collective or "ring") if given else "",
        inversion=args.inversion,
        reduce=args.fit or "nccl",
        batch=args.batch or 0,
    )
    if "dp" in names and args.gpus > len(setting.work.factors) // 2:
        raise UserError(
            f"--gpus {args.gpus}: DP-KFAC has an owner for each layer, and {args.network} has "
            f"{len(setting.work.factors) // 2} layers; use fewer GPUs (with --bandwidth), or "
            "another algorithm"
        )
    shown, found = table(
        setting,
        names,
        args.every,
        args.small,
        published=not given and not args.batch and args.every == 1,
    )
    path = args.figure or Path("out") / f"{args.network}.png"
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(f"--figure {path}: its name must end in .png, .pdf or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    timelines(setting, found).savefig(path)
    if args.json:
        print(
            json.dumps(
                {
                    "network": args.network,
                    "gpus": args.gpus,
                    "figure": str(path),
                    "predicted": {
                        name: {"seconds": sum(parts.values()), "parts": parts}
                        for name, (parts, _) in found.items()
                    },
                }
            )
        )
    else:
        print(shown.markdown() + f"figure {path}")
    return 0

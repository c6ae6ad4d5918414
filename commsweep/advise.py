"""`commsweep advise`: the setting with the shortest time to the target quality over given links."""

from __future__ import annotations

import argparse
import json

from commsweep.experiments.config import override
from commsweep.experiments.presets import PRESETS, preset
from commsweep.experiments.store import Store
from commsweep.pipeline import bandwidth, seconds
from commsweep.runs import changes


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "advise", parents=[shared], help="which compression trains fastest over given links",
        description="From the store's measurements, simulations and the timeline: the setting that reaches the target "
                    "quality (99 % of the dense run's accuracy, or 102 % of its perplexity) soonest over links of this "
                    "bandwidth and latency, the runner-up, and what both rest on.")
    parser.add_argument("preset", help=f"one of: {', '.join(PRESETS)}")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the training, for instance epochs=5")
    parser.add_argument("--bandwidth", type=bandwidth, required=True, metavar="RATE", help="100Mbit, 1Gbit, unlimited")
    parser.add_argument("--latency", type=seconds, default=0.0, metavar="TIME", help="one way: 50ms (default: none)")
    parser.set_defaults(command=_advise)


def _advise(args: argparse.Namespace) -> int:
    from commsweep.analysis import advise
    from commsweep.analysis.papers.links import rate
    from commsweep.analysis.timeline.pipelines import Network
    from commsweep.experiments.processes import pipeline
    from commsweep.sweeps.papers.links import CALIBRATION, plan

    store = Store(args.store)
    made = advise.advise(store, override(preset(args.preset), changes(args.settings)),
                         Network(args.bandwidth, args.latency),
                         [pipeline.folder_of(store, *one).path.name for one in plan(CALIBRATION)])
    if args.json:
        print(json.dumps(made.record()))
        return 0
    shown = f"accuracy {100 * made.target:.1f} %" if made.metric.endswith("acc") else f"perplexity {made.target:.3f}"
    print(f"to test {shown} over {rate(args.bandwidth)}, {1e3 * args.latency:g} ms one way:")
    for title, choice in zip(("best", "runner-up"), made.choices, strict=False):
        print(f"  {title:10} {choice.text()}")
    for choice in made.choices[2:]:
        print(f"  {'':10} {choice.text()}")
    if not made.calibrated and any(not choice.measured for choice in made.choices):
        print("  note: this machine was not calibrated for slow links, so predictions over them are rough: commsweep "
              "links calibrate-links")
    if made.missed:
        print(f"  not reached by {', '.join(made.missed)}")
    return 0

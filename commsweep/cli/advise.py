"""`commsweep advise`: the setting with the shortest time to the target quality over given links."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from commsweep.cli import bottleneck
from commsweep.cli.options import count
from commsweep.cli.pipeline import bandwidth, cables, schedule_of, seconds
from commsweep.cli.predict import trace
from commsweep.cli.runs import changes
from commsweep.config import Run, override, run_id
from commsweep.errors import UserError
from commsweep.registry import preset
from commsweep.store import Store

if TYPE_CHECKING:
    from commsweep.timing.timeline.pipelines import Network

ROUGH = (
    "  note: this machine was not calibrated for slow links, so predictions over them are "
    "rough: commsweep links {plan}"
)


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "advise",
        parents=[shared],
        help="which compression trains fastest over given links",
        description=(
            "From the store's measurements, simulations and the timeline: the setting that "
            "reaches the target quality (99 % of the dense run's accuracy, or 102 % of its "
            "perplexity) soonest over links of this bandwidth and latency, the runner-up, and "
            "what both rest on."
        ),
    )
    parser.add_argument("preset", nargs="?", help="a preset (commsweep presets lists them)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="JSON",
        help=(
            "instead of a preset: a torch.profiler trace of your training, with --links FILE of "
            "iperf3 -J or nccl-tests; a table of codecs and what each would buy"
        ),
    )
    parser.add_argument("--workers", type=count, help="of --trace (default: as in the trace)")
    bottleneck.add_options(parser)
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="of the training, for instance epochs=5",
    )
    links = parser.add_mutually_exclusive_group()
    links.add_argument(
        "--bandwidth", type=bandwidth, metavar="RATE", help="100Mbit, 1Gbit, unlimited"
    )
    links.add_argument(
        "--links",
        default=(),
        metavar="FILE",
        help="a link for each pair of neighbouring stages, as for commsweep pipeline",
    )
    parser.add_argument(
        "--latency", type=seconds, default=0.0, metavar="TIME", help="one way: 50ms (default: none)"
    )
    parser.add_argument(
        "--ratios",
        action="store_true",
        help=(
            "instead: a ratio for each boundary of this preset, hardest on the slowest link, "
            "whose predicted step takes no longer than with the preset's own ratio everywhere"
        ),
    )
    parser.add_argument(
        "--schedule",
        choices=("gpipe", "1f1b"),
        help="of --ratios (default: as commsweep pipeline would)",
    )
    parser.set_defaults(command=_advise)


def _advise(args: argparse.Namespace) -> int:
    if args.model is not None:
        return bottleneck.print_answer(args)
    if args.gpus is not None or args.link is not None:
        raise UserError("--gpus and --link describe the cluster of --model; name a size, as 7b")
    if args.trace is not None:
        return trace(args)
    if args.preset is None:
        raise UserError("name a preset (commsweep presets), or --trace FILE of your training")
    if args.links:
        try:
            args.links = cables(args.links)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"--links {error}") from None
    elif args.bandwidth is None:
        raise UserError("say what the links are: --bandwidth 100Mbit, or --links FILE")
    if args.links and args.latency:
        raise UserError("--links says what each link is; leave out --latency")
    run = override(preset(args.preset), changes(args.settings))
    from commsweep.config.execution import Wiring
    from commsweep.processes import pipeline
    from commsweep.registry import calibration, calibration_plan
    from commsweep.timing import advice
    from commsweep.timing.measured_pipelines import network_of
    from commsweep.timing.timeline.pipelines import bandwidth_text, latency_text

    network = network_of(
        Wiring(bandwidth=args.bandwidth or 0.0, latency=args.latency, links=args.links)
    )
    store = Store(args.store)
    fitted = [pipeline.folder_of(store, *measurement).path.name for measurement in calibration()]
    if args.ratios:
        return _ratios(args, store, run, network, fitted)
    advice_ = advice.advise(store, run, network, fitted)
    if args.json:
        print(json.dumps(advice_.record()))
        return 0
    shown = (
        f"accuracy {100 * advice_.target:.1f} %"
        if advice_.metric.endswith("acc")
        else f"perplexity {advice_.target:.3f}"
    )
    print(f"to test {shown} over {bandwidth_text(network)}, {latency_text(network)} one way:")
    for title, choice in zip(("best", "runner-up"), advice_.choices, strict=False):
        print(f"  {title:10} {choice.text()}")
    for choice in advice_.choices[2:]:
        print(f"  {'':10} {choice.text()}")
    if advice_.close:
        print(
            f"  note: less than {100 * advice.APART:.0f} % behind the best, which predictions "
            "do not tell apart: "
            + "; ".join(f"{choice.method}, {choice.schedule}" for choice in advice_.close)
        )
    if not advice_.calibrated and any(not choice.measured for choice in advice_.choices):
        print(ROUGH.format(plan=calibration_plan()))
    if advice_.missed:
        print(f"  not reached by {', '.join(advice_.missed)}")
    return 0


def _ratios(
    args: argparse.Namespace, store: Store, run: Run, network: Network, fitted: list[str]
) -> int:
    import torch

    from commsweep import models as networks
    from commsweep.boundary.message_sizes import message_bytes, message_shapes
    from commsweep.data import load as datasets
    from commsweep.registry import calibration_plan
    from commsweep.timing import ratios
    from commsweep.timing.measured_pipelines import Machine, machine_of, measurements, models
    from commsweep.timing.timeline.pipelines import bandwidth_text

    if not args.links:
        raise UserError(
            "--ratios needs --links FILE: where all links are alike, one ratio everywhere is "
            "the choice"
        )
    machine = machine_of(store, fitted)
    schedule = args.schedule or schedule_of(run)
    model = models(measurements(store), machine).get((run_id(run), schedule))
    command = " ".join([args.preset, *args.settings])
    if model is None:
        raise UserError(
            "the store has no step time of this run over unlimited links, from which "
            f"predictions begin: commsweep pipeline {command} --schedule {schedule} --steps "
            "60"
        )
    data = datasets.build(run, None, None, torch.device("cpu"))
    shapes, _ = message_shapes(*networks.build(run, data), data.example)
    spread = ratios.spread(run, lambda variant: message_bytes(variant, shapes), model, network)
    if args.json:
        print(
            json.dumps(
                {
                    "ratios": spread.ratios,
                    "settings": spread.settings,
                    "step_seconds": spread.step,
                    "one_ratio_step_seconds": spread.one,
                    "calibrated": machine != Machine(),
                }
            )
        )
        return 0
    print(
        f"over {bandwidth_text(network)}, predicted: {1e3 * spread.one:.0f} ms a step with "
        f"one ratio everywhere, {1e3 * spread.step:.0f} ms with\n"
        f"  commsweep run {command} "
        + " ".join(f"{key}={value:g}" for key, value in spread.settings.items())
    )
    if machine == Machine():
        print(ROUGH.format(plan=calibration_plan()))
    return 0

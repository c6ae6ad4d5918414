"""`commsweep pipeline`: a run as real processes, one a stage, with packed payloads between them."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any

from commsweep.experiments.config import Run, override, run_id
from commsweep.experiments.errors import UserError
from commsweep.experiments.presets import PRESETS, preset
from commsweep.experiments.specs import Wiring
from commsweep.experiments.store import DIVERGED, FINISHED, Busy, RunFolder, Store
from commsweep.options import count, number, port, whole
from commsweep.runs import changes, execution, execution_options

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "pipeline", parents=[shared, execution_options()], help="train with one real process a stage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a preset with one process a stage: torch.distributed.pipelining over gloo (nccl on GPUs),\n"
                    "where exactly the packed payloads travel. Recorded in STORE/pipelines; interrupted or broken,\n"
                    "the same command continues from the last checkpoint. With --bandwidth or --latency the stages\n"
                    "run in network namespaces of this machine, joined by links shaped to that (Linux, root).\n"
                    "On several machines, start it with torchrun on each:\n"
                    "  torchrun --nnodes 4 --node-rank K --nproc-per-node 1 --master-addr HOST --master-port 29500 \\\n"
                    "    -m commsweep pipeline PRESET ...")
    parser.add_argument("preset", help=f"one of: {', '.join(PRESETS)}")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for instance fwd.compressor.kind=topk")
    add_wiring(parser)
    parser.add_argument("--bandwidth", type=bandwidth, default=0.0, metavar="RATE",
                        help="of every link, each way: 10Mbit, 1Gbit, ... (default: as it is)")
    parser.add_argument("--latency", type=seconds, default=0.0, metavar="TIME",
                        help="of every link, one way: 5ms, 0.1s (default: none)")
    parser.add_argument("--port", type=port, help="where the stages find each other (default: any that is free)")
    parser.set_defaults(command=_pipeline)


def add_wiring(parser: argparse.ArgumentParser) -> None:
    """Options of how a run executes as processes."""
    parser.add_argument("--stages", type=count, help="processes (default: the preset's stages)")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="gpipe")
    parser.add_argument("--steps", type=whole(0), default=0,
                        help="measure so many steps and end (default: train to the end and evaluate)")
    parser.add_argument("--patience", type=number(0, 1e6), default=120.0, metavar="SECONDS",
                        help="silence of a neighbour after which a stage gives up (default: 120)")


def bandwidth(text: str) -> float:
    """Bits a second: "10Mbit", "1Gbit", "unlimited"."""
    if text == "unlimited":
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)bit(?:/s)?", text.strip(), re.I)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no bandwidth; write for instance 10Mbit, 1Gbit or unlimited")
    return float(found[1]) * UNITS[found[2].lower()]


def seconds(text: str) -> float:
    """Seconds: "50ms", "0.1s"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no time; write for instance 50ms or 0.1s")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def planned(args: argparse.Namespace, settings: list[str]) -> Run:
    """The run that a command line means, with its number of stages."""
    run = override(preset(args.preset), changes(settings))
    if args.stages is not None:
        from commsweep.experiments.pipelining import stages

        run = override(run, stages.with_stages(run, args.stages))
    return run


def wiring(args: argparse.Namespace, rate: float, delay: float) -> Wiring:
    """How a command line means it to be executed."""
    return Wiring(schedule=args.schedule, bandwidth=rate, latency=delay, steps=args.steps, threads=args.threads or 1)


def _pipeline(args: argparse.Namespace) -> int:
    run, store = planned(args, args.settings), Store(args.store)
    how = wiring(args, args.bandwidth, args.latency)
    from commsweep.experiments.pipelining import launch

    place = launch.folder(store, run, how)
    if "TORCHELASTIC_RUN_ID" in os.environ or "COMMSWEEP_STAGE" in os.environ:
        return launch.worker(place, lambda: _work(run, how, args, place))
    row = execute(run, how, args, place, progress=not args.json)
    simulated = store.folder(run_id(run)).row()
    if args.json:
        print(json.dumps(row | {"simulation": compare(row, simulated)}))
    else:
        print(describe(row, place, compare(row, simulated)))
    return {FINISHED: 0, DIVERGED: 3}.get(row["status"], 0)


def _work(run: Run, how: Wiring, args: argparse.Namespace, place: RunFolder) -> None:
    from commsweep.experiments.pipelining import launch
    from commsweep.experiments.pipelining.train import train
    from commsweep.experiments.run import environment

    # Under torchrun nobody has looked before: a finished run is shown, not trained again.
    if (row := place.row()) is not None:
        if os.environ["RANK"] == "0" and launch.LAUNCH not in os.environ:
            print(json.dumps(row) if args.json else describe(row, place, ""))
        return
    device = execution(args).torch_device()
    first = os.environ["RANK"] == "0"
    if first:
        launch.begin(place, run, how, environment(str(device)))
    row = train(run, how, execution(args), place, args.patience)
    if first:
        place.finish(row)
        for left in (*place.path.glob("stage*.ckpt"), *place.path.glob(".stage*.part")):
            left.unlink()
        if launch.LAUNCH not in os.environ:
            print(json.dumps(row) if args.json else describe(row, place, ""))


def execute(run: Run, how: Wiring, args: argparse.Namespace, place: RunFolder, progress: bool) -> dict[str, Any]:
    """The row of a run over this wiring: as recorded, or by executing it now."""
    from commsweep.experiments.pipelining import launch, stages

    place.make()
    try:
        with place.locked():
            if (row := place.row()) is not None:
                return row
            execution(args).torch_device()
            n = stages.count(run)
            command = ["commsweep", *_arguments(run, how, args)]
            launch.begin(place, run, how, {})
            if how.bandwidth or how.latency:
                from commsweep.experiments.pipelining import namespaces

                with namespaces.chain(n, how.bandwidth, how.latency) as nodes:
                    _supervised(place, nodes.commands(command), nodes.environments(), progress, args.patience)
            else:
                _supervised(place, launch.torchrun(command, n, args.port), [{}], progress, args.patience)
    except Busy:
        raise UserError(f"pipeline {place.path.name} is being executed by another process") from None
    return place.row()


def _arguments(run: Run, how: Wiring, args: argparse.Namespace) -> list[str]:
    """The command line of a stage; every setting is spelled out."""
    from commsweep.experiments.config import flatten

    asked, base = flatten(run.model_dump(mode="json")), flatten(preset(args.preset).model_dump(mode="json"))
    settings = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in asked.items()
                if base.get(key) != value]
    options = ["--store", str(args.store), "--schedule", how.schedule, "--steps", str(how.steps),
               "--threads", str(how.threads), "--patience", str(args.patience), "--bandwidth",
               f"{how.bandwidth}bit" if how.bandwidth else "unlimited", "--latency", f"{how.latency}s", "--device",
               args.device, "--buffers", args.buffers, "--checkpoint-every", str(args.checkpoint_every)]
    for name in ("data_root", "model_root"):
        if getattr(args, name) is not None:
            options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return ["pipeline", args.preset, *settings, *options]


def _supervised(place: RunFolder, commands: list[list[str]], environments: list[dict[str, str]],
                progress: bool, patience: float) -> None:
    from tqdm import tqdm

    from commsweep.experiments.pipelining import launch

    with tqdm(unit="step", disable=not progress or None, leave=False) as bar:
        def show(seen: dict[str, Any]) -> None:
            bar.total = seen["of"]
            bar.update(seen["step"] - bar.n)

        launch.supervise(place, commands, environments, show, patience)


def compare(row: dict[str, Any], simulated: dict[str, Any] | None) -> str:
    """Whether the recorded simulation of the same run has the same scores."""
    if row["status"] != FINISHED:
        return "not compared: it was not trained to the end"
    if simulated is None or simulated["status"] != FINISHED:
        return "not in the store: execute it with commsweep run and the same settings"
    differ = max(abs(row["metrics"][key] - simulated["metrics"][key]) for key in simulated["metrics"]
                 if key.startswith(("test_", "val_")))
    return "the same scores, bit for bit" if differ == 0 else f"scores differ by up to {differ:.2g}"


def describe(row: dict[str, Any], place: RunFolder, compared: str) -> str:
    """A row for people."""
    how, metrics = row["wiring"], row["metrics"]
    lines = [f"pipeline {row['id']} of run {row['run_id']}: {row['status']}, {row['steps']} steps, {how['schedule']}"]
    lines += [f"  {row['error']}"] if row["error"] else []
    for mode, title in (("on", "compressed inference"), ("off", "dense inference")):
        if f"test_{mode}_acc" in metrics:
            lines.append(f"  {title:21} test accuracy {100 * metrics[f'test_{mode}_acc']:.2f} %, "
                         f"loss {metrics[f'test_{mode}_loss']:.6f}")
        elif f"test_{mode}_ppl" in metrics:
            lines.append(f"  {title:21} test perplexity {metrics[f'test_{mode}_ppl']:.4f}")
    if row["timing"]:
        lines.append(f"  step                  {1e3 * row['timing']['step_seconds']:.1f} ms (median of "
                     f"{row['timing']['steps']})")
    for stage, sent in enumerate(row["transport"]):
        total, framing = sum(sent["sent"].values()), sum(sent["framing"].values())
        steps = max(1, row["steps"])
        if total:
            lines.append(f"  stage {stage} sent          {total / steps:,.0f} bytes a step, {framing / steps:,.0f} of "
                         "them framing" + (f"; {sent['tied'] / steps:,.0f} more for the tied embeddings"
                                           if sent["tied"] else ""))
    lines += [f"  simulation            {compared}"] if compared else []
    return "\n".join([*lines, f"  folder {place.path}"])

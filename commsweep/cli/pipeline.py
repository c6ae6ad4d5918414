"""`commsweep pipeline`: a run as real processes, one a stage, with packed payloads between them."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from commsweep.cli.options import count, number, whole_number
from commsweep.cli.runs import (
    changes,
    chosen,
    compared_with_simulation,
    execution,
    execution_options,
    points_option,
)
from commsweep.config import Run, override, run_id
from commsweep.config.execution import Cable, Wiring
from commsweep.errors import UserError
from commsweep.store import DIVERGED, FINISHED, RunFolder, Store

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "pipeline",
        parents=[shared, execution_options(), points_option()],
        help="train with one real process a stage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Train a preset with one process a stage: torch.distributed.pipelining over gloo "
            "(nccl on GPUs),\n"
            "where exactly the packed payloads travel. Recorded in STORE/pipelines; interrupted "
            "or broken,\n"
            "the same command continues from the last checkpoint. With --bandwidth or --latency "
            "the stages\n"
            "run in network namespaces of this machine, joined by links shaped to that (Linux, "
            "root).\n"
            "On several machines, start it with torchrun on each:\n"
            "  torchrun --nnodes 4 --node-rank K --nproc-per-node 1 --master-addr HOST "
            "--master-port 29500 \\\n"
            "    -m commsweep pipeline PRESET ..."
        ),
    )
    parser.add_argument("preset", help="a preset (commsweep presets lists them)")
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="for instance fwd.compressor.kind=topk",
    )
    add_wiring(parser)
    parser.add_argument(
        "--bandwidth",
        type=bandwidth,
        default=0.0,
        metavar="RATE",
        help="of every link, each way: 10Mbit, 1Gbit, ... (default: as it is)",
    )
    parser.add_argument(
        "--latency",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="of every link, one way: 5ms, 0.1s (default: none)",
    )
    parser.add_argument(
        "--links",
        type=cables,
        default=(),
        metavar="FILE",
        help=(
            'where links differ, one for each pair of neighbouring stages: [{"bandwidth": '
            '"5Mbit", "latency": "20ms"}, {"bandwidth": "1Gbit"}, ...]'
        ),
    )
    parser.set_defaults(command=_pipeline)


def add_wiring(parser: argparse.ArgumentParser) -> None:
    """Options of how a run executes as processes."""
    parser.add_argument("--stages", type=count, help="processes (default: the preset's stages)")
    parser.add_argument(
        "--learners",
        type=count,
        help=(
            "pipelines beside each other, each with its share of every batch, that exchange "
            "gradients or what they have moved by (default: the preset's grad.learners)"
        ),
    )
    parser.add_argument(
        "--schedule",
        choices=("gpipe", "1f1b"),
        help="order of the passes (default: gpipe; with delay.steps 1f1b, which never runs empty)",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(0),
        default=0,
        help="measure so many steps and end (default: train to the end and evaluate)",
    )
    parser.add_argument(
        "--patience",
        type=number(0, 1e6),
        default=120.0,
        metavar="SECONDS",
        help="silence of a neighbour after which a stage gives up (default: 120)",
    )


def bandwidth(text: str) -> float:
    """Bits a second: "10Mbit", "1Gbit/s", "200Gb/s" (bits: a small b), "unlimited"."""
    if text == "unlimited":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgKMG]?)(?:[bB]it|b)(?:/s|ps)?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no bandwidth; write for instance 10Mbit, 1Gbit or unlimited"
        )
    if not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"over '{text}' nothing arrives; a link as the machine has it is 'unlimited'"
        )
    return float(match[1]) * UNITS[match[2].lower()]


def seconds(text: str) -> float:
    """Seconds: "50ms", "0.1s"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is no time; write for instance 50ms or 0.1s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def cables(path: str) -> tuple[Cable, ...]:
    """The links of a JSON file, in the words of --bandwidth and --latency."""
    read = {"bandwidth": bandwidth, "latency": seconds}
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: no JSON file of links ({error})") from None
    if (
        not isinstance(records, list)
        or not all(isinstance(record, dict) for record in records)
        or not records
    ):
        raise argparse.ArgumentTypeError(
            f'{path}: a list of links is needed, [{{"bandwidth": "5Mbit"}}, ...]'
        )
    links = []
    for index, record in enumerate(records):
        for key, value in record.items():
            if key not in read or not isinstance(value, str):
                raise argparse.ArgumentTypeError(
                    f"{path}, link {index}: {json.dumps({key: value})} says nothing; write "
                    '"bandwidth": "5Mbit" and "latency": "20ms"'
                )
        try:
            links.append(Cable(**{key: read[key](value) for key, value in record.items()}))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{path}, link {index}: {error}") from None
    return tuple(links)


def _pipeline(args: argparse.Namespace) -> int:
    run, store = chosen(args.preset, changes(args.settings)), Store(args.store)
    from commsweep.processes import pipeline, stages

    if args.stages is not None:
        run = override(run, stages.with_stages(run, args.stages))
    if args.learners is not None:
        run = override(run, {"grad.learners": args.learners})
    if args.links and (args.bandwidth or args.latency):
        raise UserError("--links says what each link is; leave out --bandwidth and --latency")
    wiring = Wiring(
        schedule=args.schedule or schedule_of(run),
        bandwidth=args.bandwidth,
        latency=args.latency,
        steps=args.steps,
        threads=args.threads or 1,
        links=args.links,
    )
    folder = pipeline.folder_of(store, run, wiring)
    if {
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
    } <= os.environ.keys():  # torchrun, or the like, starts one process a stage
        return _stage(run, wiring, args, folder)
    from tqdm import tqdm

    with tqdm(unit="step", disable=args.json or None, leave=False) as bar:

        def show(progress: dict[str, Any]) -> None:
            bar.total = progress["of"]
            bar.update(progress["step"] - bar.n)

        row = pipeline.execute(
            run, wiring, execution(args), folder, patience=args.patience, show=show
        )
    compared = compared_with_simulation(row, store.folder(run_id(run)).row())
    print(
        json.dumps(row | {"simulation": compared}) if args.json else describe(row, folder, compared)
    )
    return {FINISHED: 0, DIVERGED: 3}.get(row["status"], 0)


def schedule_of(run: Run) -> Literal["gpipe", "1f1b"]:
    """The schedule of a run for which none was asked."""
    return "1f1b" if run.delay is not None and run.delay.steps else "gpipe"


def _stage(run: Run, wiring: Wiring, args: argparse.Namespace, folder: RunFolder) -> int:
    from commsweep.processes import pipeline, supervisor

    def work() -> None:
        row = pipeline.work(run, wiring, execution(args), folder, args.patience)
        if row is not None:
            print(json.dumps(row) if args.json else describe(row, folder, ""))

    return supervisor.worker(folder, work)


def describe(row: Mapping[str, Any], folder: RunFolder, compared: str) -> str:
    """A row for people."""
    how, metrics = row["wiring"], row["metrics"]
    lines = [
        f"pipeline {row['id']} of run {row['run_id']}: {row['status']}, {row['steps']} steps, "
        f"{how['schedule']}"
    ]
    lines += [f"  {row['error']}"] if row["error"] else []
    for mode, title in (("on", "compressed inference"), ("off", "dense inference")):
        if f"test_{mode}_acc" in metrics:
            lines.append(
                f"  {title:21} test accuracy {100 * metrics[f'test_{mode}_acc']:.2f} %, loss "
                f"{metrics[f'test_{mode}_loss']:.6f}"
            )
        elif f"test_{mode}_ppl" in metrics:
            lines.append(f"  {title:21} test perplexity {metrics[f'test_{mode}_ppl']:.4f}")
    if row["timing"]:
        lines.append(
            f"  step                  {1e3 * row['timing']['step_seconds']:.1f} ms (median of "
            f"{row['timing']['steps']})"
        )
    stages = len(row["transport"]) // row["run"]["grad"]["learners"]
    for index, sent in enumerate(row["transport"]):
        learner, stage = divmod(index, stages)
        if learner:
            continue  # as the first one's
        total, framing = sum(sent["sent"].values()), sum(sent["framing"].values())
        steps = max(1, row["steps"])
        exchanged = sum(sent.get("exchanged", {}).values())
        if exchanged:
            lines.append(
                f"  stage {stage} exchanged     {exchanged / steps:,.0f} bytes a step with the "
                f"same stage of {row['run']['grad']['learners'] - 1} other learners"
            )
        if total:
            lines.append(
                f"  stage {stage} sent          {total / steps:,.0f} bytes a step, "
                f"{framing / steps:,.0f} of them framing"
                + (
                    f"; {sent['tied'] / steps:,.0f} more for the tied embeddings"
                    if sent["tied"]
                    else ""
                )
            )
    lines += [f"  simulation            {compared}"] if compared else []
    return "\n".join([*lines, f"  folder {folder.path}"])

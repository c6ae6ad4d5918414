"""`commsweep links`: a plan of measurements over links of real bandwidth and latency, and what they say."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

from commsweep.experiments.config import run_id
from commsweep.experiments.errors import UserError
from commsweep.experiments.store import RunFolder, Store
from commsweep.options import folder, number
from commsweep.runs import execution, execution_options

WIDE = 0.25  # quartiles further apart than this share of the median: measured again
TRIES = 6  # times at most, once the processes are older than
SETTLE = 75.0  # seconds: machines that reclaim idle memory stall young processes


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "links", parents=[shared, execution_options()], help="measure step times over links of real bandwidth",
        description="Measure every run of a plan as real processes in network namespaces, over links shaped to each "
                    "bandwidth and latency (Linux, root), skipping what STORE/pipelines already holds; train the same "
                    "runs to the end in simulation, which gives the quality reached; then write tables and figures: "
                    "step time against bandwidth, time to target quality, what the timeline predicts beside what was "
                    "measured, and beyond it.")
    parser.add_argument("plan", help="demo-links, links-text or smoke-links")
    parser.add_argument("--out", type=folder, help="folder to write to (default: out/PLAN)")
    parser.add_argument("--only", choices=("measure", "train", "report"), help="do one of the three parts")
    parser.add_argument("--patience", type=number(0, 1e6), default=120.0, metavar="SECONDS",
                        help="silence of a neighbour after which a stage gives up (default: 120)")
    parser.set_defaults(command=_links)


def _links(args: argparse.Namespace) -> int:
    from commsweep.sweeps.papers.links import plan

    measurements, store = plan(args.plan), Store(args.store)
    if "COMMSWEEP_STAGE" in os.environ:
        return _work(args, store)
    if args.only in (None, "measure"):
        _measure(args, measurements, store)
    if args.only in (None, "train"):
        _train(args, measurements, store)
    if args.only in (None, "report"):
        return _report(args, measurements)
    return 0


def _measure(args: argparse.Namespace, measurements: list, store: Store) -> None:
    """Everything that is missing, with one set of processes for each latency; links are reshaped in between."""
    from tqdm import tqdm

    from commsweep.experiments.pipelining import launch, namespaces, stages

    places = {launch.folder(store, *one).path.name: one for one in measurements}
    missing = {name: one for name, one in places.items() if store.pipeline(name).row() is None}
    print(f"{len(places)} measurements, {len(missing)} missing", file=sys.stderr)
    with tqdm(total=len(missing), unit="measurement", disable=args.json or None, leave=False) as bar:
        ordered = sorted(missing.items(), key=lambda item: (stages.count(item[1][0]), item[1][1].latency))
        for (n, latency), group in groupby(ordered, key=lambda item: (stages.count(item[1][0]), item[1][1].latency)):
            todo = [name for name, _ in group]
            folder = RunFolder(store.root / "pipelines" / ".links", store.root)
            folder.make()
            with folder.locked(), namespaces.chain(n, 0.0, latency) as nodes:
                (folder.path / "todo.json").write_text(json.dumps(todo))
                command = ["commsweep", "links", args.plan, "--store", str(args.store), "--patience",
                           str(args.patience), "--device", args.device]
                for name in ("data_root", "model_root"):
                    if getattr(args, name) is not None:
                        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
                before = bar.n
                launch.supervise(folder, nodes.commands(command), nodes.environments(),
                                 lambda seen, before=before: bar.update(before + seen["done"] - bar.n), args.patience)
                bar.update(before + len(todo) - bar.n)


def _work(args: argparse.Namespace, store: Store) -> int:
    from commsweep.experiments.pipelining import launch

    folder = RunFolder(store.root / "pipelines" / ".links", store.root)
    return launch.worker(folder, lambda: _work_through(args, store, folder))


def _work_through(args: argparse.Namespace, store: Store, folder: RunFolder) -> None:
    """A stage's part in all measurements of one latency."""
    import torch.distributed as dist

    from commsweep.experiments.pipelining import launch, namespaces
    from commsweep.experiments.pipelining.train import Trainer, connect
    from commsweep.experiments.run import environment
    from commsweep.sweeps.papers.links import plan

    places, began = {launch.folder(store, *one).path.name: one for one in plan(args.plan)}, time.monotonic()
    how, device = replace(execution(args), checkpoint_every=float("inf")), None
    for done, name in enumerate(json.loads((folder.path / "todo.json").read_text())):
        run, wiring = places[name]
        place, first = store.pipeline(name), os.environ["RANK"] == "0"
        device = device or connect(run, how, args.patience)
        if first:
            place.make()
            launch.begin(place, run, wiring, environment(str(device)))
            namespaces.shape(wiring.bandwidth)
        for turn in count():
            dist.barrier()
            row = Trainer(run, wiring, how, place, device).train()
            again = [first and disturbed(row) and (turn < TRIES or time.monotonic() - began < SETTLE)]
            dist.broadcast_object_list(again, src=0)
            if not again[0]:
                break
        if first:
            place.finish(row | {"tries": turn + 1})
            (folder.path / ".progress").write_text(json.dumps({"done": done + 1}))
            os.replace(folder.path / ".progress", folder.path / "progress.json")
    dist.destroy_process_group()


def disturbed(row: dict[str, Any]) -> bool:
    """Whether the quartiles of a measurement's steps lie far apart: something else had the machine."""
    timing = row["timing"]
    return bool(timing) and timing["spread"][1] - timing["spread"][0] > WIDE * timing["step_seconds"]


def _train(args: argparse.Namespace, measurements: list, store: Store) -> None:
    """The quality that each run reaches, from the simulation (which the processes equal bit for bit)."""
    from commsweep.sweeps.launch import launch

    runs = list({run_id(one): one for one, _ in measurements}.values())
    how = execution(args, by="sweep")
    report = launch(runs, store, how)
    if report.errors:
        raise UserError(f"{len(report.errors)} of the runs failed: {report.errors[0]}")


def _report(args: argparse.Namespace, measurements: list) -> int:
    from commsweep.analysis import links

    made = links.write(args.store, [row.path.name for row in _folders(args, measurements)],
                       args.out or Path("out") / args.plan)
    print(json.dumps(made.record()) if args.json else made.text())
    return 0


def _folders(args: argparse.Namespace, measurements: list) -> list[RunFolder]:
    from commsweep.experiments.pipelining import launch

    store = Store(args.store)
    return [launch.folder(store, *one) for one in measurements]

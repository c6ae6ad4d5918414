"""`commsweep predict`: step times of other clusters, from shapes, rows, traces and links."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep.cli.options import count, writable
from commsweep.cli.pipeline import bandwidth
from commsweep.errors import UserError, nearest
from commsweep.timing import COLLECTIVES, SCHEDULES

if TYPE_CHECKING:
    import pandas as pd

    from commsweep.timing.gpt import Cluster
    from commsweep.timing.profile import MeasuredLink, Profile

CODECS = ("none", "cast:to=bfloat16", "uniform:8", "uniform:4", "topk:0.01", "tern")
# Columns of --rows, by the names that a row may have for them.
COLUMNS = {
    "hidden": ("hidden", "hidden size"),
    "layers": ("layers", "# layers"),
    "sequence": ("sequence", "sequence length"),
    "batch": ("batch", "global batch"),
    "micro_batch": ("micro_batch", "micro batch"),
    "heads": ("heads", "attention heads"),
    "tensor": ("tensor", "tensor parallelism"),
    "pipeline": ("pipeline", "pipeline parallelism"),
    "data": ("data", "data parallelism"),
    "vocabulary": ("vocabulary",),
}
DEFAULTS = {"sequence": 1024, "micro_batch": 1, "tensor": 1, "pipeline": 1, "vocabulary": 51200}
EXCHANGES = ("algorithm", "workers", "parameters", "compute_ms")


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "predict",
        help="step times on your cluster, from shapes, a trace or a table",
        description=(
            "Predict the time of a training step. From shapes (--model) on a cluster (--cluster), "
            "from a torch.profiler trace over another link (--trace, --links), for each row of a "
            "table (--rows), or under a contest's meter (--meter). What was measured to make "
            "these predictions, and how far they are off: docs/results/clusters."
        ),
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", metavar="SIZE", help="7b, or gpt:layers=24,hidden=1024,heads=16,seq=1024"
    )
    source.add_argument("--rows", type=Path, metavar="CSV", help="one prediction a row")
    source.add_argument("--trace", type=Path, metavar="JSON", help="of torch.profiler, one process")
    source.add_argument("--meter", choices=("protocol",), help="ProtocolNanoGPT: 200 Mbit/s, 50 ms")
    parser.add_argument("--out", type=Path, metavar="CSV", help="of --rows (default: printed)")
    parser.add_argument("--cluster", default="a100-nvlink", help="a preset or a JSON file")
    parser.add_argument(
        "--link",
        type=bandwidth,
        metavar="RATE",
        help="of --model: from a node to others, as 200Gbit, all of it reached",
    )
    parser.add_argument("--per-node", type=count, metavar="N", help="of --model: GPUs of a node")
    parser.add_argument(
        "--links", metavar="FILE", help="iperf3 -J or nccl-tests, for --trace and --model"
    )
    parser.add_argument("--workers", type=count, help="of --trace (default: as in the trace)")
    parser.add_argument("--outer", type=count, metavar="STEPS", help="exchange every STEPS only")
    parser.add_argument("--gpus", type=count, help="of --model (default: tensor x pipeline x data)")
    for name in ("tensor", "pipeline", "data"):
        parser.add_argument(f"--{name}", type=count, metavar="N", help=f"{name}-parallel GPUs")
    parser.add_argument("--micro-batch", type=count, default=1, metavar="N", help="samples")
    parser.add_argument("--batch", type=count, metavar="N", help="samples of an iteration")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="1f1b",
        help="of the pipeline of --model (default: 1f1b)",
    )
    parser.add_argument(
        "--chunks", type=count, default=2, metavar="N", help="stages a GPU, interleaved"
    )
    parser.add_argument(
        "--no-recompute", action="store_true", help="keep activations for the backward"
    )
    parser.add_argument(
        "--collective",
        choices=COLLECTIVES,
        help=(
            "how the gradients of --model are summed up; nccl: the faster of ring and tree "
            "(default: ring, and alltoall of codes)"
        ),
    )
    parser.add_argument(
        "--sharded",
        action="store_true",
        help="of --model: FSDP (ZeRO-3), which gathers weights before each forward and backward",
    )
    parser.add_argument(
        "--codecs",
        metavar="A;B",
        help=(
            "of --model: a line for each code of the gradients and of the messages between "
            "stages, such as 'uniform:8;topk:0.01'"
        ),
    )
    parser.add_argument("--stages", type=count, default=8, help="of --meter (default: 8)")
    parser.add_argument("--microbatches", type=count, default=64, help="of --meter (default: 64)")
    parser.add_argument("--bytes", type=count, default=16777216, help="of a message of --meter")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_predict)


def _predict(args: argparse.Namespace) -> int:
    if args.links and args.trace is None and args.model is None:
        raise UserError(
            f"--links '{args.links}' has an effect on --trace and --model only; describe the links "
            "of --rows in a cluster file (--cluster)"
        )
    for option in ("link", "per_node"):
        if getattr(args, option) is not None and args.model is None:
            raise UserError(f"--{option.replace('_', '-')} has an effect on --model only")
    if args.rows is not None:
        return _rows(args)
    if args.trace is not None:
        return trace(args)
    if args.meter is not None:
        from commsweep.timing import meter

        seconds = meter.seconds(args.stages, args.microbatches, args.bytes)
        sentence = (
            f"{seconds:.3f} s a step: {args.stages} stages, {args.microbatches} microbatches, "
            f"{args.bytes:,} bytes a message, 1F1B, computing not counted"
        )
        print(json.dumps({"seconds": seconds}) if args.json else sentence)
        return 0
    return _model(args)


# From shapes.


def _model(args: argparse.Namespace) -> int:
    from commsweep.timing import bottleneck, gpt

    shape, gpus = _shape(args)
    cluster = linked(gpt.read_cluster(args.cluster), args)
    if args.schedule == "interleaved" and shape.layers % (shape.pipeline * args.chunks):
        raise UserError(
            f"--chunks {args.chunks}: {shape.layers} layers are no multiple of "
            f"{shape.pipeline * args.chunks} stages"
        )
    if args.sharded and args.collective not in (None, "ring", "alltoall"):
        raise UserError(f"--collective {args.collective}: shards are summed by ring or alltoall")
    choices = gpt.Choices(
        args.schedule,
        args.chunks,
        not args.no_recompute,
        collective=args.collective or "ring",
        sharded=args.sharded,
    )
    predicted = {name: float(value) for name, value in gpt.predict(shape, cluster, choices).items()}
    lines = _codes(args, shape, cluster, choices) if args.codecs else []
    if args.json:
        print(json.dumps({"gpus": gpus, **predicted} | ({"codecs": lines} if lines else {})))
        return 0
    rate = f"{8 * cluster.node_link / 1e9:,.0f} Gbit/s between nodes"
    print(
        f"{1e3 * predicted['total']:.1f} ms an iteration on {gpus} GPUs of {cluster.name}, {rate}"
    )
    for name in ("compute", "bubble", "data", "gathers", "optimizer"):
        if name == "gathers" and not args.sharded:
            continue
        share = 100 * predicted[name] / predicted["total"]
        print(f"  {name:10} {1e3 * predicted[name]:10.1f} ms {share:5.1f} %")
    if args.collective == "nccl" and shape.data > 1:
        rings = float(gpt.predict(shape, cluster, replace(choices, collective="ring"))["data"])
        taken = "tree" if predicted["data"] < rings else "ring"
        print(f"  gradients are summed up by a {taken}, as NCCL's formulas choose")
    for line in lines:
        summed = f", by {line['collective']}" if line["message"] == "gradients" else ""
        print(
            f"  {line['message']:9} in {line['codec']:14} {1e3 * line['seconds']:8.1f} ms an "
            f"iteration, {100 * line['share']:.1f} % of 16-bit bytes{summed}"
        )
    if lines:
        print("coding at the memory rate of the cluster (a roofline, not measured)")
    print(f"predicted; constants from {cluster.source}")
    if note := bottleneck.memory_note(shape, args.sharded):
        print(note)
    if choices != gpt.Choices():
        print(
            "1F1B with recomputation and rings was held against measurements; these choices were "
            "not"
        )
    return 0


def linked(cluster: Cluster, args: argparse.Namespace) -> Cluster:
    """Return a cluster with the nodes and the rate between them that the options name. Raises
    UserError where they name two rates.
    """
    from commsweep.timing.profile import read_link

    if args.link is not None and args.links:
        raise UserError("--link and --links both name a rate: give one of them")
    if args.per_node is not None:
        cluster = replace(cluster, node=args.per_node)
    rate = read_link(args.links).rate if args.links else args.link
    return replace(cluster, node_link=rate / 8) if rate else cluster


def _codes(args: argparse.Namespace, shape: Any, cluster: Any, choices: Any) -> list[dict]:
    """Return iterations with the gradients, the messages between stages, or the gathered weights
    in each code.
    """
    from commsweep.launching.codecs import listed
    from commsweep.timing import gpt

    if shape.data == 1 and shape.pipeline == 1:
        raise UserError(
            "--codecs: nothing travels with --data 1 and --pipeline 1; set one of them, or --gpus"
        )
    lines = []
    for codec in listed(args.codecs):
        share = share_of(codec)
        collective = collective_of(codec, args.collective)
        codes = codec != "none"  # dense messages need no coding
        changed = {}
        if shape.data > 1:
            changed["gradients"] = replace(
                choices,
                gradients=share,
                coding=codes * gpt.coding(share, collective, float(shape.data)),
                collective=collective,
            )
        if shape.pipeline > 1:
            coding = codes * 2 * gpt.decoding(share)
            changed["stages"] = replace(choices, stages=share, stage_coding=coding)
        if shape.data > 1 and args.sharded and collective != "gather":
            coding = codes * gpt.decoding(share)
            changed["weights"] = replace(choices, weights=share, weight_coding=coding)
        for message, coded in changed.items():
            seconds = float(gpt.predict(shape, cluster, coded)["total"])
            fields = {"message": message, "codec": codec, "share": share, "seconds": seconds}
            if message == "gradients":
                fields["collective"] = collective
            lines.append(fields)
    return lines


def collective_of(codec: str, requested: str | None = None) -> str:
    """Return how a code of gradients is summed up: as asked (None: all-to-all) where sums can be
    coded again, else by a gather of everyone's message. Dense sums go round a ring.
    """
    from commsweep.config.gradients import recoded
    from commsweep.integrations import measure

    if codec == "none":
        return requested or "ring"
    if not recoded(measure.codec(codec).spec):
        return "gather"
    return requested if requested in ("ring", "tree") else "alltoall"


def share_of(codec: str) -> float:
    """Return the bytes of a code, of 16-bit values."""
    import torch

    from commsweep.integrations import measure

    x = torch.randn(1, 2**18, dtype=torch.bfloat16)
    return float(measure.codec(codec).encode(x, 0).nbytes) / (x.element_size() * x.numel())


def gpt_fields(model: str) -> dict[str, int]:
    """Return the numbers of "gpt:layers=24,hidden=1024", or of a size such as "7b". Raises
    UserError on anything else.
    """
    from commsweep.timing.bottleneck import SEQUENCE, SIZES

    if model.lower() in SIZES:
        layers, hidden, heads = SIZES[model.lower()]
        return {"layers": layers, "hidden": hidden, "heads": heads, "seq": SEQUENCE}
    kind, _, text = model.partition(":")
    if kind != "gpt":
        raise UserError(
            f"--model '{model}': write one of {', '.join(SIZES)}, or gpt:layers=32,hidden=4096"
        )
    fields: dict[str, int] = {}
    for piece in text.split(","):
        key, _, value = piece.partition("=")
        names = {"layers", "hidden", "heads", "seq", "vocabulary"}
        if key not in names or not value.isdigit() or not int(value):
            raise UserError(f"--model '{model}': '{piece}'{nearest(key, names)}; write KEY=N")
        fields[key] = int(value)
    for key in ("layers", "hidden"):
        if key not in fields:
            raise UserError(f"--model '{model}' says no {key}")
    fields.setdefault("heads", max(1, fields["hidden"] // 64))
    return fields


def _shape(args: argparse.Namespace) -> tuple[Any, int]:
    from commsweep.timing.gpt import Shape

    fields = gpt_fields(args.model)
    tensor, pipeline = args.tensor or 1, args.pipeline or 1
    data = args.data or max(1, (args.gpus or 1) // (tensor * pipeline))
    gpus = tensor * pipeline * data
    if args.gpus not in (None, gpus):
        raise UserError(
            f"--gpus {args.gpus} is not tensor {tensor} x pipeline {pipeline} x data {data}"
        )
    batch = args.batch or args.micro_batch * data * pipeline
    if batch % (args.micro_batch * data):
        raise UserError(
            f"--batch {batch} is no multiple of micro-batch {args.micro_batch} x data {data}"
        )
    if pipeline > fields["layers"]:
        raise UserError(f"--pipeline {pipeline}: the model has {fields['layers']} layers")
    shape = Shape(
        fields["hidden"],
        fields["layers"],
        fields.get("seq", 1024),
        batch,
        args.micro_batch,
        fields["heads"],
        tensor,
        pipeline,
        data,
        fields.get("vocabulary", 51200),
    )
    return shape, gpus


# From a table.


def _rows(args: argparse.Namespace) -> int:
    import pandas as pd

    if args.out is not None:
        writable(args.out, file=True)
    try:
        rows = pd.read_csv(args.rows)
    except (OSError, ValueError) as error:
        raise UserError(f"--rows '{args.rows}' cannot be read as a table ({error})") from None
    if rows.empty:
        raise UserError(f"--rows '{args.rows}' has no rows")
    predictions = _exchanges(args, rows) if "algorithm" in rows else _shapes(args, rows)
    others_columns = rows.drop(
        columns=predictions.columns, errors="ignore"
    )  # of an earlier prediction
    text = pd.concat([others_columns, predictions], axis=1).to_csv(index=False)
    if args.out is None:
        print(text, end="")
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
        print(f"{len(rows):,} predictions in {args.out}")
    return 0


def _check_names(args: argparse.Namespace, rows: pd.DataFrame, names: Sequence[str]) -> None:
    """Raise UserError on a column that is nearly one that is read."""
    for column in rows:
        name = str(column).strip().lower()
        close = get_close_matches(
            name, [name_left for name_left in names if name_left not in rows], 1, 0.75
        )
        if close and name not in names:
            raise UserError(
                f"--rows '{args.rows}' has a column '{column}', which is not read: did you mean "
                f"'{close[0]}'? (rename it, or leave it out)"
            )


def _numbers(
    args: argparse.Namespace, rows: pd.DataFrame, column: str, blank: float | None = None
) -> Any:
    """Numbers above 0 of a column. blank: what an empty cell says; None: it is refused."""
    import pandas as pd

    values = pd.to_numeric(rows[column], errors="coerce")
    bad = ~(values > 0)
    if blank is not None:
        empty = rows[column].isna()
        values, bad = values.mask(empty, blank), bad & ~empty
    if bad.any():
        line = int(bad.to_numpy().argmax())
        raise UserError(
            f"--rows '{args.rows}', line {line + 2}: {column}={rows[column].iloc[line]!r} is no "
            "number above 0"
        )
    return values.to_numpy(float)


def _shapes(args: argparse.Namespace, rows: pd.DataFrame) -> pd.DataFrame:
    """Return predictions from vTrain's columns, or ours."""
    import numpy as np
    import pandas as pd

    from commsweep.timing import gpt

    columns: dict[str, Any] = {}
    for name, aliases in COLUMNS.items():
        column = next((column for column in rows if str(column).strip().lower() in aliases), None)
        if column is not None:
            columns[name] = _numbers(args, rows, column)
    for name in ("hidden", "layers", "batch"):
        if name not in columns:
            raise UserError(
                f"--rows '{args.rows}' has no column for {name} (one of: "
                f"{', '.join(COLUMNS[name])}); for exchanges name {', '.join(EXCHANGES)}"
            )
    _check_names(args, rows, [alias for aliases in COLUMNS.values() for alias in aliases])
    for name, value in DEFAULTS.items():
        columns.setdefault(name, np.full(len(rows), float(value)))
    columns.setdefault("heads", np.maximum(1, columns["hidden"] // 64))
    gpus = next(
        (column for column in rows if str(column).strip().lower() in ("gpus", "# gpus")), None
    )
    if "data" not in columns:
        shards = columns["tensor"] * columns["pipeline"]
        shard_counts = _numbers(args, rows, gpus) if gpus is not None else shards
        bad = shard_counts % shards != 0
        if bad.any():
            line = int(bad.argmax())
            raise UserError(
                f"--rows '{args.rows}', line {line + 2}: {gpus}={shard_counts[line]:g} is no "
                f"multiple of tensor {columns['tensor'][line]:g} x "
                f"pipeline {columns['pipeline'][line]:g}"
            )
        columns["data"] = shard_counts / shards
    predicted = gpt.predict(gpt.Shape(**columns), gpt.read_cluster(args.cluster))
    return pd.DataFrame({"predicted_ms": np.round(1e3 * predicted["total"], 3)}, index=rows.index)


def _exchanges(args: argparse.Namespace, rows: pd.DataFrame) -> pd.DataFrame:
    """Return predictions of DDP, LocalSGD and DiLoCo over links."""
    import numpy as np
    import pandas as pd

    from commsweep.timing import exchange_model

    for name in EXCHANGES:
        if name not in rows:
            raise UserError(f"--rows '{args.rows}' has no column {name}{nearest(name, rows)}")
    workers, parameters, compute = (_numbers(args, rows, name) for name in EXCHANGES[1:])
    _check_names(args, rows, (*EXCHANGES, "interval", "bandwidth_mbit"))
    intervals, rates = (
        np.full(len(rows), default) if name not in rows else _numbers(args, rows, name, default)
        for name, default in (("interval", 1.0), ("bandwidth_mbit", 0.0))
    )
    steps = [
        exchange_model.steps(
            str(name).strip().lower(), int(interval), int(n), size, 1e6 * rate, ms / 1e3
        )
        for name, interval, n, size, rate, ms in zip(
            rows["algorithm"], intervals, workers, parameters, rates, compute, strict=True
        )
    ]
    columns = ("predicted_ms", "predicted_without_ms")
    return pd.DataFrame(
        {
            name: [round(1e3 * pair[index], 3) for pair in steps]
            for index, name in enumerate(columns)
        },
        index=rows.index,
    )


# From a trace.


def trace(args: argparse.Namespace) -> int:
    """A table of codecs: bytes, step time, what limits it."""
    from commsweep.timing.profile import read_link, read_trace

    profile = read_trace(args.trace)
    link = read_link(args.links) if args.links else None
    workers = args.workers or profile.workers or 2
    interval = getattr(args, "outer", None) or 1
    lines = [_coded(profile, link, workers, interval, codec) for codec in CODECS]
    lines = [line for line in lines if line["codec"] == "none" or line["bytes"] < profile.nbytes]
    if args.json:
        print(json.dumps(lines))
        return 0
    where = f"{link.rate / 1e6:,.0f} Mbit/s" if link else "the link of the trace"
    print(
        f"profile: {1e3 * profile.step:.1f} ms a step ({profile.steps} steps), "
        f"{profile.nbytes / 1e6:.2f} MB in {profile.collectives:g} collectives, "
        f"{1e3 * profile.waited:.1f} ms waited for\n"
        f"predicted for {workers} workers over {where}"
        + ", dense sums round a ring"
        + (f", an exchange every {interval} steps" if interval > 1 else "")
        + ":"
    )
    print(f"  {'codec':18} {'MB':>8} {'ms a step':>10} {'times':>6}  {'sums':8}  then the limit is")
    for line in sorted(lines, key=lambda line: line["seconds"]):
        print(
            f"  {line['codec']:18} {line['bytes'] / 1e6:8.2f} {1e3 * line['seconds']:10.1f} "
            f"{lines[0]['seconds'] / line['seconds']:6.2f}  {line['collective']:8}  {line['limit']}"
        )
    print(
        "coding is timed on this machine; what a codec costs in quality: docs/findings.md, and "
        "commsweep.Shadow in your training"
    )
    return 0


def _coded(
    profile: Profile, link: MeasuredLink | None, workers: int, interval: int, codec: str
) -> dict[str, Any]:
    from commsweep.timing import profile as profiles

    collective = collective_of(codec)
    share, coding = 1.0, 0.0
    if codec != "none":
        share, coding = _cost(codec, profile, workers, collective)
    exchanging = profiles.predicted(profile, link, workers, share, coding, collective)
    computing = profile.step - profile.waited
    seconds = (exchanging + (interval - 1) * computing) / interval
    waits = exchanging - computing - coding
    longest = max((computing, "computing"), (coding, "coding"), (waits, "the link"))
    return {
        "codec": codec,
        "bytes": share * profile.nbytes,
        "seconds": seconds,
        "collective": collective,
        "limit": longest[1],
    }


def _cost(codec: str, profile: Profile, workers: int, collective: str) -> tuple[float, float]:
    """Return (share of the dense bytes, seconds of coding), timed here on a part of it.

    Of a gather one's message is encoded and every other's decoded. Of an all-to-all the parts of
    all are decoded and their sum is coded again.
    """
    import torch

    from commsweep.integrations import measure

    elements = profile.nbytes / profile.itemsize
    n = int(min(2**20, max(1024, elements)))
    x, code = torch.randn(1, n), measure.codec(codec)
    payload = code.encode(x, 0)
    turns = []
    for _ in range(3):
        begin = time.perf_counter()
        payload = code.encode(x, 0)
        middle = time.perf_counter()
        code.decode(payload)
        encoding, decoding = middle - begin, time.perf_counter() - middle
        if collective == "gather":
            turns.append(encoding + (workers - 1) * decoding)
        else:
            turns.append((1 + 1 / workers) * encoding + 2 * decoding)
    return payload.nbytes / (profile.itemsize * n), min(turns) * elements / n

"""`commsweep compress`: send an array through a compressor and see what it costs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from commsweep.experiments.errors import UserError


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "compress", help="compress an array: bytes, ratio and relative error",
        description="Encode and decode a NumPy array (first axis: samples) and write what the receiver would see.",
        epilog="example: commsweep compress --spec '{\"kind\": \"topk\", \"ratio\": 0.1}' in.npy out.npy")
    parser.add_argument("--spec", required=True, help='a compressor as JSON: {"kind": "uniform", "bits": 4}')
    parser.add_argument("--seed", type=int, default=0, help="seed of random compressors (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("input", type=Path, metavar="IN.npy")
    parser.add_argument("output", type=Path, metavar="OUT.npy")
    parser.set_defaults(command=_compress)


def _compress(args: argparse.Namespace) -> int:
    import numpy as np
    import torch

    from commsweep.experiments import compressors

    try:
        spec = json.loads(args.spec)
    except ValueError as error:
        raise UserError(f"--spec is not JSON ({error}); write for instance '{{\"kind\": \"topk\", \"ratio\": 0.1}}'"
                        ) from None
    if not isinstance(spec, dict):
        raise UserError("--spec must be a JSON object with a kind")
    compressor = compressors.build(spec)
    try:
        x = torch.from_numpy(np.load(args.input, allow_pickle=False))
    except (ValueError, TypeError, EOFError) as error:
        raise UserError(f"'{args.input}' is not an array of numbers in .npy format ({error})") from None
    payload = compressor.encode(x, args.seed)
    y = compressor.decode(payload)
    np.save(args.output, y.numpy())
    dense = x.numel() * x.element_size()
    norm = float(x.double().norm())
    error = float((y.double() - x.double()).norm()) / norm if norm else 0.0
    out = {"nbytes": payload.nbytes, "dense_bytes": dense, "ratio": payload.nbytes / dense, "relative_error": error,
           "parts": {name: part.numel() * part.element_size() for name, part in payload.parts.items()}}
    print(json.dumps(out) if args.json else
          f"{payload.nbytes:,} of {dense:,} bytes ({100 * out['ratio']:.2f} %), relative error {error:.4g}; "
          + ", ".join(f"{name} {size:,}" for name, size in out["parts"].items()))
    return 0

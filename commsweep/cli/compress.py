"""`commsweep compress`: send an array through a compressor and see what it costs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from commsweep.cli.options import folder, whole_number, writable
from commsweep.config.compressors.spelling import spelled, unknown
from commsweep.errors import UserError


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "compress",
        help="compress an array: bytes, ratio and relative error",
        description=(
            "Encode and decode a NumPy array (first axis: samples) and write what the receiver "
            "would see."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "example: commsweep compress --spec topk:0.1 in.npy out.npy\n"
            "kinds and their parameters: commsweep explain fwd.compressor.kind"
        ),
    )
    parser.add_argument(
        "--spec",
        required=True,
        help='a compressor: uniform:4, or as JSON {"kind": "uniform", "bits": 4}',
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**63 - 1),
        default=0,
        help="seed of random compressors (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument(
        "input", type=folder, metavar="IN.npy", help="the array, of a floating-point type"
    )
    parser.add_argument(
        "output", type=folder, metavar="OUT.npy", help="what the receiver sees of it"
    )
    parser.set_defaults(command=_compress)


def _compress(args: argparse.Namespace) -> int:
    settings = _settings(args.spec)
    writable(args.output, file=True)
    import numpy as np
    import torch

    from commsweep import compressors

    compressor = compressors.build(settings)
    if compressor.spec.shares_mask:
        raise UserError(
            "--spec: forward_mask sends a gradient where the forward message kept the "
            "activation, and there is none here; try topk"
        )
    with open(args.input, "rb") as handle:
        try:
            x = torch.from_numpy(np.lib.format.read_array(handle, allow_pickle=False))
        except Exception as error:  # whatever the bytes are
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise UserError(
                f"'{args.input}' is not an array of numbers in .npy format ({reason})"
            ) from None
    try:
        payload = compressor.encode(x, args.seed)
        y = compressor.decode(payload)
    except (MemoryError, RuntimeError) as error:
        raise UserError(
            f"{args.spec} on an array of shape {tuple(x.shape)}: {str(error).splitlines()[0]}"
        ) from None
    np.save(args.output, y.numpy())
    dense = x.numel() * x.element_size()
    norm = float(x.double().norm())
    error = float((y.double() - x.double()).norm()) / norm if norm else 0.0
    out = {
        "nbytes": payload.nbytes,
        "dense_bytes": dense,
        "ratio": payload.nbytes / dense,
        "relative_error": error,
        "parts": {
            name: tensor.numel() * tensor.element_size() for name, tensor in payload.parts.items()
        },
    }
    print(
        json.dumps(out)
        if args.json
        else (
            f"{payload.nbytes:,} of {dense:,} bytes ({100 * out['ratio']:.2f} %), relative "
            f"error {error:.4g}; "
        )
        + ", ".join(f"{name} {size:,}" for name, size in out["parts"].items())
    )
    return 0


def _settings(text: str) -> dict[str, Any]:
    """Return the settings that a word or JSON means. Raises UserError where they are none."""
    is_json = text.lstrip().startswith(("{", "[", '"'))
    settings: Any = None
    try:
        if not is_json:
            settings = spelled(text)
            if settings is None:
                raise UserError(f"--spec {unknown(text[:60])}")
        else:
            settings = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--spec {text[:60]}: neither a compressor in a word, as topk:0.1, nor JSON ({error})"
        ) from None
    if not isinstance(settings, dict):
        raise UserError("--spec must be a compressor in a word, as topk:0.1, or a JSON object")
    return settings


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--spec says {twice[0]} twice; which one is meant?")
    return dict(pairs)

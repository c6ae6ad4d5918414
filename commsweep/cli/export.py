"""`commsweep export`: a codec as one Python file that needs only torch."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from commsweep.cli.options import folder, writable
from commsweep.errors import UserError

FILES = Path(__file__).resolve().parent.parent / "integrations" / "codecs"
# The settings of each kind that its file has, and what each other setting must be.
CONSTANTS = {
    "topk": (("ratio",), {"scope": ("sample",), "index_coding": (None,), "values": (None,)}),
    "uniform": (
        ("bits", "scale", "group", "rounding"),
        {"scale": ("tensor", "sample", "group")},
    ),
}


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "export",
        help="write a codec as one Python file that needs only torch",
        description="Write one Python file with encode, decode, pack, unpack and an autograd "
        "Boundary, which sends the same bytes as ours. For contests and codebases that take no "
        f"dependency. Kinds: {', '.join(CONSTANTS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  commsweep export topk:0.1 --out codec.py\n"
        "  commsweep export uniform:4,scale=group,group=128,rounding=stochastic --out codec.py",
    )
    parser.add_argument("codec", help="kind:number or kind:number,setting=value")
    parser.add_argument(
        "--out",
        type=folder,
        required=True,
        metavar="FILE.py",
        help="the file, which must not exist",
    )
    parser.set_defaults(command=_export)


def _export(args: argparse.Namespace) -> int:
    out: Path = args.out
    if out.exists():
        raise UserError(f"'{out}' exists; name a file that does not")
    text = exported(args.codec)
    writable(out, file=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"wrote {out} ({args.codec}): encode, decode, pack, unpack, Boundary")
    return 0


def exported(codec: str) -> str:
    """The file of a codec. Raises UserError on a kind or a setting that no file has."""
    from commsweep.integrations import measure

    spec: Any = measure.codec(codec).spec
    if spec.kind not in CONSTANTS:
        raise UserError(
            f"codec '{codec}': there are files of {', '.join(CONSTANTS)}, not of {spec.kind}"
        )
    constants, allowed = CONSTANTS[spec.kind]
    for name, values in allowed.items():
        if getattr(spec, name) not in values:
            choices = ", ".join(str(value) for value in values if value is not None)
            raise UserError(
                f"codec '{codec}': its file has no {name}={getattr(spec, name)}; "
                + (f"choose {choices}" if choices else "leave it out")
            )
    text = (FILES / f"{spec.kind}.py").read_text(encoding="utf-8")
    for name in constants:
        value = getattr(spec, name)
        written = f'"{value}"' if isinstance(value, str) else repr(value)
        text, count = re.subn(
            rf"^{name.upper()} = [^#\n]*?(?=  #|$)", f"{name.upper()} = {written}", text, flags=re.M
        )
        assert count == 1, name
    return _standalone(text)


def _standalone(text: str) -> str:
    """A codec file with what it imports of ours at its end."""
    shared = (FILES / "packing.py").read_text(encoding="utf-8")
    body, imported = re.subn(r"^from commsweep\.\S+ import .*\n\n?", "", text, flags=re.M)
    assert imported == 1
    return f"{body}\n\n{shared[shared.index('def ') :]}"

"""Names of the networks that torchvision and timm make, without importing either: seconds."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from commsweep.errors import UserError, nearest

BUILDER = re.compile(r"@register_model\([^)]*\)\n(?:@[^\n]*\n)*def (\w+)\(")


@cache
def names(package: str) -> frozenset[str]:
    """The names of a package's classifiers, read from its files; none where it is not there."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return frozenset()
    files = sorted((Path(spec.origin).parent / "models").glob("*.py"))
    by_file = (BUILDER.findall(file.read_text(encoding="utf-8")) for file in files)
    if package == "timm":  # whose decorator has no arguments
        by_file = (
            re.findall(r"@register_model\ndef (\w+)\(", file.read_text(encoding="utf-8"))
            for file in files
        )
    return frozenset(name for in_file in by_file for name in in_file)


def check(name: str) -> None:
    """Raise UserError on a name that no network has. A name with a dot is timm's, of some weights:
    it is looked up when the network is made.
    """
    torchvisions, timms = names("torchvision"), names("timm")
    if name in torchvisions or name.partition(".")[0] in timms or not torchvisions:
        return
    hint = "" if timms else "; more come with timm: pip install timm"
    raise UserError(
        f"unknown network '{name}'{nearest(name, sorted(torchvisions))} (any classifier of "
        f"torchvision's{hint})"
    )

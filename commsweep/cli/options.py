"""What the command line's arguments may be: one line says what is wrong with one."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from commsweep.errors import UserError, nearest


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, and whose settings (KEY=VALUE) may stand before or
    after options.
    """

    def format_help(self) -> str:
        """The help. An epilog may be a function, which is called only now: it may load content."""
        if callable(self.epilog):
            self.epilog = self.epilog()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage."""
        said = re.sub(r"^argument (\S+): ", r"\1 ", message)
        if found := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", said):
            said += nearest(found[1], re.findall(r"[\w-]+", found[2]))
        raise UserError(f"{said} (see {self.prog} --help)")

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        """The arguments, settings behind options included. Raises UserError."""
        args, rest = self.parse_known_args(argv)
        late = [
            one
            for one in rest
            if "=" in one and not one.startswith("-") and hasattr(args, "settings")
        ]
        if left := [one for one in rest if one not in late]:
            known = [option for options in _options(self) for option in options]
            if left[0].partition("=")[0] in known:
                self.error(f"'{left[0]}' is an option of other commands, not of this one")
            near = nearest(left[0], known) if left[0].startswith("-") else ""
            self.error(f"'{left[0]}' is not understood{near}")
        if late:
            args.settings = [*args.settings, *late]
        return args


def _options(parser: argparse.ArgumentParser) -> list[list[str]]:
    found = []
    for action in parser._actions:
        found.append(list(action.option_strings))
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found += _options(child)
    return found


def folder(text: str) -> Path:
    """A path that is not empty: "" would be the working directory without a word."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r}: an empty path; name a file or folder")
    return Path(text)


def writable(path: Path, file: bool = False) -> None:
    """Raise UserError, before any work, unless a folder (or file) of this name can be written."""
    place = path.parent if file else path
    if file and path.is_dir():
        raise UserError(f"'{path}' is a folder; name a file")
    if path.exists() and (not path.is_file() if file else not path.is_dir()):
        raise UserError(f"'{path}' is no {'file' if file else 'folder'}; name another")
    while not place.exists() and place != place.parent:
        place = place.parent
    if (
        not place.is_dir()
        or not os.access(place, os.W_OK | os.X_OK)
        or (file and path.exists() and not os.access(path, os.W_OK))
    ):
        raise UserError(
            f"'{path}' cannot be written ('{place}' is not a folder that may be written to); "
            "name another"
        )


def name(text: str) -> str:
    """A name that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: an empty name")
    return text


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value}: {_range(least, most)}")
        return value

    return read


def number(above: float, most: float = math.inf, included: bool = False) -> Callable[[str], float]:
    """Numbers above `above` (or from it on, if included); "inf" only where `most` is infinite."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is no number") from None
        if (
            math.isnan(value)
            or not (above < value or (included and value == above))
            or value > most
        ):
            words = f"at least {above:g}" if included else f"more than {above:g}"
            raise argparse.ArgumentTypeError(
                f"{text}: {words}" + ("" if math.isinf(most) else f", at most {most:g}")
            )
        return value

    return read


def _range(least: int, most: float) -> str:
    return f"at least {least}" if math.isinf(most) else f"from {least} to {most:g}"


port = whole(1, 65535)
count = whole(1)


def words(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(part for part in (one.strip() for one in text.split(",")) if part)

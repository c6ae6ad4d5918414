"""The types of the command line's arguments: one line says what is wrong with one."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
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
        text = re.sub(r"^argument (\S+): ", r"\1 ", message)
        if choice := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", text):
            text += nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        raise UserError(f"{text} (see {self.prog} --help)")

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        """The arguments, settings behind options included. Raises UserError."""
        args, unknown = self.parse_known_args(argv)
        late = [
            argument
            for argument in unknown
            if "=" in argument and not argument.startswith("-") and hasattr(args, "settings")
        ]
        if left := [argument for argument in unknown if argument not in late]:
            options = [option for options in _options(self) for option in options]
            if left[0].partition("=")[0] in options:
                self.error(f"'{left[0]}' is an option of other commands, not of this one")
            near = nearest(left[0], options) if left[0].startswith("-") else ""
            self.error(f"'{left[0]}' is not understood{near}")
        if late:
            args.settings = [*args.settings, *late]
        return args


def _options(parser: argparse.ArgumentParser) -> list[list[str]]:
    options = []
    for action in parser._actions:
        options.append(list(action.option_strings))
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                options += _options(child)
    return options


def folder(text: str) -> Path:
    """A path that is not empty: "" would be the working directory without a word."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r}: an empty path; name a file or folder")
    return Path(text)


def usual_store() -> Path:
    """Return the store where --store names none."""
    return folder(os.environ.get("COMMSWEEP_STORE") or "store")


def writable(path: Path, file: bool = False) -> None:
    """Raise UserError, before any work, unless a folder (or file) of this name can be written."""
    folder = path.parent if file else path
    if file and path.is_dir():
        raise UserError(f"'{path}' is a folder; name a file")
    if path.exists() and (not path.is_file() if file else not path.is_dir()):
        raise UserError(f"'{path}' is no {'file' if file else 'folder'}; name another")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if (
        not folder.is_dir()
        or not os.access(folder, os.W_OK | os.X_OK)
        or (file and path.exists() and not os.access(path, os.W_OK))
    ):
        raise UserError(
            f"'{path}' cannot be written ('{folder}' is not a folder that may be written to); "
            "name another"
        )


def name(text: str) -> str:
    """A name that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: an empty name")
    return text


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
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


port = whole_number(1, 65535)
count = whole_number(1)


def words(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(word for word in (piece.strip() for piece in text.split(",")) if word)


def check_roles(roles: Iterable[str], valid: Collection[str]) -> None:
    """Raise UserError on a --role that is none of the valid ones."""
    for role in roles:
        if role not in valid:
            raise UserError(f"--role {role}: not one of {', '.join(valid)}{nearest(role, valid)}")

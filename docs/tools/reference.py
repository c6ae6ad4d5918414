"""The pages of docs/reference that follow from the settings' records; `make docs` writes them, a
test holds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

from commsweep.cli.explain import kind_of, said_of, shown
from commsweep.config import Run
from commsweep.config.base import Spec, by_kind
from commsweep.config.compressors import CompressorSpec, GradientCompressor
from commsweep.config.feedback import FeedbackSpec, GradientFeedback
from commsweep.config.gradients import Gradients
from commsweep.config.links import Links
from commsweep.config.override import members
from commsweep.config.rules import EXCLUSIONS

COMPRESSORS = """\
# Compressors and feedbacks

Written by `make docs` from the records in `commsweep/config`; `commsweep explain` shows the same in
a terminal.

`fwd.*` and `bwd.*` are set apart: each direction of a boundary has a compressor, a feedback and a
first compressed epoch. A boundary may have links of its own: `at.layer1.fwd.compressor.ratio=0.5`.

![what a boundary does](boundary.svg)
"""
MEMORIES = """\
`ef`, `ef_mixed` and `ef21` key their memory by batch slot (the authors' way) or by `sample`.
Memories change in training only; evaluation with compression on applies the plain compressor,
because a test sample has no memory. Those of one row a sample lie in RAM or, with `--buffers mmap`,
in a file of the run's folder; their size is printed first, and a run that cannot fit them does not
start.
"""
SETTINGS = """\
# Settings of a Run

Written by `make docs` from the records in `commsweep/config`. A Run is these settings and nothing
else: it is hashed whole, and two Runs are the same exactly when all are equal. Change one by its
dotted name, as in `commsweep run digits fwd.compressor.kind=topk`; an unknown name or value is an
error that says the nearest valid one. A section that may be absent is opened by naming one of its
settings, and closed by `SECTION=null`.
"""


def pages() -> dict[str, str]:
    """The generated pages by file name."""
    return {"compressors.md": compressors(), "settings.md": settings()}


def compressors() -> str:
    """Every compressor and feedback, of boundaries and of gradients."""
    crossing, exchanged = by_kind(CompressorSpec), by_kind(GradientCompressor)
    also = {kind: one for kind, one in exchanged.items() if kind not in crossing}
    both = ", ".join(f"`{kind}`" for kind in exchanged if kind in crossing)
    return "\n".join(
        [
            COMPRESSORS,
            "## Compressors of a boundary\n",
            _table(crossing, costs=True),
            "\n## Error feedback of a boundary\n",
            _table(by_kind(FeedbackSpec)),
            "",
            MEMORIES,
            "## Compressors of weight gradients\n",
            f"{both}, and:\n",
            _table(also, costs=True),
            "\n## Error feedback of weight gradients\n",
            _table(by_kind(GradientFeedback)),
            "\n## Schedules of gradient compression\n",
            _table(
                {_tag(member): member for member in members(Gradients.model_fields["schedule"])}
            ),
            "",
        ]
    )


def _table(kinds: dict[str, Any], costs: bool = False) -> str:
    more = ["when to use it", "bytes"] if costs else []
    rows = []
    for kind, spec in kinds.items():
        said = [spec.use, spec.cost] if costs else []
        rows.append([f"`{kind}`", _said(spec), *said, _parameters(spec)])
    return _markdown(["kind", "what it does", *more, "parameters"], rows)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_cell(part) for part in row) + " |")
    return "\n".join(lines)


def _said(owner: type[Spec]) -> str:
    """A record's docstring on one line."""
    return " ".join((owner.__doc__ or "").split())


def _parameters(owner: type[Spec]) -> str:
    own = [
        f"`{name}={shown(field.get_default())}`"
        for name, field in owner.model_fields.items()
        if name not in ("kind", "name")
    ]
    return ", ".join(own) or "-"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _tag(owner: type[Spec]) -> str:
    return str(get_args(owner.model_fields["kind"].annotation)[0])


def settings() -> str:
    """Every setting of a Run by section; compressors and feedbacks have a page of their own."""
    out = [SETTINGS, "## The run itself\n", _fields(Run, plain=True), ""]
    for name, field in Run.model_fields.items():
        for owner in members(field):
            if owner in (Links,) or name == "bwd":
                continue
            kind = f" {field.discriminator}={kind_of(owner)}" if field.discriminator else ""
            title = {"fwd": "`fwd`, `bwd`"}.get(name, f"`{name}`{kind}")
            out += [f"## {title}\n", _doc(owner), "", _fields(owner), ""]
            for part, inner in owner.model_fields.items():
                if get_origin(inner.annotation) is dict and members(inner):
                    out += [
                        f"### `{name}.{part}.NAME`\n",
                        _doc(members(inner)[0]),
                        "",
                        _fields(members(inner)[0]),
                        "",
                    ]
    rules = [[rule.first, rule.second, rule.why, rule.mend] for rule in EXCLUSIONS]
    out += [
        "## What does not go together\n",
        _markdown(["section", "with", "why", "instead"], rules),
    ]
    return "\n".join([*out, ""])


def _doc(owner: type[Spec]) -> str:
    return "\n".join(line.strip() for line in (owner.__doc__ or "").strip().split("\n"))


def _fields(owner: type[Spec], plain: bool = False) -> str:
    rows = []
    for name, field in owner.model_fields.items():
        if plain and members(field):
            continue
        default: Any = (
            "" if members(field) or field.is_required() else f"`{shown(field.get_default())}`"
        )
        said = (
            said_of(field)
            if not members(field) or len(members(field)) == 1
            else "see [compressors](compressors.md)"
        )
        rows.append(f"| `{name}` | {default} | {_cell(said)} |")
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def main() -> None:
    """Write the pages."""
    folder = Path(__file__).resolve().parent.parent.parent / "docs" / "reference"
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

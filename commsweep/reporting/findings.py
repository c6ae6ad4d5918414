"""The page of findings, written from the recorded verdicts: question, answer, effects, figure,
command, limits.

A finding names the claims that answer it and where their results lie (a folder that `commsweep
report` wrote, with claims.json in it); answers, numbers and n come from there, so the page cannot
say what the rows do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commsweep.errors import UserError
from commsweep.reporting.claim import CONTRADICTED, NOT_ENOUGH, NOT_EVALUABLE, SUPPORTED, UNDECIDED
from commsweep.store import read_json

# What a claim's verdict is called; a claim of several effects is contradicted by any of them.
ANSWERS = {
    SUPPORTED: "Supported",
    CONTRADICTED: "Contradicted",
    UNDECIDED: "Undecided",
    NOT_ENOUGH: "Not enough runs",
    NOT_EVALUABLE: "Not evaluable",
}


@dataclass(frozen=True)
class Finding:
    """A question and the claims that answer it."""

    key: str
    question: str
    claims: tuple[tuple[str, str], ...]  # (folder of results, name of a claim)
    command: str  # that repeats it
    limits: str  # what it does not say
    figure: str = ""  # below the results
    alt: str = ""


def page(findings: list[Finding], results: Path, link: str = "results") -> str:
    """The whole page; `link`: the way from it to the results. Raises UserError when a claim is not
    recorded.
    """
    known: dict[str, dict[str, Any]] = {}
    lines = [
        "# What was found",
        "",
        "Written by `commsweep findings` from the recorded verdicts; each leads to its runs "
        "(rows.csv beside it). Verdicts hold at 5 % for all effects of a report together "
        "(Holm), also where seeds were added because a verdict asked for them; intervals are 95 "
        "% each. What did not decide is listed too. A verdict speaks for its model and data "
        "only.",
        "",
    ]
    told = [
        [(folder, name, _claim(known, results, folder, name)) for folder, name in finding.claims]
        for finding in findings
    ]
    lines += _overview(findings, told)
    for finding, claims in zip(findings, told, strict=True):
        lines += [f"## {_heading(finding)}", ""]
        for folder, name, claim in claims:
            lines.append(
                f"- **{ANSWERS[claim['verdict']]}** ({name}, "
                f"[{folder}]({link}/{folder}/claims.md)): {claim['statement']}"
            )
            lines += [f"  - {effect['said']}: {effect['judged']}" for effect in claim["effects"]]
        if finding.figure:
            lines += ["", f'<img src="{link}/{finding.figure}" width="640" alt="{finding.alt}">']
        lines += ["", f"Repeat: `{finding.command}`", "", f"Not said: {finding.limits}", ""]
    return "\n".join(lines)


def _heading(finding: Finding) -> str:
    return f"{finding.key}. {finding.question}"


def _overview(
    findings: list[Finding], told: list[list[tuple[str, str, dict[str, Any]]]]
) -> list[str]:
    """Which claims answer which way, a line a question."""
    lines = ["| question | supported | contradicted | undecided |", "|---|---|---|---|"]
    for finding, claims in zip(findings, told, strict=True):
        places = {folder for folder, _, _ in claims}
        cells = []
        for wanted in ((SUPPORTED,), (CONTRADICTED,), (UNDECIDED, NOT_ENOUGH, NOT_EVALUABLE)):
            names = [
                name if len(places) == 1 else f"{name} ({folder})"
                for folder, name, claim in claims
                if claim["verdict"] in wanted
            ]
            cells.append("; ".join(names))
        kept = "".join(one for one in _heading(finding).lower() if one.isalnum() or one in " -_")
        lines.append(f"| [{_heading(finding)}](#{kept.replace(' ', '-')}) | {' | '.join(cells)} |")
    return [*lines, ""]


def _claim(
    known: dict[str, dict[str, Any]], results: Path, folder: str, name: str
) -> dict[str, Any]:
    if folder not in known:
        try:
            told = read_json(results / folder / "claims.json")
        except FileNotFoundError:
            raise UserError(
                f"'{results / folder}' has no claims.json: write it with commsweep report "
                f"{folder} --out {results / folder}"
            ) from None
        known[folder] = {claim["claim"]: claim for claim in told["claims"]}
    if name not in known[folder]:
        raise UserError(
            f"'{results / folder}' has no claim {name} (it has: {', '.join(known[folder])})"
        )
    return known[folder][name]

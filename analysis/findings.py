"""The page of findings, written from the recorded verdicts: question, answer, effects, figure, command, limits.

A finding names the claims that answer it and where their results lie (a folder that `commsweep report` wrote, with
claims.json in it); answers, numbers and n come from there, so the page cannot say what the rows do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commsweep.analysis.claim import CONTRADICTED, NOT_ENOUGH, NOT_EVALUABLE, SUPPORTED, UNDECIDED
from commsweep.experiments.errors import UserError
from commsweep.experiments.store import read_json

ANSWERS = {SUPPORTED: "Yes", CONTRADICTED: "No", UNDECIDED: "Not decided", NOT_ENOUGH: "Not enough runs",
           NOT_EVALUABLE: "Not evaluable"}


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
    """The whole page; `link`: the way from it to the results. Raises UserError when a claim is not recorded."""
    known: dict[str, dict[str, Any]] = {}
    lines = ["# What was found", "", "Written by `commsweep findings` from the recorded verdicts; each leads to its "
             "runs (rows.csv beside it). Verdicts hold at 5 % for all effects of a report together (Holm); intervals "
             "are 95 % each. What did not decide is listed too. A verdict speaks for its model and data only.", ""]
    for one in findings:
        lines += [f"## {one.key}. {one.question}", ""]
        for folder, name in one.claims:
            claim = _claim(known, results, folder, name)
            lines.append(f"- **{ANSWERS[claim['verdict']]}** ({name}, [{folder}]({link}/{folder}/claims.md)): "
                         f"{claim['statement']}")
            lines += [f"  - {effect['said']}: {effect['judged']}" for effect in claim["effects"]]
        if one.figure:
            lines += ["", f'<img src="{link}/{one.figure}" width="640" alt="{one.alt}">']
        lines += ["", f"Repeat: `{one.command}`", "", f"Not said: {one.limits}", ""]
    return "\n".join(lines)


def _claim(known: dict[str, dict[str, Any]], results: Path, folder: str, name: str) -> dict[str, Any]:
    if folder not in known:
        try:
            told = read_json(results / folder / "claims.json")
        except FileNotFoundError:
            raise UserError(f"'{results / folder}' has no claims.json: write it with commsweep report "
                            f"{folder} --out {results / folder}") from None
        known[folder] = {claim["claim"]: claim for claim in told["claims"]}
    if name not in known[folder]:
        raise UserError(f"'{results / folder}' has no claim {name} (it has: {', '.join(known[folder])})")
    return known[folder][name]

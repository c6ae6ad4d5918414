"""The page of findings, written from the recorded verdicts: question, answer, figure, effects,
command, limits.

A finding names the claims that answer it and where their results lie (a folder that `commsweep
report` wrote, with claims.json in it). Numbers, n, scale and verdicts come from there, those in the
words of an answer too, so the page cannot say what the rows do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commsweep.errors import UserError
from commsweep.reporting.claim import EXPLORED, shown
from commsweep.reporting.statistics import LEVEL, Region
from commsweep.store import read_json

Told = dict[str, Any]  # a claim, as claims.json has it


@dataclass(frozen=True)
class Finding:
    """A question and the claims that answer it."""

    key: str
    question: str
    claims: tuple[tuple[str, str], ...]  # (folder of results, name of a claim)
    command: str  # that repeats it
    limits: str  # what it does not say
    figure: str = ""
    alt: str = ""
    # In plain words. {folder/claim/2} is the mean of that claim's third effect, without its sign;
    # {folder/worth/setting} what a setting keeps of its message's worth.
    answer: str = ""
    overturn: str = ""  # what would; every finding says so


def page(findings: list[Finding], results: Path, link: str = "results") -> str:
    """The whole page; `link`: the way from it to the results. Raises UserError when a claim is not
    recorded.
    """
    claims_by_folder: dict[str, dict[str, Told]] = {}
    page_lines = []
    for finding in findings:
        page_lines.append(
            [
                (folder, _claim(claims_by_folder, results, folder, name))
                for folder, name in finding.claims
            ]
        )
    lines = [
        "# What was found",
        "",
        "Written by `commsweep findings` from the recorded verdicts; each leads to its runs "
        "(rows.csv beside it). An effect is a difference of test accuracies in points, or of "
        "test losses in nats, paired by seed. Verdicts hold at 5 % for all effects of a report "
        "together, and the interval beside a verdict gave it. What did not decide is listed too. "
        "A finding speaks for its model and data only.",
        "",
        "| question | answer |",
        "|---|---|",
    ]
    for finding, claims in zip(findings, page_lines, strict=True):
        anchor = "".join(
            character
            for character in _heading(finding).lower()
            if character.isalnum() or character in " -_"
        )
        answer = _answer(finding, claims_by_folder, results) or _counts(claims)
        lines.append(f"| [{_heading(finding)}](#{anchor.replace(' ', '-')}) | {answer} |")
    for finding, claims in zip(findings, page_lines, strict=True):
        lines += ["", f"## {_heading(finding)}", ""]
        if finding.answer:
            lines += [f"**{_answer(finding, claims_by_folder, results)}**", ""]
        if finding.figure:
            lines += [f'<img src="{link}/{finding.figure}" width="640" alt="{finding.alt}">', ""]
        for folder, claim in claims:
            lines += _section(folder, claim, link)
        lines.append(f"Repeat: `{finding.command}`")
        lines += ["", f"Not said: {finding.limits}"]
        if finding.overturn:
            lines += ["", f"It would be overturned by {finding.overturn}"]
    return "\n".join(lines) + "\n"


def _section(folder: str, claim: Told, link: str) -> list[str]:
    """A claim with its effects as a table."""
    scale = f" {claim['scale']}." if claim.get("scale") else ""
    lines = [
        f"{claim['statement']} **{_capital(claim['answer'])}** ({claim['claim']}, "
        f"{claim.get('origin', EXPLORED)}, [{folder}]({link}/{folder}/claims.md)).{scale}",
        "",
        "| effect | claimed | mean [95 %, or as it says] | n | verdict |",
        "|---|---|---|---|---|",
    ]
    for effect in claim["effects"]:
        level = effect.get("level", LEVEL)
        number = shown(effect["values"], effect["interval"], effect["digits"], level)
        lines.append(
            f"| {effect['what']} | {_region(effect)} | {number} "
            f"| {len(effect['values'])} | {effect['verdict']} |"
        )
    return [*lines, ""]


def _region(effect: Told) -> str:
    return Region(effect["above"], effect["below"], effect["within"]).text()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _heading(finding: Finding) -> str:
    return f"{finding.key}. {finding.question}"


def _counts(claims: list[tuple[str, Told]]) -> str:
    """Return how many effects of all these claims hold."""
    verdicts = [effect["verdict"] for _, claim in claims for effect in claim["effects"]]
    held, failed = verdicts.count("supported"), verdicts.count("contradicted")
    sentences = [f"{held} of {len(verdicts)} effects as claimed", f"{failed} otherwise"]
    if undecided := len(verdicts) - held - failed:
        sentences.append(f"{undecided} undecided")
    return ", ".join(sentences)


def _answer(finding: Finding, claims_by_folder: dict[str, dict[str, Told]], results: Path) -> str:
    """The answer with its numbers, which are those of recorded effects."""
    pieces = finding.answer.split("{")
    out = pieces[0]
    for piece in pieces[1:]:
        reference, _, text_after = piece.partition("}")
        folder, name, field = reference.split("/", 2)
        if name == "worth":
            out += _worth(results, folder, field) + text_after
            continue
        number, _, unit = field.partition("/")
        effect = claims_by_folder[folder][name]["effects"][int(number)]
        out += _number(effect, unit) + text_after
    return out


def _number(effect: Told, unit: str) -> str:
    """An effect without its sign, its interval and n: "0.70 nats ([0.68, 0.71], n = 3)"; that it
    is undecided where it is.
    """
    mean = math.fsum(effect["values"]) / len(effect["values"])
    sign, digits = (1 if mean >= 0 else -1), 1 if effect["digits"] == 1 else 2
    number = f"{sign * mean:.{digits}f} {unit}".rstrip()
    notes = []
    if effect["interval"]:
        low, high = sorted(sign * end for end in effect["interval"])
        notes.append(f"[{low:.{digits}f}, {high:.{digits}f}]")
    notes.append(f"n = {len(effect['values'])}")
    if effect["verdict"] == "undecided":
        notes.append("undecided")
    return f"{number} ({', '.join(notes)})"


def _worth(results: Path, folder: str, setting: str) -> str:
    worth = read_json(results / folder / "claims.json").get("worth", {})
    if setting not in worth:
        raise UserError(
            f"'{results / folder / 'claims.json'}' says of no setting '{setting}' what it keeps; "
            "commsweep report writes it anew"
        )
    return str(worth[setting])


def _claim(
    claims_by_folder: dict[str, dict[str, Any]], results: Path, folder: str, name: str
) -> dict[str, Any]:
    if folder not in claims_by_folder:
        try:
            claims = read_json(results / folder / "claims.json")
        except FileNotFoundError:
            raise UserError(
                f"'{results / folder}' has no claims.json: write it with commsweep report "
                f"{folder} --out {results / folder}"
            ) from None
        claims_by_folder[folder] = {claim["claim"]: claim for claim in claims["claims"]}
    if name not in claims_by_folder[folder]:
        raise UserError(
            f"'{results / folder}' has no claim {name} (it has: "
            f"{', '.join(claims_by_folder[folder])})"
        )
    return claims_by_folder[folder][name]

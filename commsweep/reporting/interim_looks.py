"""Looks at the verdicts of a sweep, recorded in the store that has its runs.

Who adds seeds because a verdict is undecided looks again, and errs more often unless looks are
counted. A look is a state of an effect whose verdict somebody was shown: the number of values it
had. How many looks there will be is registered before the first one (`sweep launch --looks`), and
is one where nothing is registered. `claims.json` of a report keeps all of it, so that rows which go
back into a store bring their looks along, and the papers that their report spoke of: other claims
would be other looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commsweep.errors import UserError
from commsweep.reporting.claim import SWEEP, Claim, Looked
from commsweep.store import Store, read_json, write_json

Recorded = dict[tuple[str, str], Looked]


def read(store: str | Path, sweep: str) -> Recorded:
    """The looks that a store has recorded; none of a sweep that nobody has looked at."""
    return read_content(_content(store, sweep))


def register(store: str | Path, sweep: str, count: int) -> None:
    """Record how many looks there will be, before the first. Raises UserError after it."""
    recorded = read(store, sweep)
    before = recorded.get(SWEEP, Looked([])).registered
    if before != count and set(recorded) - {SWEEP}:
        raise UserError(
            f"--looks {count}: the verdicts of '{sweep}' have been looked at already; looks are "
            "registered before the first one"
        )
    recorded[SWEEP] = Looked([], count)
    _write(store, sweep, recorded, papers(store, sweep, ()))


def _content(store: str | Path, sweep: str) -> dict[str, Any]:
    try:
        return read_json(_path(store, sweep), "delete it, and looks count from one again")
    except FileNotFoundError:
        return {}


ALL = ("all",)  # papers, whatever an adopted report spoke of


def papers(store: str | Path, sweep: str, named: Sequence[str]) -> tuple[str, ...]:
    """Return the papers to speak of: those asked for, else those of the report that the rows were
    adopted with; none for all.
    """
    if named:
        return () if tuple(named) == ALL else tuple(named)
    return tuple(_content(store, sweep).get("papers", ()))


def note(store: str | Path, sweep: str, claims: list[Claim]) -> None:
    """Record that somebody is shown these verdicts. Looks that other claims had stay."""
    recorded = read(store, sweep)
    for claim in claims:
        for effect in claim.effects:
            if effect.looks:
                recorded[claim.name, effect.what] = Looked(effect.looks, effect.registered)
    _write(store, sweep, recorded, papers(store, sweep, ()))


def take(store: str | Path, sweep: str, claims_json: Path) -> None:
    """Record the looks of a report that was written elsewhere, and its papers; where both know an
    effect, the looks of whoever looked more often.
    """
    try:
        content = read_json(claims_json, "delete it, and commsweep report writes it anew")
    except FileNotFoundError:
        return
    if content.get("sweep", sweep) != sweep:  # another one's report lies there
        return
    adopted = read_content(content)
    recorded = read(store, sweep)
    for key, interim in adopted.items():
        if key not in recorded or len(interim.seeds) > len(recorded[key].seeds):
            recorded[key] = interim
    _write(store, sweep, recorded, content.get("papers") or papers(store, sweep, ()))


def read_content(content: dict[str, Any]) -> Recorded:
    """The looks in the JSON of a report, or of a store. Raises UserError when they are none."""
    recorded: Recorded = {}
    for claim in content.get("claims", ()):
        for effect in claim["effects"]:
            interim = effect.get("looks", [])
            rising = all(isinstance(n, int) and n > 0 for n in interim)
            if not isinstance(interim, list) or not rising:
                raise UserError(
                    f"looks of '{effect['what']}' are {interim!r}, and must be numbers of seeds; "
                    "write the report anew"
                )
            # before looks were registered every one of them was counted from the first on
            registered = effect.get("registered", max(1, len(interim)))
            if interim:
                recorded[claim["claim"], effect["what"]] = Looked(interim, registered)
    if "registered" in content:
        recorded[SWEEP] = Looked([], content["registered"])
    return recorded


def _write(store: str | Path, sweep: str, recorded: Recorded, papers_: Sequence[str]) -> None:
    claims: dict[str, list[dict[str, Any]]] = {}
    for (claim, effect_name), looked in sorted(recorded.items()):
        if (claim, effect_name) != SWEEP:
            effect = {"what": effect_name, "looks": looked.seeds, "registered": looked.registered}
            claims.setdefault(claim, []).append(effect)
    content: dict[str, Any] = {
        "sweep": sweep,
        "claims": [{"claim": claim, "effects": effects} for claim, effects in claims.items()],
    }
    if papers_:
        content["papers"] = list(papers_)
    if SWEEP in recorded:
        content["registered"] = recorded[SWEEP].registered
    if claims or papers_ or SWEEP in recorded:
        write_json(_path(store, sweep), content)


def _path(store: str | Path, sweep: str) -> Path:
    return Store(store, create=False).root / "looks" / f"{sweep}.json"

"""A codec's card: what was found about it, as a record, as text and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from matplotlib.figure import Figure

from commsweep.reporting.claim import (
    CONTRADICTED,
    MIN_SEEDS,
    SUPPORTED,
    Claim,
    Effect,
    adjust,
    shown,
)
from commsweep.reporting.style import legend, logarithmic, look, plt, size, styled
from commsweep.reporting.table import Cell, Table
from commsweep.reporting.words import without_empty
from commsweep.reporting.worth import Kept
from commsweep.scoring import ROLES
from commsweep.scoring.laws import Law
from commsweep.scoring.samples import Summary
from commsweep.scoring.speed import Speed
from commsweep.scoring.training import Outcome
from commsweep.store import finite

# A card's limits, printed with it.
LIMITS = (
    "The trainings are small, of one architecture each and with few seeds. A larger model, or a "
    "longer training, may rank two codecs the other way."
)


@dataclass
class Card:
    """The findings about one codec in one role.

    rival: the shipped codec of at most its bytes that ranks first on the role's messages. fastest:
    the fastest shipped one of at most its bytes. missing: what was not trained, and why.
    """

    codec: str
    role: str
    laws: list[Law]
    messages: Summary
    rival: Summary
    speed: Speed
    fastest: Speed | None
    outcomes: list[Outcome] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[Law]:
        """Return the laws that do not hold."""
        return [law for law in self.laws if not law.holds]

    def record(self) -> dict[str, Any]:
        """Return the card for programs: what is no number is null."""
        return finite(self._record())

    def _record(self) -> dict[str, Any]:
        return {
            "codec": self.codec,
            "role": self.role,
            "laws": [asdict(law) for law in self.laws],
            "messages": asdict(self.messages),
            "rival": asdict(self.rival),
            "speed": asdict(self.speed),
            "fastest": asdict(self.fastest) if self.fastest else None,
            "training": [_record(outcome) for outcome in self.outcomes],
            "missing": self.missing,
            "verdicts": self.verdicts(),
        }

    def verdicts(self) -> list[str]:
        """Return a verdict for each training, the one of the least worth first."""
        if self.broken:
            return [f"breaks {len(self.broken)} of {len(self.laws)} laws: no verdict"]
        return [verdict(outcome) for outcome in self._harder_first()]

    def _harder_first(self) -> list[Outcome]:
        return sorted(self.outcomes, key=lambda outcome: outcome.kept.percent)

    def markdown(self) -> str:
        """Return the card for people."""
        sections = [f"## {self.codec} as {self.role}: {ROLES[self.role]}", *self.verdicts()]
        sections += [f"Not trained: {reason}" for reason in self.missing]
        if self.outcomes:
            sections.append(self._trained().markdown())
        sections += [
            self._messages().markdown(),
            self._speeds().markdown(),
            self._laws().markdown(),
        ]
        return "\n\n".join(section.rstrip("\n") for section in sections) + "\n"

    def _trained(self) -> Table:
        rows: list[list[Cell | str]] = []
        for outcome in self._harder_first():
            setup = outcome.setup
            rows.append([setup.name, "nothing", "0 %", "0 %", setup.floor])
            if outcome.rival_kept is not None and outcome.rival_share is not None:
                share = percent(outcome.rival_share)
                rows.append([setup.name, outcome.rival, share, outcome.rival_kept.text(), ""])
            share = percent(outcome.share)
            rows.append([setup.name, outcome.codec, share, outcome.kept.text(), ""])
            rows.append([setup.name, "dense", "100 %", "100 %", ""])
        seeds = max((outcome.kept.n for outcome in self.outcomes), default=0)
        title = f"Worth kept in training: 0 % is the floor, 100 % is dense (n = {seeds})"
        header = ["training", "codec", "bytes of dense", "worth kept [95 %]", "where nothing is"]
        return Table("training", title, header, rows)

    def _messages(self) -> Table:
        summaries = self.messages, self.rival
        header = ["codec", "bytes of float32", "error", "bias [interval]", "cosine", "bits a byte"]
        header += ["worth kept, forecast"]
        rows: list[list[Cell | str]] = [
            [
                summary.codec,
                percent(summary.share),
                f"{summary.error:.3f}",
                summary.bias_text,
                f"{summary.cosine:.3f}",
                f"{summary.entropy:.2f}",
                summary.worth,
            ]
            for summary in summaries
        ]
        title = f"Real messages of three networks, early and late: {self.role}"
        return Table("messages", title, *without_empty(header, rows))

    def _speeds(self) -> Table:
        table = Table(
            "speed",
            "Speed: copies of the same numbers that a message takes, through its bytes",
            ["codec", "encode", "decode", "bytes of float32"],
        )
        for speed in (self.speed, self.fastest):
            if speed is not None:
                share = percent(speed.share)
                table.rows.append(
                    [speed.codec, f"{speed.encode:.1f}", f"{speed.decode:.1f}", share]
                )
        return table

    def _laws(self) -> Table:
        rows: list[list[Cell | str]] = [
            [law.name, "holds" if law.holds else "BROKEN", law.note] for law in self.laws
        ]
        return Table("laws", "Laws", ["law", "", "what was seen"], rows)


def comparison(cards: Sequence[Card]) -> list[Table]:
    """Return a table for each role with several codecs, fewest bytes first: their messages, and
    what each training keeps.
    """
    tables = []
    for role in dict.fromkeys(card.role for card in cards):
        role_cards = [card for card in cards if card.role == role]
        role_cards.sort(key=lambda card: (card.messages.share, card.codec))
        if len(role_cards) < 2:
            continue
        names = dict.fromkeys(
            outcome.setup.name for card in role_cards for outcome in card.outcomes
        )
        rows: list[list[Cell | str]] = []
        for card in role_cards:
            kept_by_name = {outcome.setup.name: outcome.kept.text() for outcome in card.outcomes}
            message = card.messages
            rows.append(
                [
                    card.codec,
                    percent(message.share),
                    *(kept_by_name.get(name, "") for name in names),
                    f"{message.error:.3f}",
                    message.bias_text,
                    f"{card.speed.both:.3g}",
                    "BROKEN" if card.broken else "hold",
                ]
            )
        header = ["codec", "bytes of float32", *(f"worth kept, {name}" for name in names)]
        header += ["error", "bias", "copies", "laws"]
        title = f"Codecs as {role}: 0 % is nothing sent, 100 % is dense"
        tables.append(Table("comparison", title, header, rows))
    return tables


def percent(share: float) -> str:
    """Return a share for people: "7.8 %"."""
    return f"{100 * share:.3g} %"


def verdict(outcome: Outcome) -> str:
    """Return where a codec stands beside its rival in one training."""
    where = f"{outcome.setup.name}: "
    if not outcome.kept.tells:
        return f"{where}this training cannot tell, nothing sent is as good as dense"
    if not outcome.kept.ranks:
        return f"{where}{outcome.kept.text()}: no better than without the message"
    if outcome.kept.n > 1 and outcome.kept.high is not None and outcome.kept.high < 0:
        return f"{where}worse than sending nothing, worth kept {outcome.kept.text()}"
    lead = outcome.lead
    if lead is None:
        return f"{where}keeps {outcome.kept.text()} of the worth; its rival was not run"
    budget = "which sends at most its bytes"
    if outcome.rival_share is not None and outcome.rival_share > 1.01 * outcome.share:
        budget = "the shipped codec of the fewest bytes, which are more than its own"
    points = f"{shown(lead.values, lead.interval, 0, lead.level)} points, n = {len(lead.values)}"
    words = {SUPPORTED: "better than", CONTRADICTED: "worse than"}
    if (word := words.get(lead.verdict)) is not None:
        return f"{where}{word} {outcome.rival}, {budget}: {points}"
    return f"{where}undecided against {outcome.rival}, {budget}: {points}{_needed(lead)}"


def _needed(lead: Effect) -> str:
    if len(lead.values) < MIN_SEEDS:
        return f"; {MIN_SEEDS} seeds are the least that decide"
    if lead.seeds is None:
        return "; no number of seeds up to the limit would decide"
    return f"; about {lead.seeds} seeds would decide"


def judge(cards: Sequence[Card]) -> None:
    """Adjust the comparisons of all cards for their number, so that trying many codes earns nothing
    (Holm).
    """
    leads = [
        outcome.lead
        for card in cards
        for outcome in card.outcomes
        if outcome.lead is not None and outcome.kept.ranks
    ]
    adjust([Claim("score", "a codec keeps more than its rival", leads)])


def _record(outcome: Outcome) -> dict[str, Any]:
    lead = outcome.lead
    return {
        "setup": outcome.setup.name,
        "control": outcome.setup.floor,
        "rival": outcome.rival,
        "share_of_dense_bytes": outcome.share,
        "worth_kept": _worth(outcome.kept),
        "rival_share_of_dense_bytes": outcome.rival_share,
        "rival_worth_kept": _worth(outcome.rival_kept),
        "lead_points": lead.values if lead else None,
        "lead_interval": lead.interval if lead else None,
        "lead_level": lead.level if lead else None,
        "comparisons": lead.tests if lead else None,
        "verdict": verdict(outcome),
    }


def _worth(worth: Kept | None) -> dict[str, Any] | None:
    return asdict(worth) if worth is not None else None


@styled
def figure(cards: Sequence[Card]) -> Figure:
    """Worth kept against bytes for each training, or error against bytes where nothing was trained.
    Bars are 95 % intervals.
    """
    trainings: dict[str, list[Outcome]] = {}
    for card in cards:
        for outcome in card.outcomes:
            name = f"{card.role}: {outcome.setup.name}"
            trainings.setdefault(name, []).append(outcome)
    if not trainings:
        return _errors(cards)
    drawn, axes = plt.subplots(
        1, len(trainings), figsize=size(min(2, len(trainings)), 2.6), squeeze=False
    )
    for axis, (name, outcomes) in zip(axes[0], trainings.items(), strict=True):
        axis.axhline(100, color="black", lw=0.7, label="dense")
        axis.axhline(0, color="0.5", lw=0.7, ls="--", label="nothing sent")
        for codec, (share, worth) in _points(outcomes).items():
            errors = None
            if worth.low is not None and worth.high is not None:
                errors = [[max(0, worth.percent - worth.low)], [max(0, worth.high - worth.percent)]]
            axis.errorbar(
                [100 * share],
                [worth.percent],
                yerr=errors,
                label=codec,
                **look(codec, ls="none"),
            )
        logarithmic(axis.xaxis)
        axis.set(title=name, xlabel="bytes, % of dense", ylabel="worth kept, %")
    legend(drawn)
    return drawn


def _points(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, Kept]]:
    """Return (share of the bytes, worth kept) of codecs and rivals, each once."""
    points: dict[str, tuple[float, Kept]] = {}
    for outcome in outcomes:
        points[outcome.codec] = outcome.share, outcome.kept
        if outcome.rival_kept is not None and outcome.rival_share is not None:
            points.setdefault(outcome.rival, (outcome.rival_share, outcome.rival_kept))
    return points


def _errors(cards: Sequence[Card]) -> Figure:
    roles = list(dict.fromkeys(card.role for card in cards))
    drawn, axes = plt.subplots(1, len(roles), figsize=size(min(2, len(roles)), 2.6), squeeze=False)
    for axis, role in zip(axes[0], roles, strict=True):
        shown_: dict[str, Summary] = {}
        for card in cards:
            if card.role == role:
                shown_[card.codec] = card.messages
                shown_.setdefault(card.rival.codec, card.rival)
        for codec, summary in shown_.items():
            mark = look(codec, ls="none")
            axis.plot([100 * summary.share], [summary.error], label=codec, **mark)
        logarithmic(axis.xaxis)
        axis.set(title=role, xlabel="bytes, % of float32", ylabel="error")
    legend(drawn)
    return drawn

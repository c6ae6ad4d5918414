"""The board's page, its figure of fronts, and a card for each entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from commsweep.reporting.claim import MIN_SEEDS, shown
from commsweep.reporting.figure import COLUMN, logarithmic, save, styled
from commsweep.reporting.table import Cell, Table
from commsweep.scoring import ROLES, choice_page
from commsweep.scoring.board import (
    CONFIRMED,
    LONG,
    REPEATED,
    SHORT,
    Board,
    Entry,
    Standing,
    judge,
    standings,
    trainings,
)
from commsweep.scoring.card import percent
from commsweep.scoring.training import Setup, worth_kept

LIMITS = (
    "What it cannot tell: the trainings are a nano GPT-2 and a small ResNet, short, and of one "
    "architecture each, so that a large model may rank two codecs the other way. Learning rates "
    "are those of the dense training. A rank is overturned by trainings of another model, length "
    "or learning rate in which the order of two codecs is reversed."
)
LEAST_PAIRS = 3  # of a correlation
LOWEST = -30  # percent of worth, where the figure's axis begins
ON_FRONT = "#0072B2"


@dataclass(frozen=True)
class Training:
    """A training of a role, and the standings of the entries in it."""

    setup: Setup
    standings: list[Standing]


def write(board: Board, count: int) -> list[Training]:
    """Write the page, the figure and the cards, and return the recorded trainings."""
    recorded: list[Training] = []
    for role in ROLES:
        for setup in trainings(role, SHORT):
            recorded.append(Training(setup, standings(board, role, setup, count)))
    judge([standing for training in recorded for standing in training.standings])
    recorded = [training for training in recorded if training.standings]
    (board.folder / "README.md").write_text(_page(board, recorded, count), encoding="utf-8")
    if recorded:
        save(fronts(recorded), board.folder, "fronts")
    entered = [(training.setup, training.standings) for training in recorded]
    (board.folder / choice_page.PAGE).write_text(choice_page.page(board, entered), encoding="utf-8")
    cards = board.folder / "cards"
    cards.mkdir(exist_ok=True)
    for old in cards.glob("*.md"):
        old.unlink()
    for entry in board.entries:
        (cards / entry.file_name).write_text(_card(board, entry, recorded), encoding="utf-8")
    return recorded


def _page(board: Board, recorded: Sequence[Training], count: int) -> str:
    sections = [
        "# The board",
        "Codecs side by side in fixed trainings, as [rules](RULES.md) say. Worth kept: 0 % is the "
        "training in which nothing is sent, 100 % is dense, with 95 % intervals.",
        agreement(board, count),
        LIMITS,
    ]
    if recorded:
        sections.append("![Worth kept against bytes, by role and training](fronts.png)")
    for role, text in ROLES.items():
        of_role = [training for training in recorded if training.setup.role == role]
        sections.append(f"## {role}: {text}")
        if not of_role:
            sections.append("No training is recorded yet.")
            continue
        sections += [_ends(board, training.setup, count) for training in of_role]
        sections += [table(board, role, of_role).markdown().rstrip("\n"), _fronts(of_role)]
    sections.append(
        "Written by `commsweep board`. All numbers follow from [rows.csv](rows.csv) and "
        "[measures.json](measures.json)."
    )
    return "\n\n".join(sections) + "\n"


def agreement(board: Board, count: int) -> str:
    """Return how the ranks agree with those of trainings of four times the steps and twice the
    width, as a sentence.
    """
    by_role: dict[str, tuple[list[float], list[float]]] = {}
    for role in ROLES:
        short_worths, long_worths = by_role.setdefault(role, ([], []))
        for short, long in zip(trainings(role, SHORT), trainings(role, LONG), strict=True):
            for entry in board.of_role(role):
                if entry.codec not in REPEATED:
                    continue
                settings = entry.codec, entry.feedback
                pair = [
                    worth_kept(setup, setup.coded(*settings), count, board.score_of)
                    for setup in (short, long)
                ]
                if pair[0] is not None and pair[1] is not None:
                    short_worths.append(pair[0].kept.percent)
                    long_worths.append(pair[1].kept.percent)
    longer = "trainings of four times the steps and twice the width"
    all_short = [worth for short_worths, _ in by_role.values() for worth in short_worths]
    all_long = [worth for _, long_worths in by_role.values() for worth in long_worths]
    if len(all_short) < LEAST_PAIRS:
        return f"Ranks were not yet compared with those of {longer}."
    rank = spearmanr(all_short, all_long).statistic
    roles = []
    for role, (short_worths, long_worths) in by_role.items():
        if len(short_worths) < LEAST_PAIRS:
            roles.append(f"{role} not compared")
        else:
            correlation = spearmanr(short_worths, long_worths).statistic
            roles.append(f"{role} {correlation:.2f} (n = {len(short_worths)})")
    return (
        f"Ranks agree with those of {longer} with a correlation of {rank:.2f} (Spearman, "
        f"n = {len(all_short)} pairs of a codec and a training). By role: {', '.join(roles)}."
    )


def _ends(board: Board, setup: Setup, count: int) -> str:
    """Return what dense and nothing sent reach, as a sentence."""
    dense, control = (board.losses(run, count) for run in (setup.dense, setup.control))
    sign, scale = (1, 1) if setup.unit == "nats" else (-1, 100)
    unit = "nats" if setup.unit == "nats" else "% accuracy"
    values = [sign * scale * sum(losses) / len(losses) for losses in (dense, control) if losses]
    if len(values) < 2:
        return f"{setup.name}: dense or nothing sent is missing."
    return (
        f"{setup.name}: dense {values[0]:.3g} {unit}, nothing sent {values[1]:.3g} ({setup.floor}; "
        f"n = {len(dense)})."
    )


def table(board: Board, role: str, of_role: Sequence[Training]) -> Table:
    """Return the entries of a role, fewest bytes first; standings on a front are bold."""
    by_training = [
        {standing.entry: standing for standing in training.standings} for training in of_role
    ]
    entries = [entry for by_entry in by_training for entry in by_entry]
    rows: list[list[Cell | str]] = []
    for entry in dict.fromkeys(entries):
        row: list[Cell | str] = [f"[{entry.name}](cards/{entry.file_name})"]
        for by_entry in by_training:
            standing = by_entry.get(entry)
            row += ["", ""] if standing is None else [percent(standing.share), _marked(standing)]
        measures = board.measured(entry.codec, role)
        if measures is None:
            row += ["", "", "", ""]
        else:
            message, speed = measures.messages, measures.speed
            row += [f"{message.error:.3f}", message.bias_text, f"{speed.both:.3g}"]
            row.append("BROKEN" if measures.broken else "hold")
        rows.append(row)
    header = ["codec"]
    for training in of_role:
        header += ["bytes", f"worth kept, {training.setup.name}"]
    header += ["error", "bias", "copies", "laws"]
    return Table("board", f"Codecs as {role}; bytes of dense", header, rows)


def _marked(standing: Standing) -> str:
    text, n = standing.worth.text(), standing.worth.n
    text += f", n = {n}" if n < MIN_SEEDS else ""
    if not standing.front:
        return text
    return f"**{text}** confirmed" if standing.confirmed else f"**{text}**"


def _fronts(of_role: Sequence[Training]) -> str:
    """Return which places on the fronts are confirmed, as a sentence."""
    names: list[str] = []
    for training in of_role:
        for standing in training.standings:
            if standing.confirmed:
                names.append(f"{standing.entry.name} over {standing.rival}")
    test = f"p < {CONFIRMED}, after Holm"
    result = f"No place on a front is confirmed ({test})."
    if names:
        result = f"Confirmed ({test}): {', '.join(names)}."
    return f"Bold: keeps more than nothing sent and all entries of at most its bytes. {result}"


def _card(board: Board, entry: Entry, recorded: Sequence[Training]) -> str:
    """Return an entry's card."""
    sections = [f"# {entry.name}"]
    for role in entry.roles:
        sections += [f"## {role}: {ROLES[role]}", _trained(entry, role, recorded)]
        measures = board.measured(entry.codec, role)
        if measures is None:
            sections.append("It encodes all learners' gradients together: no messages of its own.")
            continue
        message, speed = measures.messages, measures.speed
        sections.append(
            f"Real messages: {percent(message.share)} of the bytes of float32, error "
            f"{message.error:.3f}, bias {message.bias_text}, cosine {message.cosine:.3f}, "
            f"{message.entropy:.2f} bits of entropy a byte. Speed: {speed.encode:.1f} copies to "
            f"encode, {speed.decode:.1f} to decode."
        )
        broken = [f"{law.name} ({law.note})" for law in measures.laws if not law.holds]
        total = len(measures.laws)
        sections.append(
            f"Laws broken: {'; '.join(broken)}." if broken else f"All {total} laws hold."
        )
    return "\n\n".join(sections) + "\n"


def _trained(entry: Entry, role: str, recorded: Sequence[Training]) -> str:
    rows: list[list[Cell | str]] = []
    for training in recorded:
        for standing in training.standings:
            if training.setup.role == role and standing.entry == entry:
                share, worth = percent(standing.share), standing.worth.text()
                rows.append([training.setup.name, share, worth, verdict(standing)])
    if not rows:
        return "Not trained yet."
    header = ["training", "bytes of dense", "worth kept [95 %]", "beside the best of its bytes"]
    return Table("trained", "Worth kept in training", header, rows).markdown().rstrip("\n")


def verdict(standing: Standing) -> str:
    """Return where an entry stands beside the best of at most its bytes."""
    if not standing.worth.tells:
        return "this training cannot tell"
    if standing.gain is None:
        return f"no seed in common with {standing.rival}"
    gain = standing.gain
    points = f"{shown(gain.values, gain.interval, 0)} points, n = {len(gain.values)}"
    certain = "no test"
    if gain.adjusted is not None:
        certain = "confirmed" if standing.confirmed else f"p = {gain.adjusted:.2g}"
    return f"{'ahead of' if standing.front else 'behind'} {standing.rival}: {points}, {certain}"


@styled
def fronts(recorded: Sequence[Training]) -> Figure:
    """Worth kept against bytes for each role and training, with the front. Bars are 95 %
    intervals; names are of entries on the front; a triangle stands for an entry below the axis.
    """
    roles = list(dict.fromkeys(training.setup.role for training in recorded))
    drawn, axes = plt.subplots(
        len(roles), 2, figsize=(2 * COLUMN, 2.4 * len(roles)), squeeze=False, sharex=True
    )
    for role, pair in zip(roles, axes, strict=True):
        of_role = [training for training in recorded if training.setup.role == role]
        for training, axis in zip(of_role, pair, strict=False):
            axis.axhline(100, color="black", lw=0.7)
            axis.axhline(0, color="0.5", lw=0.7, ls="--")
            front = [standing for standing in training.standings if standing.front]
            for standing in training.standings:
                _drawn(axis, standing)
            shares = [100 * standing.share for standing in front]
            worths = [standing.worth.percent for standing in front]
            axis.plot(shares, worths, drawstyle="steps-post", color=ON_FRONT, lw=0.8)
            for index, (standing, share, worth) in enumerate(
                zip(front, shares, worths, strict=True)
            ):
                is_right = share > 30
                axis.annotate(
                    standing.entry.name,
                    (share, worth),
                    xytext=(-3 if is_right else 3, 4 if index % 2 else -7),
                    textcoords="offset points",
                    ha="right" if is_right else "left",
                    fontsize=5.5,
                )
            logarithmic(axis.xaxis)
            axis.set(
                title=f"{role}: {training.setup.name}", ylabel="worth kept, %", ylim=(-30, 120)
            )
    for axis in axes[-1]:
        axis.set(xlabel="bytes, % of dense")
    return drawn


def _drawn(axis: Axes, standing: Standing) -> None:
    """Draw an entry and its interval."""
    worth, ink = standing.worth, ON_FRONT if standing.front else "0.6"
    is_low = worth.percent < LOWEST
    if worth.low is not None and worth.high is not None and not is_low:
        axis.plot([100 * standing.share] * 2, [worth.low, worth.high], color=ink, lw=0.8)
    height = LOWEST + 3 if is_low else worth.percent
    axis.plot([100 * standing.share], [height], "v" if is_low else "o", color=ink, ms=3)

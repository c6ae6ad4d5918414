"""The board's page, its figure of fronts, and a card for each entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from commsweep.reporting.claim import CONTRADICTED, MIN_SEEDS, SUPPORTED, Effect, shown
from commsweep.reporting.style import logarithmic, plt, save, size, styled
from commsweep.reporting.table import Cell, Table
from commsweep.reporting.words import without_empty
from commsweep.scoring import ROLES, choice_page
from commsweep.scoring.board import (
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
from commsweep.scoring.training import Setup, Worth, worth_kept

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
        "Codecs side by side in fixed trainings, as [rules](RULES.md) say. Worth kept: 100 % is "
        "dense, 0 % is the floor, with 95 % intervals. The floor is the better of the training in "
        "which nothing is sent and of what is known without a message: letter frequencies, or "
        "guessing. A training that ends no better than without a message has collapsed.",
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
        sections += [table(board, role, of_role).markdown().rstrip("\n")]
        sections += [*_lost(of_role), _leads(of_role)]
    sections.append(
        "Written by `commsweep board`. All numbers follow from [rows.csv](rows.csv) and "
        "[measures.json](measures.json)."
    )
    return "\n\n".join(sections) + "\n"


def agreement(board: Board, count: int) -> str:
    """A sentence: how ranks agree with those of four times the steps and twice the width."""
    longer = "trainings of four times the steps and twice the width"
    sentences, fewest = [], count
    for role in ROLES:
        short_worths: list[float] = []
        long_worths: list[float] = []
        moved: list[str] = []
        for short, long in zip(trainings(role, SHORT), trainings(role, LONG), strict=True):
            pairs = _repeated(board, role, short, long, count)
            short_worths += [pair[0].kept.percent for pair in pairs.values()]
            long_worths += [pair[1].kept.percent for pair in pairs.values()]
            fewest = min([fewest, *(pair[1].kept.n for pair in pairs.values())])
            moved += [f"{name} ({short.name})" for name in _moved(pairs)]
        if len(short_worths) < LEAST_PAIRS:
            continue
        correlation = spearmanr(short_worths, long_worths).statistic
        sentence = f"{role} {correlation:.2f} (n = {len(short_worths)})"
        sentences.append(sentence + (f", changed places: {', '.join(moved)}" if moved else ""))
    if not sentences:
        return f"Ranks were not yet compared with those of {longer}."
    return (
        f"Rank correlation (Spearman) with {longer}, of pairs of a codec and a training, the long "
        f"ones with {fewest} seed{'s' * (fewest != 1)}: {'; '.join(sentences)}."
    )


def _repeated(
    board: Board, role: str, short: Setup, long: Setup, count: int
) -> dict[str, tuple[Worth, Worth]]:
    """The worth that codecs keep in a short training and in its long one, by name."""
    pairs = {}
    for entry in board.of_role(role):
        if entry.codec not in REPEATED:
            continue
        settings = entry.codec, entry.feedback
        worths = [
            worth_kept(setup, setup.coded(*settings), count, board.score_of)
            for setup in (short, long)
        ]
        if worths[0] is not None and worths[1] is not None:
            pairs[entry.name] = worths[0], worths[1]
    return pairs


def _moved(pairs: dict[str, tuple[Worth, Worth]]) -> list[str]:
    """The codecs whose place among these is another one in the long training."""
    orders = [
        sorted(pairs, key=lambda name, at=at: -pairs[name][at].kept.percent) for at in range(2)
    ]
    return [name for name in pairs if orders[0].index(name) != orders[1].index(name)]


def _ends(board: Board, setup: Setup, count: int) -> str:
    """A sentence: the losses of dense, of nothing sent and without a message."""
    dense, control = (board.losses(run, count) for run in (setup.dense, setup.control))
    if not dense or not control:
        return f"{setup.name}: dense or nothing sent is missing."
    sent = sum(control) / len(control)
    without = ""
    if setup.without is not None:
        floor = "nothing sent" if sent < setup.without else setup.ignorant
        without = f", {setup.ignorant} {setup.without:.3g}; the floor is {floor}"
    return (
        f"{setup.name}, nats of test loss: dense {sum(dense) / len(dense):.3g}, nothing sent "
        f"{sent:.3g} ({setup.floor}; n = {len(control)}){without}."
    )


def table(board: Board, role: str, of_role: Sequence[Training]) -> Table:
    """The entries of a role, fewest bytes first, without those that collapsed everywhere; decided
    leads are bold.
    """
    by_training = [
        {standing.entry: standing for standing in training.standings} for training in of_role
    ]
    rows: list[list[Cell | str]] = []
    for entry in _entries(of_role):
        of_entry = [by_entry[entry] for by_entry in by_training if entry in by_entry]
        if not any(standing.worth.ranks for standing in of_entry):
            continue
        row: list[Cell | str] = [f"[{entry.name}](cards/{entry.file_name})"]
        for by_entry in by_training:
            standing = by_entry.get(entry)
            if standing is None:
                row += ["", "", "", ""]
                continue
            row += [percent(standing.share), _marked(standing)]
            row += [_number(standing.error), _number(standing.bias)]
        measures = board.measured(entry.codec, role)
        row.append("" if measures is None else f"{measures.speed.both:.3g}")
        laws = "" if measures is None else "BROKEN" if measures.broken else "hold"
        rows.append([*row, laws])
    header = ["codec"]
    for training in of_role:
        header += ["bytes", f"worth kept, {training.setup.name}", "error", "bias"]
    header += ["copies", "laws"]
    title = f"Codecs as {role}; bytes of dense; error and bias of the messages of the training"
    return Table("board", title, *without_empty(header, rows))


def _entries(of_role: Sequence[Training]) -> list[Entry]:
    """The entries of some trainings, fewest bytes first."""
    shares: dict[Entry, float] = {}
    for training in of_role:
        for standing in training.standings:
            shares.setdefault(standing.entry, standing.share)
    return sorted(shares, key=lambda entry: (shares[entry], entry.name))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _marked(standing: Standing) -> str:
    text, n = standing.worth.text(), standing.worth.n
    text += f", n = {n}" if n < MIN_SEEDS else ""
    return f"**{text}**" if standing.leads else text


def _lost(of_role: Sequence[Training]) -> list[str]:
    """The entries that collapsed or diverged in every training of a role, as a sentence."""
    lost = []
    for entry in _entries(of_role):
        worths = []
        for training in of_role:
            for standing in training.standings:
                if standing.entry == entry:
                    worths.append(standing.worth)
        if not any(worth.ranks for worth in worths):
            lost.append(f"{entry.name} ({', '.join(dict.fromkeys(w.text() for w in worths))})")
    return [f"No worth and no rank: {'; '.join(lost)}."] if lost else []


def _leads(of_role: Sequence[Training]) -> str:
    """A sentence that names the decided leads."""
    leads = []
    for training in of_role:
        for standing in training.standings:
            if standing.leads and standing.gain is not None:
                leads.append(
                    f"{standing.entry.name} over {standing.rival} ({training.setup.name}: "
                    f"{_points(standing.gain)})"
                )
    if not leads:
        return (
            "No lead is decided after Holm for all comparisons of the board: no entry is "
            "distinguishable from the best of at most its bytes."
        )
    undecided = "All other entries are not distinguishable from the best of at most their bytes."
    return (
        "Bold: it is decided that the entry keeps more than nothing sent and than all of at most "
        f"its bytes, in points of worth: {'; '.join(leads)}. {undecided}"
    )


def _points(gain: Effect) -> str:
    return f"{shown(gain.values, gain.interval, 0, gain.level)}, n = {len(gain.values)}"


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
    if not standing.worth.ranks:
        return standing.worth.text()
    if standing.gain is None:
        return f"no seed in common with {standing.rival}"
    words = {SUPPORTED: "better than", CONTRADICTED: "worse than"}
    word = words.get(standing.gain.verdict, "not distinguishable from")
    return f"{word} {standing.rival}: {_points(standing.gain)} points"


HIGHEST = 120.0  # percent of worth that the axis shows
OFFSETS = (4, -8, -15, -22)  # points that names stand above or below their marks, in turn


@styled
def fronts(recorded: Sequence[Training]) -> Figure:
    """Worth kept against bytes for each role and training. Bars are 95 % intervals, with a mark
    where one leaves the axes; coloured are decided leads. An entry is named where none of fewer
    bytes keeps more, decided or not. A triangle stands for one below the axis. Entries that
    collapsed are left out.
    """
    roles = list(dict.fromkeys(training.setup.role for training in recorded))
    drawn, axes = plt.subplots(
        len(roles), 2, figsize=size(2, 2.4 * len(roles)), squeeze=False, sharex=True
    )
    for role, pair in zip(roles, axes, strict=True):
        of_role = [training for training in recorded if training.setup.role == role]
        for training, axis in zip(of_role, pair, strict=False):
            axis.axhline(100, color="black", lw=0.7)
            axis.axhline(0, color="0.5", lw=0.7, ls="--")
            ranked = [standing for standing in training.standings if standing.worth.ranks]
            for standing in ranked:
                _drawn(axis, standing)
            for index, standing in enumerate(_highest(ranked)):
                share = 100 * standing.share
                is_right = share > 30
                axis.annotate(
                    standing.entry.name,
                    (share, standing.worth.percent),
                    xytext=(-3 if is_right else 3, OFFSETS[index % len(OFFSETS)]),
                    textcoords="offset points",
                    ha="right" if is_right else "left",
                    fontsize="x-small",
                )
            if not ranked:
                axis.text(0.5, 0.5, "cannot tell", ha="center", transform=axis.transAxes)
            logarithmic(axis.xaxis)
            axis.set(
                title=f"{role}: {training.setup.name}",
                ylabel="worth kept, %",
                ylim=(LOWEST, HIGHEST),
            )
    for axis in axes[-1]:
        axis.set(xlabel="bytes, % of dense")
    return drawn


def _highest(ranked: Sequence[Standing]) -> list[Standing]:
    """The entries that keep more than the floor and than all before them, which have fewer
    bytes.
    """
    highest: list[Standing] = []
    for standing in ranked:
        if standing.worth.percent > (highest[-1].worth.percent if highest else 0.0):
            highest.append(standing)
    return highest


def _drawn(axis: Axes, standing: Standing) -> None:
    """Draw an entry and its interval."""
    worth, ink = standing.worth, ON_FRONT if standing.leads else "0.6"
    is_low = worth.percent < LOWEST
    if worth.low is not None and worth.high is not None and not is_low:
        x = 100 * standing.share
        axis.plot([x, x], [worth.low, worth.high], color=ink, lw=0.8)
        for end, edge, mark in ((worth.low, LOWEST, "v"), (worth.high, HIGHEST, "^")):
            if (end < edge) == (mark == "v") and end != edge:  # the interval goes on beyond it
                axis.plot([x], [edge], mark, color=ink, ms=3, clip_on=False)
    height = LOWEST + 3 if is_low else worth.percent
    axis.plot([100 * standing.share], [height], "v" if is_low else "o", color=ink, ms=3)

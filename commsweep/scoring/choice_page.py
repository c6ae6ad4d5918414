"""The page "Which codec should I use?": of each role and budget the codec that keeps most."""

from __future__ import annotations

from collections.abc import Sequence

from commsweep.reporting.table import Cell, Table
from commsweep.reporting.worth import Kept
from commsweep.scoring.board import Board, Entry, Standing
from commsweep.scoring.training import Setup

FACTORS = (4, 7, 10, 30)  # times fewer bytes than dense
ENOUGH = 50.0  # percent of worth that the lower end of every interval must reach
PAGE = "which.md"
QUESTIONS = {
    "activations": "Activations, forward between pipeline stages",
    "gradients": "Activation gradients, backward between pipeline stages",
    "learners": "Weight gradients of learners, data-parallel, every step",
}
USES = {
    "activations": (
        "`commsweep run PRESET fwd.compressor=CODEC`; `CompressedStage` in a pipeline of yours."
    ),
    "gradients": (
        "`commsweep run PRESET bwd.compressor=CODEC`. The DDP hook is not for these: it sends "
        "weight gradients."
    ),
    "learners": (
        "`commsweep run PRESET grad.learners=4 grad.exchange=allgather grad.compressor=CODEC`; "
        "`CompressionHook` in DDP."
    ),
}
# An entry, and its standing in each training of a role.
Candidate = tuple[Entry, list[Standing]]


def page(board: Board, standings: Sequence[tuple[Setup, list[Standing]]]) -> str:
    """Return the page. standings: of each recorded training."""
    sections = [
        "# Which codec should I use?",
        "Three kinds of messages, three answers: what is best for one is not for another. Each "
        "table names the codec that keeps most of the messages' worth in its worse training, "
        "within so many times fewer bytes than float32; `is` says how many it has. Worth kept: "
        "100 % is dense, 0 % the floor ([the board](README.md) says which), with 95 % intervals.",
        f"**Unknown** means that no codec keeps {ENOUGH:.0f} % in all trainings that can tell, "
        "with the lower ends of its intervals. Seconds: encoding and decoding of 10^8 numbers on "
        "one core of the machine that wrote this page. No GPU was measured.",
    ]
    for role, question in QUESTIONS.items():
        of_role = [(setup, entered) for setup, entered in standings if setup.role == role]
        sections.append(f"## {question}")
        if not of_role:
            sections.append("Unknown: no training is recorded.")
            continue
        candidates = _candidates(of_role)
        header = ["asked", "codec", "is", *(setup.name for setup, _ in of_role), "seconds"]
        rows = [_row(board, role, factor, candidates) for factor in FACTORS]
        answers = Table(role, f"Worth kept as {role}, n = {_seeds(candidates)}", header, rows)
        sections += [answers.markdown().rstrip("\n"), f"Use: {USES[role]}"]
    sections.append(
        "**Limits.** The trainings are short: a nano GPT-2 of 400 steps and a small ResNet on "
        "digits, at the learning rate of the dense training. The best of some twenty codecs is "
        "named by the seeds that chose it, so expect a little less. Try two or three on your own "
        "training first: [shadow mode](../guide/integrations.md) ranks them without changing it."
    )
    sections.append("Written by `commsweep board`.")
    return "\n\n".join(sections) + "\n"


def _candidates(of_role: Sequence[tuple[Setup, list[Standing]]]) -> list[Candidate]:
    """Return the entries that every training of a role has."""
    first, *further = [{standing.entry: standing for standing in entered} for _, entered in of_role]
    candidates = []
    for entry, standing in first.items():
        if all(entry in by_entry for by_entry in further):
            candidates.append((entry, [standing, *(by_entry[entry] for by_entry in further)]))
    return candidates


def _telling(candidate: Candidate) -> list[Kept]:
    """The worth that it keeps in the trainings that can tell."""
    return [standing.worth for standing in candidate[1] if standing.worth.tells]


def _worst(candidate: Candidate) -> float:
    return min(worth.percent for worth in _telling(candidate))


def _is_ranked(candidate: Candidate) -> bool:
    worths = _telling(candidate)
    return bool(worths) and all(worth.ranks for worth in worths)


def _is_enough(candidate: Candidate) -> bool:
    lows = [worth.low for worth in _telling(candidate)]
    return _is_ranked(candidate) and all(low is not None and low >= ENOUGH for low in lows)


def _row(board: Board, role: str, factor: int, candidates: Sequence[Candidate]) -> list[Cell | str]:
    """Return the line of a budget: the best codec within it, or that there is none."""
    within = [
        candidate
        for candidate in candidates
        if all(standing.share <= 1 / factor for standing in candidate[1])
    ]
    label = f"{factor} times fewer"
    if not within:
        return [label, "unknown: none is so small", "", *[""] * len(candidates[0][1]), ""]
    enough = [candidate for candidate in within if _is_enough(candidate)]
    ranked = [candidate for candidate in within if _is_ranked(candidate)]
    if not ranked:
        return [label, "unknown: all collapse", "", *[""] * len(candidates[0][1]), ""]
    entry, standings = max(enough or ranked, key=_worst)
    name = f"[{entry.name}](cards/{entry.file_name})"
    measures = board.measured(entry.codec, role)
    seconds = measures.speed.seconds if measures is not None else None
    time = "" if seconds is None else f"{seconds:.2g}"
    fewer = f"{1 / max(standing.share for standing in standings):.1f} times"
    worths = [standing.worth.text() for standing in standings]
    return [label, name if enough else f"unknown; nearest: {name}", fewer, *worths, time]


def _seeds(candidates: Sequence[Candidate]) -> int:
    return min(standing.worth.n for _, standings in candidates for standing in standings)

"""When learners compute, wait for each other's word and exchange messages, all with all.

A learner that has computed tells every other that it waits, and may then compute what needs no
message. A message leaves once its sender has told so and has heard the same; with the last one the
next step begins. So nobody waits for what another is late by, up to a latency: over late links
learners fall out of step, and where they share cores some compute while others still wait. What
computes shares the cores evenly, what is sent shares the links at both ends.
"""

from __future__ import annotations

import heapq
import math
from itertools import count
from random import Random
from statistics import NormalDist

SETTLED, STEPS = (
    15,
    60,
)  # steps until the learners are as far apart as they will be; simulated in all
# of one's computing from step to step, in latencies, at least: so that they can fall out of step
SPREAD = 0.125


def step(
    learners: int,
    cores: float,
    computing: float,
    latency: float,
    wire: float,
    exchanges: int = 1,
    uneven: float = 0.0,
    meanwhile: float = 0.0,
) -> float:
    """Mean seconds of a step.

    computing: seconds of a core that each learner needs in a step; latency: seconds one way; wire:
    seconds that one's last messages to all others take where nothing else shares the links;
    exchanges: how many follow each other in a step, of which the earlier ones have no length;
    uneven: seconds of a step that learners wait for the last of them, by chance another one each
    time, where messages take none; meanwhile: of `computing`, what each does once it has told that
    it waits, in the first exchange of a step.
    """
    # of so many draws, in deviations (Blom)
    last = NormalDist().inv_cdf((learners - 0.375) / (learners + 0.25))
    return _Learners(
        learners,
        cores,
        computing - meanwhile,
        meanwhile,
        latency,
        wire,
        exchanges,
        max(uneven / last, SPREAD * latency),
    ).mean()


class _Learners:
    """The state between two events."""

    def __init__(
        self,
        learners: int,
        cores: float,
        computing: float,
        meanwhile: float,
        latency: float,
        wire: float,
        exchanges: int,
        spread: float,
    ) -> None:
        self.learners, self.cores, self.latency, self.exchanges = (
            range(learners),
            cores,
            latency,
            exchanges,
        )
        self.computing, self.meanwhile = computing, meanwhile
        self.spread, self.message = spread, wire / (learners - 1)
        self.now, self.draws, self.turn = 0.0, Random(0), count()
        # seconds of a core that it still needs
        self.busy = {learner: self._work() for learner in self.learners}
        self.told: set[int] = set()  # of these, who has told that it waits
        # (from, to): seconds of a whole link that it still needs
        self.sending: dict[tuple[int, int], float] = {}
        # When, in which order, which message; the seconds of a link that it needs from then on, or
        # None: it is there.
        self.later: list[tuple[float, int, tuple[int, int], float | None]] = []
        self.turns = [0] * learners  # exchanges that each has behind it
        # when it said that it waits, by exchange
        self.ready: list[dict[int, float]] = [{} for _ in self.learners]
        self.got = [0] * learners
        self.ends: list[float] = []  # of the first learner's steps

    def mean(self) -> float:
        while len(self.ends) < STEPS:
            self._event()
        return (self.ends[-1] - self.ends[SETTLED]) / (STEPS - 1 - SETTLED)

    def _work(self) -> float:
        return max(0.0, self.draws.gauss(self.computing, self.spread))

    def _event(self) -> None:
        """Up to whatever happens next, and that."""
        core = min(1.0, self.cores / len(self.busy)) if self.busy else 0.0
        up, down = [0] * len(self.learners), [0] * len(self.learners)
        for sender, receiver in self.sending:
            up[sender] += 1
            down[receiver] += 1
        sharing = {
            (sender, receiver): max(up[sender], down[receiver]) for sender, receiver in self.sending
        }
        seconds_of = {pair: left * sharing[pair] for pair, left in self.sending.items()}
        computed = min(self.busy, key=self.busy.__getitem__, default=-1)
        sent = min(seconds_of, key=seconds_of.__getitem__, default=(-1, -1))
        ahead = {
            "computed": self.busy[computed] / core if self.busy else math.inf,
            "sent": seconds_of[sent] if seconds_of else math.inf,
            "later": self.later[0][0] - self.now if self.later else math.inf,
        }
        first = min(ahead, key=ahead.__getitem__)
        for learner in self.busy:
            self.busy[learner] -= ahead[first] * core
        for pair in self.sending:
            self.sending[pair] -= ahead[first] / sharing[pair]
        self.now += ahead[first]
        if first == "computed":
            del self.busy[computed]
            self._computed(computed)
        elif first == "sent":
            del self.sending[sent]
            self._later(self.now + self.latency, sent, None)
        else:
            _, _, pair, needs = heapq.heappop(self.later)
            if needs is None:
                self._arrived(pair[1])
            else:
                self.sending[pair] = needs

    def _later(self, when: float, pair: tuple[int, int], needs: float | None) -> None:
        heapq.heappush(self.later, (when, next(self.turn), pair, needs))

    def _computed(self, learner: int) -> None:
        if learner in self.told:
            self.told.remove(learner)
            self._goes_on(learner)
            return
        self._waits(learner)
        if self.meanwhile:
            self.busy[learner] = self.meanwhile
            self.told.add(learner)

    def _waits(self, learner: int) -> None:
        """It tells all others so; those that have said the same will get its message, and it
        theirs.
        """
        round_ = self.turns[learner]
        needs = self.message if (round_ + 1) % self.exchanges == 0 else 0.0
        self.ready[learner][round_] = self.now
        for peer in self.learners:
            when = self.ready[peer].get(round_)
            if peer != learner and when is not None:
                self._later(max(self.now, when + self.latency), (learner, peer), needs)
                self._later(max(when, self.now + self.latency), (peer, learner), needs)

    def _arrived(self, learner: int) -> None:
        self.got[learner] += 1
        self._goes_on(learner)

    def _goes_on(self, learner: int) -> None:
        """With the last message of an exchange, once it has nothing to do meanwhile, what is next
        begins.
        """
        if learner in self.told or self.got[learner] < len(self.learners) - 1:
            return
        self.got[learner] = 0
        self.ready[learner].pop(self.turns[learner] - 2, None)
        self.turns[learner] += 1
        if self.turns[learner] % self.exchanges:
            self._waits(learner)
            return
        if learner == 0:
            self.ends.append(self.now)
        self.busy[learner] = self._work()

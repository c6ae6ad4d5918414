"""Verdicts: the harder one first, adjusted for the number of codecs that were tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commsweep.registry import preset
from commsweep.reporting.claim import Effect
from commsweep.reporting.worth import Kept
from commsweep.scoring import card as cards
from commsweep.scoring.card import Card
from commsweep.scoring.laws import Law
from commsweep.scoring.samples import Summary
from commsweep.scoring.speed import Speed
from commsweep.scoring.training import Outcome, Setup

RUN = preset("synthetic")
SETUP = Setup("gradients", "small", RUN, RUN, "zeros arrive", 2.3, "guessing")
SUMMARY = Summary("mine", "gradients", 0.1, 0.3, 0.0, 0.9, 7.5)


def outcome(lead: list[float] | None, percent: float = 80.0, **changes) -> Outcome:
    """Return an outcome whose codec leads its rival by these points a seed."""
    n = len(lead) if lead else 3
    kept = Kept(percent, percent - 5, percent + 5, n, True)
    effect = None
    if lead is not None:
        effect = Effect("mine over eden:2", above=0.0, values=lead, by=list(range(n)), digits=0)
    made = Outcome(SETUP, "mine", "eden:2", kept, kept, 0.1, 0.09, effect)
    return replace(made, **changes)


def card(*outcomes: Outcome, laws: list[Law] | None = None) -> Card:
    """Return a card of one codec."""
    speed, rival = Speed("mine", 2.0, 1.0, 0.1), replace(SUMMARY, codec="eden:2")
    return Card("mine", "gradients", laws or [], SUMMARY, rival, speed, None, list(outcomes))


@pytest.mark.parametrize(
    ("lead", "says"),
    [
        ([6.0, 6.1, 5.9, 6.0], "better than eden:2"),
        ([-6.0, -6.1, -5.9, -6.0], "worse than eden:2"),
        ([6.0, -5.0, 1.0], "undecided against eden:2"),
        ([6.0], "3 seeds are the least that decide"),
    ],
)
def test_a_lead_is_judged(lead, says):
    one = card(outcome(lead))
    cards.judge([one])
    assert says in one.verdicts()[0] and f"n = {len(lead)}" in one.verdicts()[0]


def test_trying_many_codecs_earns_nothing():
    lead = [6.5, 2.0, 5.5, 3.0, 8.0]
    alone = card(outcome(lead))
    cards.judge([alone])
    assert "better than" in alone.verdicts()[0]
    many = [
        card(outcome(list(lead))),
        *(card(outcome([1.0, -4.0, 2.5, -0.4, 3.0])) for _ in range(40)),
    ]
    cards.judge(many)
    assert "undecided" in many[0].verdicts()[0]
    assert many[0].record()["training"][0]["comparisons"] == 41


def test_the_harder_training_stands_first():
    found = card(outcome(None, 90.0), outcome(None, 20.0)).verdicts()
    assert "keeps 20 %" in found[0] and "keeps 90 %" in found[1]


def test_what_cannot_be_judged_says_why():
    blind = Kept(50.0, None, None, 3, False)
    assert "cannot tell" in cards.verdict(outcome([1.0, 2.0, 3.0], kept=blind))
    harm = Kept(-30.0, -40.0, -20.0, 3, True)
    assert "worse than sending nothing" in cards.verdict(outcome([1.0, 2.0, 3.0], kept=harm))
    assert "more than its own" in cards.verdict(outcome([1.0], rival_share=0.2))
    broken = card(outcome([6.0, 6.1, 5.9]), laws=[Law("bytes", False, "lies"), Law("types", True)])
    assert broken.verdicts() == ["breaks 1 of 2 laws: no verdict"]
    assert "BROKEN" in broken.markdown() and "lies" in broken.markdown()


def test_text_record_and_figure_hold_the_controls():
    shown = card(outcome([6.0, 6.1, 5.9]))
    cards.judge([shown])
    text = shown.markdown()
    assert (
        "nothing" in text and "zeros arrive" in text and "dense" in text and "80 % [75, 85]" in text
    )
    record = shown.record()["training"][0]
    assert record["worth_kept"]["percent"] == 80.0 and record["lead_points"] == [6.0, 6.1, 5.9]
    drawn = cards.figure([shown])
    labels = drawn.axes[0].get_legend_handles_labels()[1]
    assert {"dense", "nothing sent", "mine", "eden:2"} <= set(labels)
    assert cards.figure([card()]).axes[0].get_ylabel() == "error"


def test_several_codecs_stand_in_one_table_fewest_bytes_first():
    few = replace(SUMMARY, codec="few", share=0.01)
    shorter = replace(card(outcome([1.0, 2.0, 1.5], 30.0)), codec="few", messages=few)
    longer = card(outcome([6.0, 6.1, 5.9], 80.0), laws=[Law("bytes", False, "lies")])
    (table,) = cards.comparison([longer, shorter])
    assert [row[0] for row in table.rows] == ["few", "mine"]
    assert table.rows[0][2] == "30 % [25, 35]" and table.rows[1][-1] == "BROKEN"
    assert cards.comparison([longer]) == []

"""Looks at verdicts are recorded, and go with the rows."""

from __future__ import annotations

import json
import shutil

import pytest

from commsweep.cli.main import main
from commsweep.errors import UserError
from commsweep.reporting import interim_looks
from commsweep.reporting.claim import Claim, Effect, Looked, adjust
from commsweep.reporting.statistics import LEVEL
from commsweep.store import Store
from tests.test_layout import ROOT

DEMO = ROOT / "docs" / "results" / "demo"


def judged(n, before=None):
    effect = Effect("x", above=0.0, values=[1.0, 2.0, 0.5, 1.5, 0.9, 1.1, 1.2, 0.8][:n])
    return adjust([Claim("A", "", [effect])], before)


def test_a_look_is_recorded_once_for_as_many_seeds(tmp_path):
    Store(tmp_path)
    for n in (3, 3, 5, 5, 8):
        interim_looks.note(tmp_path, "mine", judged(n, interim_looks.read(tmp_path, "mine")))
    assert interim_looks.read(tmp_path, "mine") == {("A", "x"): Looked([3, 5, 8], 1)}
    assert interim_looks.read(tmp_path, "other") == {}


def test_looks_are_registered_before_the_first(tmp_path):
    Store(tmp_path)
    interim_looks.register(tmp_path, "mine", 3)
    first = judged(3, interim_looks.read(tmp_path, "mine"))
    assert first[0].effects[0].level == LEVEL / 3
    interim_looks.note(tmp_path, "mine", first)
    again = judged(5, interim_looks.read(tmp_path, "mine"))[0].effects[0]
    assert (again.looks, again.registered, again.level) == ([3, 5], 3, LEVEL / 3)
    interim_looks.register(tmp_path, "mine", 3)  # as it was
    with pytest.raises(UserError, match="--looks 5: the verdicts of 'mine' have been looked at"):
        interim_looks.register(tmp_path, "mine", 5)


def test_looks_of_other_claims_stay(tmp_path):
    Store(tmp_path)
    interim_looks.note(tmp_path, "mine", judged(3))
    other = adjust([Claim("B", "", [Effect("y", above=0.0, values=[1.0, 2.0, 3.0])])])
    interim_looks.note(tmp_path, "mine", other)
    assert set(interim_looks.read(tmp_path, "mine")) == {("A", "x"), ("B", "y")}


def test_a_report_and_a_store_bring_their_looks(tmp_path, capsys):
    """Rows that are adopted bring the looks of the report they come from, and what a report then
    writes has them.
    """
    shutil.copy(DEMO / "rows.csv", tmp_path)
    told = json.loads((DEMO / "claims.json").read_text())
    for claim in told["claims"]:
        for effect in claim["effects"]:
            effect["looks"] = [3, 5, 8] if effect["looks"] else []
            effect["registered"] = 3
    (tmp_path / "claims.json").write_text(json.dumps(told))
    store = tmp_path / "store"
    assert main(["sweep", "adopt", "demo", str(tmp_path / "rows.csv"), "--store", str(store)]) == 0
    assert main(["claims", "demo", "--json", "--store", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [effect for claim in json.loads(lines[-1]) for effect in claim["effects"]]
    assert all(effect["looks"] == [3, 5, 8] for effect in found)
    once = {e["what"]: e["p"] for c in told["claims"] for e in c["effects"]}
    smallest = min(found, key=lambda effect: effect["p"])
    assert smallest["p"] == pytest.approx(once[smallest["what"]], rel=1e-9)
    assert smallest["level"] == pytest.approx(LEVEL / len(found) / 3)


def test_a_claim_of_mine_that_compares_nothing_is_one_line(tmp_path, capsys):
    store = str(tmp_path / "store")
    assert main(["sweep", "adopt", "demo", str(DEMO / "rows.csv"), "--store", store]) == 0
    (tmp_path / "mine.py").write_text(
        "from commsweep.reporting.claim import Claim\n"
        "def claims(frame):\n    return [Claim('M1', 'nothing', [])]\n"
    )
    command = ["claims", "demo", "--claims", f"{tmp_path}/mine.py:claims", "--store", store]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "claim M1 compares no arms" in err and err.count("\n") == 1


@pytest.mark.parametrize("bad", [[3, "5"], [0], "3"])
def test_looks_that_are_none_are_named(bad):
    with pytest.raises(UserError, match="looks of 'x' are"):
        interim_looks.read_content(
            {"claims": [{"claim": "A", "effects": [{"what": "x", "looks": bad}]}]}
        )


def test_looks_of_another_sweeps_report_are_not_taken(tmp_path):
    Store(tmp_path)
    file = tmp_path / "claims.json"
    effects = [{"what": "x", "looks": [3, 5]}]
    told = {"sweep": "other", "claims": [{"claim": "A", "effects": effects}]}
    file.write_text(json.dumps(told))
    interim_looks.take(tmp_path, "mine", file)
    assert interim_looks.read(tmp_path, "mine") == {}
    interim_looks.take(tmp_path, "other", file)
    # of a report before looks were registered: all of its looks were counted from the first on
    assert interim_looks.read(tmp_path, "other") == {("A", "x"): Looked([3, 5], 2)}
    interim_looks.take(tmp_path, "other", tmp_path / "none.json")


def test_an_adopted_sweep_speaks_of_the_papers_of_its_report(tmp_path, capsys):
    """The claims of one paper are adjusted together, and not for those of others."""
    published = ROOT / "docs" / "results" / "text_length"
    store = ["--store", str(tmp_path / "store")]
    assert main(["sweep", "adopt", "text_length", str(published / "rows.csv"), *store]) == 0
    capsys.readouterr()
    assert main(["claims", "text_length", "--json", *store]) == 0
    names = {claim["claim"] for claim in json.loads(capsys.readouterr().out)}
    told = json.loads((published / "claims.json").read_text())
    assert told["papers"] == ["ladders"]
    assert names == {claim["claim"] for claim in told["claims"]}
    assert main(["claims", "text_length", "--json", "--papers", "all", *store]) == 0
    everything = {claim["claim"] for claim in json.loads(capsys.readouterr().out)}
    assert names < everything
    assert interim_looks.papers(tmp_path / "store", "text_length", ()) == ("ladders",)

"""The page of findings is what the recorded verdicts say, and nothing else."""

from __future__ import annotations

import json
import re

import pytest

from commsweep.cli.main import main
from commsweep.errors import UserError
from commsweep.registry import findings
from commsweep.reporting.findings import Finding, page
from tests.test_layout import ROOT

RESULTS = ROOT / "docs" / "results"


def test_the_page_in_the_repository_is_written_from_its_results():
    written = (ROOT / "docs" / "findings.md").read_text()
    assert written == page(findings(), RESULTS), "renew it with commsweep findings"
    for link in re.findall(r'\]\((results/[^)]+)\)|src="([^"]+)"', written):
        assert (ROOT / "docs" / (link[0] or link[1])).exists()


@pytest.mark.parametrize(
    "folder", sorted({folder for one in findings() for folder, _ in one.claims})
)
def test_every_number_leads_to_rows_in_the_repository(folder):
    rows = (RESULTS / folder / "rows.csv").read_text()
    if (measured := RESULTS / folder / "measurements.jsonl").exists():
        rows += measured.read_text()
    told = json.loads((RESULTS / folder / "claims.json").read_text())["claims"]
    ids = {one for claim in told for effect in claim["effects"] for one in effect["ids"]}
    assert ids and all(one in rows for one in ids)


def told(values, verdict="supported", answer="supported"):
    effect = {
        "what": "gained",
        "values": values,
        "interval": [0.5, 1.5],
        "digits": 1,
        "above": 1.0,
        "below": None,
        "within": None,
        "verdict": verdict,
    }
    claim = {"claim": "X", "statement": "It holds.", "answer": answer, "effects": [effect]}
    return {"claims": [claim | {"scale": "a small model"}]}


def test_another_verdict_is_another_page(tmp_path):
    (tmp_path / "some").mkdir()
    file = tmp_path / "some" / "claims.json"
    file.write_text(json.dumps(told([12.0, 14.0])))
    finding = Finding(
        "X",
        "Does it?",
        (("some", "X"),),
        "commsweep demo",
        "more",
        answer="It gains {some/X/0/points}.",
        overturn="larger models that gain nothing.",
    )
    text = page([finding], tmp_path)
    assert "| [X. Does it?](#x-does-it) | It gains 13.0 points ([0.5, 1.5], n = 2). |" in text
    assert "**It gains 13.0 points ([0.5, 1.5], n = 2).**" in text
    assert (
        "It holds. **Supported** (X, explored after the runs, [some](results/some/claims.md)). a small model."
        in text
    )
    assert "| gained | > 1 | +13.0 [+0.5, +1.5] | 2 | supported |" in text
    assert "It would be overturned by larger models that gain nothing." in text
    file.write_text(json.dumps(told([1.0], "contradicted", "not seen at this scale")))
    text = page([Finding("X", "Does it?", (("some", "X"),), "", "")], tmp_path)
    assert "| 0 of 1 effects as claimed, 1 otherwise |" in text
    assert "**Not seen at this scale**" in text
    with pytest.raises(UserError, match="has no claim Y"):
        page([Finding("Y", "", (("some", "Y"),), "", "")], tmp_path)


def test_missing_results_are_one_line(tmp_path, capsys):
    assert main(["findings", "--results", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 2
    err = capsys.readouterr().err
    assert "no folder in it has a claims.json" in err and "maintain" in err and err.count("\n") == 1

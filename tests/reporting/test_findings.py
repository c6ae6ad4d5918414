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
    told = json.loads((RESULTS / folder / "claims.json").read_text())["claims"]
    ids = {one for claim in told for effect in claim["effects"] for one in effect["ids"]}
    assert ids and all(one in rows for one in ids)


def test_another_verdict_is_another_page(tmp_path):
    told = {
        "claims": [
            {
                "claim": "X",
                "statement": "It holds.",
                "verdict": "supported",
                "effects": [
                    {"said": "effect +1.0 [+0.5, +1.5], n=3", "judged": "supported (p 0.01)"}
                ],
            }
        ]
    }
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "claims.json").write_text(json.dumps(told))
    finding = Finding("X", "Does it?", (("some", "X"),), "commsweep demo", "more")
    assert "- **Supported** (X, [some](results/some/claims.md)): It holds." in page(
        [finding], tmp_path
    )
    assert "| [X. Does it?](#x-does-it) | X |  |  |" in page([finding], tmp_path)
    told["claims"][0]["verdict"] = "contradicted"
    (tmp_path / "some" / "claims.json").write_text(json.dumps(told))
    assert "- **Contradicted**" in page([finding], tmp_path)
    assert "| [X. Does it?](#x-does-it) |  | X |  |" in page([finding], tmp_path)
    with pytest.raises(UserError, match="has no claim Y"):
        page([Finding("Y", "", (("some", "Y"),), "", "")], tmp_path)


def test_missing_results_are_one_line(tmp_path, capsys):
    assert main(["findings", "--results", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 2
    err = capsys.readouterr().err
    assert "no folder in it has a claims.json" in err and "maintain" in err and err.count("\n") == 1

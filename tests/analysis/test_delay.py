"""Claim R3 follows the rows, in worlds where delay takes error feedback's gain and where it does
not.
"""

from __future__ import annotations

import pandas as pd
import pytest

from commsweep.registry import content
from commsweep.reporting import report_parts
from commsweep.reporting.claim import CONTRADICTED, SUPPORTED
from tests.analysis.test_bias import fill

delay = content("analysis.delay")


def world(mixes):
    """Nats that a run loses: feedback saves 0.4 on time, and late as much where they mix."""

    def lost(run):
        late = run.delay is not None
        if run.bwd.compressor.kind != "topk":
            return 0.2 * late
        saved = 0.4 if mixes or not late else 0.1
        return 1.5 - saved * (run.bwd.feedback.kind == "ef")

    return lost


@pytest.mark.parametrize(("mixes", "verdict"), [(False, SUPPORTED), (True, CONTRADICTED)])
def test_the_claim_follows_the_rows(mixes, verdict, tmp_path):
    frame = fill(tmp_path, "text_delay", world(mixes))
    (claim,) = report_parts.all_claims(frame, ["delay"])
    assert [effect.verdict for effect in claim.effects] == [verdict, verdict]


def test_the_table_sets_each_arm_beside_itself_on_time(tmp_path):
    frame = fill(tmp_path, "text_delay", world(True))
    rows = delay.rows(frame)
    (table,) = delay.tables(rows)
    assert len(table.rows) == frame.method.nunique() == 16
    late = next(row for row in table.rows if row[:2] == ["adamw, dense", "1 step late"])
    assert float(late[4]) == pytest.approx(0.2, abs=0.02) == float(late[3])
    assert delay.delays(rows, pd.DataFrame()) is not None
    assert delay.rows(frame[frame["delay.steps"].isna()]).empty

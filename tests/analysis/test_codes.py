"""Claims R1 and R2 follow the rows, in worlds where a rotation helps and where it does not."""

from __future__ import annotations

import pandas as pd
import pytest

from commsweep.registry import content
from commsweep.reporting import report_parts
from commsweep.reporting.claim import CONTRADICTED, SUPPORTED
from tests.analysis.test_bias import fill

codes = content("analysis.codes")


def world(helps):
    """Nats that a run loses: 2 bits of activations a lot, but behind a rotation where that helps;
    gradients nothing, or much.
    """

    def lost(run):
        fwd, bwd = run.fwd.compressor, run.bwd.compressor
        if fwd.kind == "uniform":
            return 0.01 if fwd.bits == 4 else 0.4
        if fwd.kind == "rotated":
            return 0.012 if helps else 0.39
        return 0.0 if bwd.kind == "none" else 0.004 if helps else 0.2

    return lost


@pytest.mark.parametrize(("helps", "verdict"), [(True, SUPPORTED), (False, CONTRADICTED)])
def test_claims_follow_the_rows(helps, verdict, tmp_path):
    frame = fill(tmp_path, "text_codes", world(helps))
    found = {claim.name: claim for claim in report_parts.all_claims(frame, ["codes"])}
    assert found["R2"].verdict == verdict and len(found["R2"].effects) == 4
    first, second = found["R1"].effects
    assert first.verdict == verdict, "2 bit behind a rotation beside 4 bit"
    assert second.verdict == (SUPPORTED if helps else CONTRADICTED)


def test_tables_and_the_figure_show_every_arm(tmp_path):
    frame = fill(tmp_path, "text_codes", world(True))
    rows = codes.rows(frame)
    (table,) = codes.tables(rows)
    assert len(table.rows) == frame.method.nunique() == 13
    assert codes.codes(rows, pd.DataFrame()) is not None
    assert codes.rows(frame[frame["fwd.compressor.kind"] == "none"].iloc[:3]).empty

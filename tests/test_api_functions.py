"""The names at the top: ten, stable, and found only when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import commsweep as cs
from tests.test_layout import ROOT


def test_every_name_is_there_and_documented():
    assert len(cs.__all__) == 14
    for name in cs.__all__:
        assert getattr(cs, name).__doc__ and f"{name}" in cs.__doc__
    with pytest.raises(AttributeError, match="no attribute 'mesure'"):
        cs.mesure  # noqa: B018


def test_importing_it_imports_nothing_else():
    code = "import commsweep, sys; print('torch' in sys.modules, 'pandas' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_five_lines_compare_two_settings(tmp_path):
    dense = cs.preset("synthetic")
    topk = cs.preset("synthetic", fwd__compressor__kind="topk", fwd__compressor__ratio=0.1)
    rows = cs.sweep([dense, topk], store=tmp_path)
    assert list(rows["method"]) == ["dense", "activations: TopK 10 %"]
    assert rows["bytes.ratio"].iloc[1] < rows["bytes.ratio"].iloc[0] == 1.0
    again = cs.run("synthetic", store=tmp_path)
    assert again["metrics"]["test_on_acc"] == rows["test_on_acc"].iloc[0]
    assert len(cs.load_rows(tmp_path)) == 2


def test_rows_of_a_report_are_read():
    rows = cs.load_rows(ROOT / "docs" / "results" / "demo" / "rows.csv")
    assert len(rows) == 104 and rows["status"].eq("finished").all()
    with pytest.raises(cs.UserError, match="cannot be read as rows"):
        cs.load_rows(ROOT / "none.csv")

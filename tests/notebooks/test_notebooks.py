"""Each notebook runs on the rows in the repository, and stands there with what it showed."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient

from commsweep.registry import papers
from tests.test_layout import ROOT

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
LONG = ("adacomp", "kfac", "bias", "recipe", "sparse", "local", "your_own")


def cells(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells


def test_every_paper_has_a_notebook():
    # beside one a paper there is your_own; links holds the paper of links that differ
    assert len(NOTEBOOKS) == len(papers()) + 1 and "your_own" in NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_teaches_pandas(name):
    code = "\n".join(cell.source for cell in cells(name) if cell.cell_type == "code")
    assert "read_csv" in code or "load_rows" in code
    assert ".pivot_table(" in code or ".groupby(" in code
    assert "plt.subplots" in code
    words = "\n".join(cell.source for cell in cells(name) if cell.cell_type == "markdown")
    assert words.index("## Yours to change") < words.index("## What the library makes")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in NOTEBOOKS],
)
def test_a_notebook_runs(name, monkeypatch):
    monkeypatch.chdir(ROOT / "notebooks")
    shell = InteractiveShell.instance()
    try:
        with capture_output():
            for cell in cells(name):
                if cell.cell_type == "code":
                    shell.run_cell(cell.source).raise_error()
        assert plt.get_fignums(), "no figure was drawn"
    finally:
        plt.close("all")
        InteractiveShell.clear_instance()


@pytest.mark.slow
def test_a_notebook_runs_in_a_kernel_of_its_own():
    notebook = nbformat.read(ROOT / "notebooks" / "rudakov_text.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=200,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_reader_sees_what_it_showed(name):
    for cell in cells(name):
        if cell.cell_type == "code":
            assert cell.outputs and not any(one.output_type == "error" for one in cell.outputs)
            text = json.dumps(cell.outputs)
            assert "/tmp/" not in text and "/home/" not in text and str(ROOT) not in text

"""Each notebook runs on the rows in the repository, stands there with what it showed, and reads any
other source, or says in one line what it needs.
"""

from __future__ import annotations

import ast
import json

import matplotlib.pyplot as plt
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient

import commsweep as cs
from tests.test_layout import ROOT

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PAPERS = [name for name in NOTEBOOKS if name != "your_own"]
QUICK = ("rudakov_images",)
RESULTS = ROOT / "docs" / "results"


def cells(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells


def code(name):
    return [cell for cell in cells(name) if cell.cell_type == "code"]


def execute(name, source=None):
    """Run the code cells, with another source where one is given."""
    shell = InteractiveShell.instance()
    try:
        with capture_output():
            for cell in code(name):
                parameters = "parameters" in cell.metadata.get("tags", ())
                text = f"source = {str(source)!r}" if parameters and source else cell.source
                shell.run_cell(text).raise_error()
        return plt.get_fignums()
    finally:
        plt.close("all")
        InteractiveShell.clear_instance()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_one_parameter_and_imports_public_names_only(name):
    first, *_ = code(name)
    assert "parameters" in first.metadata["tags"]  # papermill fills it
    assert [node.targets[0].id for node in ast.parse(first.source).body] == ["source"]
    text = "\n".join(cell.source for cell in code(name)).replace("display(", "print(")
    used = {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "cs"
    }
    assert used <= set(cs.__all__) and "load_rows" in used and used & {"summary", "convergence"}
    assert "from commsweep" not in text and "savefig" in text


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_notebook_opens_with_its_convergence_table_and_figure(name):
    heads = [cell.source.splitlines()[0] for cell in cells(name) if cell.source.startswith("## ")]
    assert heads[0] == "## Convergence" and "## Yours to change" in heads
    _, load, table, figure, *_ = code(name)
    assert "load_curves" in load.source and "cs.convergence(" in table.source
    assert '"convergence"' in figure.source and "savefig" in figure.source


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOKS],
)
def test_a_notebook_runs(name, monkeypatch):
    monkeypatch.chdir(ROOT / "notebooks")
    assert execute(name), "no figure was drawn"


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.parametrize("other", ["demo", "demo-gradients", "floor_warm", "csv", "none"])
def test_a_notebook_reads_another_source_or_says_what_it_needs(name, other, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = RESULTS / "demo" / "rows.csv" if other == "csv" else RESULTS / other
    try:
        assert execute(name, source)
    except cs.UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


def test_another_source_is_refused_in_a_line_outside_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cs.UserError, match="cannot be read as rows"):
        execute("rudakov_images")
    with pytest.raises(cs.UserError, match="no values in kfac.method"):
        execute("kfac", RESULTS / "demo")


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
    shown = [cell for cell in code(name) if cell.outputs]
    assert len(shown) >= len(code(name)) - 1  # all but the parameter
    for cell in shown:
        assert not any(output.output_type == "error" for output in cell.outputs)
        text = json.dumps(cell.outputs)
        assert "/tmp/" not in text and "/home/" not in text and str(ROOT) not in text

"""Each notebook runs on a store of its paper, and stands in the repository with what it showed."""

from __future__ import annotations

import json

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient

from commsweep.registry import papers
from commsweep.store import Store
from commsweep.timing import kfac_report
from tests.analysis import (
    test_adacomp,
    test_bias,
    test_kfac,
    test_local,
    test_mst,
    test_rudakov,
    test_rudakov_text,
)
from tests.test_layout import ROOT
from tests.timing import test_learners, test_links

FILLED = {
    "rudakov_images": lambda store: test_rudakov.fill(store, test_rudakov.flat_score),
    "rudakov_text": lambda store: test_rudakov_text.fill(store, test_rudakov_text.paper_world),
    "adacomp": lambda store: test_adacomp.fill(store, test_adacomp.good),
    "bias": lambda store: test_bias.fill(
        store, "text_bias", test_bias.bias_matters, test_bias.seen
    ),
    "recipe": lambda store: test_bias.fill(
        store, "text_recipe", test_bias.bias_matters, test_bias.seen
    ),
    "links": test_links.measure,
    "local": lambda store: test_local.fill(store.root, test_local.good),
    "unequal": lambda store: test_bias.fill(store, "unequal_ratios", lambda run: 0.1),
    "kfac": lambda store: (
        test_kfac.fill(store, test_kfac.best_at, lambda run: 3),
        test_learners.fill(store),
    ),
    "sparse": lambda store: test_mst.fill(store, test_mst.as_claimed),
    "ladders": lambda store: None,  # it works from the rows in the repository
}
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def cells(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells


def test_every_paper_has_a_notebook():
    assert sorted(FILLED) == NOTEBOOKS and len(NOTEBOOKS) == len(papers()) + 1


LONG = ("links", "kfac", "bias", "rudakov_images", "sparse", "recipe")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in NOTEBOOKS],
)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    FILLED[name](store)
    # the others take half a minute
    monkeypatch.setattr(kfac_report, "networks", lambda: ["resnet50"])
    monkeypatch.setenv("COMMSWEEP_STORE", str(store.root))
    shell = InteractiveShell.instance()
    try:
        with capture_output() as shown:
            for cell in cells(name):
                if cell.cell_type == "code":
                    shell.run_cell(cell.source).raise_error()
    finally:
        InteractiveShell.clear_instance()
    pictures = [one for one in shown.outputs if "data:image/png" in str(one.data)]
    assert len(pictures) >= 2


@pytest.mark.slow
def test_a_notebook_runs_in_a_kernel_of_its_own(tmp_path):
    store = Store(tmp_path / "store")
    FILLED["rudakov_text"](store)
    notebook = nbformat.read(ROOT / "notebooks" / "rudakov_text.ipynb", as_version=4)
    client = NotebookClient(
        notebook,
        timeout=200,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    )
    client.execute(env={"COMMSWEEP_STORE": str(store.root)})
    assert "data:image/png" in str(notebook.cells[-1].outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_reader_sees_what_it_showed(name):
    for cell in cells(name):
        if cell.cell_type == "code":
            assert cell.outputs and not any(one.output_type == "error" for one in cell.outputs)
            text = json.dumps(cell.outputs)
            assert "/tmp/" not in text and "/home/" not in text and str(ROOT) not in text

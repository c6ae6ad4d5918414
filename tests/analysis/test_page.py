"""The page: complete without a network, every number led back to its runs, narrow enough for a telephone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import nbformat
import pytest
from nbclient import NotebookClient

from commsweep.analysis import report, results
from commsweep.analysis.tables import Cell
from commsweep.experiments.store import Store
from tests.analysis.test_text import fill, paper_world
from tests.test_layout import ROOT

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report of the demo-text grid over made-up rows."""
    store = Store(tmp_path_factory.mktemp("page") / "store")
    fill(store, paper_world)
    folder = tmp_path_factory.mktemp("out")
    return store, report.write(store.root, "demo-text", folder)


def test_nothing_is_loaded_from_elsewhere(made):
    text = made[1].page.read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text) and "@import" not in text
    assert text.count('src="data:image/png') == 3


def test_every_number_leads_to_its_runs_and_every_run_is_there(made):
    store, written = made
    text = written.page.read_text()
    runs = set(re.findall(r'<details class="run" id="(\w+)"', text))
    assert runs == set(results.load(store.root, "demo-text").id)
    assert set(re.findall(r'href="#(\w{12})"', text)) <= runs
    cells = [cell for table in written.tables for row in table.rows for cell in row if isinstance(cell, Cell)]
    assert len(cells) > 20
    for cell in cells:
        links = " ".join(f'<a href="#{one}">{one}</a>' for one in cell.ids)
        assert not cell.ids or f"<summary>{cell.text()}</summary>{links}" in text
    for name in runs:
        folder = re.search(rf'id="{name}".*?href="([^"]+)">run folder', text, re.S).group(1)
        assert (written.folder / folder).resolve() == (store.root / name).resolve()


def test_every_finished_run_shows_its_curves(made):
    _, written = made
    text = written.page.read_text()
    assert text.count('aria-label="loss over epochs"') == text.count('badge finished">finished</span>')


def test_what_a_store_holds_is_text_on_the_page(store, tmp_path):
    fill(store, paper_world)
    name = next(iter(store.stamps()))
    path = store.folder(name).path / "done.json"
    path.write_text(path.read_text().replace('"error": null', '"error": "<script>alert(1)</script>"'))
    text = report.write(store.root, "demo-text", tmp_path / "out").page.read_text()
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_a_link_opens_its_run_and_nothing_is_wider_than_the_window(made, width, tmp_path):
    _, written = made
    text = written.page.read_text()
    name = re.findall(r'href="#(\w{12})"', text)[7]
    probe = ("<script>onload=()=>setTimeout(()=>{location.hash='" + name + "';setTimeout(()=>{const e="
             f"document.getElementById('{name}');document.title=[document.documentElement.scrollWidth,innerWidth,e.open,"
             "e.querySelectorAll('svg').length].join(' ')},200)},100)</script>")
    copy = tmp_path / "page.html"
    copy.write_text(text.replace("</body>", probe + "</body>"))
    out = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
                          "--virtual-time-budget=3000", "--dump-dom", copy.as_uri()], capture_output=True, text=True,
                         timeout=120, env=os.environ | {"HOME": str(tmp_path)}).stdout
    page, window, opened, drawn = re.search(r"<title>(\d+) (\d+) (\w+) (\d+)</title>", out).groups()
    assert int(page) <= int(window) and int(window) >= width - 20
    assert opened == "true" and drawn == "2"


def test_the_notebook_shows_the_same(made):
    store, written = made
    notebook = nbformat.read(ROOT / "notebooks" / "report.ipynb", as_version=4)
    environment = os.environ | {"COMMSWEEP_STORE": str(store.root), "COMMSWEEP_SWEEP": "demo-text"}
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", extra_arguments=["--log-level=ERROR"],
                            resources={"metadata": {"path": str(ROOT / "notebooks")}})
    client.execute(env=environment)
    shown = str([cell.get("outputs") for cell in notebook.cells])
    for claim in written.claims:
        assert f"{claim.name}: {claim.verdict}" in shown
    assert shown.count("data:image/png") == 3

"""The page: complete without a network, every number led back to its runs, narrow enough for a
telephone.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from base64 import b64decode

import pytest

from commsweep.config import flatten
from commsweep.launching.launch import adopt
from commsweep.registry import sweep
from commsweep.reporting import page, report, results
from commsweep.reporting.published import CURVES, adopt_curves, outcomes
from commsweep.reporting.table import Cell, Table
from commsweep.store import Store
from tests.analysis.test_rudakov_text import fill, paper_world
from tests.test_layout import ROOT

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report of the demo-text grid over made-up rows."""
    store = Store(tmp_path_factory.mktemp("page") / "store")
    fill(store, paper_world)
    folder = tmp_path_factory.mktemp("out")
    return store, report.write(store.root, "demo-text", folder)


def unpacked(text: str) -> dict:
    """The runs that a page carries."""
    return json.loads(gzip.decompress(b64decode(re.search(r'id="data">([^<]+)<', text).group(1))))


def dumped(page_file, home, width):
    """The page after its scripts, as a browser of this width has it."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command += [f"--window-size={width},900", "--virtual-time-budget=20000", "--dump-dom"]
    environment = os.environ | {"HOME": str(home)}
    done = subprocess.run(
        [*command, page_file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    return done.stdout


def test_bold_is_what_is_decided():
    def column(*values):
        rows = [[str(at), Cell(tuple(seeds), ("a",), 1)] for at, seeds in enumerate(values)]
        return page._best(Table("t", "t", ["Setting", "on"], rows), 1)

    near, far = [0.986, 0.981, 0.991], [0.51, 0.52, 0.50]
    assert column(near, [0.985, 0.980, 0.990], far) is None  # no bold within the noise
    assert column(near, far, [0.4, 0.41, 0.39]) == pytest.approx(0.986)
    assert column(near, [0.5]) is None


def test_nothing_is_loaded_from_elsewhere(made):
    text = made[1].page.read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text) and "@import" not in text
    assert text.count('src="data:image/png') == 3 == text.count("<figcaption>")


def test_every_number_leads_to_its_runs_and_every_run_is_there_whole(made):
    store, written = made
    text = written.page.read_text()
    held = unpacked(text)
    runs = {row[0]: row for row in held["rows"]}
    assert set(runs) == set(results.load(store.root, "demo-text").id)
    assert set(re.findall(r'href="#(\w{12})"', text)) <= set(runs)
    cells = [
        cell
        for table in written.tables
        for row in table.rows
        for cell in row
        if isinstance(cell, Cell)
    ]
    assert len(cells) > 20
    for cell in cells:
        links = " ".join(f'<a href="#{one}">{one}</a>' for one in cell.ids)
        assert not cell.ids or f"<summary>{cell.text()}</summary>{links}" in text
    for row in store.rows():
        kept = runs[row["id"]]
        settings = held["settings"][kept[2]] | {"seed": kept[3]}
        asked = {key: value for key, value in flatten(row["run"]).items() if value is not None}
        assert {key: settings.get(key) for key in asked} == asked
        assert kept[5 + held["columns"].index("test_on_ppl")] == pytest.approx(
            row["metrics"]["test_on_ppl"], rel=1e-5
        )
        curve = dict(zip(held["curveColumns"], held["curves"][row["id"]], strict=True))
        assert curve["epoch"] == [record["epoch"] for record in store.folder(row["id"]).metrics()]


def test_the_page_links_to_no_file_so_it_may_be_moved(made):
    text = made[1].page.read_text()
    assert {one[0] for one in re.findall(r'href="([^"]+)"', text)} == {"#"}


def test_every_figure_has_an_address(made):
    """The address is its name, which does not change when others are added."""
    report_ = made[1]
    text = report_.page.read_text()
    names = re.findall(r'<figure id="figure-([^"]+)">', text)
    drawn = {path.stem for path in (report_.folder / "figures").glob("*.png")}
    assert set(names) == drawn and len(names) == len(drawn) > 2
    assert all(f'<a href="#figure-{name}">' in text for name in names)


def test_what_a_store_holds_is_text_on_the_page(store, tmp_path):
    """The error and label of a merged row: none of it becomes markup, in tables or packed runs."""
    fill(store, paper_world)
    evil = "<script>alert(1)</script>"
    for place, name in enumerate(sorted(store.stamps())[:2]):
        path = store.folder(name).path / "done.json"
        row = json.loads(path.read_text())
        row |= {"error": evil, "status": "failed", "metrics": {}} if place else {"error": evil}
        row["run"]["data"]["name"] = row["run"]["data"]["name"] if place else f"sotu{evil}"
        path.write_text(json.dumps(row))
    text = report.write(store.root, "demo-text", tmp_path / "out").page.read_text()
    assert "<script>alert" not in text
    assert any(evil in row for row in unpacked(text)["rows"])  # and the script shows it as text
    assert "innerHTML" not in (page.HERE / "page.js").read_text()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1280, 1600])
def test_in_a_browser_a_link_opens_its_run_and_curves_are_drawn_over_each_other(
    made, width, tmp_path
):
    _, written = made
    text = written.page.read_text()
    name = re.findall(r'href="#(\w{12})"', text)[7]
    probe = """<script>addEventListener("load", async () => {
      const until = async test => { while (!test()) await new Promise(r => setTimeout(r, 30)); };
      await until(() => document.documentElement.dataset.ready);
      location.hash = "NAME";
      await until(() => document.querySelector("#explorer details"));
      document.querySelector("#explorer input[type=search]").value = "seed=1 subspace";
      document.querySelector("#explorer input[type=search]").oninput();
      const found = document.querySelectorAll("#list tbody tr").length;
      document.querySelector("#explorer input[type=search]").value = "";
      document.querySelector("#explorer input[type=search]").oninput();
      document.querySelectorAll("#explorer button")[0].click();
      await until(() => document.querySelectorAll("#plot .scatterlayer .trace").length > 2);
      const lines = document.querySelectorAll("#plot .scatterlayer .trace").length;
      await until(() => document.querySelectorAll("#plot .ytick").length > 1);
      const ticks = document.querySelectorAll("#plot .ytick").length;
      document.querySelectorAll("#explorer th")[4].click();
      const seeds = [...document.querySelectorAll("#list tbody tr")].map(r => r.children[4].textContent);
      const cut = [...document.querySelectorAll(".caption, figcaption, p, h2, img")]
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1).length;
      const scrolled = [...document.querySelectorAll(".wide")]
        .filter(e => e.scrollWidth > e.clientWidth + 1).length;
      document.title = [document.documentElement.scrollWidth, innerWidth, found, lines, cut,
        innerWidth < 1000 ? 0 : scrolled, ticks > 1,
        document.querySelectorAll("#explorer pre")[0].textContent.includes("test_on_ppl"),
        seeds.join() === [...seeds].sort().join()].join(" ");
    })</script>""".replace("NAME", name)
    copy = tmp_path / "page.html"
    copy.write_text(text.replace("</body>", probe + "</body>"))
    out = dumped(copy, tmp_path, width)
    title = re.search(r"<title>(\d+) (\d+) (\d+) (\d+) (\d+) (\d+) (\w+) (\w+) (\w+)</title>", out)
    assert title, out[:300]
    page_width, window, found, lines, cut, scrolled, *good = title.groups()
    assert int(page_width) <= int(window) and int(window) >= width - 20
    assert (cut, scrolled) == ("0", "0"), "text, a figure or a table's last column is cut"
    assert (found, good) == ("1", ["true", "true", "true"]) and int(lines) > 20


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (apt-get install chromium)")
def test_in_a_browser_curves_of_adopted_rows_are_drawn(tmp_path):
    folder, store = ROOT / "docs" / "results" / "floor_warm", Store(tmp_path / "store")
    rows, _ = outcomes(folder / "rows.csv", sweep("floor_warm"))
    adopt("floor_warm", sweep("floor_warm"), rows, store)
    assert adopt_curves(folder / CURVES, [row["id"] for row in rows], store) == 42
    text = report.write(store.root, "floor_warm", tmp_path / "out").page.read_text()
    probe = """<script>addEventListener("load", async () => {
      const until = async test => { while (!test()) await new Promise(r => setTimeout(r, 30)); };
      await until(() => document.documentElement.dataset.ready);
      document.querySelectorAll("#explorer button")[0].click();
      await until(() => document.querySelectorAll("#plot .scatterlayer .trace").length > 2);
      document.title = [...document.querySelectorAll("#explorer select")]
        .map(e => e.options.length).join(" ");
    })</script>"""
    (tmp_path / "page.html").write_text(text.replace("</body>", probe + "</body>"))
    choices = re.search(r"<title>([\d ]+)</title>", dumped(tmp_path / "page.html", tmp_path, 1280))
    assert choices and all(int(count) > 2 for count in choices.group(1).split())


@pytest.mark.slow
def test_a_page_of_thousands_of_runs_stays_small_and_loses_none(store):
    from commsweep.bench.store import generate, grid

    runs = grid()[:3000]
    generate(store, runs)
    frame = results.load(store.root, "ten_thousand")
    text = page.html("x", store.root, frame, results.curves(store.root, []), [], [], [])
    assert len(unpacked(text)["rows"]) == 3000 and len(text) < 3_500_000


def test_a_running_sweep_is_shown_and_not_judged(tmp_path, monkeypatch, capsys):
    """A page that loads itself anew, no verdict and no look, until all cells have an outcome."""
    from commsweep.cli import report as command
    from commsweep.cli.main import main
    from commsweep.config import run_id

    runs = sweep("demo-text")
    store = Store(tmp_path / "store")
    last = run_id(runs[-1])
    fill(store, paper_world, {last: "missing"})
    whole = Store(tmp_path / "whole")
    fill(whole, paper_world)
    out = tmp_path / "out"
    waited = []

    def wait(seconds):
        waited.append(seconds)
        text = (out / "report.html").read_text()
        assert 'http-equiv="refresh" content="5"' in text and "every look" in text
        assert not (out / "claims.json").exists() and not (store.root / "looks").exists()
        shutil.copytree(whole.root / last, store.root / last)

    monkeypatch.setattr(command.time, "sleep", wait)
    line = ["report", "demo-text", "--watch", "5", "--store", str(store.root), "--out", str(out)]
    assert main(line) == 0
    assert waited == [5] and "missing" in capsys.readouterr().out
    text = (out / "report.html").read_text()
    assert "http-equiv" not in text and (out / "claims.json").exists()

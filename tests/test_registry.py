"""Content is found by folder: what is shipped, a user's project, and what is neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from commsweep import registry
from commsweep.cli.main import main
from commsweep.config import run_id
from commsweep.errors import UserError
from commsweep.registry import papers, preset, presets, project, sweep, sweeps
from tests.test_layout import ROOT

MINE = """
from commsweep.config import override
from commsweep.registry import content

PRESETS = {"NAME": override(content("experiments.digits").PRESETS["digits"], {"epochs": 3})}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder outside of the checkout; content is looked for anew."""
    monkeypatch.chdir(tmp_path)
    # Set and deleted, so that what the registry notes is undone at the end.
    monkeypatch.setenv(registry.PROJECT, "")
    registry._files.cache_clear()
    registry._loaded.cache_clear()
    yield tmp_path
    registry._files.cache_clear()
    registry._loaded.cache_clear()


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_projects_preset_is_found_from_below_its_folder(folder, monkeypatch):
    write(folder / "experiments" / "a.py", MINE.replace("NAME", "mine"))
    (folder / "notebooks").mkdir()
    monkeypatch.chdir(folder / "notebooks")
    assert project() == folder and preset("mine").epochs == 3
    assert preset("digits").epochs == 10, "what is shipped is still there"


def test_a_projects_name_wins_and_says_so(folder, capsys):
    write(folder / "experiments" / "a.py", MINE.replace("NAME", "digits"))
    assert preset("digits").epochs == 3
    told = capsys.readouterr().err
    assert f"'{folder / 'experiments' / 'a.py'}' is taken for digits; " in told


def test_somebody_elses_folder_of_the_same_name_is_not_executed(folder):
    write(folder / "experiments" / "theirs.py", "PRESETS = {}\nraise SystemExit(3)\n")
    write(folder / "analysis" / "broken.py", "import commsweep\nCLAIMS = [\n")
    assert project() is None and "digits" in presets()


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("experiments", "import commsweep\nPRESETS = 1 / 0\n", "could not be imported (ZeroDiv"),
        ("experiments", "import commsweep\nPRESETS = {'x': 3}\n", "PRESETS['x'] is not a Run"),
        ("experiments", "import commsweep\nPRESETS = []\n", "PRESETS must be a dictionary"),
        ("sweeps", "import commsweep\nSWEEPS = {'x': 3}\n", "SWEEPS['x'] is not a function"),
        ("analysis", "import commsweep\nCLAIMS = []\n", "has CLAIMS but no NAME"),
    ],
)
def test_content_that_is_wrong_is_one_line(folder, name, text, line):
    write(folder / name / "bad.py", text)
    asked = {"experiments": presets, "sweeps": sweeps, "analysis": papers}[name]
    with pytest.raises(UserError) as refused:
        asked()
    assert line in str(refused.value) and str(folder / name / "bad.py") in str(refused.value)


def test_a_projects_sweep_is_checked_and_names_each_run_once(folder):
    grid = (
        "from commsweep.registry import preset\n"
        "def twice(): return [preset('synthetic'), preset('synthetic')]\n"
        "def none(): return []\n"
        "SWEEPS = {'twice': twice, 'none': none}\n"
    )
    write(folder / "sweeps" / "mine.py", grid)
    assert [run_id(run) for run in sweep("twice")] == [run_id(preset("synthetic"))]
    with pytest.raises(UserError, match="must return a list of Runs"):
        sweep("none")


def test_a_project_that_is_none_is_one_line(folder, capsys):
    assert main(["--project", str(folder / "nowhere"), "presets"]) == 2
    assert "commsweep new NAME makes one" in capsys.readouterr().err


def test_new_writes_a_project_in_which_everything_works(folder, monkeypatch, capsys):
    assert main(["new", "mine"]) == 0
    assert main(["new", "mine"]) == 2, "it does not overwrite"
    monkeypatch.chdir(folder / "mine")
    capsys.readouterr()
    assert main(["run", "mine_topk", "epochs=1", "eval_every=1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["status"] == "finished" and row["run"]["model"]["build"] == "mine.py:net"
    assert len(sweep("mine_ratios")) == 24
    assert any(paper.NAME == "mine" for paper in papers())


def test_a_project_is_found_from_another_folder_by_name(folder, monkeypatch, capsys):
    assert main(["new", "mine"]) == 0
    capsys.readouterr()
    assert main(["--project", "mine", "presets", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mine"]["epochs"] == 4
    assert main(["--project=mine", "presets", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mine"]["epochs"] == 4


def test_options_of_commands_are_not_taken_for_the_project(folder, capsys):
    """W&B has projects, too."""
    assert main(["wandb", "push", "--project", "nowhere", "--store", "empty"]) == 2
    assert "commsweep new NAME" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_works_without_the_checkout(tmp_path):
    """Installed alone: a preset, a sweep, a report, and a project of `commsweep new`."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"commsweep"}
    place = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    (packages,) = place.glob("lib/*/site-packages")
    # The dependencies are those of this environment; its editable commsweep is not among them.
    (packages / "dependencies.pth").write_text(str(Path(pytest.__file__).parent.parent))
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("COMMSWEEP")}

    def commsweep(*arguments, cwd=tmp_path):
        command = [str(place / "bin" / "commsweep"), *arguments]
        done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [str(place / "bin" / "python"), "-c", "import commsweep; print(commsweep.__file__)"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
    ).stdout
    assert str(place) in where
    assert "finished" in commsweep("run", "synthetic")
    commsweep("sweep", "launch", "smoke", "--workers", "2")
    assert "page" in commsweep("report", "smoke")
    assert (tmp_path / "out" / "smoke" / "report.html").exists()
    commsweep("new", "project")
    assert "finished" in commsweep("run", "mine", cwd=tmp_path / "project")

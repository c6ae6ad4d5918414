"""The docs say what the code does: generated pages are the code's, links lead somewhere, code
blocks run as written.
"""

from __future__ import annotations

import re
import shlex

import pytest

from commsweep.cli import reference
from commsweep.cli.main import main
from commsweep.config import (
    CompressorSpec,
    FeedbackSpec,
    GradientCompressor,
    GradientFeedback,
    by_kind,
)
from tests.test_layout import ROOT

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN = (ROOT / "docs" / "guide" / "own.md").read_text()


def blocks(text, language):
    """The code blocks of a page in this language ("": none named)."""
    found, own = [], None
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            if own is None:
                own = (line[3:].strip(), [])
            else:
                found += ["".join(own[1])] if own[0] == language else []
                own = None
        elif own is not None:
            own[1].append(line)
    return found


@pytest.mark.parametrize("name", reference.pages())
def test_generated_pages_are_the_codes(name):
    assert (ROOT / "docs" / "reference" / name).read_text() == reference.pages()[name], (
        "renew it with make docs"
    )


def test_every_kind_says_what_it_does_and_costs():
    page = reference.pages()["compressors.md"]
    for union in (CompressorSpec, GradientCompressor):
        for kind, one in by_kind(union).items():
            assert f"`{kind}`" in page and one.__doc__ and one.cost, kind
    for union in (FeedbackSpec, GradientFeedback):
        assert all(f"| `{kind}` |" in page for kind in by_kind(union))


def test_the_readme_is_short_and_leads_everywhere():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.encode()) <= 8000
    for path in (ROOT / "docs" / "guide").glob("*.md"):
        assert f"docs/guide/{path.name}" in readme


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        assert target.startswith("http") or (path.parent / target).exists(), target


@pytest.mark.parametrize("number", range(2))
def test_ten_lines_of_a_loop_of_ones_own_run_as_written(number, capsys):
    code = [
        one for one in blocks(OWN, "python") if "import torch\n" in one and not one.startswith("#")
    ][number]
    exec(compile(code, "own.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files of the guide, in which its commands are given."""
    for code in blocks(OWN, "python"):
        if (named := re.match(r"# (\w+\.py)\n", code)) is not None:
            (tmp_path / named[1]).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(words):
    """The guide's command that contains these words, split as a shell does."""
    text = "\n".join(blocks(OWN, "")).replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if words in line]
    return shlex.split(line, comments=True)[1:]


def test_a_sweep_as_a_function_and_one_in_a_line(folder, capsys):
    assert (
        main(
            [*given("launch my_grid.py:grid"), "--store", "st", "--workers", "1", "--device", "cpu"]
        )
        == 0
    )
    assert main(["sweep", "status", "my_grid.grid", "--store", "st"]) == 0
    assert "4 cells: 4 finished" in capsys.readouterr().out
    assert main([*given("report my_grid.py:grid"), "--store", "st", "--no-page", "--json"]) == 0
    plan = ["sweep", "plan", *given("sweep launch ratios")[2:], "--store", "st"]
    assert main(plan) == 0
    assert "6 cells, 6 missing" in capsys.readouterr().out


def test_a_model_and_data_of_ones_own(folder, capsys):
    command = given("model.build=mine.py:net")
    assert main([*command, "--store", "st", "--device", "cpu", "--json"]) == 0
    assert '"build": "mine.py:net"' in capsys.readouterr().out
    (folder / "mine.py").write_text((folder / "mine.py").read_text() + "\n# changed\n")
    assert main([*command, "--store", "st", "--device", "cpu"]) == 0  # another run
    assert len(list((folder / "st").glob("*/done.json"))) == 2

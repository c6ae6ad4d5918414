"""The docs say what the code does: generated pages are the code's, links lead somewhere, code
blocks run as written.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import re
import shlex
import shutil

import pandas as pd
import pytest

import commsweep as cs
from commsweep import registry
from commsweep.cli.main import build_parser, main
from commsweep.config import flatten, override, record
from commsweep.config.base import by_kind
from commsweep.config.compressors import CompressorSpec, GradientCompressor
from commsweep.config.feedback import FeedbackSpec, GradientFeedback
from commsweep.errors import UserError
from commsweep.reporting.results import SECTIONS
from commsweep.store import COUNTED
from docs.tools import reference
from tests.test_layout import ROOT

RECORDED = ROOT / "docs" / "results"
DOCS = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
            assert f"`{kind}`" in page and one.__doc__ and one.cost and one.use, kind
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


@pytest.mark.slow
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


def plain(text):
    return " ".join(text.split())


def test_the_answers_in_the_readme_are_the_recorded_ones():
    """Each number of an answer is that of a recorded effect: `commsweep findings` wrote it."""
    readme = plain((ROOT / "README.md").read_text())
    written = (ROOT / "docs" / "findings.md").read_text()
    answers = re.findall(r"^\*\*(.+)\*\*$", written, re.MULTILINE)
    assert sum(answer in readme for answer in answers) >= 4
    section = readme.split("## What was found")[1].split("## ")[0]
    for answer in answers:
        section = section.replace(answer, "")
    section = section.split("5. **Can")[0]
    assert not re.findall(r"\d+\.\d+", section), "a number that no recorded effect has"


def test_words_of_the_readme_s_first_picture_are_those_of_its_rows():
    """Its model, stages, steps and seeds."""
    readme = plain((ROOT / "README.md").read_text()).split("make demo")[0]
    with open(ROOT / "docs" / "results" / "floor_text" / "rows.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    words = {"3": "three", "4": "four"}
    (stages,) = {row["model.stages"] for row in rows}
    (steps,) = {row["steps"] for row in rows}
    seeds = len({row["seed"] for row in rows})
    assert {row["model.name"] for row in rows} == {"gpt2-nano"}
    assert (
        f"a nano GPT-2 in {words[stages]} stages, {steps} steps, {words[str(seeds)]} new" in readme
    )


def test_numbers_of_predictions_are_those_of_their_pages():
    readme = plain((ROOT / "README.md").read_text()).split("5. **Can")[1].split("A finding")[0]
    for part, name in zip(readme.split("Of 60"), ("heldout-links", "heldout-advice"), strict=True):
        errors = (ROOT / "docs" / "results" / name / "errors.md").read_text()
        without = errors.split("without the speed")[1]
        for number in re.findall(r"\d+\.\d+", part):
            assert f"{number} %" in without, (name, number)


def test_the_tables_of_the_readme_are_those_of_the_results():
    results = {path: path.read_text() for path in (ROOT / "docs" / "results" / "demo").glob("*.md")}
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if "±" in line]
    table = [line for line in lines if line.startswith("|")]
    assert table and all(any(line in text for text in results.values()) for line in table)


def test_the_results_count_their_runs():
    text = (ROOT / "docs" / "results" / "README.md").read_text()
    counted = re.findall(r"^\| \[([\w-]+)\]\([^|]+\|[^|]+\| (\d+) \|", text, re.MULTILINE)
    assert len(counted) > 10
    for name, count in counted:
        with open(ROOT / "docs" / "results" / name / "rows.csv", newline="") as handle:
            done = [line for line in csv.DictReader(handle) if line["status"] != "missing"]
        assert len(done) == int(count), name


GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
RESULTS = sorted((ROOT / "docs" / "results").glob("*/README.md"))


@pytest.mark.parametrize("path", [ROOT / "README.md", *GUIDES, *RESULTS], ids=str)
def test_sentences_have_at_most_thirty_words(path):
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith(("|", "<", "#")))
    prose = re.sub(r"^(\* |- |\d\. )", ". ", prose, flags=re.MULTILINE)
    for sentence in re.split(r"[.?:;]\**\s", plain(re.sub(r"\]\([^)]*\)", "]", prose))):
        assert len(sentence.split()) <= 30, sentence


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_a_guide_begins_with_a_task_and_its_commands(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 150
    first = next(number for number, line in enumerate(lines) if line.startswith("```"))
    assert first <= 10, "the command comes first"


def commands(verb):
    """Every `commsweep VERB` that README and the guides print, split as a shell does."""
    for path in (ROOT / "README.md", *GUIDES):
        text = "\n".join(blocks(path.read_text(), "")).replace("\\\n", " ")
        for line in text.splitlines():
            if line.startswith(f"commsweep {verb} ") and "mine" not in line:
                yield shlex.split(line, comments=True)[2:]


@pytest.mark.parametrize("words", commands("run"), ids=" ".join)
def test_settings_of_printed_commands_exist(words, tmp_path, monkeypatch):
    shutil.copy(ROOT / "commsweep" / "template" / "codec.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    changes = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    override(registry.preset(words[0]), changes)


def test_the_guide_shows_the_codec_that_a_new_project_has():
    page = (ROOT / "docs" / "guide" / "codec.md").read_text()
    shown = ast.parse(blocks(page, "python")[0]).body[0]
    written = ast.parse((ROOT / "commsweep" / "template" / "codec.py").read_text()).body[-1]
    codes = []
    for node in (shown, written):
        for method in node.body[1:]:
            if not isinstance(method, ast.FunctionDef):
                codes.append(ast.unparse(method))
                continue
            method.body = [
                part
                for part in method.body
                if not isinstance(part, ast.Expr) or isinstance(part.value, ast.Call)
            ]
            codes.append(ast.unparse(method))
    assert codes[: len(codes) // 2] == codes[len(codes) // 2 :]


def test_every_column_of_the_published_rows_is_described():
    page = (ROOT / "docs" / "reference" / "columns.md").read_text()
    known = [re.escape(name).replace(r"\*", ".+") for name in re.findall(r"`([^`]+)`", page)]
    settings = flatten(record(registry.preset("digits"))).keys()
    for path in (ROOT / "docs" / "results").glob("*/rows.csv"):
        with open(path, newline="") as handle:
            for column in next(csv.reader(handle)):
                setting = column in settings or column.startswith(SECTIONS)
                assert setting or any(re.fullmatch(name, column) for name in known), column
    curves = [pd.read_csv(path, nrows=1) for path in RECORDED.glob("*/curves.csv.gz")]
    assert curves
    for column in {*COUNTED, *(name for frame in curves for name in frame)}:
        assert any(re.fullmatch(name, column) for name in known), column


def test_the_list_for_programs_has_the_columns_of_load_rows(tmp_path, capsys):
    folder, store = RECORDED / "floor_warm", str(tmp_path / "store")
    rows = ["sweep", "adopt", "floor_warm", str(folder / "rows.csv"), "--store", store]
    assert main(rows) == 0
    capsys.readouterr()
    assert main(["list", "--json", "--store", store]) == 0
    printed = pd.DataFrame(json.loads(capsys.readouterr().out))
    loaded = cs.load_rows(store)
    assert list(printed) == list(loaded) and set(printed.id) == set(loaded.id)
    assert {"codec", "K", "bits", "feedback", "setting", "seed"} <= set(printed)


def test_the_examples_of_the_guide_to_integrations_run_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "guide" / "integrations.md").read_text()
    whole = [code for code in blocks(page, "python") if code.startswith("import")]
    assert len(whole) == 2
    for code in whole:
        exec(compile(code, "integrations.md", "exec"), {})
    out = capsys.readouterr().out
    assert "| weight gradients | tern |" in out and "activations: TopK 10 %" in out
    assert (tmp_path / "out" / "shadow" / "codecs.png").exists()


def test_the_example_of_weights_as_messages_runs_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks((ROOT / "docs" / "guide" / "weights.md").read_text(), "python")
    exec(compile(code, "weights.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    shares = [float(line.split()[-2].rstrip("%")) for line in lines]
    assert shares[0] == 100 and 0 < shares[1] < 50 and len(lines) == 3


def printed_commands():
    """(where, words) of every command with arguments in pages, examples and help: in code blocks,
    in backticks, and in the examples under a command's options.
    """
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in pages}
    waiting = [build_parser()]
    while waiting:
        parser = waiting.pop()
        epilog = parser.epilog() if callable(parser.epilog) else parser.epilog
        texts[parser.prog] = f"```\n{epilog or ''}\n```"
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
    makefile = (ROOT / "Makefile").read_text()
    for words in re.findall(r"^\t\$\(SWEEP\) ([^$\n]+)$", makefile, re.MULTILINE):
        yield "Makefile", words.strip()
    for where, text in texts.items():
        text = text.replace("\\\n", " ")
        shown = re.findall(r"`(commsweep [^`\n]+)`", text)
        text = text.replace("commsweep import", "").replace("commsweep as", "")
        for block in re.findall(r"```[a-z]*\n(.*?)```", text, re.S):
            shown += re.findall(r"(?:^|[ ;])(commsweep .*)", block, re.M)
        for line in shown:
            # not the signs within quotes: --claim "topk > dense", --codecs "topk:0.1; uniform:2"
            outside = r'(?=(?:[^"]*"[^"]*")*[^"]*$)'
            for part in re.split(rf"(?:&&|; |\||> |  +| #){outside}", line):
                words = part.strip().rstrip(".,);")
                is_whole = not re.search(
                    r"\.\.\.|\b[A-Z]{2,}\b|links\.json|[a-z]\)\.| names the ", words
                )
                if words.startswith("commsweep ") and words.count(" ") > 1 and is_whole:
                    yield where, words.removeprefix("commsweep ")


def test_every_printed_command_is_understood():
    parser, seen, wrong = build_parser(), 0, []
    for where, text in printed_commands():
        try:
            parser.parse(shlex.split(text))
            seen += 1
        except SystemExit:  # --help
            continue
        except (UserError, ValueError) as error:
            wrong.append(f"{where}: commsweep {text}: {error}")
    assert seen > 200 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("guide/text.md", "demo-text/topk.md"),
        ("guide/gradients.md", "demo-gradients/tables.md"),
        ("results/local_methods/README.md", "local_methods/tables.md"),
    ],
)
def test_means_with_deviations_of_a_page_are_those_of_the_recorded_table(page, table):
    recorded = set(re.findall(r"[\d.]+ ± [\d.]+", (RECORDED / table).read_text()))
    written = re.findall(r"[\d.]+ ± [\d.]+", (ROOT / "docs" / page).read_text())
    assert written and not [number for number in written if number not in recorded]


@pytest.mark.slow
def test_a_program_that_follows_its_page_gets_a_score(tmp_path, monkeypatch, capsys):
    page = (ROOT / "AGENTS.md").read_text()
    assert len(page.splitlines()) <= 40
    commands = [
        shlex.split(line.removeprefix(".venv/bin/commsweep").partition("#")[0])
        for block in blocks(page, "")
        for line in block.splitlines()
        if line.startswith(".venv/bin/commsweep")
    ]
    monkeypatch.chdir(tmp_path)
    new, quick, trained = commands
    assert main(new) == 0
    capsys.readouterr()
    assert main(quick) == 0
    (card,) = json.loads(capsys.readouterr().out)
    assert card["laws"] and all(law["holds"] for law in card["laws"])
    assert trained[:2] == quick[:2] and "--minutes" in trained

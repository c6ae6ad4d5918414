"""Searches: seeds inside a trial, budgets, fronts, resuming after a kill; their runs are ordinary
rows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import optuna
import psycopg
import pytest

from commsweep.cli.main import main
from commsweep.config import Execution, override, run_id
from commsweep.config.training import TextModel
from commsweep.errors import UserError
from commsweep.launching import search as searching
from commsweep.launching.launch import register
from commsweep.launching.search import (
    SEARCHES,
    Goal,
    Search,
    best,
    evaluate,
    links,
    open_study,
    revive,
    runs_of,
    work,
)
from commsweep.launching.views.optuna import mirror
from commsweep.store import Store
from tests.helpers import outcome, tiny

HOW = Execution("cpu")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
CUTS = ("layer1", "layer2", "layer3")
PARAMS = {
    "fwd.compressor.kind": "topk",
    "fwd.compressor.ratio": 0.1,
    "fwd.feedback.kind": "ef",
    "bwd.compressor.kind": "uniform",
    "bwd.uniform.bits": 4,
    "bwd.uniform.scale": "group",
    "bwd.feedback.kind": "none",
}


def row(run, score, share=0.1, status="finished"):
    """A made-up outcome."""
    return outcome(
        run,
        status,
        error="x",
        metrics={"val_on_acc": score} if status == "finished" else {},
        bytes={"ratio": share},
    )


def test_a_trials_parameters_are_settings_and_its_runs_differ_in_the_seed():
    changes = links(optuna.trial.FixedTrial(PARAMS))
    runs = runs_of(Search(tiny(), CUTS, seeds=3), changes)
    assert [run.seed for run in runs] == [0, 1, 2]
    assert runs[0].fwd.compressor.ratio == 0.1 and runs[0].fwd.feedback.kind == "ef"
    assert runs[0].bwd.compressor.model_dump() == {
        "kind": "uniform",
        "bits": 4,
        "scale": "group",
        "group": 128,
        "coding": None,
        "rounding": "nearest",
    }


def test_a_trial_is_the_mean_over_its_seeds_and_names_its_runs(store, monkeypatch):
    monkeypatch.setattr(
        "commsweep.training.run.execute",
        lambda run, *_: row(run, 0.5 + 0.1 * run.seed, 0.1 * (1 + run.seed)),
    )
    search = Search(tiny(), CUTS, seeds=3)
    trial = optuna.trial.FixedTrial(PARAMS)
    assert evaluate(trial, search, Goal(), store, HOW) == (pytest.approx(0.6), pytest.approx(0.2))
    assert trial.user_attrs["runs"] == [run_id(run) for run in runs_of(search, links(trial))]
    assert evaluate(trial, search, Goal(budget=0.3), store, HOW) == pytest.approx(0.6)


def test_a_diverged_run_counts_as_the_worst_and_a_failed_one_fails_the_trial(store, monkeypatch):
    monkeypatch.setattr(
        "commsweep.training.run.execute", lambda run, *_: row(run, 0, status="diverged")
    )
    assert (
        evaluate(optuna.trial.FixedTrial(PARAMS), SEARCHES["synthetic"], Goal(), store, HOW)[0]
        == 0.0
    )
    monkeypatch.setattr("commsweep.training.run.execute", lambda run, *_: row(run, 0, status="oom"))
    study = open_study("s", SEARCHES["synthetic"], Goal(), None, store)
    study.enqueue_trial(PARAMS)
    study.optimize(
        lambda trial: evaluate(trial, SEARCHES["synthetic"], Goal(), store, HOW),
        n_trials=1,
        catch=(searching.CellFailed,),
    )
    assert study.trials[0].state.name == "FAIL"


@pytest.mark.parametrize(
    "goal", [Goal(0.2), Goal(), Goal(None, "nsga2"), Goal(0.2, "nsga2")], ids=str
)
def test_a_search_finds_what_is_there_to_find(goal, store, monkeypatch):
    """A world in which quality is the share of bytes, so the best within the budget is just below
    it.
    """

    def world(run, *_):
        share = getattr(
            run.fwd.compressor,
            "ratio",
            run.fwd.compressor.bits / 16 if hasattr(run.fwd.compressor, "bits") else 1.0,
        )
        return row(run, share, share)

    monkeypatch.setattr("commsweep.training.run.execute", world)
    search = SEARCHES["synthetic"]
    study = open_study("s", search, goal, None, store)
    work(study, search, goal, store, HOW, 40)
    assert len(study.trials) == 40
    found = best(study, goal)
    if goal.budget:
        assert 0.1 < found[0].user_attrs["share"] <= 0.2
        assert found[0].value == max(t.value for t in study.trials if t.user_attrs["share"] <= 0.2)
    else:
        shares = [t.values[1] for t in found]
        assert shares == sorted(shares) and len(found) > 5
    before = len(study.trials)
    work(open_study("s", search, goal, None, store), search, goal, store, HOW, 40)
    assert len(study.trials) == before  # nothing was left to do


def test_a_resumed_search_does_not_repeat_its_first_suggestions(store, monkeypatch):
    monkeypatch.setattr("commsweep.training.run.execute", lambda run, *_: row(run, 0.5))
    search, goal = SEARCHES["synthetic"], Goal()
    for trials in (4, 8):
        work(open_study("s", search, goal, None, store), search, goal, store, HOW, trials)
    params = [json.dumps(t.params) for t in open_study("s", search, goal, None, store).trials]
    assert len(set(params)) == 8


def test_pruning_reports_each_evaluation_and_leaves_the_run_to_be_continued(store, monkeypatch):
    study = optuna.create_study(
        pruner=optuna.pruners.ThresholdPruner(lower=0.9), direction="maximize"
    )
    search = Search(tiny(epochs=3, eval_every=1, schedule__t_max=3, optim__lr=1e-6), CUTS, seeds=1)
    study.enqueue_trial(PARAMS)
    study.optimize(
        lambda trial: evaluate(trial, search, Goal(0.5, prune=True), store, HOW), n_trials=1
    )
    trial = study.trials[0]
    assert trial.state.name == "PRUNED" and list(trial.intermediate_values) == [1]
    assert [store.status(name) for name in trial.user_attrs["runs"]] == ["interrupted"]


def test_a_study_of_another_search_is_refused(store):
    open_study("s", SEARCHES["synthetic"], Goal(0.1), None, store)
    for search, goal in ((SEARCHES["digits"], Goal(0.1)), (SEARCHES["synthetic"], Goal(0.2))):
        with pytest.raises(UserError, match="belongs to another search or byte budget"):
            open_study("s", search, goal, None, store)


def test_a_database_that_cannot_be_used_is_one_line_without_the_password(store):
    with pytest.raises(UserError) as caught:
        open_study(
            "s", SEARCHES["synthetic"], Goal(), "postgresql://me:secret@127.0.0.1:1/x", store
        )
    assert "secret" not in str(caught.value) and "postgresql://127.0.0.1:1/x" in str(caught.value)
    with pytest.raises(UserError, match="takes a database URL"):
        open_study("s", SEARCHES["synthetic"], Goal(), "file.db", store)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:se@cr/et@127.0.0.1:1/x",
        "postgresql://127.0.0.1:1/x?password=secret",
        "nothing://me:secret@h/x",
    ],
)
def test_no_password_is_ever_printed(url, tmp_path, capsys):
    assert main(["search", "synthetic", "--storage", url, "--store", str(tmp_path)]) == 2
    out = capsys.readouterr()
    assert "cannot be used" in out.err and len(out.err.strip().splitlines()) == 1
    assert not any(word in out.out + out.err for word in ("secret", "se@cr", "cr/et", "me:"))


def test_every_boundary_may_have_settings_of_its_own(store, monkeypatch):
    ran = []
    monkeypatch.setattr(
        "commsweep.training.run.execute", lambda run, *_: ran.append(run) or row(run, 0.5)
    )
    search, goal = SEARCHES["synthetic"], Goal(per_boundary=True)
    work(open_study("s", search, goal, None, store), search, goal, store, HOW, 6)
    assert {tuple(run.at) for run in ran} == {("layer1", "layer2")}
    assert len({run_id(run) for run in ran}) == 6
    assert any(run.at["layer1"].fwd != run.at["layer2"].fwd for run in ran)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_boundaries_of_a_search_are_those_of_its_model(name):
    search = SEARCHES[name]
    if isinstance(search.base.model, TextModel):
        from commsweep.models import causal_lm

        model = causal_lm.build(search.base.model, 256, 32, None)
        assert search.cuts == tuple(causal_lm.cut_points(search.base.model, model))
    else:
        assert search.cuts == search.base.model.cuts


@pytest.fixture(scope="module")
def postgres(tmp_path_factory):
    """URL of a PostgreSQL server of Debian's packages that lives as long as this module's tests."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not binaries:
        pytest.skip("no PostgreSQL server here (apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    as_user = []
    if os.getuid() == 0:  # the server refuses to run as root
        shutil.chown(folder, "postgres")
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    (folder / "word").write_text("secret")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = subprocess.run(
        [
            *as_user,
            binaries[-1] / "initdb",
            "-D",
            folder / "data",
            "-U",
            "me",
            "-A",
            "scram-sha-256",
            "--pwfile",
            folder / "word",
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    server = subprocess.Popen(
        [
            *as_user,
            binaries[-1] / "postgres",
            "-D",
            folder / "data",
            "-p",
            str(port),
            "-k",
            folder,
            "-h",
            "127.0.0.1",
            "-F",
        ],
        stderr=subprocess.DEVNULL,
    )
    url = f"postgresql://me:secret@127.0.0.1:{port}/postgres"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(url).close()
                break
            except psycopg.OperationalError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield url
    finally:
        # a fast shutdown: SIGTERM would wait for open connections
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_several_workers_share_a_study_in_postgresql(postgres, tmp_path, capsys):
    command = [
        sys.executable,
        "-m",
        "commsweep",
        "search",
        "synthetic",
        "--trials",
        "8",
        "--workers",
        "2",
        "--storage",
        postgres,
        "--store",
        str(tmp_path),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["trials"] >= 8 and said["best"]
    study = optuna.load_study(
        study_name=said["study"], storage=postgres.replace("ql://", "ql+psycopg://")
    )
    named = {
        name
        for trial in study.trials
        if trial.state.name == "COMPLETE"
        for name in trial.user_attrs["runs"]
    }
    assert named <= {row["id"] for row in Store(tmp_path).rows()}
    assert (
        main(
            [
                "search",
                "synthetic",
                "--storage",
                postgres.replace("secret", "wr0ng"),
                "--store",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert "wr0ng" not in (err := capsys.readouterr().err) and "are user and password right" in err


@pytest.mark.slow
def test_several_workers_share_one_study_and_a_killed_search_resumes(tmp_path):
    command = [
        sys.executable,
        "-m",
        "commsweep",
        "search",
        "synthetic",
        "--trials",
        "8",
        "--workers",
        "2",
        "--store",
        str(tmp_path),
        "--json",
    ]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store, end = Store(tmp_path), time.monotonic() + 120
    while len(store.rows()) < 2:
        assert time.monotonic() < end and first.poll() is None
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    time.sleep(1.5)  # its workers end with it
    recorded = {row["id"]: row["when"] for row in store.rows()}
    out = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    )
    assert out["trials"] >= 8 and out["study"] == "synthetic-front"
    study = open_study("synthetic-front", SEARCHES["synthetic"], Goal(), None, store)
    states = [trial.state.name for trial in study.trials]
    assert states.count("RUNNING") == 0 and states.count("COMPLETE") >= 8
    assert revive(study) == 0
    rows = {row["id"]: row for row in store.rows()}
    assert states.count("COMPLETE") + states.count("PRUNED") == 8  # two workers do not overshoot
    # none was executed again
    assert all(rows[name]["when"] == when for name, when in recorded.items())
    named = {
        name
        for trial in study.trials
        if trial.state.name == "COMPLETE"
        for name in trial.user_attrs["runs"]
    }
    assert named <= rows.keys()
    assert all(run in rows for entry in out["best"] for run in entry["runs"])


def test_a_sweep_is_mirrored_into_a_study_made_anew_each_time(store):
    runs = [
        tiny(seed=seed, **extra)
        for seed in range(2)
        for extra in (
            {},
            {"fwd__compressor__kind": "topk"},
            {"fwd__compressor__kind": "topk", "fwd__compressor__ratio": 0.3},
        )
    ]
    for run in runs[:5]:
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        made = row(run, 0.0, 0.1 + getattr(run.fwd.compressor, "ratio", 0.9))
        folder.finish(made | {"metrics": {"test_on_acc": 0.5 + run.seed / 10}})
    register("grid", runs, store)
    for _ in range(2):
        path = mirror("grid", store)
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(path))
        )
        study = optuna.load_study(study_name="grid", storage=storage)
        assert len(study.trials) == 5 and study.metric_names == ["quality", "share of dense bytes"]
    trial = next(t for t in study.trials if t.user_attrs["run"] == run_id(runs[2]))
    assert trial.values == [0.5, pytest.approx(0.4)]
    assert trial.params == {"K": 0.3}  # once, and no seed
    with pytest.raises(UserError, match="knows no sweep 'grod'"):
        mirror("grod", store)


def test_a_search_and_a_sweep_of_one_name_do_not_overwrite_each_other(store):
    register("s", [], store)
    open_study("s", SEARCHES["synthetic"], Goal(), None, store)
    with pytest.raises(UserError, match="study 's' in store .* is a search's"):
        mirror("s", store)
    register("m", [], store)
    mirror("m", store)
    mirror("m", store)
    with pytest.raises(UserError, match="belongs to another search"):
        open_study("m", SEARCHES["synthetic"], Goal(), None, store)


def test_the_dashboard_serves_a_sweep(store):
    run = tiny()
    store.folder(run_id(run)).begin(run, {})
    store.folder(run_id(run)).finish(row(run, 0.0) | {"metrics": {"test_on_acc": 0.5}})
    register("grid", [run], store)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "commsweep",
        "dashboard",
        "grid",
        "--store",
        str(store.root),
        "--port",
        str(port),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert f"http://127.0.0.1:{port}/" in process.stdout.readline()
            end = time.monotonic() + 60
            while True:
                try:
                    with urllib.request.urlopen(
                        f"http://127.0.0.1:{port}/api/studies", timeout=5
                    ) as answer:
                        assert "grid" in answer.read().decode()
                    break
                except OSError:
                    assert time.monotonic() < end
                    time.sleep(0.2)
            # the page draws itself: what a person sees has the study's name
            if BROWSER is not None:
                page = subprocess.run(
                    [
                        BROWSER,
                        "--headless",
                        "--no-sandbox",
                        "--disable-gpu",
                        "--dump-dom",
                        "--virtual-time-budget=8000",
                        f"http://127.0.0.1:{port}/",
                    ],
                    capture_output=True,
                    text=True,
                    timeout=120,
                    env=os.environ | {"HOME": str(store.root)},
                ).stdout
                assert "grid" in re.sub("<script.*?</script>", "", page, flags=re.S)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    "args,message",
    [
        (["dashboard", "nothing"], "neither a study nor a sweep"),
        (["search", "digit"], "did you mean 'digits'"),
        (["search", "digits", "--budget", "2"], "0 < SHARE <= 1"),
        (["search", "digits", "--prune"], "--prune needs one objective"),
        (["search", "digits", "--trials", "0"], "--trials 0: at least 1"),
        (["search", "digits", "--study", "../x"], "cannot be a file name"),
    ],
)
def test_bad_input_is_one_line(args, message, capsys, tmp_path):
    assert main([*args, "--store", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_password_is_never_said_wherever_it_stands():
    with pytest.raises(UserError) as said:
        searching._guarded("postgresql://user:se#cret@host/name#hidden?x=secret", lambda: 1 / 0)
    assert "cret" not in str(said.value) and "hidden" not in str(said.value)


def test_a_dead_workers_trial_is_put_back(store, monkeypatch):
    search, goal = Search(tiny(), CUTS, seeds=1), Goal(0.5)
    study = open_study("s", search, goal, None, store)
    stale = study.ask()
    stale.set_user_attr("worker", f"{searching.socket.gethostname()}:999999999")
    monkeypatch.setattr("commsweep.training.run.execute", lambda run, *_: row(run, 0.5))
    work(study, search, goal, store, HOW, 2)
    states = [trial.state.name for trial in study.trials]
    assert states.count("COMPLETE") == 2 and states.count("FAIL") == 1 and "RUNNING" not in states


@pytest.mark.parametrize("name", sorted(SEARCHES))
def test_a_trial_is_printed_as_words_that_run_takes(name):
    """The printed words, given to `commsweep run`, make the trial's own run."""
    search, goal = searching.search_of(name), Goal()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(12):
        changes = search.suggest(study.ask())
        line = searching.words(search, study.trials[-1], goal)
        pairs = dict(word.split("=", 1) for word in line.split())
        (run, *_) = searching.runs_of(search, changes)
        assert override(search.base, pairs | {"seed": run.seed}) == run


def test_the_knee_of_a_front_is_where_more_bytes_buy_little():
    front = [
        optuna.trial.create_trial(values=[quality, share])
        for quality, share in ((0.2, 0.02), (0.9, 0.1), (0.94, 0.5), (0.95, 1.0))
    ]
    assert searching.knee(front) is front[1]
    assert searching.knee(front[:2]) is front[1] and searching.knee(front[:1]) is front[0]


def test_objectives_have_names(tmp_path):
    study = searching.open_study(
        "named", searching.search_of("digits"), Goal(), None, Store(tmp_path)
    )
    assert study.metric_names == ["validation quality", "share of the dense bytes"]

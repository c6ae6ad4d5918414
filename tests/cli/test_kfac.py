"""A plan of K-FAC, and K-FAC on the command line: mistakes in one line, a plan from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from commsweep.cli.main import main
from commsweep.registry import content, plan
from commsweep.store import Store
from tests.analysis import test_kfac
from tests.processes.test_links import allowed, rooted

kfac = content("sweeps.kfac")


def refused(capsys, *arguments):
    """The one line that says why."""
    assert main([str(one) for one in arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "Traceback" not in said
    return said


@pytest.mark.parametrize(
    "settings, says",
    [
        (
            ["kfac.damping=0.03", "kfac.factors_every=0"],
            "kfac.factors_every=0: input should be greater than or equal to 1",
        ),
        (["kfac.inverses_every=0"], "kfac.inverses_every=0: input should be"),
        (["kfac.dampin=1"], "did you mean"),
        (["kfac.damping=-1"], "kfac.damping=-1"),
        (["kfac.damping=0.03", "kfac.max_factor=1"], "no layer that it supports"),
        (
            ["kfac.damping=0.03", "kfac.statistics=owner", "grad.learners=16"],
            "16 learners are more than the 13",
        ),
        (["kfac.damping=0.03", "microbatches=2"], "microbatches"),
    ],
)
def test_runs_that_cannot_be(settings, says, capsys, tmp_path):
    assert says in refused(
        capsys, "run", "synthetic", "model.cuts=[]", *settings, "--store", tmp_path
    )
    assert Store(tmp_path).rows() == []


def test_damping_of_zero_with_a_singular_factor_is_an_outcome_with_the_layers_name(
    capsys, tmp_path
):
    """Fewer samples than rows: no inverse. It is recorded as diverged, which is no fault."""
    assert (
        main(["run", "synthetic", "model.cuts=[]", "kfac.damping=0", "--store", str(tmp_path)]) == 3
    )
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    (row,) = Store(tmp_path).rows()
    assert (
        row["status"] == "diverged"
        and "factor of layer" in row["error"]
        and "raise kfac.damping" in row["error"]
    )


@pytest.mark.parametrize(
    "options, says",
    [
        (
            ["--placement", "shared", "--fraction", "0.3"],
            "a worker fraction of 0.3 does not divide 2 learners",
        ),
        (["--placement", "elsewhere"], "--placement"),
        (["--fusion", "pipelines"], "did you mean 'pipelined'?"),
        (["--buffer", "0"], "--buffer"),
        (["--buffer", "100"], "--buffer goes with --fusion threshold only"),
        (["--fraction", "0.5"], "--fraction goes with --placement shared only"),
        (["--placement", "spread", "--small", "9"], "--small goes with --placement balanced only"),
        (["--bandwidth", "0Mbit"], "a link as the machine has it is 'unlimited'"),
        (["--bandwidth", "10"], "is no bandwidth"),
    ],
)
def test_wirings_that_cannot_be(options, says, capsys, tmp_path):
    assert says in refused(
        capsys,
        "ddp",
        "synthetic",
        "model.cuts=[]",
        "kfac.damping=0.03",
        "--learners",
        "2",
        *options,
        "--store",
        tmp_path,
    )


def test_plans_that_are_not_there_and_reports_without_measurements(capsys, tmp_path):
    assert "did you mean 'demo-kfac'?" in refused(capsys, "links", "demo-kfak", "--store", tmp_path)
    test_kfac.fill(Store(tmp_path), test_kfac.best_at, lambda run: 3)
    said = refused(
        capsys,
        "links",
        "demo-kfac",
        "--only",
        "report",
        "--store",
        tmp_path,
        "--out",
        tmp_path / "out",
    )
    assert "29 of 29 measurements are missing" in said and "--only measure takes them" in said


def test_every_plan_has_a_sweep_and_is_made_of_measurements_that_can_be_taken():
    from commsweep.processes import ddp
    from commsweep.registry import sweep

    for name in kfac.PLANS:
        wanted = plan(name)
        assert sweep(name) and len({str(one) for one in wanted}) == len(wanted)
        for run, wiring in wanted:
            ddp.check(run, wiring)
            assert wiring.steps and (run.kfac is None or run.kfac.inverses_every == 1)


@rooted
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_is_trained_measured_and_reported(tmp_path):
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    store, out = ["--store", str(tmp_path / "s")], tmp_path / "out"
    commsweep = [sys.executable, "-m", "commsweep"]

    def done(*arguments):
        return subprocess.run(
            [*commsweep, *arguments, *store], capture_output=True, text=True, timeout=500
        )

    assert done("sweep", "launch", "smoke-kfac").returncode == 0
    made = done("links", "smoke-kfac", "--out", str(out))
    assert made.returncode == 0, made.stderr
    assert (
        "steps predicted: median error" in made.stdout and (out / "figures" / "steps.png").exists()
    )
    told = json.loads((out / "claims.json").read_text())["claims"]
    assert {one["claim"] for one in told} == {f"K{n}" for n in range(1, 7)}
    assert "8 measurements, 0 missing" in done("links", "smoke-kfac", "--only", "measure").stderr


def test_a_plan_without_trainings_of_its_own_refuses_to_train(tmp_path, capsys):
    assert main(["links", "smoke-kfac", "--only", "train", "--store", str(tmp_path)]) == 2
    assert "plan 'smoke-kfac' measures kfac, whose trainings are" in capsys.readouterr().err

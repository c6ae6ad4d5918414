"""Runs are single processes, wherever they are started; what the environment does is no cell's
outcome.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commsweep.config import Execution, run_id
from commsweep.store import Store
from commsweep.training.run import execute
from tests.helpers import tiny

COMMAND = [sys.executable, "-m", "commsweep"]
ENVIRONMENTS = {
    "Slurm": {
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS_PER_NODE": "4",
    },
    "torchrun": {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
        "TORCHELASTIC_RUN_ID": "x",
    },
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_run_is_one_process_whatever_the_environment_says(name, store, monkeypatch):
    for key, value in ENVIRONMENTS[name].items():
        monkeypatch.setenv(key, value)
    row = execute(tiny(epochs=1, eval_every=1), store, Execution("cpu"))
    assert row["status"] == "finished", row["error"]


@pytest.mark.slow
def test_a_fault_of_the_environment_is_reported_and_not_recorded(store, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'sklearn.datasets':\n"
        "            raise RuntimeError('this node is broken')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    plan = subprocess.run(
        [
            *COMMAND,
            "sweep",
            "launch",
            "--base",
            "digits",
            "epochs=1",
            "--store",
            str(store.root),
            "--workers",
            "1",
        ],
        capture_output=True,
        text=True,
    )
    assert (
        plan.returncode == 1 and "1 refused" in plan.stdout and "this node is broken" in plan.stderr
    )
    assert not store.rows()


@pytest.mark.slow
def test_a_cell_whose_worker_gets_sigterm_is_begun_again(tmp_path):
    store = Store(tmp_path / "s")
    settings = ["epochs=60", "eval_every=60", "schedule.t_max=60"]
    process = subprocess.Popen(
        [
            *COMMAND,
            "sweep",
            "launch",
            "--base",
            "synthetic",
            *settings,
            "--store",
            str(store.root),
            "--workers",
            "1",
            "--checkpoint-every",
            "0",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    name = run_id(tiny(epochs=60, eval_every=60, schedule__t_max=60))
    deadline = time.monotonic() + 120
    while not list((store.root / name).glob("last.*.ckpt")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in _workers(process.pid):
        os.kill(pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "1 finished" in out
    assert store.status(name) == "finished"


def _workers(pid: int) -> list[int]:
    def below(parent: int) -> list[int]:
        return [
            int(one) for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        ]

    servers = [
        one for one in below(pid) if b"forkserver" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]
    return [worker for server in servers for worker in below(server)]


@pytest.mark.slow
def test_a_report_is_utf8_whatever_the_locale(tmp_path):
    from commsweep.launching.launch import register
    from tests.helpers import outcome

    store, runs = Store(tmp_path / "s"), [tiny(seed=seed) for seed in range(3)]
    for run in runs:
        store.folder(run_id(run)).begin(run, {})
        store.folder(run_id(run)).finish(
            outcome(run, metrics={"test_on_acc": 0.5, "test_off_acc": 0.5})
        )
    register("three", runs, store)
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.size: 40\n")
    env = os.environ | {
        "PYTHONUTF8": "0",
        "LC_ALL": "en_US.ISO-8859-1",
        "PYTHONIOENCODING": "ascii",
        "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
        "PYTHONPATH": os.getcwd(),
    }
    done = subprocess.run(
        [*COMMAND, "report", "three", "--store", str(store.root), "--out", str(tmp_path / "out")],
        capture_output=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "±" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")

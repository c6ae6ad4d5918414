"""Real links: the kernel counts what the ledger says, a killed stage and a broken link end cleanly and continue."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commsweep.experiments.pipelining import namespaces
from commsweep.experiments.store import Store

COMMSWEEP = [sys.executable, "-m", "commsweep"]
TWO = ['model.cuts=["layer2"]']
rooted = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")


def allowed() -> bool:
    """Whether namespaces can be made here at all."""
    try:
        with namespaces.chain(2):
            return True
    except namespaces.UserError:
        return False


def run(store: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMSWEEP, "pipeline", "synthetic", *TWO, *arguments, "--store", str(store), "--json"],
                          capture_output=True, text=True, timeout=200)


def leftovers() -> list[str]:
    found = subprocess.run(["pgrep", "-fa", "commsweep pipeline synthetic"], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "pgrep" not in line]


@rooted
@pytest.mark.slow
def test_a_measurement_over_a_slow_link_takes_the_time_its_bytes_take(tmp_path):
    """Dense messages of 16 KiB each way, and 5 ms: one microbatch cannot hide them."""
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    done = run(tmp_path, "epochs=8", "--steps", "20", "--bandwidth", "10Mbit", "--latency", "5ms")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    wire = sum(sum(stage["sent"].values()) for stage in row["transport"]) / row["steps"]
    least = 8 * wire / 10e6 + 2 * 0.005
    assert least < row["timing"]["step_seconds"] < 3 * least + 0.2
    assert Store(tmp_path).pipelines() == [{key: value for key, value in row.items() if key != "simulation"}]


@rooted
@pytest.mark.slow
def test_the_kernel_counts_what_the_ledger_says(tmp_path):
    """Interface counters of two runs of different length: they differ by messages, headers and acknowledgements."""
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    seen = {}
    for steps in (8, 40):
        (tmp_path / str(steps)).mkdir()
        with namespaces.chain(2) as nodes:
            store = tmp_path / str(steps)
            command = ["commsweep", "pipeline", "synthetic", *TWO, "epochs=20", "eval_every=20", "--steps", str(steps),
                       "--store", str(store)]
            Store(store)
            processes = [subprocess.Popen(one, env=os.environ | extra) for one, extra in zip(
                nodes.commands(command), nodes.environments(), strict=True)]
            assert [process.wait(120) for process in processes] == [0, 0]
            seen[steps] = nodes.sent(), Store(store).pipelines()[0]
    (few, short), (many, long) = seen[8], seen[40]
    for end, stage, way in (("0 right", 0, "fwd"), ("1 left", 1, "bwd")):
        kernel = many[end] - few[end]
        handed = long["transport"][stage]["sent"][way] - short["transport"][stage]["sent"][way]
        ledger = sum(b[way] for b in long["boundaries"].values()) - sum(b[way] for b in short["boundaries"].values())
        framing = long["transport"][stage]["framing"][way] - short["transport"][stage]["framing"][way]
        assert handed == ledger + framing == 32 * (2 * 8192 + 38)
        # 66 bytes of headers a frame of 1448, an acknowledgement for every other frame that came, gloo's own headers
        assert handed * (1 + 66 / 65536) < kernel < handed * (1 + 2 * 66 / 1448) + 32 * 2 * 400


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_stage_ends_all_and_the_same_command_continues(tmp_path):
    settings = ["epochs=40", "eval_every=40"]
    command = [*COMMSWEEP, "pipeline", "synthetic", *TWO, *settings, "--store", str(tmp_path / "a"),
               "--checkpoint-every", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("a/pipelines/*/stage1.*.ckpt")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(int(next(tmp_path.glob("a/pipelines/*/stage1.pid")).read_text()), signal.SIGKILL)
    killed = time.monotonic()
    out, error = process.communicate(timeout=60)
    assert time.monotonic() - killed < 20 and process.returncode == 2 and out == ""
    line = error.strip().splitlines()[-1]
    assert line.startswith("commsweep: stage 1 was ended by SIGKILL; all others were ended.")
    assert not leftovers()
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=200)
    whole = run(tmp_path / "b", *settings)
    assert json.loads(again.stdout)["metrics"] == json.loads(whole.stdout)["metrics"]


@rooted
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_is_measured_trained_and_reported(tmp_path):
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    command = [*COMMSWEEP, "links", "smoke-links", "--store", str(tmp_path / "s"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "median error of the predictions" in done.stdout and (tmp_path / "out" / "gantt.png").exists()
    again = subprocess.run([*command, "--only", "measure"], capture_output=True, text=True, timeout=60)
    assert "4 measurements, 0 missing" in again.stderr


@rooted
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("down", "patience", "survives"), [(60.0, 10, False), (4.0, 60, True)])
def test_a_link_that_drops_ends_the_run_or_is_waited_for(tmp_path, down, patience, survives):
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    Store(tmp_path)
    with namespaces.chain(2) as nodes:
        command = ["commsweep", "pipeline", "synthetic", *TWO, "epochs=60", "eval_every=60", "--store", str(tmp_path),
                   "--patience", str(patience), "--checkpoint-every", "0"]
        processes = [subprocess.Popen(one, env=os.environ | extra, stderr=subprocess.PIPE, text=True)
                     for one, extra in zip(nodes.commands(command), nodes.environments(), strict=True)]
        while not list(tmp_path.glob("pipelines/*/stage1.*.ckpt")):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        nodes.cut(0, down=True)
        cut = time.monotonic()
        while time.monotonic() - cut < down and any(process.poll() is None for process in processes):
            time.sleep(0.1)
        if survives:
            nodes.cut(0, down=False)
            assert [process.wait(200) for process in processes] == [0, 0]
            return
        assert all(process.poll() == 1 for process in processes) and time.monotonic() - cut < patience + 20
        for stage, process in enumerate(processes):
            assert f"commsweep: stage {stage}: " in process.stderr.read().strip().splitlines()[-1]

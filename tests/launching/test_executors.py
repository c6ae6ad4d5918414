"""The same cells on a real Ray cluster of two nodes and as jobs of submitit's local executor, both
disturbed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from commsweep.cli.main import main
from commsweep.config import Execution, run_id
from commsweep.errors import UserError
from commsweep.launching.executors import local, slurm
from commsweep.launching.executors.job import Interrupts
from commsweep.launching.launch import launch, register
from commsweep.store import Store
from tests.helpers import tiny
from tests.launching.test_launch import cells, in_the_middle, numbers, straight, wait_for  # noqa: F401

HOW = Execution("cpu", checkpoint_every=0)
RAY = str(Path(sys.executable).with_name("ray"))


def descendants(pid):
    """A process and all below it."""
    found = [pid]
    for parent in found:
        try:
            found += [
                int(one)
                for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            ]
        except FileNotFoundError:
            continue
    return found


def kill_all(process):
    for pid in reversed(descendants(process.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def cluster(monkeypatch):
    """(address, head, second node): two Ray nodes of one CPU each on this machine."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets lie below it
    address = f"127.0.0.1:{free_port()}"
    common = ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--disable-usage-stats", "--block"]
    head = subprocess.Popen(
        [
            RAY,
            "start",
            "--head",
            f"--port={address.split(':')[1]}",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
            *common,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    nodes = [head]
    try:
        wait_for(
            lambda: (
                subprocess.run(
                    [RAY, "status", f"--address={address}"], capture_output=True
                ).returncode
                == 0
            )
        )
        nodes.append(
            subprocess.Popen(
                [RAY, "start", f"--address={address}", *common],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        wait_for(
            lambda: (
                b"0.0/2.0 CPU"
                in subprocess.run(
                    [RAY, "status", f"--address={address}"], capture_output=True
                ).stdout
            )
        )
        yield address, *nodes
    finally:
        for node in nodes:
            kill_all(node)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_ray_cluster_that_loses_a_node_ends_with_the_same_rows(cluster, store, straight):
    address, _, second = cluster

    def lose_a_node():
        wait_for(lambda: in_the_middle(store))
        kill_all(second)

    threading.Thread(target=lose_a_node, daemon=True).start()
    report = launch(cells(), store, HOW, executor="ray", cluster={"address": address})
    assert report.workers == 2
    assert second.poll() is not None
    assert numbers(store) == straight
    assert launch(cells(), store, HOW, executor="ray", cluster={"address": address}).outcomes == {}
    assert not list(store.root.glob(".stop-*"))


@pytest.mark.slow
def test_jobs_of_submitit_end_with_the_same_rows(store, straight):
    report = launch(cells(), store, HOW, 2, executor="slurm", cluster={"cluster": "local"})
    assert report.outcomes == {"finished": 4} and report.workers == 2
    assert numbers(store) == straight


@pytest.mark.slow
def test_a_job_at_its_time_limit_is_queued_again_and_one_that_is_killed_is_said(
    store, straight, monkeypatch
):
    jobs = []
    submit = slurm._submit
    monkeypatch.setattr(slurm, "_submit", lambda *args: jobs.append(submit(*args)) or jobs[-1])

    def disturb():
        wait_for(lambda: in_the_middle(store))
        limited, killed = jobs[0]
        limited._interrupt()  # what Slurm sends before the limit
        for pid in reversed(descendants(killed._process.pid)):
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=disturb, daemon=True).start()
    report = launch(cells(), store, HOW, 2, executor="slurm", cluster={"cluster": "local"})
    rows = {row["id"]: row for row in store.rows()}
    assert len(rows) == 4 and report.outcomes.total() == 4
    failed = [row for row in rows.values() if row["status"] == "failed"]
    assert all("its Slurm job ended: INTERRUPTED" in row["error"] for row in failed)
    # each job has two cells at once; none where the other job took one over
    assert len(failed) <= 2
    assert {
        name: one for name, one in numbers(store).items() if one[0] == "finished"
    }.items() <= straight.items()


@pytest.mark.slow
def test_ctrl_c_stops_cells_on_other_machines(store):
    runs = cells()
    register("four", runs, store)
    code = (
        "import sys\n"
        "from commsweep.config import Execution\n"
        "from commsweep.store import Store\n"
        "from commsweep.launching.launch import launch\n"
        "from tests.launching.test_launch import cells\n"
        "launch(cells(), Store(sys.argv[1]), Execution('cpu', checkpoint_every=0), 2, "
        "executor='slurm', cluster={'cluster': 'local'})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store.root)],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    wait_for(lambda: in_the_middle(store))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert {store.status(run_id(run)) for run in runs} <= {"interrupted", "missing"}
    assert not list(store.root.glob(".stop-*"))


@pytest.mark.slow
def test_cells_that_no_job_can_begin_are_reported(store):
    bad = tiny(model__cuts=["layer9"])
    report = launch([bad], store, HOW, 1, executor="slurm", cluster={"cluster": "local"})
    assert report.outcomes == {"refused": 1}
    assert "'layer9' is no legal cut" in report.errors[0]


@pytest.mark.parametrize(
    "options, line",
    [
        (
            ["--executor", "slrm"],
            "--executor slrm: not one of local, ray, slurm; did you mean 'slurm'?",
        ),
        (
            ["--executor", "ray", "--ray-address", "127.0.0.1:9"],
            "--ray-address 127.0.0.1:9: no Ray cluster answers there",
        ),
        (["--executor", "ray", "--ray-cpus", "x"], "--ray-cpus 'x' is no number"),
        (
            ["--executor", "slurm", "--slurm", "partitoin=a"],
            "--slurm partitoin=a: submitit has no such parameter; did you mean 'partition'?",
        ),
        (["--executor", "slurm"], '--executor slurm: Could not detect "srun"'),
        (["--slurm", "partition=a"], "--slurm... has no effect with --executor local"),
    ],
)
def test_what_cannot_be_launched_is_one_line(options, line, tmp_path, capsys):
    assert (
        main(
            [
                "sweep",
                "launch",
                "smoke",
                "--store",
                str(tmp_path / "s"),
                "--device",
                "cpu",
                *options,
            ]
        )
        == 2
    )
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"commsweep: {line}")
    assert not list((tmp_path / "s").glob("*/run.json"))


@pytest.mark.parametrize("engine, module", [("ray", "ray"), ("slurm", "submitit")])
def test_an_engine_that_is_not_installed_says_how_to_install_it(
    engine, module, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["sweep", "launch", "smoke", "--store", str(tmp_path), "--executor", engine]) == 2
    assert f"pip install 'commsweep[{engine}]'" in capsys.readouterr().err


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.getuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", place], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", place], capture_output=True)


@pytest.mark.slow
def test_on_a_full_disk_cells_are_reported_and_executed_later(disk):
    store, ballast = Store(disk / "store"), disk / "ballast"
    runs = [tiny(seed=seed) for seed in range(3)]
    assert launch(runs[:1], store, HOW, 1).outcomes == {"finished": 1}
    with suppress(OSError):
        ballast.write_bytes(b"x" * 400_000)
    full = launch(runs, store, HOW, 1)
    assert full.outcomes == {"refused": 2} and "No space left" in full.errors[0]
    ballast.unlink()
    assert launch(runs, store, HOW, 1).outcomes == {"finished": 2}
    assert {row["status"] for row in store.rows()} == {"finished"} and len(store.rows()) == 3


def test_a_read_only_store_is_one_line_and_can_still_be_looked_at(disk, capsys):
    register("smoke", [], store := Store(disk / "store"))
    launch([tiny()], store, HOW, 1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert main(["sweep", "launch", "smoke", "--store", str(store.root)]) == 2
    assert (
        "Read-only file system" in (err := capsys.readouterr().err)
        and len(err.strip().splitlines()) == 1
    )
    assert main(["list", "--store", str(store.root)]) == 0
    assert run_id(tiny()) in capsys.readouterr().out
    assert main(["sweep", "status", "smoke", "--store", str(store.root)]) == 0


def test_a_disk_that_vanishes_during_a_launch_leaves_nothing_beside_it(disk):
    store = Store(disk)
    runs = [tiny(seed=seed) for seed in range(3)]

    def vanish(_run, _status):
        if not gone:
            subprocess.run(["umount", "-l", disk], check=True)
        gone.append(_status)

    gone = []
    report = launch(runs, store, HOW, 1, progress=vanish)
    assert gone[0] == "finished" and report.outcomes == {"finished": 1, "refused": 2}
    assert "is not there any more; mount its disk again" in report.errors[0]
    assert not list(disk.iterdir())  # what lies below the mount point was left alone


def test_a_clock_that_is_set_back_or_forward_times_nothing_out(store, monkeypatch):
    jumps = iter(range(10**9))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 1e6)
    assert launch([tiny(), tiny(seed=1)], store, HOW, 1, timeout=100).outcomes == {"finished": 2}


def test_sigterm_ends_a_launch_as_a_second_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Interrupts(lambda: None, print) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert not interrupts.asked and signal.getsignal(signal.SIGTERM) is before


def children(pid: int) -> dict[int, str]:
    """The processes that a process has started, and theirs, with their command lines."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                child = int(path.parent.name)
                command = (path.parent / "cmdline").read_bytes().decode()
                found |= {child: command} | children(child)
    return found


def launched(root: Path, busy: bool) -> subprocess.Popen:
    """A launch of two cells in a process of its own, whose workers' server has begun; busy: and
    whose cells train.
    """
    words = ["sweep", "launch", "two", "--base", "synthetic", "--axis", "epochs=60,80"]
    words += ["--seeds", "1", "--workers", "2", "--store", str(root)]
    launch = subprocess.Popen(
        [sys.executable, "-m", "commsweep", *words], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: any("forkserver" in line for line in children(launch.pid).values()))
    if busy:
        wait_for(lambda: list(root.glob("[0-9a-f]*/log.txt")))
    return launch


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["importing", "training"])
def test_a_killed_server_of_workers_is_started_again(tmp_path, busy):
    launch = launched(tmp_path, busy)
    server = next(pid for pid, line in children(launch.pid).items() if "forkserver" in line)
    os.kill(server, signal.SIGKILL)
    said = launch.communicate(timeout=120)[1]
    assert launch.returncode == 0 and "Traceback" not in said, said
    assert [row["status"] for row in Store(tmp_path).rows()] == ["finished"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["importing", "training"])
def test_nothing_goes_on_when_the_launcher_is_killed(tmp_path, busy):
    launch = launched(tmp_path, busy)
    left = [pid for pid, line in children(launch.pid).items() if "forkserver" in line]
    launch.kill()
    launch.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in left), 5)


def test_a_server_that_is_killed_at_every_start_is_one_line(monkeypatch):
    def dies(process) -> None:
        raise EOFError

    monkeypatch.setattr(local.FORKS.Process, "start", dies)
    with pytest.raises(UserError, match="was killed 3 times while it started"):
        local.forked(print, ())

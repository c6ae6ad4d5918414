"""Real links: the kernel counts what the ledger says, a killed stage and a broken link end cleanly
and continue.
"""

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

from commsweep.config.execution import Cable, bucket
from commsweep.processes import awake, namespaces
from commsweep.store import Store
from tests.helpers import free_port

COMMSWEEP = [sys.executable, "-m", "commsweep"]
TWO = ['model.cuts=["layer2"]']
rooted = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)


def allowed() -> bool:
    """Whether namespaces can be made here at all."""
    try:
        with namespaces.chain([Cable()]):
            return True
    except namespaces.UserError:
        return False


def run(store: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMSWEEP, "pipeline", "synthetic", *TWO, *arguments, "--store", str(store), "--json"],
        capture_output=True,
        text=True,
        timeout=200,
    )


def stage_of_one(store: Path, stage: int = 1) -> int:
    """The process of a stage of the pipelines in a store."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            told = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if (
            f"RANK={stage}".encode() in told
            and str(store) in command
            and "torch.distributed.run" not in command
        ):
            return int(folder.name)
    raise AssertionError(f"no stage {stage} runs")


def leftovers() -> list[str]:
    found = subprocess.run(
        ["pgrep", "-fa", "commsweep.* pipeline synthetic|processes.pipeline"],
        capture_output=True,
        text=True,
    ).stdout
    return [line for line in found.splitlines() if "pgrep" not in line]


ECHO = """
import socket, sys, time
if sys.argv[1] == "serve":
    with socket.create_server(("0.0.0.0", 5555)) as server:
        print("ready", flush=True)
        with server.accept()[0] as client:
            while data := client.recv(1 << 16):
                client.sendall(data)
else:
    with socket.create_connection((sys.argv[2], 5555)) as there:
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for nbytes in (1, 1, 200_000):
            since, left = time.perf_counter(), nbytes
            there.sendall(bytes(nbytes))
            while left:
                left -= len(there.recv(1 << 16))
            print(time.perf_counter() - since)
"""


RELAYED = "from commsweep.processes import namespaces; print(namespaces.relayed())"


@rooted
@pytest.mark.slow
def test_a_frame_waits_once_between_two_nodes_of_a_star():
    """An echo takes two latencies, and the bandwidth of both nodes' links up and down."""
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    with namespaces.star(3, Cable(bandwidth=10e6, latency=0.1)) as nodes:
        echo = [[*command[:4], sys.executable, "-c", ECHO] for command in nodes.commands([])]
        server = subprocess.Popen([*echo[2], "serve"], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        before = nodes.sent()
        told = subprocess.run(
            [*echo[0], "ask", nodes.address(2)], capture_output=True, text=True, timeout=60
        )
        sent = {way: n - before[way] for way, n in nodes.sent().items()}
        server.wait(20)
    _, short, long = map(float, told.stdout.split())  # the first one asks who is where
    assert 0.2 <= short < 0.29, "three waits would be 0.3 s"
    assert 0.2 + 200_000 * 8 / 10e6 <= long < 3, (
        "what came while the relay held something back goes on in its turn"
    )
    assert all(200_000 < sent[way] < 230_000 for way in ("0 up", "2 down", "2 up", "0 down")), sent
    assert sent["1 up"] + sent["1 down"] < 1000


@rooted
@pytest.mark.slow
def test_late_links_of_a_chain_hold_back_what_goes_over_them_each_as_long_as_it_is_late():
    """A relay of both, 20 and 150 ms, does not keep what goes over the nearer one for what waits
    for the other.
    """
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    with namespaces.chain([Cable(latency=0.02), Cable(latency=0.15)]) as nodes:
        echo, rounds = (
            [[*command[:4], sys.executable, "-c", ECHO] for command in nodes.commands([])],
            [],
        )
        for near, far in ((0, 1), (0, 2)):
            server = subprocess.Popen([*echo[far], "serve"], stdout=subprocess.PIPE, text=True)
            assert server.stdout.readline() == "ready\n"
            told = subprocess.run(
                [*echo[near], "ask", nodes.address(far)], capture_output=True, text=True, timeout=60
            )
            server.wait(20)
            rounds.append(float(told.stdout.split()[1]))
        spent = subprocess.run(
            [sys.executable, "-c", RELAYED],
            env=os.environ | nodes.environments()[0],
            capture_output=True,
            text=True,
        ).stdout
    assert 0.04 <= rounds[0] < 0.1 and 0.34 <= rounds[1] < 0.42, rounds
    assert 0 < float(spent) < 5, "seconds of the processor"


def test_without_late_links_nothing_is_relayed(monkeypatch):
    monkeypatch.setenv(namespaces.RELAYS, "")
    assert namespaces.relayed() == 0.0


@pytest.mark.parametrize("rate", [5e6, 96e6, 200e6, 1e9, 0.0])
def test_the_longest_packet_fits_into_the_bucket(rate):
    """It would be cut up otherwise; and with one segment more it would not fit."""
    room, segments = bucket(rate) if rate else 1 << 16, namespaces._segments(rate)
    assert segments * 1514 <= room < (segments + 1) * 1514


@rooted
@pytest.mark.slow
def test_links_that_differ_are_shaped_each_for_itself(tmp_path):
    """A batch of 32 images, dense: most of a step is the slow link's, whichever it is, and no
    other's.
    """
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    steps, rate = (
        [],
        500e3,
    )  # so slow that its share is many times what a step takes in a busy machine
    slow, fast = f"{rate:.0f}bit", "1Gbit"
    for turn, rates in enumerate(((slow, fast, fast), (fast, fast, fast), (fast, fast, slow))):
        path = tmp_path / f"{turn}.json"
        path.write_text(json.dumps([{"bandwidth": one} for one in rates]))
        done = subprocess.run(
            [
                *COMMSWEEP,
                "pipeline",
                "synthetic",
                "--links",
                str(path),
                "--steps",
                "8",
                "--store",
                str(tmp_path / "store"),
                "--json",
            ],
            capture_output=True,
            text=True,
            timeout=200,
        )
        row = json.loads(done.stdout)
        # with frames' headers
        nbytes = row["transport"][0 if turn < 2 else 2]["sent"]["fwd"] / 8 * (1 + 66 / 1448)
        steps.append((row["timing"]["step_seconds"], 2 * 8 * (nbytes - bucket(rate)) / rate))
    for step, wire in (steps[0], steps[2]):
        assert step - steps[1][0] == pytest.approx(wire, rel=0.2), (
            steps,
            "both directions of the slow link, no more",
        )


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
    assert Store(tmp_path).pipelines() == [
        {key: value for key, value in row.items() if key != "simulation"}
    ]


@rooted
@pytest.mark.slow
def test_the_kernel_counts_what_the_ledger_says(tmp_path):
    """Interface counters of two runs of different length: they differ by messages, headers and
    acknowledgements.
    """
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    seen = {}
    for steps in (8, 40):
        (tmp_path / str(steps)).mkdir()
        with namespaces.chain([Cable()]) as nodes:
            store = tmp_path / str(steps)
            command = [
                "commsweep",
                "pipeline",
                "synthetic",
                *TWO,
                "epochs=20",
                "eval_every=20",
                "--steps",
                str(steps),
                "--store",
                str(store),
            ]
            Store(store)
            processes = [
                subprocess.Popen(one, env=os.environ | extra)
                for one, extra in zip(nodes.commands(command), nodes.environments(), strict=True)
            ]
            assert [process.wait(120) for process in processes] == [0, 0]
            seen[steps] = nodes.sent(), Store(store).pipelines()[0]
    (few, short), (many, long) = seen[8], seen[40]
    for end, stage, way in (("0 right", 0, "fwd"), ("1 left", 1, "bwd")):
        kernel = many[end] - few[end]
        handed = long["transport"][stage]["sent"][way] - short["transport"][stage]["sent"][way]
        ledger = sum(b[way] for b in long["boundaries"].values()) - sum(
            b[way] for b in short["boundaries"].values()
        )
        framing = (
            long["transport"][stage]["framing"][way] - short["transport"][stage]["framing"][way]
        )
        assert handed == ledger + framing == 32 * (2 * 8192 + 38)
        # 66 bytes of headers a frame of 1448, an acknowledgement for every other frame that came,
        # gloo's own headers
        assert handed * (1 + 66 / 65536) < kernel < handed * (1 + 2 * 66 / 1448) + 32 * 2 * 400


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_stage_ends_all_and_the_same_command_continues(tmp_path):
    settings = ["epochs=40", "eval_every=40"]
    command = [
        *COMMSWEEP,
        "pipeline",
        "synthetic",
        *TWO,
        *settings,
        "--store",
        str(tmp_path / "a"),
        "--checkpoint-every",
        "0",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("a/pipelines/*/stage1.*.ckpt")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(stage_of_one(tmp_path / "a"), signal.SIGKILL)
    killed = time.monotonic()
    out, error = process.communicate(timeout=60)
    assert time.monotonic() - killed < 20 and process.returncode == 2 and out == ""
    line = error.strip().splitlines()[-1]
    assert line.startswith("commsweep: stage 1 was ended by SIGKILL; all others were ended.")
    assert not leftovers()
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=200)
    whole = run(tmp_path / "b", *settings)
    assert json.loads(again.stdout)["metrics"] == json.loads(whole.stdout)["metrics"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_stage_is_named_within_its_patience(tmp_path):
    process = subprocess.Popen(
        [
            *COMMSWEEP,
            "pipeline",
            "synthetic",
            *TWO,
            "epochs=60",
            "eval_every=60",
            "--store",
            str(tmp_path),
            "--patience",
            "10",
            "--checkpoint-every",
            "0",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("pipelines/*/stage1.*.ckpt")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    victim = stage_of_one(tmp_path)
    os.kill(victim, signal.SIGSTOP)
    stopped = time.monotonic()
    _, error = process.communicate(timeout=100)
    assert time.monotonic() - stopped < 10 + 15 and process.returncode == 2
    assert (
        f"commsweep: stage 1 (process {victim}) has been stopped for "
        in error.strip().splitlines()[-1]
    )
    assert not leftovers()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_torchrun_a_finished_run_is_shown_and_not_trained_again(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "-m",
        "commsweep",
        "pipeline",
        "synthetic",
        *TWO,
        "--store",
        str(tmp_path),
        "--device",
        "cpu",
    ]
    Store(tmp_path)
    first = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert first.returncode == 0, first.stderr
    folder = next((tmp_path / "pipelines").iterdir())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert json.loads(before["env.json"])["device"] == "cpu"
    again = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0 and "finished" in again.stdout, again.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages_with_different_texts_say_so(tmp_path):
    texts = [tmp_path / "a", tmp_path / "b"]
    for place, folder in enumerate(texts):
        folder.mkdir()
        (folder / "all.txt").write_text(
            "tT"[place] + "he stages send packed tensors to their peers. " * 400
        )
    store, port = tmp_path / "s", free_port()
    Store(store)
    processes = [
        subprocess.Popen(
            [
                *COMMSWEEP,
                "pipeline",
                "synthetic_text",
                "data.name=text",
                "data.train_blocks=0",
                "data.eval_blocks=0",
                "model.stages=2",
                "--store",
                str(store),
                "--data-root",
                str(folder),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank, folder in enumerate(texts)
    ]
    for process in processes:
        assert (
            "processes 0 and 1 were started with different data"
            in process.communicate(timeout=120)[1]
        )
        assert process.returncode == 1


@rooted
def test_while_links_are_shaped_every_processor_is_kept_awake_by_what_makes_way_for_others():
    cores = os.sched_getaffinity(0)
    with awake.awake() as turning:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all(
            os.sched_getscheduler(one.pid) == os.SCHED_IDLE for one in turning
        ):
            time.sleep(0.1)
        assert [os.sched_getscheduler(one.pid) for one in turning] == [os.SCHED_IDLE] * len(cores)
        assert set().union(*(os.sched_getaffinity(one.pid) for one in turning)) == cores
        assert all(len(os.sched_getaffinity(one.pid)) == 1 for one in turning)
    assert all(one.returncode is not None for one in turning)
    with namespaces.chain([Cable()]):
        assert turners()
    assert not turners()


def turners() -> list[str]:
    """Children of this process that turn in place."""
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "processes.awake"], capture_output=True, text=True
    )
    return found.stdout.split()


@rooted
def test_namespaces_of_a_killed_launcher_are_removed_by_the_next_and_others_kept():
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    mine = namespaces._owned(os.getpid())
    # the id of a process, born later
    reused = f"cs{os.getpid():x}x{(namespaces._born(os.getpid()) + 1) % 4096:03x}"
    names = [f"{mine}n0", f"{reused}n0", "cs3fffffx123n0", "cs3fffffx123w0", "csother", "n0"]
    made = []
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0:
                made.append(name)
        assert sorted(namespaces.sweep_up()) == sorted(
            [f"{reused}n0", "cs3fffffx123n0", "cs3fffffx123w0"]
        )
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"{mine}n0" in left and "csother" in left and "cs3fffff" not in left
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@rooted
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plan_is_measured_trained_and_reported(tmp_path):
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    command = [
        *COMMSWEEP,
        "links",
        "smoke-links",
        "--store",
        str(tmp_path / "s"),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "2 predictions: error" in done.stdout and (tmp_path / "out" / "gantt.png").exists()
    again = subprocess.run(
        [*command, "--only", "measure"], capture_output=True, text=True, timeout=60
    )
    assert "4 measurements, 0 missing" in again.stderr


@rooted
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("down", "patience", "survives"), [(60.0, 10, False), (4.0, 60, True)])
def test_a_link_that_drops_ends_the_run_or_is_waited_for(tmp_path, down, patience, survives):
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    Store(tmp_path)
    with namespaces.chain([Cable()]) as nodes:
        command = [
            "commsweep",
            "pipeline",
            "synthetic",
            *TWO,
            "epochs=60",
            "eval_every=60",
            "--store",
            str(tmp_path),
            "--patience",
            str(patience),
            "--checkpoint-every",
            "0",
        ]
        processes = [
            subprocess.Popen(one, env=os.environ | extra, stderr=subprocess.PIPE, text=True)
            for one, extra in zip(nodes.commands(command), nodes.environments(), strict=True)
        ]
        while not list(tmp_path.glob("pipelines/*/stage1.*.ckpt")):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        nodes.cut(0, down=True)
        cut = time.monotonic()
        while time.monotonic() - cut < down and any(
            process.poll() is None for process in processes
        ):
            time.sleep(0.1)
        if survives:
            nodes.cut(0, down=False)
            assert [process.wait(200) for process in processes] == [0, 0]
            return
        assert (
            all(process.poll() == 1 for process in processes)
            and time.monotonic() - cut < patience + 20
        )
        for stage, process in enumerate(processes):
            assert f"commsweep: stage {stage}: " in process.stderr.read().strip().splitlines()[-1]

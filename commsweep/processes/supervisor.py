"""Starting the processes of a run (a pipeline's stages, or learners), and one line about whichever
failed first.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsweep.child import die_with_parent
from commsweep.errors import UserError
from commsweep.lean_imports import loading
from commsweep.store import RunFolder, write_json

if TYPE_CHECKING:
    import torch

LAUNCH = "COMMSWEEP_LAUNCH"  # in the environment of every process of a launch
MEETING = "COMMSWEEP_MEETING"  # the file through which processes of one machine find each other
A_DAY = 86_400.0  # seconds
GRACE = 5.0  # seconds that the others have to say what they saw, before they are ended


def worker(folder: RunFolder, work: Callable[[], object], who: str = "stage") -> int:
    """A process: do the work; whatever goes wrong becomes one line, in a file beside the others'
    and on stderr.

    Ends the process at once then: destructors of a broken process group wait for peers that are
    gone.
    """
    stage = int(os.environ["RANK"])
    die_with_parent(signal.SIGKILL)
    folder.make()
    error = folder.path / f"stage{stage}.error"
    error.unlink(missing_ok=True)
    try:
        with loading():
            import commsweep.training.run  # noqa: F401 (what all workers need)
        work()
        return 0
    except UserError as fault:
        line = str(fault)
    except KeyboardInterrupt:
        line = "stopped"
    except SystemExit:  # Lightning's way to end after the signal
        line = "was ended by SIGTERM"
    except Exception as fault:
        line = explain(fault)
        with open(folder.path / "log.txt", "a", encoding="utf-8") as log:
            import traceback

            log.write(f"{who} {stage}\n{traceback.format_exc()}")
    write_json(error, {"time": time.time(), "line": line})
    print(f"commsweep: {who} {stage}: {line}", file=sys.stderr, flush=True)
    os._exit(1)


def explain(fault: BaseException) -> str:
    """Return a line about a stage's exception; a broken or silent link is called that."""
    chain, text = fault, ""
    while chain is not None:
        if isinstance(chain, UserError):  # a message that did not belong, wrapped by the engine
            return str(chain)
        text += f" {chain}"
        chain = chain.__cause__ or chain.__context__
    if re.search(r"Timed out|timeout", text):
        return (
            "a neighbour was silent for longer than --patience; check the link and start again "
            "to continue"
        )
    if "op.preamble.length" in text:
        return (
            "a message was longer than its kind can be, and not read; start all stages with the "
            "same commsweep"
        )
    if re.search(
        r"closed by peer|Connection reset|Broken pipe|recv.*failed|Socket|unreachable|connect",
        text,
        re.I,
    ):
        return "the link to a neighbour broke; start again to continue from the last checkpoint"
    first = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {first[0] if first else ''}"


def wake_in_time() -> None:
    """Ask the kernel to end this process's waits when their time is up, not up to 50 us later."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(29, 1)  # <linux/prctl.h>: PR_SET_TIMERSLACK, nanoseconds


@contextmanager
def local(
    folder: RunFolder, command: list[str], count: int
) -> Iterator[tuple[list[list[str]], list[dict[str, str]]]]:
    """(commands, environments) of so many processes on this machine. They meet through a file, and
    their messages go through the loopback interface: nobody else can reach them.
    """
    for left in folder.path.glob(".meeting-*"):  # of killed launches
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > A_DAY:
                left.unlink()
    meeting = folder.path / f".meeting-{os.getpid()}-{secrets.token_hex(4)}"
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        MEETING: str(meeting.resolve()),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    try:
        yield (
            [[sys.executable, "-P", "-m", *command]] * count,
            [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)],
        )
    finally:
        meeting.unlink(missing_ok=True)


def join(device: torch.device, patience: float) -> None:
    """Join the other processes of a launch: through the file that `local` named, else as torchrun
    has said.
    """
    import torch.distributed as dist

    meeting = os.environ.get(MEETING)
    where: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    if meeting:
        where["init_method"] = f"file://{meeting}"
        where["rank"] = int(os.environ["RANK"])
        where["world_size"] = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=patience),
        **where,
    )


def supervise(
    folder: RunFolder,
    commands: list[list[str]],
    environments: list[dict[str, str]],
    show: Callable[[dict[str, Any]], object],
    patience: float = math.inf,
    who: str = "stage",
) -> None:
    """Run the commands until all have ended; `show` gets what the first one says of its progress.

    who: what a process is. Raises UserError, naming it, when one fails, or is stopped for longer
    than `patience` seconds: all others are ended within a few seconds.
    """
    for left in ("stage*.error", "progress.json"):
        for path in folder.path.glob(left):
            path.unlink()
    log = open(folder.path / "log.txt", "a", encoding="utf-8")  # noqa: SIM115 (closed below, after the processes that write to it)
    token = f"{os.getpid()}.{secrets.token_hex(8)}"
    running = [
        subprocess.Popen(
            command,
            env=os.environ | extra | {LAUNCH: token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        for command, extra in zip(commands, environments, strict=True)
    ]
    halted, stopped = _Halted(token, patience, who), ""
    died: list[tuple[int, int]] = []  # (rank, exit code) of those that failed by themselves
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or any(folder.path.glob("stage*.error")):
                deadline = time.monotonic() + GRACE  # for the others to say what they saw
                while time.monotonic() < deadline and any(
                    process.poll() is None for process in running
                ):
                    time.sleep(0.1)
                break
            with suppress(OSError, ValueError):
                show(json.loads((folder.path / "progress.json").read_text(encoding="utf-8")))
            if stopped := halted.look():
                break
            time.sleep(0.1)
        died = [(rank, code) for rank, process in enumerate(running) if (code := process.poll())]
    finally:
        end(token, running)
        log.close()
    if stopped:
        raise UserError(
            f"{stopped}; all were ended. Start again to continue from the last checkpoint "
            f"({folder.path})"
        )
    if any(process.returncode for process in running):
        raise UserError(blame(folder, died, who))


def _stages(launch: str) -> dict[int, tuple[str, str]]:
    """(stage, state) of a launch's stages by process id. They are known by their environment, which
    only their launcher gave them; no file of the store says which process to end.
    """
    stages = {}
    marker = f"{LAUNCH}={launch}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            variables = (process / "environ").read_bytes().split(b"\0")
            rank = next(
                (variable[5:].decode() for variable in variables if variable.startswith(b"RANK=")),
                None,
            )
            if marker in variables and rank is not None:
                state = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
                stages[int(process.name)] = rank, state
    return stages


class _Halted:
    """Looks for stages that were stopped (SIGSTOP): their neighbours could only blame the
    silence.
    """

    def __init__(self, launch: str, patience: float, who: str) -> None:
        self.launch, self.who, self.most = (
            launch,
            who,
            max(1.0, 0.8 * patience),
        )  # before a neighbour's patience ends
        self.since: dict[int, float] = {}
        self.looked = 0.0

    def look(self) -> str:
        """Return what to say of a stage that has been stopped for too long, or ""."""
        current = time.monotonic()
        if current - self.looked < 1 or math.isinf(self.most):
            return ""
        self.looked = current
        halted = {
            pid: stage for pid, (stage, state) in _stages(self.launch).items() if state in "tT"
        }
        self.since = {pid: self.since.get(pid, current) for pid in halted}
        return next(
            (
                f"{self.who} {halted[pid]} (process {pid}) has been stopped for "
                f"{current - since:.0f} s"
                for pid, since in self.since.items()
                if current - since > self.most
            ),
            "",
        )


def end(launch: str, running: list[subprocess.Popen]) -> None:
    """End what still runs, stages included that their launcher has lost."""
    for number, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        for process in running:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            time.sleep(0.05)
    for pid in _stages(launch):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def newest(folder: Path, name: str) -> Path | None:
    """The checkpoint of this process to go on from: the newest that is whole at all processes."""
    from commsweep import checkpoint
    from commsweep.collectives import gathered

    files = {
        step: path for step, path in checkpoint.saved(folder, name) if checkpoint.is_whole(path)
    }
    all_have = set.intersection(*map(set, gathered(list(files))))
    return files[max(all_have)] if all_have else None


def blame(folder: RunFolder, died: list[tuple[int, int]], who: str = "stage") -> str:
    """Return a line about the process that failed first: one that a signal ended, else the first
    one that said something.

    died: rank and exit code of processes that failed before any was ended.
    """
    for rank, code in died:
        if code < 0 and not (folder.path / f"stage{rank}.error").exists():
            return (
                f"{who} {rank} was ended by {signal.Signals(-code).name}; all others were "
                f"ended. Start again to continue from the last checkpoint ({folder.path})"
            )
    reasons = []
    for path in folder.path.glob("stage*.error"):
        with suppress(OSError, ValueError):
            report = json.loads(path.read_text(encoding="utf-8"))
            reasons.append(
                ("neighbour" in report["line"], report["time"], int(path.stem[5:]), report["line"])
            )
    if reasons:
        _, _, rank, line = min(reasons)
        return f"{who} {rank}: {line}"
    return f"the {who}s could not be started; see {folder.path / 'log.txt'}"

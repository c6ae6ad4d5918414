"""The launcher of real processes: what they are to do is written into a folder, then all start,
on this machine's loopback interface or in namespaces that are joined by shaped links.

execution.json   where and how: an Execution and options        todo.json   the runs, in order
run.json         a recorded Run and its wiring                  env.json    where it ran
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from commsweep.config import Execution, Run, record, run_id
from commsweep.config.execution import Cable, LearnerWiring, Wiring
from commsweep.config.run import SCHEMA, canonical
from commsweep.processes import supervisor
from commsweep.store import RunFolder, read_json, write_json


def measurement_id(run: Run, wiring: Wiring | LearnerWiring) -> str:
    """Return the id under which a run over this wiring is recorded."""
    text = f"{SCHEMA}:{canonical(run)}:{wiring.model_dump_json()}"
    return sha256(text.encode()).hexdigest()[:12]


def begin(folder: RunFolder, run: Run, wiring: Wiring | LearnerWiring, env: dict[str, Any]) -> None:
    """Write what is asked for and where it runs."""
    settings = {
        "schema": SCHEMA,
        "id": folder.path.name,
        "run_id": run_id(run),
        "run": record(run),
        "wiring": wiring.model_dump(mode="json"),
    }
    write_json(folder.path / "run.json", settings)
    write_json(folder.path / "env.json", env)


def queue(
    folder: RunFolder,
    todo: Mapping[str, tuple[Run, Wiring | LearnerWiring]],
    execution: Execution,
    **options: object,
) -> None:
    """Write the runs that one set of processes executes in turn, by id, and how."""
    write_json(folder.path / "execution.json", {**execution.record(), **options})
    entries = [
        [name, record(run), wiring.model_dump(mode="json")] for name, (run, wiring) in todo.items()
    ]
    write_json(folder.path / "todo.json", {"todo": entries})


def queued(folder: RunFolder) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return (id, settings, wiring) of the runs that `queue` wrote."""
    return [tuple(entry) for entry in read_json(folder.path / "todo.json")["todo"]]


def start(
    folder: RunFolder,
    module: str,
    argument: Path,
    count: int,
    cables: Sequence[Cable] | None,
    show: Callable[[dict[str, Any]], object],
    patience: float,
    who: str,
) -> None:
    """Execute `python -m module argument` as so many processes, until all have ended.

    cables: None for this machine's loopback interface; one a neighbouring pair for a chain of
    stages; a single one that each process has to a common hub. Raises UserError as `supervise`
    does, and where this machine makes no namespaces.
    """
    command = [module, str(argument.resolve())]
    if cables is None:
        with supervisor.local(folder, command, count) as (commands, environments):
            supervisor.supervise(folder, commands, environments, show, patience, who)
        return
    from commsweep.processes import namespaces

    is_chain = who == "stage"
    network = namespaces.chain(cables) if is_chain else namespaces.star(count, cables[0])
    with network as nodes:
        supervisor.supervise(
            folder, nodes.commands(command), nodes.environments(), show, patience, who
        )

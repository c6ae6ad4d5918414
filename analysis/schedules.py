"""Pipeline schedules as tasks of a timeline: GPipe, 1F1B, interleaved 1F1B, and zero-bubble (ZB-H1).

An order is, for each device, its actions in sequence: ("F", stage, microbatch), "B" (whole backward), or "I" and "W"
(its input's and its weights' half). Sources: GPipe arXiv 1811.06965, 1F1B and interleaved arXiv 2104.04473, ZB-H1
arXiv 2401.10241.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from analysis.timeline import Span, Task, simulate

Action = tuple[str, int, int]
CORES = "cores"


def gpipe(devices: int, microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards."""
    return [[(what, stage, i) for what in "FB" for i in range(microbatches)] for stage in range(devices)]


def one_f_one_b(devices: int, microbatches: int) -> list[list[Action]]:
    """As many forwards as there are stages left, then one backward, one forward."""
    orders = []
    for stage in range(devices):
        warm = min(microbatches, devices - stage)
        order: list[Action] = [("F", stage, i) for i in range(warm)]
        for i in range(microbatches):
            order.append(("B", stage, i))
            if warm + i < microbatches:
                order.append(("F", stage, warm + i))
        orders.append(order)
    return orders


def interleaved(devices: int, microbatches: int, chunks: int = 2) -> list[list[Action]]:
    """1F1B over `chunks` stages a device: stage s is on device s % devices. Needs microbatches % devices == 0."""
    if microbatches % devices:
        raise ValueError(f"{microbatches} microbatches are no multiple of {devices} devices")
    total = microbatches * chunks

    def action(what: str, turn: int, device: int) -> Action:
        chunk = turn % (devices * chunks) // devices
        chunk = chunk if what == "F" else chunks - 1 - chunk
        return what, chunk * devices + device, turn // (devices * chunks) * devices + turn % devices

    orders = []
    for device in range(devices):
        warm = min(total, (devices - device - 1) * 2 + (chunks - 1) * devices)
        order = [action("F", turn, device) for turn in range(warm)]
        for turn in range(total - warm):
            order += [action("F", warm + turn, device), action("B", turn, device)]
        orders.append(order + [action("B", turn, device) for turn in range(total - warm, total)])
    return orders


def zero_bubble(devices: int, microbatches: int) -> list[list[Action]]:
    """ZB-H1: 1F1B whose backwards are halved; weights' halves wait until the device would idle."""
    orders = []
    for stage in range(devices):
        warm = min(microbatches, devices - stage)
        order: list[Action] = [("F", stage, i) for i in range(warm)]
        done = 0
        for i in range(microbatches):
            order.append(("I", stage, i))
            if i - done >= stage:  # stage s can put off s of them without more memory than 1F1B's first stage has
                order.append(("W", stage, done))
                done += 1
            if warm + i < microbatches:
                order.append(("F", stage, warm + i))
        orders.append(order + [("W", stage, i) for i in range(done, microbatches)])
    return orders


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero-bubble": zero_bubble}


@dataclass(frozen=True)
class Links:
    """Every link between neighbouring devices, each way on its own."""

    bandwidth: float = 0.0  # bits a second; 0: unlimited
    latency: float = 0.0  # seconds, one way

    def seconds(self, nbytes: float) -> float:
        """How long a message occupies a link."""
        return 8 * nbytes / self.bandwidth if self.bandwidth else 0.0


@dataclass(frozen=True)
class Times:
    """What a pipeline's parts take: per stage seconds, per boundary bytes of one microbatch's message."""

    forward: list[float]
    backward: list[float]
    update: list[float] = field(default_factory=list)
    fwd_bytes: list[float] = field(default_factory=list)
    bwd_bytes: list[float] = field(default_factory=list)
    weights: float = 0.5  # share of a backward that is its weights' half
    handling: float = 0.0  # seconds of a core at each end of a message
    cores: int = 0  # of the machine that all stages share; 0: each device has its own


@dataclass(frozen=True)
class Plan:
    """Tasks of some steps of a pipeline, and which of them end a step."""

    tasks: list[Task]
    ends: list[list[int]]
    capacity: dict[str, int]

    def run(self) -> list[Span]:
        """When everything happens."""
        return simulate(self.tasks, self.capacity)


def plan(orders: list[list[Action]], times: Times, links: Links, steps: int = 1, waits: bool = False) -> Plan:
    """Tasks of `steps` steps in these orders. A device starts its next step after its own update.

    waits: as torch's GPipe does, a device begins its backwards only when all its activations have left.
    """
    tasks: list[Task] = []
    ends: list[list[int]] = []
    stages = len(times.forward)
    host = (CORES,) if times.cores else ()
    last: dict[int, int] = {}

    def add(task: Task) -> int:
        tasks.append(task)
        return len(tasks) - 1

    def send(step: int, what: str, source: int, target: int, i: int, after: int, nbytes: float) -> tuple[int, int]:
        """(the task that ends when the message has left, the one after which it is there)."""
        out = (f"link {source}>{target}",)
        if times.handling:
            after = add(Task(f"{step} handle {what}{source}.{i}", times.handling, host, [after]))
        left = add(Task(f"{step} send {what} {source}>{target}.{i}", links.seconds(nbytes), out, [after],
                        delay=links.latency))
        there = left
        if times.handling:
            there = add(Task(f"{step} handle {what}{target}.{i}", times.handling, host, [left]))
        return left, there

    for step in range(steps):
        here: dict[Action, int] = {}
        came: dict[tuple[str, int, int], int] = {}
        left: dict[int, list[int]] = {}
        queues = [list(order) for order in orders]
        while any(queues):
            moved = False
            for device, queue in enumerate(queues):
                while queue:
                    what, stage, i = queue[0]
                    needs = _needs(what, stage, i, stages, here, came)
                    if needs is None:
                        break
                    queue.pop(0)
                    moved = True
                    if waits and what != "F" and left.get(stage):
                        needs += left.pop(stage)
                    if device in last:
                        needs.append(last[device])
                    seconds = {"F": times.forward[stage], "B": times.backward[stage],
                               "I": times.backward[stage] * (1 - times.weights),
                               "W": times.backward[stage] * times.weights}[what]
                    place = add(Task(f"{step} {what}{stage}.{i}", seconds, (f"device {device}", *host), needs))
                    here[what, stage, i] = last[device] = place
                    if what == "F" and stage + 1 < stages:
                        gone, came["F", stage + 1, i] = send(step, "F", stage, stage + 1, i, place,
                                                             times.fwd_bytes[stage] if times.fwd_bytes else 0)
                        left.setdefault(stage, []).append(gone)
                    if what in "BI" and stage:
                        _, came["B", stage - 1, i] = send(step, "B", stage, stage - 1, i, place,
                                                          times.bwd_bytes[stage - 1] if times.bwd_bytes else 0)
            if not moved:
                raise ValueError("the order of the schedule waits for itself")
        for device in range(len(orders)):
            own = sum(times.update[stage] for stage in range(device, stages, len(orders))) if times.update else 0.0
            last[device] = add(Task(f"{step} U{device}", own, (f"device {device}", *host), [last[device]]))
        ends.append([last[device] for device in range(len(orders))])
    return Plan(tasks, ends, {CORES: times.cores} if times.cores else {})


def _needs(what: str, stage: int, i: int, stages: int, here: dict[Action, int],
           came: dict[tuple[str, int, int], int]) -> list[int] | None:
    """Places of the tasks that this action waits for; None while one of them is not planned yet."""
    wanted: list[int | None] = []
    if what == "F" and stage:
        wanted.append(came.get(("F", stage, i)))
    if what in "BI":
        wanted.append(here.get(("F", stage, i)))
        if stage + 1 < stages:
            wanted.append(came.get(("B", stage, i)))
    if what == "W":
        wanted.append(here.get(("I", stage, i)))
    return None if None in wanted else [one for one in wanted if one is not None]


def step_seconds(orders: list[list[Action]], times: Times, links: Links, waits: bool = False) -> float:
    """Seconds between the starts of two steps at the first device, once they follow each other steadily."""
    made = plan(orders, times, links, steps=4, waits=waits)
    spans = made.run()
    return (spans[made.ends[3][0]].stop - spans[made.ends[1][0]].stop) / 2


def shares(made: Plan, devices: int) -> dict[str, float]:
    """Of all devices' time over a plan: busy, and idle while a link they wait on is (exposed communication) or is not
    at work (bubble)."""
    spans = made.run()
    whole = max(span.stop for span in spans)
    busy = sum(span.stop - span.start for task, span in zip(made.tasks, spans, strict=True)
               if any(name.startswith("device") for name in task.uses))
    bare = plan_without_links(made).run()
    ideal = max(span.stop for span in bare)
    total = whole * devices
    return {"busy": busy / total, "bubble": (ideal * devices - busy) / total, "exposed": (whole - ideal) / whole}


def plan_without_links(made: Plan) -> Plan:
    """The same with messages that take no time."""
    tasks = [Task(task.name, 0.0 if "send" in task.name else task.seconds, task.uses, task.after, 0.0, task.rank)
             for task in made.tasks]
    return Plan(tasks, made.ends, made.capacity)

"""Pipeline schedules as activities of a timeline: GPipe, 1F1B, interleaved 1F1B, and zero-bubble (ZB-H1).

An order is, for each device, its actions in sequence: ("F", stage, microbatch), "B" (whole backward), or "I" and "W"
(its input's and its weights' half). Sources: GPipe arXiv 1811.06965, 1F1B and interleaved arXiv 2104.04473, ZB-H1
arXiv 2401.10241.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from commsweep.analysis.timeline.activities import (
    ASK,
    BACKWARD,
    FORWARD,
    HANDLE,
    INPUTS,
    SEND,
    UPDATE,
    WEIGHTS,
    Activity,
    Span,
    simulate,
)

Action = tuple[str, int, int]
CORES = "cores"
KINDS = {"F": FORWARD, "B": BACKWARD, "I": INPUTS, "W": WEIGHTS}  # of the actions in an order
FRAMES = 1 + 66 / 1448  # headers of a full frame, over what it carries


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
class Network:
    """The cables between neighbouring devices, all alike, each way on its own."""

    bandwidth: float = 0.0  # bits a second; 0: unlimited
    latency: float = 0.0  # seconds, one way

    def seconds(self, nbytes: float) -> float:
        """How long a message occupies a cable, with what Ethernet, IP and TCP add to it."""
        return 8 * nbytes * FRAMES / self.bandwidth if self.bandwidth else 0.0


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
    """Activities of some steps of a pipeline, and which of them end a step."""

    activities: list[Activity]
    ends: list[list[int]]
    capacity: dict[str, int]

    def run(self) -> list[Span]:
        """When everything happens."""
        return simulate(self.activities, self.capacity)


@dataclass(frozen=True)
class Engine:
    """How messages go: `IDEAL`, whenever they are ready; or as torch's schedules over gloo send them.

    rendezvous: a message leaves only when its receiver has said that it waits, which it says after its last action;
    that takes a latency of its own.
    """

    rendezvous: bool = False


IDEAL, TORCH = Engine(), Engine(rendezvous=True)


class _Planner:
    """Turns actions into activities, step after step."""

    def __init__(self, orders: list[list[Action]], times: Times, network: Network, engine: Engine) -> None:
        self.orders, self.times, self.network, self.engine = orders, times, network, engine
        self.stages, self.devices = len(times.forward), len(orders)
        self.host = (CORES,) if times.cores else ()
        self.activities: list[Activity] = []
        self.last: dict[int, int] = {}  # each device's last action
        self.here: dict[Action, int] = {}

    def step(self, number: int) -> list[int]:
        """Plan one step; returns what ends it at each device."""
        self.number, self.here = number, {}
        queues = [list(order) for order in self.orders]
        while any(queues):
            moved = False
            for device, queue in enumerate(queues):
                while queue and self._possible(*queue[0]):
                    self._act(device, *queue.pop(0))
                    moved = True
            if not moved:
                raise ValueError("the order of the schedule waits for itself")
        for device in range(self.devices):
            own = sum(self.times.update[device :: self.devices]) if self.times.update else 0.0
            self.last[device] = self._add(UPDATE, own, (f"device {device}", *self.host), [self.last[device]],
                                          device=device)
        return list(self.last.values())

    def _add(self, kind: str, seconds: float, uses: tuple[str, ...], after: list[int], delay: float = 0.0,
             **where: int) -> int:
        self.activities.append(Activity(kind, seconds, uses, after, delay, step=self.number, **where))
        return len(self.activities) - 1

    def _sources(self, what: str, stage: int, i: int) -> list[Action]:
        """The actions that this one needs the results of."""
        found: list[Action] = []
        if what == "F" and stage:
            found.append(("F", stage - 1, i))
        if what in "BI":
            found.append(("F", stage, i))
            if stage + 1 < self.stages:
                found.append(("I" if what == "I" else "B", stage + 1, i))
        return [*found, ("I", stage, i)] if what == "W" else found

    def _possible(self, what: str, stage: int, i: int) -> bool:
        return all(source in self.here for source in self._sources(what, stage, i))

    def _act(self, device: int, what: str, stage: int, i: int) -> None:
        before = [self.last[device]] if device in self.last else []
        needs = list(before)
        for source in self._sources(what, stage, i):
            here = self.here[source]
            needs.append(here if source[1] == stage else self._message(source, stage, here, before))
        seconds = {"F": self.times.forward[stage], "B": self.times.backward[stage],
                   "I": self.times.backward[stage] * (1 - self.times.weights),
                   "W": self.times.backward[stage] * self.times.weights}[what]
        self.here[what, stage, i] = self.last[device] = self._add(
            KINDS[what], seconds, (f"device {device}", *self.host), needs, device=device, stage=stage, microbatch=i)

    def _message(self, source: Action, target: int, ready: int, waiting: list[int]) -> int:
        """The activity after which the message of an action is at a neighbouring stage, which waits since `waiting`."""
        _, stage, i = source
        forward, times = target > stage, self.times
        sizes, boundary = (times.fwd_bytes, stage) if forward else (times.bwd_bytes, target)
        sender, receiver = stage % self.devices, target % self.devices
        way = {"device": sender, "target": receiver, "stage": stage, "microbatch": i}
        after = [ready]
        if times.handling:
            after = [self._add(HANDLE, times.handling, self.host, after, **way)]
        if self.engine.rendezvous and waiting:
            after.append(self._add(ASK, 0.0, (), waiting, self.network.latency, **way))
        gone = self._add(SEND, self.network.seconds(sizes[boundary] if sizes else 0.0),
                         (f"cable {sender}>{receiver}",) if sender != receiver else (), after, self.network.latency,
                         **way)
        return self._add(HANDLE, times.handling, self.host, [gone], **way) if times.handling else gone


def plan(orders: list[list[Action]], times: Times, network: Network, steps: int = 1, engine: Engine = IDEAL) -> Plan:
    """Activities of `steps` steps in these orders. A device starts its next step after its own update."""
    planner = _Planner(orders, times, network, engine)
    ends = [planner.step(number) for number in range(steps)]
    return Plan(planner.activities, ends, {CORES: times.cores} if times.cores else {})


def step_seconds(orders: list[list[Action]], times: Times, network: Network, engine: Engine = IDEAL,
                 steps: int = 4) -> float:
    """Seconds from the end of one step to the end of the next at the first device, once they follow steadily."""
    made = plan(orders, times, network, steps, engine)
    spans, settled = made.run(), steps // 2 - 1
    return (spans[made.ends[-1][0]].stop - spans[made.ends[settled][0]].stop) / (steps - 1 - settled)


def shares(made: Plan, devices: int) -> dict[str, float]:
    """Of all devices' time over a plan: busy, and idle while a cable they wait on is (exposed communication) or is not
    at work (bubble)."""
    spans = made.run()
    whole = max(span.stop for span in spans)
    busy = sum(span.stop - span.start for activity, span in zip(made.activities, spans, strict=True)
               if activity.kind in (*KINDS.values(), UPDATE))
    ideal = max(span.stop for span in without_messages(made).run())
    total = whole * devices
    return {"busy": busy / total, "bubble": (ideal * devices - busy) / total, "exposed": (whole - ideal) / whole}


def without_messages(made: Plan) -> Plan:
    """The same with messages that take no time."""
    return Plan([replace(one, seconds=0.0 if one.kind == SEND else one.seconds, delay=0.0) for one in made.activities],
                made.ends, made.capacity)

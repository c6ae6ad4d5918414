"""Pipeline schedules as activities of a timeline: GPipe, 1F1B, interleaved 1F1B, zero-bubble
(ZB-H1), and 1F1B that does not run empty between steps.

An order is, for each device, its actions in sequence: ("F", stage, microbatch), "B" (whole
backward), or "I" and "W" (its input's and its weights' half), and where an order is of several
steps ("U", device, step), an update. Sources: GPipe arXiv 1811.06965, 1F1B and interleaved arXiv
2104.04473, ZB-H1 arXiv 2401.10241, PipeDream-2BW arXiv 2006.09503.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from commsweep.timing.timeline.activities import (
    ARRIVE,
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
WORD = 128  # bytes on the cable that say that a device waits for a message
FRAMES = 1 + 66 / 1448  # headers of a full frame, over what it carries


def gpipe(devices: int, microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards."""
    return [
        [(kind, stage, i) for kind in "FB" for i in range(microbatches)] for stage in range(devices)
    ]


def one_f_one_b(devices: int, microbatches: int) -> list[list[Action]]:
    """Return the order 1F1B: as many forwards as there are stages left, then one backward, one
    forward.
    """
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
    """1F1B over `chunks` stages a device: stage s is on device s % devices. Needs microbatches %
    devices == 0.
    """
    if microbatches % devices:
        raise ValueError(f"{microbatches} microbatches are no multiple of {devices} devices")
    total = microbatches * chunks

    def action(kind: str, index: int, device: int) -> Action:
        chunk = index % (devices * chunks) // devices
        chunk = chunk if kind == "F" else chunks - 1 - chunk
        return (
            kind,
            chunk * devices + device,
            index // (devices * chunks) * devices + index % devices,
        )

    orders = []
    for device in range(devices):
        warm = min(total, (devices - device - 1) * 2 + (chunks - 1) * devices)
        order = [action("F", index, device) for index in range(warm)]
        for index in range(total - warm):
            order += [action("F", warm + index, device), action("B", index, device)]
        orders.append(order + [action("B", index, device) for index in range(total - warm, total)])
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
            # stage s can put off s of them without more memory than 1F1B's first stage has
            if i - done >= stage:
                order.append(("W", stage, done))
                done += 1
            if warm + i < microbatches:
                order.append(("F", stage, warm + i))
        orders.append(order + [("W", stage, i) for i in range(done, microbatches)])
    return orders


def continuous(under_way: list[int], microbatches: int, steps: int = 10) -> list[list[Action]]:
    """1F1B over several steps, whose microbatches are numbered on. under_way: how many each device
    has between forward and backward. A device updates after its last backward of a step.
    """
    orders = []
    for stage, most in enumerate(under_way):
        order: list[Action] = [("F", stage, i) for i in range(most)]
        for i in range(steps * microbatches):
            order.append(("B", stage, i))
            if (i + 1) % microbatches == 0:
                order.append(("U", stage, i // microbatches))
            if most + i < steps * microbatches:
                order.append(("F", stage, most + i))
        orders.append(order)
    return orders


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


@dataclass(frozen=True)
class Network:
    """The cables between neighbouring devices, each way on its own: all alike, or one for each
    boundary in `links`.

    burst: bytes that a token bucket lets through at once after a pause, as shaped links do;
    crossing: seconds that a message takes beyond the latency, in whatever holds it back for that
    long.
    """

    bandwidth: float = 0.0  # bits a second; 0: unlimited
    latency: float = 0.0  # seconds, one way
    burst: float = 0.0
    crossing: float = 0.0
    links: tuple[Network, ...] = ()  # where they differ; all else then says nothing

    def between(self, first: int, second: int) -> Network:
        """The cables between two neighbouring devices."""
        return self.links[min(first, second)] if self.links else self

    def seconds(self, nbytes: float) -> float:
        """Return how long a message occupies a cable, with what Ethernet, IP and TCP add to it."""
        return 8 * nbytes * FRAMES / self.bandwidth if self.bandwidth else 0.0

    @property
    def spare(self) -> float:
        """Seconds of sending that a full bucket saves."""
        return 8 * self.burst / self.bandwidth if self.bandwidth else 0.0

    @property
    def delay(self) -> float:
        """Seconds from the end of a message on the cable until it is there."""
        return self.latency + (self.crossing if self.latency else 0.0)


def rate_text(bits: float) -> str:
    """Return a bandwidth (bits a second; 0: unlimited) for people."""
    if not bits:
        return "unlimited"
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def bandwidth_text(network: Network) -> str:
    """Return the bandwidth of all links of a network for people."""
    return " / ".join(rate_text(link.bandwidth) for link in network.links) or rate_text(
        network.bandwidth
    )


def latency_text(network: Network) -> str:
    """Return the latency of all links of a network for people."""
    return f"{' / '.join(f'{1e3 * link.latency:g}' for link in network.links or [network])} ms"


@dataclass(frozen=True)
class Cold:
    """The work that takes longer on a machine that has waited: nothing up to `after` seconds of
    waiting, then `slope` seconds for each more, at most `most`.
    """

    after: float = 0.0
    slope: float = 0.0
    most: float = 0.0

    def __call__(self, idle: float) -> float:
        return min(self.most, self.slope * max(0.0, idle - self.after))


WARM = Cold()


@dataclass(frozen=True)
class Times:
    """The times of a pipeline's parts: per stage seconds, per boundary bytes of one microbatch's
    message.
    """

    forward: list[float]
    backward: list[float]
    update: list[float] = field(default_factory=list)
    fwd_bytes: list[float] = field(default_factory=list)
    bwd_bytes: list[float] = field(default_factory=list)
    weights: float = 0.5  # share of a backward that is its weights' half
    handling: float = 0.0  # seconds of a core at each end of a message
    cores: int = 0  # of the machine that all stages share; 0: each device has its own
    cold: dict[str, Cold] = field(default_factory=dict)  # of F, B and U after a wait
    wake: Cold = WARM  # of handling a message after a wait, in multiples of `handling`
    # bytes that the first and the last device hand to each other before their updates
    tied: float = 0.0
    meets: bool = False  # whether no device updates before all have ended a step: a norm of all


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
    """The engine that moves messages: `IDEAL`, whenever they are ready; or as torch's schedules
    over gloo send them (`TORCH`).

    rendezvous: a message leaves only when its receiver has said that it waits; it says so after its
    last action, behind what it sends to the same neighbour then, and that takes a latency of its
    own. blocking: between a forward and a backward, and at the end of a step, a device waits until
    it is rid of all its messages: until their receivers have said so, for what travels then lies in
    the kernel. pending: how many forwards (or backwards) it may not yet be rid of when it begins
    the next one; None: any number. early: a receiver says that it waits for a gradient when it has
    sent the activation, and for an activation when it had the one of a step before.
    """

    rendezvous: bool = False
    early: bool = False
    blocking: bool = False
    pending: int | None = None


IDEAL = Engine()
TORCH = {
    "gpipe": Engine(rendezvous=True, blocking=True),
    "1f1b": Engine(rendezvous=True, blocking=True, pending=1),
    "continuous": Engine(rendezvous=True, early=True),
}


class _Planner:
    """Turns actions into activities, step after step."""

    def __init__(
        self, orders: list[list[Action]], times: Times, network: Network, engine: Engine
    ) -> None:
        self.orders, self.times, self.network, self.engine = orders, times, network, engine
        self.stages, self.devices = len(times.forward), len(orders)
        self.host = (CORES,) if times.cores else ()
        self.place = {
            action: (device, index)
            for device, order in enumerate(orders)
            for index, action in enumerate(order)
        }
        self.activities: list[Activity] = []
        self.last: dict[int, int] = {}  # each device's last action
        # of orders that are of several steps: updates by step and device, and microbatches of each
        self.updates: dict[int, dict[int, int]] = {}
        self.many = sum(kind == "U" for kind, *_ in orders[0])
        self.microbatches = sum(kind == "F" for kind, *_ in orders[0]) // max(1, self.many)
        self._exchanged: dict[int, dict[int, list[int]]] = {}

    def step(self, number: int) -> list[int]:
        """Plan one step; returns what ends it at each device."""
        self.number, self.began = number, dict(self.last)
        self.here: dict[Action, int] = {}  # where an action was planned
        self.packed: dict[Action, int] = {}  # that its message is ready to leave
        # that it may leave, and its receiver knows: the sender is rid of it
        self.handed: dict[Action, list[int]] = {}
        self.sent: dict[Action, int] = {}  # that it has left
        queues = [list(order) for order in self.orders]
        while any(queues):
            moved = False
            for device, queue in enumerate(queues):
                while queue and self._act(device, *queue[0]):
                    queue.pop(0)
                    moved = True
            if not moved:
                raise ValueError("the order of the schedule waits for itself")
        if self.many:
            return []
        tied = self._tied(self.last)
        for device, order in enumerate(self.orders):
            handed = [
                message
                for action in order
                if self.engine.blocking and self._left(action)
                for message in self.handed[action]
            ]
            self._update(device, [self.last[device], *handed, *tied.get(device, [])])
        return list(self.last.values())

    def _update(self, device: int, after: list[int]) -> None:
        self.last[device] = self._add(
            UPDATE,
            sum(self.times.update[device :: self.devices]) if self.times.update else 0.0,
            (f"device {device}", *self.host),
            after,
            device=device,
            idle=self.times.cold.get("U"),
        )

    def _act_update(self, device: int, step: int) -> bool:
        """Plan the update of one of several steps if all that it needs is planned."""
        last = (step + 1) * self.microbatches - 1
        backwards = [self.here.get(("B", stage, last)) for stage in range(self.devices)]
        alike = self.times.meets or (self.times.tied and device in (0, self.devices - 1))
        if alike and None in backwards:
            return False
        after = [self.last[device]]
        if alike:
            ends = {
                index: backward for index, backward in enumerate(backwards) if backward is not None
            }
            if step not in self._exchanged:
                self._exchanged[step] = self._tied(ends)
            after += self._exchanged[step].get(device, [])
            after += ends.values() if self.times.meets else []
        self._update(device, after)
        self.updates.setdefault(step, {})[device] = self.last[device]
        return True

    def _tied(self, last: dict[int, int]) -> dict[int, list[int]]:
        """The activities after which the first and the last device have each other's gradients of
        what they share; by device. last: the last backward of each device. A message crosses all
        cables at once, as fast as the slowest lets it.
        """
        if not self.times.tied or self.devices < 2:
            return {}
        path = [self.network.between(k, k + 1) for k in range(self.devices - 1)]
        delay, ends, previous = sum(hop.delay for hop in path), (0, self.devices - 1), {}
        for sender, receiver in (ends, ends[::-1]):
            step = 1 if receiver > sender else -1
            cables = tuple(f"cable {k}>{k + step}" for k in range(sender, receiver, step))
            labels = {"device": sender, "target": receiver}
            after = [self._handle(sender, [last[sender]], labels)]
            if self.engine.rendezvous:
                after.append(self._add(ASK, 0.0, (), [last[receiver]], delay, **labels))
            sent = self._add(
                SEND,
                max(hop.seconds(self.times.tied) for hop in path),
                cables,
                after,
                spare=max(hop.spare for hop in path),
                **labels,
            )
            previous[receiver] = [
                self._handle(
                    receiver, [self._add(ARRIVE, 0.0, (), [sent], delay, **labels)], labels
                )
            ]
            previous.setdefault(sender, []).append(sent)
        return previous

    def _add(
        self,
        kind: str,
        seconds: float,
        uses: tuple[str, ...],
        after: list[int],
        delay: float = 0.0,
        **where: Any,
    ) -> int:
        self.activities.append(
            Activity(kind, seconds, uses, after, delay, step=self.number, **where)
        )
        return len(self.activities) - 1

    def _sources(self, kind: str, stage: int, i: int) -> list[Action]:
        """The actions that this one needs the results of."""
        actions: list[Action] = []
        if kind == "F" and stage:
            actions.append(("F", stage - 1, i))
        if kind in "BI":
            actions.append(("F", stage, i))
            if stage + 1 < self.stages:
                actions.append(("I" if kind == "I" else "B", stage + 1, i))
        return [*actions, ("I", stage, i)] if kind == "W" else actions

    def _target(self, kind: str, stage: int, i: int) -> Action | None:
        """The action that the message of this one is for."""
        stage += {"F": 1, "B": -1, "I": -1}.get(kind, self.stages)
        return (kind, stage, i) if 0 <= stage < self.stages else None

    def _receiver(self, kind: str, stage: int, i: int) -> int | None:
        """The other device that the message of an action goes to; None where there is none."""
        target = self._target(kind, stage, i)
        return (
            None
            if target is None or (device := target[1] % self.devices) == stage % self.devices
            else device
        )

    def _owed(self, device: int, position: int) -> list[Action]:
        """The earlier actions of this step whose messages must have left before a device begins its
        action `position`.
        """
        if not self.engine.blocking or not position:
            return []
        order = self.orders[device]
        if (order[position][0] == "F") != (order[position - 1][0] == "F"):
            return order[:position]
        return (
            order[: max(0, position - self.engine.pending)]
            if self.engine.pending is not None
            else []
        )

    def _act(self, device: int, kind: str, stage: int, i: int) -> bool:
        """Plan an action if all that it needs is planned."""
        if kind == "U":
            return self._act_update(device, i)
        sources, position = self._sources(kind, stage, i), self.place[kind, stage, i][1]
        if not all(source in self.here for source in sources):
            return False
        owed = [action for action in self._owed(device, position) if self._left(action) != 0]
        if any(self._left(action) is None for action in owed):
            return False
        needs = [self.last[device]] if device in self.last else []
        needs += [message for action in owed for message in self.handed[action]]
        for source in sources:
            needs.append(self.here[source] if source[1] == stage else self._arrival(source, device))
        seconds = {
            "F": self.times.forward[stage],
            "B": self.times.backward[stage],
            "I": self.times.backward[stage] * (1 - self.times.weights),
            "W": self.times.backward[stage] * self.times.weights,
        }[kind]
        self.here[kind, stage, i] = self.last[device] = self._add(
            KINDS[kind],
            seconds,
            (f"device {device}", *self.host),
            needs,
            device=device,
            stage=stage,
            microbatch=i,
            idle=self.times.cold.get("F" if kind == "F" else "B"),
        )
        if (receiver := self._receiver(kind, stage, i)) is not None:
            labels = {"device": device, "target": receiver, "stage": stage, "microbatch": i}
            self.packed[kind, stage, i] = self._handle(device, [self.last[device]], labels)
        return True

    def _left(self, source: Action) -> int | None:
        """The activity after which the message of an action has left its device: 0 where it sends
        none, None while that cannot be planned, because its receiver's last action before it is
        not.
        """
        if source in self.sent:
            return self.sent[source]
        target, receiver = self._target(*source), self._receiver(*source)
        if receiver is None or target is None:
            return 0
        position = self.place[target][1]
        before = self.orders[receiver][position - 1] if position else None
        if self.engine.early:
            _, stage, i = target
            earlier = i if target[0] == "B" else i - self.microbatches
            before = ("F", stage, earlier) if earlier >= 0 else None
        waiting = self.began.get(receiver) if before is None else self.here.get(before)
        first = before is None and not self.number
        if self.engine.rendezvous and waiting is None and not first:
            return None
        times, (_, stage, i) = self.times, source
        forward, device = target[1] > stage, stage % self.devices
        network = self.network.between(device, receiver)
        sizes, boundary = (times.fwd_bytes, stage) if forward else (times.bwd_bytes, target[1])
        labels = {"device": device, "target": receiver, "stage": stage, "microbatch": i}
        after = [self.packed[source]]
        if self.engine.rendezvous and waiting is not None:
            behind = [self.packed[before]] if before and self._receiver(*before) == device else []
            asking = self._add(
                ASK,
                network.seconds(WORD),
                (f"cable {receiver}>{device}",),
                [waiting, *behind],
                network.delay,
                spare=network.spare,
                rank=1.0,
                **labels,
            )
            after.append(asking)
        self.handed[source] = list(after)
        self.sent[source] = self._add(
            SEND,
            network.seconds(sizes[boundary] if sizes else 0.0),
            (f"cable {device}>{receiver}",),
            after,
            spare=network.spare,
            **labels,
        )
        return self.sent[source]

    def _arrival(self, source: Action, device: int) -> int:
        """The activity after which the message of an action is at this device."""
        left = self._left(source)
        if not left:  # within the device
            return self.here[source]
        labels = {
            "device": source[1] % self.devices,
            "target": device,
            "stage": source[1],
            "microbatch": source[2],
        }
        arrival = self._add(
            ARRIVE, 0.0, (), [left], self.network.between(labels["device"], device).delay, **labels
        )
        return self._handle(device, [arrival], labels)

    def _handle(self, device: int, after: list[int], labels: dict[str, int]) -> int:
        """A core works on one end of a message; where that is slower after a wait, in a thread of
        the device's own.
        """
        if not self.times.handling:
            return after[0]
        seconds, wake = self.times.handling, self.times.wake
        if not wake.most:
            return self._add(HANDLE, seconds, self.host, after, **labels)
        return self._add(
            HANDLE,
            seconds,
            (f"loop {device}", *self.host),
            after,
            idle=Cold(wake.after, seconds * wake.slope, seconds * wake.most),
            **labels,
        )


def plan(
    orders: list[list[Action]],
    times: Times,
    network: Network,
    steps: int = 1,
    engine: Engine = IDEAL,
) -> Plan:
    """Activities of `steps` steps in these orders, or of those that orders of several steps have.
    A device starts its next step after its own update.
    """
    planner = _Planner(orders, times, network, engine)
    ends = [planner.step(number) for number in range(1 if planner.many else steps)]
    if planner.many:
        ends = [
            [planner.updates[step][device] for device in range(planner.devices)]
            for step in range(planner.many)
        ]
    return Plan(planner.activities, ends, {CORES: times.cores} if times.cores else {})


def step_seconds(
    orders: list[list[Action]],
    times: Times,
    network: Network,
    engine: Engine = IDEAL,
    steps: int = 4,
) -> float:
    """Seconds from the end of one step to the end of the next at the first device, once they follow
    steadily.
    """
    plan_ = plan(orders, times, network, steps, engine)
    settled, last = len(plan_.ends) // 2 - 1, len(plan_.ends) - 1
    if any(kind == "U" for kind, *_ in orders[0]):
        last -= 2  # in which the pipeline runs empty
    spans = plan_.run()
    return (spans[plan_.ends[last][0]].stop - spans[plan_.ends[settled][0]].stop) / (last - settled)


def shares(plan_: Plan, devices: int) -> dict[str, float]:
    """Return the shares of all devices' time over a plan: busy, and idle while a cable they wait on
    is (exposed communication) or is not at work (bubble).
    """
    spans = plan_.run()
    seconds_all = max(span.stop for span in spans)
    busy = sum(
        span.stop - span.start
        for activity, span in zip(plan_.activities, spans, strict=True)
        if activity.kind in (*KINDS.values(), UPDATE)
    )
    ideal = max(span.stop for span in without_messages(plan_).run())
    total = seconds_all * devices
    return {
        "busy": busy / total,
        "bubble": (ideal * devices - busy) / total,
        "exposed": (seconds_all - ideal) / seconds_all,
    }


def without_messages(plan_: Plan) -> Plan:
    """The same with messages that take no time."""
    return Plan(
        [
            replace(activity, seconds=0.0 if activity.kind == SEND else activity.seconds, delay=0.0)
            for activity in plan_.activities
        ],
        plan_.ends,
        plan_.capacity,
    )

"""Network namespaces on this machine, joined by veth links of a real bandwidth and latency: a
chain, or a star.

    node 0 --(tbf)-- relay --(tbf)-- node 1 --(tbf)-- relay --(tbf)-- node 2 ...

    node k --(tbf)-- relay --- hub, which routes between all nodes
    node k ---------(tbf)----- hub

Every node shapes what it sends to each neighbour with a token bucket, and processors are kept awake
for its timers (`awake`). A relay is there only where there is a latency and the kernel has no
netem: a small process that holds every frame back for that long. It needs the processor that the
nodes compute on, so that one serves all links, and a frame meets it once between two nodes of a
star: on the way up. Needs root and iproute2.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from struct import Struct

from commsweep.child import die_with_parent
from commsweep.config.execution import MTU, Cable, bucket
from commsweep.errors import UserError, notice
from commsweep.processes.awake import awake
from commsweep.processes.supervisor import wake_in_time

CHAIN = "COMMSWEEP_CHAIN"  # tells a process the name of the chain or star it is in
STAR = "COMMSWEEP_STAR"  # that it is a star
RELAYS = "COMMSWEEP_RELAYS"  # which processes its relays are
RELAY_FRAMES = 25e3  # a second that a relay was measured to hand on, on a slow core
# <linux/if_packet.h>: frames with what the kernel left to the hardware; without those that one
# sends oneself
_PACKET, _VNET_HEADER, _IGNORE_OUTGOING, _LONGEST = 263, 15, 23, 1 << 17
# <asm/socket.h>: a buffer beyond what users may ask for; when a frame came, in seconds and
# nanoseconds
_RECEIVE_BUFFER, _NOTE_TIMES, _NOTED = 33, 35, Struct("qq")
_TOGETHER = 1e-4  # seconds: what is due within them goes at once


class Chain:
    """The nodes of a chain, and what to run in them."""

    def __init__(self, name: str, nodes: int) -> None:
        self.name, self.nodes = name, nodes
        # interfaces, and how long what goes between them is held back
        self.late: list[tuple[str, str, float]] = []
        self.relays: list[subprocess.Popen] = []

    def node(self, k: int) -> str:
        """The namespace of a stage."""
        return f"{self.name}n{k}"

    def wire(self) -> str:
        """The namespace of the relay."""
        return f"{self.name}w0"

    def interface(self, k: int, right: bool) -> str:
        """Node k's end of the link to its right or left neighbour."""
        return f"{self.name}{'r' if right else 'l'}{k}"

    def address(self, k: int) -> str:
        """Return where node k is reached by all others."""
        return f"10.213.{k - 1}.2" if k else "10.213.0.1"

    def commands(self, module: list[str]) -> list[list[str]]:
        """Each node's command for a Python module with arguments."""
        return [
            ["ip", "netns", "exec", self.node(k), sys.executable, "-P", "-m", *module]
            for k in range(self.nodes)
        ]

    def environments(self) -> list[dict[str, str]]:
        """Each node's part of what torchrun would have set."""
        return [
            {
                "RANK": str(k),
                "WORLD_SIZE": str(self.nodes),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
                CHAIN: self.name,
                RELAYS: " ".join(str(relay.pid) for relay in self.relays),
                "GLOO_SOCKET_IFNAME": self.interface(k, right=k == 0),
            }
            for k in range(self.nodes)
        ]

    def sent(self) -> dict[str, int]:
        """Bytes that the kernel has counted leaving each interface of the nodes."""
        counts = {}
        for k in range(self.nodes):
            for right in (False, True):
                if (k or right) and (k + 1 < self.nodes or not right):
                    name = self.interface(k, right)
                    out = _run(
                        "ip",
                        "netns",
                        "exec",
                        self.node(k),
                        "cat",
                        f"/sys/class/net/{name}/statistics/tx_bytes",
                    )
                    counts[f"{k} {'right' if right else 'left'}"] = int(out)
        return counts

    def cut(self, k: int, down: bool) -> None:
        """Take the link between node k and node k + 1 down, or up again."""
        _run(
            "ip",
            "-n",
            self.node(k),
            "link",
            "set",
            self.interface(k, right=True),
            "down" if down else "up",
        )
        if not down:  # the kernel dropped the routes through it
            self._route(k)

    def _route(self, k: int) -> None:
        for node in range(self.nodes - 1):  # links, numbered from the left
            if node not in (k - 1, k):
                by = f"10.213.{k}.2" if node > k else f"10.213.{k - 1}.1"
                _run("ip", "-n", self.node(k), "route", "replace", f"10.213.{node}.0/24", "via", by)


class Star(Chain):
    """Nodes that each have one link, to a hub that routes between them."""

    def hub(self) -> str:
        """The namespace of the hub."""
        return f"{self.name}n{self.nodes}"

    def address(self, k: int) -> str:
        return f"10.213.{k}.2"

    def ends(self, k: int) -> list[tuple[str, str]]:
        """(namespace, interface) that node k's link sends from: up, and down."""
        return [(self.node(k), f"{self.name}l{k}"), (self.hub(), f"{self.name}r{k}")]

    def environments(self) -> list[dict[str, str]]:
        return [
            environment | {STAR: "1", "GLOO_SOCKET_IFNAME": self.ends(k)[0][1]}
            for k, environment in enumerate(super().environments())
        ]

    def sent(self) -> dict[str, int]:
        counts = {}
        for k in range(self.nodes):
            for direction, (space, name) in zip(("up", "down"), self.ends(k), strict=True):
                out = _run(
                    "ip",
                    "netns",
                    "exec",
                    space,
                    "cat",
                    f"/sys/class/net/{name}/statistics/tx_bytes",
                )
                counts[f"{k} {direction}"] = int(out)
        return counts


def _owned(pid: int) -> str:
    """A name that tells whose the namespaces are: process id and start. Interfaces leave room for
    12 letters.
    """
    return f"cs{pid:x}x{_born(pid) % 4096:03x}"


def _born(pid: int) -> int:
    """When a process started, in ticks since boot; 0 when there is none."""
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        )
    except OSError:
        return 0


def sweep_up() -> list[str]:
    """Remove the namespaces of launchers that are gone (killed, they could not do so themselves);
    their names.
    """
    shown = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout
    stale = [
        name
        for name in (line.split()[0] for line in shown.splitlines() if line.strip())
        if (match := re.fullmatch(r"(cs([0-9a-f]+)x[0-9a-f]{3})[nw]\d+", name))
        and _owned(int(match[2], 16)) != match[1]
    ]
    for name in stale:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return stale


@contextmanager
def chain(cables: Sequence[Cable]) -> Iterator[Chain]:
    """Namespaces for stages joined by these links.

    Raises UserError where this machine does not allow it. All is removed at the end.
    """
    nodes = len(cables) + 1
    chain = Chain(_owned(os.getpid()), nodes)
    with _nodes(chain, nodes, cables) as netem:
        for k, cable in enumerate(cables):
            ends = [
                (chain.node(k), chain.interface(k, True)),
                (chain.node(k + 1), chain.interface(k + 1, False)),
            ]
            _link(chain, k, ends, cable, netem)
        for k in range(nodes):
            chain._route(k)
        _begin_relays(chain)
        yield chain


@contextmanager
def star(nodes: int, cable: Cable) -> Iterator[Star]:
    """Namespaces for `nodes` learners, each with a link of this bandwidth to a hub; the latency is
    from node to node. As `chain` otherwise.
    """
    star, half = (
        Star(_owned(os.getpid()), nodes),
        cable.model_copy(update={"latency": cable.latency / 2}),
    )
    with _nodes(star, nodes + 1, [cable] * nodes) as netem:
        for k in range(nodes):
            up, down = star.ends(k)
            if cable.latency and not netem:
                _link(star, k, [(star.hub(), f"{star.name}h{k}"), up], cable, netem)
                _way_back(
                    down, (star.node(k), f"{star.name}d{k}"), star.address(k), cable.bandwidth
                )
            else:
                _link(star, k, [down, up], half, netem)
            _run("ip", "-n", star.node(k), "route", "add", "default", "via", f"10.213.{k}.1")
        _begin_relays(star)
        yield star


@contextmanager
def _nodes(chain_: Chain, nodes: int, cables: Sequence[Cable]) -> Iterator[bool]:
    """Empty namespaces; whether the kernel has netem."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise UserError(
            "--bandwidth and --latency need Linux, root and iproute2 (ip, tc); run the "
            "processes on machines with real links instead, by torchrun"
        )
    sweep_up()
    try:
        for k in range(nodes):
            _run("ip", "netns", "add", chain_.node(k))
            _run("ip", "-n", chain_.node(k), "link", "set", "lo", "up")
            _run(
                "ip",
                "netns",
                "exec",
                chain_.node(k),
                "sh",
                "-c",
                "echo 1 > /proc/sys/net/ipv4/ip_forward",
            )
        late = [cable for cable in cables if cable.latency]
        netem = bool(late) and _has_netem(chain_)
        # Of learners each frame passes once, and what confirms it is a frame, too.
        full = sum(
            2 * relay.bandwidth / 8 / _segments(relay.bandwidth) / MTU
            for relay in late
            if relay.bandwidth
        )
        if not netem and full > RELAY_FRAMES:
            notice(
                "this kernel has no netem: latency comes from a relay process, which hands on "
                f"about {RELAY_FRAMES:,.0f} frames a second; these links have {full:,.0f} when "
                "full, and may be slower"
            )
        with awake():
            yield netem
    finally:
        for relay in chain_.relays:
            relay.kill()
            relay.wait()
        for name in (*(chain_.node(k) for k in range(nodes)), chain_.wire()):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _link(chain_: Chain, k: int, ends: list[tuple[str, str]], cable: Cable, netem: bool) -> None:
    """Join two nodes by link k, whose first end has address 10.213.k.1, the other 10.213.k.2."""
    if cable.latency and not netem:
        if not chain_.late:
            _run("ip", "netns", "add", chain_.wire())
        inner = f"{chain_.name}x{k}", f"{chain_.name}y{k}"
        for outer, inside in zip(ends, inner, strict=True):
            _cable(outer, (chain_.wire(), inside))
        chain_.late.append((*inner, cable.latency))
    else:
        _cable(*ends)
    for index, (space, name) in enumerate(ends):
        _run("ip", "-n", space, "addr", "add", f"10.213.{k}.{index + 1}/24", "dev", name)
        # Of a link that both ends fill, some congestion controls let one direction starve until the
        # other is done.
        _run(
            "ip",
            "netns",
            "exec",
            space,
            "sh",
            "-c",
            "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle;echo reno > "
            "/proc/sys/net/ipv4/tcp_congestion_control",
        )
        if netem and cable.latency:
            _run(
                "ip",
                "netns",
                "exec",
                space,
                "tc",
                "qdisc",
                "add",
                "dev",
                name,
                "root",
                "handle",
                "1:",
                "netem",
                "delay",
                f"{cable.latency * 1e6:.0f}us",
                "limit",
                "100000",
            )
        _rate(space, name, cable.bandwidth)


def _begin_relays(chain_: Chain) -> None:
    """Start the relays, a single one for all late links where nodes take all cores: woken for one
    link, it has frames of others to hand on, too. Where there are cores to spare, one on each.
    """
    spare = max(1, len(os.sched_getaffinity(0)) - chain_.nodes)
    for ends in (chain_.late[index::spare] for index in range(min(spare, len(chain_.late)))):
        chain_.relays.append(
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    chain_.wire(),
                    sys.executable,
                    "-m",
                    "commsweep.processes.namespaces",
                    *(str(name) for end in ends for name in end),
                ],
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: die_with_parent(9),
            )
        )


def _cable(near: tuple[str, str], far: tuple[str, str]) -> None:
    """Join two (namespace, interface), which this makes."""
    _run(
        "ip",
        "link",
        "add",
        near[1],
        "netns",
        near[0],
        "type",
        "veth",
        "peer",
        "name",
        far[1],
        "netns",
        far[0],
    )
    for space, name in (near, far):
        _run("ip", "-n", space, "link", "set", name, "mtu", str(MTU), "up")


def _way_back(hub: tuple[str, str], node: tuple[str, str], address: str, bandwidth: float) -> None:
    """A cable of its own from the hub down to a node, which has its address on the other one."""
    _cable(hub, node)
    _run("ip", "-n", hub[0], "route", "add", f"{address}/32", "dev", hub[1])
    _rate(*hub, bandwidth)


def shape(*bandwidths: float) -> None:
    """Give the links of the chain this process is in these bandwidths, or all links of its star the
    one.
    """
    name = os.environ[CHAIN]
    if STAR in os.environ:
        star = Star(name, int(os.environ["WORLD_SIZE"]))
        for k in range(star.nodes):
            for space, end in star.ends(k):
                _rate(space, end, *bandwidths)
        return
    chain = Chain(name, int(os.environ["WORLD_SIZE"]))
    for k in range(chain.nodes):
        for right in (False, True):
            if (k or right) and (k + 1 < chain.nodes or not right):
                _rate(chain.node(k), chain.interface(k, right), bandwidths[k if right else k - 1])


def relayed() -> float:
    """Processor seconds that the busiest relay of the chain or star this process is in has taken so
    far; 0 without.
    """
    return (
        max(
            (
                int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[0])
                for pid in os.environ.get(RELAYS, "").split()
            ),
            default=0,
        )
        / 1e9
    )


def _rate(space: str, name: str, bandwidth: float) -> None:
    """A token bucket at an interface, inside of netem where there is one; none if unlimited."""
    shown = _run("ip", "netns", "exec", space, "tc", "qdisc", "show", "dev", name)
    where = ["parent", "1:1"] if "netem" in shown else ["root"]
    # What is longer than the bucket is cut up at every hop, which costs most of the processor. The
    # kernel asks for the longest packet, its headers and some room, when it looks for a route.
    longest = _segments(bandwidth) * (MTU - 52) + 400
    _run("ip", "-n", space, "link", "set", name, "gso_max_size", str(min(longest, 1 << 16)))
    _run("ip", "-n", space, "route", "flush", "cache")
    if bandwidth:  # a few bytes more: it counts in ticks, downwards
        _run(
            "ip",
            "netns",
            "exec",
            space,
            "tc",
            "qdisc",
            "replace",
            "dev",
            name,
            *where,
            "handle",
            "2:",
            "tbf",
            "rate",
            f"{round(bandwidth)}bit",
            "burst",
            str(bucket(bandwidth) + 64),
            "latency",
            "5s",
        )
    elif "tbf" in shown:
        _run("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", name, *where)


def _segments(bandwidth: float) -> int:
    """Return the segments of the longest packet of a link: what its bucket lets through at once."""
    return (bucket(bandwidth) if bandwidth else 1 << 16) // (MTU + 14)


def _has_netem(chain_: Chain) -> bool:
    tried = subprocess.run(
        [
            "ip",
            "netns",
            "exec",
            chain_.node(0),
            "tc",
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "netem",
            "delay",
            "1us",
        ],
        capture_output=True,
        check=False,
    )
    if tried.returncode == 0:
        _run("ip", "netns", "exec", chain_.node(0), "tc", "qdisc", "del", "dev", "lo", "root")
    return tried.returncode == 0


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise UserError(
            f"this machine does not let its links be shaped ({' '.join(command[:4])} ...: "
            f"{reason}); run the stages on machines with real links instead, by torchrun"
        )
    return done.stdout


def relay(links: Sequence[tuple[str, str, float]]) -> None:
    """Hand every frame that arrives at an interface out at the other one of its link, a latency
    later; both ways.

    The kernel notes when a frame came, so that it may be read late: with the ones before it, when
    the next is due.
    """
    wake_in_time()
    with suppress(OSError):  # a cable does not wait for a processor that computes
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ways: dict[socket.socket, tuple[socket.socket, float]] = {}
    for *names, latency in links:
        near, far = (_end(name) for name in names)
        ways[near], ways[far] = (far, latency), (near, latency)
    ends, numbers = list(ways), count()
    waiting: list[tuple[float, int, bytes, socket.socket]] = []
    # a frame of its own length is kept, not room for the longest
    space = memoryview(bytearray(_LONGEST))
    while True:
        if waiting:
            time.sleep(min(max(_TOGETHER, waiting[0][0] - time.time()), 1.0))
        while ready := select.select(ends, [], [], 0 if waiting else None)[0]:
            for end in ready:
                out, latency = ways[end]
                size, [(_, _, noted), *_], _, _ = end.recvmsg_into([space], 64)
                seconds, nanoseconds = _NOTED.unpack(noted)
                heappush(
                    waiting,
                    (
                        seconds + 1e-9 * nanoseconds + latency,
                        next(numbers),
                        bytes(space[:size]),
                        out,
                    ),
                )
        current = time.time()
        while waiting and waiting[0][0] <= current:
            _, _, frame, out = heappop(waiting)
            with suppress(OSError):  # a link that is down loses what it is given
                out.send(frame)


def _end(name: str) -> socket.socket:
    """Return what reads and writes whole frames at an interface."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))  # every protocol
    end.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER, 1 << 26)
    end.setsockopt(socket.SOL_SOCKET, _NOTE_TIMES, 1)
    # Frames come before their checksums are made and may be longer than a cable's; the header says
    # so, and goes on.
    end.setsockopt(_PACKET, _VNET_HEADER, 1)
    end.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    end.bind((name, 0))
    end.setblocking(False)
    return end


if __name__ == "__main__":
    arguments = sys.argv[1:]
    relay(
        [
            (arguments[k], arguments[k + 1], float(arguments[k + 2]))
            for k in range(0, len(arguments), 3)
        ]
    )

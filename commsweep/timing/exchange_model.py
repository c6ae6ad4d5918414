"""Steps of data-parallel training over slow links: DDP, LocalSGD and DiLoCo by one exchange.

An all-reduce of n bytes among w workers moves 2 (w - 1) / w n bytes over every link. A shaped TCP
link delivers its rate divided by `waste`, which grows as the rate falls: losses and retransmissions
of several connections in a short queue. DDP's buckets queue behind each other: `buckets` times
longer. After a long time without an exchange the connections begin anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from commsweep.errors import UserError

ALGORITHMS = ("ddp", "localsgd", "diloco")
FLOAT = 4  # bytes of a value that travels dense


@dataclass(frozen=True)
class Wire:
    """Constants of links between nodes. Defaults: NCCL over TCP between cloud nodes with one L40S
    each (part of the measurements of Adnan082/diloco-measured).
    """

    unshaped: float = 11.8e9  # bits a second where no rate is given
    least: float = 0.95  # waste of a fast link
    slow: float = 0.315  # its growth at `known` bits a second; with the root of the rate below
    known: float = 50e6
    buckets: float = 1.36  # DDP beside one all-reduce, on a shaped link
    idle: float = 2.0  # seconds without an exchange after which connections begin anew
    anew: float = 0.5  # seconds that this takes

    def seconds(self, nbytes: Any, workers: Any, bandwidth: Any) -> Any:
        """Return the seconds of an all-reduce of so many bytes; bandwidth: bits a second, 0 or NaN
        where unshaped.
        """
        rate = np.asarray(bandwidth, float)
        shaped = np.isfinite(rate) & (rate > 0)
        rate = np.where(shaped, rate, self.unshaped)
        waste = np.where(shaped, self.least + self.slow * np.sqrt(self.known / rate), 1.0)
        n = np.asarray(workers, float)
        return 2 * (n - 1) / n * np.asarray(nbytes, float) * 8 * waste / rate


def steps(
    algorithm: str,
    interval: int,
    workers: int,
    parameters: float,
    bandwidth: float,
    compute: float,
    wire: Wire | None = None,
    share: float = 1.0,
) -> tuple[float, float]:
    """Seconds of a step with an exchange, and of one without.

    bandwidth: bits a second of a worker's link (0 or NaN: unshaped). compute: seconds of a step's
    own work. share: bytes that travel of the dense ones. Raises UserError on an algorithm that is
    not known.
    """
    if algorithm not in ALGORITHMS:
        raise UserError(f"algorithm '{algorithm}': choose {', '.join(ALGORITHMS)}")
    wire = wire or Wire()
    exchange = float(wire.seconds(FLOAT * parameters * share, workers, bandwidth))
    if algorithm == "ddp":
        shaped = bandwidth == bandwidth and bandwidth > 0
        return compute + (wire.buckets if shaped else 1.0) * exchange, compute
    if interval * compute > wire.idle:
        exchange += wire.anew
    return compute + exchange, compute

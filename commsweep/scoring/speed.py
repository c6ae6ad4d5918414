"""The speed of codecs: seconds to make the bytes of a message and to read them, beside a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commsweep.bench import alternate, paired
from commsweep.compressors import Compressor, message
from commsweep.errors import UserError
from commsweep.integrations.measure import codec
from commsweep.scoring.samples import samples

NUMBERS = 2**20
SAMPLE = "nano-gpt2"


@dataclass(frozen=True)
class Speed:
    """The time of a codec in copies of the same float32 numbers, as medians of rounds in turn.

    encode: until the bytes of a message are there. decode: from these bytes to numbers.
    """

    codec: str
    encode: float
    decode: float
    share: float  # bytes of float32's
    copy: float | None = None  # seconds of a copy of 2^20 numbers; None: of an earlier version

    @property
    def seconds(self) -> float | None:
        """Seconds that a message of 10^8 numbers takes at both ends."""
        return None if self.copy is None else self.both * self.copy * 1e8 / NUMBERS

    @property
    def both(self) -> float:
        """Return the copies that a message takes at both ends."""
        return self.encode + self.decode


def measured(names: Sequence[str], role: str, rounds: int = 5) -> dict[str, Speed]:
    """Measure codecs on a message of 2^20 numbers on one core, or on a GPU where there is one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(names, role, rounds)
    finally:
        torch.set_num_threads(threads)


def _measured(names: Sequence[str], role: str, rounds: int) -> dict[str, Speed]:
    x = _message(role)
    sides: dict[str, Callable[[], object]] = {"copy": _waiting(x.clone)}
    shares = {}
    for name in names:
        compressor = codec(name)
        packed = _pack(compressor, x)
        shares[name] = packed.numel() / (4 * x.numel())
        sides[f"encode {name}"] = _waiting(lambda compressor=compressor: _pack(compressor, x))
        sides[f"decode {name}"] = _waiting(_decoding(name, x, packed))
    with torch.no_grad():
        seconds = alternate(sides, rounds)
    return {
        name: Speed(
            name,
            paired(seconds, f"encode {name}", "copy"),
            paired(seconds, f"decode {name}", "copy"),
            shares[name],
            statistics.median(seconds["copy"]),
        )
        for name in names
    }


def _message(role: str) -> Tensor:
    """Return a real message of the role, repeated with other signs, on the fastest device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    real = next(s.x for s in samples() if s.role == role and s.network == SAMPLE)
    rows = real.reshape(-1, real.shape[-1])
    repeated = rows.repeat(-(-NUMBERS // rows.numel()), 1)[: NUMBERS // rows.shape[1]]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, repeated.shape, generator=generator) * 2.0 - 1.0
    return (repeated * signs).reshape(-1, 64, rows.shape[1]).to(device)


def _pack(compressor: Compressor, x: Tensor) -> Tensor:
    return message.pack([compressor.encode(x, 1)], message.Address(b"speed..."))


def _decoding(name: str, x: Tensor, packed: Tensor) -> Callable[[], Tensor]:
    """Return what reads the bytes of a message, or its parts where their sizes depend on values."""
    compressor = codec(name)

    def from_bytes() -> Tensor:
        reader = message.Reader(packed, message.Address(b"speed..."))
        return compressor.decode(reader.take(compressor, x.shape))

    try:
        from_bytes()
    except (UserError, NotImplementedError):
        # a codec that was asked for the layout of its messages refuses those of other sizes
        afresh = codec(name)
        payload = afresh.encode(x, 1)
        return lambda: afresh.decode(payload)
    return from_bytes


def _waiting(work: Callable[[], object]) -> Callable[[], object]:
    """Return work that waits for the device, where there is one."""
    if not torch.cuda.is_available():
        return work

    def done() -> None:
        work()
        torch.cuda.synchronize()

    return done


def fastest(speeds: dict[str, Speed], rivals: Sequence[str], share: float) -> Speed | None:
    """Return the fastest of the rivals that send at most this share; None where all send more."""
    within = [speeds[name] for name in rivals if speeds[name].share <= share * 1.01]
    return min(within, key=lambda speed: speed.both, default=None)

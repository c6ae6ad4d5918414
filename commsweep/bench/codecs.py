"""`commsweep bench codecs`: codes with few levels a value beside the formulas of their peers, a few
lines of torch each, one thread.

The work is the same but for these: the peers draw from torch's generator, ours by counter; ours
counts bytes, and QSGD's Elias bits, of every message. Through bytes ours is packed to its last bit
and checked on arrival; the peers' codes are whole bytes or more, and places are not coded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from commsweep.bench import Result, alternate, compared
from commsweep.compressors import build
from commsweep.config.compressors.base import Compression
from commsweep.config.compressors.qsgd import QSGDSpec
from commsweep.config.compressors.rotation import EdenSpec
from commsweep.config.compressors.thresholds import SIDCoSpec
from commsweep.config.compressors.values.levels import SignSpec, TernSpec
from commsweep.config.compressors.values.mx import MXSpec

ELEMENTS = 1 << 20
ROUNDS = 15


def sign(x: Tensor) -> Tensor:
    """EF-signSGD's message: the mean size with the signs."""
    size = x.abs().mean()
    return (x >= 0).to(torch.uint8).to(torch.float32).mul(2).sub(1) * size


def tern(x: Tensor) -> Tensor:
    """TernGrad with its clipping at 2.5 deviations."""
    edge = 2.5 * ((x - x.mean()) ** 2).mean().sqrt()
    x = torch.clamp(x, -edge, edge)
    size = x.abs()
    s = size.max()
    drawn = x.sign() * s
    drawn[torch.rand_like(x) * s >= size] = 0
    return drawn.sign().to(torch.int8).to(torch.float32) * s


def qsgd(levels: int) -> Callable[[Tensor], Tensor]:
    """QSGD with one norm a bucket of 512; whole levels, not coded further."""

    def encode(x: Tensor) -> Tensor:
        groups = x.view(-1, 512)
        norm = groups.norm(dim=1, keepdim=True)
        size = levels / norm * groups.abs()
        low = size.floor()
        up = (torch.rand_like(size) < (size - low)).to(torch.float32)
        codes = ((low + up) * groups.sign()).to(torch.int16)
        return (norm / levels * codes.to(torch.float32)).view_as(x)

    return encode


def sampled(x: Tensor) -> Tensor:
    """DGC: the threshold of a hundredth of the entries, mended until few enough stay."""
    size = x.abs()
    chosen = size.flatten()[torch.randint(0, x.numel(), (x.numel() // 100,))]
    edge = chosen.topk(max(1, int(0.01 * chosen.numel()))).values[-1]
    quota = 0.01 * x.numel()
    for _ in range(10):
        count = int((size >= edge).sum())
        if 0.7 * quota <= count <= 1.3 * quota:
            break
        edge = edge * (1.25 if count > quota else 0.9)
    return x * (size >= edge)


def mxfp8(x: Tensor) -> Tensor:
    """MXFP8 with torch's own float8: scaled by a power of two, cast, and back."""
    blocks = x.view(-1, 32)
    exponent = (blocks.abs().amax(1).view(torch.int32) >> 23) - 127 - 8
    scale = ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)[:, None]
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.to(torch.float32) * scale).view_as(x)


PAIRS: tuple[tuple[str, Compression, Callable[[Tensor], Tensor]], ...] = (
    ("sign", SignSpec(), sign),
    ("TernGrad", TernSpec(clip=2.5), tern),
    ("QSGD, Elias", QSGDSpec(bucket=512, levels=15, coding="elias"), qsgd(15)),
    ("QSGD, fixed", QSGDSpec(bucket=512, levels=127, coding="fixed"), qsgd(127)),
    ("MXFP8", MXSpec(format="mxfp8_e4m3"), mxfp8),
    ("SIDCo / DGC's sampled threshold", SIDCoSpec(ratio=0.01), sampled),
)


def bench() -> Iterator[Result]:
    """Ratios of the simulated message, a tensor in and what the receiver sees out, and of one that
    is encoded and decoded.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(1, ELEMENTS, generator=torch.Generator().manual_seed(0))
        for name, spec, peer in PAIRS:
            ours = build(spec)
            sides: dict[str, Callable[[], object]] = {
                "ours": lambda ours=ours: ours.apply(x, 1),
                "peer": lambda peer=peer: peer(x),
            }
            yield _ratio_to(name, sides)
            sides["ours"] = lambda ours=ours: ours.decode(ours.encode(x, 1))
            yield _ratio_to(f"{name}, through bytes", sides)
        yield from _eden()
    finally:
        torch.set_num_threads(threads)


def _eden() -> Iterator[Result]:
    """Ratios of two EDEN bits through bytes to an allocating copy: the codec that is recommended
    for gradients.
    """
    eden = build(EdenSpec(bits=2))
    for elements, bound in ((ELEMENTS, 30.0), (11 * ELEMENTS, 12.0)):
        x = torch.randn(1, elements, generator=torch.Generator().manual_seed(0))
        sides = {"ours": lambda x=x: eden.decode(eden.encode(x, 1)), "copy": lambda x=x: x.clone()}
        title = f"EDEN 2 bits, {elements >> 20} M entries through bytes, over a copy"
        yield compared(title, alternate(sides, ROUNDS, warmup=2), "ours", "copy", bound)


def _ratio_to(name: str, sides: dict[str, Callable[[], object]]) -> Result:
    seconds = alternate(sides, ROUNDS, warmup=2)
    return compared(name, seconds, "ours", "peer", 1.0)

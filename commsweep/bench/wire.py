"""`commsweep bench wire`: between a dense tensor and the bytes of its message, on one core."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from commsweep import compressors
from commsweep.bench import Result, alternate, compared, of_rounds, paired
from commsweep.compressors import message, rans, rotation
from commsweep.compressors.bits import unpack_mask

SHAPE = (16, 128, 768)  # a GPT-2 small microbatch of 6.3 MB
CODECS = (
    ("TopK 10 %", {"kind": "topk", "ratio": 0.1}, 0.4),
    ("TopK 10 %, Rice", {"kind": "topk", "ratio": 0.1, "index_coding": "rice"}, 0.15),
    ("TopK 30 % (bitmask)", {"kind": "topk", "ratio": 0.3}, 0.4),
    ("4-bit min-max", {"kind": "uniform", "bits": 4}, 1.0),
    ("8-bit min-max", {"kind": "uniform", "bits": 8}, 1.0),
    ("4-bit min-max per sample", {"kind": "uniform", "bits": 4, "scale": "sample"}, 1.0),
    ("3-bit fixed point", {"kind": "fixed", "bits": 3}, 1.0),
)
GROUPS = {"kind": "uniform", "bits": 4, "scale": "group", "group": 32}
FLOATS = "mxfp4", "nvfp4"
BLOCK = 128  # of Hadamard's transform


def bench() -> Iterator[Result]:
    """GB of dense input a second and core: tensor to message and back, beside zlib level 1 and a
    memory copy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        for title, spec, bound in CODECS:
            yield from _codec(x, title, compressors.build(spec), bound)
        yield from _decoded()
        yield _small()
        yield from _floats(x)
        yield from _streams(x)
        yield _rotation(x)
    finally:
        torch.set_num_threads(threads)


def _decoded() -> Iterator[Result]:
    """TopK 10 % of 2^20 entries from its bytes, beside values at places of 32 bits; its bitmask
    alone, beside numpy's.
    """
    n, ratio = 2**20, 0.1
    compressor: Any = compressors.build({"kind": "topk", "ratio": ratio})
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    payload = compressor.encode(x)
    columns = torch.nonzero(compressor.mask(payload)[0])[:, 0].int()
    values, bits = payload.parts["values"], payload.parts["places"]
    packed = bits.numpy()

    def scattered() -> torch.Tensor:
        out = torch.zeros(n)
        out[columns] = values
        return out

    sides = {
        "decode": lambda: compressor.decode(payload),
        "32-bit places": scattered,
        "bitmask": lambda: unpack_mask(bits, 1, n, len(columns)),
        "numpy.unpackbits": lambda: np.unpackbits(packed, count=n, bitorder="little"),
    }
    seconds = alternate(sides, rounds=25, warmup=3)
    title = "TopK 10 % of 2^20: decode over values at 32-bit places"
    yield compared(title, seconds, "decode", "32-bit places", 1.0)
    title = "a bitmask of 2^20: decode, checked, over numpy.unpackbits"
    yield compared(title, seconds, "bitmask", "numpy.unpackbits", 3.0)


def _small() -> Result:
    """The cost of a call of TopK beside its entries: the line through two sizes, at none."""
    compressor, sides = compressors.build({"kind": "topk", "ratio": 0.1}), {}
    for n in (2**12, 2**16):
        x = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
        sides[str(n)] = lambda x=x: compressor.decode(compressor._encode(x, 0))
    seconds = alternate(sides, rounds=25, warmup=3)
    fixed = [
        1e3 * (small - (large - small) / 15)
        for small, large in zip(seconds[str(2**12)], seconds[str(2**16)], strict=True)
    ]
    return of_rounds("TopK 10 %: encode and decode of no entries (milliseconds)", fixed, 0.1)


def _floats(x: torch.Tensor) -> Iterator[Result]:
    """Codes of 4 bits under a scale for every few entries, floats beside whole numbers."""
    groups = compressors.build(GROUPS)
    for format_ in FLOATS:
        floats = compressors.build({"kind": "mx", "format": format_})
        sides = {"floats": lambda f=floats: f.apply(x), "groups": lambda: groups.apply(x)}
        seconds = alternate(sides, rounds=15, warmup=3)
        title = f"{format_}: what arrives, over 4-bit groups of 32"
        yield compared(title, seconds, "floats", "groups", 1.3)


def _streams(x: torch.Tensor) -> Iterator[Result]:
    """rANS alone, of 4-bit codes as they come."""
    bits, n = 4, x.numel()
    packed = compressors.build(GROUPS).encode(x).parts["codes"]
    table = rans.frequencies(rans.counted(packed, bits, n)).numpy()
    codes = rans.symbols(packed, bits, n)
    stream = rans.encode(codes, table)
    sides = {
        "encode": lambda: rans.encode(codes, table),
        "decode": lambda: rans.decode(stream, table, n),
    }
    for operation, seconds in alternate(sides, rounds=15, warmup=2).items():
        speeds = [n / taken / 1e9 for taken in seconds]
        yield of_rounds(f"rANS: {operation}, 10^9 codes a second on one core", speeds, 0.2, False)


def _rotation(x: torch.Tensor) -> Result:
    flat = x.reshape(x.shape[0], -1)
    sides = {"rotation": lambda: rotation.hadamard(flat, BLOCK), "copy": lambda: flat.clone()}
    seconds = alternate(sides, rounds=15, warmup=3)
    title = f"Hadamard of {BLOCK}, over an allocating copy"
    return compared(title, seconds, "rotation", "copy", 2.0)


def _codec(
    x: torch.Tensor, title: str, compressor: compressors.Compressor, bound: float
) -> Iterator[Result]:
    address, copy = message.Address(message.digest(title)), torch.empty_like(x)
    dense, gigabytes = x.numpy().tobytes(), x.numel() * x.element_size() / 1e9
    packed_message = message.pack([compressor.encode(x)], address)
    # zlib on a hundredth, or the bench would wait for nothing else.
    head = dense[: len(dense) // 100]
    packed = zlib.compress(head, 1)
    sides = {
        "pack": lambda: message.pack([compressor._encode(x, 0)], address),
        "unpack": lambda: compressor.decode(
            message.Reader(packed_message, address).take(compressor, x.shape)
        ),
        "zlib": lambda: zlib.compress(head, 1),
        "unzlib": lambda: zlib.decompress(packed),
        "copy": lambda: copy.copy_(x),
    }
    seconds = alternate(sides, rounds=15, warmup=3)
    median = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    speed = {name: gigabytes / median[name] for name in ("pack", "unpack", "copy")}
    speed |= {name: gigabytes / 100 / median[name] for name in ("zlib", "unzlib")}
    for operation, peer in (("pack", "zlib"), ("unpack", "unzlib")):
        yield Result(
            f"{title}: {operation} {'x'.join(map(str, SHAPE))}, GB/s of dense input on one core",
            speed[operation],
            bound,
            False,
            {
                f"{peer} level 1 GB/s" if peer == "zlib" else "unzip GB/s": speed[peer],
                "memory copy GB/s": speed["copy"],
                "copies it takes": paired(seconds, operation, "copy"),
            },
        )

"""Entropy coding of codes: a range variant of asymmetric numeral systems (rANS), with the message's
own frequencies.

Four states of 64 bits take turns, and share one stream of 32-bit words. A symbol of frequency f of
2^s multiplies a state by 2^s / f, up to a factor of 1 + 2^(s - 31). So the words have a bound that
follows from the counts of symbols alone: bytes are known without coding, on a GPU without a wait,
and the stream is filled up to them with zeros. s is 12; where a symbol is rarer than 1 in 2^12, it
is 15 if that is shorter. Source: Duda, arXiv 1311.2540.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commsweep.compressors.base import Compressor, Field, Payload, replaced
from commsweep.compressors.bits import pack, packed_bytes, unpack
from commsweep.compressors.kernels import cpu
from commsweep.compressors.kernels.cpu import _compiled
from commsweep.compressors.rotation import Rotated, rotated
from commsweep.errors import UserError

COARSE, FINE = 12, 15  # bits of a frequency
LEAST = 1 << 31  # of a state between symbols
LANES = 4
POINT = 16  # fractional bits of a cost
STATES = 8 * LANES  # bytes


class Ranged(Compressor[Any]):
    """A compressor whose codes travel as rANS, where that is shorter.

    nbytes = those of the compressor without its codes + the smaller of the packed codes and 2 a
    symbol + 32 + 4 floor(sum of costs / 32), cost = log2(2^s / f) bits an entry of frequency f.
    """

    _sent: Tensor | int = 0  # bytes of the last message

    def __init__(self, spec: Any, code: Compressor) -> None:
        super().__init__(spec)
        self.code = code
        assert code.code_bits is not None
        self.bits = code.code_bits

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        arrived = self.code._encode(x, seed)
        plain = packed_bytes(x.numel(), self.bits)
        coded = coded_bytes(counted(arrived.parts["codes"], self.bits, x.numel()))
        self._sent = arrived.nbytes - plain + coded.clamp(max=plain)
        return self.code.apply(x, seed)

    def bytes_sent(self, y: Tensor) -> int | Tensor:
        return self._sent

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        layouts = []
        for form in self.code.layouts(shape, dtype):
            most = packed_bytes(shape.numel(), self.bits)
            unchanged = {name: field for name, field in form.items() if name != "codes"}
            coded = {"coded": Field(torch.uint8, None, most)}
            table = {"table": Field(torch.uint8, (2 << self.bits,))}
            layouts += [form, coded | table | unchanged]
        return layouts

    def most_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.code.most_bytes(shape, dtype)  # coded only where that is shorter

    def _encode(self, x: Tensor, seed: int) -> Payload:
        payload = self.code._encode(x, seed)
        fields = dict(payload.parts)
        packed = fields["codes"].cpu()
        counts = counted(packed, self.bits, x.numel())
        if int(coded_bytes(counts)) >= packed.numel():
            return payload
        table = frequencies(counts).numpy()
        coded = encode(symbols(packed, self.bits, x.numel()), table)
        del fields["codes"]
        table_bytes = torch.from_numpy(table.astype("<u2").view(np.uint8))
        sent = {"coded": torch.from_numpy(coded), "table": table_bytes}
        moved = {name: tensor.to(x.device) for name, tensor in sent.items()}
        return replaced(payload, moved | fields)

    def _decode(self, payload: Payload) -> Tensor:
        fields = dict(payload.parts)
        if "coded" not in fields:
            return self.code._decode(payload)
        table = fields.pop("table").cpu().numpy().view("<u2").astype(np.int64)
        coded = fields.pop("coded").cpu().numpy()
        codes = decode(coded, table, payload.shape.numel())
        fields["codes"] = pack(torch.from_numpy(codes), self.bits).to(payload.device)
        return self.code._decode(replaced(payload, fields))


def counted(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return how often each symbol occurs in packed codes, int64 [2^bits]; on a GPU
    without a wait.
    """
    if cpu.numba is not None and packed.device.type == "cpu" and type(packed) is Tensor:
        return torch.from_numpy(np.bincount(symbols(packed, bits, count), minlength=1 << bits))
    codes = unpack(packed, bits, count)
    zeros = torch.zeros(1 << bits, dtype=torch.int64, device=packed.device)
    return zeros.scatter_add_(0, codes, torch.ones_like(codes))


def frequencies(counts: Tensor) -> Tensor:
    """Whole numbers of 2^12 or 2^15 in all for counts int64 (at least one above zero): one or more
    for each symbol that occurs. The most frequent one takes what rounding leaves.
    """
    coarse, fine = _frequencies(counts, COARSE), _frequencies(counts, FINE)
    shorter = _bits(counts, fine, FINE) < _bits(counts, coarse, COARSE)
    return torch.where(_has_rare(counts) & shorter, fine, coarse)


def _frequencies(counts: Tensor, scale: int) -> Tensor:
    present, total = (counts > 0).long(), 1 << scale
    frequencies = present + counts * (total - present.sum()) // counts.sum()
    return frequencies.scatter_add(
        0, counts.argmax().reshape(1), (total - frequencies.sum()).reshape(1)
    )


def _has_rare(counts: Tensor) -> Tensor:
    """Return whether a symbol is rarer than 1 in 2^12, 0-dim."""
    return ((counts > 0) & (counts << COARSE < counts.sum())).any()


def _bits(counts: Tensor, table: Tensor, scale: int) -> Tensor:
    """Bits of the symbols under frequencies of 2^scale, rounded up, 0-dim."""
    return (counts * costs_on(counts.device, scale)[table]).sum() >> POINT


def coded_bytes(counts: Tensor) -> Tensor:
    """Bytes of the coded stream and its table for counts of symbols, 0-dim."""
    bits = _bits(counts, _frequencies(counts, COARSE), COARSE)
    finer = _bits(counts, _frequencies(counts, FINE), FINE)
    bits = torch.where(_has_rare(counts), torch.minimum(bits, finer), bits)
    return 2 * len(counts) + STATES + 4 * (bits // 32)


@lru_cache(maxsize=16)
def costs_on(device: torch.device, scale: int = COARSE) -> Tensor:
    """Bits of a symbol by its frequency, in units of 2^-16 and rounded up, int64 [2^scale + 1]; on
    a device, where they stay.
    """
    costs, factor = [0], 2.8e-6 * 2 ** (scale - COARSE)  # log2 of the factor above, rounded up
    for f in range(1, (1 << scale) + 1):
        costs.append(math.floor((scale - math.log2(f) + factor) * 2**POINT) + 1)
    return torch.tensor(costs).to(device)


def entropy(counts: Tensor) -> Tensor:
    """Bits a symbol of a message with these counts, 0-dim."""
    share = counts / counts.sum()
    return torch.special.entr(share).sum() / math.log(2)


def message_entropy(compressor: Compressor, x: Tensor, seed: int) -> Tensor | None:
    """Bits an entry of a message needs, given its own frequencies; None where it has no codes."""
    if isinstance(compressor, Ranged):
        return message_entropy(compressor.code, x, seed)
    if type(compressor) is Rotated:
        return message_entropy(compressor.code, rotated(x, compressor.spec.block, seed), seed)
    if compressor.code_bits is None:
        return None
    packed = compressor._encode(x, seed).parts["codes"]
    return entropy(counted(packed, compressor.code_bits, x.numel()))


def symbols(packed: Tensor, bits: int, count: int) -> np.ndarray:
    """Codes of at most 8 bits out of packed bytes, uint8 [count]."""
    if bits == 8:
        return packed.numpy()
    out = np.empty(count, np.uint8)
    _spread(packed.contiguous().numpy(), bits, out)
    return out


def encode(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The stream of uint8 codes [n] under frequencies: states, words, zeros; uint8."""
    most = (_length(codes, table) - STATES) // 4
    words = np.zeros(most, np.uint32)
    states = np.full(LANES, LEAST, np.int64)
    starts = np.cumsum(table) - table
    inverse, scale = 1.0 / np.maximum(table, 1), _scale(table)
    used = _write(codes, table, starts, inverse, scale, states, words)
    stream = np.zeros(STATES + 4 * most, np.uint8)
    stream[:STATES] = states.astype("<i8").view(np.uint8)
    stream[STATES : STATES + 4 * used] = words[most - used :].astype("<u4").view(np.uint8)
    return stream


def decode(stream: np.ndarray, table: np.ndarray, count: int) -> np.ndarray:
    """Inverse of `encode`. Raises UserError when the bytes are not just the stream of so many codes
    under these frequencies.
    """
    complaint = f"{stream.size} bytes are no rANS stream of {count} codes"
    scale = _scale(table)
    if int(table.sum()) != 1 << scale or stream.size < STATES or stream.size % 4:
        raise UserError(complaint)
    states = stream[:STATES].view("<i8").astype(np.int64)
    words = stream[STATES:].view("<u4").astype(np.uint32)
    slots = np.repeat(np.arange(len(table), dtype=np.uint8), table)
    starts = np.cumsum(table) - table
    codes = np.empty(count, np.uint8)
    used = _read(words, slots, table, starts, scale, states, codes)
    if used < 0 or words[used:].any() or (states != LEAST).any():
        raise UserError(complaint)
    if stream.size != _length(codes, table):
        raise UserError(complaint)
    return codes


def _scale(table: np.ndarray) -> int:
    """Bits of the frequencies of a table, where it is one."""
    return FINE if int(table.sum()) == 1 << FINE else COARSE


def _length(codes: np.ndarray, table: np.ndarray) -> int:
    """Bytes of the stream of codes. Raises UserError where the table is not of these codes."""
    counts = torch.from_numpy(np.bincount(codes, minlength=len(table)))
    if (frequencies(counts).numpy() != table).any():
        raise UserError("a table of frequencies that is not the message's")
    return int(coded_bytes(counts)) - 2 * len(table)


@_compiled
def _spread(packed, bits, out):
    window, filled, at, low = 0, 0, 0, (1 << bits) - 1
    for i in range(out.size):
        if filled < bits:
            window |= np.int64(packed[at]) << filled
            filled += 8
            at += 1
        out[i] = window & low
        window >>= bits
        filled -= bits


@_compiled
def _write(codes, table, starts, inverse, scale, states, words):
    """Fills words from their end; how many. Codes are taken from the last to the first."""
    at = words.size
    for i in range(codes.size - 1, -1, -1):
        x, code = states[i & 3], codes[i]
        f = table[code]
        if (x >> (63 - scale)) >= f:
            at -= 1
            words[at] = np.uint32(x & 0xFFFFFFFF)
            x >>= 32
        quotient = np.int64(np.float64(x) * inverse[code])  # off by one at most
        remainder = x - quotient * f
        if remainder < 0:
            quotient -= 1
            remainder += f
        elif remainder >= f:
            quotient += 1
            remainder -= f
        states[i & 3] = (quotient << scale) + remainder + starts[code]
    return words.size - at


@_compiled
def _read(words, slots, table, starts, scale, states, codes):
    """Fills codes; how many words were read, or -1 where they end too early or a state is none."""
    at = 0
    for lane in range(4):
        if states[lane] < 1 << 31:
            return -1
    for i in range(codes.size):
        x = states[i & 3]
        slot = x & ((1 << scale) - 1)
        code = slots[slot]
        x = table[code] * (x >> scale) + slot - starts[code]
        if x < 1 << 31:
            if at == words.size:
                return -1
            x = (x << 32) | np.int64(words[at])
            at += 1
        codes[i], states[i & 3] = code, x
    return at

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
        codes = symbols(packed, self.bits, x.numel())
        counts = torch.from_numpy(_counts(codes, 1 << self.bits))
        if int(coded_bytes(counts)) >= packed.numel():
            return payload
        table = frequencies(counts).numpy()
        coded = encode(codes, table)
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
        return torch.from_numpy(_counts(symbols(packed, bits, count), 1 << bits))
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
    words = np.empty(1 + most, np.uint32)  # the first is room to write in
    states = np.full(LANES, LEAST, np.int64)
    entries = table << 16 | np.cumsum(table) - table
    inverse = 1.0 / np.maximum(table, 1)
    at = _write(codes, entries, inverse, _scale(table), states, words)
    stream = np.zeros(STATES + 4 * most, np.uint8)
    stream[:STATES] = states.astype("<i8").view(np.uint8)
    used = words[at:].astype("<u4").view(np.uint8)
    stream[STATES : STATES + used.size] = used
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
    words = np.zeros((stream.size - STATES) // 4 + LANES + 1, np.uint32)
    words[: -LANES - 1] = stream[STATES:].view("<u4")
    symbol = np.repeat(np.arange(len(table)), table)
    slots = np.arange(1 << scale) - (np.cumsum(table) - table)[symbol]
    entries = symbol << 32 | table[symbol] << 16 | slots
    codes = np.empty(count, np.uint8)
    used = _read(words, entries, scale, states, codes)
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
    counts = torch.from_numpy(_counts(codes, len(table)))
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


def _counts(codes: np.ndarray, symbols_: int) -> np.ndarray:
    """Counts of each of so many symbols, int64. Raises UserError on another symbol."""
    tables = np.zeros((LANES, 256), np.int64)
    _count(codes, tables)
    counts = tables.sum(0)
    if counts[symbols_:].any():
        raise UserError(f"a code names a symbol beyond {symbols_ - 1}")
    return counts[:symbols_]


@_compiled
def _count(codes, tables):
    """In a table a lane: equal neighbours do not wait for each other."""
    for i in range(codes.size):
        tables[i & 3, codes[i]] += 1


@_compiled
def _pushed(x, entry, inverse, scale, words, at):
    """Takes a symbol (its entry: 2^16 frequency + start) into a state; returns the state, and where
    the words begin.
    """
    frequency = entry >> 16
    words[at - 1] = np.uint32(x & 0xFFFFFFFF)
    full = np.int64(x >> (63 - scale) >= frequency)  # without a branch that depends on the code
    x >>= full << 5
    quotient = np.int64(np.float64(x) * inverse)  # off by one at most
    remainder = x - quotient * frequency
    if remainder < 0:
        quotient -= 1
        remainder += frequency
    elif remainder >= frequency:
        quotient += 1
        remainder -= frequency
    return (quotient << scale) + remainder + (entry & 0xFFFF), at - full


@_compiled
def _write(codes, entries, inverse, scale, states, words):
    """Fills words from their end; where they begin. Codes are taken from the last to the first."""
    at, fours = words.size, codes.size // 4 * 4
    for i in range(codes.size - 1, fours - 1, -1):
        code = codes[i]
        states[i & 3], at = _pushed(states[i & 3], entries[code], inverse[code], scale, words, at)
    first, second, third, fourth = states
    for i in range(fours - 4, -1, -4):
        a, b, c, d = codes[i], codes[i + 1], codes[i + 2], codes[i + 3]
        fourth, at = _pushed(fourth, entries[d], inverse[d], scale, words, at)
        third, at = _pushed(third, entries[c], inverse[c], scale, words, at)
        second, at = _pushed(second, entries[b], inverse[b], scale, words, at)
        first, at = _pushed(first, entries[a], inverse[a], scale, words, at)
    states[0], states[1], states[2], states[3] = first, second, third, fourth
    return at


@_compiled
def _popped(x, entry, scale, words, at):
    """Takes a symbol (its entry: 2^32 code + 2^16 frequency + place among its slots) out of a
    state; returns the state, and how many words are read.
    """
    x = ((entry >> 16) & 0xFFFF) * (x >> scale) + (entry & 0xFFFF)
    short = np.int64(x < 1 << 31)  # without a branch that depends on the code
    return (x << (short << 5)) | np.int64(words[at]) * short, at + short


@_compiled
def _read(words, entries, scale, states, codes):
    """Fills codes; how many words were read, or -1 where they end too early or a state is none.
    words: those of the stream, and five zeros.
    """
    at, most, low = 0, words.size - 5, (1 << scale) - 1
    for lane in range(4):
        if states[lane] < 1 << 31:
            return -1
    first, second, third, fourth = states
    for i in range(0, codes.size // 4 * 4, 4):
        a, b, c, d = (
            entries[first & low],
            entries[second & low],
            entries[third & low],
            entries[fourth & low],
        )
        codes[i], codes[i + 1], codes[i + 2], codes[i + 3] = a >> 32, b >> 32, c >> 32, d >> 32
        first, at = _popped(first, a, scale, words, at)
        second, at = _popped(second, b, scale, words, at)
        third, at = _popped(third, c, scale, words, at)
        fourth, at = _popped(fourth, d, scale, words, at)
        if at > most:
            return -1
    states[0], states[1], states[2], states[3] = first, second, third, fourth
    for i in range(codes.size // 4 * 4, codes.size):
        entry = entries[states[i & 3] & low]
        codes[i] = entry >> 32
        states[i & 3], at = _popped(states[i & 3], entry, scale, words, at)
    return at if at <= most else -1

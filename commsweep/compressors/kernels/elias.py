"""QSGD's code of whole levels (Alistarh 2017, Sec. 3.2): for each non-zero level the gamma code of
the run since the last one, a sign bit, and the gamma code of its size.

Bits go into the low bits of each byte first, and the most significant bit of a number first.
"""

from __future__ import annotations

import numpy as np

from commsweep.compressors.kernels.cpu import _compiled

_PEEK = 12  # bits of a code that are looked up at once
_BLOCK = 4096  # levels whose non-zeros stay in a core's nearest memory


def elias_encode(levels: np.ndarray) -> np.ndarray:
    """The code of int32 levels [n], as uint8."""
    # A run r takes at most 3 / 2 r bits. Pages of zeros that are not written cost nothing.
    largest = max(1, int(levels.max(initial=0)), -int(levels.min(initial=0)))
    most = levels.size * (3 + 2 + 4 * largest.bit_length()) // 2
    words = np.zeros(most // 32 + 2, np.uint32)
    nonzero = np.empty(min(_BLOCK, levels.size), np.int32)
    return words.view(np.uint8)[: _elias(levels, nonzero, words)]


def elias_decode(code: np.ndarray, n: int) -> np.ndarray:
    """Inverse of `elias_encode`: int32 [n]."""
    words = np.frombuffer(code[: code.size // 4 * 4].tobytes(), np.uint32)
    return _elias_back(code, words, np.zeros(n, np.int32))


def _gamma_words() -> tuple[np.ndarray, np.ndarray]:
    """Return the gamma codes of numbers below 256, and their bits: the first bit is the lowest."""
    words, lengths = np.zeros(256, np.uint64), np.zeros(256, np.int64)
    for value in range(1, 256):
        text = "0" * (value.bit_length() - 1) + f"{value:b}"
        words[value], lengths[value] = int(text[::-1], 2), len(text)
    return words, lengths


_WORDS, _LENGTHS = _gamma_words()


def _entries() -> np.ndarray:
    """Return the entry that `_PEEK` bits begin with: 1024 level + 16 run + bits; 0 where it is
    longer.
    """
    entries = np.zeros(1 << _PEEK, np.int32)
    words = [(value, int(_WORDS[value]), int(_LENGTHS[value])) for value in range(1, 64)]
    for run, run_word, run_bits in words:
        for level, level_word, level_bits in words:
            length = run_bits + 1 + level_bits
            if length > _PEEK:
                continue
            for negative in (0, 1):
                word = run_word | negative << run_bits | level_word << run_bits + 1
                entries[word :: 1 << length] = 1024 * (-level if negative else level)
                entries[word :: 1 << length] += 16 * run + length
    return entries


_ENTRIES = _entries()


@_compiled
def elias_bits(levels):
    """Returns the bits of the code of whole levels [n]."""
    bits, last = 0, -1
    for i in range(levels.size):
        level = np.int64(levels[i])
        run, size = i - last, abs(level)
        if run < 256 and size < 256:  # without a branch that depends on the level
            sends = np.int64(level != 0)
            bits += (_LENGTHS[run] + 1 + _LENGTHS[size]) * sends
            last += run * sends
        elif level != 0:
            bits += 1
            for number in (run, size):
                shifted = number
                bits += 1
                while shifted > 1:
                    shifted >>= 1
                    bits += 2
            last = i
    return bits


@_compiled
def _flushed(waiting, held, words, at):
    """Writes a word of the waiting bits, and moves on if there are as many, without a branch;
    returns what is left.
    """
    words[at] = np.uint32(waiting & np.uint64(0xFFFFFFFF))
    full = held >> 5
    return waiting >> np.uint64(full << 5), held & 31, at + full


@_compiled
def _elias(levels, nonzero, words):
    """Returns how many bytes of the words it has written. nonzero: room for places of a block."""
    waiting, held, at, last = np.uint64(0), 0, 0, -1  # bits not yet in a word, and how many
    for block in range(0, levels.size, _BLOCK):
        count = 0
        for i in range(block, min(block + _BLOCK, levels.size)):
            nonzero[count] = i
            count += np.int64(levels[i] != 0)  # without a branch that depends on the level
        for entry in range(count):
            i = np.int64(nonzero[entry])
            level = np.int64(levels[i])
            run, size = i - last, abs(level)
            last = i
            if run < 256 and size < 256:
                signs = _LENGTHS[run]
                word = _WORDS[run] | np.uint64(level < 0) << np.uint64(signs)
                word |= _WORDS[size] << np.uint64(signs + 1)
                waiting |= word << np.uint64(held)
                held += signs + 1 + _LENGTHS[size]
                waiting, held, at = _flushed(waiting, held, words, at)
                continue
            for step in range(2):
                value = run if step == 0 else size
                length = 0
                while value >> (length + 1):
                    length += 1
                waiting, held, at = _flushed(waiting, held + length, words, at)
                for b in range(length, -1, -1):
                    waiting |= np.uint64((value >> b) & 1) << np.uint64(held)
                    held += 1
                waiting, held, at = _flushed(waiting, held, words, at)
                if step == 0:
                    waiting |= np.uint64(level < 0) << np.uint64(held)
                    held += 1
    _flushed(waiting, held, words, at)
    return 4 * at + (held + 7) // 8


@_compiled
def _elias_back(code, words, levels):
    """Reads until no further code fits; zeros pad the last byte, and a code has at least one set
    bit. words: those of the code that are whole.
    """
    total, bit, i = code.size * 8, 0, -1
    while True:
        at = bit >> 5
        if at + 2 < words.size:  # short entries are looked up
            waiting = np.uint64(words[at]) | np.uint64(words[at + 1]) << np.uint64(32)
            waiting >>= np.uint64(bit & 31)
            held = 64 - (bit & 31)
            at += 2
            entry = _ENTRIES[waiting & np.uint64((1 << _PEEK) - 1)]
            while entry != 0 and at < words.size:
                i += (entry >> 4) & 63
                if i >= levels.size:
                    return levels
                levels[i] = entry >> 10
                waiting >>= np.uint64(entry & 15)
                held -= entry & 15
                if held <= 32:
                    waiting |= np.uint64(words[at]) << np.uint64(held)
                    at += 1
                    held += 32
                entry = _ENTRIES[waiting & np.uint64((1 << _PEEK) - 1)]
            bit = 32 * at - held
        negative = False
        for step in range(2):
            length = 0
            while bit < total and not (code[bit >> 3] >> (bit & 7)) & 1:
                length += 1
                bit += 1
            # no code is that long: the bytes are of something else
            if bit + length >= total or length > 31:
                return levels
            value = 0
            for _ in range(length + 1):
                value = (value << 1) | (np.int64(code[bit >> 3]) >> (bit & 7)) & 1
                bit += 1
            if step == 0:
                i += value
                if i >= levels.size or bit >= total:
                    return levels
                negative = (code[bit >> 3] >> (bit & 7)) & 1 == 1
                bit += 1
            else:
                levels[i] = -value if negative else value

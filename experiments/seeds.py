"""Every random draw of a run that is not the model's own: one well-mixed seed for each purpose, place and step.

A draw is a pure function of the numbers that name it, so a message can be repeated bit for bit, after a resume as at
the other end of a link.
"""

from __future__ import annotations

BOUNDARY, EXCHANGE, FACTOR, GRADIENT_FACTOR = range(4)  # purposes
_WORD = 2**64 - 1


def draw(purpose: int, seed: int, *place: int) -> int:
    """A seed of 63 bits. No two sequences of numbers share one but by chance (SplitMix64 over one after the other)."""
    z = 0
    for number in (purpose, seed, *place):
        z = _mixed((z ^ number) + 0x9E3779B97F4A7C15)
    return z >> 1


def _mixed(z: int) -> int:
    z &= _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31

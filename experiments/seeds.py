"""Every random number of a run: where each comes from, so that no two streams meet.

A draw is a pure function of the numbers that name it, so a message can be repeated bit for bit, after a resume as at
the other end of a link, and nothing of it has to be kept. The network's first weights and its dropout are the only ones
that come from torch's global stream, seeded with the run's seed and kept in checkpoints.

    draw            messages of boundaries and learners, codes of kept values, first factors, masks: one for each
                    purpose, place and step
    order, moves    a training set's order and its augmentation: of the run's seed and the epoch
    FIXED, basis    what is the same in every run: splits, made-up sets, the coders' first basis
"""

from __future__ import annotations

FIXED = 0
BOUNDARY, EXCHANGE, FACTOR, GRADIENT_FACTOR, KRONECKER, LABELS, MASKS, VALUES, PAIRS, SHARDS = range(10)  # purposes
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


def order(seed: int, epoch: int) -> int:
    """Of the order of the training samples in an epoch."""
    return ((2 * seed) << 20) + epoch


def moves(seed: int, epoch: int) -> int:
    """Of the samples' augmentation in an epoch."""
    return ((2 * seed + 1) << 20) + epoch


def basis(features: int) -> int:
    """Of the orthonormal basis that coders of so many features begin from."""
    return features

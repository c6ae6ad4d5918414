"""Every random number of a run: where each comes from, so that no two streams meet.

A draw is a pure function of the numbers that name it, so a message can be repeated bit for bit,
after a resume as at the other end of a link, and nothing of it has to be kept. The network's first
weights and its dropout are the only ones that come from torch's global stream, seeded with the
run's seed and kept in checkpoints. Where several learners share a batch, that stream is seeded anew
before each of their passes, so that they draw alike in one process and in several.

    draw            messages of boundaries and learners, codes of kept values, first factors, masks:
                    one for each
                    purpose, place and step
    order, moves    a training set's order and its augmentation: of the run's seed and the epoch
    FIXED, basis    what is the same in every run: splits, made-up sets, the coders' first basis
"""

from __future__ import annotations

FIXED = 0
(
    BOUNDARY,
    EXCHANGE,
    FACTOR,
    GRADIENT_FACTOR,
    KRONECKER,
    LABELS,
    MASKS,
    VALUES,
    PAIRS,
    SHARDS,
    SHARE,
    DROPOUT,
) = range(12)  # purposes
_WORD = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15  # of SplitMix64
ROUNDS, LAST = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31


def draw(purpose: int, seed: int, *numbers: int) -> int:
    """A seed of 63 bits. No two sequences of numbers share one but by chance (SplitMix64 over one
    after the other).
    """
    z = 0
    for number in (purpose, seed, *numbers):
        z = start((z ^ number) + GAMMA)
    return z >> 1


def start(seed: int) -> int:
    """Return where the stream of a seed starts (64 bits): seeds beside each other have streams that
    are not.
    """
    z = seed & _WORD
    for shift, factor in ROUNDS:
        z = (z ^ z >> shift) * factor & _WORD
    return z ^ z >> LAST


def signed(word: int) -> int:
    """The int64 of the same bits, which tensors and launches take."""
    return word - (word >> 63 << 64)


def order(seed: int, epoch: int) -> int:
    """Return the seed of the order of the training samples in an epoch."""
    return ((2 * seed) << 20) + epoch


def moves(seed: int, epoch: int) -> int:
    """Return the seed of the samples' augmentation in an epoch."""
    return ((2 * seed + 1) << 20) + epoch


def basis(features: int) -> int:
    """Return the seed of the orthonormal basis that coders of so many features begin from."""
    return features

"""Measures what compression does to the messages of a boundary while it trains (`--diagnose`).

Every `EVERY`th training message is looked at, the first after an evaluation among them; sums stay
on the message's device until the next evaluation asks. With x what is at the boundary, y what the
receiver uses, u what the compressor was given (x + e with error feedback, x - A with EF21, ...),
all norms over all messages that were looked at:

    error       |y - x| / |x|
    bias        the part of that error which repeated draws do not average out: |E y - x| / |x|,
                without a bias of its
                own from two independent draws, d1 . d2 in the place of |d|^2; a compressor that
                draws nothing has bias = error
    cosine      x . y / (|x| |y|)
    energy      share of |x|^2 in the entries that arrive as something else than zero
    remembered  |u - x| / |x|: what feedback adds to the message, or subtracts from it
    entropy     bits an entry of a message of codes would need if they travelled by their
                frequencies in it (coding=rans comes near); absent where there are no codes
    repeat      cosine of an error y - x and that of the look before, the mean over looks: what
                error feedback could repair; absent where no two messages had one shape
    silent      share of the features (channels of an image, the last axis of a sequence) that no
                message looked at
                ever brought anything for
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from commsweep.compressors import Compressor
from commsweep.compressors.quantize import channel_axis
from commsweep.compressors.rans import message_entropy

EVERY = 10
# compressor, what it was given, seed, what arrives
CompressedMessage = tuple[Compressor, Tensor, int, Tensor]
SUMS = ("xx", "yy", "xy", "error", "bias", "energy", "remembered")


class MessageStatistics:
    """The sums of one channel since they were last asked for."""

    def __init__(self) -> None:
        self.seen = self.messages = 0
        self.sums: Tensor | None = None  # float32 [len(SUMS)]
        self.heard: Tensor | None = None  # bool [features]: something arrived
        self.entropies: list[Tensor] = []  # of the codes of each message
        self.before: Tensor | None = None  # the error of the last message
        self.repeats: list[Tensor] = []

    def wants(self) -> bool:
        """Return whether the next message is one to look at."""
        self.seen += 1
        return self.seen % EVERY == 1

    def record(self, x: Tensor, y: Tensor, compressed: list[CompressedMessage], warm: bool) -> None:
        """x went in and y is used; a message that is dense in part or whole is passed over.
        compressed: what was sent for x. warm: from a factor of an earlier message, without draws.
        """
        if not compressed or any(u.shape != x.shape for _, u, _, _ in compressed):
            return
        x, y = x.float(), y.float()
        u = sum(u.float() for _, u, _, _ in compressed)
        draws = [
            y - x
            if warm
            else y
            - x
            + sum(
                compressor.apply(u, seed + again).float() - sent.float()
                for compressor, u, seed, sent in compressed
            )
            for again in (2, 4)
        ]  # EF-mixed's second half has the seed after the first's
        sums = torch.stack(
            [
                (x * x).sum(),
                (y * y).sum(),
                (x * y).sum(),
                (y - x).square().sum(),
                (draws[0] * draws[1]).sum(),
                (x * x * (y != 0)).sum(),
                (u - x).square().sum(),
            ]
        )
        self._add(sums, y, y - x)
        for compressor, u, seed, _ in compressed:
            if (bits := message_entropy(compressor, u, seed)) is not None:
                self.entropies.append(bits)

    def looked(self, x: Tensor, y: Tensor) -> None:
        """x went into a coder and y comes out of it: nothing is drawn, and nothing remembered."""
        x, y = x.detach().float(), y.detach().float()
        difference = y - x
        error = difference.square().sum()
        self._add(
            torch.stack(
                [
                    (x * x).sum(),
                    (y * y).sum(),
                    (x * y).sum(),
                    error,
                    error,
                    (x * x * (y != 0)).sum(),
                    torch.zeros_like(error),
                ]
            ),
            y,
            difference,
        )

    def _add(self, sums: Tensor, y: Tensor, error: Tensor) -> None:
        heard = (y != 0).movedim(channel_axis(y.shape), 0).flatten(1).any(1)
        self.sums = sums if self.sums is None else self.sums + sums
        self.heard = heard if self.heard is None else self.heard | heard
        if self.before is not None and self.before.shape == error.shape:
            self.repeats.append(cosine_similarity(self.before.flatten(), error.flatten(), 0))
        self.before = error
        self.messages += 1

    def take(self) -> dict[str, float] | None:
        """The measures since the last time (waits for the device); None where no compressed message
        was looked at.
        """
        self.seen = 0
        if self.sums is None or self.heard is None:
            return None
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        out = {"messages": self.messages, "silent": 1 - float(self.heard.float().mean())} | {
            name: math.sqrt(max(0.0, sums[name]) / sums["xx"]) if sums["xx"] else 0.0
            for name in ("error", "bias", "remembered")
        }
        both = math.sqrt(sums["xx"] * sums["yy"])
        out["cosine"] = sums["xy"] / both if both else 0.0
        out["energy"] = sums["energy"] / sums["xx"] if sums["xx"] else 0.0
        if self.entropies:
            out["entropy"] = float(torch.stack(self.entropies).mean())
        if self.repeats:
            out["repeat"] = float(torch.stack(self.repeats).mean())
        self.sums, self.heard, self.entropies = None, None, []
        # forgotten, so that a run which goes on from here says what an uninterrupted one does
        self.before, self.repeats, self.messages = None, [], 0
        return out

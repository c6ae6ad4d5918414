"""Bytes of the exchange of gradients, layer by layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from commsweep.compressors.bits import packed_bytes
from commsweep.compressors.sparse import Counted
from commsweep.config.gradients import Gradients
from commsweep.data_parallel.layers import Layer


class Ledger:
    """Bytes of every layer over training, all learners together; what depends on data is summed on
    the device.
    """

    def __init__(self, layers: list[Layer], spec: Gradients, learners_here: int) -> None:
        self.layers, self.spec, self.here, self.steps = layers, spec, learners_here, 0
        self.up: list[Any] = [0] * len(layers)
        self.down: list[Any] = [0] * len(layers)
        self.kept: list[Any] = [0] * len(layers)  # entries in sparse messages
        self.entries = [0] * len(layers)  # of compressed messages, kept or not
        self.coded = [0] * len(layers)  # compressed messages
        self.plain = [0] * len(layers)  # those that travelled dense
        self.places = 0  # bytes that say which weights live, each from one learner to all
        # whether each message is counted once for everyone that gets it
        self.direct = spec.sharded is not None or spec.collective != "exact"
        # bytes on the way of a dense byte, where every hop is counted: of a ring
        n, every_hop = spec.learners, spec.collective != "exact"
        self.wire = 2 * (n - 1) / n if every_hop else 1
        # `up` is counted in parts of a byte, as every hop of n learners may have n-ths of one
        self.fractions = n if every_hop else 1
        self._seen, self._seen_steps = [0] * len(layers), 0

    def sent(
        self,
        index: int,
        nbytes: int | Tensor,
        entries: int | Tensor = 0,
        messages: int = 1,
        of: int = 0,
    ) -> None:
        """A message for a layer left a learner; `entries`: its entries, where each learner chooses
        its places among `of` (0: all of the layer).
        """
        self.up[index] = self.up[index] + nbytes * self.fractions
        self.kept[index] = self.kept[index] + entries
        self.coded[index] += messages
        self.entries[index] += messages * (of or self.layers[index].shape.numel())

    def sent_parts(self, index: int, count: int | Tensor) -> None:
        """A hop's message for a layer left a learner; count: its n-ths of a byte."""
        self.up[index] = self.up[index] + count
        self.coded[index] += 1
        self.entries[index] += self.layers[index].shape.numel()

    def dense(self, index: int, messages: int, itemsize: int = 0) -> None:
        """A layer travelled as it is, from so many learners; a server sends the mean back so, too.
        itemsize: bytes of an element (0: as the layer has it).
        """
        layer = self.layers[index]
        nbytes = (itemsize or layer.itemsize) * layer.shape.numel()
        share = 2 * (self.fractions - 1) if self.fractions > 1 else 1  # of n learners on a ring
        self.up[index] = self.up[index] + messages * nbytes * share
        self.plain[index] += messages
        if self.spec.exchange == "server":
            self.down[index] = self.down[index] + nbytes

    def led(self, nbytes: int) -> None:
        """Count bytes that one learner sent the others about all layers."""
        self.places += nbytes

    def back(self, index: int, merged: Tensor, n: int, joint: int | None = None) -> None:
        """Count what a server sends to one learner for a layer: the mean, sparse or as signs where
        it is that; n: entries of it that live. joint: bytes of the mean by a joint compressor.
        """
        if self.spec.vote:
            nbytes: int | Tensor = packed_bytes(n, 1)
        elif self.spec.compressor_of(self.layers[index].group).own_places:
            m = torch.count_nonzero(merged)
            nbytes = (4 * m + Counted.place_bytes(m, 1, n)).clamp(max=4 * n)
        elif joint is not None:
            nbytes = joint
        else:
            nbytes = 4 * n
        self.down[index] = self.down[index] + nbytes

    def totals(self) -> dict[str, Any]:
        """Bytes a learner sends up a step, and what that makes on the links of the exchange; by
        layer class, too.

        up: a learner's own messages, with its share of the `places` of live weights (absent where
        none were told), which each time one learner tells all others; learner_sends,
        learner_receives: with what it forwards; total: over all learners. rate: dense bytes over up
        (the effective compression rate). bound: `up` if sparse layers were coded at the entropy of
        their places, at the mean density of their compressed messages. kept: that density over all
        layers whose entries are counted; absent where none are.
        """
        up = [int(count) / self.fractions / max(1, self.steps) / self.here for count in self.up]
        dense = [layer.dense_bytes for layer in self.layers]
        down = self._down()
        n = self.spec.learners
        place_bytes, up_bytes = self.places / max(1, self.steps) / n, sum(up)
        served = self.spec.exchange == "server"
        factor = (
            1
            if self.direct
            else {"allreduce": 2 * (n - 1) / n, "allgather": n - 1, "server": 1}[self.spec.exchange]
        )
        receives = down if served else factor * up_bytes
        out: dict[str, Any] = {
            "up": up_bytes + place_bytes,
            "bound": self._bound(up) + place_bytes,
            "dense": self.wire * sum(dense),
            "rate": self.wire * sum(dense) / (up_bytes + place_bytes) if up_bytes else 1.0,
            "learner_sends": factor * up_bytes + place_bytes * (1 if served else n - 1),
            "learner_receives": receives + place_bytes * (n - 1),
            "total": n
            * (
                factor * up_bytes + (down if served else 0) + place_bytes * (n if served else n - 1)
            ),
        }
        counted = [
            (int(k), entries) for k, entries in zip(self.kept, self.entries, strict=True) if int(k)
        ]
        if self.places:
            out["places"] = place_bytes
        if counted:
            out["kept"] = sum(k for k, _ in counted) / sum(n for _, n in counted)
        for kind in sorted({layer.kind for layer in self.layers}):
            ours = [index for index, layer in enumerate(self.layers) if layer.kind == kind]
            sent = sum(up[index] for index in ours)
            out |= {
                f"{kind}.up": sent,
                f"{kind}.dense": sum(dense[index] for index in ours),
                f"{kind}.rate": sum(dense[index] for index in ours) / sent if sent else 1.0,
            }
        return out

    def _bound(self, up: list[float]) -> float:
        """Bytes a learner would send up a step at the entropy bound: v k + n H2(k / n) bits for k
        values of v bits.
        """
        total, messages = 0.0, max(1, self.steps) * self.here
        for sent, entries, coded, plain, entry_count, layer in zip(
            up, self.kept, self.coded, self.plain, self.entries, self.layers, strict=True
        ):
            bits = self.spec.compressor_of(layer.group).value_bits
            n = entry_count / max(1, coded)  # entries of a message
            dense = plain / messages * layer.dense_bytes
            k = int(entries) / max(1, coded)
            p = k / n if n else 0.0
            entropy = -p * math.log2(p) - (1 - p) * math.log2(1 - p) if 0 < p < 1 else 0.0
            total += (
                min(sent, dense + coded / messages * (bits * k + n * entropy) / 8) if k else sent
            )
        return total

    def _down(self) -> float:
        """Bytes a server sends to one learner a step."""
        return sum(int(back) for back in self.down) / max(1, self.steps)

    def rates(self) -> dict[str, float]:
        """Every layer's compression rate since the last call (waits for the device)."""
        up, steps = [int(count) for count in self.up], max(1, self.steps - self._seen_steps)
        out = {
            layer.name: layer.dense_bytes
            * (steps * self.here * self.fractions)
            / max(1, current - before)
            for layer, current, before in zip(self.layers, up, self._seen, strict=True)
            if not layer.dense
        }
        self._seen, self._seen_steps = up, self.steps
        return out

    @property
    def up_bytes(self) -> float:
        """Bytes that the learners here have sent up so far (waits for the device)."""
        return sum(int(count) for count in self.up) / self.fractions

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "fractions": self.fractions,
            "up": [int(count) for count in self.up],
            "down": [int(nbytes) for nbytes in self.down],
            "steps": self.steps,
            "places": self.places,
            "entries": self.entries,
            "kept": [int(count) for count in self.kept],
            "coded": self.coded,
            "plain": self.plain,
            "seen": self._seen,
            "seen_steps": self._seen_steps,
        }

    def take(self, states: list[tuple[list[int], dict[str, Any]]], stages: int) -> None:
        """Take over, for learners with so many stages each, what the ledger of a stage says of its
        layers, which have these places in the network. Tied embeddings, which two stages have,
        count once.
        """
        taken: set[int] = set()
        for number, (numbers, state) in enumerate(states):
            # told by one learner, noted by all
            self.steps, self.places = state["steps"], state["places"]
            if number % stages == 0:
                taken = set()
            for index, number_here in enumerate(numbers):
                if number_here in taken:
                    continue
                taken.add(number_here)
                for name in ("up", "kept", "entries", "coded", "plain"):
                    getattr(self, name)[number_here] += state[name][index]
                self.down[number_here] = state["down"][index]

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.up, self.down, self.kept, self.coded, self.steps = (
            state[key] for key in ("up", "down", "kept", "coded", "steps")
        )
        self._seen, self._seen_steps = state["seen"], state["seen_steps"]
        if state.get("fractions", 1) != self.fractions:  # of an earlier version: in bytes
            self.up, self._seen = (
                [count * self.fractions for count in counts] for counts in (self.up, self._seen)
            )
        self.plain = state.get("plain", [self.steps * self.here - n for n in self.coded])
        self.places = state["places"]
        self.entries = state.get(
            "entries",
            [n * layer.shape.numel() for n, layer in zip(self.coded, self.layers, strict=True)],
        )

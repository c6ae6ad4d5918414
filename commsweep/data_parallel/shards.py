"""Learners that own a shard each: gradients reach their owners in codes, and how far shards have
moved goes to all.

    reduce   within a node every learner hands each of the others, coded, its gradient of their
             shards; sums are coded again and handed to the owner, across nodes: two all-to-alls
             (ZeRO++'s qgZ)
    step     the owner's, on its own float32 weights
    gather   codes of (weights - weights last seen), which everyone adds to what it holds, so that
             all stay equal without error feedback (SDP4Bit, arXiv 2410.15526); uncoded, the
             weights themselves

Shard j of a layer, padded to as many equal parts as there are learners, belongs to learner j = node
L + place, of L learners a node. Layers that travel dense (vectors) are averaged as ever. A process
here holds all optimizer state and uses that of its own shards: what is measured are messages and
results, not the memory that sharding saves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from commsweep import seeds
from commsweep.collectives import Collectives, Message, sliced, summed
from commsweep.component import Moment
from commsweep.compressors import build, message
from commsweep.config.gradients import Gradients, Sharded
from commsweep.data_parallel.exchange import WHAT, Exchange
from commsweep.data_parallel.learners import Learners

HOPS = ("inside", "across", "weights")  # of the bytes


class Shards(Learners):
    """Learners whose gradients are reduced to shards, and whose weights are gathered from them."""

    exchange: Exchange
    sharded: Sharded

    def __init__(
        self,
        spec: Gradients,
        model: nn.Module,
        seed: int,
        batch: int,
        collectives: Collectives | None = None,
        microbatches: int = 1,
    ) -> None:
        super().__init__(spec, model, seed, batch, collectives, microbatches)
        assert spec.sharded is not None, "the learners of such a run are made of this class"
        self.sharded = spec.sharded
        self.codes = [
            build(spec) for spec in (spec.compressor, self.sharded.across, self.sharded.weights)
        ]
        self.coded = [index for index, layer in enumerate(self.exchange.layers) if not layer.dense]
        self.sent: dict[str, Any] = dict.fromkeys(HOPS, 0)  # bytes of the learners here
        # from the owners' weights, what all hold
        self.differs = self.sharded.weights.kind != "none"
        self._means: list[list[Tensor]] = []  # [learner here][layer] of its shards' gradients
        self._told: list[Tensor] = []  # the owners' weights, of a checkpoint
        self._master: dict[int, Tensor] = {}

    def configured(self, optimizer: torch.optim.Optimizer) -> None:
        if self.differs:
            self._master = {
                index: self.exchange.trained[index].detach().clone() for index in self.coded
            }
            for weights, saved in zip(self._master.values(), self._told, strict=bool(self._told)):
                weights.copy_(saved)
        self._seen = {index: self.exchange.trained[index].data for index in self.coded}

    # Gradients to their owners.

    def reduce(self, moment: Moment) -> None:
        """Give the owners the means of their shards; the rest of a gradient is zero where its owner
        is elsewhere.
        """
        exchange, n = self.exchange, self.spec.learners
        learners, exchange.collected = exchange.collected, []
        exchange.ledger.steps += 1
        dense = [index for index, layer in enumerate(exchange.layers) if layer.dense]
        arrival = exchange.begin(learners, moment.step, moment.epoch, dense)  # pyright: ignore[reportArgumentType]
        means = self._reduced(
            [[sliced(tensors[index], n) for index in self.coded] for tensors in learners],
            moment.step,
        )
        merged = arrival()
        for at, index in enumerate(self.coded):
            full = torch.zeros_like(sliced(learners[0][index], n))
            for row, learner in enumerate(self.here):
                full[learner] = means[row][at]
            merged[index] = full.view(-1)[: exchange.layers[index].shape.numel()].view(
                exchange.layers[index].shape
            )
        for index, mean in merged.items():
            exchange.trained[index].grad = mean
        self._means = means
        self._give(self._master)

    def _reduced(self, grads: list[list[Tensor]], step: int) -> list[list[Tensor]]:
        """[learner here][layer] of the mean of everyone's gradient of the learner's own shard,
        given all of the learners' here [learner here][layer], [shard, elements] each.
        """
        n, local = self.spec.learners, self.spec.learners // self.sharded.nodes
        inside = self._hop(
            "inside",
            step,
            [
                {
                    node * local + rank: [shards[rank::local] for shards in rows]
                    for node in [learner // local]
                    for rank in range(local)
                }
                for learner, rows in zip(self.here, grads, strict=True)
            ],
        )
        sums = [[summed(column) for column in zip(*arrived, strict=True)] for arrived in inside]
        across = (
            self._hop(
                "across",
                step,
                [
                    {
                        node * local + learner % local: [shards[node] for shards in row]
                        for node in range(n // local)
                    }
                    for learner, row in zip(self.here, sums, strict=True)
                ],
            )
            if n > local
            else [[[shards[0] for shards in row]] for row in sums]
        )
        return [
            [summed(column).div_(n) for column in zip(*arrived, strict=True)] for arrived in across
        ]

    def _hop(
        self, hop: str, step: int, shards_to: list[dict[int, list[Tensor]]]
    ) -> list[list[list[Tensor]]]:
        """Return the result of one all-to-all: parts [learner here]{to whom: [layer]}; [learner
        here][from whom, in order][layer].
        """
        number, layers = HOPS.index(hop), self.exchange.layers
        code, address = (
            self.codes[number],
            message.Address(message.digest(f"{self.spec} {hop}"), step),
        )
        messages = [
            {
                to: [
                    Message(
                        code,
                        shard,
                        seeds.draw(
                            seeds.SHARDS,
                            self.exchange.seed,
                            layers[index].place,
                            learner,
                            step,
                            number,
                            to,
                        ),
                    )
                    for index, shard in zip(self.coded, shards, strict=True)
                ]
                for to, shards in outbox.items()
            }
            for learner, outbox in zip(self.here, shards_to, strict=True)
        ]
        arrived = self.exchange.collectives.scatter(messages, address, WHAT).wait()
        for learner, outbox in zip(self.here, messages, strict=True):
            for at, index in enumerate(self.coded):
                self._count(
                    hop,
                    index,
                    sum(messages[at].nbytes for to, messages in outbox.items() if to != learner),
                )
        return arrived

    def _count(self, hop: str, index: int, nbytes: int | Tensor) -> None:
        self.sent[hop] += nbytes
        self.exchange.ledger.sent(index, nbytes)

    def clips(self, most: float) -> bool:
        exchange = self.exchange
        norms = [
            [torch.stack([shard.square().sum() for shard in shards]).sum()]
            for shards in self._means
        ]
        gathered = exchange.collectives.gather(norms, "norms").wait()
        total = summed([norm for (norm,) in gathered])
        for index, layer in enumerate(exchange.layers):
            grad = exchange.trained[index].grad
            if layer.dense and grad is not None:
                total = total + grad.square().sum()
        factor = (most / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for p in exchange.trained:
            if p.grad is not None:
                p.grad.mul_(factor)
        return True

    # Weights from their owners.

    @torch.no_grad()
    def after_step(self, moment: Moment) -> None:
        n, exchange, code = self.spec.learners, self.exchange, self.codes[2]
        slices = {
            index: (sliced(exchange.trained[index].data, n), sliced(self._seen[index], n))
            for index in self.coded
        }
        messages = [
            [
                Message(
                    code,
                    new[learner] - held[learner] if self.differs else new[learner],
                    seeds.draw(
                        seeds.SHARDS,
                        exchange.seed,
                        exchange.layers[index].place,
                        learner,
                        moment.step,
                        2,
                        learner,
                    ),
                )
                for index, (new, held) in slices.items()
            ]
            for learner in self.here
        ]
        address = message.Address(message.digest(f"{self.spec} weights"), moment.step)
        received = exchange.collectives.share(messages, address, "weights").wait()
        for mine in messages:
            for index, change in zip(self.coded, mine, strict=True):
                self._count("weights", index, change.nbytes * (n - 1))
        for at, (index, (_, held_before)) in enumerate(slices.items()):
            arrived = torch.stack([row[at] for row in received])
            current = (held_before + arrived if self.differs else arrived).view(-1)
            held = self._seen[index]
            held.copy_(current[: held.numel()].view(held.shape))
        self._give(self._seen)

    def _give(self, weights: dict[int, Tensor]) -> None:
        """Let the model's parameters be these; nothing is copied."""
        for index, weight in weights.items():
            self.exchange.trained[index].data = weight

    def totals(self) -> dict[str, Any]:
        """Bytes, with what a learner sends a step within its node, across nodes and of its
        weights.
        """
        out = super().totals()
        steps = max(1, self.exchange.ledger.steps) * len(self.here)
        return {
            "gradients": out["gradients"]
            | {hop: nbytes / steps for hop, nbytes in self.sent.items()}
        }

    def get_extra_state(self) -> dict[str, Any]:
        return {"sent": self.sent, "master": list(self._master.values()) or self._told}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.sent, self._told = state["sent"], state["master"]

"""Sparse training as a component: masks that move on time, gradients and moments that stay zero,
every FLOP accounted.

before a pass       attention is switched to what its phase says before the exchange of compressed
gradients   one learner in turn chooses by its own gradient and sends the places;
                    all take the new masks, and the live gradients travel
after the backward  else masks move by the gradient that all have; then dead weights' gradients are
zero after the step      nothing: a weight whose gradient, moments and value are zero stays zero
(where moments are
                    kept, weights are masked again)
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from commsweep.component import Component, Moment, Pass
from commsweep.compressors.bits import mask_bytes, pack_mask, unpack_mask
from commsweep.config.sparsity import Sparsity
from commsweep.errors import UserError
from commsweep.modules import Modules
from commsweep.sparsity import densities, flops, masks
from commsweep.sparsity.attention import Attending
from commsweep.sparsity.layers import survey
from commsweep.sparsity.masks import Mask
from commsweep.sparsity.schedule import Schedule, moved

if TYPE_CHECKING:
    from commsweep.data_parallel.exchange import Exchange

HISTORY = 64  # updates in the record of an evaluation
WHAT = "topology"  # bytes that say which weights live
Counts = list[tuple[int, int]]  # of every layer: pruned, grown


class SparseTraining(Component):
    """The masks of a network over a training of `steps` steps."""

    def __init__(
        self,
        spec: Sparsity,
        model: nn.Module,
        trained: nn.Module,
        sample: Tensor,
        steps: int,
        seed: int,
        exchange: Exchange | None = None,
    ) -> None:
        """trained: all that the optimizer moves, the model included; sample [1, ...]. exchange: of
        gradients, None where nothing is exchanged. Raises UserError when the model or the run's
        length does not fit the phases.
        """
        super().__init__()
        self.spec, self.seed, self.trained = (
            spec,
            seed,
            [p for p in trained.parameters() if p.requires_grad],
        )
        self.schedule = Schedule(spec, steps)
        self.network, weights = survey(model, sample, spec.modules)
        self.shapes = [tuple(weight.shape) for _, weight in weights]
        # what no cap allows is found before anything is trained
        for stretch in self.schedule.stretches:
            densities.densities(self.shapes, spec, stretch.phase.sparsity)
        first = densities.live(self.shapes, spec, self.schedule.target(0))
        self.masks: Modules[Mask] = Modules(
            Mask(name, weight, masks.first_mask(weight, live, spec, seed, index))
            for index, ((name, weight), live) in enumerate(zip(weights, first, strict=True))
        )
        self._mask_weights()
        self.attending = self._attending(model) if spec.attends else None
        self.account = flops.Account(self.network)
        self.live_only = exchange is not None and exchange.spec.compressor.kind != "none"
        self._exchange: list[Any] = [exchange]
        self.updates = 0
        self.sent = 0  # bytes of places, all learners together
        self._learners = exchange.spec.learners if exchange is not None else 1
        self._optimizer: Any = None
        self._rows = 0
        self._due: Any = None  # counts by mask, or None where no mask moves
        self._before = [mask.live for mask in self.masks]
        self._weights = sum(mask.dead.numel() for mask in self.masks)
        # since the last evaluation: step, live, grown
        self.history: list[tuple[int, list[int], list[int]]] = []
        self._alive = 0.0  # summed over steps: the share of the masked weights that live
        self._steps = 0
        self._turns = (
            {id(p): index for index, p in enumerate(exchange.trained)}
            if exchange is not None
            else {}
        )
        self._stale = self.live_only  # whether the exchange must hear which entries live

    def _attending(self, model: nn.Module) -> Attending:
        try:
            return Attending(model, self.spec.width, self.spec.alternate)
        except ValueError as error:
            raise UserError(f"sparsity.phases: {error}; leave attention out") from None

    def configured(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    # A step.

    def before_pass(
        self, moment: Moment, pass_: Pass, samples: Tensor, device: torch.device
    ) -> None:
        self._rows = pass_.batch
        if self.attending is not None:
            phase = self.schedule.at(moment.step).phase
            self.attending.switch(phase.attention, phase.alternate_attention)

    def before_exchange(self, moment: Moment) -> None:
        self._due = self._counts(moment.step) if self.schedule.updates(moment.step) else None
        self._before = [mask.live for mask in self.masks]
        if not self.live_only:
            return
        if self._due is not None:
            self._follow(moment.step)
        if self._stale:
            self._exchange[0].live = {
                self._turns[id(mask.weight)]: mask.places() for mask in self.masks if mask.partial
            }
            self._stale = False
        for grads in self._exchange[0].collected:
            for mask in self.masks:
                if mask.partial:
                    grads[self._turns[id(mask.weight)]].masked_fill_(mask.dead, 0.0)

    def after_backward(self, moment: Moment) -> None:
        if self._due is not None and not self.live_only:
            self._move(
                [
                    self._choice(index, counts, mask.weight.grad, moment.step)
                    for index, (mask, counts) in enumerate(zip(self.masks, self._due, strict=True))
                ],
                moment.step,
            )
        for mask in self.masks:
            if mask.partial and mask.weight.grad is not None:
                mask.weight.grad.masked_fill_(mask.dead, 0.0)
        self._count()
        if self._due is not None and self.spec.update_steps == "skipped":
            for p in self.trained:
                p.grad = None  # optimizers pass over such parameters

    def after_step(self, moment: Moment) -> None:
        if self.spec.pruned_moments == "kept":  # moments of dead weights still move them
            self._mask_weights()

    @torch.no_grad()
    def _mask_weights(self) -> None:
        for mask in self.masks:
            if mask.partial:
                mask.weight.masked_fill_(mask.dead, 0.0)

    # Updates of the masks.

    def _counts(self, step: int) -> Counts | None:
        """Return what an update moves in every layer; None where that is nothing."""
        target = densities.live(self.shapes, self.spec, self.schedule.target(step))
        drop = self.schedule.drop(step)
        counts = [
            moved(mask.live, to, mask.dead.numel(), drop, self.spec.regrow)
            for mask, to in zip(self.masks, target, strict=True)
        ]
        return counts if any(prune or grow for prune, grow in counts) else None

    def _choice(
        self, index: int, counts: tuple[int, int], grad: Tensor | None, step: int
    ) -> tuple[Tensor, Tensor]:
        mask = self.masks[index]
        return masks.chosen(mask.weight, grad, mask.dead, counts, self.spec, self.seed, index, step)

    def _follow(self, step: int) -> None:
        """Let one learner in turn choose by its own gradient; what the others cannot know
        travels.
        """
        exchange = self._exchange[0]
        # a short batch may have left the last of them without a pass
        several = len(exchange.collectives.here) > 1
        leader = self.updates % (len(exchange.collected) if several else self._learners)
        by_score = self.spec.score != "magnitude"  # then what is pruned differs between learners
        collected = [
            (side, index)
            for side, wanted_too in (
                (0, by_score),
                (1, self.spec.by_gradient or (by_score and self.spec.regrow)),
            )
            if wanted_too
            for index, counts in enumerate(self._due)
            if counts[side]
        ]
        before, weights = self.sent, [mask.weight for mask in self.masks]

        def of(grads: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
            return [
                self._choice(index, counts, grads[self._turns[id(weights[index])]], step)
                for index, counts in enumerate(self._due)
            ]

        products: dict[int, list[tuple[Tensor, Tensor]]] = {}

        def factors(number_here: int) -> list[Tensor]:
            products[number_here] = of(exchange.collected[number_here])
            return [
                pack_mask(products[number_here][index][side].view(1, -1), self._due[index][side])
                for side, index in collected
            ]

        if collected:
            packed = exchange.collectives.broadcast(factors, leader, WHAT).wait()
            choice = products[leader if several else 0]
            for (side, index), text in zip(collected, packed, strict=True):
                numel, due_side = self.masks[index].dead.numel(), self._due[index][side]
                if leader not in exchange.collectives.here:
                    arrived = unpack_mask(text, 1, numel, due_side).view(self.shapes[index])
                    choice[index] = (
                        (arrived, choice[index][1]) if side == 0 else (choice[index][0], arrived)
                    )
                self.sent += mask_bytes(1, numel, due_side)
        else:
            choice = of(exchange.collected[0])
        exchange.ledger.led(self.sent - before)
        self._move(choice, step)
        self._stale = True

    def _move(self, choice: list[tuple[Tensor, Tensor]], step: int) -> None:
        for mask, counts, (pruned, grown) in zip(self.masks, self._due, choice, strict=True):
            if any(counts):
                self._reset(mask, mask.move(pruned, grown, counts))
        self.updates += 1
        self.history.append(
            (step, [mask.live for mask in self.masks], [grow for _, grow in self._due])
        )

    def _reset(self, mask: Mask, zero: Tensor) -> None:
        """Moments of what is dead now, or has just grown, are zero; the learners' memories of it,
        too.
        """
        if self.spec.pruned_moments == "reset":
            for moment in self._optimizer.state.get(mask.weight, {}).values():
                if isinstance(moment, Tensor) and moment.shape == mask.dead.shape:
                    moment.masked_fill_(zero, 0.0)
        if self.live_only:
            exchange_index = self._turns[id(mask.weight)]
            for memory in chain.from_iterable(
                memory[exchange_index].buffers() for memory in self._exchange[0].memories
            ):
                if memory.shape == mask.dead.shape:
                    memory.masked_fill_(zero, 0.0)

    # What is known of it.

    def _count(self) -> None:
        """Account for the step that has been worked on, with the masks it began with."""
        attending = self._pairs()
        due = self._due or [(0, 0)] * len(self.masks)
        dense = [self.spec.by_gradient and grow > 0 for _, grow in due]
        # Of learners that send live gradients only the one that chooses needs its own of all
        # weights.
        self.account.add(
            self._rows,
            self._before,
            attending,
            dense,
            1 / self._learners if self.live_only else 1.0,
        )
        for mask, (prune, grow) in zip(self.masks, due, strict=True):
            self.account.updated(flops.update(mask.dead.numel(), prune, grow, self.spec.growth))
        self._alive += sum(mask.live for mask in self.masks) / self._weights
        self._steps += 1

    def _pairs(self) -> float:
        """Attending pairs on average over layers and heads, as attention stands."""
        kind, second = self.attending.now() if self.attending is not None else ("causal", None)
        return self.network.attending(kind, second, self.spec.width, self.spec.alternate)

    def installed(self) -> dict[str, Any]:
        """Phases as they were carried out, and the attention that stands."""
        spec = self.schedule.spec
        if self.attending is not None:
            layer = self.attending.layers[0]
            spec = spec.model_copy(
                update={"width": layer.width, "alternate": self.attending.alternate}
            )
        return {"sparsity": spec}

    def evaluation(self) -> dict[str, Any]:
        """Return the share of every layer that has ever lived (ITOP's rate; waits for the device),
        and, at the updates since the last evaluation (evenly chosen ones where there were many),
        density and grown weights as a share of the live ones.
        """
        sizes = [mask.dead.numel() for mask in self.masks]
        shown = self.history[:: -(-len(self.history) // HISTORY) or 1]
        self.history = []
        return {
            "flops": sum(self.account.spent.values()),
            "masks": {
                "layers": [mask.name for mask in self.masks],
                "ever": [
                    int(mask.ever.sum()) / n for mask, n in zip(self.masks, sizes, strict=True)
                ],
                "steps": [step for step, _, _ in shown],
                "density": [
                    [density / n for density, n in zip(live, sizes, strict=True)]
                    for _, live, _ in shown
                ],
                "turnover": [
                    [new / max(1, density) for new, density in zip(grown, live, strict=True)]
                    for _, live, grown in shown
                ],
            },
        }

    def totals(self) -> dict[str, Any]:
        """FLOPs by part; of the masks their final and mean density, updates, weights grown and ever
        alive (as shares), and bytes of places.
        """
        n, live = self._weights, [mask.live for mask in self.masks]
        return {
            "flops": self.account.totals(live, self._pairs()),
            "masks": {
                "layers": len(self.masks),
                "weights": n,
                "density": sum(live) / n,
                "mean_density": self._alive / max(1, self._steps),
                "updates": self.updates,
                "ever": sum(int(mask.ever.sum()) for mask in self.masks) / n,
                "grown": sum(mask.grown for mask in self.masks) / n,
                "places": self.sent,
            },
        }

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "spent": self.account.spent,
            "dense": self.account.dense,
            "updates": self.updates,
            "sent": self.sent,
            "history": self.history,
            "alive": self._alive,
            "steps": self._steps,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.account.spent, self.account.dense = state["spent"], state["dense"]
        self.updates, self.sent, self.history, self._alive, self._steps = (
            state[key] for key in ("updates", "sent", "history", "alive", "steps")
        )
        self._stale = True  # the masks themselves are loaded next


def memory_bytes(model: nn.Module, live_only: bool) -> int:
    """Bytes of the masks: what is dead, and what ever lived, one byte a weight each; and the places
    of live weights where only these travel, at most eight.
    """
    return (2 + 8 * live_only) * sum(p.numel() for p in model.parameters() if p.dim() > 1)

"""K-FAC as a component of training: factors from hooks, averaged over learners and steps, inverted,
applied.

    forward, backward   factors are computed in hooks and handed to the messages, which leave while
    the passes go on after the backward  their means are waited for and averaged over steps; each
    learner inverts what is placed with it,
                        sends that as soon as it is there, and inverts meanwhile what has no message
    then                gradients (which have been exchanged) are preconditioned, clipped by KL, and
                        the optimizer steps

Learners in one process and processes go through the same lines; where factors are inverted and what
travels together does not change a bit.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from commsweep import seeds
from commsweep.collectives import Collectives, Handle, Processes, Simulated
from commsweep.component import Component, Moment, Pass
from commsweep.config.execution import LearnerWiring
from commsweep.config.second_order import KFAC
from commsweep.errors import UserError, notice
from commsweep.modules import Modules
from commsweep.second_order import costs, factors, placement
from commsweep.second_order.layer import SIDES, KFACLayer
from commsweep.second_order.messages import FactorMessages
from commsweep.second_order.placement import EVERYWHERE, Placed

SMALL = 1024  # rows: the author's later threshold, for the bytes that a simulation counts
COMPUTING, MESSAGES, INVERTING, INVERSES, PRECONDITIONING = (
    "factors",
    "factor messages",
    "inversion",
    "inverse messages",
    "preconditioning",
)


class Preconditioner(Component):
    """K-FAC over all supported layers of a network."""

    def __init__(
        self,
        spec: KFAC,
        model: nn.Module,
        terms: int,
        seed: int = 0,
        collectives: Collectives | None = None,
        wiring: LearnerWiring | None = None,
        calls: Mapping[int, int] | None = None,
    ) -> None:
        """terms: of the loss in a sample (1, or the predicted tokens). calls: how often each module
        runs in a pass, by its identity (None: once each). Raises UserError when no layer is
        supported.
        """
        super().__init__()
        self.spec, self.terms, self.seed, self.collectives = (
            spec,
            terms,
            seed,
            collectives or Simulated(1),
        )
        layers, self.left = supported(model, spec.max_factor, calls)
        if not layers:
            raise UserError(
                "kfac: the model has no layer that it supports (Linear, Conv2d without groups, "
                "Conv1D, run once a pass and trained whole) with factors of at most "
                f"kfac.max_factor={spec.max_factor} rows"
            )
        self.layers: Modules[KFACLayer] = Modules(
            KFACLayer(name, module) for name, module in layers
        )
        self.factors = placement.factors_of(
            [d for _, module in layers for d in factors.sizes(module)]
        )
        self.travels = len(self.collectives.here) < self.collectives.learners
        # New factors are nobody else's: of an owner, or of a learner who is alone and whose
        # messages change nothing.
        self.stays = spec.statistics == "owner" or (
            self.collectives.learners == 1 and spec.compressor.kind == "none"
        )
        measured = costs.measure(self.collectives, spec) if self.travels else None
        self.costs = measured
        self.messages = FactorMessages(
            spec,
            [factor.elements for factor in self.factors],
            seed,
            self.collectives,
            wiring,
            (lambda: measured.gather) if measured else None,
        )
        self.placed = self._placed(wiring)
        self.steps = self.inversions = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of this process, by part
        self._rows = self._learner = 0
        self.collected = self.inverted = False  # in the last step
        self._collects = False
        self._outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            # Before a boundary's hook: what is wanted is the layer's own output and the gradient
            # that comes to it.
            layer.module.register_forward_hook(self._hook(index), prepend=True, with_kwargs=True)

    def _placed(self, wiring: LearnerWiring | None) -> Placed:
        learners = self.collectives.learners
        if self.spec.statistics == "owner":
            if learners > len(self.layers):
                raise UserError(
                    f"kfac.statistics=owner: {learners} learners are more than the "
                    f"{len(self.layers)} layers that they could own; use fewer learners"
                )
            placed = placement.placed_factors("owner", self.factors, learners)
        elif not self.travels or wiring is None:
            placed = placement.placed_factors("everywhere", self.factors, learners)
        else:
            if wiring.small:
                small = placement.below(wiring.small)
            else:
                assert self.costs is not None
                small = self.costs.small
            try:
                placed = placement.placed_factors(
                    wiring.placement,
                    self.factors,
                    learners,
                    fraction=wiring.fraction,
                    small=small,
                )
            except ValueError as error:
                raise UserError(f"--fraction: {error}") from None
        if isinstance(self.collectives, Processes):
            self.collectives.among(
                sorted(
                    {
                        *placed.workers,
                        *(
                            tuple(sorted(placed.column(layer, learner)))
                            for layer in range(len(self.layers))
                            for learner in range(learners)
                        ),
                    }
                    - {()}
                )
            )
        return placed

    # Statistics.

    def _hook(
        self, number: int
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], None]:
        def entered(
            module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor
        ) -> None:
            if not (self._collects and module.training and output.requires_grad):
                return
            if number in self._ran:
                raise UserError(
                    f"kfac: layer {self.layers[number].name} runs more than once in a pass, which "
                    "it did not in the first; leave kfac out"
                )
            self._ran.add(number)
            if self._wants(number):
                with (
                    torch.no_grad(),
                    torch.autocast(output.device.type, enabled=False),
                    self._timed(COMPUTING),
                ):
                    x = inputs[0] if inputs else named["input"]
                    factor = factors.input_factor(
                        factors.inputs(module, x), module.bias is not None, self.spec.weight_sharing
                    )
                self._offer(2 * number, factor)
            if self.spec.fisher == "sampled":
                self._outputs[number] = output
            else:
                output.register_hook(lambda grad: self._came(number, grad))

        return entered

    def _came(self, number: int, grad: Tensor) -> None:
        if not self._wants(number):
            return
        with (
            torch.no_grad(),
            torch.autocast(grad.device.type, enabled=False),
            self._timed(COMPUTING),
        ):
            factor = factors.output_factor(
                factors.slopes(self.layers[number].module, grad),
                self._rows * self.terms,
                self.spec.weight_sharing,
            )
        self._offer(2 * number + 1, factor)

    def _wants(self, number: int) -> bool:
        """Return whether the learner whose pass it is has a part in this layer's factors."""
        return self.spec.statistics == "all" or self.placed.workers[number][0] == self._learner

    def _offer(self, number: int, matrix: Tensor) -> None:
        if self.stays:
            self._own[number] = matrix
            return
        with torch.no_grad(), self._timed(COMPUTING):
            elements = factors.packed(matrix)
        with torch.no_grad(), self._timed(MESSAGES):
            self.messages.offer(number, elements if self._weight == 1 else elements * self._weight)

    def before_pass(
        self, moment: Moment, pass_: Pass, samples: Tensor, device: torch.device
    ) -> None:
        self._collects = self._works(moment) and self.steps % self.spec.factors_every == 0
        if self._collects and pass_.turn == self.collectives.here[0]:
            self._own: dict[int, Tensor] = {}
            self.messages.begin(moment.step)
        self._rows, self._weight, self._learner = pass_.size, pass_.weight, pass_.learner
        self._ran: set[int] = set()

    def after_pass(self, moment: Moment, pass_: Pass) -> None:
        """A layer that was left out of the pass (layer drop) has nothing to say."""
        if not self._collects or self.stays:
            return
        for index, layer in enumerate(self.layers):
            if index not in self._ran and self._wants(index):
                for offset, side in enumerate(SIDES):
                    d = len(getattr(layer, side))
                    self.messages.offer(
                        2 * index + offset, getattr(layer, side).new_zeros(d * (d + 1) // 2)
                    )

    def _works(self, moment: Moment) -> bool:
        return moment.epoch >= self.spec.start_epoch

    def after_forward(
        self,
        moment: Moment,
        pass_: Pass,
        logits: Tensor,
        drawn: Callable[[torch.Generator], Tensor],
    ) -> None:
        """Sampled Fisher: a backward of its own to the layers' outputs, from labels that the model
        draws.
        """
        if not self._outputs:
            return
        loss = drawn(
            torch.Generator().manual_seed(
                seeds.draw(seeds.LABELS, self.seed, pass_.learner, moment.step)
            )
        )
        turns, outputs = list(self._outputs), list(self._outputs.values())
        self._outputs = {}
        with torch.autocast(logits.device.type, enabled=False):
            slopes = torch.autograd.grad(loss, outputs, retain_graph=True)
        for number, slope in sorted(
            zip(turns, slopes, strict=True), reverse=True, key=lambda pair: pair[0]
        ):
            self._came(number, slope)

    # Inverses.

    def before_exchange(self, moment: Moment) -> None:
        """Wait for the new factors and average them: their messages left before those of the
        gradients.
        """
        self.collected = self._collects
        if self.collected:
            with torch.no_grad():
                self._average()

    def after_backward(self, moment: Moment) -> None:
        """Invert where it is time, and precondition the gradients."""
        self.inverted = False
        if not self._works(moment):
            return
        with torch.no_grad():
            self.inverted = self.steps % self.spec.inverses_every == 0
            if self.inverted:
                self._invert(moment.crossed)
            self.steps += 1
            self._precondition(moment.rate)

    def _average(self) -> None:
        with self._timed(MESSAGES):
            new = self._own if self.stays else self.messages.finish()
        with self._timed(COMPUTING):
            for index, layer in enumerate(self.layers):
                if 2 * index in new and 2 * index + 1 in new:
                    a, g = (
                        new[2 * index + offset]
                        if self.stays
                        else factors.unpacked(new[2 * index + offset], len(getattr(layer, side)))
                        for offset, side in enumerate(SIDES)
                    )
                    layer.average(a, g, self.spec.decay)

    def _numbers_here(self, learner: int) -> bool:
        return learner == EVERYWHERE or learner in self.collectives.here

    def _invert(self, step: int) -> None:
        """Factors with a message first, the largest one first, which is the order in which learners
        get theirs.
        """
        self.inversions += 1
        for layer in self.layers:  # of an owner's statistics the others have none
            layer.inverted |= bool(layer.taken) or self.spec.statistics == "owner"
        order = sorted(
            (number for number in range(len(self.factors)) if self.layers[number // 2].inverted),
            key=lambda number: (-self.factors[number].size, number),
        )
        under_way: list[tuple[int, Handle[list[Tensor]]]] = []
        for number in order:
            receivers = self.placed.receivers(number) if self.travels else ()
            if self.collectives.here[0] in receivers:
                under_way.append(
                    (
                        number,
                        self.collectives.broadcast(
                            lambda _, number=number: self._inverse(number),
                            self.placed.inverters[number],
                            "inverses",
                            tuple(sorted(receivers)),
                        ),
                    )
                )
        for number in order:
            if not (self.travels and self.placed.receivers(number)) and self._numbers_here(
                self.placed.inverters[number]
            ):
                self._install(number, self._inverse(number), step)
        for number, handle in under_way:
            with self._timed(INVERSES):
                tensors = handle.wait()
            self._install(number, tensors, step)

    def _inverse(self, number: int) -> list[Tensor]:
        layer, side = self.layers[number // 2], SIDES[number % 2]
        if not self._numbers_here(self.placed.inverters[number]):
            return layer.room(side, self.spec)
        with self._timed(INVERTING):
            return layer.inverse(
                side, self.spec, self.travels and bool(self.placed.receivers(number))
            )

    def _install(self, number: int, tensors: list[Tensor], step: int) -> None:
        with self._timed(PRECONDITIONING):
            self.layers[number // 2].install(SIDES[number % 2], tensors, step)

    def _precondition(self, rate: float) -> None:
        turns = [index for index, layer in enumerate(self.layers) if layer.inverted]
        with self._timed(PRECONDITIONING):
            grads = [self.layers[number].gradient() for number in turns]
        products = self._everybodys(turns, grads)
        with self._timed(PRECONDITIONING):
            scale: Tensor | float = 1.0
            if self.spec.kl_clip and products:
                size = (
                    sum(
                        (
                            torch.dot(a.reshape(-1), b.reshape(-1))
                            for a, b in zip(products, grads, strict=True)
                        ),
                        grads[0].new_zeros(()),
                    ).abs()
                    * rate**2
                )
                scale = (self.spec.kl_clip / size.clamp(min=1e-30)).sqrt().clamp(max=1.0)
            for number, product in zip(turns, products, strict=True):
                self.layers[number].write(product.mul_(scale))

    def _everybodys(self, turns: list[int], grads: list[Tensor]) -> list[Tensor]:
        """Preconditioned gradients of these layers: made here, or by the learner that works for
        this one.
        """
        under_way: list[Handle[list[Tensor]]] = []
        for number, grad in zip(turns, grads, strict=True):
            layer = self.layers[number]
            column = self.placed.column(number, self.collectives.here[0]) if self.travels else ()

            def product(
                layer: KFACLayer = layer, grad: Tensor = grad, column: tuple[int, ...] = column
            ) -> list[Tensor]:
                if column and column[0] not in self.collectives.here:
                    return [torch.empty_like(grad, memory_format=torch.contiguous_format)]
                with self._timed(PRECONDITIONING):
                    return [layer.preconditioned(grad, self.spec).contiguous()]

            if column:
                under_way.append(
                    self.collectives.broadcast(
                        lambda _, product=product: product(),
                        column[0],
                        "preconditioned",
                        tuple(sorted(column)),
                    )
                )
            else:
                result = product()
                under_way.append(Handle(lambda result=result: result))
        with self._timed(INVERSES):
            return [handle.wait()[0] for handle in under_way]

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - began

    # What is known of it.

    def installed(self) -> dict[str, Any]:
        return {"kfac": self.spec.model_copy(update={"compressor": self.messages.compressor.spec})}

    def totals(self) -> dict[str, Any]:
        """Factors, and bytes a step on average.

        factors_up: that a learner hands over; factors_down: that it gets of others'.
        inverses_PLACEMENT: of all inverses, sent once each, under that placement (balanced: small
        below 1024 rows). preconditioned: of the gradients that owners send.
        """
        learners, steps = self.collectives.learners, max(1, self.steps)
        up = int(self.messages.nbytes) / len(self.collectives.here) / steps if learners > 1 else 0.0
        eigen, owns = self.spec.method == "eigen", self.spec.statistics == "owner"
        weights = sum(
            4 * a.size * g.size for a, g in zip(self.factors[::2], self.factors[1::2], strict=True)
        )
        out = {
            "factors": len(self.factors),
            "left_out": len(self.left),
            "elements": sum(factor.elements for factor in self.factors),
            "factors_up": up,
            "factors_down": up * (learners - 1),
            "preconditioned": weights if owns and learners > 1 else 0,
        }
        for kind in () if owns else ("everywhere", "spread", "balanced"):
            placed = placement.placed_factors(
                kind, self.factors, learners, small=placement.below(SMALL)
            )
            elements = placement.inverse_elements(self.factors, placed, eigen)
            out[f"inverses_{kind}"] = 4 * elements * self.inversions / steps
        return {"kfac": out}

    def profile(self) -> dict[str, Any]:
        """Return what a prediction of such steps needs: factors' sizes, placement, order, times and
        groups, and costs.
        """
        return {
            "sizes": [factor.size for factor in self.factors],
            "inverters": self.placed.inverters,
            "order": self.messages.order,
            "ready": self.messages.ready(),
            "groups": self.messages.groups,
            "costs": vars(self.costs) if self.costs else {},
        }

    def non_finite(self) -> tuple[float, str] | None:
        """The first layer whose factor was not finite or not positive definite."""
        step, name = min(
            ((float(layer.bad), layer.name) for layer in self.layers), key=lambda bad: bad[0]
        )
        return (
            None
            if step == float("inf")
            else (
                step,
                f"a factor of layer {name} that is not finite or not positive definite (raise "
                "kfac.damping, or kfac.method=eigen)",
            )
        )

    def get_extra_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "inversions": self.inversions}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.steps, self.inversions = state["steps"], state["inversions"]


def memory_bytes(spec: KFAC, model: nn.Module, learners: int) -> int:
    """Bytes of running factors, inverses, of the learners' new factors, and of what they remember
    of messages.
    """
    layers, _ = supported(model, spec.max_factor)
    squares = sum(d * d + d for _, module in layers for d in factors.sizes(module))
    remembered = learners * (spec.feedback.kind != "none" and spec.compressor.kind != "none")
    return 4 * squares * 2 + 2 * squares * (learners + remembered)


def supported(
    model: nn.Module, largest: int, calls: Mapping[int, int] | None = None
) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """(layers with factors, names of other layers with a matrix of weights).

    Factors are of a layer that runs once in a pass, and whose parameters are all trained. calls:
    how often each module runs, by its identity (None: once each).
    """
    calls_: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            calls_[id(p)] = calls_.get(id(p), 0) + 1
    supported, left = [], []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.requires_grad:
            continue
        fits = (
            factors.supported(module)
            and calls_.get(id(weight)) == 1
            and max(factors.sizes(module)) <= largest
            and all(p.requires_grad for p in module.parameters())
            and (calls is None or calls[id(module)] == 1)
        )
        supported += [(name, module)] if fits else []
        left += [] if fits else [name]
    return supported, left


def name_left_out(left: list[str]) -> None:
    """Say which layers K-FAC leaves to the optimizer."""
    if left:
        notice(f"K-FAC leaves these layers to the optimizer: {', '.join(left)}")

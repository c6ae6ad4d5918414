"""The roles of an outer method, played by DiLoCo unless a setting asks for another class.

DiLoCo (arXiv 2311.08105): D = mean of the learners' pseudo-gradients; buf <- mu buf + D;
ref <- ref - eta (D + mu buf). Then every learner goes on from ref.

A method is a class for one or more roles, with the setting of `grad.outer` that asks for it:

    STEPS     the outer step on the common weights
    UPDATES   the way a learner's weights follow that step
    PEERS     the learners that exchange with each other, and what each uses of what arrives
    EXTRAS    what is exchanged beside weights; all that are asked for
    MERGES    a change of messages or of their mean; all that are asked for
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from commsweep.component import Moment
from commsweep.config.outer import Outer
from commsweep.data_parallel.exchange import Exchange
from commsweep.errors import UserError

Method = TypeVar("Method", bound=type)
Layers = dict[int, Tensor]  # tensors by the number of their layer
Arrival = Callable[[], list[Layers]]


@dataclass(frozen=True)
class Fragment:
    """A fragment that is sent.

    moved: the pseudo-gradients, [learner here][layer], None outside `layers`. references: what each
    learner here has moved from. last: whether no exchange of this fragment follows.
    """

    number: int
    layers: list[int]
    moved: list[list[Tensor | None]]
    references: list[list[nn.Parameter]]
    moment: Moment
    last: bool


class OuterSGD:
    """The outer step of DiLoCo on common weights `reference`."""

    def __init__(self, spec: Outer, reference: list[nn.Parameter]) -> None:
        self.spec, self.reference = spec, reference
        nesterov = spec.nesterov and spec.momentum > 0
        self.sgd = torch.optim.SGD(reference, spec.rate, spec.momentum, nesterov=nesterov)

    def step(self, arrived: Layers, rate: float) -> None:
        """Move the weights of these numbers by what has arrived; rate: the learning rate."""
        for index, gradient in arrived.items():
            self.reference[index].grad = gradient
        self.sgd.step()
        self.sgd.zero_grad()

    @torch.no_grad()
    def amend(self, late: Layers) -> None:
        """Change the last step into that of D + late; SGD with momentum is linear in D."""
        group = self.sgd.param_groups[0]
        for index, gradient in late.items():
            reference, factor = self.reference[index], 1.0
            momentum = self.sgd.state[reference].get("momentum_buffer")
            if momentum is not None:
                momentum.add_(gradient)
                factor += group["momentum"] if group["nesterov"] else 0.0
            reference.sub_(gradient, alpha=group["lr"] * factor)

    @property
    def installed(self) -> Outer:
        """Return the settings of the step, read back."""
        group = self.sgd.param_groups[0]
        return self.spec.model_copy(update={"rate": group["lr"], "momentum": group["momentum"]})


class TakeCommon:
    """The rule by which a learner's weights follow an outer step: they become the common ones."""

    keeps_sent = False  # whether it needs the weights that were sent
    weights_differ = False  # whether the learners' weights differ afterwards
    shares_statistics = True  # whether learners take over the first one's running statistics

    def __init__(self, spec: Outer) -> None:
        self.spec = spec

    def apply(self, weights: Tensor, common: Tensor, arrived: Tensor, sent: Tensor) -> None:
        """Change a learner's weights of one layer in place.

        arrived: what the outer step was made of. sent: the weights when they were sent, or empty.
        """
        weights.copy_(common)


class Everybody:
    """The exchange of a fragment among all learners, used as soon as it has arrived."""

    separate = False  # whether every learner has outer weights of its own
    remembered = 0  # tensors of a weight that a process keeps between exchanges, beside a learner's
    remembered_each = 0  # tensors of a weight that each learner keeps between exchanges

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def send(self, fragment: Fragment) -> Arrival:
        """Send a fragment; return what waits for D of each of the training's references."""
        arrival = self.begin(fragment)
        return lambda: [arrival()]

    def begin(self, fragment: Fragment) -> Callable[[], Layers]:
        """Begin the exchange of a fragment among all learners; return what waits for the mean."""
        moment = fragment.moment
        return self.exchange.begin(fragment.moved, moment.step, moment.epoch, fragment.layers)

    def late(self, number: int) -> tuple[Layers, list[Layers]] | None:
        """Return what is still to be used of a fragment's last exchange: the mean, and the share
        that each learner here used at once.
        """
        return None

    def state(self) -> dict[int, Any]:
        """Return what is under way, decided when it was sent, for a checkpoint."""
        return {}

    def load(self, state: dict[int, Any], device: torch.device) -> None:
        """Take over the state of a checkpoint."""


class Extra:
    """Something that learners exchange beside their weights."""

    def __init__(self, outer: Outer, exchange: Exchange) -> None:
        self.outer, self.exchange = outer, exchange

    def due(self, step: int) -> bool:
        """Return whether it is exchanged after so many steps."""
        raise NotImplementedError

    def send(self, optimizers: list[torch.optim.Optimizer], step: int) -> None:
        """Exchange it after so many steps; optimizers: the inner one of each learner here."""
        raise NotImplementedError


class Role(list[tuple[Callable[[Outer], object], type]]):
    """The classes for one role, each with the settings that ask for it."""

    def when(self, condition: Callable[[Outer], object]) -> Callable[[Method], Method]:
        """Return a decorator that names a class as what such settings ask for."""

        def register(method: Method) -> Method:
            self.append((condition, method))
            return method

        return register

    def classes(self, outer: Outer) -> list[type]:
        """Return all classes that these settings ask for."""
        return [method for condition, method in self if condition(outer)]

    def of(self, outer: Outer, default: Method) -> Method:
        """Return the class that these settings ask for, else the default.

        Raises UserError where they ask for two.
        """
        methods = self.classes(outer)
        if len(methods) > 1:
            names = " and ".join(method.__name__ for method in methods)
            raise UserError(f"grad.outer asks for {names}, which play one role: leave one out")
        return cast("Method", methods[0]) if methods else default


STEPS, UPDATES, PEERS, EXTRAS, MERGES = Role(), Role(), Role(), Role(), Role()

"""Learners that train apart and exchange rarely: each has weights and an inner optimizer of its
own, every `interval` steps what it has moved by (its pseudo-gradient) travels as a gradient would,
and an outer step acts on what arrives.

    D_m = ref - theta_m
    D = mean_m of what arrives
    ref <- outer step(ref, D)

The outer step, the way a learner's weights follow ref, and with whom it exchanges are the method's.
The common weights ref are scored; where learners never share one ref, or take it only in part, the
mean of their weights is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.collectives import Collectives
from commsweep.component import Moment, Pass
from commsweep.config.gradients import Gradients
from commsweep.config.outer import Outer
from commsweep.data_parallel.exchange import Exchange
from commsweep.data_parallel.layers import Layer
from commsweep.data_parallel.learners import Learners
from commsweep.data_parallel.outer.roles import (
    EXTRAS,
    MERGES,
    PEERS,
    STEPS,
    UPDATES,
    Arrival,
    Everybody,
    Fragment,
    Layers,
    OuterSGD,
    TakeCommon,
)
from commsweep.data_parallel.outer.streaming import fragments
from commsweep.errors import UserError

Inner = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Clip = Callable[[list[nn.Parameter]], object]


class LocalTraining(Learners):
    """Learners with weights of their own, which meet at the common ones."""

    exchange: Exchange
    outer: Outer

    def __init__(
        self,
        spec: Gradients,
        model: nn.Module,
        seed: int,
        batch: int,
        inner: Inner,
        clip: Clip | None,
        steps: int,
        collectives: Collectives | None = None,
        microbatches: int = 1,
        network_layers: dict[int, Layer] | None = None,
        plain: bool = False,
    ) -> None:
        """inner: makes a learner's optimizer. clip: shortens its gradient where that is too long.
        steps: of the whole training; all fragments are exchanged after the last one. plain: the
        inner optimizer is SGD without momentum.
        """
        super().__init__(spec, model, seed, batch, collectives, microbatches, network_layers)
        assert spec.outer is not None, "the learners of such a run are made of this class"
        self.outer, self.inner, self.clip, self.steps = spec.outer, inner, clip, steps
        self.trained = self.exchange.trained
        index_of = {layer.place: index for index, layer in enumerate(self.exchange.layers)}
        all_layers = self.exchange.layers if network_layers is None else network_layers.values()
        self.fragments = [
            (offset, [index_of[number] for number in among if number in index_of])
            for offset, among in fragments([layer.name for layer in all_layers], self.outer)
        ]
        self.exchange.merges = [method() for method in MERGES.classes(self.outer)]
        self.extras = [method(self.outer, self.exchange) for method in EXTRAS.classes(self.outer)]
        self.local_update = UPDATES.of(self.outer, TakeCommon)(self.outer)
        self.peers = PEERS.of(self.outer, Everybody)(self.exchange)
        # Where every learner begins at the common weights and takes plain SGD steps, what it has
        # moved by is known better than by the difference of weights, which rounds a small step
        # away.
        takes_all = type(self.local_update) is TakeCommon and not self.outer.overlap
        self._adds_up = plain and takes_all and not self.peers.separate
        self._moved: list[list[Tensor]] = []
        # by fragment: when it is used, and what has arrived
        self._pending: dict[int, tuple[int, Any]] = {}
        # by fragment: the number of steps after which it was sent last
        self._sent_after: dict[int, int] = {}
        # the learner whose weights the model holds; None: the common ones
        self._loaded: int | None = None
        self._told: dict[str, Any] | None = None  # of a checkpoint, until training goes on

    # Whose weights the model holds: parameters point at them, so that nothing is copied.

    def configured(self, optimizer: torch.optim.Optimizer) -> None:
        learners_here = range(len(self.here))
        self._rates = optimizer
        self._own = [[p.detach().clone() for p in self.trained] for _ in learners_here]
        self._kept = [
            [statistic.clone() for statistic in self._statistics()] for _ in learners_here
        ]
        self._common = [statistic.clone() for statistic in self._statistics()]
        # The common weights and their optimizer; in pairs, those of each learner here.
        self.references = [
            [nn.Parameter(p.detach().clone()) for p in self.trained]
            for _ in (learners_here if self.peers.separate else (0,))
        ]
        # what a learner that adds sent last
        self._sent = [[torch.empty(0)] * len(self.trained) for _ in learners_here]
        if self._adds_up:
            self._moved = [[torch.zeros_like(p) for p in self.trained] for _ in learners_here]
        self.inners = []
        for learner in learners_here:
            self.take(learner)
            self.inners.append(self.inner(self.trained))
        step = STEPS.of(self.outer, OuterSGD)
        self.outer_steps = [step(self.outer, reference) for reference in self.references]
        if self._told is not None:
            self._restore(self._told)
            self._told = None
        self._loaded = None
        self._show()

    def take(self, learner: int) -> None:
        """Give the model the weights and running statistics of a learner here."""
        if self._loaded == learner:
            return
        for p, weights in zip(self.trained, self._own[learner], strict=True):
            p.data = weights
        for buffer, saved in zip(self._statistics(), self._kept[learner], strict=True):
            buffer.copy_(saved)
        self._loaded = learner

    def _show(self) -> None:
        """Give the model the common weights, or the mean of the learners' where these never all
        meet.
        """
        common = [reference.data for reference in self.references[0]]
        if self.peers.separate or self.local_update.weights_differ:
            common = self.exchange.collectives.all_reduce(self._own, "evaluation").wait()
        for p, tensor in zip(self.trained, common, strict=True):
            p.data = tensor
        for buffer, saved in zip(self._statistics(), self._common, strict=True):
            buffer.copy_(saved)
        self._loaded = None

    def settle(self) -> None:
        self._show()

    def before_scoring(self, epoch: int, number: int, compress: bool) -> None:
        if self._loaded is not None:
            self._show()

    # A step.

    def before_pass(
        self, moment: Moment, pass_: Pass, samples: Tensor, device: torch.device
    ) -> None:
        super().before_pass(moment, pass_, samples, device)
        self.take(pass_.learner - self.here[0])

    @torch.no_grad()
    def after_pass(self, moment: Moment, pass_: Pass) -> None:
        """The learner's own step."""
        if not pass_.whole:
            return
        learner = pass_.learner - self.here[0]
        if self.clip is not None:
            self.clip(self.trained)
        for group, param_group in zip(
            self.inners[learner].param_groups, self._rates.param_groups, strict=True
        ):
            group["lr"] = param_group["lr"]
        if self._adds_up:
            self._add_up(learner)
        self.inners[learner].step()
        for p in self.trained:
            p.grad = None
        for saved, buffer in zip(self._kept[learner], self._statistics(), strict=True):
            saved.copy_(buffer)

    def _add_up(self, learner: int) -> None:
        """Add the plain SGD step that a learner here is about to take to what it has moved by."""
        group = self.inners[learner].param_groups[0]
        for moved, p in zip(self._moved[learner], self.trained, strict=True):
            if p.grad is not None:
                moved.add_(p.grad, alpha=group["lr"])
                moved.add_(p, alpha=group["lr"] * group["weight_decay"])

    @torch.no_grad()
    def after_backward(self, moment: Moment) -> None:
        """All learners have stepped: use what has arrived, and send what is due."""
        done, last = moment.step + 1, moment.step + 1 == self.steps
        self.exchange.ledger.steps += 1
        for extra in self.extras:
            extra.send(self.inners, done)
        for number, (due, _) in list(self._pending.items()):
            if due == done or last:
                self._use(number, moment.rate)
        for number in range(len(self.fragments)):
            if last or self._is_due(number, done):
                arrived = self._send(number, moment, last)
                self._pending[number] = done + self.outer.overlap, arrived
                if last or not self.outer.overlap:
                    self._use(number, moment.rate)

    def _is_due(self, number: int, done: int) -> bool:
        """Return whether a fragment is sent after so many steps."""
        offset = self.fragments[number][0]
        return done > offset and (done - offset) % self.outer.interval == 0

    def meets(self, done: int) -> bool:
        """Return whether the learners exchange anything after so many steps."""
        used = any(due == done for due, _ in self._pending.values())
        sent = any(self._is_due(number, done) for number in range(len(self.fragments)))
        return used or sent or any(extra.due(done) for extra in self.extras)

    @torch.no_grad()
    def finish(self, moment: Moment) -> None:
        """Bring everything that the learners have moved by into the common weights, after a step
        that was not known to be the last one. The result is that of a training of this length.
        """
        done = moment.step + 1
        for number in list(self._pending):
            self._use(number, moment.rate)
        for number in range(len(self.fragments)):
            if self._sent_after.get(number, 0) < done:
                self._pending[number] = done, self._send(number, moment, last=True)
                self._use(number, moment.rate)
            elif (late := self.peers.late(number)) is not None:
                self._amend(*late)

    def _amend(self, mean: Layers, shares: list[Layers]) -> None:
        """Add what the others sent to an eager exchange that turned out to be the last one."""
        for learner, (outer_step, used) in enumerate(zip(self.outer_steps, shares, strict=True)):
            outer_step.amend({index: mean[index] - used[index] for index in mean})
            for index in mean:
                self._own[learner][index].copy_(self._reference(learner)[index].data)

    def _send(self, number: int, moment: Moment, last: bool) -> Arrival:
        """Send what the learners have moved by in a fragment; return what waits for D of each of
        `references`. last: no exchange of this fragment follows.
        """
        layers = self.fragments[number][1]
        self._sent_after[number] = moment.step + 1
        learners = range(len(self.here))
        moved = [self._moved_by(learner, layers) for learner in learners]
        references = [self._reference(learner) for learner in learners]
        return self.peers.send(Fragment(number, layers, moved, references, moment, last))

    def _moved_by(self, learner: int, layers: list[int]) -> list[Tensor | None]:
        """Return the pseudo-gradient of a learner here, by layer; None outside `layers`."""
        moved: list[Tensor | None] = [None] * len(self.trained)
        for index in layers:
            if self._adds_up:
                moved[index] = self._moved[learner][index].clone()
                self._moved[learner][index].zero_()
                continue
            moved[index] = self._reference(learner)[index].data - self._own[learner][index]
            if self.local_update.keeps_sent:
                self._sent[learner][index] = self._own[learner][index].clone()
        return moved

    def _reference(self, learner: int) -> list[nn.Parameter]:
        """Return what a learner here has moved from since it was last given weights."""
        return self.references[learner if self.peers.separate else 0]

    def _use(self, number: int, rate: float) -> None:
        """The outer step of a fragment, and what it does to the learners' weights; rate: the
        learning rate.
        """
        _, arrived = self._pending.pop(number)
        # Begun before what has been sent is waited for, as statistics would else cost latencies of
        # their own.
        first = (
            self.exchange.collectives.broadcast(lambda _: self._kept[0], 0, "statistics")
            if self._norms
            else None
        )
        merged_all: Any = arrived() if callable(arrived) else arrived
        for outer_step, merged in zip(self.outer_steps, merged_all, strict=True):
            outer_step.step(merged, rate)
        for learner, (weights, sent) in enumerate(zip(self._own, self._sent, strict=True)):
            for index, merged in merged_all[0 if len(merged_all) == 1 else learner].items():
                common = self._reference(learner)[index].data
                self.local_update.apply(weights[index], common, merged, sent[index])
        if first is not None:
            self._share_statistics(first.wait())

    def _share_statistics(self, first: list[Tensor]) -> None:
        """Make the running statistics of the first learner the common ones; with a share of one's
        own nobody takes them over.
        """
        for index, statistic in enumerate(first):
            self._common[index].copy_(statistic)
            for saved in self._kept:
                if self.local_update.shares_statistics and not self.peers.separate:
                    saved[index].copy_(statistic)
        # the buffers are others than the learner's now
        self._loaded = None if self._loaded is None else -1

    def installed(self) -> dict[str, Gradients]:
        outer = self.outer_steps[0].installed
        return {"grad": self.exchange.installed.model_copy(update={"outer": outer})}

    # Checkpoints.

    def get_extra_state(self) -> dict[str, Any]:
        if self._told is not None:
            return self._told
        for number, (
            due,
            arrived,
        ) in self._pending.items():  # what is under way has been decided when it was sent
            self._pending[number] = due, arrived() if callable(arrived) else arrived
        return {
            "own": self._own,
            "kept": self._kept,
            "moved": self._moved,
            "common": self._common,
            "sent": self._sent,
            "references": [[weight.data for weight in weights] for weights in self.references],
            "inner": [inner.state_dict() for inner in self.inners],
            "outers": [step.sgd.state_dict() for step in self.outer_steps],
            "pending": self._pending,
            "late": self.peers.state(),
            "sent_after": self._sent_after,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if missing := {"references", "moved", "late", "sent_after"} - state.keys():
            raise UserError(
                f"the checkpoint has no {min(missing)}, so an earlier commsweep wrote it: begin "
                "anew"
            )
        self._told = state

    def _restore(self, state_told: dict[str, Any]) -> None:
        references = [[weight.data for weight in weights] for weights in self.references]
        for name, tensors in (
            ("own", self._own),
            ("kept", self._kept),
            ("references", references),
            ("moved", self._moved),
        ):
            for mine, theirs in zip(tensors, state_told[name], strict=True):
                for tensor, saved in zip(mine, theirs, strict=True):
                    tensor.copy_(saved)
        for tensor, saved in zip(self._common, state_told["common"], strict=True):
            tensor.copy_(saved)
        device = references[0][0].device
        self._sent = [[tensor.to(device) for tensor in tensors] for tensors in state_told["sent"]]
        self._pending = {
            number: (
                due,
                [
                    {index: tensor.to(device) for index, tensor in layers.items()}
                    for layers in arrived
                ],
            )
            for number, (due, arrived) in state_told["pending"].items()
        }
        self.peers.load(state_told["late"], device)
        self._sent_after = dict(state_told["sent_after"])
        for learner, (optimizer, state) in enumerate(
            zip(self.inners, state_told["inner"], strict=True)
        ):
            self.take(learner)
            optimizer.load_state_dict(state)
        for step, state in zip(self.outer_steps, state_told["outers"], strict=True):
            step.sgd.load_state_dict(state)

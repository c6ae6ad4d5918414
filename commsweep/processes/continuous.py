"""1F1B that does not run empty between steps, for gradients of old weights.

The forward passes of a step begin while backward passes of the step before are under way. A stage
holds at least as many microbatches as in 1F1B, where its delay allows it: a step that is d steps
late may begin when all but d of the earlier ones have ended. Where a step has many microbatches a
stage holds more of them, so that messages have time to travel (`Delay.under_way`). Each stage
updates its weights when its last backward of a step is done (PipeDream-2BW, arXiv 2006.09503; with
a delay by stages PipeDream, arXiv 1806.03377).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from commsweep.processes.engine import Stage, Turn
from commsweep.processes.weight_versions import Versions


@dataclass
class UnderWay:
    """A microbatch between its forward and its backward."""

    step: int
    chunk: int  # the engine's number, which later microbatches take again
    last: bool  # of its step
    loss: Tensor | None


class Continuous1F1B(PipelineScheduleSingle):
    """The passes of one stage, from step to step."""

    def __init__(
        self,
        stage: Stage,
        microbatches: int,
        versions: Versions,
        loss_fn: Callable[..., Tensor],
        scale_grads: bool,
        finish: Callable[[int, list[Tensor]], None],
    ) -> None:
        """finish: called with the number of a step and the losses of its microbatches (on the last
        stage) when all its passes are done.
        """
        super().__init__(stage, microbatches, loss_fn, scale_grads=scale_grads)
        self.stage, self.microbatches = stage, microbatches
        self.versions, self.finish = versions, finish
        windows = [
            versions.spec.under_way(stage_index, stage.num_stages, microbatches)
            for stage_index in range(stage.num_stages)
        ]
        self.window = windows[stage.stage_index]
        # steps whose microbatches have numbers of their own, the same at all stages
        self.steps = (max(windows) - 1) // microbatches + 3
        self._under_way: deque[UnderWay] = deque()
        self._losses: list[Tensor] = []
        # what is being received, by the way and the microbatch
        self._receiving: dict[tuple[str, int], dist.Work] = {}
        # with what it sends, which must live as long
        self._sending: deque[tuple[dist.Work, list[dist.P2POp]]] = deque()
        # A message leaves when its receiver has said that it waits. It says so early where
        # messages in both directions do not queue behind each other.
        self.early = str(dist.get_backend()) == "gloo"
        self._coming = False  # whether the activations of the next step are being received

    def feed(
        self,
        number: int,
        turns: Sequence[Turn],
        inputs: Sequence[tuple[Tensor, ...]],
        targets: Sequence[Any] | None,
        following: Sequence[Turn] | None,
    ) -> None:
        """The forward passes of a step, and as many backward passes, of it or of earlier steps.

        inputs: of each microbatch at the first stage, elsewhere empty. targets: of each, at the
        last stage. following: the microbatches of the next step; None where the pipeline runs
        empty before it.
        """
        self._begin(inputs[0], targets)
        first, next_first = self._first(number), self._first(number + 1)
        self.stage.begin(turns, first)
        if following is not None:
            self.stage.begin(following, next_first)
        if self.early and not self._coming:
            for index in range(self.microbatches):
                self._post([], ("fwd", first + index))
        self._coming = following is not None
        for index, input_ in enumerate(inputs):
            chunk = first + index
            to_send: list[dist.P2POp] = []
            finished = None
            if len(self._under_way) == self.window:
                finished = self._backward()
                to_send = self.stage.get_bwd_send_ops(finished.chunk)
            self._post(to_send, None if self.early else ("fwd", chunk))
            if finished is not None:
                self._end(finished)
            self._wait("fwd", chunk)
            self._forward(number, chunk, input_, targets and targets[index])
            full = len(self._under_way) == self.window
            target = chunk if self.early else self._under_way[0].chunk if full else None
            self._post(
                self.stage.get_fwd_send_ops(chunk), None if target is None else ("bwd", target)
            )
            if self.early and following is not None:
                self._post([], ("fwd", next_first + index))

    def drain(self) -> None:
        """The backward passes that are left: an epoch has ended."""
        while self._under_way:
            oldest = self._under_way[0].chunk
            if ("bwd", oldest) not in self._receiving:
                self._post([], ("bwd", oldest))
            finished = self._backward()
            self._post(self.stage.get_bwd_send_ops(finished.chunk), None)
            self._end(finished)
        while self._sending:
            self._sending.popleft()[0].wait()
        self.versions.show_present()

    def _first(self, step: int) -> int:
        """The number of a step's first microbatch."""
        return step % self.steps * self.microbatches

    def _step_microbatches(self, *_: Any, **__: Any) -> None:
        """Refuse what the engine would call for a step that begins and ends empty."""
        raise NotImplementedError("feed it steps, and drain it")

    def _begin(self, inputs: tuple[Tensor, ...], targets: Sequence[Any] | None) -> None:
        """Before the first step: the engine learns what passes between stages."""
        if self._stage_forward_initialized:
            return
        self.stage.has_backward = True
        self.stage.clear_runtime_states()
        self._n_microbatches = self.steps * self.microbatches  # numbers that it must know
        self._initialize_stage(inputs, {}, targets[0] if targets else None)
        self._n_microbatches = self.microbatches

    def _forward(self, number: int, chunk: int, inputs: tuple[Tensor, ...], target: Any) -> None:
        self.versions.use(number)
        with self.versions.stored():
            output = self.stage.forward_one_chunk(chunk, inputs, save_forward_output=False)
            loss = self._loss_fn(output, target) if self.stage.is_last else None  # pyright: ignore[reportOptionalCall]
        last = chunk % self.microbatches == self.microbatches - 1
        self._under_way.append(UnderWay(number, chunk, last, loss))

    def _backward(self) -> UnderWay:
        """Run the backward of the oldest microbatch."""
        finished = self._under_way.popleft()
        self._wait("bwd", finished.chunk)
        self.stage.backward_one_chunk(
            finished.chunk, loss=finished.loss, last_backward=finished.last
        )
        if finished.loss is not None:
            self._losses.append(finished.loss.detach())
        return finished

    def _end(self, finished: UnderWay) -> None:
        """The end of the step, where this was its last microbatch."""
        if not finished.last:
            return
        if self.scale_grads:
            self.stage.scale_grads(self.microbatches)
        self.versions.before_update(finished.step)
        losses, self._losses = self._losses, []
        self.finish(finished.step, losses)

    def _post(self, sends: list[dist.P2POp], message: tuple[str, int] | None) -> None:
        """Begin to send, and to receive the message of a microbatch. Both together: neighbours
        that send to each other would wait for each other.
        """
        receives: list[dist.P2POp] = []
        if message is not None:
            direction, chunk = message
            ask = self.stage.get_fwd_recv_ops if direction == "fwd" else self.stage.get_bwd_recv_ops
            receives = ask(chunk)
        if not sends and not receives:
            return
        works = dist.batch_isend_irecv([*sends, *receives])
        if message is not None and receives:
            self._receiving[message] = works[-1]
        # one work for all where they are coalesced
        together = len(works) != len(sends) + len(receives)
        sending = works if together else works[: len(sends)]
        self._sending += [(work, sends) for work in sending]
        while len(self._sending) > 2 * self.window + 2:
            self._sending.popleft()[0].wait()

    def _wait(self, direction: str, chunk: int) -> None:
        """For the message of a microbatch; there is none at the ends of the pipeline."""
        work = self._receiving.pop((direction, chunk), None)
        if work is not None:
            work.wait()

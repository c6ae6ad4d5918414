"""A stage of torch.distributed.pipelining whose messages travel compressed.

stage = CompressedStage(
    body, index, stages, device, message=(128, 768), rows=4, microbatches=8,
    fwd={"compressor": {"kind": "uniform", "bits": 8}},
    bwd={"compressor": {"kind": "topk", "ratio": 0.1}},
)
schedule = Schedule1F1B(stage, 8, loss_fn=loss)   # or ScheduleGPipe; then train as before
stage.totals()                                    # bytes a step that this stage sent
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commsweep.boundary.insert import Boundaries
from commsweep.collectives import needs_group
from commsweep.compressors import message as wire
from commsweep.config.feedback import sample_keyed
from commsweep.config.links import Links
from commsweep.config.override import parse_links
from commsweep.errors import UserError
from commsweep.feedback.memory import Keys
from commsweep.processes.engine import Side, Stage, Turn


class CompressedStage(Stage):
    """A PipelineStage of one process a stage. Training steps and evaluations are told apart by
    whether the module is in training mode with gradients enabled.
    """

    def __init__(
        self,
        body: nn.Module,
        index: int,
        stages: int,
        device: torch.device,
        message: tuple[int, ...] | list[tuple[int, ...]],
        rows: int,
        microbatches: int,
        fwd: dict[str, Any] | None = None,
        bwd: dict[str, Any] | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """message: shape of what one sample sends to the next stage, or one for each of the
        boundaries. rows: samples of a microbatch. microbatches: of a step. fwd, bwd: links with
        "compressor" and "feedback" as in a Run, the same in all processes.

        Raises UserError on links that cannot be, and without a process group.
        """
        needs_group("a CompressedStage")
        links = parse_links({"fwd": fwd or {}, "bwd": bwd or {}})
        self._allowed(links)
        shapes = message if isinstance(message, list) else [message] * (stages - 1)
        if len(shapes) != stages - 1:
            raise UserError(
                f"message: {len(shapes)} shapes, and {stages} stages have {stages - 1} boundaries"
            )
        cuts = [f"cut{number}" for number in range(stages - 1)]
        adjacent = [cut for number, cut in enumerate(cuts) if number in (index - 1, index)]
        self.boundaries = Boundaries(
            dict.fromkeys(cuts, links),
            dict.fromkeys(cuts, body),
            {cut: torch.Size(shape) for cut, shape in zip(cuts, shapes, strict=True)},
            rows * microbatches,
            0,
            seed,
            only=adjacent,
        ).to(device)
        agreed = f"{links.model_dump_json()} {seed} {rows} {microbatches}"

        def side(at: int) -> Side | None:
            if not 0 <= at < stages - 1:
                return None
            boundary = self.boundaries[cuts[at]]
            digest = wire.digest(f"{agreed} {at} {tuple(shapes[at])}")
            return Side(boundary, torch.Size(shapes[at]), digest)

        self.rows, self.microbatches, self.steps, self.looks = rows, microbatches, 0, 0
        super().__init__(
            body,
            index,
            stages,
            device,
            self.boundaries.step,
            side(index - 1),
            side(index),
            nullcontext,
            group,
        )

    @staticmethod
    def _allowed(links: Links) -> None:
        for direction, link in (("fwd", links.fwd), ("bwd", links.bwd)):
            if link.compressor.coder:
                raise UserError(
                    f"{direction}.compressor.kind={link.compressor.kind} has weights of its own "
                    "in the "
                    "model; choose a code without"
                )
            if sample_keyed(link.feedback):
                raise UserError(
                    f"{direction}.feedback.kind={link.feedback.kind} remembers samples, whose "
                    "numbers a "
                    "schedule does not tell; choose ef or ef21, or commsweep.insert"
                )

    def clear_runtime_states(self) -> None:
        """A step of the schedule begins."""
        super().clear_runtime_states()
        training = self.submod.training and self.has_backward and torch.is_grad_enabled()
        step, n = self.boundaries.step, self.microbatches
        step.training = training
        first = n * (self.steps if training else self.looks)
        turns = []
        for number in range(n):
            samples: Tensor = torch.arange(self.rows) + number * self.rows
            keys = Keys(samples, self.device, number * self.rows) if training else None
            turns.append(Turn(first + number, self.rows, keys))
        self.begin(turns)
        self.spans, self.passages = [], []
        if training:
            self.steps += 1
        else:
            self.looks += 1

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The engine's; a mistake of the user comes out as its one line."""
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise

    def depart(self, y: Any) -> Tensor:
        """Do what Stage does. Raises UserError on an output that is not what was said of it."""
        expected = self._message(self._side("bwd"))
        if not isinstance(y, Tensor):
            raise UserError(
                f"the body of stage {self.stage_index} returns a {type(y).__name__}, and one "
                "tensor travels to the next stage: return a tensor"
            )
        if y.shape != expected:
            raise UserError(
                f"stage {self.stage_index} sends {list(y.shape)}, and message="
                f"{tuple(expected[1:])} with rows={self.rows} says {list(expected)}: rows is the "
                f"batch over {self.microbatches} microbatches"
            )
        return super().depart(y)

    def totals(self) -> dict[str, float]:
        """fwd, bwd: payload bytes a training step that this stage sent; dense: what float32 would
        have been.
        """
        steps = max(1, self.steps)
        sent, dense = {"fwd": 0, "bwd": 0}, 0
        for direction, side in (("fwd", self.right), ("bwd", self.left)):
            if side is not None:
                counts = getattr(side.boundary, direction).counts
                sent[direction] = counts.total()
                dense += counts.dense_bytes
        return {direction: value / steps for direction, value in sent.items()} | {
            "dense": dense / steps
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what this stage remembers, for a checkpoint beside model and optimizer."""
        return {"steps": self.steps, "boundaries": self.boundaries.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.boundaries.load_state_dict(state["boundaries"])
        self.steps = state["steps"]

"""Boundaries put into a model: its forward is not edited, a hook on each stage's last module does the crossing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.experiments.boundary.channel import Boundary, Channel, Step
from commsweep.experiments.boundary.diagnosis import Watch
from commsweep.experiments.boundary.plan import crossed, message_shapes
from commsweep.experiments.component import Component, Moment, Pass
from commsweep.experiments.config import Link, Links
from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.feedback import boundaries as feedback
from commsweep.experiments.feedback.memory import Keys, MappedMemory

Shapes = dict[str, torch.Size]


class Boundaries(nn.ModuleDict, Component):
    """The boundaries of one model by cut, in the model's order, with the step they share."""

    def __init__(self, links: dict[str, Links], modules: dict[str, nn.Module], shapes: Shapes, batch_size: int,
                 n_samples: int, seed: int = 0, *, own: Collection[str] = (), channels_last: bool = False,
                 folder: Path | None = None, only: Collection[str] | None = None,
                 device: torch.device | None = None) -> None:
        """links, modules, shapes: by cut. own: cuts whose links are not those of all others. folder: of memories with a
        row a sample, if they lie in files. only: the cuts beside one stage of a real pipeline; these are not hooked,
        for each has two ends. device: of the memories."""
        super().__init__()
        self.step, self.own = Step(), set(own)
        for turn, (cut, module) in enumerate(modules.items()):
            if only is not None and cut not in only:
                continue
            channels = []
            for way, side in enumerate(("fwd", "bwd")):
                link: Link = getattr(links[cut], side)
                memory = feedback.build(link.feedback, shapes[cut], batch_size, n_samples, channels_last,
                                        folder and folder / f"{cut}.{side}.buffer", device)
                channels.append(Channel(link, memory, self.step, (seed, 2 * turn + way), shapes[cut]))
            compressor = channels[0].compressor
            coder = compressor.coder(torch.Size([1, *shapes[cut]])) if compressor.spec.coder else None
            boundary = Boundary(cut, *channels, coder)
            self[cut.replace(".", "_")] = boundary
            if only is None:  # the closure, not the module, is hooked: the boundary is no child of the model
                module.register_forward_hook(partial(crossed, boundary.forward))

    def begin(self, number: int, samples: Tensor, epoch: int = 0, device: torch.device | str = "cpu") -> None:
        """Training step `number` of a loop of one's own begins; samples: numbers of the batch's rows (host)."""
        self._set(epoch, number, True, Keys(samples, torch.device(device)), training=True)

    def before_pass(self, moment: Moment, one: Pass, samples: Tensor, device: torch.device) -> None:
        self._set(moment.epoch, moment.passed + one.turn, True, Keys(samples, device, one.slot), training=True)

    def before_scoring(self, epoch: int, number: int, compress: bool) -> None:
        self._set(epoch, number, compress, None, training=False)

    def _set(self, epoch: int, number: int, compress: bool, keys: Keys | None, training: bool) -> None:
        step = self.step
        step.epoch, step.number, step.compress, step.training = epoch, number, compress, training
        if keys is not None:
            step.keys = keys

    def after_step(self, moment: Moment) -> None:
        """Each boundary is crossed once per direction and pass; all else is the harness's fault."""
        self.check_calls(moment.crossed)

    def check_calls(self, passes: int) -> None:
        """Raise RuntimeError unless each boundary was crossed so often each way."""
        for boundary in self.values():
            for side in ("fwd", "bwd"):
                calls = getattr(boundary, side).counts.calls
                if calls != passes:
                    raise RuntimeError(f"boundary {boundary.name}: {calls} {side} calls in {passes} training steps")

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """While entered, messages cross as they are and nothing is counted: for a look at the model alone."""
        before, self.step.compress = self.step.compress, False
        try:
            yield
        finally:
            self.step.compress = before

    def snapshot(self, tag: str) -> list[MappedMemory]:
        """Copy every memory that lies in a file, for a checkpoint; returns them."""
        mapped = self.mapped()
        for memory in mapped:
            memory.snapshot(tag)
        return mapped

    def mapped(self) -> list[MappedMemory]:
        """The memories that lie in files."""
        return [module for module in self.modules() if isinstance(module, MappedMemory)]

    def watch(self) -> None:
        """From now on look at what compression does to the messages of training."""
        for boundary in self.values():
            boundary.fwd.watch, boundary.bwd.watch = Watch(), Watch()

    def diagnosis(self) -> list[dict[str, Any]]:
        """What was seen since the last time, by boundary and direction (waits for the device)."""
        return [{"boundary": b.name, "direction": side, **seen} for b in self.values() for side in ("fwd", "bwd")
                if (watch := getattr(b, side).watch) is not None and (seen := watch.take()) is not None]

    def links(self) -> dict[str, Links]:
        """Every boundary's installed links, read back from the objects."""
        return {b.name.replace(".", "_"): Links(fwd=b.fwd.link, bwd=b.bwd.link) for b in self.values()}

    def installed(self) -> dict[str, Any]:
        """fwd, bwd and at; empty without boundaries."""
        return sections(self.links(), self.own)

    def non_finite(self) -> tuple[float, str] | None:
        """(in which crossing, where) the first non-finite message was seen; None if all were finite.

        In that step activations come first, in model order, then gradients against it."""
        order = [("activation", b.name, b.fwd) for b in self.values()]
        order += [("gradient", b.name, b.bwd) for b in reversed(list(self.values()))]
        seen = [(float(channel.counts.first_bad), what, name) for what, name, channel in order
                if channel.counts.first_bad is not None]
        call, what, name = min(seen, key=lambda one: one[0], default=(math.inf, "", ""))
        return None if call == math.inf else (call, f"non-finite {what} at boundary {name}")

    def ledger(self) -> dict[str, dict[str, int]]:
        """Bytes and calls over training: {boundary: {fwd, bwd, fwd_dense, bwd_dense, calls, samples}}."""
        return {b.name: {"fwd": b.fwd.counts.total(), "bwd": b.bwd.counts.total(),
                         "fwd_dense": b.fwd.counts.dense_bytes, "bwd_dense": b.bwd.counts.dense_bytes,
                         "calls": b.fwd.counts.calls, "samples": b.fwd.counts.samples} for b in self.values()}

    def evaluation(self) -> dict[str, Any]:
        """Bytes sent so far, both ways."""
        return {"bytes": sum(b["fwd"] + b["bwd"] for b in self.ledger().values())}

    def totals(self) -> dict[str, Any]:
        return {"boundaries": self.ledger()}


def sections(links: dict[str, Links], own: Collection[str]) -> dict[str, Any]:
    """Installed links by boundary as a Run's sections; `own`: boundaries that have links of their own."""
    common = next((one for cut, one in links.items() if cut not in own), None)
    if common is None:
        return {}
    return {"fwd": common.fwd, "bwd": common.bwd, "at": {cut: one for cut, one in links.items() if one != common}}


def traffic(ledger: dict[str, dict[str, int]], steps: int) -> dict[str, float]:
    """Bytes per optimizer step over all boundaries, each way, and what share of the dense bytes that is. Messages of
    microbatches and of learners that are simulated here add up to a step's."""
    out: dict[str, float] = {}
    for side in ("fwd", "bwd"):
        sent = sum(boundary[side] for boundary in ledger.values())
        dense = sum(boundary[f"{side}_dense"] for boundary in ledger.values())
        out |= {f"{side}_per_step": sent / steps if steps else 0.0, f"{side}_ratio": sent / dense if dense else 1.0}
    dense = sum(b["fwd_dense"] + b["bwd_dense"] for b in ledger.values())
    out["total"] = sum(b["fwd"] + b["bwd"] for b in ledger.values())
    out["ratio"] = out["total"] / dense if dense else 1.0
    return out


def insert(model: nn.Module, links: dict[str, Links | dict[str, Any]], sample: Tensor, batch_size: int,
           n_samples: int = 0, seed: int = 0) -> Boundaries:
    """Put boundaries behind modules of a model of one's own; call `begin` before each training step.

    links: by the name of a module, such as {"layer2": {"fwd": {"compressor": {"kind": "topk"}}}}. sample: one input
    [1, ...], which is passed through once. n_samples: how many there are, for memories with a row a sample.
    Raises UserError on a module that is not there and on a link that cannot be.
    """
    from pydantic import ValidationError

    from commsweep.experiments.config import explain

    known = dict(model.named_modules())
    for cut in links:
        if cut not in known:
            raise UserError(f"the model has no module '{cut}'{nearest(cut, known)}")
    try:
        wanted = {cut: Links.model_validate(one) for cut, one in links.items()}
    except ValidationError as error:
        raise UserError(explain(error, "links")) from None
    modules = {cut: known[cut] for cut in wanted}
    shapes, _ = message_shapes(model, modules, sample)
    made = Boundaries(wanted, modules, shapes, batch_size, n_samples, seed, own=wanted)
    return made.to(sample.device)

"""Boundaries put into a model: its forward is not edited, a hook on each stage's last module does
the crossing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from commsweep.boundary.channel import Boundary, Channel, Step
from commsweep.boundary.diagnosis import MessageStatistics
from commsweep.boundary.message_sizes import crossed, message_shapes
from commsweep.component import Component, Moment, Pass
from commsweep.config.feedback import sample_keyed
from commsweep.config.links import Link, Links
from commsweep.config.override import parse_links
from commsweep.errors import UserError, nearest, reason
from commsweep.feedback import boundaries as feedback
from commsweep.feedback.memory import Keys, MappedMemory
from commsweep.modules import NamedModules

Shapes = dict[str, torch.Size]


class Switch:
    """The switch that puts boundaries into a model or takes them out; copies of the model
    share it.
    """

    def __init__(self) -> None:
        self.value = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        return self


def _while(on: Switch, hook: Callable[..., Any], *args: Any) -> Any:
    """Return what a forward hook returns, while the boundaries are in."""
    return hook(*args) if on.value else None


class Boundaries(NamedModules[Boundary], Component):
    """The boundaries of one model by cut, in the model's order, with the step they share."""

    def __init__(
        self,
        links: dict[str, Links],
        modules: dict[str, nn.Module],
        shapes: Shapes,
        batch_size: int,
        n_samples: int,
        seed: int = 0,
        *,
        set_apart: Collection[str] = (),
        channels_last: bool = False,
        folder: Path | None = None,
        only: Collection[str] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """links, modules, shapes: by cut. set_apart: cuts whose links are not those of all others.
        folder: of memories with a row a sample, if they lie in files. only: the cuts beside one
        stage of a real pipeline; these are not hooked, for each has two ends. device: of the
        memories.
        """
        super().__init__()
        self.step, self.own = Step(), set(set_apart)
        self.hooks: list[RemovableHandle] = []
        self.on = Switch()
        for index, (cut, module) in enumerate(modules.items()):
            if only is not None and cut not in only:
                continue
            channels = []
            for direction, side in enumerate(("fwd", "bwd")):
                link: Link = getattr(links[cut], side)
                memory = feedback.build(
                    link.feedback,
                    shapes[cut],
                    batch_size,
                    n_samples,
                    channels_last,
                    folder and folder / f"{cut}.{side}.buffer",
                    device,
                )
                channels.append(
                    Channel(link, memory, self.step, (seed, 2 * index + direction), shapes[cut])
                )
            compressor = channels[0].compressor
            coder = (
                compressor.coder(torch.Size([1, *shapes[cut]])) if compressor.spec.coder else None
            )
            boundary = Boundary(cut, channels[0], channels[1], coder)
            self[cut.replace(".", "_")] = boundary
            # the closure, not the module, is hooked: the boundary is no child of the model
            if only is None:
                cross = partial(crossed, boundary.forward)
                self.hooks.append(module.register_forward_hook(partial(_while, self.on, cross)))

    def begin(
        self, number: int, samples: Tensor, epoch: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        """Training step `number` begins, by hand; samples: numbers of the batch's rows (host)."""
        self.step.steps = number
        self._set(epoch, number, True, Keys(samples, torch.device(device)), training=True)

    def before_pass(
        self, moment: Moment, pass_: Pass, samples: Tensor, device: torch.device
    ) -> None:
        self.step.steps = moment.step
        self._set(
            moment.epoch,
            moment.passed + pass_.turn,
            True,
            Keys(samples, device, pass_.slot),
            training=True,
        )

    def before_scoring(self, epoch: int, number: int, compress: bool) -> None:
        self._set(epoch, number, compress, None, training=False)

    def _set(
        self, epoch: int, number: int, compress: bool, keys: Keys | None, training: bool
    ) -> None:
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
                    raise RuntimeError(
                        f"boundary {boundary.name}: {calls} {side} calls in {passes} training steps"
                    )

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """While entered, messages cross as they are and nothing is counted: for a look at the model
        alone.
        """
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
            boundary.fwd.watch, boundary.bwd.watch = MessageStatistics(), MessageStatistics()

    def diagnosis(self) -> list[dict[str, Any]]:
        """Return what was seen since the last time, by boundary and direction (waits for the
        device).
        """
        return [
            {"boundary": b.name, "direction": side, **diagnosis}
            for b in self.values()
            for side in ("fwd", "bwd")
            if (watch := getattr(b, side).watch) is not None
            and (diagnosis := watch.take()) is not None
        ]

    def links(self) -> dict[str, Links]:
        """Every boundary's installed links, read back from the objects."""
        return {
            b.name.replace(".", "_"): Links(fwd=b.fwd.link, bwd=b.bwd.link) for b in self.values()
        }

    def installed(self) -> dict[str, Any]:
        """fwd, bwd and at; empty without boundaries."""
        return sections(self.links(), self.own)

    def non_finite(self) -> tuple[float, str] | None:
        """(in which crossing, where) the first non-finite message was seen; None if all were
        finite.

        In that step activations come first, in model order, then gradients against it.
        """
        order = [("activation", b.name, b.fwd) for b in self.values()]
        order += [("gradient", b.name, b.bwd) for b in reversed(list(self.values()))]
        bad_messages = [
            (float(bad), direction, name)
            for direction, name, channel in order
            if (bad := channel.counts.first_bad) is not None
        ]
        call, direction, name = min(
            bad_messages, key=lambda message: message[0], default=(math.inf, "", "")
        )
        return None if call == math.inf else (call, f"non-finite {direction} at boundary {name}")

    def ledger(self) -> dict[str, dict[str, int]]:
        """Bytes and calls over training: {boundary: {fwd, bwd, fwd_dense, bwd_dense, calls,
        samples}}.
        """
        return {
            b.name: {
                "fwd": b.fwd.counts.total(),
                "bwd": b.bwd.counts.total(),
                "fwd_dense": b.fwd.counts.dense_bytes,
                "bwd_dense": b.bwd.counts.dense_bytes,
                "calls": b.fwd.counts.calls,
                "samples": b.fwd.counts.samples,
            }
            for b in self.values()
        }

    def evaluation(self) -> dict[str, Any]:
        return self.sent_bytes()

    def sent_bytes(self) -> dict[str, float]:
        """Bytes sent so far, both ways."""
        return {"bytes": sum(b["fwd"] + b["bwd"] for b in self.ledger().values())}

    def totals(self) -> dict[str, Any]:
        return {"boundaries": self.ledger()}


def sections(links: dict[str, Links], set_apart: Collection[str]) -> dict[str, Any]:
    """Return installed links by boundary as a Run's sections.

    set_apart: the boundaries that have links of their own.
    """
    common = next((link for cut, link in links.items() if cut not in set_apart), None)
    if common is None:
        return {}
    return {
        "fwd": common.fwd,
        "bwd": common.bwd,
        "at": {cut: link for cut, link in links.items() if link != common},
    }


def traffic(ledger: dict[str, dict[str, int]], steps: int) -> dict[str, float]:
    """Bytes per optimizer step over all boundaries, each way, and what share of the dense bytes
    that is. Messages of microbatches and of learners that are simulated here add up to a step's.
    """
    out: dict[str, float] = {}
    for side in ("fwd", "bwd"):
        sent = sum(boundary[side] for boundary in ledger.values())
        dense = sum(boundary[f"{side}_dense"] for boundary in ledger.values())
        out |= {
            f"{side}_per_step": sent / steps if steps else 0.0,
            f"{side}_ratio": sent / dense if dense else 1.0,
        }
    dense = sum(b["fwd_dense"] + b["bwd_dense"] for b in ledger.values())
    out["total"] = sum(b["fwd"] + b["bwd"] for b in ledger.values())
    out["ratio"] = out["total"] / dense if dense else 1.0
    return out


class Inserted(Boundaries):
    """Boundaries in a model of one's own, which see by themselves what each of its forwards is.

    A forward in training mode with gradients is a training step: it is compressed, counted and
    remembered. Any other (an evaluation, under no_grad, a look at shapes) is compressed without a
    memory and counts nothing; in `bypassed()` messages cross as they are. Used as a context
    manager, or with `remove`, they leave the model as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        links: dict[str, Links],
        modules: dict[str, nn.Module],
        shapes: Shapes,
        batch_size: int,
        n_samples: int,
        seed: int,
    ) -> None:
        """Take what `Boundaries` takes; model: what a training step calls."""
        super().__init__(links, modules, shapes, batch_size, n_samples, seed, set_apart=links)
        self.batch_size, self.n_samples = batch_size, n_samples
        self.steps = self.looks = 0  # forwards in training; others since the last of these
        self.epoch = 0  # the loop's to say, where a link begins with a later one
        self._told: Tensor | None = None
        self._by_sample = [
            cut
            for cut, links_at in links.items()
            for link in (links_at.fwd, links_at.bwd)
            if sample_keyed(link.feedback)
        ]
        self.hooks.append(model.register_forward_pre_hook(self._entered, with_kwargs=True))

    def samples(self, numbers: Tensor) -> None:
        """The numbers, from 0, of the samples of the next batch: where a feedback remembers
        samples.
        """
        self._told = numbers.detach().cpu().long()

    def _entered(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.on.value:
            return
        batch = next(
            (argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)),
            None,
        )
        if not (model.training and torch.is_grad_enabled()) or batch is None or batch.is_meta:
            self._set(self.epoch, self.looks, self.step.compress, None, training=False)
            self.looks += 1
            return
        if len(batch) > self.batch_size:
            raise UserError(
                f"a batch of {len(batch)} rows: the boundaries were made for at most "
                f"{self.batch_size}; give insert(..., batch_size=...) the largest there is"
            )
        self._set(
            self.epoch,
            self.steps,
            self.step.compress,
            Keys(self._numbers(len(batch)), batch.device),
            training=True,
        )
        self.steps, self.looks = self.steps + 1, 0

    def _numbers(self, rows: int) -> Tensor:
        if not self._by_sample:
            return torch.arange(rows)
        numbers, self._told = self._told, None
        if numbers is None:
            raise UserError(
                f"boundary {self._by_sample[0]} remembers samples: call "
                "boundaries.samples(numbers) before each training forward, with the numbers of "
                "the batch's samples"
            )
        if (
            numbers.shape != (rows,)
            or int(numbers.min()) < 0
            or int(numbers.max()) >= self.n_samples
        ):
            raise UserError(
                f"boundaries.samples: {tuple(numbers.shape)} numbers from {int(numbers.min())} "
                f"to {int(numbers.max())}; a batch of {rows} needs as many, from 0 to "
                f"{self.n_samples - 1}"
            )
        return numbers

    def remove(self) -> None:
        """Take the boundaries out of the model, and of its copies; what they counted stays."""
        self.on.value = False
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def __enter__(self) -> Inserted:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps, "epoch": self.epoch}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps, self.epoch = state["steps"], state["epoch"]


def insert(
    model: nn.Module,
    links: dict[str, Links | dict[str, Any]],
    sample: Tensor,
    batch_size: int,
    n_samples: int = 0,
    seed: int = 0,
) -> Inserted:
    """Put boundaries behind modules of a model of one's own; they follow its training by
    themselves.

    links: by the name of a module, such as {"layer2": {"fwd": {"compressor": {"kind": "topk"}}}}.
    sample: one input [1, ...], which is passed through once. batch_size: rows of the largest batch.
    n_samples: how many samples there are, for memories with a row each. Raises UserError on a
    module that is not there and on a link that cannot be.
    """
    named_modules = dict(model.named_modules())
    for cut in links:
        if cut not in named_modules or not cut:
            raise UserError(f"the model has no module '{cut}'{nearest(cut, named_modules)}")
        for hook in named_modules[cut]._forward_hooks.values():
            if getattr(hook, "func", None) is _while and hook.args[0].value:  # pyright: ignore[reportFunctionMemberAccess]
                raise UserError(
                    f"module '{cut}' has a boundary already, and its messages would be counted "
                    "twice; take that out first: boundaries.remove()"
                )
    parsed = {cut: parse_links(link, f"links.{cut}") for cut, link in links.items()}
    for cut, link in parsed.items():
        if link.fwd.compressor.kind == "subspace":
            raise UserError(
                f"links.{cut}.fwd.compressor.kind=subspace needs a language model that "
                "commsweep builds; choose another compressor"
            )
        keyed = next(
            (link.feedback.kind for link in (link.fwd, link.bwd) if sample_keyed(link.feedback)),
            None,
        )
        if keyed and n_samples < 1:
            raise UserError(
                f"links.{cut}: feedback.kind={keyed} remembers samples: say how many there are "
                "with insert(..., n_samples=...)"
            )
    if batch_size < 1:
        raise UserError(
            f"batch_size={batch_size}: the rows of the largest batch are wanted, at least 1"
        )
    modules = {cut: named_modules[cut] for cut in parsed}
    try:
        shapes, _ = message_shapes(model, modules, sample)
    except Exception as error:
        raise UserError(
            f"sample of shape {tuple(sample.shape)} does not pass through the model "
            f"({reason(error)}); one input [1, ...] is wanted"
        ) from None
    if lost := [cut for cut in parsed if cut not in shapes]:
        raise UserError(
            f"module '{lost[0]}' does not run in a forward of the model, or returns no tensor"
        )
    return Inserted(model, parsed, modules, shapes, batch_size, n_samples, seed).to(sample.device)

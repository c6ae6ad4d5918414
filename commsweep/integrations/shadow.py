"""Shadow mode: what codecs would do to the messages of a training, which goes on unchanged.

    with Shadow(model, ["topk:0.1", "uniform:4"], {"layers.5": "activations", "*": "gradients"}):
        train()

Every `every`-th training forward, hooks take what passes at the chosen places, compress a copy with
each codec and note bytes, error and bias. Nothing is written into a tensor of the training, and no
random state is drawn from: weights are the same, bit for bit, with and without it.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.compressors import Compressor
from commsweep.compressors.base import all_finite
from commsweep.errors import UserError, nearest, notice
from commsweep.integrations import steps
from commsweep.integrations.forecast import Bound, features_of, forecast, sentence
from commsweep.integrations.measure import Measured, codec, compared, named, sent, with_error
from commsweep.integrations.weights import Changes, changes_of
from commsweep.reporting.words import without_empty

ACTIVATIONS, GRADIENTS, WEIGHTS = "activations", "gradients", "weights"
# Messages by what they are: forward and backward at a module, a parameter's gradient, and what a
# step of the optimizer changes of it.
FORWARD, BACKWARD, PARAMETER = "activations", "activation gradients", "weight gradients"
UPDATE = "weight updates"
OPAQUE: Any = torch.compiler.disable  # a hook that torch.compile breaks its graph at
FEEDBACK = "ef+"  # before a codec: with a simulated memory
MOST = 2**20  # elements of a message that are measured: whole rows from the first
REMEMBERED = 2**14  # of these, elements whose errors are compared with those of the look before


@dataclass(frozen=True)
class Look:
    """The measurement of one codec on one message."""

    step: int
    place: str
    message: str  # FORWARD, BACKWARD or PARAMETER
    result: Measured


@dataclass(frozen=True)
class Stepped:
    """The update of the watched weights by one step, as trainers publish it: in bfloat16, without
    loss.
    """

    step: int
    optimizer: str
    rate: float  # learning rate of its first group
    changes: Changes

    def record(self) -> dict[str, Any]:
        """Return a line of weights.csv."""
        sizes = self.changes
        return {
            "step": self.step,
            "optimizer": self.optimizer,
            "learning_rate": self.rate,
            "entries": sizes.entries,
            "changed_share": sizes.changed / max(1, sizes.entries),
            "bytes": sizes.nbytes,
            "entropy_bytes": sizes.entropy,
        }


class Shadow:
    """Measures codecs beside a training; a context manager, or start() and stop().

    The model trains as before: under autocast, gradient accumulation, activation checkpointing,
    and in several processes, of which the first one measures.
    """

    def __init__(
        self,
        model: nn.Module,
        codecs: list[str | dict[str, Any]],
        at: dict[str, str] | None = None,
        every: int = 50,
        scaler: torch.amp.GradScaler | None = None,
        counts_forwards: bool = True,
    ) -> None:
        """codecs: such as "topk:0.1" or {"kind": "uniform", "bits": 4}; "ef+topk:0.1" with error
        feedback, of gradients of parameters, at every=1. at: patterns of module names
        ("activations") and of parameter names ("gradients"; "weights" for what a step changes), as
        fnmatch has them; by default all gradients of matrices. every: training forwards from one
        look to the next. scaler: of the loss, if there is one. counts_forwards: whether the model's
        forward is called; else call forward_begins() before each.

        The gradient of a parameter is looked at once a step of the optimizer, after all
        accumulated backwards, as a learner would send it: before learners are averaged.

        Raises UserError on a codec that does not exist, and on a pattern that matches nothing.
        """
        if every < 1:
            raise UserError(f"every={every}: choose 1 or more training forwards")
        if not codecs:
            raise UserError('codecs=[]: name at least one, such as "topk:0.1"')
        self.model = getattr(model, "_orig_mod", model)
        if self.model is not model:
            notice(
                "the model is compiled: places whose hooks torch.compile skips are named at the "
                "end; give Shadow the model before torch.compile to be sure"
            )
        self.codecs = {named(entry): codec(_without_feedback(entry)) for entry in codecs}
        self._memories: dict[tuple[str, str], Remembered] = {}
        self._errors: dict[tuple[str, str, str], Tensor] = {}  # of the look before
        self.every, self.forwards, self.looks = every, 0, []
        self._written: dict[Path, Path] = {}  # the folder of a report by the one asked for
        self.modules, self.parameters, self.weights = _modules_of(self.model, at)
        self.updates: list[Stepped] = []
        # before the step of this look: the weights, and the optimizer with its learning rate
        self._before: dict[str, Tensor] = {}
        self._stepped = ("", math.nan)
        self._weighs = False  # whether the next step is one of a look
        remembering = [name for name in self.codecs if name.startswith(FEEDBACK)]
        if remembering and every != 1:
            raise UserError(
                f"codec '{remembering[0]}' remembers from step to step: set every=1, not {every}"
            )
        if remembering and not self.parameters:
            raise UserError(
                f"codec '{remembering[0]}' remembers gradients of parameters, and none is looked "
                f'at: add a pattern to at, such as {{"*": "{GRADIENTS}"}}'
            )
        self.spent = self.elapsed = 0.0
        self._began = 0.0
        self._handles: list[Any] = []
        # in this look, because recomputed forwards come twice: what was seen, what has a hook
        self._seen: set[tuple[str, str]] = set()
        self._hooked: set[str] = set()
        self._looking = False
        self._refused: set[tuple[str, str]] = set()
        self.scaler, self.counts_forwards = scaler, counts_forwards
        # gradients of this step so far: of each parameter, what the last backward left
        self._gradients: dict[str, Tensor] = {}
        self._gathers = False  # whether those of this step are looked at
        self._step = 0  # the forward at which this look began

    def start(self) -> Shadow:
        """Begin to look. Raises UserError when it has begun already."""
        if self._handles:
            raise UserError("this Shadow looks already; stop it, or make another")
        self._began = time.perf_counter()
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        if joined and torch.distributed.get_rank():
            return self
        add = self._handles.append
        if self.counts_forwards:
            add(self.model.register_forward_pre_hook(self._forward_begins))
        add(steps.watch(self))
        for name, module in self.modules.items():
            add(module.register_forward_hook(self._passing(name)))
        for name, parameter in self.parameters.items():
            add(parameter.register_post_accumulate_grad_hook(self._accumulated(name)))
        return self

    def stop(self) -> None:
        """Take all hooks away; the model is as it was."""
        self._look_at_gradients(self._gradients)
        self._look_at_weights()
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self.elapsed += time.perf_counter() - self._began
        self._handles = []
        missed = self.unseen()
        if self.looks and missed:
            notice(
                f"Shadow saw no message at {', '.join(missed[:5])}"
                + (f" and {len(missed) - 5} more" if len(missed) > 5 else "")
            )

    def __enter__(self) -> Shadow:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def unseen(self) -> list[str]:
        """Places that no message was seen at."""
        names = {look.place for look in self.looks}
        watched = (*self.modules, *self.parameters, *self.weights)
        return [name for name in dict.fromkeys(watched) if name not in names]

    # Hooks.

    @OPAQUE
    def _forward_begins(self, _module: nn.Module, _inputs: Any) -> None:
        # A forward that is recomputed in a backward (reentrant checkpointing) is no new one.
        if torch._C._current_graph_task_id() == -1:
            self.forward_begins()

    def forward_begins(self) -> None:
        """A forward of the model begins."""
        if not (self.model.training and torch.is_grad_enabled()):
            self._looking = False
            return
        self._look_at_gradients(self._cleared())
        self._look_at_weights()
        self.forwards += 1
        self._looking = self.forwards % self.every == 1 or self.every == 1
        self._seen, self._hooked = set(), set()
        self._weighs = self._weighs or (self._looking and bool(self.weights))
        if self._looking and not self._gathers:
            self._gathers, self._step = True, self.forwards

    def _cleared(self) -> list[str]:
        """Names of gradients that were taken away since, as a loop without an optimizer of torch
        does after its step.
        """
        removed = []
        for name in self._gradients:
            gradient = self.parameters[name].grad
            if gradient is None or not gradient.any():
                removed.append(name)
        return removed

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: the gradients that it holds are complete."""
        if self._gradients:
            held = steps.held(optimizer)
            complete = [name for name in self._gradients if id(self.parameters[name]) in held]
            self._look_at_gradients(complete)
        if self._weighs and not self._before:
            began = time.perf_counter()
            self._before = {name: p.detach().clone() for name, p in self.weights.items()}
            self._weighs = False
            self._stepped = type(optimizer).__name__, float(optimizer.param_groups[0]["lr"])
            self.spent += time.perf_counter() - began

    @OPAQUE
    def _look_at_weights(self) -> None:
        """Measure what the optimizers have changed of the weights since the step of a look."""
        before, self._before = self._before, {}
        if not before:
            return
        began = time.perf_counter()
        sizes = changes_of(before, self.weights, torch.bfloat16)
        self.updates.append(Stepped(self.forwards, *self._stepped, sizes))
        self.spent += time.perf_counter() - began
        for name, tensor in before.items():
            update = self.weights[name].detach().float() - tensor.float()
            if update.any():  # a scaler may have skipped the step
                self._look(name, UPDATE, _share(update), self.forwards)

    @OPAQUE
    def _look_at_gradients(self, names: Iterable[str]) -> None:
        """Measure these gradients, which no further backward adds to."""
        for name in list(names):
            self._look(name, PARAMETER, self._gradients.pop(name), self._step)
            self._gathers = False

    def _passing(self, name: str) -> Callable[..., None]:
        @OPAQUE
        def passing(module: nn.Module, _inputs: Any, output: Any) -> None:
            x = output[0] if isinstance(output, (tuple, list)) and output else output
            if not (self._looking and module.training and isinstance(x, Tensor)):
                return
            if not x.is_floating_point():
                return
            if (name, FORWARD) not in self._seen:
                self._seen.add((name, FORWARD))
                self._look(name, FORWARD, x, self.forwards)
            # Reentrant checkpointing computes without gradients first, and again with them.
            if x.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                forward = self.forwards
                x.register_hook(lambda grad: self._look(name, BACKWARD, grad, forward))

        return passing

    def _accumulated(self, name: str) -> Callable[[Tensor], None]:
        @OPAQUE
        def accumulated(parameter: Tensor) -> None:
            if self._gathers and parameter.grad is not None:
                began = time.perf_counter()
                self._gradients[name] = self._unscaled(_share(parameter.grad.detach()).clone())
                self.spent += time.perf_counter() - began

        return accumulated

    def _unscaled(self, gradient: Tensor) -> Tensor:
        """Take away what the scaler has multiplied a gradient by."""
        return gradient if self.scaler is None else gradient.float() / self.scaler.get_scale()

    @OPAQUE
    def _look(self, layer: str, message: str, x: Tensor, step: int) -> None:
        """Measure a message."""
        began = time.perf_counter()
        x = _share(x.detach()) if message in (FORWARD, BACKWARD) else x
        if message == BACKWARD:
            x = self._unscaled(x)
        if all_finite(x):  # a scaler skips such a step
            for name, compressor in self.codecs.items():
                feeds = name.startswith(FEEDBACK)
                if (layer, name) in self._refused or (feeds and message != PARAMETER):
                    continue
                try:
                    if feeds:
                        memory = self._memories.setdefault((layer, name), Remembered())
                        result = memory.measured(x, compressor, name, step)
                    else:
                        result, error = with_error(x, compressor, name, step)
                        repeat = self._repeat((layer, message, name), error)
                        result = replace(result, repeat=repeat)
                except UserError as reason:
                    self._refused.add((layer, name))
                    notice(f"{layer}: {reason}")
                    continue
                self.looks.append(Look(step, layer, message, result))
        self.spent += time.perf_counter() - began

    def _repeat(self, key: tuple[str, str, str], error: Tensor) -> float:
        """Return the cosine of an error and the one of the look before; NaN where none was."""
        error = error.flatten()[:REMEMBERED].clone()
        before = self._errors.get(key)
        self._errors[key] = error
        if before is None or before.shape != error.shape:
            return math.nan
        lengths = float(before.norm() * error.norm())
        return float(before @ error) / lengths if lengths else math.nan

    # What was seen.

    @property
    def overhead(self) -> float:
        """Seconds of the hooks over those of the rest; 0 before there are any."""
        total = self.elapsed + (time.perf_counter() - self._began if self._handles else 0.0)
        return self.spent / max(total - self.spent, 1e-9) if self.spent else 0.0

    def summary(self) -> list[dict[str, Any]]:
        """A row a kind of message and codec, least harm first: means over looks and places. total:
        the error of all places together, in which each counts by the square of its length. worth,
        low, high: the forecast of worth kept, NaN where there is none, and `reason` says why.
        """
        groups: dict[tuple[str, str], list[Measured]] = {}
        for look in self.looks:
            groups.setdefault((look.message, look.result.codec), []).append(look.result)
        rows = []
        for (message, name), results in groups.items():
            squares = math.fsum(r.norm**2 for r in results if math.isfinite(r.error))
            errors = math.fsum((r.error * r.norm) ** 2 for r in results if math.isfinite(r.error))
            row: dict[str, Any] = {
                "message": message,
                "codec": name,
                "bytes_share": sum(r.bytes for r in results)
                / sum(r.bytes / r.share for r in results),
                "error": math.sqrt(_mean(r.error**2 for r in results)),
                "bias": math.sqrt(max(0.0, _mean(r.bias_squared for r in results))),
                "cosine": _mean(r.cosine for r in results),
                "total": math.sqrt(errors / squares) if squares else math.nan,
                "energy": _mean(r.energy for r in results),
                "silent": _mean(r.silent for r in results),
                "repeat": _mean(r.repeat for r in results),
                "entropy": _mean(r.entropy for r in results),
                "looks": len(results),
            }
            rows.append(row | _forecast(row))
        return sorted(rows, key=_least_harm)

    def table(self) -> str:
        """The summary in Markdown."""
        head = ["message", "codec", "bytes %", "error", "bias", "cosine", "energy", "repeat"]
        head += ["bits/byte", "worth kept, forecast"]
        rows, cells = self.summary(), []
        for row in rows:
            names = ("error", "bias", "cosine", "energy", "repeat")
            numbers = [f"{row[name]:.3f}" if math.isfinite(row[name]) else "-" for name in names]
            bound = Bound(row["low"], row["worth"], row["high"])
            worth = bound.text if math.isfinite(row["worth"]) else "-"
            share = f"{100 * row['bytes_share']:.1f}"
            cells.append(
                [row["message"], row["codec"], share, *numbers, f"{row['entropy']:.1f}", worth]
            )
        head, cells = without_empty(head, cells)
        lines = ["| " + " | ".join(line) + " |" for line in (head, *cells)]
        lines.insert(1, "|" + "---|" * len(head))
        notes = []
        for message in dict.fromkeys(row["message"] for row in rows):
            notes.append(sentence(message))
            silent = {row["codec"]: row["reason"] for row in rows if row["message"] == message}
            reasons: dict[str, list[str]] = {}
            for name, reason in silent.items():
                reasons.setdefault(reason, []).append(name)
            for reason, names in reasons.items():
                if reason:
                    notes.append(f"no answer for {', '.join(names)}: {reason}")
        if self.updates:
            notes.append(_weights_sentence(self.updates))
        return "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n"

    def report(self, folder: str | Path) -> Path:
        """Write rows.csv (a line a look), summary.csv, table.md and codecs.png; print the table.
        Where another training's report lies in the folder, one beside it is made (`folder-2`).
        Return the folder. Raises UserError when nothing was seen.
        """
        if not self.looks:
            unit = "message" if self.forwards else "training forward"
            raise UserError(
                f"Shadow saw no {unit} of this model in {self.forwards} calls: train "
                "inside 'with shadow:', calling the model itself, with gradients enabled and "
                "model.train()"
            )
        folder = self._free(Path(folder))
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for look in self.looks:
            fields = {"step": look.step, "place": look.place, "message": look.message}
            rows.append(fields | look.result.record())
        _csv(folder / "rows.csv", rows)
        _csv(folder / "summary.csv", self.summary())
        if self.updates:
            _csv(folder / "weights.csv", [update.record() for update in self.updates])
        share_text = "each" if self.every == 1 else f"one in {self.every}"
        text = (
            f"{len(self.looks)} measurements; {share_text} of {self.forwards} training forwards "
            f"was looked at. Overhead: {100 * self.overhead:.1f} % of the training's time.\n\n"
            f"{self.table()}"
        )
        (folder / "table.md").write_text(text, encoding="utf-8")
        _figure(self.summary(), folder / "codecs.png")
        print(text)
        print(f"written: {folder}")
        return folder

    def _free(self, folder: Path) -> Path:
        """Return the folder, or the first of its name and a number without another's report."""
        if folder not in self._written:
            free, number = folder, 2
            while (free / "table.md").exists():
                free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
            self._written[folder] = free
        return self._written[folder]


class Remembered:
    """A simulated error feedback of one parameter: what was not sent is added to the next
    gradient.
    """

    def __init__(self) -> None:
        self.error: Tensor | None = None
        self.total: Tensor | None = None  # of all gradients so far

    def measured(self, x: Tensor, compressor: Compressor, name: str, seed: int) -> Measured:
        """Measure as without a memory, but let error, cosine and energy compare what arrives with
        the gradient of this step, and let bias be what has not arrived of the sum of all gradients
        so far.
        """
        x = x.float()
        m = x if self.error is None else x + self.error
        payload, y = sent(m, compressor, name, seed)
        self.error = m - y
        self.total = x if self.total is None else self.total + x
        bias = float(self.error.norm()) / (float(self.total.norm()) or math.nan)
        result = compared(x, name, payload, y, y)
        return replace(result, bias=bias, bias_squared=bias**2)


def _weights_sentence(updates: list[Stepped]) -> str:
    """Return what steps change of the weights, as a sentence."""
    records = [update.record() for update in updates]
    changed, nbytes, entropy = (
        _mean(record[name] for record in records)
        for name in ("changed_share", "bytes", "entropy_bytes")
    )
    entries = records[0]["entries"]
    return (
        f"weights in bfloat16: a step changes {100 * changed:.2g} % of {entries:,} entries; an "
        f"update without loss has {nbytes:,.0f} bytes ({8 * nbytes / entries:.2g} bits an entry; "
        f"its entropy: {8 * entropy / entries:.2g})."
    )


def _forecast(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a summary's row that are forecast: rank, worth, low, high, reason."""
    nothing = {"rank": math.nan, "worth": math.nan, "low": math.nan, "high": math.nan}
    if row["codec"].startswith(FEEDBACK):
        return nothing | {"reason": "no training with feedback was seen"}
    forecast_ = forecast(row["message"])
    if forecast_ is None:
        return nothing | {"reason": ""}
    features = features_of(row)
    nothing["rank"] = forecast_.score.of(features)
    answer = forecast_.answer(features)
    if isinstance(answer, str):
        return nothing | {"reason": answer}
    columns = {"worth": answer.middle, "low": answer.low, "high": answer.high, "reason": ""}
    return nothing | columns


def _least_harm(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a summary is sorted by: the forecast's score, else bias and error."""
    ranked = math.isfinite(row["rank"])
    scores = (row["rank"],) if ranked else (row["bias"], row["error"])
    return (row["message"], not ranked, *scores)


def _without_feedback(text: str | dict[str, Any]) -> str | dict[str, Any]:
    return text.removeprefix(FEEDBACK) if isinstance(text, str) else text


class ShadowOfATraining:
    """The base of the callbacks of trainers: settings at first, a Shadow once it trains."""

    def __init__(
        self,
        codecs: list[str | dict[str, Any]],
        at: dict[str, str] | None = None,
        every: int = 50,
        out: str | Path = "shadow",
    ) -> None:
        """codecs, at, every: as of Shadow. out: the folder of the report."""
        super().__init__()
        self.settings: dict[str, Any] = {"codecs": codecs, "at": at, "every": every}
        self.out = Path(out)
        self.shadow: Shadow | None = None

    def begin(
        self,
        model: nn.Module,
        scaler: torch.amp.GradScaler | None = None,
        counts_forwards: bool = True,
    ) -> None:
        """Look from here on."""
        shadow = Shadow(model, **self.settings, scaler=scaler, counts_forwards=counts_forwards)
        self.shadow = shadow.start()

    def end(self, writes: bool) -> None:
        """Stop; writes: whether this process writes the report. A training that was not seen has a
        notice, so that its end is reached.
        """
        if self.shadow is None:
            return
        self.shadow.stop()
        if writes:
            try:
                self.shadow.report(self.out)
            except UserError as error:
                notice(f"no report of Shadow: {error}")


def _share(x: Tensor) -> Tensor:
    """Whole rows of a message, at most `MOST` elements where it has that many rows; a vector is one
    sample.
    """
    if x.ndim < 2:
        return x[None, :MOST] if x.ndim else x.view(1, 1)
    rows = max(1, MOST // max(1, x[0].numel()))
    return x[:rows]


def _modules_of(
    model: nn.Module, at: dict[str, str] | None
) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """(modules, parameters by their gradients, parameters by their weights) that the patterns
    choose. Raises UserError on one that chooses none.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if at is None:
        return {}, {name: p for name, p in trained.items() if p.ndim > 1}, {}
    kinds = (ACTIVATIONS, GRADIENTS, WEIGHTS)
    chosen: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {})
    for pattern, kind in at.items():
        if kind not in kinds:
            raise UserError(
                f"at['{pattern}']='{kind}': choose {ACTIVATIONS} (of modules), {GRADIENTS} or "
                f"{WEIGHTS} (of parameters)"
            )
        candidates: dict[str, Any] = modules if kind == ACTIVATIONS else trained
        matches = {
            name: module for name, module in candidates.items() if fnmatchcase(name, pattern)
        }
        if not matches:
            unit = "module" if kind == ACTIVATIONS else "trained parameter"
            raise UserError(
                f"at['{pattern}']: no {unit} has such a name{nearest(pattern, candidates)}"
            )
        chosen[kinds.index(kind)].update(matches)
    return chosen


def _mean(values: Iterable[float]) -> float:
    """Return the mean of those that are numbers."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw what harms a message against bytes, a panel a kind: the bias of gradients, which adds up
    over steps, and the error of all others. Both axes are logarithmic, and the vertical one has 0.
    """
    from commsweep.reporting.style import drawing, legend, logarithmic, look, plt, size

    kinds = list(dict.fromkeys(row["message"] for row in rows))
    with drawing():
        figure, axes = plt.subplots(
            1, len(kinds), figsize=size(min(2, len(kinds)), 3.6), squeeze=False
        )
        for axis, kind in zip(axes[0], kinds, strict=True):
            quantity = "bias" if kind.endswith("gradients") else "error"
            for row in rows:
                if row["message"] != kind:
                    continue
                x, y = 100 * row["bytes_share"], 100 * row[quantity]
                mark = look(row["codec"], ls="none", ms=4)
                axis.plot(x, y, label=row["codec"], **mark)
            axis.set(title=kind, xlabel="bytes (% of float32)", ylabel=f"{quantity} (% of message)")
            axis.set_yscale("symlog", linthresh=10)
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_ylim(bottom=-2)
            logarithmic(axis.xaxis)
        legend(figure)
        figure.savefig(path)
        plt.close(figure)

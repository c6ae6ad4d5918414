"""Taking a network apart: the module of one stage, made of the whole network's own parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from commsweep.config import Execution, Run
from commsweep.config.compressors.coders import SubspaceSpec
from commsweep.config.execution import Wiring
from commsweep.config.rules import PIPELINE, broken
from commsweep.config.training import ImageModel, OwnModel, TextModel
from commsweep.errors import UserError
from commsweep.processes.ddp import check_memories


def count(run: Run) -> int:
    """Stages of a run."""
    return run.model.stages if isinstance(run.model, TextModel) else len(run.model.cuts) + 1


def processes(run: Run) -> int:
    """Return the number of processes of a run: each learner has a pipeline of its own."""
    return run.grad.learners * count(run)


def with_stages(run: Run, stages: int) -> dict[str, int]:
    """The setting that gives a run so many stages. Raises UserError where cuts must be named
    instead.
    """
    if not isinstance(run.model, TextModel):
        if stages != count(run):
            raise UserError(
                f"--stages {stages}: model.cuts={','.join(run.model.cuts)} makes {count(run)} "
                "stages; name the cuts instead, for instance model.cuts='[\"layer2\"]'"
            )
        return {}
    return {"model.stages": stages}


def check(run: Run, execution: Execution) -> None:
    """Raise UserError for what processes cannot train."""
    coder = run.fwd.compressor
    if isinstance(coder, SubspaceSpec) and not coder.frozen:
        raise UserError(
            "fwd.compressor.kind=subspace measures from the tokens' embeddings, which only the "
            "first stage has: set fwd.compressor.frozen=true to measure from those of the "
            "start, or simulate it with commsweep run"
        )
    if rule := broken(run, PIPELINE):
        raise UserError(rule)
    if run.grad.learners > 1:
        check_memories(run)
        if run.fwd.compressor.kind == "bottleneck":
            raise UserError(
                f"fwd.compressor.kind={run.fwd.compressor.kind} has weights of its own at the "
                "boundaries, which learners of a real pipeline do not exchange: simulate it "
                "with commsweep run"
            )
    if execution.buffers != "memory":
        raise UserError(
            "--buffers mmap: a real pipeline keeps its feedback memories in memory; leave it out"
        )


def check_schedule(run: Run, wiring: Wiring) -> None:
    """Raise UserError where the passes of a run have another order than the wiring says."""
    if run.delay is not None and run.delay.steps and wiring.schedule != "1f1b":
        raise UserError(
            f"--schedule {wiring.schedule} runs empty after every step, and delay.steps="
            f"{run.delay.steps} is of passes that go on: use --schedule 1f1b, or set delay=null"
        )


def check_model(run: Run, execution: Execution) -> None:
    """Raise UserError when a network of one's own cannot be taken apart, before any process is
    started.
    """
    if not isinstance(run.model, OwnModel):
        return
    from commsweep import models
    from commsweep.data import load as datasets

    data = datasets.build(run, execution.data_root, execution.model_root, torch.device("cpu"))
    model, modules = models.build(run, data, execution.model_root)
    _own_stages(run.model, model, list(modules), 0)


def body(run: Run, model: Any, cuts: list[str], stage: int) -> nn.Module:
    """The part of the network between boundary `stage` - 1 and boundary `stage`. Changes a language
    model in place.
    """
    if isinstance(run.model, OwnModel):
        return _own_stages(run.model, model, cuts, stage)
    if isinstance(run.model, ImageModel):
        return _images(run.model, model, cuts, stage)
    return _TextStage(model, stage, len(cuts) + 1)


def _own_stages(spec: OwnModel, model: Any, cuts: list[str], stage: int) -> nn.Module:
    names = [name for name, _ in model.named_children()]
    if not isinstance(model, nn.Sequential) or not set(cuts) <= set(names):
        raise UserError(
            f"model.build={spec.build} cannot be taken apart into processes; it can when it "
            "returns an nn.Sequential and model.cuts are its children"
        )
    edges = [0, *(names.index(cut) + 1 for cut in cuts), len(names)]
    return model[edges[stage] : edges[stage + 1]]


def _images(spec: ImageModel, model: Any, cuts: list[str], stage: int) -> nn.Module:
    units: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten(1))] if spec.name == "mlp" else []
    for name, child in model.named_children():
        # a ResNet's layer: its last block goes by its name
        if spec.name != "mlp" and isinstance(child, nn.Sequential):
            units += [(f"{name}.{i}", block) for i, block in enumerate(child[:-1])] + [
                (name, child[-1])
            ]
            continue
        if spec.name != "mlp" and name == "fc":
            units.append(("flatten", nn.Flatten(1)))
        units.append((name, child))
    names = [name for name, _ in units]
    edges = [0, *(names.index(cut) + 1 for cut in cuts), len(units)]
    return nn.Sequential(*(module for _, module in units[edges[stage] : edges[stage + 1]]))


class _TextStage(nn.Module):
    """A causal language model with the other stages' blocks taken out.

    The model's own forward does the work, masks and positions included: later stages hand it their
    input as embeddings, and what only the first or the last one does becomes nothing in the others.
    """

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        base = model.base_model
        layers = next(
            (
                name
                for name in ("h", "layers")
                if isinstance(getattr(base, name, None), nn.ModuleList)
            ),
            None,
        )
        norm = next((name for name in ("ln_f", "norm") if hasattr(base, name)), None)
        if layers is None or norm is None:
            raise UserError(
                f"{type(model).__name__} cannot be taken apart into processes: known are GPT-2 "
                "and models built like Llama (a list of layers, then a norm)"
            )
        blocks = getattr(base, layers)
        size = len(blocks) // stages
        setattr(base, layers, blocks[stage * size : (stage + 1) * size])
        model.config.num_hidden_layers = size
        self.first, self.last = stage == 0, stage == stages - 1
        if not self.first:
            base.set_input_embeddings(nn.Identity())
            if hasattr(base, "wpe"):
                base.wpe = _Nothing()
            if hasattr(base, "drop"):
                base.drop = nn.Identity()
        if not self.last:
            setattr(base, norm, nn.Identity())
        self.model = model if self.last else base

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [b, t] or hidden states [b, t, d] -> hidden states, or the last stage's logits."""
        out = self.model(**{"input_ids" if self.first else "inputs_embeds": x}, use_cache=False)
        return out.logits if self.last else out.last_hidden_state


class _Nothing(nn.Module):
    """Position embeddings that change no bit: x + -0.0 is x, and x + 0.0 is not where x is -0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("zero", torch.tensor(-0.0), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Minus zero, whatever the positions."""
        return self.zero  # pyright: ignore[reportReturnType]

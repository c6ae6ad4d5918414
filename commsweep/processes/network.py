"""The part of a network that one stage of a real pipeline has."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from commsweep import input_digests, models
from commsweep.boundary.insert import Boundaries
from commsweep.boundary.message_sizes import check_room, memory_bytes, message_shapes
from commsweep.compressors import message
from commsweep.config import Execution, Run
from commsweep.config.run import canonical
from commsweep.data.module import Blocks, ImageData
from commsweep.data_parallel.layers import identified
from commsweep.processes import stages
from commsweep.processes.engine import Side
from commsweep.training import optim
from commsweep.training.delay import late
from commsweep.training.readback import model_of
from commsweep.training.subspace import Confined


class StageNetwork:
    """Modules, boundaries and named parameters of stage `rank` of `world`.

    model: the whole network. body: this stage's modules. boundaries: those beside it. named: this
    stage's parameters, by the whole network's names. order: the names of all stages' parameters.
    """

    def __init__(
        self,
        run: Run,
        execution: Execution,
        data: ImageData | Blocks,
        device: torch.device,
        rank: int,
        world: int,
    ) -> None:
        self.run, self.rank, self.world = run, rank, world
        self.first, self.last = rank == 0, rank == world - 1
        rows = len(data.train.y)
        pl.seed_everything(run.seed, verbose=False)
        self.whole, modules = models.build(run, data, execution.model_root)
        self.inputs = input_digests.digests(run, data, self.whole)
        self.shapes, _ = message_shapes(self.whole, modules, data.example)
        self.cuts = list(modules)
        run.check_cuts(modules)
        self.model = model_of(run, self.whole, tuple(self.cuts))
        self.embedded = optim.embedded(self.whole)
        links = {cut: run.links(cut) for cut in self.cuts}
        adjacent = self.cuts[max(0, rank - 1) : rank + 1]
        model = self.whole.to(device)
        need = memory_bytes(
            {cut: links[cut] for cut in adjacent}, self.shapes, run.data.batch_size, rows
        )
        check_room(need, device, None)
        self.boundaries = Boundaries(
            links,
            modules,
            self.shapes,
            run.data.batch_size,
            rows,
            run.seed,
            set_apart=run.at,
            channels_last=run.channels_last,
            only=adjacent,
        ).to(device)
        self.order = [f"model.{name}" for name, _ in model.named_parameters()]
        self.order += [f"boundaries.{name}" for name in self._coders()]
        self.tied = self._tied()
        self.confined = None
        if run.fwd.compressor.kind == "subspace" and self.cuts:
            self.confined = Confined(run, model, self.boundaries, rank)
        everything = nn.ModuleDict({"model": model, "boundaries": self.boundaries})
        self.layers = identified(everything, run.grad)  # of the whole network
        names = {id(p): f"model.{name}" for name, p in model.named_parameters()}
        names |= {id(b): f"model.{name}" for name, b in model.named_buffers()}
        delayed = late(run.delay, model, modules) if run.delay is not None else {}
        # From here on the model may be another: a language model is taken apart in place.
        self.body = stages.body(run, model, self.cuts, rank).train()
        self.named: dict[str, nn.Parameter] = {names[id(p)]: p for p in self.body.parameters()}
        self.buffers = {
            names[id(buffer)]: buffer for buffer in self.body.buffers() if id(buffer) in names
        }
        coders = {f"boundaries.{name}": p for name, p in self.boundaries.named_parameters()}
        self.coders = list(coders.values())
        self.named |= coders
        # steps by which weights of this stage are old, where they are
        self.delays = {p: delayed[p] for p in self.body.parameters() if p in delayed}
        self.part = nn.ModuleDict({"model": self.body, "boundaries": self.boundaries})

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return all that this stage trains."""
        return list(self.named.values())

    def _tied(self) -> nn.Parameter | None:
        """The token embeddings, where the first and the last stage share them and this is one."""
        if not hasattr(self.whole, "get_input_embeddings") or self.world == 1:
            return None
        model: Any = self.whole
        weight = model.get_input_embeddings().weight
        shared = weight is model.get_output_embeddings().weight
        return weight if shared and (self.first or self.last) else None

    def sides(self) -> tuple[Side | None, Side | None]:
        """The boundaries to the stage before and behind."""
        return self._side(self.rank - 1), self._side(self.rank)

    def _side(self, cut_index: int) -> Side | None:
        if not 0 <= cut_index < len(self.cuts):
            return None
        cut = self.cuts[cut_index]
        shape = self.shapes[cut]
        agreed = message.digest(f"{canonical(self.run)} {cut} {tuple(shape)}")
        return Side(self.boundaries[cut.replace(".", "_")], shape, agreed)

    def _coders(self) -> list[str]:
        """Names of all coders' parameters, in the simulation's order."""
        if self.run.fwd.compressor.kind != "bottleneck":
            return []
        return [
            f"{cut.replace('.', '_')}.coder.{kind}"
            for cut in self.cuts
            for kind in ("encoder", "decoder")
        ]

    def owned(self) -> dict[str, Tensor]:
        """Parameters and buffers of this stage by the whole network's names; coders' halves where
        they are used.
        """
        owned: dict[str, Tensor] = {
            name: parameter for name, parameter in self.named.items() if name.startswith("model.")
        }
        owned |= self.buffers
        before, behind = self.sides()
        for side, kind in ((behind, "encoder"), (before, "decoder")):
            if side is None or side.boundary.coder is None:
                continue
            name = f"boundaries.{side.boundary.name.replace('.', '_')}.coder.{kind}"
            if name in self.named:
                owned[name] = getattr(side.boundary.coder, kind)
        return owned

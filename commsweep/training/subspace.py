"""A language model whose messages are coordinates in a subspace, and which may be kept inside of
it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.boundary.insert import Boundaries
from commsweep.component import Component, Moment
from commsweep.compressors.coders import Coder, Frozen
from commsweep.config import Run
from commsweep.config.compressors.coders import SubspaceSpec
from commsweep.config.training import TextModel
from commsweep.errors import UserError
from commsweep.models import causal_lm


class Confined:
    """The confinement of what blocks before the last boundary write, and the distance that
    embeddings move, measured from: inside the code's subspace, if that is asked for (arXiv
    2506.01260). Call it after every step.

    Coders measure from frozen embeddings once it is there, where the run says so.
    """

    def __init__(
        self, run: Run, model: Any, boundaries: Boundaries, stage: int | None = None
    ) -> None:
        """stage: the one of a real pipeline whose weights are to be confined from now on; None: all
        of the model's.
        """
        self._boundaries = boundaries
        spec = run.fwd.compressor
        assert isinstance(run.model, TextModel) and isinstance(spec, SubspaceSpec)
        size = len(causal_lm.blocks(model)) // run.model.stages
        before, embeddings = (run.model.stages - 1) * size, causal_lm.embeddings(model)
        self.writers: list[tuple[Tensor, int]] = []
        self.moving: list[tuple[Tensor, Tensor]] = []
        if spec.frozen:
            position_weights = embeddings[1] if len(embeddings) > 1 else None
            boundaries.step.frozen = Frozen(embeddings[0], position_weights)
        if not spec.constrain:
            return
        writers = causal_lm.writers(model, before)
        causal_lm.confine(writers, self._coder.encoder)
        begin, end = (
            (0, before) if stage is None else (stage * size, min(before, (stage + 1) * size))
        )
        # as many of each block
        self.writers = writers[len(writers) * begin // before : len(writers) * end // before]
        if (frozen := boundaries.step.frozen) is not None:
            self.moving = [
                (weight, start)
                for weight, start in zip(embeddings, (frozen.tokens, frozen.places), strict=False)
                if start is not None
            ]

    @property
    def _coder(self) -> Coder:
        """Any boundary's: all are alike, and lie where the model lies by now."""
        coder = next(boundary.coder for boundary in self._boundaries.values())
        assert coder is not None, "every boundary of such a run has one"
        return coder

    def __call__(self) -> None:
        causal_lm.confine(self.writers, self._coder.encoder)
        causal_lm.confine_moves(self.moving, self._coder.encoder)


LOST = 1e-3  # of an activation, that is more than rounding


def _note(lost: dict[str, float], name: str, x: Tensor, y: Tensor) -> None:
    lost[name] = float((y - x).norm() / x.norm().clamp(min=1e-30))


class SubspaceTraining(Component):
    """Notes what enters the first block, or the model (the coders measure from there), and confines
    what may move.
    """

    def __init__(self, run: Run, model: Any, boundaries: Boundaries) -> None:
        super().__init__()
        self._boundaries = [boundaries]  # in a list: it is the task's, not a part of this one
        self._confined = Confined(run, model, boundaries)
        self.frozen = boundaries.step.frozen  # a module, which moves with the model
        if self.frozen is not None:
            model.register_forward_pre_hook(self._tokens, with_kwargs=True)
        else:
            causal_lm.entrance(model).register_forward_pre_hook(self._anchor, with_kwargs=True)

    @torch.no_grad()
    def check(self, model: Any, example: Tensor) -> None:
        """Raise UserError when the code of a confined model loses something of a sample [1,
        tokens]: something else than the layers that are confined writes to what crosses.
        """
        lost: dict[str, float] = {}
        boundaries, training = self._boundaries[0], model.training
        for boundary in boundaries.values():
            boundary.looked = partial(_note, lost, boundary.name)
        before = boundaries.step.compress, boundaries.step.epoch
        boundaries.step.compress, boundaries.step.epoch = (
            True,
            10**9,
        )  # as after the first compressed epoch
        # A norm behind a projection scales features apart only once its weights differ, which
        # training makes them do.
        confined = {id(weight) for weight, _ in self._confined.writers}
        vectors = [
            (p, p.clone()) for p in model.parameters() if p.dim() == 1 and id(p) not in confined
        ]
        generator = torch.Generator().manual_seed(0)
        try:
            for p, _ in vectors:
                p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
            model.eval()(input_ids=example)
        finally:
            for p, saved in vectors:
                p.copy_(saved)
            boundaries.step.compress, boundaries.step.epoch = before
            model.train(training)
            for boundary in boundaries.values():
                boundary.looked = None
        worst = max(lost, key=lambda name: lost[name], default=None)
        if worst is not None and lost[worst] > LOST:
            raise UserError(
                f"fwd.compressor.constrain=true: at boundary {worst} the code loses "
                f"{100 * lost[worst]:.2g} % of {type(model).__name__}'s activations, for more "
                "is added to them than the projections that are confined (a norm behind one, or "
                "experts); set fwd.compressor.constrain=false"
            )

    def _tokens(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._boundaries[0].step.tokens = args[0] if args else kwargs["input_ids"]

    def _anchor(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._boundaries[0].step.anchor = (args[0] if args else kwargs["hidden_states"]).detach()

    def after_step(self, moment: Moment) -> None:
        self._confined()

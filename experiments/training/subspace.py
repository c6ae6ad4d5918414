"""A language model whose messages are coordinates in a subspace, and which may be kept inside of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from commsweep.experiments.boundary.insert import Boundaries
from commsweep.experiments.component import Component, Moment
from commsweep.experiments.compressors.coders import Coder
from commsweep.experiments.config import Run
from commsweep.experiments.models import causal_lm


class Subspace(Component):
    """Notes what enters the first block (the coders measure from there), and confines what the blocks before the last
    boundary write to the code's subspace after every step, if that is asked for (arXiv 2506.01260)."""

    def __init__(self, run: Run, model: nn.Module, boundaries: Boundaries) -> None:
        super().__init__()
        self._boundaries = [boundaries]  # in a list: it is the task's, not a part of this one
        causal_lm.entrance(model).register_forward_pre_hook(self._anchor, with_kwargs=True)
        self.confined = []
        if run.fwd.compressor.constrain:
            before = len(boundaries) * len(causal_lm.blocks(model)) // run.model.stages
            self.confined = causal_lm.writers(model, before)
            causal_lm.confine(self.confined, self._coder.encoder)

    @property
    def _coder(self) -> Coder:
        """Any boundary's: all are alike, and lie where the model lies by now."""
        return next(boundary.coder for boundary in self._boundaries[0].values())

    def _anchor(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._boundaries[0].step.anchor = (args[0] if args else kwargs["hidden_states"]).detach()

    def after_step(self, moment: Moment) -> None:
        if self.confined:
            causal_lm.confine(self.confined, self._coder.encoder)

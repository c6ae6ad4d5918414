"""Sparse training: which share of the weights is zero when, how masks move, and which pairs of
tokens attend.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from commsweep.config.base import Count, Spec

Pattern = Literal["causal", "local", "strided", "local_strided", "fixed"]
Share = Annotated[float, Field(ge=0, lt=1)]


class Phase(Spec):
    """A part of a run: from the end of the phase before it (or the run's beginning) to its own end.

    shape: the sparsity jumps at the phase's beginning ("step"), or goes there from that of the
    phase before, evenly ("linear") or fast at first ("cubic": s + (before - s)(1 - x)^3).
    attention: of all heads, or with `alternate_attention` of every other one, from the first on (of
    layers with sparsity.alternate=layers).
    """

    until: Annotated[float, Field(gt=0, description="share of the run's steps at which it ends")]
    sparsity: Annotated[
        Share, Field(description="share of the weights that are zero at its end")
    ] = 0.0
    shape: Literal["step", "linear", "cubic"] = "step"
    attention: Annotated[Pattern, Field(description="pairs of tokens that attend")] = "causal"
    alternate_attention: Annotated[
        Pattern | None, Field(description="of every other head or layer; absent: as attention")
    ] = None


class Sparsity(Spec):
    """Weights of which a share is zero, by phases of the run, and sparse attention (MST, arXiv
    2408.11746, and peers).

    A phase is named as one likes (sparsity.phases.NAME.until=0.5). Every `interval` steps within a
    phase, each layer loses its lowest `score` and grows as many weights, from zero, as its target
    asks for. distribution: densities of layers; uniform, Erdos-Renyi, (in + out) / (in out), or
    with kernels (ERK), scaled to the target and capped at `max_density`. score: |w|, |w| + mest
    |g|, |w g|, or the authors' |w / g|. growth: by |g| of a dense gradient, at random, or `mixed`
    parts by |g| to one at random. drop_fraction: share of a layer's weights that an update moves,
    falling as a cosine to zero at `drop_until` of the run, or in every phase with `restart`.
    pruned_moments: those of the optimizer at pruned weights are zero ("reset"), or as they were
    (the authors'). update_steps: the optimizer steps beside an update of masks, or such steps are
    left out (the authors'). modules: layers with weights in them, without the one that makes the
    logits, or with it ("all"; where it is tied to the token embedding, that is sparse, too). width:
    band and stride of attention, in tokens.
    """

    phases: Annotated[dict[str, Phase], Field(description="parts of the run, by name")] = {
        "all": Phase(until=1.0)
    }
    initial_sparsity: Annotated[
        Share, Field(description="sparsity that the first phase begins at")
    ] = 0.0
    distribution: Literal["uniform", "er", "erk"] = "er"
    max_density: Annotated[float, Field(gt=0, le=1, description="largest density of a layer")] = 1.0
    initial_mask: Annotated[
        Literal["random", "magnitude"], Field(description="choice of the first mask")
    ] = "random"
    score: Literal["magnitude", "mest", "sensitivity", "reciprocal"] = "magnitude"
    mest: Annotated[float, Field(ge=0, description="weight of |g| in score=mest")] = 1.0
    growth: Literal["none", "gradient", "random", "mixed"] = "gradient"
    mixed: Annotated[
        float, Field(gt=0, description="grown by gradient for one at random, in growth=mixed")
    ] = 3.0
    interval: Annotated[Count, Field(description="steps between updates of the masks")] = 100
    drop_fraction: Annotated[
        Share, Field(description="share of live weights that the first update moves")
    ] = 0.3
    drop_until: Annotated[
        float, Field(gt=0, le=1, description="share of the run at which drop is zero")
    ] = 1.0
    restart: Annotated[
        bool, Field(description="the cosine of drop_fraction begins anew in every phase")
    ] = False
    regrow: Annotated[bool, Field(description="a weight may grow in the update that pruned it")] = (
        False
    )
    pruned_moments: Literal["reset", "kept"] = "reset"
    update_steps: Literal["all", "skipped"] = "all"
    modules: Literal["blocks", "all"] = "blocks"
    width: Annotated[
        int, Field(ge=1, le=10**9, description="band and stride of attention, tokens")
    ] = 128
    alternate: Annotated[
        Literal["heads", "layers"], Field(description="what attends by alternate_attention")
    ] = "heads"

    @property
    def ordered(self) -> list[tuple[str, Phase]]:
        """The phases by their ends."""
        return sorted(self.phases.items(), key=lambda phase: phase[1].until)

    @property
    def attends(self) -> bool:
        """Return whether any phase has sparse attention."""
        return any(
            kind not in (None, "causal")
            for phase in self.phases.values()
            for kind in (phase.attention, phase.alternate_attention)
        )

    @property
    def sparse(self) -> bool:
        """Return whether any weight is ever zero."""
        return self.initial_sparsity > 0 or any(phase.sparsity for phase in self.phases.values())

    @property
    def by_gradient(self) -> bool:
        """Return whether growth needs dense gradients."""
        return self.growth in ("gradient", "mixed")

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Sparsity:
        if not self.phases:
            raise ValueError(
                "sparsity.phases={}: a run needs a phase, for instance sparsity.phases.all.until=1"
            )
        self._phases_fit()
        if self.growth == "none":
            self._nothing_grows()
        if self.update_steps == "skipped" and self.interval == 1:
            raise ValueError(
                "sparsity.update_steps=skipped leaves out every step with sparsity.interval=1; "
                "raise the interval"
            )
        for name, setting, value_needed in (
            ("mixed", "growth", "mixed"),
            ("mest", "score", "mest"),
        ):
            if (
                getattr(self, name) != type(self).model_fields[name].default
                and getattr(self, setting) != value_needed
            ):
                raise ValueError(
                    f"sparsity.{name} has no effect unless sparsity.{setting}={value_needed}"
                )
        if self.restart and self.drop_until < 1:
            raise ValueError(
                f"sparsity.drop_until={self.drop_until:g} has no effect with "
                "sparsity.restart=true, where drop falls to zero in every phase"
            )
        paired = any(phase.alternate_attention is not None for phase in self.phases.values())
        if self.alternate != "heads" and not paired:
            raise ValueError(
                f"sparsity.alternate={self.alternate} has no effect without a phase that sets "
                "alternate_attention"
            )
        return self

    def _phases_fit(self) -> None:
        for name in self.phases:
            if not re.fullmatch(r"\w+", name):
                raise ValueError(
                    f"sparsity.phases: a phase cannot be called '{name}'; use letters, digits and _"
                )
        ordered = self.ordered
        for (before, later), (name, after) in pairwise(ordered):
            if later.until == after.until:
                raise ValueError(
                    f"sparsity.phases: {before} and {name} overlap, for both end at "
                    f"{later.until:g} of the run; give each an end of its own"
                )
        name, last = ordered[-1]
        if last.until != 1:
            raise ValueError(
                f"sparsity.phases.{name}.until={last.until:g}: the last phase "
                + ("leaves the run" if last.until > 1 else "ends before the run does")
                + "; set it to 1"
            )
        if self.max_density < 1:
            shares: list[float] = [phase.sparsity for phase in self.phases.values()]
            if ordered[0][1].shape != "step":
                shares.append(self.initial_sparsity)
            least = min(shares)
            if 1 - least > self.max_density * (1 + 1e-9):
                raise ValueError(
                    f"sparsity.max_density={self.max_density:g}: a density of "
                    f"{1 - least:g} (sparsity {least:g} in a phase) cannot be reached when no "
                    "layer may be denser; raise max_density, or sparsity"
                )
        if self.initial_sparsity and ordered[0][1].shape == "step":
            raise ValueError(
                f"sparsity.initial_sparsity={self.initial_sparsity:g} has no effect: phase "
                f"{ordered[0][0]} jumps to its own sparsity; set its shape to linear or cubic"
            )

    def _nothing_grows(self) -> None:
        idle = ["drop_until", "restart", "regrow"]
        levels = {phase.sparsity for phase in self.phases.values()}
        if len(levels) == 1 and (
            self.ordered[0][1].shape == "step" or self.initial_sparsity in levels
        ):
            idle += ["score", "pruned_moments", "update_steps"]  # the first mask stays
        for name in idle:
            if (value := getattr(self, name)) != (default := type(self).model_fields[name].default):
                raise ValueError(
                    f"sparsity.{name}={str(value).lower()} has no effect where nothing grows "
                    "and nothing is dropped (sparsity.growth=none); set it to "
                    f"{str(default).lower()}, or set growth"
                )
        if self.drop_fraction:
            raise ValueError(
                f"sparsity.growth=none: sparsity.drop_fraction={self.drop_fraction:g} would prune "
                "without end; set drop_fraction=0"
            )
        before = self.initial_sparsity
        for name, phase in self.ordered:
            if phase.sparsity < before:
                raise ValueError(
                    f"sparsity.growth=none: phase {name} goes from sparsity {before:g} to "
                    f"{phase.sparsity:g} and nothing grows; set growth"
                )
            before = phase.sparsity

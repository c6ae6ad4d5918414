"""K-FAC: gradients preconditioned by a Kronecker-factored Fisher matrix."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from commsweep.config.base import Spec
from commsweep.config.compressors.dense import NoCompressorSpec
from commsweep.config.compressors.values.cast import CastSpec
from commsweep.config.compressors.values.quantize import FixedPointSpec, UniformSpec
from commsweep.config.feedback import NoFeedbackSpec, ResidueSpec

Interval = Annotated[int, Field(ge=1, le=10**9)]
FactorCompressor = Annotated[
    NoCompressorSpec | CastSpec | UniformSpec | FixedPointSpec, Field(discriminator="kind")
]
FactorFeedback = Annotated[NoFeedbackSpec | ResidueSpec, Field(discriminator="kind")]


class KFAC(Spec):
    """Every supported layer's gradient becomes G^-1 grad A^-1, with A and G averaged over steps and
    learners.

    A: of the layer's inputs (a bias as an appended one), G: of the gradients at its outputs.
    Supported are Linear, Conv2d without groups, and transformers' Conv1D; layers with a factor
    above `max_factor`, and weights that two layers share, are left to the optimizer and named in
    the log. split: how damping is shared out; "direct" adds it to both factors, "factored" its root
    times pi and over pi. method: "inverse" (Cholesky) or "eigen" (damping of the eigenvalues'
    products; split has no meaning then). fisher: of the labels ("empirical") or of labels that the
    model draws ("sampled", a second backward). statistics: of all learners ("all"), whose new
    factors travel, packed and through `compressor`; or of the layer's owner alone ("owner",
    DP-KFAC), which preconditions its gradient and sends that instead.
    """

    damping: Annotated[float, Field(ge=0, description="added to the factors' diagonals")] = 0.03
    split: Literal["direct", "factored"] = "factored"
    method: Literal["inverse", "eigen"] = "inverse"
    decay: Annotated[float, Field(ge=0, lt=1, description="weight of the old running average")] = (
        0.95
    )
    factors_every: Annotated[Interval, Field(description="steps between new factors")] = 1
    inverses_every: Annotated[Interval, Field(description="steps between new inverses")] = 10
    kl_clip: Annotated[
        float, Field(ge=0, description="largest step in the Fisher's norm; 0: any")
    ] = 0.001
    fisher: Annotated[Literal["empirical", "sampled"], Field(description="labels that G is of")] = (
        "empirical"
    )
    weight_sharing: Annotated[
        Literal["expand", "reduce"],
        Field(
            description=(
                "positions of a sequence or an image: samples of their own (expand), or summed "
                "up first (reduce)"
            )
        ),
    ] = "expand"
    statistics: Annotated[
        Literal["all", "owner"], Field(description="learners whose data a factor is of")
    ] = "all"
    compressor: FactorCompressor = NoCompressorSpec()
    feedback: FactorFeedback = NoFeedbackSpec()
    max_factor: Annotated[
        int, Field(ge=1, description="rows of a factor; larger layers are left out")
    ] = 8192
    start_epoch: Annotated[int, Field(ge=0, description="first preconditioned epoch")] = 0

    @model_validator(mode="after")
    def _has_an_effect(self) -> KFAC:
        if self.method == "eigen" and self.split != type(self).model_fields["split"].default:
            raise ValueError(
                f"kfac.split={self.split} has no effect with kfac.method=eigen, where damping "
                "is added to products of eigenvalues; leave it out"
            )
        return self

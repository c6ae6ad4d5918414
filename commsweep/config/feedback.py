"""The settings of what is remembered between messages: of a boundary's activations and gradients,
and of weight gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from commsweep.config.base import Spec, union


class Correction(Spec):
    """A feedback's settings."""

    label: ClassVar[str] = ""  # in tables, before the compressor; nothing where it says nothing

    # where it may stand: at a boundary, and in what learners send
    crosses: ClassVar[bool] = False
    exchanged: ClassVar[bool] = False

    kind: str


Key = Literal["slot", "sample"]


class NoFeedbackSpec(Correction):
    """Remember nothing: every message is compressed on its own."""

    crosses: ClassVar[bool] = True
    exchanged: ClassVar[bool] = True
    kind: Literal["none"] = "none"


class EFSpec(Correction):
    """Error feedback: send C(x + e), keep e = x + e - C(x + e)."""

    label: ClassVar[str] = "EF"
    crosses: ClassVar[bool] = True
    kind: Literal["ef"] = "ef"
    key: Key = "slot"


class EFMixedSpec(Correction):
    """Half the sparsifier's budget to the signal, half to the residue.

    The paper names this method without a public definition; this reading is ours: send
    C_half(x) + C_half(e) as two payloads and keep e = x + e - sent.
    """

    label: ClassVar[str] = "EF-mixed"
    crosses: ClassVar[bool] = True
    kind: Literal["ef_mixed"] = "ef_mixed"
    key: Key = "slot"


class EF21Spec(Correction):
    """Send m = C(x - A); both ends keep A = A + m and use A."""

    label: ClassVar[str] = "EF21"
    crosses: ClassVar[bool] = True
    kind: Literal["ef21"] = "ef21"
    key: Key = "slot"


class AQSGDSpec(Correction):
    """Per sample: the first visit travels dense, later visits send C(x - m); both ends keep m = m +
    C(x - m).
    """

    label: ClassVar[str] = "AQ-SGD"
    crosses: ClassVar[bool] = True
    kind: Literal["aqsgd"] = "aqsgd"
    buffer: Literal["float32", "bfloat16", "float16"] = "float32"


class ResidueSpec(Correction):
    """Error feedback: send C(g + e), keep e = g + e - C(g + e); e is multiplied by `decay`
    first.
    """

    label: ClassVar[str] = "EF"
    exchanged: ClassVar[bool] = True
    kind: Literal["ef"] = "ef"
    decay: Annotated[float | None, Field(gt=0, lt=1, description="absent: 1")] = None


class AdaCompResidueSpec(Correction):
    """AdaComp's: R <- R + g; the compressor looks ahead to R + (scale - 1) g; what was sent leaves
    R.
    """

    exchanged: ClassVar[bool] = True
    kind: Literal["adacomp"] = "adacomp"
    scale: Annotated[float, Field(ge=1)] = 2.0


class MomentumCorrectionSpec(Correction):
    """DGC's: u <- momentum u + g, v <- v + u; v is sent, and both are zero afterwards where it
    was.
    """

    label: ClassVar[str] = "DGC"
    exchanged: ClassVar[bool] = True
    kind: Literal["dgc"] = "dgc"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    clip: Annotated[
        float, Field(ge=0, description="largest norm of a layer, over sqrt(learners); 0: any")
    ] = 0.0


class LowPassSpec(Correction):
    """ScaleCom's residue: e <- (1 - beta) e + beta (g + e - sent)."""

    label: ClassVar[str] = "low-pass"
    exchanged: ClassVar[bool] = True
    kind: Literal["lowpass"] = "lowpass"
    beta: Annotated[float, Field(gt=0, le=1)] = 0.1


class LoCoSpec(Correction):
    """LoCo's error: e <- beta e + (1 - beta) (g + e - sent), kept in 8 bits, zero every `reset`
    steps.
    """

    label: ClassVar[str] = "LoCo"
    exchanged: ClassVar[bool] = True
    kind: Literal["loco"] = "loco"
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.8
    reset: Annotated[int, Field(ge=1)] = 1024


class EF21GradientSpec(Correction):
    """Send m = C(g - A); both ends keep A = A + m and use A."""

    label: ClassVar[str] = "EF21"
    exchanged: ClassVar[bool] = True
    kind: Literal["ef21"] = "ef21"


class EF21SGDMSpec(Correction):
    """EF21 on a running mean of the gradients: v <- (1 - eta) v + eta g, send C(v - A), use A."""

    label: ClassVar[str] = "EF21-SGDM"
    exchanged: ClassVar[bool] = True
    kind: Literal["ef21_sgdm"] = "ef21_sgdm"
    eta: Annotated[float, Field(gt=0, le=1)] = 0.1


class DecoupledSpec(Correction):
    """Dion's: M <- M + g, of which learners never speak; what arrives leaves it by a share 1 -
    momentum.
    """

    exchanged: ClassVar[bool] = True
    kind: Literal["decoupled"] = "decoupled"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95


if TYPE_CHECKING:
    FeedbackSpec = GradientFeedback = Correction
else:
    FeedbackSpec = Annotated[union(Correction, "crosses"), Field(discriminator="kind")]
    GradientFeedback = Annotated[union(Correction, "exchanged"), Field(discriminator="kind")]


def sample_keyed(spec: Correction) -> bool:
    """Return whether the memory holds one row a training sample (else one a batch slot)."""
    return spec.kind == "aqsgd" or getattr(spec, "key", "slot") == "sample"

"""DeMo (arXiv 2411.19870): the outer step is the sign of what arrives, times the learning rate.
With interval 1, plain SGD inside, a decaying residue and a DCT of tiles (`grad.transform`).
"""

from __future__ import annotations

from commsweep.config.outer import Outer
from commsweep.data_parallel.outer.roles import STEPS, Layers, OuterSGD


@STEPS.when(lambda outer: outer.sign)
class SignStep(OuterSGD):
    """ref <- ref - eta * learning rate * sign(D)."""

    def step(self, arrived: Layers, rate: float) -> None:
        for gradient in arrived.values():
            gradient.sign_()
        self.sgd.param_groups[0]["lr"] = self.spec.rate * rate
        super().step(arrived, rate)

    @property
    def installed(self) -> Outer:
        """Return the settings; the rate follows the learning rate, so its factor is read back."""
        return super().installed.model_copy(update={"rate": self.spec.rate})

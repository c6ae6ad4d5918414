"""DeMo (arXiv 2411.19870): the outer step is the sign of what arrives, times the learning rate.
With interval 1, plain SGD inside, a decaying residue and a DCT of tiles (`grad.transform`).
"""

from __future__ import annotations

from torch import Tensor

from commsweep.config.gradients import Outer
from commsweep.data_parallel.outer.diloco import OuterSGD


class SignStep(OuterSGD):
    """ref <- ref - eta * learning rate * sign(D)."""

    def step(self, arrived: dict[int, Tensor], rate: float) -> None:
        for gradient in arrived.values():
            gradient.sign_()
        self.sgd.param_groups[0]["lr"] = self.spec.rate * rate
        super().step(arrived, rate)

    @property
    def installed(self) -> Outer:
        """The rate follows the learning rate, so it is the factor that is read back."""
        return super().installed.model_copy(update={"rate": self.spec.rate})

"""A layer under K-FAC: its running factors, their inverses, and what these make of its
gradient.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.config.second_order import KFAC
from commsweep.second_order import factors

SIDES = ("a", "g")


class KFACLayer(nn.Module):
    """Running averages of A and G, and what is applied to the gradient: inverses, or eigenvectors
    and eigenvalues.
    """

    a: Tensor
    a_inverse: Tensor
    a_values: Tensor
    g: Tensor
    g_inverse: Tensor
    g_values: Tensor
    bad: Tensor

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name, self._module = name, [module]  # in a list: it is the model's
        for side, d in zip(SIDES, factors.sizes(module), strict=True):
            self.register_buffer(side, torch.zeros(d, d))
            self.register_buffer(f"{side}_inverse", torch.zeros(d, d))  # or eigenvectors
            # eigenvalues, where they are used
            self.register_buffer(f"{side}_values", torch.zeros(d))
        # pass in which a factor was first found unusable
        self.register_buffer("bad", torch.full((), torch.inf))
        self.inverted = False  # whether there is anything to apply, here or at another learner
        # weight of the statistics in the running averages: 1 but for a decaying start
        self.taken = 0.0

    @property
    def module(self) -> Any:
        """The layer itself: a module with a weight, and maybe a bias."""
        return self._module[0]

    def average(self, a: Tensor, g: Tensor, decay: float) -> None:
        """Take new factors into the running averages."""
        self.a.lerp_(a, 1 - decay)
        self.g.lerp_(g, 1 - decay)
        self.taken = decay * self.taken + 1 - decay

    def inverse(self, side: str, spec: KFAC, travels: bool = True) -> list[Tensor]:
        """Return what is to be applied of one factor: [inverse], packed if it travels, or
        [eigenvalues, eigenvectors].

        From the running average, which stays undamped. With NaN where that is not finite or not
        positive definite.
        """
        if spec.method == "eigen":
            average = getattr(self, side) / self.taken
            finite = average.sum(dtype=torch.float64).isfinite()  # as all entries are
            identity = torch.eye(len(average), device=average.device, dtype=average.dtype)
            usable = average.where(finite, identity)
            values, vectors = _decomposed(usable)
            return [
                values.clamp_(min=0).to(average.dtype),
                vectors.where(finite, torch.nan).to(average.dtype),
            ]
        # All in one place, and by columns, as LAPACK wants it: of large factors copies cost a third
        # of the time.
        inverse = getattr(self, f"{side}_inverse")
        torch.div(getattr(self, side), self.taken, out=inverse)
        inverse.diagonal().add_(self._damping(side, spec))
        lower, info = inverse.mT, torch.empty((), dtype=torch.int32, device=inverse.device)
        torch.linalg.cholesky_ex(lower, out=(lower, info))
        wrong = (info != 0) | ~lower.diagonal().isfinite().all()
        # a zero there would be an error, and this is an outcome
        lower.diagonal().masked_fill_(wrong, torch.nan)
        torch.cholesky_inverse(lower, out=lower)
        return [factors.packed(inverse) if travels else inverse]

    def _damping(self, side: str, spec: KFAC) -> Tensor | float:
        if spec.split == "direct":
            return spec.damping
        mean_a, mean_g = (getattr(self, side).diagonal().mean() / self.taken for side in SIDES)
        pi = torch.sqrt(mean_a / mean_g.clamp(min=1e-30)).clamp(min=1e-30)
        return spec.damping**0.5 * (pi if side == "a" else 1 / pi)

    def room(self, side: str, spec: KFAC) -> list[Tensor]:
        """Tensors of the shapes of `inverse`."""
        d = len(getattr(self, side))
        like = getattr(self, side)
        return (
            [like.new_empty(d), like.new_empty(d, d)]
            if spec.method == "eigen"
            else [like.new_empty(d * (d + 1) // 2)]
        )

    def install(self, side: str, factors_: list[Tensor], step: int) -> None:
        """Use what `inverse` made, here or elsewhere; step: passes so far, noted where it is
        unusable.
        """
        matrix = getattr(self, f"{side}_inverse")
        if len(factors_) == 1:
            if factors_[0].dim() == 1:  # else it was made where it belongs
                matrix.copy_(factors.unpacked(factors_[0], len(matrix)))
        else:
            getattr(self, f"{side}_values").copy_(factors_[0])
            matrix.copy_(factors_[1])
        wrong = ~matrix[0, 0].isfinite()
        self.bad.copy_(torch.minimum(self.bad, torch.where(wrong, float(step), torch.inf)))

    def gradient(self) -> Tensor:
        """The layer's gradient [out, in], the bias's as a last column."""
        module = self.module
        for p in module.parameters():
            if p.grad is None:  # it was left out of the pass
                p.grad = torch.zeros_like(p)
        grad = module.weight.grad
        matrix = grad.mT if factors.as_matrix(module) else grad.flatten(1)
        return matrix if module.bias is None else torch.cat([matrix, module.bias.grad[:, None]], 1)

    def preconditioned(self, grad: Tensor, spec: KFAC) -> Tensor:
        """G^-1 grad A^-1; by eigenvectors, Q_G [(Q_G^T grad Q_A) / (d_G d_A^T + damping)] Q_A^T."""
        if spec.method == "inverse":
            return self.g_inverse @ grad @ self.a_inverse
        inner = self.g_inverse.mT @ grad @ self.a_inverse
        inner.div_(torch.outer(self.g_values, self.a_values).add_(spec.damping))
        return self.g_inverse @ inner @ self.a_inverse.mT

    def write(self, matrix: Tensor) -> None:
        """Put a gradient of `gradient`'s form back, in the parameters' layouts."""
        module = self.module
        if module.bias is not None:
            module.bias.grad.copy_(matrix[:, -1])
            matrix = matrix[:, :-1]
        module.weight.grad.copy_(
            matrix.mT if factors.as_matrix(module) else matrix.reshape(module.weight.shape)
        )

    def get_extra_state(self) -> dict[str, Any]:
        return {"taken": self.taken, "inverted": self.inverted}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.taken, self.inverted = state["taken"], state.get("inverted", True)


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix. In float64 where many equal eigenvalues
    keep float32 from converging, which LAPACK says, or answers with NaN.
    """
    with suppress(RuntimeError):
        values, vectors = torch.linalg.eigh(matrix)
        # a GPU is not waited for
        if matrix.device.type != "cpu" or (values.sum() + vectors.sum()).isfinite():
            return values, vectors
    return torch.linalg.eigh(matrix.double())

"""K-FAC as a component of training: factors from hooks, averaged over learners and steps, inverted, applied.

Its moment is after the exchange of gradients and before clipping and the optimizer. Learners exchange the packed upper
triangles of their factors through the same collectives as their gradients, so simulated learners and processes end with
equal bits; every learner inverts every factor (D-KFAC), which needs no further message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from commsweep.experiments.collectives import Collectives, Simulated
from commsweep.experiments.component import Component, Moment, Pass
from commsweep.experiments.config import KFAC
from commsweep.experiments.errors import UserError
from commsweep.experiments.second_order import factors

WHAT = "factors"


class Layer(nn.Module):
    """A layer's running factors and what is applied to its gradient."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name, self._module = name, [module]  # in a list: it is the model's
        for side, d in zip("ag", factors.sizes(module), strict=True):
            self.register_buffer(side, torch.zeros(d, d))
            self.register_buffer(f"{side}_inverse", torch.zeros(d, d))  # or eigenvectors
            self.register_buffer(f"{side}_values", torch.zeros(d))  # eigenvalues, where they are used
        self.register_buffer("bad", torch.full((), torch.inf))  # pass in which a factor was first found unusable

    @property
    def module(self) -> nn.Module:
        """The layer itself."""
        return self._module[0]

    def average(self, a: Tensor, g: Tensor, decay: float) -> None:
        """Take new factors into the running averages."""
        self.a.mul_(decay).add_(a, alpha=1 - decay)
        self.g.mul_(decay).add_(g, alpha=1 - decay)

    def invert(self, spec: KFAC, correction: float, now: int = 0) -> None:
        """From the running averages over `correction` (the weights they have taken in); these stay undamped.

        now: passes so far, noted where a factor is not finite or not positive definite; its inverse is NaN then.
        """
        a, g = self.a / correction, self.g / correction
        if spec.method == "eigen":
            for side, matrix in (("a", a), ("g", g)):
                finite = matrix.isfinite().all()
                # In float64: many equal eigenvalues keep the float32 routine from converging.
                values, vectors = torch.linalg.eigh(matrix.where(finite, torch.eye(len(matrix)).to(matrix)).double())
                getattr(self, f"{side}_values").copy_(values.clamp(min=0))
                getattr(self, f"{side}_inverse").copy_(vectors.where(finite, torch.nan))
                self._note(~finite, now)
            return
        root = spec.damping**0.5
        pi = torch.sqrt((a.trace() / len(a)) / (g.trace() / len(g)).clamp(min=1e-30)).clamp(min=1e-30)
        shares = (spec.damping, spec.damping) if spec.split == "direct" else (pi * root, root / pi)
        for side, matrix, share in (("a", a, shares[0]), ("g", g, shares[1])):
            damped = matrix.clone()
            damped.diagonal().add_(share)
            lower, info = torch.linalg.cholesky_ex(damped)
            wrong = (info != 0) | ~lower.isfinite().all()
            getattr(self, f"{side}_inverse").copy_(torch.where(wrong, torch.nan, torch.cholesky_inverse(lower)))
            self._note(wrong, now)

    def _note(self, wrong: Tensor, now: int) -> None:
        self.bad.copy_(torch.minimum(self.bad, torch.where(wrong, float(now), torch.inf)))

    def gradient(self) -> Tensor:
        """The layer's gradient [out, in], the bias's as a last column."""
        module, grad = self.module, self.module.weight.grad
        matrix = grad.mT if factors.turned(module) else grad.flatten(1)
        return matrix if module.bias is None else torch.cat([matrix, module.bias.grad[:, None]], 1)

    def preconditioned(self, grad: Tensor, spec: KFAC) -> Tensor:
        """G^-1 grad A^-1; by eigenvectors, Q_G [(Q_G^T grad Q_A) / (d_G d_A^T + damping)] Q_A^T."""
        if spec.method == "inverse":
            return self.g_inverse @ grad @ self.a_inverse
        inner = self.g_inverse.mT @ grad @ self.a_inverse
        inner = inner / (self.g_values[:, None] * self.a_values + spec.damping)
        return self.g_inverse @ inner @ self.a_inverse.mT

    def write(self, matrix: Tensor) -> None:
        """Put a gradient of `gradient`'s form back, in the parameters' layouts."""
        module = self.module
        if module.bias is not None:
            module.bias.grad.copy_(matrix[:, -1])
            matrix = matrix[:, :-1]
        module.weight.grad.copy_(matrix.mT if factors.turned(module) else matrix.reshape(module.weight.shape))


class Preconditioner(Component):
    """K-FAC over all supported layers of a network."""

    def __init__(self, spec: KFAC, model: nn.Module, terms: int, collectives: Collectives | None = None) -> None:
        """terms: of the loss in a sample (1, or the predicted tokens). Raises UserError when no layer is supported."""
        super().__init__()
        self.spec, self.terms, self.collectives = spec, terms, collectives or Simulated(1)
        found, self.left = _layers(model, spec.largest)
        if not found:
            raise UserError("kfac: the model has no layer that it supports (Linear, Conv2d without groups, Conv1D) "
                            f"with factors of at most kfac.largest={spec.largest} rows")
        self.layers = nn.ModuleList(Layer(name, module) for name, module in found)
        self.sums: list[list[Tensor]] = []  # of each learner here: A and G of every layer, summed over its passes
        self.passes, self.weight, self.learner = 0, 1.0, 0
        self.steps = self.taken = self.sent = 0
        self._rows = 0
        self._collects = False
        self._a: dict[int, Tensor] = {}
        self._g: dict[int, Tensor] = {}
        for place, layer in enumerate(self.layers):
            # Before a boundary's hook: what is wanted is the layer's own output and the gradient that comes to it.
            layer.module.register_forward_hook(self._hook(place), prepend=True)

    def _hook(self, place: int) -> Any:
        def entered(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if not (self._collects and module.training and output.requires_grad):
                return
            with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
                self._a[place] = factors.input_factor(factors.positions(module, inputs[0]), self.spec.sharing)
            terms = self._rows * self.terms

            def came(grad: Tensor) -> None:
                with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
                    self._g[place] = factors.output_factor(factors.slopes(module, grad), terms, self.spec.sharing)

            output.register_hook(came)

        return entered

    def before_pass(self, moment: Moment, one: Pass, samples: Tensor, device: torch.device) -> None:
        self._collects = self._works(moment) and self.steps % self.spec.factors_every == 0
        self._rows = one.size

    def _works(self, moment: Moment) -> bool:
        return moment.epoch >= self.spec.start_epoch

    def after_pass(self, moment: Moment, one: Pass) -> None:
        """Its factors join those of its learner's other passes."""
        if not self._collects:
            return
        new = [one.weight * part[place] for place in range(len(self.layers)) for part in (self._a, self._g)]
        if not self.sums or one.learner != self.learner:
            self.sums.append(new)
            self.passes, self.learner = 1, one.learner
        else:
            self.sums[-1] = [old + more for old, more in zip(self.sums[-1], new, strict=True)]
            self.passes += 1
        self._a, self._g = {}, {}

    def after_backward(self, moment: Moment) -> None:
        """Exchange and average new factors, invert where it is time, and precondition the gradients."""
        if not self._works(moment):
            return
        with torch.no_grad():
            if self.sums:
                self._average()
            if self.steps % self.spec.inverses_every == 0:
                correction = 1 - self.spec.decay**self.taken
                for layer in self.layers:
                    layer.invert(self.spec, correction, moment.crossed)
            self.steps += 1
            self._precondition(moment.rate)

    def _average(self) -> None:
        here = len(self.collectives.here)
        while len(self.sums) < here:  # the batch had fewer rows than there are learners
            self.sums.append([torch.zeros_like(one) for one in self.sums[0]])
        parts = [[factors.packed(one / self.passes) for one in own] for own in self.sums]
        self.sums = []
        mean = self.collectives.all_reduce(parts, WHAT).wait()
        self.sent += here * sum(4 * one.numel() for one in mean)
        for place, layer in enumerate(self.layers):
            a, g = (factors.unpacked(mean[2 * place + turn], len(side)) for turn, side in enumerate((layer.a, layer.g)))
            layer.average(a, g, self.spec.decay)
        self.taken += 1

    def _precondition(self, rate: float) -> None:
        grads = [layer.gradient() for layer in self.layers]
        made = [layer.preconditioned(grad, self.spec) for layer, grad in zip(self.layers, grads, strict=True)]
        scale: Tensor | float = 1.0
        if self.spec.kl_clip:
            size = sum((a * b).sum() for a, b in zip(made, grads, strict=True)).abs() * rate**2
            scale = (self.spec.kl_clip / size.clamp(min=1e-30)).sqrt().clamp(max=1.0)
        for layer, one in zip(self.layers, made, strict=True):
            layer.write(one * scale)

    def installed(self) -> dict[str, Any]:
        return {"kfac": self.spec}

    def totals(self) -> dict[str, Any]:
        """Bytes of factors that a learner sends, a step on average, dense layers and factors counted."""
        learners = len(self.collectives.here)
        sizes = [len(matrix) for layer in self.layers for matrix in (layer.a, layer.g)]
        return {"kfac": {"factors": len(sizes), "left_out": len(self.left),
                         "elements": sum(d * (d + 1) // 2 for d in sizes),
                         "up": self.sent / learners / max(1, self.steps) if self.collectives.learners > 1 else 0.0}}

    def non_finite(self) -> tuple[float, str] | None:
        """The first layer whose factor was not finite or not positive definite."""
        now, name = min(((float(layer.bad), layer.name) for layer in self.layers), key=lambda one: one[0])
        return None if now == float("inf") else (now, f"a factor of layer {name} that is not finite or not positive "
                                                      "definite (raise kfac.damping)")

    def get_extra_state(self) -> dict[str, Any]:
        return {"steps": self.steps, "taken": self.taken, "sent": self.sent}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.steps, self.taken, self.sent = state["steps"], state["taken"], state["sent"]


def memory_bytes(spec: KFAC, model: nn.Module, learners: int) -> int:
    """Bytes of running factors, inverses, and of the learners' new factors."""
    found, _ = _layers(model, spec.largest)
    squares = sum(d * d + d for _, module in found for d in factors.sizes(module))
    return 4 * squares * (2 + learners)


def _layers(model: nn.Module, largest: int) -> tuple[list[tuple[str, nn.Module]], list[str]]:
    """(layers with factors, names of other layers with a matrix of weights)."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            seen[id(p)] = seen.get(id(p), 0) + 1
    found, left = [], []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() < 2 or not weight.requires_grad:
            continue
        fits = factors.supported(module) and seen[id(weight)] == 1 and max(factors.sizes(module)) <= largest
        found += [(name, module)] if fits else []
        left += [] if fits else [name]
    return found, left

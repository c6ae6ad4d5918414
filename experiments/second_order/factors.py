"""Kronecker factors of one layer, from what entered it and the gradients at its output.

KFAC-expand treats every position of a sequence or an image as a datum, KFAC-reduce sums positions up first
(Eschenhagen 2023). With a [n, s, in] (a one appended where there is a bias), g [n, s, out] the gradients of the mean
loss of N terms:

    expand  A = 1 / (n s) sum_ij a_ij a_ij^T        G = N sum_ij g_ij g_ij^T
    reduce  A = 1 / n sum_i mean_j(a_ij) mean_j(a_ij)^T        G = N sum_i sum_j(g_ij) sum_j(g_ij)^T
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def weight_matrix(module: nn.Module) -> Tensor:
    """A layer's weight as [out, in]: a view."""
    return module.weight.mT if turned(module) else module.weight.flatten(1)


def supported(module: nn.Module) -> bool:
    """Whether factors of this layer are known."""
    return (isinstance(module, nn.Linear) or turned(module)
            or (isinstance(module, nn.Conv2d) and module.groups == 1 and isinstance(module.padding, tuple)
                and module.padding_mode == "zeros"))


def sizes(module: nn.Module) -> tuple[int, int]:
    """Rows of A and of G."""
    out, into = weight_matrix(module).shape
    return into + (module.bias is not None), out


def positions(module: nn.Module, x: Tensor) -> Tensor:
    """What entered a layer as [n, s, in], a one appended where there is a bias; float32 or wider."""
    x = x.detach()
    x = x if x.dtype == torch.float64 else x.float()
    if isinstance(module, nn.Conv2d):
        x = nn.functional.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT
    else:
        x = x.reshape(len(x), -1, x.shape[-1])
    return nn.functional.pad(x, (0, 1), value=1.0) if module.bias is not None else x


def slopes(module: nn.Module, g: Tensor) -> Tensor:
    """Gradients at a layer's output as [n, s, out]; float32 or wider."""
    g = g.detach()
    g = g if g.dtype == torch.float64 else g.float()
    return g.flatten(2).mT if isinstance(module, nn.Conv2d) else g.reshape(len(g), -1, g.shape[-1])


def input_factor(a: Tensor, sharing: str) -> Tensor:
    """A [in, in] of positions [n, s, in]."""
    rows = a.mean(1) if sharing == "reduce" else a.flatten(0, 1)
    return rows.mT @ rows / len(rows)


def output_factor(g: Tensor, terms: int, sharing: str) -> Tensor:
    """G [out, out] of slopes [n, s, out] of a loss that is the mean of `terms` terms."""
    rows = g.sum(1) if sharing == "reduce" else g.flatten(0, 1)
    return rows.mT @ rows * terms


def packed(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, d (d + 1) / 2 elements: what travels."""
    d = len(matrix)
    rows, columns = torch.triu_indices(d, d, device=matrix.device)
    return matrix[rows, columns]


def unpacked(elements: Tensor, d: int) -> Tensor:
    """Inverse of `packed`."""
    rows, columns = torch.triu_indices(d, d, device=elements.device)
    matrix = elements.new_empty(d, d)
    matrix[rows, columns] = elements
    matrix[columns, rows] = elements
    return matrix


def turned(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a Linear whose weight is [in, out]; known by name, so it is not imported."""
    return type(module).__name__ == "Conv1D" and getattr(module, "weight", None) is not None

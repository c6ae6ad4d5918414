"""Kronecker factors of one layer, from what entered it and the gradients at its output.

KFAC-expand treats every position of a sequence or an image as a datum, KFAC-reduce sums positions
up first (Eschenhagen 2023). With a [n, s, in] (a one appended where there is a bias), g [n, s, out]
the gradients of the mean loss of N terms:

    expand  A = 1 / (n s) sum_ij a_ij a_ij^T        G = N sum_ij g_ij g_ij^T
    reduce  A = 1 / n sum_i mean_j(a_ij) mean_j(a_ij)^T        G = N sum_i sum_j(g_ij) sum_j(g_ij)^T
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 128  # rows at which a product is not halved any more


def weight_matrix(module: Any) -> Tensor:
    """A layer's weight as [out, in]: a view."""
    return module.weight.mT if as_matrix(module) else module.weight.flatten(1)


def supported(module: Any) -> bool:
    """Return whether factors of this layer are known."""
    return (
        isinstance(module, nn.Linear)
        or as_matrix(module)
        or (
            isinstance(module, nn.Conv2d)
            and module.groups == 1
            and isinstance(module.padding, tuple)
            and module.padding_mode == "zeros"
        )
    )


def sizes(module: Any) -> tuple[int, int]:
    """Rows of A and of G."""
    out, into = weight_matrix(module).shape
    return into + (module.bias is not None), out


def inputs(module: Any, x: Tensor) -> Tensor:
    """Return what entered a layer, [in, n, s], without the one of a bias; float32 or wider.

    Of a convolution these are its patches. Features come first, so that a convolution's are copied
    once, along rows.
    """
    x = _wide(x)
    if not isinstance(module, nn.Conv2d):
        return x.reshape(len(x), -1, x.shape[-1]).permute(2, 0, 1)
    (ph, pw), (sh, sw), (dh, dw) = module.padding, module.stride, module.dilation
    kh, kw = module.kernel_size
    x = nn.functional.pad(x, (pw, pw, ph, ph)) if ph or pw else x  # pyright: ignore[reportArgumentType]
    n, c, height, width = x.shape
    rows, columns = (height - dh * (kh - 1) - 1) // sh + 1, (width - dw * (kw - 1) - 1) // sw + 1
    sn, sc, s_row, s_column = x.stride()
    patches = x.as_strided(
        (c, kh, kw, n, rows, columns),
        (sc, dh * s_row, dw * s_column, sn, sh * s_row, sw * s_column),
    )
    return patches.reshape(c * kh * kw, n, rows * columns)


def slopes(module: Any, g: Tensor) -> Tensor:
    """Gradients at a layer's output, [out, n, s]; float32 or wider."""
    g = _wide(g)
    return (
        g.flatten(2).transpose(0, 1)
        if isinstance(module, nn.Conv2d)
        else g.reshape(len(g), -1, g.shape[-1]).permute(2, 0, 1)
    )


def _wide(x: Tensor) -> Tensor:
    x = x.detach()
    return x if x.dtype == torch.float64 else x.float()


def input_factor(a: Tensor, bias: bool, sharing: str) -> Tensor:
    """A [in, in] of inputs [in, n, s]; with the one of a bias as its last row and column."""
    columns = a.mean(2) if sharing == "reduce" else a.flatten(1)
    n = columns.shape[1]
    if not bias:
        return product(columns).div_(n)
    matrix = columns.new_empty(len(columns) + 1, len(columns) + 1)
    matrix[:-1, :-1] = product(columns).div_(n)
    matrix[-1, :-1] = matrix[:-1, -1] = columns.mean(1)
    matrix[-1, -1] = 1
    return matrix


def output_factor(g: Tensor, terms: int, sharing: str) -> Tensor:
    """G [out, out] of slopes [out, n, s] of a loss that is the mean of `terms` terms."""
    columns = g.sum(2) if sharing == "reduce" else g.flatten(1)
    return product(columns).mul_(terms)


def product(columns: Tensor) -> Tensor:
    """x x^T of x [d, n], its two triangles the same bits. By halves, so that only little over half
    is computed.
    """
    d = len(columns)
    if d < 2 * BLOCK:
        # BLAS promises no symmetry, and a learner that receives one triangle must compute with
        # the same numbers as one that holds the whole matrix.
        matrix = columns @ columns.mT
        return matrix.tril().add_(matrix.tril(-1).mT)
    h, matrix = d // 2, columns.new_empty(d, d)
    matrix[:h, :h], matrix[h:, h:] = product(columns[:h]), product(columns[h:])
    matrix[h:, :h] = columns[h:] @ columns[:h].mT
    matrix[:h, h:] = matrix[h:, :h].mT
    return matrix


def packed(matrix: Tensor) -> Tensor:
    """A symmetric matrix's triangle, d (d + 1) / 2 elements: what travels.

    Folded to a rectangle as LAPACK's RFP format is, so it is three copies of blocks and no list of
    places.
    """
    d = len(matrix)
    h = (d + 1) // 2
    first, last = matrix[:h, :h].tril(), matrix[h:, h:].triu()
    odd = d % 2
    folded = matrix.new_zeros(h + 1 - odd, h)
    folded[1 - odd :] = first
    folded[: d - h, odd:] += last
    return torch.cat([folded.view(-1), matrix[h:, :h].reshape(-1)])


def unpacked(elements: Tensor, d: int) -> Tensor:
    """Inverse of `packed`."""
    h = (d + 1) // 2
    odd = d % 2
    folded = elements[: (h + 1 - odd) * h].view(h + 1 - odd, h)
    matrix = elements.new_empty(d, d)
    first, last = folded[1 - odd :].tril(), folded[: d - h, odd:].triu()
    matrix[:h, :h] = first + first.tril(-1).mT
    matrix[h:, h:] = last + last.triu(1).mT
    matrix[h:, :h] = elements[folded.numel() :].view(d - h, h)
    matrix[:h, h:] = matrix[h:, :h].mT
    return matrix


def as_matrix(module: Any) -> bool:
    """Return whether it is transformers' Conv1D, a Linear whose weight is [in, out]; known by name,
    so it is not imported.
    """
    return type(module).__name__ == "Conv1D" and getattr(module, "weight", None) is not None

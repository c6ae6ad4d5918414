"""Factors against curvlinops, which somebody else wrote: its K-FAC, its empirical Fisher and its
exact GGN.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from commsweep.second_order import factors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from curvlinops import EFLinearOperator, GGNLinearOperator, KFACLinearOperator

SUPPORTED = nn.Linear | nn.Conv2d


def collected(net, x, slopes_of, sharing, terms):
    """(A, G) of every layer; `slopes_of`: gradients at the outputs to start from, of a mean of so
    many terms.
    """
    layers, seen, a = [one for one in net if isinstance(one, SUPPORTED)], {}, {}
    for layer in layers:
        layer.register_forward_hook(
            lambda module, into, out: seen.update({module: (into[0].detach(), out)})
        )
    y = net(x)
    for layer in layers:
        a[layer] = factors.input_factor(
            factors.inputs(layer, seen[layer][0]), layer.bias is not None, sharing
        )
    found = []
    every = [
        torch.autograd.grad(y, [seen[layer][1] for layer in layers], grad, retain_graph=True)
        for grad in slopes_of(y)
    ]
    for turn, layer in enumerate(layers):
        g = sum(
            factors.output_factor(factors.slopes(layer, grads[turn]), terms, sharing)
            for grads in every
        )
        found.append((a[layer], g))
    return found


def blocks(found, net):
    """The block-diagonal matrix of all Kronecker products, parameters in the order of
    net.parameters().
    """
    made = []
    for (a, g), layer in zip(
        found, (one for one in net if isinstance(one, SUPPORTED)), strict=True
    ):
        block, columns = torch.kron(g, a), len(a)
        if layer.bias is not None:
            place = torch.arange(len(g) * columns).view(len(g), columns)
            order = torch.cat([place[:, :-1].flatten(), place[:, -1]])
            block = block[order][:, order]
        made.append(block)
    return torch.block_diag(*made)


def dense(operator):
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)


def loss_slopes(loss, aim):
    """Of the mean loss over the batch."""

    def slopes(y):
        (grad,) = torch.autograd.grad(loss(y, aim), y, retain_graph=True)
        return [grad]

    return slopes


NETS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)),
        (6, 4),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)
        ),
        (5, 2, 6, 6),
    ),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", ["squares", "classes"])
def test_empirical_factors_are_those_of_curvlinops(name, sharing, kind):
    torch.manual_seed(0)
    make, shape = NETS[name]
    net, x = make().double(), torch.randn(shape, dtype=torch.float64)
    loss = nn.MSELoss() if kind == "squares" else nn.CrossEntropyLoss()
    aim = (
        torch.randn(len(x), 2, dtype=torch.float64)
        if kind == "squares"
        else torch.arange(len(x)) % 2
    )
    theirs = KFACLinearOperator(
        net,
        loss,
        list(net.parameters()),
        [(x, aim)],
        fisher_type="empirical",
        kfac_approx=sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    ours = blocks(collected(net, x, loss_slopes(loss, aim), sharing, aim.numel()), net)
    assert torch.allclose(ours, dense(theirs), rtol=1e-9, atol=1e-12)


def test_of_one_datum_the_empirical_fisher_is_exact():
    torch.manual_seed(0)
    net, x = NETS["linear"][0]().double(), torch.randn(1, 4, dtype=torch.float64)
    loss, aim = nn.CrossEntropyLoss(), torch.tensor([1])
    ours = blocks(collected(net, x, loss_slopes(loss, aim), "expand", 1), net)
    exact = dense(
        EFLinearOperator(net, loss, list(net.parameters()), [(x, aim)], check_deterministic=False)
    )
    assert torch.allclose(
        torch.block_diag(exact[:15, :15], exact[15:, 15:]), ours, rtol=1e-9, atol=1e-12
    )


def test_of_a_deep_linear_network_with_squares_the_factors_are_the_exact_curvature():
    """With the loss's Hessian as the outputs' covariance K-FAC is the GGN's block diagonal, for any
    number of data.
    """
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double(),
        torch.randn(6, 4, dtype=torch.float64),
    )
    loss, aim = nn.MSELoss(reduction="sum"), torch.randn(6, 2, dtype=torch.float64)

    def roots(y):  # of the sum of squares: the Hessian of each datum is twice the identity
        return [
            2**0.5 / len(y) * torch.eye(2, dtype=torch.float64)[turn].expand_as(y)
            for turn in range(2)
        ]

    ours = blocks(collected(net, x, roots, "expand", len(x)), net) * len(x)
    exact = dense(
        GGNLinearOperator(net, loss, list(net.parameters()), [(x, aim)], check_deterministic=False)
    )
    assert torch.allclose(
        torch.block_diag(exact[:15, :15], exact[15:, 15:]), ours, rtol=1e-9, atol=1e-12
    )

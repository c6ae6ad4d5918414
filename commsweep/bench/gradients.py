"""`commsweep bench gradients`: what compressing weight gradients costs, beside exact TopK and
beside plain passes, and what training apart does.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from commsweep.bench import Result, alternate, compared, of_rounds
from commsweep.component import Moment
from commsweep.config.compressors.joint import AdaCompSpec
from commsweep.config.compressors.lowrank import DionFactorsSpec
from commsweep.config.compressors.sparse import TopKSpec
from commsweep.config.compressors.values.levels import StatisticalSpec
from commsweep.config.feedback import AdaCompResidueSpec, DecoupledSpec, ResidueSpec
from commsweep.config.gradients import Gradients
from commsweep.config.outer import Outer
from commsweep.config.training import ImageModel
from commsweep.data_parallel.exchange import Exchange
from commsweep.data_parallel.learners import Learners
from commsweep.data_parallel.outer.training import LocalTraining
from commsweep.models import resnet

LEARNERS, BATCH = 4, 128  # as AdaComp and PowerSGD train: 32 rows a learner
INTERVAL = 20  # steps between two exchanges of learners that train apart
MILLISECONDS = 60.0
WIDTH = 512  # of the matrices that Dion steps


def bench() -> Iterator[Result]:
    """All gradients of ResNet-18 (11.2 M) with AdaComp; learners against the passes they
    contain.
    """
    torch.manual_seed(0)
    net = resnet.build(ImageModel(name="resnet18", width=64), 3, 10)
    yield from _compression(net)
    yield _dion()
    yield from _learners(net)


def _compression(net: torch.nn.Module) -> Iterator[Result]:
    grads = [torch.randn_like(p) * 1e-3 for p in net.parameters()]
    kinds = {
        "adacomp": (AdaCompSpec(), AdaCompResidueSpec()),
        "topk": (TopKSpec(ratio=0.01), ResidueSpec()),
        "sparseloco": (
            TopKSpec(ratio=1 / 64, scope="tile", values=StatisticalSpec()),
            ResidueSpec(decay=0.95),
        ),
    }
    sides = {}
    for name, (compressor, feedback) in kinds.items():
        exchange = Exchange(
            Gradients(exchange="allgather", compressor=compressor, feedback=feedback), net, 0
        )

        def step(exchange: Exchange = exchange) -> None:
            for index, grad in enumerate(grads):
                exchange.send(index, [grad], 0, 0)

        sides[name] = step
    residues = [torch.zeros_like(grad) for grad in grads]
    sides["public"] = lambda: [_public(grad, e) for grad, e in zip(grads, residues, strict=True)]
    with torch.no_grad():
        seconds = alternate(sides, rounds=9, warmup=2)
    yield of_rounds(
        f"AdaComp with its residue, 11.2 M gradients: milliseconds / {MILLISECONDS:g}",
        [1e3 * taken / MILLISECONDS for taken in seconds["adacomp"]],
        1.0,
    )
    for name, label, bound in (
        ("adacomp", "AdaComp", 0.3),
        ("sparseloco", "SparseLoCo's message (tiles, 2-bit levels)", 0.6),
        ("topk", "exact TopK 1 %", 0.4),
    ):
        title = f"{label} / TopK 1 % by torch.topk, both with residue, 11.2 M"
        yield compared(title, seconds, name, "public", bound)


def _dion() -> Result:
    """A learner's step with Dion, beside the algorithm in a few lines of torch (arXiv 2504.05295:
    the momentum keeps what is not sent).
    """
    shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] * 2
    net = torch.nn.ModuleList(torch.nn.Linear(n, m, bias=False) for m, n in shapes)
    spec = Gradients(compressor=DionFactorsSpec(fraction=0.25), feedback=DecoupledSpec())
    exchange, optimizer = Exchange(spec, net, 0), _sgd(list(net.parameters()))
    grads = [torch.randn(shape) for shape in shapes]
    layers = [_Layer(shape) for shape in shapes]

    def ours() -> None:
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        exchange.collect(1.0)
        exchange.reduce(0, 0)
        optimizer.step()

    def by_hand() -> None:
        for layer, grad in zip(layers, grads, strict=True):
            layer.step(grad.clone())

    with torch.no_grad():
        seconds = alternate({"ours": ours, "by hand": by_hand}, rounds=15, warmup=2)
    return compared("Dion's step / by hand, 6.3 M", seconds, "ours", "by hand", 1.0)


class _Layer:
    """Dion's step of one weight [m, n], by hand."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.weight, self.momentum = torch.randn(shape), torch.zeros(shape)
        self.start = torch.randn(shape[1], min(shape) // 4)
        self.scale = (shape[0] / shape[1]) ** 0.5

    def step(self, grad: Tensor) -> None:
        """Take a step along the orthonormal factors of the momentum."""
        self.momentum.add_(grad)
        left = torch.linalg.qr(self.momentum @ self.start).Q
        right = self.momentum.mT @ left
        self.momentum.addmm_(left, right.mT, alpha=-0.05)
        self.start = right / right.norm(dim=0, keepdim=True)
        self.weight.addmm_(left, self.start.mT, alpha=-1e-3 * self.scale)


def _public(grad: Tensor, e: Tensor) -> Tensor:
    """The common way to TopK with a residue: torch.topk of magnitudes, the rest stays."""
    flat = e.add_(grad).view(-1)
    top = flat.abs().topk(max(1, flat.numel() // 100), sorted=False).indices
    sent = torch.zeros_like(flat).index_put_((top,), flat[top])
    flat.sub_(sent)
    return sent


def _learners(net: torch.nn.Module) -> Iterator[Result]:
    """Steps of learners that exchange each time, and of those that train apart, against the passes
    in them.
    """
    spec = Gradients(
        learners=LEARNERS,
        exchange="allgather",
        compressor=AdaCompSpec(),
        feedback=AdaCompResidueSpec(),
    )
    learners, copy = Learners(spec, net, 0, BATCH), deepcopy(net)
    local = LocalTraining(
        Gradients(learners=LEARNERS, outer=Outer(interval=INTERVAL)),
        copy,
        0,
        BATCH,
        _sgd,
        None,
        10**9,
    )
    local.configured(_sgd(list(copy.parameters())))
    plain = _sgd(list(net.parameters()))
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    between, due = (Moment(number, 0, 1e-3, 0, 0) for number in (0, INTERVAL - 1))

    def exchanging() -> None:
        net.zero_grad()
        for pass_ in learners.passes(BATCH):
            cross_entropy(net(x[pass_.rows]), y[pass_.rows]).backward()
            learners.after_pass(between, pass_)
        learners.after_backward(between)

    def training_apart() -> None:
        for pass_ in local.passes(BATCH):
            local.before_pass(between, pass_, y, x.device)
            cross_entropy(copy(x[pass_.rows]), y[pass_.rows]).backward()
            local.after_pass(between, pass_)
        local.after_backward(between)

    def passes() -> None:
        for pass_ in learners.passes(BATCH):
            net.zero_grad()
            cross_entropy(net(x[pass_.rows]), y[pass_.rows]).backward()

    def updates() -> None:
        for _ in range(LEARNERS):
            plain.step()

    seconds = alternate(
        {
            "learners": exchanging,
            "passes": passes,
            "updates": updates,
            "apart": training_apart,
            "exchange": lambda: local.after_backward(due),
        },
        rounds=3,
    )
    yield compared(
        f"step of {LEARNERS} learners with AdaComp / the plain passes in it, ResNet-18, "
        f"minibatch {BATCH}",
        seconds,
        "learners",
        "passes",
        1.15,
    )
    seconds["plain"] = [a + b for a, b in zip(seconds["passes"], seconds["updates"], strict=True)]
    seconds["apart"] = [
        a + b / INTERVAL for a, b in zip(seconds["apart"], seconds["exchange"], strict=True)
    ]
    yield compared(
        f"step of {LEARNERS} learners that meet every {INTERVAL} / its plain passes and SGD "
        f"steps, ResNet-18, minibatch {BATCH}",
        seconds,
        "apart",
        "plain",
        1.05,
    )


def _sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3, fused=True)

"""Every floating-point operation of a training, by part: a multiplication and an addition are two.
No torch.

Counted are matrix products, where all is dense as torch's FlopCounterMode counts them: each layer's
of the forward, of the input's and of the weights' gradient, by its live weights; attention's two
products by the pairs of tokens that attend, forward once and backward twice (what a kernel computes
beside these, or repeats, is not counted); then weights' gradients that growth needs dense, and one
operation an element for every score and every selection of a topology update. Norms, softmax,
biases, activations and the optimizer are left out, as in what papers quote.

    F = sum over steps and layers of (samples positions 2 (2 live + input live))
        + attention + growth + topology

Source of the convention: 6 N + 12 L H Q T a token (PaLM, nanoGPT); of updates: RigL (arXiv
1911.11134), appendix H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

LINEAR, HEAD, ATTENTION, GROWTH, TOPOLOGY = PARTS = (
    "linear",
    "head",
    "attention",
    "growth",
    "topology",
)


@dataclass(frozen=True)
class Product:
    """A layer with a matrix of weights."""

    name: str
    shape: tuple[int, ...]
    numel: int
    positions: int  # at which a sample is multiplied with it
    head: bool = False  # it makes the logits
    first: bool = False  # nothing before it learns, so that its input's gradient is not computed
    masked: bool = True  # it may be sparse
    again: bool = False  # its forward is repeated in the backward (gradient checkpointing)


@dataclass(frozen=True)
class Attention:
    """The attention of a model."""

    layers: int
    heads: int
    head: int  # features of a head
    tokens: int
    again: bool = False

    def forward(self, pairs: float) -> float:
        """Return the multiplications of a sample with so many attending pairs of tokens on average
        over layers and heads: QK and PV.
        """
        return 4.0 * self.layers * self.heads * self.head * pairs


@dataclass(frozen=True)
class NetworkShape:
    """The multiplications of a model for one sample."""

    products: tuple[Product, ...]
    attention: Attention | None = None

    @property
    def masked(self) -> list[Product]:
        """The layers that have a mask, in their order."""
        return [product for product in self.products if product.masked]

    def attending(self, kind: str, second: str | None, width: int, alternate: str) -> float:
        """Attending pairs on average over layers and heads; `second`: of every other one of what
        alternates.
        """
        if (attention := self.attention) is None:
            return 0.0
        return mean_pairs(
            kind,
            second,
            attention.tokens,
            width,
            attention.heads if alternate == "heads" else attention.layers,
        )


def pairs(kind: str, tokens: int, width: int) -> int:
    """Pairs (query, key) of a causal pattern over so many tokens.

    causal: j <= i. local: i - j < width. strided: i - j a multiple of width. local_strided: either
    of them. fixed: in the same block of `width`, or the last of an earlier block.
    """
    w = min(width, tokens)
    blocks, remainder = divmod(tokens, w)
    # blocks before that of a token, summed over tokens
    earlier = w * blocks * (blocks - 1) // 2 + remainder * blocks
    local = w * (w + 1) // 2 + (tokens - w) * w
    if kind == "causal":
        return tokens * (tokens + 1) // 2
    if kind == "local":
        return local
    if kind == "strided":
        return tokens + earlier
    if kind == "local_strided":
        return local + earlier
    if kind == "fixed":
        return blocks * w * (w + 1) // 2 + remainder * (remainder + 1) // 2 + earlier
    raise ValueError(f"no pattern {kind}")


def mean_pairs(kind: str, second: str | None, tokens: int, width: int, turns: int) -> float:
    """Pairs of a head or layer on average, where every other of `turns` attends otherwise, from the
    second on.
    """
    if second is None:
        return float(pairs(kind, tokens, width))
    second_turns = turns // 2
    return (
        (turns - second_turns) * pairs(kind, tokens, width)
        + second_turns * pairs(second, tokens, width)
    ) / turns


def step(
    network: NetworkShape,
    live: Sequence[int],
    attending: float,
    dense_gradients: Sequence[bool] = (),
    backward: bool = True,
) -> dict[str, float]:
    """FLOPs of one sample's forward and backward by part, while `live` weights of the masked layers
    live.

    attending: pairs on average. dense_gradients: masked layers whose weights' gradient is computed
    dense.
    """
    out, masks = (
        dict.fromkeys(PARTS, 0.0),
        iter(zip(live, dense_gradients or [False] * len(live), strict=True)),
    )
    for product in network.products:
        alive, dense = next(masks) if product.masked else (product.numel, False)
        times = (3 + product.again - product.first) if backward else 1
        out[HEAD if product.head else LINEAR] += 2.0 * product.positions * alive * times
        if dense and backward:
            out[GROWTH] += 2.0 * product.positions * (product.numel - alive)
    if (attention := network.attention) is not None:
        out[ATTENTION] = attention.forward(attending) * ((3 + attention.again) if backward else 1)
    return {**out}


def update(numel: int, prune: int, grow: int, growth: str) -> float:
    """Operations of a layer's topology update: a score and a selection for every element, for what
    is pruned and for what grows, twice for that where it grows in two ways.
    """
    return 2.0 * numel * (bool(prune) + bool(grow) * (1 + (growth == "mixed")))


@dataclass
class Account:
    """The cost of a training so far, and of the same training dense, by part."""

    network: NetworkShape
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    dense: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(
        self,
        samples: int,
        live: Sequence[int],
        attending: float,
        dense_gradients: Sequence[bool] = (),
        share: float = 1.0,
    ) -> None:
        """A step of so many samples; `share` of them have dense gradients where growth needs
        some.
        """
        flops_step = step(self.network, live, attending, dense_gradients)
        self._into(self.spent, samples, flops_step | {GROWTH: share * flops_step[GROWTH]})
        self._into(self.dense, samples, self._dense_step)

    @cached_property
    def _dense_step(self) -> dict[str, float]:
        return self.dense_step()  # the same in every step

    def dense_step(self, backward: bool = True) -> dict[str, float]:
        """FLOPs of a sample without masks, with causal attention."""
        attention = self.network.attention
        return step(
            self.network,
            [shape.numel for shape in self.network.masked],
            pairs("causal", attention.tokens, 1) if attention else 0.0,
            backward=backward,
        )

    def updated(self, operations: float) -> None:
        """A topology update's own operations."""
        self.spent[TOPOLOGY] += operations

    @staticmethod
    def _into(sums: dict[str, float], samples: int, flops_by_part: dict[str, float]) -> None:
        for name, flops in flops_by_part.items():
            sums[name] += samples * flops

    def totals(self, live: Sequence[int], attending: float) -> dict[str, Any]:
        """By part, in all, as a share of the dense run with and without the head's own products; of
        a forward pass of the final model, a sample; `square`: the dense run with all T^2 pairs
        counted, as kernels and PaLM's rule do.
        """
        without = sum(self.dense.values()) - self.dense[HEAD]
        out: dict[str, Any] = {
            **self.spent,
            "total": sum(self.spent.values()),
            "dense": sum(self.dense.values()),
        }
        if out["dense"]:
            out |= {
                "relative": out["total"] / out["dense"],
                "relative_without_head": (out["total"] - self.spent[HEAD]) / without
                if without
                else None,
                "head_share": self.dense[HEAD] / out["dense"],
            }
        final = sum(step(self.network, live, attending, backward=False).values())
        attention, dense = self.network.attention, sum(self.dense_step(backward=False).values())
        out |= {"inference": final, "inference_relative": final / dense}
        if attention is not None:
            out["square"] = out["dense"] + self.dense[ATTENTION] * (
                2 * attention.tokens / (attention.tokens + 1) - 1
            )
        return out

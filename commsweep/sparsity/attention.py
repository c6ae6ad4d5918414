"""Sparse causal attention that computes what attends, not a mask over everything.

    local           every block of `width` queries against its own and the block before it: 2 width
                    keys a query
    strided         tokens of one remainder modulo the stride are a sequence of their own, dense and
                    causal
    fixed           every block against itself and the last tokens of the blocks before it
    local_strided   local products and those of the remainders beside each other, under one softmax

Each equals dense attention under `allowed`, forward and backward, but for the order of sums.
Patterns: Child et al., arXiv 1904.10509; the band counts the token itself. What is computed is
somewhat more than the pairs that attend: whole blocks, of which masks take a part away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as dense

NAME = "commsweep"  # of the attention function that transformers' models are given


def allowed(kind: str, tokens: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """The pattern as a boolean mask [query, key], true where a key is seen."""
    i, j = torch.arange(tokens, device=device)[:, None], torch.arange(tokens, device=device)[None]
    causal, local, strided = j <= i, i - j < width, (i - j) % width == 0
    return (
        causal
        & {
            "causal": causal,
            "local": local,
            "strided": strided,
            "local_strided": local | strided,
            "fixed": (i // width == j // width) | (j % width == width - 1),
        }[kind]
    )


def attend(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    width: int,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of a pattern: q, k, v [batch, heads, tokens, head] -> as q. Raises ValueError on an
    unknown kind.
    """
    if kind != "causal" and kind not in _KINDS:
        raise ValueError(f"no attention pattern '{kind}'")
    tokens = q.shape[2]
    if tokens != k.shape[2]:
        raise ValueError(
            f"{tokens} queries and {k.shape[2]} keys: a pattern is of one block of text, "
            "without a cache"
        )
    if kind == "causal" or (width >= tokens and kind != "strided"):
        return dense(q, k, v, is_causal=True, scale=scale, dropout_p=dropout)
    # whole blocks: what is added comes after all real tokens, which therefore never see it
    padding = -tokens % width
    if padding:
        q, k, v = (pad(tensor, (0, 0, 0, padding)) for tensor in (q, k, v))
    return _KINDS[kind](q, k, v, width, scale, dropout)[:, :, :tokens]


def _local(
    q: Tensor, k: Tensor, v: Tensor, width: int, scale: float | None, dropout: float
) -> Tensor:
    mask = _band(width, q.device)
    b, h, t, d = q.shape
    # The first block has none before it: its queries see their own block only.
    first = dense(
        q[:, :, :width],
        k[:, :, :width],
        v[:, :, :width],
        is_causal=True,
        scale=scale,
        dropout_p=dropout,
    )
    if t == width:
        return first
    n = t // width - 1
    # Blocks become batch entries, so that each kernel call sees two blocks of keys.
    queries = q[:, :, width:].reshape(b, h * n, width, d)
    keys, values = (_windows(tensor, width).reshape(b, h * n, 2 * width, d) for tensor in (k, v))
    out = dense(queries, keys, values, attn_mask=mask, scale=scale, dropout_p=dropout)
    return torch.cat([first, out.reshape(b, h, n * width, d)], 2)


def _windows(x: Tensor, width: int) -> Tensor:
    """[b, h, t, d] -> [b, h, t / width - 1, 2 width, d]: every block but the first, after the one
    before it.
    """
    blocks = x.reshape(*x.shape[:2], -1, width, x.shape[3])
    return torch.cat([blocks[:, :, :-1], blocks[:, :, 1:]], 3)


def _strided(
    q: Tensor, k: Tensor, v: Tensor, width: int, scale: float | None, dropout: float
) -> Tensor:
    out = dense(
        *(_remainders(tensor, width) for tensor in (q, k, v)),
        is_causal=True,
        scale=scale,
        dropout_p=dropout,
    )
    return _undo(out, q.shape, width)


def _remainders(x: Tensor, width: int) -> Tensor:
    """[b, h, t, d] -> [b, h width, t / width, d]: tokens of one remainder beside each other."""
    b, h, t, d = x.shape
    return (
        x.reshape(b, h, t // width, width, d).transpose(2, 3).reshape(b, h * width, t // width, d)
    )


def _undo(x: Tensor, shape: torch.Size, width: int) -> Tensor:
    """Inverse of `_remainders` for the shape [b, h, t, d]."""
    b, h, t, d = shape
    return x.reshape(b, h, width, t // width, d).transpose(2, 3).reshape(shape)


def _fixed(
    q: Tensor, k: Tensor, v: Tensor, width: int, scale: float | None, dropout: float
) -> Tensor:
    b, h, t, d = q.shape
    n = t // width

    def gathered(x: Tensor) -> Tensor:
        blocks = x.reshape(b, h, n, width, d)
        last = blocks[:, :, None, : n - 1, -1].expand(b, h, n, n - 1, d)
        return torch.cat([blocks, last], 3).reshape(b, h * n, width + n - 1, d)

    mask = _summaries(width, n, q.device).repeat(h, 1, 1)
    out = dense(
        q.reshape(b, h * n, width, d),
        gathered(k),
        gathered(v),
        attn_mask=mask,
        scale=scale,
        dropout_p=dropout,
    )
    return out.reshape(b, h, t, d)


def _local_strided(
    q: Tensor, k: Tensor, v: Tensor, width: int, scale: float | None, dropout: float
) -> Tensor:
    b, h, t, d = q.shape
    n = t // width
    factor = d**-0.5 if scale is None else scale
    exact = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):  # fused kernels keep scores in float32, too
        out = _both(q.to(exact) * factor, k.to(exact), v.to(exact), width, n, dropout)
    return out.reshape(b, h, t, d).to(v.dtype)


def _both(q: Tensor, k: Tensor, v: Tensor, width: int, n: int, dropout: float) -> Tensor:
    """Band and remainders under one softmax; q scaled, all in float32 or more -> [b, h, n, width,
    d].
    """
    b, h, _, d = q.shape
    blocks = q.reshape(b, h, n, width, d)
    # a block of nothing comes first
    keys, values = (_windows(pad(tensor, (0, 0, width, 0)), width) for tensor in (k, v))
    # [b, h, n, width, 2 width]
    near = (blocks @ keys.mT).masked_fill(~_near(width, n, q.device), -torch.inf)
    column_keys, column_values = (
        _remainders(tensor, width).reshape(b, h, width, n, d) for tensor in (k, v)
    )
    far = blocks.transpose(2, 3) @ column_keys.mT  # [b, h, width, n, n]
    far = far.masked_fill(~_far(n, q.device), -torch.inf).transpose(2, 3)  # [b, h, n, width, n]
    weights = torch.cat([near, far], -1).softmax(-1)
    if dropout:
        weights = drop(weights, dropout)
    out = weights[..., : 2 * width] @ values
    return out + (weights[..., 2 * width :].transpose(2, 3) @ column_values).transpose(2, 3)


_KINDS: dict[str, Callable[..., Tensor]] = {
    "local": _local,
    "strided": _strided,
    "fixed": _fixed,
    "local_strided": _local_strided,
}


@lru_cache(maxsize=16)
def _band(width: int, device: torch.device) -> Tensor:
    """[width, 2 width]: query a of a block sees a + 1 .. a + width of it and the block before
    it.
    """
    i, j = (
        torch.arange(width, device=device)[:, None] + width,
        torch.arange(2 * width, device=device)[None],
    )
    return (j <= i) & (i - j < width)


@lru_cache(maxsize=16)
def _near(width: int, n: int, device: torch.device) -> Tensor:
    """[n, width, 2 width]: the band in every block; in the first one without what lies before
    it.
    """
    mask = _band(width, device).repeat(n, 1, 1)
    mask[0, :, :width] = False
    return mask


@lru_cache(maxsize=16)
def _far(n: int, device: torch.device) -> Tensor:
    """[n, n]: the same remainder in earlier blocks; all of these lie outside the band."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril(-1)


@lru_cache(maxsize=16)
def _summaries(width: int, n: int, device: torch.device) -> Tensor:
    """[n, width, width + n - 1]: a block's own causal triangle, and the last tokens of the blocks
    before it.
    """
    own_block = (
        torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(n, width, width)
    )
    earlier = (
        torch.ones(n, n - 1, dtype=torch.bool, device=device)
        .tril(-1)[:, None]
        .expand(n, width, n - 1)
    )
    return torch.cat([own_block, earlier], -1)


@dataclass
class SparseAttention:
    """The pattern of one attention layer: `kind`, and `beside` of every other head, from the
    second on.
    """

    width: int
    kind: str = "causal"
    beside: str | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float
    ) -> Tensor:
        if self.beside is None or q.shape[1] == 1:
            return attend(self.kind, q, k, v, self.width, scale, dropout)
        even, odd = (
            attend(kind, q[:, index::2], k[:, index::2], v[:, index::2], self.width, scale, dropout)
            for index, kind in enumerate((self.kind, self.beside))
        )
        return _woven(even, odd)


def _woven(even: Tensor, odd: Tensor) -> Tensor:
    """Heads 0, 2, ... and 1, 3, ... in one tensor."""
    out = even.new_empty(even.shape[0], even.shape[1] + odd.shape[1], *even.shape[2:])
    out[:, ::2], out[:, 1::2] = even, odd
    return out


class Attending:
    """The attention layers of a language model of transformers, switched between patterns."""

    def __init__(self, model: Any, width: int, alternate: str) -> None:
        """Puts itself into the model. Raises ValueError when its blocks have no attention that can
        be replaced.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        attentions = [
            module
            for module in model.modules()
            if type(module).__name__.endswith("Attention") and hasattr(module, "config")
        ]
        if not attentions or model.config._attn_implementation != "sdpa":
            raise ValueError(f"{type(model).__name__} has no attention that can be replaced")
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self.alternate, self.layers, self.heads = (
            alternate,
            [SparseAttention(width) for _ in attentions],
            _heads(model),
        )
        for module, layer in zip(attentions, self.layers, strict=True):
            module.attends = layer
        model.config._attn_implementation = NAME

    def switch(self, kind: str, second: str | None) -> None:
        """All layers attend so from now on."""
        for index, layer in enumerate(self.layers):
            if self.alternate == "heads":
                layer.kind, layer.beside = kind, second
            else:
                layer.kind = second if second is not None and index % 2 else kind

    def now(self) -> tuple[str, str | None]:
        """(kind, beside), read back from the layers."""
        first = self.layers[0]
        second = (
            first.beside
            if self.alternate == "heads"
            else self.layers[min(1, len(self.layers) - 1)].kind
        )
        return first.kind, None if second == first.kind else second


def _heads(model: Any) -> int:
    return model.config.num_attention_heads


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return what transformers calls: as its own scaled-dot-product attention where all earlier
    tokens are seen.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    attention = module.attends
    assert isinstance(attention, SparseAttention)
    if attention.kind == "causal" and attention.beside is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    if attention_mask is not None:
        raise ValueError("sparse attention is of whole blocks of text, without padding")
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return attention(query, key, value, scaling, dropout).transpose(1, 2).contiguous(), None

"""Controls: what training reaches without a message, and with its average alone."""

from __future__ import annotations

import torch
from torch import Tensor

from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, payload
from commsweep.compressors.features import columns, matrix, tensor
from commsweep.config.compressors.controls import MeanSpec, ZeroSpec


@COMPRESSORS.of(ZeroSpec)
class Zero(Compressor[ZeroSpec]):
    """Zeros arrive; nbytes = 0. What is not finite is not seen by the receiver either."""

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return torch.zeros_like(x)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 0

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [{}]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        return payload(x)

    def _decode(self, payload: Payload) -> Tensor:
        blank = torch.zeros(columns(payload.shape), device=payload.device)
        return _spread(blank, payload)


@COMPRESSORS.of(MeanSpec)
class Mean(Compressor[MeanSpec]):
    """Each feature's running mean arrives at all of its positions; nbytes = 4 * features.

    The mean m of a feature moves to m + (x - m) * max(1 / n, rate) with the n-th message, whose own
    mean is x. A message without a channel (an evaluation, `encode`) has a mean of its own.
    """

    def __init__(self, spec: MeanSpec, arrives: Tensor | None = None) -> None:
        """arrives: what the receiver gets, [features] float32; absent: the message's own mean."""
        super().__init__(spec)
        self.arrives = arrives

    def begin(self, shape: torch.Size, seed: int) -> Tensor:
        """The mean [features] of a channel and, behind it, the number of messages so far."""
        return torch.zeros(columns(shape) + 1)

    def apply_from(self, x: Tensor, state: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        state = self._moved(x, state)
        return _spread(state[:-1], x), state

    def encode_from(self, x: Tensor, state: Tensor, seed: int) -> Payload:
        return payload(x, mean=self._moved(x, state)[:-1].clone())

    def next_kept(self, payload: Payload, state: Tensor) -> Tensor:
        return torch.cat([payload.parts["mean"], state[-1:] + 1])

    def sender_state(self, shape: torch.Size) -> Tensor:
        return torch.zeros(columns(shape))

    def for_message(self, x: Tensor, state: Tensor, number: int) -> Mean:
        state += (_mean(x) - state) * max(1 / (number + 1), self.spec.rate)
        return Mean(self.spec, state.clone())

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        return _spread(_mean(x) if self.arrives is None else self.arrives, x)

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return 4 * columns(shape)

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        return [{"mean": Field(torch.float32, (columns(shape),))}]

    def _moved(self, x: Tensor, state: Tensor) -> Tensor:
        """The state after a message."""
        number = state[-1:] + 1
        weight = number.reciprocal().clamp(min=self.spec.rate)
        return torch.cat([state[:-1] + (_mean(x) - state[:-1]) * weight, number])

    def _encode(self, x: Tensor, seed: int) -> Payload:
        return payload(x, mean=_mean(x) if self.arrives is None else self.arrives)

    def _decode(self, payload: Payload) -> Tensor:
        return _spread(payload.parts["mean"], payload)


def _mean(x: Tensor) -> Tensor:
    """The mean of each feature of a message, [features] float32."""
    return matrix(x).float().mean(0)


def _spread(means: Tensor, like: Tensor | Payload) -> Tensor:
    """Each feature's value at all positions of a message."""
    rows = like.shape.numel() // len(means)
    return tensor(means.to(like.dtype).repeat(rows, 1), like)

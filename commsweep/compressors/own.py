"""A compressor of a user's own: a class with `encode` and `decode`, checked before it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, laid_out, payload
from commsweep.compressors.message import TYPES
from commsweep.config import own
from commsweep.config.compressors.own import OwnCodeSpec
from commsweep.errors import UserError

SAMPLE = (4, 24)  # shape of the message that a class is tried with
_tried: set[str] = set()


@COMPRESSORS.of(OwnCodeSpec)
class Own(Compressor[OwnCodeSpec]):
    """Two instances of the class, one at each end, so that only what `encode` returns arrives.

    nbytes: the sizes of those tensors.
    """

    def __init__(self, spec: OwnCodeSpec) -> None:
        """Raises UserError where the class is none, or breaks a rule on a small message."""
        super().__init__(spec)
        self.sender, self.receiver = self._instance(), self._instance()
        self._nbytes = 0
        self._forms: dict[torch.Size, dict[str, Field]] = {}
        if spec.model_dump_json() not in _tried:
            self._try()
            _tried.add(spec.model_dump_json())

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        sent = self._encode(x, seed)
        self._nbytes = sent.nbytes
        return self._decode(sent)

    def bytes_sent(self, y: Tensor) -> int:
        """Return the bytes of the message that `apply` has just sent."""
        return self._nbytes

    def formula_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        if not hasattr(self.sender, "bytes"):
            raise NotImplementedError
        return int(self._call(self.sender.bytes, shape))

    def layouts(self, shape: torch.Size, dtype: torch.dtype) -> list[dict[str, Field]]:
        """Return the parts of a message of noise: all messages of a shape must have the same."""
        if shape not in self._forms:
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            tensors = self._encode(noise, 0).parts
            form = {
                name: Field(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
            }
            self._forms[shape] = form
        return [self._forms[shape]]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        # a message of fewer than two axes is one sample
        samples = x.detach() if x.dim() > 1 else x.detach().reshape(1, -1)
        tensors = self._call(self.sender.encode, samples, seed)
        if not isinstance(tensors, dict):
            self._refuse(f"encode returned {type(tensors).__name__}; a dict of tensors is wanted")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                self._refuse(f"part {name!r} is {type(tensor).__name__}; a tensor is wanted")
            if tensor.dtype not in TYPES:
                types = ", ".join(str(kind).removeprefix("torch.") for kind in TYPES)
                self._refuse(f"part {name!r} is of {tensor.dtype}; messages hold {types}")
        form = self._forms.get(x.shape)
        if form is not None and {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {
            name: field.shape for name, field in form.items()
        }:
            self._refuse(
                "parts of one message have other sizes than those of another of its shape; such "
                "codes are simulated (commsweep run), not sent between processes"
            )
        return payload(x, **{name: tensor.contiguous() for name, tensor in tensors.items()})

    def _decode(self, payload: Payload) -> Tensor:
        # an expanded zero has shape, type and device, and takes no memory
        shape = payload.shape if len(payload.shape) > 1 else (1, payload.shape.numel())
        like = torch.zeros((), dtype=payload.dtype, device=payload.device).expand(shape)
        y = self._call(self.receiver.decode, dict(payload.parts), like)
        if not isinstance(y, Tensor):
            self._refuse(f"decode returned {type(y).__name__}; a tensor is wanted")
        if y.shape != like.shape or y.dtype != payload.dtype:
            self._refuse(
                f"decode returned {y.dtype} {tuple(y.shape)}; {payload.dtype} "
                f"{tuple(like.shape)}, like the message, is wanted"
            )
        return laid_out(y.reshape(payload.shape), payload)

    def _instance(self) -> Any:
        spec = self.spec
        instance = own.call(spec.code, spec.source, **spec.options)
        for name in ("encode", "decode"):
            if not callable(getattr(instance, name, None)):
                self._refuse(f"it has no method '{name}'")
        return instance

    def _try(self) -> None:
        """Send a small message twice and another one between: what arrives may depend on nothing
        but the message and its seed.
        """
        generator = torch.Generator().manual_seed(0)
        x, second = torch.randn(2, *SAMPLE, generator=generator)
        before = x.clone()
        sent = self._encode(x, 7)
        first = self._decode(sent)
        if not torch.equal(first, self._call(self.sender.decode, dict(sent.parts), x * 0)):
            self._refuse(
                "decode reads what encode left in self, which does not travel; put it in the dict"
            )
        self._encode(second, 8)
        sent = self._encode(x, 7)
        if not torch.equal(x, before):
            self._refuse("encode changes the message that it is given; work on a copy")
        self.receiver = self._instance()
        if not torch.equal(first, self._decode(sent)):
            self._refuse(
                "one message with one seed arrived as two different ones; draw from "
                "torch.Generator().manual_seed(seed), and keep nothing in self"
            )
        if hasattr(self.sender, "bytes") and self.formula_bytes(x.shape, x.dtype) != sent.nbytes:
            self._refuse(
                f"bytes({tuple(x.shape)}) says {self.formula_bytes(x.shape, x.dtype)}, and "
                f"{sent.nbytes} bytes travel"
            )
        if getattr(self.sender, "unbiased", False):
            self._try_bias(x)

    def _try_bias(self, x: Tensor, draws: int = 400) -> None:
        """Refuse a mean over many seeds that lies further from the message than chance allows."""
        arrived = torch.stack([self._decode(self._encode(x, seed)) for seed in range(draws)])
        if is_biased(arrived, x):
            away = float((arrived.mean(0) - x).norm() / x.norm())
            self._refuse(
                f"it says unbiased = True, but the mean of {draws} messages lies {away:.3g} of the "
                "message's length from what was sent"
            )

    def _call(self, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except (UserError, KeyboardInterrupt, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._refuse(f"{method.__name__} failed ({type(error).__name__}: {error})")

    def _refuse(self, problem: str) -> Any:
        raise UserError(f"compressor '{self.spec.code}': {problem}")


def is_biased(draws: Tensor, x: Tensor) -> bool:
    """Return whether the mean of many draws [n, *x] of a message x is not x.

    Compared along x and along 32 random directions, where a code's rare outcomes count with its
    frequent ones; along none may the mean be further off than five standard errors.
    """
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(32, x.numel(), generator=generator)
    directions = torch.cat([x.reshape(1, -1), directions])
    away = (draws - x).reshape(len(draws), -1) @ directions.T
    error = away.std(0) / len(draws) ** 0.5
    rounding = 1e-5 * x.norm() * directions.norm(dim=1)
    return bool((away.mean(0).abs() > 5 * error + rounding).any())

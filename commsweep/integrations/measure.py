"""Measures what a codec does to one tensor: bytes, error, bias, direction, energy, entropy."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from commsweep.compressors import Compressor, Payload, build
from commsweep.config.base import by_kind
from commsweep.config.compressors import CompressorSpec
from commsweep.config.compressors.spelling import FORMATS, spelled
from commsweep.errors import UserError, nearest

# A codec that is one word and a number: the number is the first of these that its kind has.
# Kinds that need more than a tensor: a forward mask, or weights of their own.
TIED = ("forward_mask", "bottleneck", "subspace", "live", "adacomp")


@dataclass(frozen=True)
class Measured:
    """The measurement of one codec on one tensor x, received as y.

    error: |y - x| / |x|. bias: the part of the error that repeated draws do not average out; equal
    to the error where nothing is drawn. cosine: of x and y. energy: share of |x|^2 in the entries
    that arrive as something else than zero. silent: share of samples of which nothing arrives.
    norm: |x|. entropy: bits a byte of the payload has (order 0): 8 cannot be coded further.
    repeat: cosine of this error and the error at the look before, which error feedback could repair
    where it is large; NaN at the first look.
    """

    codec: str
    bytes: int
    share: float  # of float32
    error: float
    bias: float
    cosine: float
    energy: float
    silent: float
    norm: float
    entropy: float
    # Square of the bias as two draws estimate it, of either sign: means of it over many tensors are
    # unbiased, means of `bias` are not.
    bias_squared: float
    repeat: float = math.nan

    def record(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


def codec(text: str | dict[str, Any]) -> Compressor:
    """The compressor of "topk:0.1", "mxfp4", "uniform:4,rounding=stochastic,scale=group,group=128"
    or of a dict of settings. Raises UserError naming the nearest kind or setting.
    """
    if isinstance(text, dict):
        return build(text)
    try:
        settings = spelled(text)
    except ValueError as error:
        raise UserError(f"codec {error}") from None
    kinds = [kind for kind in by_kind(CompressorSpec) if kind not in TIED]
    if settings is None or settings["kind"] not in kinds:
        kind = re.split("[:,]", text, maxsplit=1)[0]
        near = [*(name for name in kinds if name != "own"), *FORMATS]
        raise UserError(
            f"codec '{text}': no kind '{kind}'{nearest(kind, near)} (kinds: {', '.join(near)}, "
            "file.py:class)"
        )
    return build(settings)


def measure(
    x: Tensor, codecs: list[str | dict[str, Any]] | str | dict[str, Any], seed: int = 0
) -> list[Measured]:
    """Return what each codec does to x, of any floating-point type; the first axis counts samples.

    x is neither changed nor kept, and no global random state is touched. Raises UserError on a
    codec that does not exist or cannot work on this shape.
    """
    codecs_ = codecs if isinstance(codecs, list) else [codecs]
    return [measured(x, codec(entry), named(entry), seed) for entry in codecs_]


def named(text: str | dict[str, Any]) -> str:
    """A codec's name in a table."""
    if isinstance(text, str):
        return text
    settings = ",".join(f"{key}={value}" for key, value in text.items() if key != "kind")
    return f"{text.get('kind')}:{settings}" if settings else str(text.get("kind"))


@torch.no_grad()
def measured(x: Tensor, compressor: Compressor, name: str, seed: int = 0) -> Measured:
    """Measure a codec on one tensor. Raises UserError when it cannot work on this shape."""
    return with_error(x, compressor, name, seed)[0]


@torch.no_grad()
def with_error(x: Tensor, compressor: Compressor, name: str, seed: int) -> tuple[Measured, Tensor]:
    """Return (measurement, what arrives minus x), as `measured` does."""
    x = x.detach().float()
    payload, y = sent(x, compressor, name, seed)
    again = sent(x, compressor, name, seed + 2)[1] if compressor.seeded else y
    return compared(x, name, payload, y, again), y - x


def sent(x: Tensor, compressor: Compressor, name: str, seed: int) -> tuple[Payload, Tensor]:
    """(what travels for x, what arrives). Raises UserError when the codec cannot work on this
    shape.
    """
    try:
        # arithmetic of the codec's own, whatever the training computes in
        with torch.autocast(x.device.type, enabled=False):
            payload = compressor.encode(x, seed)
            return payload, compressor.decode(payload).float()
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(
            f"codec '{name}' cannot work on a tensor of shape {tuple(x.shape)} ({error})"
        ) from None


def compared(x: Tensor, name: str, payload: Payload, y: Tensor, again: Tensor) -> Measured:
    """Return what arrived, y and of another draw again, beside what was meant, x."""
    norm = float(x.norm()) or math.nan
    first, second = y - x, again - x
    bias_squared = float((first * second).sum()) / norm**2
    return Measured(
        name,
        payload.nbytes,
        payload.nbytes / max(1, 4 * x.numel()),
        float(first.norm()) / norm,
        math.sqrt(max(0.0, bias_squared)),
        float((x * y).sum()) / (norm * (float(y.norm()) or math.nan)),
        float((x * x * (y != 0)).sum()) / norm**2,
        1 - float((y != 0).flatten(1).any(1).float().mean()) if x.ndim > 1 else 0.0,
        norm,
        _entropy(payload.parts.values()),
        bias_squared,
    )


def _entropy(tensors: Any) -> float:
    """Bits a byte, of all bytes of a payload."""
    counts = torch.zeros(256, dtype=torch.float64)
    for tensor in tensors:
        bytes_ = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        counts += torch.bincount(bytes_.int(), minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log2()).sum()) + 0.0

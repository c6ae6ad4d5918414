"""The laws that every codec must keep, each tried on small messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten

import torch
from torch import Tensor

from commsweep.compressors import message
from commsweep.compressors.bias import hard_messages, worst_bias
from commsweep.errors import UserError
from commsweep.integrations.measure import codec
from commsweep.scoring.samples import samples

SHAPES = ((4, 24), (8, 3, 6, 6), (2, 5, 64), (1, 1), (3, 1))
SEED = 7
DRAWS_OF_REAL = 32
MOST = 300  # letters of what was seen: an error may hold a whole tensor


@dataclass(frozen=True)
class Law:
    """The outcome of a law: whether the codec keeps it, and what was seen where it does not."""

    name: str
    holds: bool
    note: str = ""


class Broken(Exception):
    """A law that does not hold; the text says what was seen."""


def check(name: str) -> list[Law]:
    """Try all laws on a codec: "eden:2", "mine.py:RowSigns,k=4".

    Raises UserError where there is no such codec, or where its class breaks a rule at once.
    """
    codec(name)
    outcomes = []
    for law, test in LAWS.items():
        try:
            outcomes.append(Law(law, True, test(name) or ""))
        except (Broken, UserError) as problem:
            outcomes.append(Law(law, False, shorten(str(problem), MOST)))
    return outcomes


def noise(shape: tuple[int, ...] = SHAPES[0], seed: int = 0) -> Tensor:
    """Return normal numbers of a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _shapes(name: str) -> str:
    compressor = codec(name)
    for shape in SHAPES:
        y = compressor.apply(noise(shape), SEED)
        if y.shape != shape:
            raise Broken(f"a message {shape} arrives as {tuple(y.shape)}")
    return ""


def _types(name: str) -> str:
    compressor = codec(name)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        y = compressor.apply(noise().to(kind), SEED)
        if y.dtype != kind:
            raise Broken(f"a message of {kind} arrives as {y.dtype}")
    return ""


def _zeros(name: str) -> str:
    y = codec(name).apply(torch.zeros(SHAPES[0]), SEED)
    if not y.isfinite().all():
        raise Broken("a message of zeros does not arrive finite")
    return "" if not y.any() else f"zeros arrive as numbers up to {float(y.abs().max()):.3g}"


def _something(name: str) -> str:
    compressor = codec(name)
    if not any(bool(compressor.apply(noise(shape), SEED).any()) for shape in SHAPES):
        raise Broken("every message arrives as zeros: nothing is sent")
    return ""


def _ties(name: str) -> str:
    y = codec(name).apply(torch.ones(SHAPES[0]), SEED)
    if not y.isfinite().all():
        raise Broken("a message of equal numbers does not arrive finite")
    return ""


def _strides(name: str) -> str:
    x = noise((24, 4)).t()
    compressor = codec(name)
    y, same = compressor.apply(x, SEED), compressor.apply(x.contiguous(), SEED)
    if not torch.allclose(y, same, rtol=1e-4, atol=1e-6):  # sums may have another order
        raise Broken("a message that is not contiguous arrives as another one")
    return ""


def _non_finite(name: str) -> str:
    x = noise()
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    y = codec(name).apply(x, SEED)
    if y.isfinite().all():
        return "NaN and infinity arrive as numbers: a diverged training looks healthy"
    return ""


def _input(name: str) -> str:
    x = noise()
    before = x.clone()
    codec(name).apply(x, SEED)
    if not torch.equal(x, before):
        raise Broken("the message that is given is changed")
    return ""


def _determined(name: str) -> str:
    state, compressor = torch.get_rng_state(), codec(name)
    first = compressor.apply(noise(), SEED)
    compressor.apply(noise(seed=1), SEED + 1)
    if not torch.equal(first, compressor.apply(noise(), SEED)):
        raise Broken("one message with one seed arrives as two different ones")
    if not torch.equal(state, torch.get_rng_state()):
        raise Broken("torch's global random numbers are used; draw from the seed")
    return ""


def _fresh(name: str) -> str:
    compressor = codec(name)
    for shape in SHAPES:
        x = noise(shape)
        if not torch.equal(
            codec(name).decode(compressor.encode(x, SEED)), compressor.apply(x, SEED)
        ):
            raise Broken(f"a second instance decodes a message {shape} to something else")
    return ""


def _bytes(name: str) -> str:
    compressor = codec(name)
    for shape in SHAPES:
        x = noise(shape)
        payload = compressor.encode(x, SEED)
        packed = message.pack([payload], message.Address(message.digest(name))).numel()
        travels = packed - message.framing([payload])
        y = compressor.apply(x, SEED)
        counted = int(compressor.bytes_sent(y))
        if counted != travels:
            raise Broken(f"{counted} bytes are counted for a message {shape}, and {travels} travel")
    return ""


def _unbiased(name: str) -> str:
    """Artificial messages first, then, where these show nothing, the real ones."""
    compressor = codec(name)
    declared = getattr(getattr(compressor, "sender", None), "unbiased", False)
    message, bias, certain = worst_bias(compressor.apply, hard_messages())
    if not certain:
        real = {f"{s.network}'s {s.role}": s.x for s in samples() if s.stage == "late"}
        outcome = worst_bias(compressor.apply, real, DRAWS_OF_REAL, factor=1)
        if outcome[2] or outcome[1].high > bias.high:
            message, bias, certain = outcome
    if certain and declared:
        raise Broken(f"unbiased = True, and the bias is {bias.text} of the length ({message})")
    if certain:
        return f"biased by {bias.text} of the length, the most on messages: {message}"
    return f"no bias seen: {bias.text} of the length, the widest interval ({message})"


LAWS: dict[str, Callable[[str], str]] = {
    "every shape arrives as it was": _shapes,
    "float32, bfloat16 and float16 arrive as they were": _types,
    "something arrives": _something,
    "zeros arrive finite": _zeros,
    "equal numbers arrive finite": _ties,
    "strides do not matter": _strides,
    "NaN and infinity do not stop it": _non_finite,
    "the message given is not changed": _input,
    "the same seed gives the same message": _determined,
    "a second instance decodes it": _fresh,
    "the bytes counted are those that travel": _bytes,
    "bias as declared": _unbiased,
}

"""A compressor of a user's own: a class with `encode` and `decode`, checked before it is used."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from commsweep.compressors.base import COMPRESSORS, Compressor, Field, Payload, laid_out, payload
from commsweep.compressors.bias import hard_messages, worst_bias
from commsweep.compressors.message import TYPES
from commsweep.config import own
from commsweep.config.compressors.own import OwnCodeSpec
from commsweep.errors import UserError

SAMPLE = (4, 24)  # shape of the message that a class is tried with
_tried: set[str] = set()


@COMPRESSORS.of(OwnCodeSpec)
class Own(Compressor[OwnCodeSpec]):
    """Two instances of the class, one at each end, so that only what `encode` returns arrives. The
    receiver's is of a module loaded a second time, so that nothing arrives through globals either.

    A class with `begin` and `next_kept` has a state that both ends of a boundary keep; one with
    `sender_state`, a state that a learner keeps of each layer. A message of neither has the first
    state. Without `gpu = True` the class works on copies in host memory. nbytes: the sizes of the
    encoded tensors.
    """

    def __init__(self, spec: OwnCodeSpec) -> None:
        """Raises UserError where the class is none, or breaks a rule on a small message."""
        super().__init__(spec)
        is_new = spec.model_dump_json() not in _tried
        state = _state_of_torch() if is_new else {}
        self.sender, self.receiver = self._instance(), self._instance(receives=True)
        self._nbytes = 0
        self._learner_state: Tensor | None = None
        self.keeps = hasattr(self.sender, "begin")  # both ends of a boundary keep a state
        self.remembers = hasattr(self.sender, "sender_state")  # a learner does, of each layer
        self._works_on_gpu = bool(getattr(self.sender, "gpu", False))
        self._forms: dict[torch.Size, dict[str, Field]] = {}
        if is_new:
            try:
                self._try()
                changed = [
                    name for name, value in _state_of_torch().items() if value != state[name]
                ]
            finally:
                _restore(state)
            if changed:
                self._refuse(f"it changes {changed[0]}, which the whole training has; leave it")
            _tried.add(spec.model_dump_json())

    def apply(self, x: Tensor, seed: int = 0) -> Tensor:
        sent = self._encode(x, seed)
        self._nbytes = sent.nbytes
        return self._decode(sent)

    def begin(self, shape: torch.Size, seed: int) -> Tensor | None:
        if self.remembers:
            self._refuse("sender_state is of learners' gradients; a boundary needs begin")
        return self._first(self.sender.begin, shape) if self.keeps else None

    def apply_from(self, x: Tensor, memory: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        sent = self.encode_from(x, memory, seed)
        self._nbytes = sent.nbytes
        return self.decode_from(sent, memory), self.next_kept(sent, memory)

    def encode_from(self, x: Tensor, memory: Tensor, seed: int) -> Payload:
        return self._encoded(x, seed, self._local(memory))

    def decode_from(self, payload: Payload, memory: Tensor | None) -> Tensor:
        if memory is None:
            return self.decode(payload)
        return self._decoded(payload, self._local(memory))

    def next_kept(self, payload: Payload, memory: Tensor) -> Tensor:
        tensors, like = self._arrived(payload)
        state = self._call(self.receiver.next_kept, tensors, like, self._local(memory))
        if not isinstance(state, Tensor):
            self._refuse(f"next_kept returned {type(state).__name__}; a tensor is wanted")
        return state.to(memory.device)

    def sender_state(self, shape: torch.Size) -> Tensor | None:
        if self.keeps:
            self._refuse("begin is of boundaries; gradients of learners need sender_state")
        return self._first(self.sender.sender_state, shape) if self.remembers else None

    def for_message(self, x: Tensor, state: Tensor, number: int) -> Own:
        compressor = copy.copy(self)
        compressor._learner_state = state
        return compressor

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
            tensors = self._encoded(noise, 0, self._state(shape)).parts
            form = {
                name: Field(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
            }
            self._forms[shape] = form
        return [self._forms[shape]]

    def _encode(self, x: Tensor, seed: int) -> Payload:
        state = self._state(x.shape)
        sent = self._encoded(x, seed, state)
        if state is not None and self._learner_state is not None:
            self._learner_state.copy_(state)  # which `encode` may have changed
        return sent

    def _encoded(self, x: Tensor, seed: int, state: Tensor | None) -> Payload:
        # a message of fewer than two axes is one sample
        samples = x.detach() if x.dim() > 1 else x.detach().reshape(1, -1)
        states = () if state is None else (state,)
        tensors = self._call(self.sender.encode, self._local(samples), seed, *states)
        if not isinstance(tensors, dict):
            self._refuse(f"encode returned {type(tensors).__name__}; a dict of tensors is wanted")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                self._refuse(f"part {name!r} is {type(tensor).__name__}; a tensor is wanted")
            if tensor.layout != torch.strided or tensor.is_meta:
                self._refuse(f"part {name!r} is sparse or on meta; a dense tensor is wanted")
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
        sent = {name: tensor.contiguous().to(x.device) for name, tensor in tensors.items()}
        return payload(x, **sent)

    def _decode(self, payload: Payload) -> Tensor:
        return self._decoded(payload, self._state(payload.shape) if self.keeps else None)

    def _arrived(self, payload: Payload) -> tuple[dict[str, Tensor], Tensor]:
        """Return (parts, like) of a message as the class gets them."""
        # an expanded zero has shape, type and device, and takes no memory
        shape = payload.shape if len(payload.shape) > 1 else (1, payload.shape.numel())
        like = torch.zeros((), dtype=payload.dtype, device=payload.device).expand(shape)
        tensors = {name: self._local(tensor) for name, tensor in payload.parts.items()}
        return tensors, self._local(like)

    def _decoded(self, payload: Payload, state: Tensor | None) -> Tensor:
        tensors, like = self._arrived(payload)
        y = self._call(self.receiver.decode, tensors, like, *(() if state is None else (state,)))
        if not isinstance(y, Tensor) or y.layout != torch.strided or y.is_meta:
            kind = "a sparse or meta one" if isinstance(y, Tensor) else type(y).__name__
            self._refuse(f"decode returned {kind}; a dense tensor is wanted")
        if y.shape != like.shape or y.dtype != payload.dtype:
            self._refuse(
                f"decode returned {y.dtype} {tuple(y.shape)}; {payload.dtype} "
                f"{tuple(like.shape)}, like the message, is wanted"
            )
        return laid_out(y.to(payload.device).reshape(payload.shape), payload)

    def _local(self, tensor: Tensor) -> Tensor:
        """Return a tensor where the class works: on its device, or as a copy in host memory."""
        return tensor if self._works_on_gpu or tensor.is_cpu else tensor.cpu()

    def _state(self, shape: torch.Size) -> Tensor | None:
        """Return what the class keeps before a message: of this layer, or the first; else None."""
        if self._learner_state is not None:
            return self._local(self._learner_state).clone()
        if self.keeps:
            sample = torch.Size([1, *(shape[1:] if len(shape) > 1 else shape)])
            return self._first(self.sender.begin, sample)
        return self._first(self.sender.sender_state, shape) if self.remembers else None

    def _first(self, method: Any, shape: torch.Size) -> Tensor:
        state = self._call(method, shape)
        if not isinstance(state, Tensor):
            self._refuse(f"{method.__name__} returned {type(state).__name__}; a tensor is wanted")
        return state

    def _instance(self, receives: bool = False) -> Any:
        spec = self.spec
        if receives:
            instance = own.call_apart(spec.code, spec.source, spec.options)
        else:
            instance = own.call(spec.code, spec.source, **spec.options)
        for name in ("encode", "decode"):
            if not callable(getattr(instance, name, None)):
                self._refuse(f"it has no method '{name}'")
        if hasattr(instance, "begin") != hasattr(instance, "next_kept"):
            self._refuse("begin and next_kept belong together; write both or neither")
        if hasattr(instance, "begin") and hasattr(instance, "sender_state"):
            self._refuse("begin (of a boundary) and sender_state (of learners): write one of both")
        return instance

    def _try(self) -> None:
        """Send a small message twice and another one between: what arrives may depend on nothing
        but the message and its seed.
        """
        generator = torch.Generator().manual_seed(0)
        x, second = torch.randn(2, *SAMPLE, generator=generator)
        sent = self._encode(x, 7)
        if x._version:  # counts what was written in place, the same values included
            self._refuse("encode changes the message that it is given; work on a copy")
        first = self._decode_alone(sent)
        if lost := int((~first.isfinite()).sum()):
            self._refuse(
                f"decode returned {lost} of {first.numel()} values that are not finite, for a "
                "message of finite ones"
            )
        self._encode(second, 8)
        sent = self._encode(x, 7)
        self.receiver = self._instance(receives=True)
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
        if self.keeps:
            self._try_state(sent)
        if getattr(self.sender, "unbiased", False):
            self._try_bias()

    def _decode_alone(self, sent: Payload) -> Tensor:
        """Return a message as its receiver decodes it. Refuse a class whose sender, which has more
        than the message, decodes it to something else.
        """
        states = (self._state(sent.shape),) if self.keeps else ()
        tensors, like = self._arrived(sent)
        by_sender: Tensor = self._call(self.sender.decode, dict(tensors), like, *states)
        reads = (
            "decode reads what encode left in self, its class or its module, which does not "
            "travel; put it in the dict"
        )
        try:
            arrived = self._decode(sent)
        except UserError as error:  # which the sender's decode, with more than the message, has not
            if "decode failed" in str(error):
                self._refuse(f"{reads} ({str(error).partition(': ')[2]})")
            raise
        if by_sender.shape != arrived.shape or not torch.equal(
            arrived.nan_to_num(), by_sender.nan_to_num()
        ):
            self._refuse(reads)
        return arrived

    def _try_state(self, sent: Payload) -> None:
        """Refuse a state that two receivers of one message would keep differently, or that changes
        its shape or the state before it.
        """
        state = self._state(sent.shape)
        assert state is not None
        before = state.clone()
        after = self.next_kept(sent, state)
        if after.shape != state.shape:
            self._refuse(
                f"next_kept returned {list(after.shape)}, and begin {list(state.shape)}; what is "
                "kept has one shape, whatever the batch"
            )
        if not torch.equal(state, before):
            self._refuse("next_kept changes the state that it is given; work on a copy")
        again = self.next_kept(sent, state)
        self.receiver = self._instance(receives=True)
        if not (torch.equal(after, again) and torch.equal(after, self.next_kept(sent, state))):
            self._refuse(
                "two receivers of one message kept different states; next_kept may depend on "
                "nothing but the message and the state"
            )

    def _try_bias(self) -> None:
        """Refuse a mean over many seeds that lies further from a message than chance allows."""

        def apply(x: Tensor, seed: int) -> Tensor:
            return self._decode(self._encode(x, seed))

        name, bias, certain = worst_bias(apply, hard_messages())
        if certain:
            self._refuse(
                f"it says unbiased = True, but its bias on {name} rows is {bias.text} of the "
                "message's length"
            )

    def _call(self, method: Any, *args: Any) -> Any:
        try:
            with own.no_exit(self.spec.code):
                return method(*args)
        except (UserError, KeyboardInterrupt, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            if "written-to tensor refers to a single memory location" in str(error):
                self._refuse(
                    f"{method.__name__} changes like in place, which has no values of its own; "
                    "begin with torch.zeros_like(like)"
                )
            self._refuse(f"{method.__name__} failed ({type(error).__name__}: {error})")

    def _refuse(self, problem: str) -> Any:
        raise UserError(f"compressor '{self.spec.code}': {problem}")


def _state_of_torch() -> dict[str, Any]:
    """Return the parts of torch's own state that a codec must leave as they are, by name."""
    return {
        "torch's default type": torch.get_default_dtype(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "torch's global random numbers": tuple(torch.get_rng_state().tolist()),
    }


def _restore(state: dict[str, Any]) -> None:
    torch.set_default_dtype(state["torch's default type"])
    torch.set_grad_enabled(state["whether gradients are recorded"])
    if torch.get_num_threads() != state["the number of threads"]:
        torch.set_num_threads(state["the number of threads"])
    numbers = state["torch's global random numbers"]
    torch.set_rng_state(torch.tensor(numbers, dtype=torch.uint8))

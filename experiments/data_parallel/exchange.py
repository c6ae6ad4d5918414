"""n learners in one process: their gradients are compressed, averaged, and every byte is counted.

A learner's message for a layer is what it would send to others; what the optimizer sees is the mean of what arrives.
`real.py` does the same with processes, one learner each, through these classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from commsweep.experiments import compressors, seeds
from commsweep.experiments.compressors import Compressor
from commsweep.experiments.compressors.bits import packed_bytes
from commsweep.experiments.compressors.sparse import Counted
from commsweep.experiments.data_parallel import feedback
from commsweep.experiments.data_parallel.adacomp import AdaComp
from commsweep.experiments.data_parallel.shared import Here, Leader, PowerIteration, Together
from commsweep.experiments.specs import AdaCompResidue, Gradients, Spec

OWN = {"adacomp": AdaComp, "cltk": Leader, "powersgd": PowerIteration}
SPARSE = ("topk", "topk_strict", "threshold", "dryden", "sidco", "adacomp")  # each learner has places of its own


@dataclass(frozen=True)
class Layer:
    """A trainable parameter as a thing to send."""

    name: str
    kind: str  # conv, fc, embedding or vector
    shape: torch.Size
    dense: bool  # travels as it is

    @property
    def dense_bytes(self) -> int:
        """Uncompressed, in float32."""
        return 4 * self.shape.numel()


class Exchange(nn.Module):
    """The exchange of gradients of one model: residues of every learner, what is sent, and its ledger."""

    def __init__(self, spec: Gradients, model: nn.Module, seed: int, rank: int | None = None) -> None:
        """rank: the only learner of this process, where learners are processes."""
        super().__init__()
        self.spec, self.seed = spec, seed
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.layers = layers(model, spec)
        self.memories = nn.ModuleList(
            nn.ModuleList(feedback.KINDS["none" if layer.dense and spec.feedback.kind not in feedback.CARRIES else
                                         spec.feedback.kind](spec.feedback, layer.shape, spec.learners)
                          for layer in self.layers) for _ in range(spec.learners))
        self.base = build(spec.compressor)
        for place, layer in enumerate(self.layers):
            if isinstance(self.base, PowerIteration) and not layer.dense:
                largest = _milder(spec) if spec.schedule.kind == "accordion" else self.base
                self.register_buffer(f"warm{place}", largest.begin(
                    layer.shape, seeds.draw(seeds.GRADIENT_FACTOR, seed, place)))
        self.accordion = _Accordion(spec, self.layers) if spec.schedule.kind == "accordion" else None
        self.ledger = Ledger(self.layers, spec, spec.learners if rank is None else 1)
        self.collected: list[list[Tensor]] = []
        self._summed: list[Tensor] = []  # of the local steps of the learner whose turn it is
        self._shared: list[Tensor] = []

    @property
    def installed(self) -> Gradients:
        """The settings as installed, read back from the objects."""
        memories = [memory for memory, layer in zip(self.memories[0], self.layers, strict=True) if not layer.dense]
        return self.spec.model_copy(update={
            "learners": len(self.memories), "compressor": self.base.spec,
            "feedback": memories[0].spec if memories else self.spec.feedback})

    def clear(self) -> None:
        """Forget the parameters' gradients."""
        for p in self.trained:
            p.grad = None

    @torch.no_grad()
    def step_locally(self, rate: float) -> None:
        """A learner's SGD step on its own weights; its gradients are summed until it is collected."""
        if not self._summed:
            self._shared = [p.detach().clone() for p in self.trained]
            self._summed = [torch.zeros_like(p) for p in self.trained]
        for p, total in zip(self.trained, self._summed, strict=True):
            if p.grad is not None:
                total += p.grad
                p.sub_(p.grad, alpha=rate)
                p.grad = None

    @torch.no_grad()
    def collect(self, weight: float) -> None:
        """Take the gradients of the next learner from the parameters; `weight` is its share of the batch times n."""
        grads = []
        for place, p in enumerate(self.trained):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            if self._summed:  # back to the weights that all learners share
                grad = self._summed[place].add_(grad)
                p.copy_(self._shared[place])
            grads.append(grad if weight == 1 else grad * weight)
            p.grad = None
        self._summed, self._shared = [], []
        self.collected.append(grads)

    def reduce(self, step: int, epoch: int) -> None:
        """Give the parameters the mean of what arrives of the collected gradients."""
        learners, self.collected = self.collected, []
        for place, p in enumerate(self.trained):
            merged = self.send(place, [grads[place] for grads in learners], step, epoch)
            # A fused optimizer walks through memory: a gradient must lie there as its parameter does.
            p.grad = merged if merged.stride() == p.stride() else torch.empty_like(p).copy_(merged)
        self.ledger.steps += 1

    def send(self, place: int, grads: list[Tensor], step: int, epoch: int) -> Tensor:
        """The mean of what arrives of all learners' gradients of a layer."""
        layer = self.layers[place]
        if layer.dense or epoch < self.spec.start_epoch:
            sent = [memory[place].dense(grad) for memory, grad in zip(self.memories, grads, strict=True)]
            self.ledger.dense(place, len(sent))
            return mean(sent)
        method = self.method(place, epoch)
        if self.looks_ahead:
            ahead = self.spec.feedback.scale - 1
            arrived = []
            for memory, grad in zip(self.memories, grads, strict=True):
                y, nbytes, kept = method.step(memory[place].e, grad, ahead)
                self.ledger.sent(place, nbytes, kept)
                arrived.append(y)
            return self.merge(place, arrived)
        messages = [memory[place].offer(grad) for memory, grad in zip(self.memories, grads, strict=True)]
        if isinstance(method, Together):
            arrived, warm = method.combine(messages, getattr(self, f"warm{place}", None), step, Here())
            self.keep_warm(place, warm)
            self.ledger.sent(place, round(method.nbytes(layer.shape, len(grads)) * len(grads)), messages=len(grads))
        else:
            arrived = []
            for learner, message in enumerate(messages):
                y = method.apply(message[None], self.draw(place, learner, step))[0]
                arrived.append(y)
                self.ledger.sent(place, method.bytes_sent(y[None]), self.entries(y))
        used = [memory[place].settle(message, y)
                for memory, message, y in zip(self.memories, messages, arrived, strict=True)]
        return self.merge(place, used)

    def entries(self, y: Tensor) -> Tensor | int:
        """Entries of a message that arrives as y, where each learner chooses its places."""
        return torch.count_nonzero(y) if self.spec.compressor.kind in SPARSE else 0

    @property
    def looks_ahead(self) -> bool:
        """Whether it is AdaComp with its own residue, which selection sees."""
        return isinstance(self.base, AdaComp) and isinstance(self.spec.feedback, AdaCompResidue)

    def keep_warm(self, place: int, warm: Tensor | None) -> None:
        """Begin the next step's power iteration from `warm`; columns beyond its rank stay for a higher one."""
        if warm is not None:
            getattr(self, f"warm{place}")[:, : warm.shape[1]] = warm

    def merge(self, place: int, used: list[Tensor]) -> Tensor:
        """The gradient that the optimizer sees; and what a server would send back."""
        merged = mean(used)
        if self.spec.vote:
            size = mean([y.abs() for y in used])
            merged = torch.where(merged >= 0, size, -size)
        if self.spec.exchange == "server":
            self.ledger.back(place, merged)
        if self.accordion is not None:
            self.accordion.add(place, merged)
        return merged

    def method(self, place: int, epoch: int) -> Compressor | Together:
        """What a layer's messages go through in this epoch."""
        schedule = self.spec.schedule
        if schedule.kind == "ramp" and epoch < schedule.epochs:
            return build(_scaled(self.base.spec, ratio=max(self.base.spec.ratio, 0.25 ** (epoch + 1))))
        if self.accordion is not None and self.accordion.mild[place]:
            return _milder(self.spec)
        return self.base

    def draw(self, place: int, learner: int, step: int) -> int:
        """Seed of a message; learners that must choose the same places share theirs."""
        if self.spec.compressor.kind == "randomk":
            learner = 0
        return seeds.draw(seeds.EXCHANGE, self.seed, place, learner, step)

    def epoch_ended(self, epoch: int) -> None:
        """Let Accordion decide."""
        if self.accordion is not None:
            self.accordion.decide(epoch)

    def get_extra_state(self) -> dict[str, Any]:
        return {"ledger": self.ledger.state(), "accordion": self.accordion.state() if self.accordion else {}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.ledger.load(state["ledger"])
        if self.accordion is not None:
            self.accordion.load(state["accordion"])


class Ledger:
    """Bytes of every layer over training, all learners together; what depends on data is summed on the device."""

    def __init__(self, layers: list[Layer], spec: Gradients, learners_here: int) -> None:
        self.layers, self.spec, self.here, self.steps = layers, spec, learners_here, 0
        self.up: list[Any] = [0] * len(layers)
        self.down: list[Any] = [0] * len(layers)
        self.kept: list[Any] = [0] * len(layers)  # entries in sparse messages
        self.coded = [0] * len(layers)  # compressed messages; the other ones travelled dense
        self._seen, self._seen_steps = [0] * len(layers), 0

    def sent(self, place: int, nbytes: int | Tensor, kept: int | Tensor = 0, messages: int = 1) -> None:
        """A message for a layer left a learner; `kept`: its entries, where each learner chooses its places."""
        self.up[place] = self.up[place] + nbytes
        self.kept[place] = self.kept[place] + kept
        self.coded[place] += messages

    def dense(self, place: int, messages: int) -> None:
        """A layer travelled as it is, from so many learners; a server sends the mean back so, too."""
        self.up[place] = self.up[place] + messages * self.layers[place].dense_bytes
        if self.spec.exchange == "server":
            self.down[place] = self.down[place] + self.layers[place].dense_bytes

    def back(self, place: int, merged: Tensor) -> None:
        """What a server sends to one learner for a layer: the mean, sparse or as signs where it is that."""
        n, kind = merged.numel(), self.spec.compressor.kind
        if self.spec.vote:
            nbytes: int | Tensor = packed_bytes(n, 1)
        elif kind in SPARSE:
            m = torch.count_nonzero(merged)
            nbytes = (4 * m + Counted.place_bytes(m, 1, n)).clamp(max=4 * n)
        elif kind == "powersgd":
            nbytes = round(PowerIteration(self.spec.compressor).nbytes(merged.shape, 1))
        else:
            nbytes = 4 * n
        self.down[place] = self.down[place] + nbytes

    def totals(self) -> dict[str, Any]:
        """Bytes a learner sends up a step, and what that makes on the links of the exchange; by layer class, too.

        up: a learner's own messages; learner_sends, learner_receives: with what it forwards; total: over all learners.
        rate: dense bytes over up (the effective compression rate). bound: `up` if sparse layers were coded at the
        entropy of their places, at the mean density of their compressed messages. kept: that density over all layers
        whose entries are counted; absent where none are.
        """
        up = [int(one) / max(1, self.steps) / self.here for one in self.up]
        dense = [layer.dense_bytes for layer in self.layers]
        down = self._down()
        n, own = self.spec.learners, sum(up)
        factor = {"allreduce": 2 * (n - 1) / n, "allgather": n - 1, "server": 1}[self.spec.exchange]
        receives = down if self.spec.exchange == "server" else factor * own
        out: dict[str, Any] = {
            "up": own, "bound": self._bound(up), "dense": sum(dense), "rate": sum(dense) / own if own else 1.0,
            "learner_sends": factor * own,
            "learner_receives": receives, "total": n * (factor * own + (down if self.spec.exchange == "server" else 0))}
        counted = [(int(k), n * layer.shape.numel()) for k, n, layer in zip(self.kept, self.coded, self.layers,
                                                                           strict=True) if int(k)]
        if counted:
            out["kept"] = sum(k for k, _ in counted) / sum(n for _, n in counted)
        for kind in sorted({layer.kind for layer in self.layers}):
            ours = [place for place, layer in enumerate(self.layers) if layer.kind == kind]
            sent = sum(up[place] for place in ours)
            out |= {f"{kind}.up": sent, f"{kind}.dense": sum(dense[place] for place in ours),
                    f"{kind}.rate": sum(dense[place] for place in ours) / sent if sent else 1.0}
        return out

    def _bound(self, up: list[float]) -> float:
        """Bytes a learner would send up a step at the entropy bound: v k + n H2(k / n) bits for k values of v bits."""
        bits = 1 if self.spec.compressor.kind in ("adacomp", "dryden") else 32
        total, messages = 0.0, max(1, self.steps) * self.here
        for sent, kept, coded, layer in zip(up, self.kept, self.coded, self.layers, strict=True):
            n = layer.shape.numel()
            dense = (messages - coded) / messages * layer.dense_bytes
            k = int(kept) / max(1, coded)
            p = k / n
            entropy = -p * math.log2(p) - (1 - p) * math.log2(1 - p) if 0 < p < 1 else 0.0
            total += min(sent, dense + coded / messages * (bits * k + n * entropy) / 8) if k else sent
        return total

    def _down(self) -> float:
        """Bytes a server sends to one learner a step."""
        return sum(int(back) for back in self.down) / max(1, self.steps)

    def rates(self) -> dict[str, float]:
        """Every layer's compression rate since the last call (waits for the device)."""
        up, steps = [int(one) for one in self.up], max(1, self.steps - self._seen_steps)
        out = {layer.name: layer.dense_bytes * steps * self.here / max(1, now - before)
               for layer, now, before in zip(self.layers, up, self._seen, strict=True) if not layer.dense}
        self._seen, self._seen_steps = up, self.steps
        return out

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"up": [int(one) for one in self.up], "down": [int(one) for one in self.down], "steps": self.steps,
                "kept": [int(one) for one in self.kept], "coded": self.coded, "seen": self._seen,
                "seen_steps": self._seen_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.up, self.down, self.kept, self.coded, self.steps = (
            state[key] for key in ("up", "down", "kept", "coded", "steps"))
        self._seen, self._seen_steps = state["seen"], state["seen_steps"]


class _Accordion:
    """Which layers are in a critical regime: their gradient's norm over an epoch changes a lot (arXiv 2010.16248)."""

    def __init__(self, spec: Gradients, layers: list[Layer]) -> None:
        self.schedule = spec.schedule
        self.mild = [not layer.dense for layer in layers]  # the first epochs are critical
        self.sums: list[Tensor | None] = [None] * len(layers)
        self.before: list[float] | None = None

    def add(self, place: int, gradient: Tensor) -> None:
        """Add a step's mean gradient of a layer."""
        own = self.sums[place]
        # After a resume the sum lies on the host.
        self.sums[place] = gradient.clone() if own is None else own.to(gradient.device).add_(gradient)

    def decide(self, epoch: int) -> None:
        """After an epoch: compare norms with those of the last decision."""
        norms = [math.nan if one is None else float(torch.linalg.vector_norm(one)) for one in self.sums]
        self.sums = [None] * len(self.sums)
        if (epoch + 1) % self.schedule.every:
            return
        if self.before is not None:
            self.mild = [math.isfinite(now) and (last == 0 or abs(last - now) / last >= self.schedule.eta)
                         for last, now in zip(self.before, norms, strict=True)]
        self.before = norms

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"mild": self.mild, "sums": self.sums, "before": self.before}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.mild, self.sums, self.before = state["mild"], state["sums"], state["before"]


def layers(model: nn.Module, spec: Gradients) -> list[Layer]:
    """The trainable parameters of a model, in order, with their class."""
    found = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            kind = "vector" if p.dim() < 2 else "conv" if p.dim() > 2 else (
                "embedding" if isinstance(module, nn.Embedding) else "fc")
            found.setdefault(id(p), kind)
    every = spec.compressor.kind == "none"
    return [Layer(name, found[id(p)], p.shape, every or (p.dim() < 2 and not spec.vectors))
            for name, p in model.named_parameters() if p.requires_grad]


def build(spec: Spec) -> Compressor | Together:
    """The compressor, or the way of sending together, of a spec."""
    return OWN[spec.kind](spec) if spec.kind in OWN else compressors.build(spec)


def mean(parts: list[Tensor]) -> Tensor:
    """The mean in the learners' order; of one, itself."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts))


def _milder(spec: Gradients) -> Compressor | Together:
    """What Accordion uses in a critical regime."""
    ratio, rank = (getattr(spec.compressor, name, 0) * spec.schedule.mild for name in ("ratio", "rank"))
    return build(_scaled(spec.compressor, ratio=min(1.0, ratio), rank=round(rank)))


def _scaled(spec: Spec, **values: Any) -> Spec:
    return spec.model_copy(update={name: value for name, value in values.items() if name in type(spec).model_fields})

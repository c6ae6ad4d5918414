"""The trainable parameters of a model as things to send."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from commsweep.config.gradients import Gradients
from commsweep.errors import UserError, nearest
from commsweep.second_order.factors import as_matrix


@dataclass(frozen=True)
class Layer:
    """A trainable parameter as a thing to send."""

    name: str
    kind: str  # conv, fc, embedding or vector
    shape: torch.Size
    dense: bool  # travels as it is
    place: int = 0  # among all of the network
    turned: bool = False  # a matrix that lies [inputs, outputs] in memory
    itemsize: int = 4  # bytes of an element
    group: str = ""  # of `grad.layers`; "": grad.compressor

    @property
    def dense_bytes(self) -> int:
        """Uncompressed."""
        return self.itemsize * self.shape.numel()


def layers(
    model: nn.Module, spec: Gradients, network_layers: dict[int, Layer] | None = None
) -> list[Layer]:
    """The trainable parameters of a model, in order, with their class; network_layers: those of the
    network that the model is a part of, by their identity.
    """
    if network_layers is not None:
        return [network_layers[id(p)] for p in model.parameters() if p.requires_grad]
    names, lying = {}, set()
    for module in model.modules():
        if as_matrix(module):
            lying.add(id(module.weight))
        for p in module.parameters(recurse=False):
            kind = (
                "vector"
                if p.dim() < 2
                else "conv"
                if p.dim() > 2
                else ("embedding" if isinstance(module, nn.Embedding) else "fc")
            )
            names.setdefault(id(p), kind)
    all_dense, matrices = (
        spec.compressor.kind == "none" and spec.sharded is None,
        spec.compressor.kind == "dion",
    )

    excluded = _chosen(model, spec.exclude or (), "grad.exclude")
    group: dict[int, str] = {}
    for name, members in spec.layers.items():
        for identity, parameter in _chosen(model, members.match, f"grad.layers.{name}").items():
            if identity in excluded or identity in group:
                setting = "exclude" if identity in excluded else f"layers.{group[identity]}"
                raise UserError(
                    f"grad.layers.{name}.match chooses {parameter}, and so does grad.{setting}; a "
                    "layer has one compressor"
                )
            group[identity] = name

    def dense(p: nn.Parameter) -> bool:
        if id(p) in excluded:
            return True
        if matrices:  # the rest has an optimizer of its own
            return p.dim() != 2 or names[id(p)] == "embedding"
        return (
            all_dense
            or p.dim() == 0
            or p.numel() == 0
            or (p.dim() < 2 and not spec.compress_vectors)
        )

    layers = [
        Layer(
            name,
            names[id(p)],
            p.shape,
            dense(p),
            turned=id(p) in lying,
            itemsize=p.element_size(),
            group=group.get(id(p), ""),
        )
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    return [replace(layer, place=index) for index, layer in enumerate(layers)]


def _chosen(model: nn.Module, patterns: tuple[str, ...], setting: str) -> dict[int, str]:
    """The parameters that a pattern chooses by their names in the model: names by identity. Raises
    UserError on a pattern that chooses none.
    """
    # A run's model stands beside its boundaries; its own names are what a user knows.
    names = {
        name.removeprefix("model."): id(p)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    chosen: dict[int, str] = {}
    for pattern in patterns:
        matches = {identity: name for name, identity in names.items() if fnmatchcase(name, pattern)}
        if not matches:
            raise UserError(f"{setting}: '{pattern}' matches no parameter{nearest(pattern, names)}")
        chosen |= matches
    return chosen


def identified(model: nn.Module, spec: Gradients) -> dict[int, Layer]:
    """The layers of a whole network by the identity of their parameters, in order."""
    return dict(
        zip(
            (id(p) for p in model.parameters() if p.requires_grad), layers(model, spec), strict=True
        )
    )

"""Finds the layers of a model that may be sparse, and what it multiplies for one sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from commsweep.errors import UserError, notice
from commsweep.second_order import factors
from commsweep.sparsity.flops import Attention, NetworkShape, Product


def survey(
    model: Any, sample: Tensor, modules: str
) -> tuple[NetworkShape, list[tuple[str, nn.Parameter]]]:
    """(what the model multiplies for a sample [1, ...], the weights that have masks by name, in the
    same order).

    modules: "blocks", all layers but the one that makes the logits, or "all". Raises UserError when
    none is supported (Linear, Conv1D, Conv2d), or when a layer runs more than once.
    """
    records: dict[str, dict[str, Any]] = {}

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        channels = output.shape[1] if module.weight.dim() > 2 else output.shape[-1]  # pyright: ignore[reportCallIssue]
        record = records.setdefault(
            name, {"module": module, "calls": 0, "first": not inputs[0].requires_grad}
        )
        record["calls"] += 1
        record["positions"] = output.numel() // channels

    multiplying = [(name, module) for name, module in model.named_modules() if _multiplies(module)]
    hooks = [
        module.register_forward_hook(lambda m, i, o, name=name: note(name, m, i, o))
        for name, module in multiplying
    ]
    training = model.training
    try:
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            model.eval()(sample)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    text = hasattr(model, "get_output_embeddings")
    last = model.get_output_embeddings() if text else None
    again = _repeated(model, [record["module"] for record in records.values()])
    products, weights = [], []
    for name, record in records.items():
        module = record["module"]
        if record["calls"] > 1:
            raise UserError(
                f"sparsity: layer {name} runs {record['calls']} times a sample, and no account of "
                "FLOPs here knows how; use a model whose layers run once"
            )
        head = module is last if text else name == list(records)[-1]
        masked = module.weight.requires_grad and (modules == "all" or not head)
        products.append(
            Product(
                name,
                tuple(module.weight.shape),
                module.weight.numel(),
                record["positions"],
                head,
                record["first"],
                masked,
                id(module) in again,
            )
        )
        if masked and any(module.weight is weight_name for _, weight_name in weights):
            raise UserError(
                f"sparsity: layer {name} shares its weight with another one, and a weight has "
                "one mask here; use a model whose layers have their own"
            )
        weights += [(name, module.weight)] if masked else []
    counted = sum(2 * product.positions * product.numel for product in products)
    if not text and counter.get_total_flops() > counted:
        notice(
            f"sparsity: {100 - 100 * counted / counter.get_total_flops():.0f} % of a forward "
            "pass's products are in layers that are neither masked nor counted (known are "
            "Linear, Conv1D, Conv2d)"
        )
    if not weights:
        raise UserError(
            "sparsity: the model has no layer that it supports (Linear, Conv1D, Conv2d)"
            + (
                ""
                if modules == "all"
                else " beside the one that makes the logits; set sparsity.modules=all"
            )
        )
    return NetworkShape(
        tuple(products), _attention(model, sample, bool(again)) if text else None
    ), weights


def _multiplies(module: nn.Module) -> bool:
    return factors.supported(module) or isinstance(module, nn.Conv2d)


def _repeated(model: Any, products: list[nn.Module]) -> set[int]:
    """The products that gradient checkpointing repeats: a block's, but not its last one, unless
    dropout follows it (torch stops as soon as all has been found again that the backward needs).
    """
    repeated: set[int] = set()
    for block in (module for module in model.modules() if "forward" in vars(module)):
        inside = {id(module) for module in block.modules()}
        calls = [id(module) for module in products if id(module) in inside]
        drops = any(isinstance(module, nn.Dropout) and module.p for module in block.modules())
        repeated |= set(calls if drops else calls[:-1])
    return repeated


def _attention(model: Any, sample: Tensor, again: bool) -> Attention:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Attention(
        config.num_hidden_layers, config.num_attention_heads, head, sample.shape[1], again
    )

"""Named sweeps: one function a table or figure, each a list of Runs; and those of a user's own."""

from __future__ import annotations

from collections.abc import Callable

from commsweep.experiments.config import Run, own, parse, record
from commsweep.experiments.errors import UserError, nearest
from commsweep.experiments.store import Store
from commsweep.sweeps.grid import union
from commsweep.sweeps.papers import adacomp, bias, kfac, local, mst, recipe, rudakov, rudakov_text, unequal

SWEEPS: dict[str, Callable[[], list[Run]]] = {
    "demo": rudakov.demo,
    "digits_core": rudakov.digits_core,
    "smoke": rudakov.smoke,
    "cifar_small": rudakov.cifar_small,
    "cifar_small_jpeg": rudakov.cifar_small_jpeg,
    "resnet18_quantization": rudakov.resnet18_quantization,
    "resnet18_topk": rudakov.resnet18_topk,
    "resnet18_feedback": rudakov.resnet18_feedback,
    "resnet18_aqsgd": rudakov.resnet18_aqsgd,
    "resnet18_paper": rudakov.resnet18_paper,
    "resnet18_corrected": rudakov.resnet18_corrected,
    "resnet18_paper_bf16": rudakov.resnet18_paper_bf16,
    "resnet18_corrected_bf16": rudakov.resnet18_corrected_bf16,
    "resnet18_core_jpeg": rudakov.resnet18_core_jpeg,
    "demo-text": rudakov_text.demo_text,
    "smoke-text": rudakov_text.smoke_text,
    "gpt2_paper": rudakov_text.gpt2_paper,
    "gpt2_paper_bf16": rudakov_text.gpt2_paper_bf16,
    "gpt2_aqsgd": rudakov_text.gpt2_aqsgd,
    "gpt2_matched": rudakov_text.gpt2_matched,
    "wikitext_small": rudakov_text.wikitext_small,
    "finetune": rudakov_text.finetune,
    "text_bias": bias.text_bias,
    "cifar_bias": bias.cifar_bias,
    "cifar_bias_jpeg": bias.cifar_bias_jpeg,
    "smoke-bias": bias.smoke_bias,
    "text_recipe": recipe.text_recipe,
    "cifar_recipe": recipe.cifar_recipe,
    "cifar_recipe_jpeg": recipe.cifar_recipe_jpeg,
    "smoke-recipe": recipe.smoke_recipe,
    "unequal_ratios": unequal.unequal_ratios,
    "demo-gradients": adacomp.demo_gradients,
    "smoke-gradients": adacomp.smoke_gradients,
    "cifar_gradients": adacomp.cifar_gradients,
    "demo-local": local.demo_local,
    "local_methods": local.local_methods,
    "local_tuning": local.local_tuning,
    "smoke-local": local.smoke_local,
    "demo-kfac": kfac.demo_kfac,
    "smoke-kfac": kfac.smoke_kfac,
    "demo-sparse": mst.demo_sparse,
    "sparse-long": mst.sparse_long,
    "smoke-sparse": mst.smoke_sparse,
    "gpt2_mst": mst.gpt2_mst,
}


def sweep(name: str, store: Store | None = None) -> list[Run]:
    """The runs of a sweep: a named one, "my_grid.py:grid" (a function of one's own that returns a list of Runs), or one
    that `store` knows. Raises UserError naming the nearest one."""
    if ":" in name:
        runs = own.call(name, "")
        if not isinstance(runs, (list, tuple)) or not runs or not all(isinstance(run, Run) for run in runs):
            raise UserError(f"'{name}' must return a list of Runs, at least one (see commsweep.sweeps.grid)")
        # Checked again: a copy with other fields was not. Twice the same is one cell.
        return union([parse(record(run)) for run in runs])
    if name.endswith(".py"):
        raise UserError(f"'{name}' names no function: write {name}:FUNCTION, which returns a list of Runs")
    if name not in SWEEPS and store is not None and (store.root / "sweeps" / f"{name}.json").exists():
        return [parse(settings) for settings in store.cells(name).values()]
    if name not in SWEEPS:
        raise UserError(f"unknown sweep '{name}'{nearest(name, SWEEPS, 3)} (all of them: commsweep sweep --help)")
    return SWEEPS[name]()


def label(name: str) -> str:
    """What the store calls a sweep: its name; "my_grid.grid" for "folder/my_grid.py:grid"."""
    module, colon, function = name.partition(":")
    if not colon:
        return name
    return f"{module.removesuffix('.py').replace('/', '.').rpartition('.')[2]}.{function}"

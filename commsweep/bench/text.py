"""`commsweep bench text`: what compression and AQ-SGD's memory cost a step of GPT-2 micro; reading
text.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from commsweep.bench import Result, alternate, compared
from commsweep.boundary.insert import Boundaries
from commsweep.config import Execution, override
from commsweep.config.training import TextModel, TextSet
from commsweep.data import text
from commsweep.models import causal_lm
from commsweep.registry import preset
from commsweep.training import arithmetic
from commsweep.training.run import build
from commsweep.training.tasks import LanguageModelling

TOPK = {
    f"{side}.compressor.{key}": value
    for side in ("fwd", "bwd")
    for key, value in (("kind", "topk"), ("ratio", 0.1), ("scope", "last"))
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk": TOPK,
    "aqsgd": TOPK | {"fwd.feedback.kind": "aqsgd", "fwd.feedback.buffer": "bfloat16"},
}
BATCHES = 8
VOCABULARY = 50257  # GPT-2's


def bench() -> Iterator[Result]:
    """A training step (batch 8, blocks of 256, three boundaries): dense, with TopK, with AQ-SGD's
    mapped buffers.
    """
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: step_of(settings, Path(folder) / name) for name, settings in SETTINGS.items()
        }
        for _ in range(BATCHES):  # AQ-SGD's first visits are dense
            sides["aqsgd"]()
        seconds = alternate(sides, rounds=9, warmup=2)
    for a, b, label in (
        ("topk", "dense", "TopK 10 % per token / dense"),
        ("aqsgd", "topk", "AQ-SGD, mapped bfloat16 buffers / the same TopK without memory"),
    ):
        yield compared(f"GPT-2 micro step, {label}", seconds, a, b, 1.10)
    yield _tokenising()


def step_of(settings: dict[str, Any], folder: Path) -> Callable[[], object]:
    """A function that makes one training step with these settings over eight batches in turn."""
    folder.mkdir()
    run = override(
        preset("sotu_micro"),
        {"data.batch_size": 8, "data.train_blocks": 8 * BATCHES, "data.eval_blocks": 8} | settings,
    )
    built = build(run, Execution("cpu", buffers="mmap"), folder)
    task, boundaries, number = built.task.train(), built.task.components["boundaries"], count()
    optimizer = torch.optim.AdamW(task.parameters(), 1e-4, fused=True)
    batches = list(built.data.train)

    def step() -> None:
        number_now = next(number)
        x, y, samples = batches[number_now % len(batches)]
        boundaries.begin(number_now, samples)
        optimizer.zero_grad()
        task.loss(task.logits(x), y).backward()
        optimizer.step()

    return step


def gpu_step(settings: dict[str, Any], device: str) -> Callable[[], None]:
    """A function that makes one step of `gpt2_scratch` with these settings changed, on made-up
    tokens of GPT-2's vocabulary; four batches in turn.
    """
    run = override(preset("gpt2_scratch"), settings)
    assert isinstance(run.model, TextModel) and isinstance(run.data, TextSet)
    batch, block, target = run.data.batch_size, run.data.block_size, torch.device(device)
    arithmetic.install(run, target)
    torch.manual_seed(0)
    model = causal_lm.build(run.model, VOCABULARY, block, None)
    modules = causal_lm.cut_points(run.model, model)
    shape = torch.Size([block, model.config.hidden_size])
    boundaries = Boundaries(
        {cut: run.links(cut) for cut in modules},
        modules,
        dict.fromkeys(modules, shape),
        batch,
        4 * batch,
        run.seed,
    )
    torch.nn.Module.to(model, target)
    boundaries = boundaries.to(target)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (4, batch, block)).to(target)
    number = count()

    def step() -> None:
        step = next(number)
        boundaries.begin(
            step, torch.arange(step * batch, (step + 1) * batch) % (4 * batch), device=target
        )
        optimizer.zero_grad()
        x = tokens[step % 4]
        with torch.autocast(target.type, torch.bfloat16, enabled=run.precision == "bfloat16"):
            loss = LanguageModelling.loss(model(input_ids=x).logits, x)
        loss.backward()
        optimizer.step()

    return step


def _tokenising() -> Result:
    """Seconds for 10 MB with a byte-level BPE of GPT-2's kind (trained here: no tokenizer is
    fetched).
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Tokenizer

    content = "\n".join(text.documents("sotu", None)["train"])[: 10**7]
    with tempfile.TemporaryDirectory() as folder:
        trained_tokenizer = ByteLevelBPETokenizer()
        trained_tokenizer.train_from_iterator(
            [content[: 10**6]], vocab_size=5000, show_progress=False
        )
        trained_tokenizer.save_model(folder)
        tokenizer = GPT2Tokenizer.from_pretrained(folder)
        cache = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = folder  # nothing is cached here yet
        try:
            started = time.perf_counter()
            tokens = len(text.tokenise(content, tokenizer, "10 MB"))
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if cache is not None:
                os.environ["XDG_CACHE_HOME"] = cache
    seconds = time.perf_counter() - started
    return Result(
        "seconds to tokenise 10 MB", seconds, 15.0, medians={"tokens": tokens, "MB": 10.0}
    )

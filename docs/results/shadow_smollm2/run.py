"""A fine-tuning of SmolLM2-135M in transformers.Trainer, with codecs measured in shadow.

Usage: python run.py WIKITEXT_FOLDER (with wiki.valid.tokens or wiki.valid.raw)

Needs requirements-finetune.txt. Writes the report of the shadow beside this file, and ranking.md:
what the evidence predicts of each codec, beside what it cost a nano GPT-2.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from commsweep.data.pretrained import source
from commsweep.integrations import evidence
from commsweep.integrations.huggingface import ShadowCallback
from commsweep.models.causal_lm import pretrained

HERE = Path(__file__).parent
GROUP = "scale=group,group=128"
# Codecs, and the names of the same in evidence.csv.
GRADIENTS = {
    f"uniform:4,{GROUP},rounding=stochastic": "min-max 4 bit, group scale, stochastic",
    f"uniform:2,{GROUP},rounding=stochastic": "min-max 2 bit, group scale, stochastic",
    f"uniform:4,{GROUP}": "min-max 4 bit, group scale",
    f"uniform:2,{GROUP}": "min-max 2 bit, group scale",
    "uniform:4": "min-max 4 bit",
    "uniform:2": "min-max 2 bit",
    "tern": "TernGrad",
    "qsgd": "QSGD",
    "sign": "sign",
    "topk:0.5": "TopK 50 %",
    "topk:0.1": "TopK 10 %",
    "randomk:0.5": "RandomK 50 % (bwd scaled False)",
}
NEW = ["mxfp4", "mxfp4,rounding=stochastic", "nvfp4", "mxfp8_e4m3"]
ACTIVATIONS = {
    f"uniform:4,{GROUP}": "min-max 4 bit, group scale",
    f"uniform:2,{GROUP}": "min-max 2 bit, group scale",
    "uniform:2": "min-max 2 bit",
    "topk:0.1": "TopK 10 %",
}
PLACES = {"model.layers.9": "activations", "model.layers.19": "activations"}


def main(folder: Path) -> None:
    torch.manual_seed(0)
    loaded = pretrained("smollm2", None)
    # A model of its own: Trainer takes what was read from a GGUF file for a quantized one.
    loaded.config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(loaded.config)
    model.load_state_dict(loaded.state_dict())
    path, options = source("smollm2", None)
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    text = next(folder / f"wiki.valid.{end}" for end in ("tokens", "raw")).read_text()
    ids = torch.tensor(tokenizer(text[:400_000])["input_ids"])
    blocks = ids[: len(ids) // 128 * 128].view(-1, 128)[:160]
    callback = ShadowCallback([*GRADIENTS, *NEW], PLACES, every=10, out=HERE)
    arguments = TrainingArguments(
        output_dir=str(HERE / "trainer"),
        max_steps=40,
        per_device_train_batch_size=4,
        learning_rate=5e-5,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        seed=0,
    )
    data = [{"input_ids": block, "labels": block} for block in blocks]
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
    (HERE / "ranking.md").write_text(ranking(callback.shadow.summary()))


def ranking(summary: list[dict]) -> str:
    """Predicted beside measured, and their rank correlation."""
    with open(evidence.FILE, newline="") as handle:
        lost = {(line["message"], line["method"]): line["lost"] for line in csv.DictReader(handle)}
    parts = []
    for message, names, side in (
        ("activation gradients", GRADIENTS, "gradients"),
        ("activations", ACTIVATIONS, "activations"),
    ):
        lines, pairs = [], []
        for row in sorted(summary, key=lambda row: row["harm"]):
            if row["message"] != message:
                continue
            name = names.get(row["codec"], "")
            measured = lost.get((message, f"{side}: {name}"))
            if measured is not None:
                pairs.append((row["harm"], float(measured)))
            told = "-" if measured is None else f"{float(measured):.3f}"
            numbers = (100 * row["bytes_share"], row["error"], row["bias"], row["harm"])
            cells = "{:.1f} | {:.3f} | {:.3f} | {:.3f}".format(*numbers)
            lines.append(f"| {row['codec']} | {cells} | {told} |")
        parts += [
            f"## {message}",
            "",
            "| codec | bytes % | error | bias | predicted nats | nano GPT-2 lost |",
            "|---|---|---|---|---|---|",
            *lines,
            "",
            correlation(np.array(pairs)),
            "",
        ]
    return "# Codecs on a fine-tuning of SmolLM2-135M, in shadow\n\n" + "\n".join(parts)


def correlation(pairs: np.ndarray) -> str:
    """Of predicted and measured harm, with an interval by bootstrap over codecs."""
    random, draws = np.random.default_rng(0), []
    for _ in range(2000):
        chosen = pairs[random.integers(0, len(pairs), len(pairs))]
        draws.append(spearmanr(chosen[:, 0], chosen[:, 1]).statistic)
    low, high = np.nanquantile(draws, [0.025, 0.975])
    value = spearmanr(pairs[:, 0], pairs[:, 1]).statistic
    return (
        f"Rank correlation of the prediction, from messages of SmolLM2, with the nats that a nano "
        f"GPT-2 lost: {value:.2f} [{low:.2f}, {high:.2f}], {len(pairs)} codecs."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

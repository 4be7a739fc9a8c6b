"""Write a stream folder of random words, for benchmarks that need no real text."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.encoding.mmap_writer import MMapWriter, best_dtype
from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL
from fairseq_alma.core.files import sha256_of


def write_stream(folder: Path, dictionary_size: int, tokens: int, test_tokens: int = 4096) -> Path:
    """Write a stream folder with one mega-batch of random words. Return the folder.

    Args:
        folder: the folder to create.
        dictionary_size: number of words and special symbols. The frequencies of the words follow Zipf's law.
        tokens: number of tokens in the mega-batch.
        test_tokens: number of tokens in the test set.
    """
    generator = np.random.default_rng(0)
    num_words = dictionary_size - NUM_SPECIAL
    share = 1 / np.arange(10, num_words + 10)
    folder.mkdir()
    (folder / "dict.txt").write_text("".join(f"w{number} 1\n" for number in range(num_words)))
    (folder / "tokenizer.json").write_text("{}")
    splits, dtype = {}, best_dtype(dictionary_size)
    for split, wanted in {"mega_batch_1": tokens, "valid": 4096, "test": test_tokens}.items():
        prefix = prefix_of(folder, split)
        prefix.parent.mkdir()
        words = generator.choice(num_words, size=wanted, p=share / share.sum()) + NUM_SPECIAL
        with MMapWriter(prefix, dtype) as writer:
            for document in _documents(words, length=500):
                writer.write(document.astype(dtype), np.array([len(document)]))
        splits[split] = {
            "sequences": -(-wanted // 500),
            "tokens": wanted,
            "words": wanted,
            "sha256": sha256_of(f"{prefix}.bin"),
        }
    description = {
        "format_version": 1,
        "num_mega_batches": 1,
        "dictionary_size": dictionary_size,
        "dtype": dtype,
        "tokenizer": {
            "kind": "none",
            "file": "tokenizer.json",
            "dict_sha256": hashlib.sha256((folder / "dict.txt").read_bytes()).hexdigest(),
        },
        "splits": splits,
    }
    (folder / "stream.json").write_text(json.dumps(description))
    return folder


def _documents(words: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """Yield documents of `length` tokens, cut from the words. The last token of each is the end-of-document token."""
    for start in range(0, len(words), length):
        document = words[start : start + length].copy()
        document[-1] = EOS
        yield document


def prefix_of(stream: Path, split: str) -> Path:
    """Return the path of the files .bin and .idx of a split, without the suffix."""
    return stream / split / ("train" if split.startswith("mega_batch_") else split)

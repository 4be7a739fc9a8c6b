"""Small streams for tests. They are written with fairseq's dataset builder, without data_prep."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from tokenizers import Tokenizer, models, pre_tokenizers

NUM_SPECIALS = 4


def make_stream(
    folder: Path, num_mega_batches: int = 3, num_words: int = 20, tokens: int = 3000, seed: int = 0
) -> Path:
    """Write a stream of random documents and return its folder.

    The documents are sampled from a Markov chain over `num_words` words, so a model can learn to predict them.
    """
    random = np.random.default_rng(seed)
    transition = random.dirichlet(np.full(num_words, 0.15), size=num_words)
    folder.mkdir(parents=True)
    (folder / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(num_words)))
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    splits = {f"mega_batch_{t}": tokens for t in range(1, num_mega_batches + 1)}
    splits |= {"valid": tokens // 4, "test": tokens // 3}
    description = {}
    for split, num_tokens in splits.items():
        prefix = folder / split / ("train" if split.startswith("mega") else split)
        prefix.parent.mkdir()
        builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        total = documents = 0
        while total < num_tokens:
            document = _document(random, transition, length=int(random.integers(20, 60)))
            builder.add_item(torch.tensor([*document, 2]))  # 2 is the end-of-document token
            total += len(document) + 1
            documents += 1
        builder.finalize(f"{prefix}.idx")
        description[split] = {
            "documents": documents,
            "passages": documents,
            "sequences": documents,
            "words": total - documents,
            "tokens": total,
            "bytes": total * 3,
            "sha256": _sha256(prefix.with_suffix(".bin")),
        }
    stream = {
        "format_version": 1,
        "num_mega_batches": num_mega_batches,
        "seed": seed,
        "vocab_size": num_words,
        "dictionary_size": num_words + NUM_SPECIALS,
        "dtype": "uint16",
        "tokenizer": {"kind": "none", "file": "tokenizer.json", "dict_sha256": _sha256(folder / "dict.txt")},
        "sources": [],
        "settings": {},
        "command": "tests.streams.make_stream",
        "splits": description,
    }
    (folder / "stream.json").write_text(json.dumps(stream))
    return folder


def _document(random, transition, length: int) -> list[int]:
    word = int(random.integers(len(transition)))
    words = [word]
    for _ in range(length - 1):
        word = int(random.choice(len(transition), p=transition[word]))
        words.append(word)
    return [w + NUM_SPECIALS for w in words]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

"""The study of growing vocabularies: how symbols are added to a tokenizer, and their embeddings to a checkpoint."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

from data_prep.tokenization.tokenizers import ByteBPE, dictionary_names, dictionary_text
from fairseq_alma.checkpoints import write_checkpoint

SCRIPT = Path(__file__).parents[1] / "results/frontier/vocabulary.py"
EMBEDDINGS = "decoder.embed_tokens.weight"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vocabulary_study", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def byte_tokenizer() -> dict:
    """A tokenizer with one symbol for each byte and no merges."""
    return json.loads(ByteBPE.train_on_counts([], 256))


def divided(tokenizer: dict, text: str) -> list[str]:
    return Tokenizer.from_str(json.dumps(tokenizer)).encode(text).tokens


def test_the_most_frequent_pairs_become_symbols_after_the_old_ones(study):
    """ab occurs 3 + 2 times, bc 3 times. After ab is merged, (ab, c) occurs 3 times."""
    words = {("a", "b", "c"): 3, ("a", "b"): 2, ("x", "y"): 1}
    old = byte_tokenizer()
    grown, pieces = study.grown_tokenizer(old, words, 2)
    assert pieces == {"ab": ["a", "b"], "abc": ["a", "b", "c"]}
    assert {symbol: grown["model"]["vocab"][symbol] for symbol in pieces} == {"ab": 256, "abc": 257}
    assert all(grown["model"]["vocab"][symbol] == index for symbol, index in old["model"]["vocab"].items())
    assert divided(grown, "abcabx") == ["abc", "ab", "x"]
    assert divided(old, "abcab") == ["a", "b", "c", "a", "b"]


def test_pairs_that_occur_once_add_no_symbol(study):
    grown, pieces = study.grown_tokenizer(byte_tokenizer(), {("a", "b"): 1}, 5)
    assert pieces == {} and len(grown["model"]["vocab"]) == 256


def test_equal_neighbours_are_merged_from_left_to_right(study):
    """aaaaa has 4 pairs (a, a), but is divided into aa, aa and a, as BPE does."""
    grown, pieces = study.grown_tokenizer(byte_tokenizer(), {("a",) * 5: 2}, 1)
    assert pieces == {"aa": ["a", "a"]}
    assert divided(grown, "aaaaa") == ["aa", "aa", "a"]


def test_as_many_merges_as_the_library_learns_divide_a_text_as_well(study):
    text = "the cat sat on the mat and the hat of the cat sat there"
    library = Tokenizer.from_str(json.dumps(byte_tokenizer()))
    words = Counter(tuple(word) for word, _ in library.pre_tokenizer.pre_tokenize_str(text))
    grown, pieces = study.grown_tokenizer(byte_tokenizer(), words, 6)
    assert len(pieces) == 6
    # The numbers of tokens, and not the merges, because of pairs that are equally frequent any may be the first.
    assert len(divided(grown, text)) == len(divided(json.loads(ByteBPE.train([text], 256 + 6)), text))


def test_the_embedding_of_a_new_symbol_is_the_mean_of_its_pieces(study, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    grown, pieces = study.grown_tokenizer(byte_tokenizer(), {("a", "b", "c"): 3}, 2)
    for folder, tokenizer in ((old, byte_tokenizer()), (new, grown)):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        symbols = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
        (folder / "dict.txt").write_text(dictionary_text(dictionary_names(symbols)))
    weights = torch.arange(264 * 2, dtype=torch.float32).view(264, 2)
    extra_state = {"AlmaLanguageModelingTask": {"dict_sha256": "of the old stream"}}
    write_checkpoint({"model": {EMBEDDINGS: weights}, "extra_state": extra_state}, tmp_path / "old.pt")
    study.grow_checkpoint(tmp_path / "old.pt", old, new, pieces, tmp_path / "new.pt")
    stored = torch.load(tmp_path / "new.pt", weights_only=True)
    result = stored["model"][EMBEDDINGS]
    assert result[:260].equal(weights[:260])  # four special symbols and 256 bytes
    ids = [4 + byte_tokenizer()["model"]["vocab"][letter] for letter in "abc"]
    first, both = pieces  # "ab" and "abc", or "bc" and "abc"
    used = ids[:2] if first == "ab" else ids[1:]
    assert result[260].equal(weights[used].mean(0)) and both == "abc"
    assert result[261].equal(weights[ids].mean(0))
    assert stored["extra_state"]["AlmaLanguageModelingTask"]["dict_sha256"] != "of the old stream"

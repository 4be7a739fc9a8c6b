"""Each file that is given with --tokenizer is used, or refused with one line that says what to give instead."""

import json
import os

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data_prep.errors import PrepError
from data_prep.tokenization.given import check_tokenizer, given_tokenizer
from data_prep.tokenization.tokenizers import (
    AnyTokenizer,
    ByteBPE,
    SentencePiece,
    load_tokenizer,
)


def described(model=None) -> dict:
    content = json.loads(Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).to_str())
    return content | ({"model": model} if model else {})


WORDS = {"type": "WordLevel", "unk_token": "[UNK]"}
UNUSABLE = {
    "config": ({"tokenizer_class": "GPT2"}, 'has no entry "model".*tokenizer_config.json'),
    "vocab": ({"a": 0, "model": 1}, 'has no entry "model"'),
    "list": ([1], 'has no entry "model"'),
    "empty": (described(WORDS | {"vocab": {}}), "has no symbols"),
    "same id": (described(WORDS | {"vocab": {"a": 0, "b": 0, "[UNK]": 1}}), "'a' and 'b'|'b' and 'a'"),
    "gap": (described(WORDS | {"vocab": {"a": 0, "[UNK]": 10**9}}), "largest id is 1,000,000,000, but it has only 2"),
    "text id": (described(WORDS | {"vocab": {"a": "0"}}), "cannot load it"),
    "no merges": (described({"type": "BPE", "vocab": {"a": 0}}), "cannot load it"),
    "no unknown": (described({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}), "set unk_token"),
    "unigram": (described({"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}), "set unk_token"),
    "long words": (
        described({
            "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": {"a": 0},
            "max_input_chars_per_word": 10**6,
        }),
        "max_input_chars_per_word",
    ),
}  # fmt: skip


@pytest.mark.parametrize("content,message", UNUSABLE.values(), ids=UNUSABLE)
def test_a_json_file_that_cannot_be_used_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "given.json").write_text(json.dumps(content))
    with pytest.raises(PrepError, match=message) as error:
        given_tokenizer(str(tmp_path / "given.json"))
    assert "\n" not in str(error.value)


def test_a_symbol_that_is_twice_in_the_file_is_named(tmp_path):
    (tmp_path / "given.json").write_text(json.dumps(described()).replace('"a": 0', '"a": 0, "a": 2'))
    with pytest.raises(PrepError, match="contains 'a' twice"):
        given_tokenizer(str(tmp_path / "given.json"))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_a_tokenizer_json_of_another_encoding_is_stored_as_utf_8(tmp_path, encoding):
    (tmp_path / "given.json").write_bytes(json.dumps(described(), ensure_ascii=False).encode(encoding))
    name, content = given_tokenizer(str(tmp_path / "given.json"))
    assert name == "tokenizer.json" and json.loads(content.decode("utf-8")) == described()


def test_a_folder_with_one_tokenizer_file_can_be_given(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(json.dumps(described()))
    check_tokenizer(str(tmp_path))
    assert json.loads(given_tokenizer(str(tmp_path))[1]) == described()
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "spiece.model").write_bytes(SentencePiece.train(iter(["the end of the stream"] * 50), 280))
    assert given_tokenizer(str(tmp_path))[0] == SentencePiece.file_name
    (tmp_path / "other.model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several .model files: other.model, spiece.model"):
        check_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"IQ== 0\nIg== 1\n", "half"])
def test_a_model_file_that_is_not_of_sentencepiece_is_refused(tmp_path, content):
    if content == "half":
        content = SentencePiece.train(iter(["the end of the stream"] * 50), 280)[:2000]
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(PrepError, match=r"not a sentencepiece model, or is damaged.*tokenizer.json"):
        given_tokenizer(str(tmp_path / "tokenizer.model"))


@pytest.mark.parametrize("name", ["tokenizer.json", "a.model"])
def test_a_named_pipe_is_refused_and_not_opened(tmp_path, name):
    os.mkfifo(tmp_path / name)
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=r"has no tokenizer.json, no .model|is neither a .json file nor a .model"):
            check_tokenizer(str(given))


def test_ids_without_a_symbol_have_a_name(tmp_path):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 3}, "merges": []}
    cutting = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described(model) | {"pre_tokenizer": cutting}))
    assert load_tokenizer(tmp_path / "tokenizer.json").symbols() == ["a", "unused-id-1", "unused-id-2", "b"]


def test_tokens_are_not_dropped_at_random(tmp_path):
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    Tokenizer(models.BPE(vocabulary, [("a", "b")], dropout=0.9)).save(str(tmp_path / "tokenizer.json"))
    assert AnyTokenizer(tmp_path / "tokenizer.json").encode(["ab"] * 50)[49].tolist() == [2]


def test_a_post_processor_adds_no_tokens_to_the_words(tmp_path):
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="! $A !", special_tokens=[("!", alphabet["!"])])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    used = load_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(used, ByteBPE)
    assert used.encode(["ab c"])[0].tolist() == [alphabet[letter] for letter in "abĠc"]

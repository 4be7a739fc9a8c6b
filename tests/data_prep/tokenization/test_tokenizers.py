import random
from pathlib import Path

import pytest

from data_prep.errors import PrepError
from data_prep.tokenization.tokenizers import TOKENIZERS, ByteBPE, SentencePiece

TEXTS = ["the stream of the expert\n\nthe router 1984\n", "  the\tgrowing of   the stream, the end.\r\n"] * 50


@pytest.fixture(scope="module")
def byte_bpe(tmp_path_factory) -> ByteBPE:
    file = tmp_path_factory.mktemp("byte_bpe") / ByteBPE.file_name
    file.write_bytes(ByteBPE.train(iter(TEXTS), 300))
    return ByteBPE(file)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> SentencePiece:
    file = tmp_path_factory.mktemp("sentencepiece") / SentencePiece.file_name
    file.write_bytes(SentencePiece.train(iter(TEXTS), 300))
    return SentencePiece(file)


def odd_texts(alphabet: list[str], count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(alphabet, k=rng.randrange(30))) for _ in range(count)]


SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]
LETTERS = [
    *"abthe'sdm10²é٣.,-_\u2581",
    "'s",
    "'ll",
    " the",
    "単",
    "😀",
    "\0",
    "\u200b",
    "\ufeff",
    "\u0301",
    "\u180e",
]


@pytest.mark.parametrize("alphabet", [LETTERS + SPACES, LETTERS + [" "] * 20, [" ", "\n", "a"]])
def test_byte_bpe_is_lossless_and_its_shortcut_gives_the_ids_of_the_library(byte_bpe, alphabet):
    texts = odd_texts(alphabet, 3000)
    ids = [encoded.tolist() for encoded in byte_bpe.encode(texts)]
    assert [byte_bpe.decode(encoded) for encoded in ids] == texts
    assert ids == [encoding.ids for encoding in byte_bpe._tokenizer.encode_batch(texts)]


def test_byte_bpe_knows_every_byte_and_learns_the_commonest_pair_first():
    # In "abab abab" ab stands four times, and after it is joined abab and " abab".
    content = ByteBPE.train(iter(["abab abab"]), 258).decode()
    assert '"merges":[["a","b"],["ab","ab"]]' in content


def test_byte_bpe_of_little_text_has_fewer_symbols(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(ByteBPE.train(iter(["ab ab"]), 5000))
    # 256 bytes, then ab and Ġab.
    assert ByteBPE(tmp_path / "tokenizer.json").symbols()[256:] == ["ab", "Ġab"]


def test_sentencepiece_keeps_white_space_and_unknown_letters(sentencepiece):
    texts = ["  the\n\n\n a\tb ", "\n", "単語 😀 \u00a0\u3000x\r\n", "</s> <s> <unk> <pad>"]
    texts += odd_texts([letter for letter in LETTERS + SPACES if letter != "\u2581"], 1000)
    assert [sentencepiece.decode(ids.tolist()) for ids in sentencepiece.encode(texts)] == texts


def test_no_sentencepiece_symbol_reaches_over_a_line_end(sentencepiece):
    assert [symbol for symbol in sentencepiece.symbols() if "\n" in symbol] == ["\n"]


def test_sentencepiece_trains_on_lines_beyond_its_default_limit(tmp_path):
    # The default skips lines above 4192 bytes; here there is nothing else.
    (tmp_path / "sentencepiece.model").write_bytes(SentencePiece.train(iter(["zebra quagga " * 1000] * 2), 290))
    assert "\u2581zebra" in SentencePiece(tmp_path / "sentencepiece.model").symbols()


def test_sentencepiece_says_how_many_symbols_the_text_can_give():
    with pytest.raises(PrepError, match=r"cannot make 9000 symbols.*<= \d+.*--vocab-size"):
        SentencePiece.train(iter(TEXTS), 9000)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_training_twice_gives_the_same_file(kind):
    assert TOKENIZERS[kind].train(iter(TEXTS), 300) == TOKENIZERS[kind].train(iter(TEXTS), 300)


def test_real_books_come_back_exactly(byte_bpe, shared_data):
    text = Path(shared_data, "books", "homer_the_iliad.md").read_text(encoding="utf-8")[:100_000]
    assert byte_bpe.decode(byte_bpe.encode([text])[0].tolist()) == text

"""The time for one long text without white space grows like its length, and not like the square of it."""

import random
import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from data_prep.tokenization.losses import losses
from data_prep.tokenization.tokenizers import MAX_WORD_LETTERS, TOKENIZERS, ByteBPE, SentencePiece, load_tokenizer
from data_prep.tokenization.word_counts import MAX_TRAINING_WORD_BYTES, count_words

TEXTS = ["the stream of the expert", "acg tca gat tac", "a1 b2 c3"] * 50


def word(kind: str, num_letters: int) -> str:
    """Return a text without white space: random letters, one letter, or many short words of GPT-2."""
    if kind == "dna":
        return "".join(random.Random(1).choices("acgt", k=num_letters))
    return ("a" if kind == "same" else "a1") * (num_letters // (1 if kind == "same" else 2))


def check_growth(run, num_letters: int, kind: str = "dna") -> None:
    """Check that a text that is four times as long takes less than nine times as long (the square: 16 times)."""
    seconds = []
    for letters in (num_letters, 4 * num_letters):
        text = word(kind, letters)
        start = time.process_time()
        run(text)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 9 * seconds[0] + 0.5


@pytest.mark.parametrize("kind", ["dna", "same", "words"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_training(name, kind):
    check_growth(lambda text: TOKENIZERS[name].train(iter([*TEXTS, text]), 285), 50_000, kind)


@pytest.mark.parametrize("kind", ["dna", "same", "words"])
def test_counting_words(kind):
    check_growth(lambda text: count_words([text]), 200_000, kind)


@pytest.fixture(params=["byte-bpe", "sentencepiece", "BPE", "WordPiece", "Unigram"])
def tokenizer(request, tmp_path):
    if request.param in TOKENIZERS:
        kind = TOKENIZERS[request.param]
        (tmp_path / kind.file_name).write_bytes(kind.train(iter(TEXTS), 285))
        return load_tokenizer(tmp_path / kind.file_name)
    letters = "acgt1"
    vocabulary = {"?": 0} | {letter: number for number, letter in enumerate(letters, start=1)} | {"ac": 6, "##a": 7}
    model = {
        "BPE": lambda: models.BPE(vocabulary, [("a", "c")], unk_token="?"),
        "WordPiece": lambda: models.WordPiece(vocabulary, unk_token="?"),
        "Unigram": lambda: models.Unigram([("?", 0.0), *((letter, -1.0) for letter in letters)], unk_id=0),
    }[request.param]()
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["dna", "same", "words"])
def test_encoding_and_counting_the_losses(tokenizer, kind):
    check_growth(lambda text: losses(tokenizer, [text], tokenizer.encode([text])), 100_000, kind)


def test_a_long_word_is_counted_in_pieces_and_reported():
    long = "a" * (2 * MAX_TRAINING_WORD_BYTES + 3)
    counts = count_words([f"the {long} end", long])
    # " aaa..." is a letter longer than "aaa...".
    full = "a" * MAX_TRAINING_WORD_BYTES
    assert counts == {"the": 1, "Ġ" + full[1:]: 1, full: 3, "aaaa": 1, "aaa": 1, "Ġend": 1}
    assert (counts.num_divided, counts.longest) == (2, len(long) + 1)


def test_words_up_to_the_limit_stay_whole():
    counts = count_words(["é" * (MAX_TRAINING_WORD_BYTES // 2)])
    assert list(counts.values()) == [1] and counts.num_divided == 0


@pytest.mark.parametrize("letter", ["a", "é", "漢", "😀", "a1", " "])
def test_a_text_that_byte_bpe_divides_comes_back_exactly(tmp_path, letter):
    (tmp_path / ByteBPE.file_name).write_bytes(ByteBPE.train(iter(TEXTS), 285))
    tokenizer = ByteBPE(tmp_path / ByteBPE.file_name)
    texts = ["the " + letter * (MAX_WORD_LETTERS + 5) + " end", "the end"]
    ids = tokenizer.encode(texts)
    assert tokenizer.decode_all([each.tolist() for each in ids]) == texts
    assert ids[1].tolist() == tokenizer.encode(["the end"])[0].tolist()


def test_sentencepiece_learns_from_a_text_without_white_space(tmp_path):
    model = SentencePiece.train(iter([*TEXTS, "zebra" * 50_000]), 295)
    (tmp_path / SentencePiece.file_name).write_bytes(model)
    assert any("zebra" in symbol for symbol in SentencePiece(tmp_path / SentencePiece.file_name).symbols())

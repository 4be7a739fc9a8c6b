"""Tokenizers: train one, load it from its file, encode many passages at once.

Both kinds that can be trained give the same bytes on every machine, whatever the number of threads.
"""

import io
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from data_prep.errors import PrepError, Unworkable


class Tokenizer(Protocol):
    """A kind of tokenizer that can be trained: text becomes ids 0..V-1. An instance is loaded from a file."""

    file_name: ClassVar[str]
    """Name of the file in a stream folder."""
    smallest_vocab_size: ClassVar[int]
    max_training_words: ClassVar[int | None]
    """The most words that it can be trained on: of more text an even sample is used. None: no limit."""

    @staticmethod
    def train(texts: Iterator[str], vocab_size: int) -> bytes:
        """Return the content of the file of a tokenizer trained on these texts."""
        ...

    def __init__(self, file: Path): ...

    def symbols(self) -> list[str]:
        """Return the symbols in the order of their ids."""
        ...

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids."""
        ...


# The places where GPT-2's regular expression always cuts a text: before the space that starts a word, and around other
# white space. It never looks beyond these places, so that a word has the same ids wherever it occurs. White space is
# Unicode's, as in the tokenizer library; Python's \\s includes four more control characters.
_SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
WORD = re.compile(f" ?[^{_SPACE}]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+")
MAX_KNOWN_WORDS = 1 << 18
"""Number of words whose ids are kept. With more, all are dropped."""
MAX_KNOWN_LETTERS = 64
"""The ids of longer words are not kept."""


class ByteBPE:
    """A byte-level BPE as in GPT-2, which the paper uses. Lossless: `decode` returns any encoded text exactly."""

    file_name: ClassVar[str] = "tokenizer.json"
    smallest_vocab_size: ClassVar[int] = 256  # every byte has a symbol
    max_training_words: ClassVar[int | None] = None  # the trainer keeps only distinct words in memory

    @staticmethod
    def train(texts: Iterator[str], vocab_size: int) -> bytes:
        """Return the content of tokenizer.json. It has fewer than `vocab_size` symbols if there is too little text."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return tokenizer.to_str(pretty=False).encode("utf-8")

    def __init__(self, file: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        # A given file may ask for these. They would be applied to every single word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._known: dict[str, list[int]] = {}

    def symbols(self) -> list[str]:
        """Return the symbols in the order of their ids."""
        index_of = self._tokenizer.get_vocab()
        return sorted(index_of, key=index_of.__getitem__)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32. A word is encoded once and then looked up: about three times as fast."""
        words_of_texts = [WORD.findall(text) for text in texts]
        new = list(set(itertools.chain.from_iterable(words_of_texts)) - self._known.keys())
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._known.update((word, encoding.ids) for word, encoding in zip(new, encodings, strict=True))
        look_up = self._known.__getitem__
        ids = [np.fromiter(itertools.chain.from_iterable(map(look_up, words)), np.int32) for words in words_of_texts]
        if len(self._known) > MAX_KNOWN_WORDS:
            self._known.clear()
        for word in new:
            if len(word) > MAX_KNOWN_LETTERS:
                self._known.pop(word, None)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SentencePiece:
    """A sentencepiece BPE with byte fallback: no text gives an unknown token. Spaces and line ends are kept.

    Not quite lossless: a U+2581 in the text comes back as a space, for which sentencepiece uses this character.
    """

    file_name: ClassVar[str] = "sentencepiece.model"
    smallest_vocab_size: ClassVar[int] = 259  # <unk>, the line end, 256 bytes, and one letter
    max_training_words: ClassVar[int | None] = 50_000_000  # the trainer holds its text in memory

    @staticmethod
    def train(texts: Iterator[str], vocab_size: int) -> bytes:
        """Return the content of the model file.

        Raises:
            Unworkable: the text gives fewer symbols than `vocab_size`, or needs more.
        """
        import sentencepiece

        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=texts,
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                byte_fallback=True,
                # `decode` must return the text: do not normalise or trim it, and do not add a space in front.
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                # A symbol of its own, so that no other symbol contains a line end.
                user_defined_symbols=["\n"],
                # fairseq adds <s>, <pad> and </s>.
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                # sentencepiece silently drops longer texts. Its default is 4192 bytes; this is its maximum.
                max_sentence_length=2**30,
                # The number is written into the model file, so it must not depend on the machine.
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = str(error).rpartition("] ")[2].strip()
            raise Unworkable(
                f"sentencepiece cannot make {vocab_size} symbols from the training text: {reason} "
                "Change --vocab-size accordingly, or add sources."
            ) from error
        return model.getvalue()

    def __init__(self, file: Path):
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(file))

    def symbols(self) -> list[str]:
        """Return the symbols in the order of their ids."""
        return [self._processor.id_to_piece(index) for index in range(self._processor.vocab_size())]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32."""
        return self._processor.encode(texts, return_type="numpy", num_threads=1)

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids."""
        return self._processor.decode(ids)


class AnyTokenizer:
    """Any tokenizer.json of the `tokenizers` library. Whether it is lossless depends on the file."""

    file_name: ClassVar[str] = "tokenizer.json"

    def __init__(self, file: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def symbols(self) -> list[str]:
        """Return the symbols in the order of their ids. An id without a symbol gets the name `unused-id-N`."""
        by_id = {index: symbol for symbol, index in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        return [by_id.get(index, f"unused-id-{index}") for index in range(max(by_id) + 1)]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


TOKENIZERS: dict[str, type[Tokenizer]] = {"byte-bpe": ByteBPE, "sentencepiece": SentencePiece}
"""The tokenizers that can be trained, by name."""


def load_tokenizer(file: Path) -> "ByteBPE | SentencePiece | AnyTokenizer":
    """Load the tokenizer of a stream from its file. The class depends on the content of the file."""
    if file.name == SentencePiece.file_name:
        return SentencePiece(file)
    return ByteBPE(file) if _is_byte_bpe(json.loads(file.read_text(encoding="utf-8"))) else AnyTokenizer(file)


def _is_byte_bpe(described: dict) -> bool:
    """Return True if words can be encoded one by one: the file cuts text as GPT-2 does, and changes nothing else."""
    cutting = described.get("pre_tokenizer") or {}
    model = described.get("model") or {}
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not described.get("normalizer")
        and not described.get("added_tokens")
        and cutting.get("type") == "ByteLevel"
        and cutting.get("use_regex") is True
        and cutting.get("add_prefix_space") is False
    )


GPT2_FILES = ("encoder.json", "vocab.bpe")


def check_tokenizer(name: str) -> None:
    """Raise ValueError unless `name` is a tokenizer that can be trained, or the path of one (or of GPT-2's folder)."""
    if name in TOKENIZERS:
        return
    path = Path(name)
    if path.is_dir() or path.name in GPT2_FILES:
        folder = path if path.is_dir() else path.parent
        missing = [file for file in GPT2_FILES if not (folder / file).is_file()]
        if missing:
            raise ValueError(f"tokenizer={name}: {folder} has no {' and no '.join(missing)}, which belong together")
        return
    known = f"use one of {', '.join(TOKENIZERS)}, or the path of a tokenizer.json, a .model, or GPT-2's vocab.bpe"
    if not path.is_file():
        raise ValueError(f"tokenizer={name} is unknown, and there is no such file: {known}")
    if path.suffix not in (".json", ".model"):
        raise ValueError(f"tokenizer={name} is neither a .json nor a .model: {known}")


def given_tokenizer(name: str) -> tuple[str, bytes]:
    """Read a trained tokenizer.

    Args:
        name: the path of its file, or of GPT-2's folder.

    Returns:
        The name of its file in a stream folder, and the content of the file.

    Raises:
        PrepError: it cannot be read.
    """
    path = Path(name)
    try:
        if path.suffix == ".model":
            import sentencepiece

            sentencepiece.SentencePieceProcessor(model_file=name)
            return SentencePiece.file_name, path.read_bytes()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        if path.is_dir() or path.name in GPT2_FILES:
            folder = path if path.is_dir() else path.parent
            model = models.BPE.from_file(*(str(folder / file) for file in GPT2_FILES))
            tokenizer = Tokenizer(model)
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            tokenizer.decoder = decoders.ByteLevel()
            return ByteBPE.file_name, tokenizer.to_str(pretty=False).encode("utf-8")
        Tokenizer.from_file(name)
        return AnyTokenizer.file_name, path.read_bytes()
    except Exception as error:  # each of the two libraries raises errors of its own
        raise PrepError(f"the tokenizer {name} cannot be read: {error}") from error

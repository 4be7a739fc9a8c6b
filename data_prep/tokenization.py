"""Text to token ids: training a tokenizer, loading it, encoding many passages at once.

Both tokenizers give the same bytes on every machine, whatever the number of threads.
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
    """A way of turning text into ids 0..V-1. Instances are loaded from the file that `train` returned."""

    file_name: ClassVar[str]
    smallest_vocab_size: ClassVar[int]
    max_training_words: ClassVar[int | None]
    """More text than this is thinned out evenly before training, whatever is asked for; None: no limit of its own."""

    @staticmethod
    def train(texts: Iterator[str], vocab_size: int) -> bytes: ...
    def __init__(self, file: Path): ...
    def pieces(self) -> list[str]: ...
    def encode(self, texts: list[str]) -> list[np.ndarray]: ...
    def decode(self, ids: list[int]) -> str: ...


# Where GPT-2's regular expression certainly cuts a text: before the space that starts a word, and around other white
# space. It never looks beyond such a piece, so that a piece has the same ids wherever it stands. The white space is
# Unicode's, as the tokenizer library's; Python's \\s has four control characters more.
_SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
WORD = re.compile(f" ?[^{_SPACE}]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+")
MAX_KNOWN_WORDS = 1 << 18
MAX_KNOWN_LETTERS = 64


class ByteBPE:
    """Byte-level BPE as GPT-2's, the paper's choice. Lossless: any text comes back exactly."""

    file_name: ClassVar[str] = "tokenizer.json"
    smallest_vocab_size: ClassVar[int] = 256  # every byte has a symbol
    max_training_words: ClassVar[int | None] = None  # only the distinct words are kept in memory

    @staticmethod
    def train(texts: Iterator[str], vocab_size: int) -> bytes:
        """The tokenizer file. With too little text for `vocab_size` symbols it has fewer; the caller says so."""
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
        # What a given file asks for would be done to every word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._known: dict[str, list[int]] = {}

    def pieces(self) -> list[str]:
        """The symbols in the order of their ids."""
        index_of = self._tokenizer.get_vocab()
        return sorted(index_of, key=index_of.__getitem__)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int32. Words are encoded once and then looked up: about three times as fast."""
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
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class SentencePiece:
    """A sentencepiece BPE with byte fallback: no unknown token. Spaces and line ends are kept.

    Not quite lossless: a U+2581 in the text, which is how it writes a space, comes back as a space.
    """

    file_name: ClassVar[str] = "sentencepiece.model"
    smallest_vocab_size: ClassVar[int] = 259  # <unk>, the line end, every byte, and a letter to begin with
    max_training_words: ClassVar[int | None] = 50_000_000  # the trainer holds its text in memory

    @staticmethod
    def train(texts: Iterator[str], vocab_size: int) -> bytes:
        """The model file. Raises Unworkable if the text gives fewer symbols, or needs more, than `vocab_size`."""
        import sentencepiece

        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=texts,
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                byte_fallback=True,
                # What comes in must come out: nothing normalised, nothing trimmed, no space put in front.
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                # A piece of its own, so that no piece reaches over a line end.
                user_defined_symbols=["\n"],
                # <s>, <pad> and </s> are fairseq's.
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                # Longer texts would be dropped without a word; the default is 4192 bytes. This is its maximum.
                max_sentence_length=2**30,
                # Written into the model file, so it must not follow the machine.
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = str(error).rpartition("] ")[2].strip()
            raise Unworkable(
                f"sentencepiece cannot make {vocab_size} symbols of the training text: {reason} "
                "Change --vocab-size accordingly, or add sources."
            ) from error
        return model.getvalue()

    def __init__(self, file: Path):
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(file))

    def pieces(self) -> list[str]:
        """The symbols in the order of their ids."""
        return [self._processor.id_to_piece(index) for index in range(self._processor.vocab_size())]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int32."""
        return self._processor.encode(texts, return_type="numpy", num_threads=1)

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


class AnyTokenizer:
    """A tokenizer.json of the `tokenizers` library, whatever is in it. Lossless or not as its makers made it."""

    file_name: ClassVar[str] = "tokenizer.json"

    def __init__(self, file: Path):
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def pieces(self) -> list[str]:
        """The symbols in the order of their ids; ids that no symbol has get a name that text cannot give."""
        by_id = {index: piece for piece, index in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        return [by_id.get(index, f"unused-id-{index}") for index in range(max(by_id) + 1)]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int32."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


TOKENIZERS: dict[str, type[Tokenizer]] = {"byte-bpe": ByteBPE, "sentencepiece": SentencePiece}
"""Those that can be trained."""


def load_tokenizer(file: Path) -> "ByteBPE | SentencePiece | AnyTokenizer":
    """The tokenizer in a file of a stream folder, by what is in the file."""
    if file.name == SentencePiece.file_name:
        return SentencePiece(file)
    return ByteBPE(file) if _is_byte_bpe(json.loads(file.read_text(encoding="utf-8"))) else AnyTokenizer(file)


def _is_byte_bpe(described: dict) -> bool:
    """Whether words can be looked up one by one: GPT-2's cutting of the text, and nothing before or after it."""
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
    """Raises ValueError unless it is one that can be trained, or the file (or GPT-2's folder) of one."""
    if name in TOKENIZERS:
        return
    path = Path(name)
    if path.is_dir() or path.name in GPT2_FILES:
        folder = path if path.is_dir() else path.parent
        missing = [file for file in GPT2_FILES if not (folder / file).is_file()]
        if missing:
            raise ValueError(f"tokenizer={name}: {folder} has no {' and no '.join(missing)}, which go together")
        return
    known = f"use one of {', '.join(TOKENIZERS)}, or the path of a tokenizer.json, a .model, or GPT-2's vocab.bpe"
    if not path.is_file():
        raise ValueError(f"tokenizer={name} is unknown, and no such file is there: {known}")
    if path.suffix not in (".json", ".model"):
        raise ValueError(f"tokenizer={name} is neither a .json nor a .model: {known}")


def given_tokenizer(name: str) -> tuple[str, bytes]:
    """The file of a tokenizer that is there already: its name in the stream folder, and its content.

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
    except Exception as error:  # two libraries, each with errors of its own kinds
        raise PrepError(f"the tokenizer {name} cannot be read: {error}") from error

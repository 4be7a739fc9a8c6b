"""Tokenizers: train a tokenizer, load it from its file, write its dict.txt, and encode many passages at once.

On the same text, training gives a file with the same bytes on every machine, regardless of the number of threads.
"""

import functools
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from data_prep.errors import Unworkable
from data_prep.tokenization.word_counts import SEPARATOR, count_words, gpt2_words, split_words, texts_with_counts

PAD = 1
"""The fairseq id of <pad>, which stands for text that alma-forget has masked."""
EOS = 2
"""The fairseq id of </s>, the symbol that ends a sequence."""
NUM_SPECIAL = 4
"""Number of fairseq's special symbols <s>, <pad>, </s> and <unk>. Their ids are 0 to 3. dict.txt does not list them."""
MULTIPLE = 8
"""fairseq adds unused symbols to a dictionary until its size is a multiple of this number, for fast matrix products."""

_FAIRSEQ_SPECIAL = {"<s>", "<pad>", "</s>", "<unk>"}


def dictionary_size(num_symbols: int) -> int:
    """Return the size of a tokenizer's fairseq dictionary, including fairseq's special symbols and padding entries.

    Args:
        num_symbols: number of symbols of the tokenizer.
    """
    return -(-(NUM_SPECIAL + num_symbols) // MULTIPLE) * MULTIPLE  # -(-a // b) is a / b, rounded up


def dictionary_names(symbols: list[str]) -> list[str]:
    """Return a name for each symbol and padding entry (unused symbol) of dict.txt.

    fairseq needs unique names without white space.

    Each white space character in a symbol is replaced by its code, such as <U+000A>. If an earlier symbol or one of
    fairseq's four special symbols already has the resulting name, `#` and the symbol's position in this list are
    appended. The names do not affect decoded text, because text is decoded from ids.
    """
    num_padding = dictionary_size(len(symbols)) - NUM_SPECIAL - len(symbols)
    # Padding entries are unused symbols that make the dictionary size a multiple of MULTIPLE. Use fairseq's names.
    padding = [f"madeupword{number:04d}" for number in range(num_padding)]
    taken, names = set(_FAIRSEQ_SPECIAL), []
    for number, symbol in enumerate(symbols + padding):
        name = "".join(f"<U+{ord(char):04X}>" if char.isspace() else char for char in symbol)
        while name in taken:
            name = f"{name}#{number}"
        taken.add(name)
        names.append(name)
    return names


def dictionary_text(names: list[str]) -> str:
    """Return the content of dict.txt, with a line `name count` for each symbol. `names` are sorted by id.

    fairseq needs a count, but does not use it here. It is always 1, so that the dictionary depends on the tokenizer
    only, and not on the text of a stream.
    """
    return "".join(f"{name} 1\n" for name in names)


if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer


class Tokenizer(ABC):
    """Maps text to token ids. An instance is loaded from the file of the tokenizer."""

    file_name: ClassVar[str]
    """Name of the tokenizer file in a stream folder."""
    is_lossless: bool
    """True if `decode` surely restores the text, so that no text can be lost."""
    unknown_id: int
    """Id of the symbol for unknown text; -1: there is none."""
    unknown_in_text: str = ""
    """Name of this symbol, if the tokenizer also uses the symbol where a text contains its name; else ""."""

    @abstractmethod
    def __init__(self, file: Path): ...

    @abstractmethod
    def symbols(self) -> list[str]:
        """Return all symbols of the vocabulary, sorted by id. An id without a symbol has the name `unused-id-N`."""

    @abstractmethod
    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, int32."""

    def decode(self, ids: list[int]) -> str:
        """Decode token ids and return the text."""
        return self.decode_all([ids])[0]

    @abstractmethod
    def decode_all(self, ids: list[list[int]]) -> list[str]:
        """Decode the token ids of several texts."""


MAX_KNOWN_WORDS = 1 << 18
"""Maximum number of words whose token ids ByteBPE caches. When the cache has more words, it is emptied."""
MAX_KNOWN_BYTES = 64
"""ByteBPE caches a word only if it has at most this many bytes."""
MAX_WORD_LETTERS = 1 << 18
"""ByteBPE divides a word that has more letters (a text without white space), because the tokenizers library needs 300
bytes of memory for each token of a text."""


class AnyTokenizer(Tokenizer):
    """A tokenizer from any tokenizer.json of the `tokenizers` library.

    Whether `decode` restores the exact text depends on the settings in this file.
    """

    file_name: ClassVar[str] = "tokenizer.json"

    def __init__(self, file: Path):
        from tokenizers import Tokenizer, decoders

        self._tokenizer = Tokenizer.from_file(str(file))
        described = json.loads(self._tokenizer.to_str())
        # Disable what the tokenizer file may request: truncation, padding, and tokens that are dropped at random.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if described["model"].get("dropout"):
            self._tokenizer.model.dropout = None
        if described["decoder"] is None and '"ByteLevel"' in json.dumps(described["pre_tokenizer"]):
            self._tokenizer.decoder = decoders.ByteLevel()
        elif (described["decoder"] or {}).get("cleanup"):
            self._tokenizer.decoder.cleanup = False  # it turns "do not" into "don't"
        self.unknown_id = _unknown_id(described["model"], self._tokenizer)
        added = [token["content"] for token in described["added_tokens"] if token["id"] == self.unknown_id]
        self.unknown_in_text = added[0] if added else ""
        self.is_lossless = _is_byte_level(described)

    def described(self) -> dict:
        """Return the content of a tokenizer.json with which the `tokenizers` library encodes and decodes as this."""
        return json.loads(self._tokenizer.to_str())

    def symbols(self) -> list[str]:
        by_id = {index: symbol for symbol, index in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        return [by_id.get(index, f"unused-id-{index}") for index in range(max(by_id) + 1)]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode_all(self, ids: list[list[int]]) -> list[str]:
        return self._tokenizer.decode_batch(ids, skip_special_tokens=False)


def _unknown_id(model: dict, tokenizer: "LibraryTokenizer") -> int:
    """Return the id of the unknown symbol of a tokenizer.json, or -1. `model` is the entry "model" of the file."""
    if model.get("unk_id") is not None:
        return model["unk_id"]
    found = tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    return -1 if found is None else found


def _is_byte_level(described: dict) -> bool:
    """Return True if a tokenizer.json is a byte-level BPE that has a symbol for each byte and does not change text."""
    from tokenizers.pre_tokenizers import ByteLevel

    model, cutting = described["model"], described["pre_tokenizer"] or {}
    steps = cutting.get("pretokenizers", [cutting])
    kinds = [step.get("type") for step in steps]
    keeps_text = [
        not step["add_prefix_space"] if step.get("type") == "ByteLevel" else step.get("behavior") == "Isolated"
        for step in steps
    ]
    # Some symbols, such as the <mask> of RoBERTa, take the white space beside them.
    keeps_text += [not token["lstrip"] and not token["rstrip"] for token in described["added_tokens"]]
    decoding = described["decoder"] or {"type": "ByteLevel"}  # as in `AnyTokenizer`
    return (
        model["type"] == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not described["normalizer"]
        and "ByteLevel" in kinds
        and decoding["type"] == "ByteLevel"
        and all(keeps_text)
        and set(ByteLevel.alphabet()) <= model["vocab"].keys()
    )


class ByteBPE(AnyTokenizer):
    """A byte-level BPE tokenizer like GPT-2's, as used in the paper. Lossless: `decode` restores the exact text."""

    # A smaller vocabulary is not possible, because each of the 256 byte values needs a symbol.
    smallest_vocab_size = 256
    # No limit is needed, because the trainer stores equal words only once (with their number of occurrences).
    max_training_words: int | None = None

    @staticmethod
    def train(texts: Iterator[str], vocab_size: int) -> bytes:
        """Train on texts and return the content of tokenizer.json.

        If there is too little text, the tokenizer has fewer than `vocab_size` symbols.
        """
        return ByteBPE.train_on_counts(count_words(texts).items(), vocab_size)

    @staticmethod
    def train_on_counts(counts: Iterable[tuple[str, int]], vocab_size: int) -> bytes:
        """Train on counted words, see `word_counts`, and return the content of tokenizer.json."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(SEPARATOR)
        tokenizer.train_from_iterator(texts_with_counts(counts), trainer)
        tokenizer.pre_tokenizer = gpt2_words()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer.to_str(pretty=False).encode("utf-8")

    def __init__(self, file: Path):
        super().__init__(file)
        self._known: dict[bytes, bytes] = {}  # the token ids of words, int32. They make `encode` several times as fast

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        words = split_words(texts)
        new = [word for word in words.different if word not in self._known]
        self._known.update(zip(new, self._ids_of([word.decode("utf-8") for word in new]), strict=True))
        ids_of_words = [self._known[word] for word in words.different]
        num_ids = np.fromiter(map(len, ids_of_words), np.int64, len(ids_of_words)) // 4
        starts = (np.cumsum(num_ids) - num_ids)[words.numbers]
        num_ids = num_ids[words.numbers]
        ends = np.cumsum(num_ids)
        # Position i of the result belongs to the word that begins at `ends` - `num_ids`. Its id is at `starts`, plus i,
        # minus this beginning.
        places = np.repeat(starts - ends + num_ids, num_ids) + np.arange(num_ids.sum())
        ids = np.frombuffer(b"".join(ids_of_words), np.int32)[places]
        for word in new:
            if len(word) > MAX_KNOWN_BYTES:
                del self._known[word]
        if len(self._known) > MAX_KNOWN_WORDS:
            self._known.clear()
        return np.split(ids, np.append(0, ends)[words.ends[:-1]]) if texts else []

    def _ids_of(self, words: list[str]) -> Iterator[bytes]:
        """Yield the token ids of each word, int32. Words of more than MAX_WORD_LETTERS letters are divided."""
        short = [word if len(word) <= MAX_WORD_LETTERS else "" for word in words]
        for word, ids in zip(words, super().encode(short), strict=True):
            starts = range(0, len(word), MAX_WORD_LETTERS) if len(word) > MAX_WORD_LETTERS else ()
            pieces = [super(ByteBPE, self).encode([word[start : start + MAX_WORD_LETTERS]])[0] for start in starts]
            yield b"".join(piece.tobytes() for piece in pieces or [ids])


class SentencePiece(Tokenizer):
    """A sentencepiece BPE tokenizer with byte fallback, so there are no unknown tokens. It keeps spaces and line ends.

    The tokenizer is not quite lossless: `decode` turns the character U+2581 into a space, because sentencepiece uses
    this character to represent spaces.
    """

    file_name: ClassVar[str] = "sentencepiece.model"
    is_lossless = False
    # A smaller vocabulary is not possible, because <unk>, the line end, each of the 256 byte values, and at least one
    # character of the text need a symbol.
    smallest_vocab_size = 259
    # The number is limited, because the trainer keeps the complete training text in memory.
    max_training_words: int | None = 50_000_000

    @staticmethod
    def train(texts: Iterator[str], vocab_size: int) -> bytes:
        """Train on texts and return the content of the model file.

        Raises:
            Unworkable: if the text is too small to give `vocab_size` symbols, or has more different characters than fit
                into `vocab_size` symbols.
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
                # Do not normalise or trim the text or add a space in front, because `decode` must restore the
                # original text.
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                # Make the line end a separate symbol, so that no other symbol contains a line end.
                user_defined_symbols=["\n"],
                # Disable <s>, </s> and <pad> with the id -1, because fairseq adds these symbols.
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                # Set the maximum possible value, because sentencepiece silently drops texts longer than this limit,
                # whose default is 4192 bytes.
                max_sentence_length=2**30,
                # Use a fixed number of threads, because sentencepiece writes the number into the model file, which must
                # not depend on the machine.
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
        self.unknown_id = self._processor.unk_id()

    def symbols(self) -> list[str]:
        return [self._processor.id_to_piece(index) for index in range(self._processor.vocab_size())]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return self._processor.encode(texts, return_type="numpy", num_threads=1)

    def decode_all(self, ids: list[list[int]]) -> list[str]:
        return self._processor.decode(ids) if ids else []


TOKENIZERS: dict[str, type[ByteBPE] | type[SentencePiece]] = {"byte-bpe": ByteBPE, "sentencepiece": SentencePiece}
"""Mapping from a value of --tokenizer to the class of the tokenizer, for all tokenizers that alma-prep can train.

Each has `smallest_vocab_size`, and `max_training_words`: if the training text has more words, `make_tokenizer` uses a
random sample of passages."""


def load_tokenizer(file: Path) -> Tokenizer:
    """Load a stream's tokenizer from its file. The class depends on the name and content of the file."""
    if file.name == SentencePiece.file_name:
        return SentencePiece(file)
    return ByteBPE(file) if _is_byte_bpe(json.loads(file.read_text(encoding="utf-8"))) else AnyTokenizer(file)


def _is_byte_bpe(described: dict) -> bool:
    """Return True if ByteBPE can be used for this tokenizer.

    ByteBPE encodes words one by one. This gives the correct ids only for a BPE tokenizer that splits text like GPT-2
    and does not change the text.
    """
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


@functools.lru_cache(maxsize=1)  # cached, because a worker does many tasks with one tokenizer
def cached_tokenizer(file: str, sha256: str) -> Tokenizer:
    """Load a tokenizer from a file, or return it from the cache if the file with this digest was loaded last."""
    return load_tokenizer(Path(file))

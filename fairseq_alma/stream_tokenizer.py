"""The tokenizer of a stream, with the ids of fairseq's dictionary."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, AnyTokenizer, SentencePiece, dictionary_names
from data_prep.tokenization.tokenizers import load_tokenizer as load_file
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_description import STREAM_FILE, read_description
from fairseq_alma.core.stream_folder import check_tokenizer_files


class StreamTokenizer:
    """Converts between text and the ids of a model. These are the ids of the tokenizer's file plus 4, because fairseq's
    dictionary begins with <s>, <pad>, </s> and <unk>.

    Args:
        folder: a stream folder, or another folder with its dict.txt and its tokenizer.json or sentencepiece.model. The
            text of the stream is not needed.

    Raises:
        StreamError: if a file is missing or damaged, or if the two files do not belong together.
    """

    eos = EOS
    """Id of </s>, the end of a document. A model has seen it before each document, so a text begins after it."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder).absolute()
        """The folder."""
        if (self.path / STREAM_FILE).is_file():
            check_tokenizer_files(self.path, read_description(self.path))
        dictionary = self.path / "dict.txt"
        names = (AnyTokenizer.file_name, SentencePiece.file_name)
        file = next((self.path / name for name in names if (self.path / name).is_file()), None)
        if file is None or not dictionary.is_file():
            raise StreamError(
                f"{self.path} has no {'dict.txt' if file else ' and no '.join(names)}: give the stream folder with "
                f"which the model was trained, or a folder with copies of its dict.txt and tokenizer file"
            )
        self.file = file
        """The file of the tokenizer."""
        try:
            self._tokenizer = load_file(file)
            tokens = self._tokenizer.symbols()
        except Exception as error:
            # Catch all exceptions, because the libraries raise exceptions of no common type for a damaged file.
            raise StreamError(f"{file} cannot be read ({error}): restore it from the stream folder") from error
        # Divide at line feeds only, because other characters that end a line may be part of a symbol.
        lines = dictionary.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
        expected = dictionary_names(tokens)
        if [line.rpartition(" ")[0] for line in lines] != expected:
            raise StreamError(
                f"{dictionary} does not list the symbols of {file}: give a folder in which both files are from one "
                f"stream"
            )
        self.symbols = ["<s>", "<pad>", "</s>", "<unk>", *expected]
        """Name of each id in dict.txt. It has no white space."""
        self.token_ids = range(NUM_SPECIAL, NUM_SPECIAL + len(tokens))
        """The ids that stand for text. The others are special symbols, and unused ones at the end of dict.txt."""
        self.dictionary_digest = sha256_of(dictionary)
        """SHA-256 digest of dict.txt."""

    @property
    def dictionary_size(self) -> int:
        """Number of ids, V."""
        return len(self.symbols)

    @cached_property
    def id_of(self) -> dict[str, int]:
        """The id of each name in `symbols`."""
        return {name: index for index, name in enumerate(self.symbols)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without </s>. A half of a surrogate pair becomes `?`, as in `alma-prep`."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        return (self._tokenizer.encode([text])[0] + NUM_SPECIAL).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Ids that are not in `token_ids` have no text."""
        return self._tokenizer.decode([int(index) - NUM_SPECIAL for index in ids if index in self.token_ids])

"""Read the tokenizer that the user gives with --tokenizer. A file that cannot be used is refused in one line."""

import json
from collections import Counter
from pathlib import Path

from data_prep.errors import PrepError
from data_prep.tokenization.tokenizers import TOKENIZERS, AnyTokenizer, SentencePiece
from fairseq_alma.core.errors import SettingError

GPT2_FILES = ("encoder.json", "vocab.bpe")
_GIVE = (
    "Give the path of a tokenizer.json (of the tokenizers library), of a sentencepiece .model, of a folder with one of "
    "them, or of GPT-2's vocab.bpe"
)
_MAX_UNUSED_IDS = 100_000
"""Maximum number of ids below the largest id that have no symbol. Each needs an entry in dict.txt."""
_MAX_WORDPIECE_LETTERS = 1_000
"""Maximum of max_input_chars_per_word. The time of WordPiece grows with the third power of the length of a word."""


def check_tokenizer(name: str) -> None:
    """Raise SettingError if `name` is not a valid value of --tokenizer.

    Valid values are the keys of TOKENIZERS, the path of a tokenizer file, and the path of a folder that contains a
    tokenizer file or GPT-2's tokenizer files (GPT2_FILES).
    """
    if name not in TOKENIZERS:
        _found_file(name)


def _found_file(name: str) -> Path:
    """Return the tokenizer file that a value of --tokenizer names; for GPT-2's tokenizer, the folder of its files."""
    path = Path(name)
    if not path.exists():
        raise SettingError(
            f"tokenizer={name} is not a known tokenizer, and there is no such file: use one of "
            f"{', '.join(TOKENIZERS)}. {_GIVE}"
        )
    folder = path if path.is_dir() else path.parent
    missing = [file for file in GPT2_FILES if not (folder / file).is_file()]
    if (path.is_dir() or path.name in GPT2_FILES) and not missing:
        return folder
    if path.name in GPT2_FILES:
        raise SettingError(
            f"tokenizer={name}: {folder} has no {' and no '.join(missing)}. The folder of GPT-2's tokenizer must "
            f"contain {' and '.join(GPT2_FILES)}"
        )
    if path.is_dir():
        known = [path / AnyTokenizer.file_name], sorted(path.glob("*.model"))
        found = next(filter(None, ([file for file in files if file.is_file()] for files in known)), [])
        if len(found) == 1:
            return found[0]
        several = f" has several .model files: {', '.join(file.name for file in found)}" if found else ""
        none = f" has no {AnyTokenizer.file_name}, no .model, and has no {' and no '.join(missing)}"
        raise SettingError(f"tokenizer={name}: the folder{several or none}. {_GIVE}")
    if path.suffix not in (".json", ".model") or not path.is_file():  # for example a named pipe
        raise SettingError(f"tokenizer={name} is neither a .json file nor a .model file. {_GIVE}")
    return path


def given_tokenizer(name: str) -> tuple[str, bytes]:
    """Read the tokenizer that the user gives with --tokenizer, and check that it can be used.

    Args:
        name: path of the tokenizer file, or of a folder, see `check_tokenizer`.

    Returns:
        The name that the tokenizer file gets in a stream folder, and its content.

    Raises:
        PrepError: if the tokenizer cannot be read or used.
    """
    try:
        path = _found_file(name)
        if path.suffix == ".model":
            return SentencePiece.file_name, _checked_model(path.read_bytes())
        return AnyTokenizer.file_name, _gpt2_json(path) if path.is_dir() else _checked_json(path.read_bytes())
    except Exception as error:
        # Catch all exceptions, because each library raises other exception types if it cannot read a file.
        raise PrepError(f"the tokenizer {name} cannot be read: {' '.join(str(error).split())}") from error


def _checked_model(content: bytes) -> bytes:
    """Return the content of a sentencepiece model, or raise an exception if it is damaged or of another format."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        num_symbols = processor.load_from_serialized_proto(content) and processor.vocab_size()
    except RuntimeError:
        num_symbols = 0
    if not num_symbols:
        raise ValueError(
            "it is not a sentencepiece model, or is damaged. If it is a file of tiktoken, like tokenizer.model of "
            "Llama 3, give the tokenizer.json of the same language model"
        )
    return content


def _gpt2_json(folder: Path) -> bytes:
    """Return the content of tokenizer.json for the folder of GPT-2's tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(*(str(folder / file) for file in GPT2_FILES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return _checked_json(tokenizer.to_str(pretty=False).encode("utf-8"))


def _checked_json(content: bytes) -> bytes:
    """Return the content of a tokenizer.json in UTF-8, or raise an exception if the tokenizer cannot be used."""
    from tokenizers import Tokenizer

    encoding = json.detect_encoding(content)  # UTF-8, UTF-16 or UTF-32, with or without a mark at the start
    text = content.decode(encoding)
    try:
        described = json.loads(text, object_pairs_hook=_without_repeated_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not complete JSON ({error}). {_GIVE}") from error
    if not isinstance(described, dict) or not isinstance(described.get("model"), dict):
        raise ValueError(
            'it has no entry "model", so it is not a tokenizer.json of the tokenizers library (in the folder of a '
            f"language model, tokenizer_config.json, vocab.json and config.json are other files). {_GIVE}"
        )
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        raise ValueError(f"the tokenizers library cannot load it ({error}). Save it again with this library") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError("its vocabulary has no symbols. Train it again")
    by_id: dict[int, str] = {}
    for symbol, index in vocabulary.items():
        if by_id.setdefault(index, symbol) != symbol:
            raise ValueError(f"its symbols {by_id[index]!r} and {symbol!r} have the same id {index}. Correct the file")
    if max(by_id) - len(by_id) >= _MAX_UNUSED_IDS:
        raise ValueError(f"its largest id is {max(by_id):,}, but it has only {len(by_id):,} symbols. Correct the file")
    if described["model"].get("max_input_chars_per_word", 0) > _MAX_WORDPIECE_LETTERS:
        raise ValueError(
            f"its max_input_chars_per_word is more than {_MAX_WORDPIECE_LETTERS:,}, with which encoding takes too "
            "long. Set it to 100, the usual value"
        )
    try:
        tokenizer.encode("\U0010fffd", add_special_tokens=False)  # a character that is surely in no vocabulary
    except Exception as error:
        raise ValueError(
            f"it stops at text that it does not know ({error}): set unk_token (for Unigram, unk_id) of its model to "
            "one of its symbols"
        ) from error
    return content if encoding == "utf-8" else text.encode("utf-8")


def _without_repeated_keys(pairs: list[tuple[str, object]]) -> dict:
    """Return the object of a JSON file. Raise ValueError if a key, such as a symbol of a vocabulary, occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"it contains {repeated!r} twice. Correct the file")
    return found

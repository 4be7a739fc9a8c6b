"""Read documents from a file of the user, and score them together."""

from pathlib import Path

import numpy as np

from data_prep.compression import DamagedFile, open_plain, plain_name
from fairseq_alma.api import LanguagePredictor, TextScore
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import parse_json
from fairseq_alma.core.json_lines import JSON_LINES
from fairseq_alma.core.stream_description import STREAM_FILE, read_description


def read_documents(path: Path, name: str, stream: Path) -> list[str]:
    """Return the documents in a file, which may be compressed, as alma-prep reads it.

    If the name ends with .jsonl, .ndjson or .json, each line is a JSON object with a document in the field that
    alma-prep has read for the stream (`--text-field`), by default "text". Any other file is one document. A byte order
    mark at the beginning is no text.

    Args:
        path: the file.
        name: how the user has named it, for messages, for example "--text FILE".
        stream: the stream folder, or a folder of alma-deploy.

    Raises:
        SettingError: if the file cannot be read, is not text in UTF-8, has a line without the field, or has no text.
    """
    plain = plain_name(path.name)
    try:
        if plain == path.name:
            content = path.read_bytes()
        else:
            with open_plain(path) as file:
                content = file.read()
        text = content.decode("utf-8-sig")  # with its line ends, which count as bytes
    except (OSError, DamagedFile) as error:
        raise SettingError(f"{name} cannot be read ({error}): give another file") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"{name} is not text in UTF-8 ({error}): convert it") from error
    documents = [text]
    if plain.lower().endswith(JSON_LINES):
        field = "text"
        if (stream / STREAM_FILE).is_file():
            field = read_description(stream).get("settings", {}).get("text_field", field)
        lines = enumerate(text.split("\n"), start=1)
        documents = [_document_in(line, field, f"{name}, line {number}") for number, line in lines if line.strip()]
    if not any(documents):
        raise SettingError(f"{name} contains no text: give another file")
    return [one for one in documents if one]


def _document_in(line: str, field: str, where: str) -> str:
    """Return the document in a line of JSON. Raise SettingError if there is none; `where` is for the message."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise SettingError(
            f"{where} is not JSON ({error}): a file with this ending needs a JSON object in each line"
        ) from error
    if not isinstance(row, dict):
        raise SettingError(f"{where} is not a JSON object: a file with this ending needs one in each line")
    if field not in row:
        raise SettingError(f"{where} has no field {field!r}, only {', '.join(row) or 'none'}: rename the field")
    if not isinstance(row[field], str):
        raise SettingError(f"{where}: the field {field!r} is not a text: leave the line out")
    return row[field]


def score_documents(predictor: LanguagePredictor, documents: list[str]) -> TextScore:
    """Return the score of all documents together, with the </s> at the end of each."""
    scores = predictor.score(documents, end_of_document=True)
    return TextScore(np.concatenate([one.nats for one in scores]), sum(one.num_bytes for one in scores))

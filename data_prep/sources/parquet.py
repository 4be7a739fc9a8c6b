"""Read Parquet and Arrow files. Each row is one document: the text in the column that the option `text_field` names.

Arrow files are files in the stream format, as the library datasets writes them, or in the file format (Feather 2).

The functions of this module run in the child process (see `bounded`), because a file of some kilobytes can make the
library allocate gigabytes, and what its metadata say about sizes can be wrong.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data_prep.compression import BOMB_FLOOR_BYTES, BOMB_RATIO, DamagedFile
from data_prep.sources.base import MAX_DOCUMENT_BYTES, Part, Skipped, SkippedUnits
from data_prep.sources.rows import NO_TEXT, TOO_LONG, date_field, first_of, id_fields, is_missing

if TYPE_CHECKING:
    import pyarrow

_MAX_ROWS = 16
"""Maximum number of rows read at a time. The number is small, because a row may decompress to 16 MiB or more."""
_ROWS_BYTES = 16 << 20
"""Fewer rows are read at a time if _MAX_ROWS rows of average length have more than _ROWS_BYTES bytes."""
_BUFFER_BYTES = 1 << 20
"""Number of compressed bytes read at a time from a column. Without a buffer, pyarrow reads a column of a row group at
once, which may have gigabytes."""
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The bytes with which an Arrow stream ends."""
_ANSWER_BYTES = 1 << 20
"""Number of bytes of text that are sent to the parent process at a time."""


def documents(part: Part) -> Iterator[list[tuple[str, str, str] | Skipped]]:
    """Yield lists of the documents in a file, each as (text, id, date). At the end, yield what was skipped.

    Documents are yielded as plain tuples, because a message to the parent process with objects takes longer.
    """
    found: list[tuple[str, str, str] | Skipped] = []
    num_bytes = total_bytes = 0
    bad = SkippedUnits(part.name, "row")
    most_bytes = BOMB_FLOOR_BYTES + BOMB_RATIO * part.end
    try:
        for document in _rows(part, bad, most_bytes):
            found.append(document)
            num_bytes += len(document[0])
            if num_bytes >= _ANSWER_BYTES:
                total_bytes += num_bytes
                if total_bytes > most_bytes:
                    raise DamagedFile(_bomb(total_bytes))
                yield found
                found, num_bytes = [], 0
    except DamagedFile as error:
        found.append(Skipped(part.name, str(error)))
    except MemoryError:  # `bounded` reports it
        raise
    except Exception as error:  # catch all: pyarrow raises many types of errors
        if "launch worker thread" in str(error):  # a thread needs memory
            raise MemoryError from error
        reason = str(error).partition("\n")[0][:200]
        name = "Parquet" if _is_parquet(part) else "Arrow"
        found.append(Skipped(part.name, f"damaged: not readable as {name} ({reason})"))
    yield [*found, *bad]


def _rows(part: Part, bad: SkippedUnits, most_bytes: int) -> Iterator[tuple[str, str, str]]:
    """Yield the document in each row, as (text, id, date)."""
    import pyarrow

    # Use malloc. Arrow's own allocators reserve memory in advance, and print warnings when the limit is reached.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    pyarrow.set_cpu_count(1)  # the stack of a thread counts as memory
    pyarrow.set_io_thread_count(1)
    field, number = part.option("text_field"), 0
    for batch in _parquet_batches(part, most_bytes) if _is_parquet(part) else _arrow_batches(part):
        more = [name for name in batch.schema.names if name != field]
        for index, value in enumerate(batch.column(field)):
            text = _text_of(value, field, number, bad)
            if text:
                row = {name: _value_of(batch.column(name)[index]) for name in more}
                identity = first_of(row, id_fields(part)) or f"{part.name}:{number}"
                yield text, identity, date_field(row, part)
            number += 1


def _is_parquet(part: Part) -> bool:
    return part.name.lower().endswith(".parquet")


def _columns(part: Part, names: list[str]) -> list[str]:
    """Return the columns to read, first that with the text. `names` are the columns of the file."""
    field = part.option("text_field")
    if field not in names:
        raise DamagedFile(f"no column '{field}': the columns are {', '.join(names)}")
    return [field, *sorted({*id_fields(part), part.option("date_field")}.intersection(names) - {field})]


def _parquet_batches(part: Part, most_bytes: int) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the rows of a Parquet file, some at a time."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(part.path, buffer_size=_BUFFER_BYTES) as file:
        columns = _columns(part, file.schema_arrow.names)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        if file.metadata.num_rows != sum(group.num_rows for group in groups):
            raise DamagedFile("damaged: the numbers of rows in the metadata do not agree")
        chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
        wanted = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
        total_bytes = sum(chunk.total_uncompressed_size for chunk in wanted)
        if total_bytes > most_bytes:
            raise DamagedFile(_bomb(total_bytes))
        num_rows = max(1, min(_MAX_ROWS, _ROWS_BYTES * file.metadata.num_rows // max(1, total_bytes)))
        num_read = 0
        for batch in file.iter_batches(batch_size=num_rows, columns=columns, use_threads=False):
            num_read += len(batch)
            yield batch
        # pyarrow passes over pages whose header says that they are of another kind.
        if num_read != file.metadata.num_rows:
            raise DamagedFile(f"damaged: only {num_read:,} of {file.metadata.num_rows:,} rows can be read")


def _arrow_batches(part: Part) -> Iterator["pyarrow.RecordBatch"]:
    """Yield the rows of an Arrow file, some at a time.

    The file is mapped into memory, because a batch may have gigabytes. Only compressed columns are copied.
    """
    import pyarrow

    with pyarrow.memory_map(part.path) as file:
        is_stream = file.read(6) != b"ARROW1"
        open_file = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
        file.seek(0)
        names = open_file(file).schema.names
        chosen = [names.index(name) for name in _columns(part, names)]
        file.seek(0)
        reader = open_file(file, options=pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=chosen))
        for batch in reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)):
            # Reading a value of a damaged batch could read other memory.
            for column in batch.columns:
                try:
                    column.validate(full=True)
                except pyarrow.ArrowInvalid as error:
                    # UTF-8 is checked last, and such a row is counted by itself.
                    if "UTF8" not in str(error):
                        raise
            yield batch
        reader_end = file.tell()
        # pyarrow does not notice a stream that is cut short between two batches, or ends early because of zero bytes.
        file.seek(max(0, part.end - len(_STREAM_END)))
        if is_stream and (reader_end != part.end or file.read() != _STREAM_END):
            raise DamagedFile("damaged: the Arrow stream does not end with the file")


def _bomb(num_bytes: int) -> str:
    """Return the reason for skipping a file that decompresses to `num_bytes` bytes or more."""
    return (
        f"the file is a decompression bomb: its text has at least {num_bytes:,} bytes, which is more than {BOMB_RATIO} "
        f"times its size and more than {BOMB_FLOOR_BYTES >> 20} MiB"
    )


def _text_of(value: Any, field: str, number: int, bad: SkippedUnits) -> str:
    """Return the text in the row `number`. Count the row in `bad` and return "" if it has no text or too much."""
    try:
        text = value.as_py()
        if isinstance(text, bytes):  # some programs write text without saying that it is text
            text = text.decode("utf-8")
    except UnicodeDecodeError:
        bad.add("not valid UTF-8", number)
        return ""
    except (ValueError, OverflowError):  # for example, the value is a date that Python cannot represent
        text = value
    if is_missing(text) or (isinstance(text, str) and (not text or text.isspace())):
        bad.drop(NO_TEXT)
    elif not isinstance(text, str):
        bad.add(f"the column '{field}' is not text", number, f"it is {value.type}")
    elif len(text) > MAX_DOCUMENT_BYTES:
        bad.add(TOO_LONG, number)
    else:
        return text
    return ""


def _value_of(value: Any) -> object:
    """Return a value of a Parquet column as a Python object.

    A date or time that Python cannot represent, such as one with nanoseconds, is returned as Arrow's text for it, and
    another such value as None.
    """
    from pyarrow import string, timestamp, types

    if types.is_timestamp(value.type) and value.type.unit == "ns" and value.is_valid:
        # pyarrow would return an object of pandas, if that is installed.
        if value.value % 1000:
            return value.cast(string()).as_py()
        value = value.cast(timestamp("us", value.type.tz))
    try:
        found = value.as_py()
        return found.decode("utf-8") if isinstance(found, bytes) else found
    except UnicodeDecodeError:
        return None
    except (ValueError, OverflowError):
        is_date = types.is_timestamp(value.type) or types.is_date(value.type)
        return value.cast(string()).as_py() if is_date else None

"""The list of the tasks of a step: one file, from which a worker reads its task without reading the tasks before it.

The file begins with a table. Line n of the table is the position in bytes of task n, in a fixed number of digits. After
the table, each line describes one task. A worker reads two places of the file, however many tasks there are.

The file is replaced as a whole, so that a worker never reads a table and descriptions that do not belong together.
"""

from collections.abc import Sequence
from pathlib import Path

from data_prep.errors import PrepError
from fairseq_alma.core.files import written_aside

_NAME = "tasks.txt"
_DIGITS = 15
_ROW = _DIGITS + 1


def write_tasks(folder: Path, descriptions: Sequence[str]) -> None:
    """Write the list of tasks of the step in `folder`. A file with the same content is not written again.

    Args:
        folder: the folder of the step.
        descriptions: one line for each task.
    """
    path = folder / _NAME
    lines = [f"{description}\n".encode() for description in descriptions]
    position = _ROW * len(lines)
    rows = []
    for line in lines:
        rows.append(f"{position:0{_DIGITS}d}\n".encode())
        position += len(line)
    content = b"".join(rows + lines)
    if not path.is_file() or path.stat().st_size != len(content) or path.read_bytes() != content:
        with written_aside(path, durable=False) as temporary:
            temporary.write_bytes(content)


def read_task(folder: Path, number: int) -> str:
    """Return the description of task `number` of the step in `folder`.

    Raises:
        PrepError: if the list has no such task.
    """
    with open(folder / _NAME, "rb") as file:
        # The first description begins where the table ends.
        table_bytes = int(file.read(_ROW) or 0)
        if not 0 <= number * _ROW < table_bytes:
            raise PrepError(
                f"{folder / _NAME} lists {table_bytes // _ROW} tasks, so it has no task {number}. Run the same command "
                "again."
            )
        file.seek(number * _ROW)
        file.seek(int(file.read(_ROW)))
        return file.readline().decode()


def read_all_tasks(folder: Path) -> list[str]:
    """Return the descriptions of all tasks of the step in `folder`.

    Raises:
        OSError: if there is no list.
        ValueError: if the list is damaged.
    """
    with open(folder / _NAME, "rb") as file:
        table_bytes = int(file.read(_ROW) or 0)
        file.seek(table_bytes)
        return file.read().decode().splitlines()

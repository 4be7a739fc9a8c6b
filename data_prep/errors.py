"""Exceptions whose messages alma-prep prints for its user."""

import errno

from fairseq_alma.core.errors import AlmaError


class PrepError(AlmaError):
    """An error whose message says what was found, what was expected and what to do.

    The command alma-prep prints the message and exits with code 2.
    """


class Unworkable(PrepError):  # noqa: N818, the name needs no suffix
    """An error for settings that do not fit the text of the sources, for example because there is too little text.

    alma-prep keeps the text that it has read in its work folder, so that the next call with other settings can use it.
    """


class NothingNew(PrepError):  # noqa: N818, the name needs no suffix
    """The sources of an extension contain only copies of documents that the stream has, so there is nothing to add.

    `alma-prep --extend` prints the message and exits with code 0: a scheduled job may give the same files again.
    """


class Passing(PrepError):  # noqa: N818, the name needs no suffix
    """An error whose cause may pass, for example a server that does not answer or a machine without free memory.

    On a cluster, the task is tried again, because another attempt or another node may succeed. On one machine, it ends
    the run as every PrepError does.
    """


def is_full_disk(error: BaseException) -> bool:
    """Return True if an error says that a disk is full, or that the user may not store more."""
    if not isinstance(error, OSError):
        return False
    # NumPy raises an error without a number if it can write only a part of an array.
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or (error.errno is None and str(error).endswith(" written"))

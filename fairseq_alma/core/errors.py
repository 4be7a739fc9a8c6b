"""Errors that the user can fix. Commands print the error message without a traceback."""

import errno
from os import fsdecode

_PERMISSIONS = "fix the permissions or attributes of the file or of its folder"
ADVICE = {
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EROFS: "choose a folder on a file system that is not read-only",
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space, because your disk quota is used up",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "end other programs, because all of them together have too many open files",
    errno.EIO: "check the disk",
    errno.EEXIST: "remove this file or broken link, or choose another name",
    errno.ENOTDIR: "choose another folder, because a part of this path is a file",
    errno.ELOOP: "remove one of the links, which form a loop",
    errno.ENAMETOOLONG: "choose shorter names",
}
"""Number of an error of the operating system -> what the user can do."""


class AlmaError(Exception):
    """An error that the user can fix. The message says what was found, what was expected and what to do."""


class SettingError(AlmaError, ValueError):
    """A setting or a combination of settings is invalid."""


class StreamError(AlmaError):
    """A stream folder is missing or damaged, has an unsupported format, or does not contain the expected stream."""


class RunError(AlmaError):
    """A run folder cannot be used, because it contains a different run, is damaged, or is in use by another process."""


class StageError(AlmaError):
    """The training of a stage ended without a result."""


class StoppedError(StageError):
    """The training of a stage was stopped by SIGTERM, for example by Slurm. It can be continued."""


def message_of(error: Exception) -> str:
    """Return the message of an error for the user; for one of the operating system: cause, file and what to do."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    file = f": {fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
    advice = f"{ADVICE[error.errno]}, then run the same command again" if error.errno in ADVICE else "check the path"
    return f"{error.strerror}{file}: {advice}"

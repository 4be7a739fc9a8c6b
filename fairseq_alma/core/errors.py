"""Errors that the user can fix. Commands print the error message without a traceback."""


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

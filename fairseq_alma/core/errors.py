"""Errors that talk to the person who must fix them. A command prints them as one message, no traceback."""


class AlmaError(Exception):
    """Something the user can mend: the message says what was found, what was wanted and what to run."""


class SettingError(AlmaError, ValueError):
    """A setting, or a combination of settings, that cannot be run."""


class StreamError(AlmaError):
    """A stream folder that is missing, damaged, of another format, or not the one it should be."""


class RunError(AlmaError):
    """A run folder that cannot be used as asked: other settings, damaged, or held by another process."""


class StageError(AlmaError):
    """A stage whose training ended without its result."""

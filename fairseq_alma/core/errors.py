"""Errors that the user can fix. Commands print their message without a traceback."""


class AlmaError(Exception):
    """An error that the user can fix. The message says what was found, what was expected and what to do."""


class SettingError(AlmaError, ValueError):
    """A setting, or a combination of settings, that cannot be used."""


class StreamError(AlmaError):
    """A stream folder that is missing, damaged, has another format, or is not the expected one."""


class RunError(AlmaError):
    """A run folder that cannot be used: it has other settings, is damaged, or another process holds it."""


class StageError(AlmaError):
    """A stage whose training ended without a result."""

"""The errors that alma-prep reports to its user."""

from fairseq_alma.core.errors import AlmaError


class PrepError(AlmaError):
    """An error that says what was found, what was expected and what to do. The command prints it and exits with 2."""


class Unworkable(PrepError):  # noqa: N818, an adjective describes it better
    """An error of settings that cannot work on this text. Unfinished work cannot be resumed and is removed."""

"""The errors of alma-prep that are meant for the person at the keyboard."""

from fairseq_alma.core.errors import AlmaError


class PrepError(AlmaError):
    """What was found, what was wanted, what to do. The command prints it on stderr and exits with 2."""


class Unworkable(PrepError):  # noqa: N818, an adjective says it
    """These settings cannot work on this text: what was done for them is of no use, and is removed."""

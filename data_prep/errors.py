"""The one error of alma-prep that is meant for the person at the keyboard."""

from fairseq_alma.core.errors import AlmaError


class PrepError(AlmaError):
    """What was found, what was wanted, what to do. The command prints it on stderr and exits with 2."""

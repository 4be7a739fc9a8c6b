"""Exceptions whose messages alma-prep prints for its user."""

from fairseq_alma.core.errors import AlmaError


class PrepError(AlmaError):
    """An error whose message says what was found, what was expected and what to do.

    The command alma-prep prints the message and exits with code 2.
    """


class Unworkable(PrepError):  # noqa: N818, the name needs no suffix
    """An error for settings that cannot work on the text of the sources, for example because there is too little text.

    The unfinished work is removed, because no later call of alma-prep could continue from it.
    """

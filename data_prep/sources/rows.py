"""What JSON lines and the rows of tables have in common: fields with the text, the name and the date of a document."""

import datetime
import math

from data_prep.sources.base import MAX_DOCUMENT_BYTES, Part

TOO_LONG = f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB"
NO_TEXT = "no text"
"""The reason for which objects and rows without text are skipped: a null, a missing value, an empty or a blank text."""


def is_missing(value: object) -> bool:
    """Return True for a null, and for NaN, as pandas writes a missing value."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def id_fields(part: Part) -> list[str]:
    """Return the names of the fields that may name a document, the most wanted one first."""
    return [part.option("id_field")] if part.option("id_field") else ["id", "url"]


def first_of(row: dict, fields: list[str]) -> str:
    """Return the value of the first of some fields that a row has, as text; an empty text if it has none of them."""
    for field in fields:
        value = row.get(field)
        if isinstance(value, datetime.date):  # also a point in time
            return value.isoformat()
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return ""


def date_field(row: dict, part: Part) -> str:
    """Return the value of the field with the date of a document, as text; an empty text if it has none.

    A value that is no date, such as an object, is returned as text that cannot be read as a date. So the document has
    an unreadable date, and not none, for which that of the file would be taken.
    """
    value = row.get(part.option("date_field"))
    if is_missing(value):
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return first_of(row, [part.option("date_field")]) or str(value)

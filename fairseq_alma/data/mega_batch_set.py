"""Sets of mega-batches as text: `1`, `2-4`, `1,3-5`."""

from fairseq_alma.core.errors import SettingError


def parse_mega_batches(text: str, num_mega_batches: int) -> list[int]:
    """Return the mega-batches that a text names, in order: [1, 3, 4, 5] for "1,3-5".

    Args:
        text: numbers and ranges, separated by commas.
        num_mega_batches: B of the stream.

    Raises:
        SettingError: the text has another form, or names a number outside 1..B.
    """
    chosen: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise SettingError(f"mega-batches {text!r} must have the form 1, 2-4 or 1,3-5")
        chosen.update(range(int(first), int(last or first) + 1))
    outside = sorted(t for t in chosen if not 1 <= t <= num_mega_batches)
    if outside or not chosen:
        raise SettingError(f"mega-batches {text!r}: the stream has 1 to {num_mega_batches}, not {outside}")
    return sorted(chosen)


def format_mega_batches(ts: list[int]) -> str:
    """Return the shortest text that names mega-batches: "1,3-5" for [1, 3, 4, 5]."""
    ranges: list[list[int]] = []
    for t in sorted(ts):
        if ranges and t == ranges[-1][1] + 1:
            ranges[-1][1] = t
        else:
            ranges.append([t, t])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)

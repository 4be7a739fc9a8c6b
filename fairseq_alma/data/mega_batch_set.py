"""Convert sets of mega-batches from and to text such as `1`, `2-4` or `1,3-5`."""

from fairseq_alma.core.errors import SettingError


def parse_mega_batches(text: str, num_mega_batches: int) -> list[int]:
    """Return the sorted numbers of the mega-batches that `text` names: [1, 3, 4, 5] for "1,3-5".

    Raise SettingError if the text cannot be parsed, names none, or names one outside 1 to `num_mega_batches`.
    """
    chosen: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise SettingError(
                f'mega-batches {text!r} are not numbers and ranges separated by commas, for example "1,3-5"'
            )
        chosen.update(range(int(first), int(last or first) + 1))
    outside = sorted(t for t in chosen if not 1 <= t <= num_mega_batches)
    if outside or not chosen:
        found = f"the stream has no mega-batch {outside}" if outside else "this range is empty"
        raise SettingError(f"mega-batches {text!r}: {found}; give numbers from 1 to {num_mega_batches}")
    return sorted(chosen)


def format_mega_batches(ts: list[int]) -> str:
    """Return the shortest text that names the mega-batches `ts`: "1,3-5" for [1, 3, 4, 5]."""
    ranges: list[list[int]] = []
    for t in sorted(ts):
        if ranges and t == ranges[-1][1] + 1:
            ranges[-1][1] = t
        else:
            ranges.append([t, t])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)

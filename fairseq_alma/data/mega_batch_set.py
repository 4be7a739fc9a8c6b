"""The words a stage's data are named by: `1`, `2-4`, `1,3-5`."""

from fairseq_alma.core.errors import SettingError


def parse_mega_batches(text: str, num_mega_batches: int) -> list[int]:
    """`"1,3-5"` to [1, 3, 4, 5], sorted.

    Raises:
        SettingError: not such a set, or a number outside 1..num_mega_batches.
    """
    chosen: set[int] = set()
    for piece in text.replace(" ", "").split(","):
        first, dash, last = piece.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise SettingError(f"mega-batches {text!r} should read like 1, 2-4 or 1,3-5")
        chosen.update(range(int(first), int(last or first) + 1))
    outside = sorted(t for t in chosen if not 1 <= t <= num_mega_batches)
    if outside or not chosen:
        raise SettingError(f"mega-batches {text!r}: the stream has 1 to {num_mega_batches}, not {outside}")
    return sorted(chosen)


def format_mega_batches(ts: list[int]) -> str:
    """[1, 3, 4, 5] to `"1,3-5"`."""
    runs: list[list[int]] = []
    for t in sorted(ts):
        if runs and t == runs[-1][1] + 1:
            runs[-1][1] = t
        else:
            runs.append([t, t])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)

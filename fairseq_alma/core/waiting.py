"""When a stage is due: the setting `wait`, and the arrivals at which stages are trained."""

import math

from fairseq_alma.core.errors import SettingError

Wait = int | str | list[int]
"""Type of the setting `wait`: a number of mega-batches, "geometric" or "geometric:RATIO" (see `group_is_complete`),
"auto" (see `fairseq_alma.core.error_curve`), or a list of the arrivals at which stages are trained."""

DEFAULT_RATIO = 0.5
"""The ratio of wait="geometric", and the first one of wait="auto"."""


def ratio_of(wait: Wait) -> float:
    """Return the ratio of waits that grow. With wait="auto", it is the one before any error is known."""
    return float(str(wait).partition(":")[2] or DEFAULT_RATIO)


def group_is_complete(
    num_gathered: int, num_past: int, wait: Wait, ratio: float | None = None, t: int | None = None
) -> bool:
    """Return True if enough mega-batches have been gathered for a stage.

    With a number w, a stage needs w mega-batches. With "geometric", it needs `ratio` times as many as all stages before
    have trained on, so the waits grow with the stream: a new mega-batch changes the model less the more data it has
    seen. The first stage needs one mega-batch. With "auto", it is the same, but the ratio changes during the run. With
    a list, a stage is trained at the arrivals in it.

    Args:
        num_gathered: number of mega-batches since the previous stage, at least 1.
        num_past: number of mega-batches of all earlier stages.
        wait: the setting `wait`.
        ratio: with "auto", the ratio that the rule chooses now. By default that of `ratio_of`.
        t: the arrival. By default, no mega-batch was skipped, and it is the number of all mega-batches so far.
    """
    if isinstance(wait, int):
        return num_gathered >= wait
    if isinstance(wait, list):
        return (num_gathered + num_past if t is None else t) in wait
    # Subtract 1e-9, because rounding errors may make the product slightly larger than an integer.
    return num_gathered >= (ratio_of(wait) if ratio is None else ratio) * num_past - 1e-9


def arrivals_of_stages(
    num_mega_batches: int, wait: Wait, ratio: float | None = None, trains_last_group: bool = True, num_known: int = 0
) -> list[int]:
    """Return the arrivals t at which the stages of a stream are trained, in order.

    Args:
        num_mega_batches: number of mega-batches that arrive.
        wait: the setting `wait`.
        ratio: see `group_is_complete`.
        trains_last_group: whether a stage trains on mega-batches at the end that are fewer than a stage needs.
        num_known: number of mega-batches at the start on which the initial model was trained.
    """
    arrivals: list[int] = []
    for t in range(num_known + 1, num_mega_batches + 1):
        num_past = arrivals[-1] if arrivals else num_known
        is_last = trains_last_group and t == num_mega_batches
        if is_last or group_is_complete(t - num_past, num_past, wait, ratio):
            arrivals.append(t)
    return arrivals


def num_missing(num_gathered: int, num_past: int, wait: Wait, t: int | None = None) -> int | None:
    """Return how many mega-batches must still arrive until a stage is due (for the arguments, see above).

    None: the errors at the next arrivals decide that (wait="auto"), or a list has no later arrival.
    """
    t = num_gathered + num_past if t is None else t
    if isinstance(wait, list):
        return next((arrival - t for arrival in wait if arrival > t), None)
    if wait == "auto":
        return None
    needed = wait if isinstance(wait, int) else math.ceil(ratio_of(wait) * num_past - 1e-9)
    return max(0, needed - num_gathered)


def check_wait(wait: object, num_mega_batches: int | None = None) -> None:
    """Raise SettingError if the setting `wait` is invalid, also for this number of mega-batches if it is known."""
    if isinstance(wait, int) and not isinstance(wait, bool) and wait >= 1:
        if num_mega_batches is not None and wait > num_mega_batches:
            raise SettingError(f"wait={wait} must lie between 1 and {num_mega_batches} mega-batches")
        return
    if wait in ("geometric", "auto"):
        return
    if isinstance(wait, list):
        if not wait or any(type(t) is not int or t < 1 for t in wait) or wait != sorted({*wait}):
            raise SettingError(f"wait={wait} must be a list of arrivals from 1 on in ascending order, such as [1,3,4]")
        if num_mega_batches is not None and wait[-1] > num_mega_batches:
            raise SettingError(f"wait={wait} has arrivals after the last of {num_mega_batches} mega-batches")
        return
    rule, _, ratio = str(wait).partition(":")
    try:
        is_valid = rule == "geometric" and 0 < float(ratio) < math.inf and not {*ratio} & {*" _\t\n"}
    except ValueError:
        is_valid = False
    if not is_valid:
        raise SettingError(
            f"wait={wait!r} must be an integer of at least 1, geometric, geometric:RATIO with a ratio above 0, auto, "
            f"or a list of arrivals"
        )

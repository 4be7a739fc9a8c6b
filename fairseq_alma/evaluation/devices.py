"""The devices on which language models are evaluated, and a function that uses all of them at the same time."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from fairseq_alma.core.errors import SettingError

CPU_TOKENS, GPU_TOKENS = 8192, 65536
"""Number of tokens in one forward pass, on a CPU and on a GPU. See `default_tokens_per_batch`."""
BYTES_PER_TOKEN = 1 << 18
"""Upper bound of the GPU memory, in bytes, that a forward pass needs for each token. The model switch_lm_large in
float32 needs about a quarter of this number."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_devices() -> list[torch.device]:
    """Return all GPUs that this process may use, or the CPU if there is none."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]


def parse_devices(text: str | None) -> list[torch.device]:
    """Return the devices that a user names: cpu, cuda (all GPUs), or several, such as cuda:0,cuda:2; by default all.

    Raise SettingError if a device does not exist on this machine.
    """
    gpus = [device for device in default_devices() if device.type == "cuda"]
    known = {"cpu": [torch.device("cpu")], **{str(gpu): [gpu] for gpu in gpus}, **({"cuda": gpus} if gpus else {})}
    if text is None:
        return default_devices()
    found = []
    for name in text.split(","):
        if name.strip() not in known:
            raise SettingError(f"device {name.strip()!r} does not exist here: give one of {', '.join(known)}")
        found += known[name.strip()]
    return found


def default_tokens_per_batch(devices: Sequence[torch.device]) -> int:
    """Return the number of tokens in a forward pass that keeps the devices busy and fits into their memory."""
    if any(device.type != "cuda" for device in devices):
        return CPU_TOKENS
    smallest = min(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return min(GPU_TOKENS, max(CPU_TOKENS, smallest // BYTES_PER_TOKEN))


def on_each(items: Sequence[Item], work: Callable[[Item], Result], cancel: Callable[[], None]) -> list[Result]:
    """Call `work` for all items at the same time, and return the results in the order of the items.

    An item is, for example, the copy of a model on one device. Each has a thread. Threads are fast enough, because
    Python only starts the GPU computations, and safer than processes, because they end when this process is killed.

    Args:
        items: the arguments of the calls.
        work: the function to call.
        cancel: called when a call fails, or when the user presses Ctrl-C. It must let the other calls return soon.

    Raises:
        BaseException: the first exception of a call, after all calls have returned.
    """
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(len(items)) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            cancel()
    return [future.result() for future in futures]

"""Settings that affect the whole process of a vision run: threads and cuDNN."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def process_settings(threads: int, tf32: bool = False) -> Iterator[None]:
    """Set the number of CPU threads and make cuDNN convolutions reproducible, inside a `with` block.

    cuDNN uses deterministic algorithms, because training a stage again must give the same result. When the block ends,
    even with an error, the previous settings are restored.

    The settings affect the complete process. So do not use two such blocks at the same time in different threads.

    This function does not change the settings of the memory allocator, because they could not be restored when the
    block ends. `fairseq_alma.core.allocator` changes them.

    Args:
        threads: number of CPU threads that torch uses within an operation.
        tf32: whether a GPU may compute float32 products with the reduced precision of its tensor cores.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    previous = torch.get_num_threads(), cudnn.deterministic
    value: bool | str = tf32
    owners, name = [matmul, cudnn], "allow_tf32"
    try:
        precisions = [getattr(owner, name) for owner in owners]
    except RuntimeError:
        # The program has used torch's newer switches. Then torch refuses the older ones.
        owners = [matmul, *(getattr(cudnn, kind) for kind in ("conv", "rnn"))]
        name, value = "fp32_precision", "tf32" if tf32 else "ieee"
        precisions = [getattr(owner, name) for owner in owners]
    torch.set_num_threads(threads)
    cudnn.deterministic = True
    for owner in owners:
        setattr(owner, name, value)
    try:
        yield
    finally:
        torch.set_num_threads(previous[0])
        cudnn.deterministic = previous[1]
        for owner, precision in zip(owners, precisions, strict=True):
            setattr(owner, name, precision)

"""Which training examples the networks of a learner have read, so that replay can begin with the others."""

import zlib
from base64 import b64decode, b64encode
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.core.protocol import Stage
from vision.batches import Batches


class ReadRecord:
    """Which training examples were read in the stages so far.

    At constant numbers of steps, a stage with replay may leave out a part of its new examples. With replay=uniform, the
    stage at arrival t reads about epochs / t of them. The next stages read them before other examples.

    Shapes: R orders (see `vision.batches`), n training examples of the mega-batches so far.
    """

    def __init__(self) -> None:
        self._was_read: Tensor | None = None
        """Bool [R, n]; None if it is not known."""

    def before(self, stage: Stage, num_orders: int, num_past: int) -> Tensor | None:
        """Return which examples of earlier mega-batches were read, bool [R, num_past]; None if it is not known.

        It is not known if a limited memory has chosen other examples, or in a run of an earlier version.
        """
        known = self._was_read
        return known if known is not None and known.shape == (num_orders, num_past) and stage.past_share else None

    def after(self, stage: Stage, batches: Batches) -> None:
        """Add what a stage has read."""
        is_known = stage.replay not in (False, "all") and stage.replay_memory is None
        self._was_read = batches.was_read if is_known else None

    def state(self) -> dict[str, Any]:
        """Return the state of this object as values that JSON can represent."""
        if self._was_read is None:
            return {}
        rows = [b64encode(zlib.compress(np.packbits(row).tobytes())).decode() for row in self._was_read.numpy()]
        return {"was_read": {"examples": self._was_read.shape[1], "orders": rows}}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state from a dictionary that contains the values of `state`."""
        saved = state.get("was_read")
        if saved is None:
            self._was_read = None
            return
        bits = [np.frombuffer(zlib.decompress(b64decode(row)), dtype=np.uint8) for row in saved["orders"]]
        rows = [np.unpackbits(row, count=saved["examples"]).astype(bool) for row in bits]
        self._was_read = torch.from_numpy(np.stack(rows))

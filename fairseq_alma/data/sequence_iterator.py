"""fairseq's iterator over the batches of an epoch, with a position in the data that is counted in sequences."""

from collections.abc import Mapping
from typing import Any

from fairseq.data.iterators import EpochBatchIterator

from fairseq_alma.core.errors import SettingError


class SequenceIterator(EpochBatchIterator):
    """An iterator over training batches. A checkpoint of it can be loaded with another number of ranks or batch size.

    fairseq saves its position as the number of batches that each rank has read, which means nothing with another number
    of ranks or with batches of another size. This iterator also saves the number of sequences that all ranks have read.

    The batches are read in the order in which they were made, because their sequences are in random order already.

    The position has a meaning only in the same order of the same sequences, so what the order depends on is saved, too.

    Args:
        iterator: fairseq's iterator, from which all other options are taken.
        batch_size: number of sequences in a batch.
        order: options on which the order of the sequences depends, besides the seed: name -> value.
    """

    def __init__(self, iterator: EpochBatchIterator, batch_size: int, order: Mapping[str, Any]):
        super().__init__(
            dataset=iterator.dataset,
            collate_fn=iterator.collate_fn,
            batch_sampler=iterator.frozen_batches,
            seed=iterator.seed,
            num_shards=iterator.num_shards,
            shard_id=iterator.shard_id,
            num_workers=iterator.num_workers,
            epoch=iterator.epoch,
            buffer_size=iterator.buffer_size,
            disable_shuffling=True,
            reuse_dataloader=iterator.reuse_dataloader,
            persistent_workers=iterator.persistent_workers,
        )
        self._sequences_per_iteration = batch_size * self.num_shards
        self._order = {**order, "--seed": iterator.seed}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of fairseq's iterator, and the number of sequences read in this epoch and their order."""
        state = super().state_dict()
        sequences = state["iterations_in_epoch"] * self._sequences_per_iteration
        return {**state, "sequences_in_epoch": sequences, "order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the sequences that were read when `state_dict` was saved.

        Raises:
            SettingError: if it was saved in the middle of an epoch in which the sequences had another order.
            ValueError: if their number is not a multiple of the sequences that all ranks read in one pass.
        """
        if state_dict["iterations_in_epoch"] and (changed := _changed(state_dict["order"], self._order)):
            raise SettingError(
                f"the checkpoint was saved in the middle of an epoch, with {changed}: give the same values to finish "
                f"this epoch, or --reset-dataloader --reset-meters to begin a new one (with the old meters, no "
                f"checkpoint_best.pt is written until the old best score is beaten)"
            )
        sequences = state_dict["sequences_in_epoch"]
        iterations, left = divmod(sequences, self._sequences_per_iteration)
        if left:
            raise ValueError(
                f"the checkpoint was saved after {sequences} sequences of the epoch, which is not a multiple of the "
                f"{self._sequences_per_iteration} sequences that {self.num_shards} device(s) read at once: train with "
                f"another batch size or number of devices"
            )
        super().load_state_dict({**state_dict, "iterations_in_epoch": iterations, "shuffle": False})


def _changed(saved: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return what differs between two mappings of the same options, as text; "" if nothing does."""
    return ", ".join(
        f"{name} {value} (now {given[name]})" for name, value in saved.items() if name in given and given[name] != value
    )

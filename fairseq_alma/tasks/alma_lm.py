"""The fairseq task alma_lm: language modelling on mega-batches of a stream folder."""

import logging
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.data import ConcatDataset, TokenBlockDataset, data_utils
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II
from torch import Tensor

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.data.blocks import Blocks
from fairseq_alma.data.mega_batch_set import parse_mega_batches
from fairseq_alma.data.replay import ReplayShareDataset

logger = logging.getLogger(__name__)

UNUSED_OPTIONS = {
    "add_bos_token": False,
    "self_target": False,
    "past_target": False,
    "pad_to_fixed_length": False,
    "pad_to_fixed_bsz": False,
    "shorten_method": "none",
    "output_dictionary_size": -1,
}
"""Options of fairseq's language_modeling that have no meaning for blocks of a stream, with their defaults."""


@dataclass
class AlmaLanguageModelingConfig(LanguageModelingConfig):
    """Options of the task: those of fairseq's language_modeling, and which mega-batches to train on."""

    data: Optional[str] = field(default=None, metadata={"help": "a stream folder, written by alma-prep"})
    mega_batches: str = field(
        default="1",
        metadata={"help": "mega-batches that this stage trains on, concatenated and shuffled: 1, 2-4 or 1,3-5"},
    )
    replay_mega_batches: Optional[str] = field(
        default=None, metadata={"help": "with --replay-share: earlier mega-batches, in the form of --mega-batches"}
    )
    replay_share: float = field(
        default=0.0,
        metadata={"help": "between 0 and 1: the share of every batch that comes from --replay-mega-batches"},
    )
    train_subset: str = II("dataset.train_subset")
    valid_subset: str = II("dataset.valid_subset")


@register_task("alma_lm", dataclass=AlmaLanguageModelingConfig)
class AlmaLanguageModelingTask(LanguageModelingTask):
    """A task that trains on any set of mega-batches of a stream folder and validates on its validation set.

    It refuses the test set for training and validation; `alma-eval` and `fairseq-eval-lm` score it. The batches of an
    epoch depend only on (seed, epoch). So a stage that is killed and resumed in any epoch gets the same batches.

    Args:
        args: options of the task.
        dictionary, output_dictionary: the vocabulary, twice.
        targets: fairseq's name of the targets: ["future"], the next token.
        stream: the stream folder.
    """

    def __init__(
        self, args: Namespace, dictionary: Any, output_dictionary: Any, targets: list[str], stream: StreamFolder
    ):
        super().__init__(args, dictionary, output_dictionary, targets)
        self.stream = stream
        self._first_valid_ids: list[int] = []
        # Counts of this stage. Checkpoints contain them (get_checkpoint_dict), so that they survive a kill.
        self.processed = {kind: {"tokens": 0, "token_pairs": 0} for kind in ("training", "validation")}

    @classmethod
    def setup_task(cls, args: Namespace, **kwargs: Any) -> "AlmaLanguageModelingTask":
        """Return the task for a stream folder, after a check of the options against it.

        Raises:
            SettingError: an option asks for the test set in training or validation, for mega-batches that the stream
                does not have, or has no meaning here.
            StreamError: the stream is missing or damaged (see StreamFolder.open).
        """
        for subset in ("train_subset", "valid_subset"):
            for split in str(getattr(args, subset, None) or "").split(","):
                if split.startswith("test"):
                    raise SettingError(
                        f"--{subset.replace('_', '-')} {split}: the test set may not be used for training or "
                        f"validation; score it with `alma-eval CHECKPOINT --stream {args.data}` or fairseq-eval-lm"
                    )
        if not args.data:
            raise SettingError("no stream given: fairseq-train STREAM --task alma_lm ...")
        stream = StreamFolder.open(args.data)
        parse_mega_batches(args.mega_batches, stream.num_mega_batches)
        if (args.replay_share > 0) != bool(args.replay_mega_batches):
            raise SettingError("--replay-share and --replay-mega-batches must be given together")
        if args.sample_break_mode not in (None, "none"):
            raise SettingError(
                f"--sample-break-mode {args.sample_break_mode}: perplexities are defined on blocks of "
                f"tokens_per_sample tokens; leave it at none"
            )
        for name, default in UNUSED_OPTIONS.items():
            if (given := getattr(args, name, default)) not in (default, None):
                raise SettingError(f"--{name.replace('_', '-')} {given} has no meaning for alma_lm: leave it out")
        dictionary, output_dictionary = cls.setup_dictionary(args, **kwargs)
        expected = stream.description["dictionary_size"]
        if len(dictionary) != expected:
            raise SettingError(f"{args.data}/dict.txt has {len(dictionary)} types, stream.json says {expected}")
        return cls(args, dictionary, output_dictionary, targets=["future"], stream=stream)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load a split into `datasets`.

        Args:
            split: "train" (the mega-batches of this stage), "valid", or "test" (for evaluation only).
            epoch, combine, kwargs: part of fairseq's interface; ignored.

        Raises:
            SettingError: there is no such split.
        """
        if split == "train":
            dataset = self._blocks(self._mega_batch_splits(self.args.mega_batches), shuffle=True)
            if self.args.replay_share > 0:
                past = self._blocks(self._mega_batch_splits(self.args.replay_mega_batches), shuffle=True)
                dataset = ReplayShareDataset(dataset, past, self.args.replay_share, self.args.seed)
        elif split in ("valid", "test"):
            dataset = self._blocks([split], shuffle=False)
        else:
            raise SettingError(f"split {split!r}: a stream has train (its mega-batches), valid and test")
        self.datasets[split] = dataset

    def get_batch_iterator(self, dataset: Any, *args: Any, required_batch_size_multiple: int = 1, **kwargs: Any) -> Any:
        """Return fairseq's iterator over the batches of a dataset, with two changes.

        No block is dropped: with `--required-batch-size-multiple` (8 by default) fairseq drops a last batch of another
        size, and validation and test would score fewer tokens than there are. And every epoch gets new batches:
        fairseq makes them once, in the first epoch of a process, so that they would differ after a resume in a later
        epoch.
        """
        if dataset is self.datasets.get("train"):
            kwargs["disable_iterator_cache"] = True
            # Every rank gets the same number of batches. Otherwise fairseq adds empty batches, and then loses the
            # logging outputs of the batches in the same update.
            dataset.num_shards = kwargs.get("num_shards", 1)
        iterator = super().get_batch_iterator(dataset, *args, required_batch_size_multiple=1, **kwargs)
        if dataset is self.datasets.get("valid"):
            self._first_valid_ids = [int(i) for i in iterator.frozen_batches[0]]
        return iterator

    def train_step(
        self, sample: dict, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad: bool = False
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Run one forward and backward pass; return loss (summed over tokens), number of tokens, logging output.

        Raises:
            FloatingPointError: the loss is not finite. Earlier checkpoints are not changed.
            MemoryError: the device has not enough memory for the batch.
        """
        try:
            loss, sample_size, logging_output = super().train_step(
                sample, model, criterion, optimizer, update_num, ignore_grad
            )
        except RuntimeError as error:
            # On one device, fairseq skips a batch that does not fit in memory; if none fits, it never ends.
            if "out of memory" in str(error):
                raise MemoryError(f"out of memory at update {update_num + 1}: lower --batch-size ({error})") from error
            raise
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} at update {update_num + 1}: lower the learning rate, lengthen the "
                f"warm-up or clip the gradient (--clip-norm). Earlier checkpoints are whole."
            )
        return loss, sample_size, logging_output

    def valid_step(self, sample: dict, model: Any, criterion: Any) -> tuple[Tensor, int, dict[str, Any]]:
        """Run one forward pass; return loss (summed over tokens), number of tokens, logging output.

        Where the batches do not divide evenly among ranks, fairseq gives a rank the first batch again. The losses of
        such a copy are not charged to experts.
        """
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        criterion.charge_experts = rank == 0 or sample["id"].tolist() != self._first_valid_ids
        return super().valid_step(sample, model, criterion)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Log the metrics of one update or validation batch, and add its tokens to the counts of the stage."""
        super().reduce_metrics(logging_outputs, criterion)
        processed = self.processed["training" if criterion.training else "validation"]
        for log in logging_outputs:
            processed["tokens"] += int(log.get("processed_tokens", 0))
            processed["token_pairs"] += int(log.get("processed_token_pairs", 0))

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Reset the losses that are charged to experts. fairseq calls it before each validation."""
        for mixture in getattr(model, "mixtures", []):
            mixture.reset_validation_loss()

    def post_validate(self, model: Any, stats: Any, agg: Any) -> None:
        """Sum the losses of experts over ranks. fairseq calls it after a validation, before it writes a checkpoint."""
        for layer, mixture in enumerate(getattr(model, "mixtures", []), start=1):
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(mixture.valid_loss_E)
                torch.distributed.all_reduce(mixture.valid_tokens_E)
            logger.info(
                "mixture %d: validation tokens by expert %s, loss by expert %s",
                layer,
                mixture.valid_tokens_E.tolist(),
                [round(loss, 1) for loss in mixture.valid_loss_E.tolist()],
            )

    def get_checkpoint_dict(self) -> dict:
        """Return what a checkpoint contains of the task: the counts of the stage, and the digest of the dictionary."""
        dictionary = self.stream.description["tokenizer"]["dict_sha256"]
        return {type(self).__name__: {"processed": self.processed, "dict_sha256": dictionary}}

    def set_checkpoint_dict(self, state: dict) -> None:
        """Restore the counts of the stage from a checkpoint."""
        self.processed = state["processed"]

    def _mega_batch_splits(self, text: str) -> list[str]:
        return [f"mega_batch_{t}" for t in parse_mega_batches(text, self.stream.num_mega_batches)]

    def _blocks(self, splits: list[str], shuffle: bool) -> Blocks:
        """Return the concatenated tokens of the splits in non-overlapping blocks of tokens_per_sample."""
        datasets = [self._load(split) for split in splits]
        documents = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
        blocks = TokenBlockDataset(
            documents,
            documents.sizes,
            self.args.tokens_per_sample,
            pad=self.dictionary.pad(),
            eos=self.dictionary.eos(),
            break_mode="none",
            include_targets=True,
        )
        return Blocks(blocks, blocks.sizes, self.dictionary, self.dictionary, shuffle=shuffle, targets=["future"])

    def _load(self, split: str) -> Any:
        return data_utils.load_indexed_dataset(str(self.stream.prefix(split)), self.dictionary, "mmap")

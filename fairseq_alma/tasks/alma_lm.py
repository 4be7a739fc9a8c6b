"""Language modelling over a stream of mega-batches."""

import logging
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Optional

import torch
from fairseq.data import ConcatDataset, TokenBlockDataset, data_utils
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II

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
"""Of fairseq's language_modeling, and their defaults: blocks of a stream have no use for them."""


@dataclass
class AlmaLanguageModelingConfig(LanguageModelingConfig):
    data: Optional[str] = field(default=None, metadata={"help": "a stream folder, written by alma-prep"})
    mega_batches: str = field(
        default="1",
        metadata={"help": "what this stage trains on, concatenated and shuffled: 1, 2-4 or 1,3-5"},
    )
    replay_mega_batches: Optional[str] = field(
        default=None, metadata={"help": "with --replay-share: the past, in the same form as --mega-batches"}
    )
    replay_share: float = field(
        default=0.0, metadata={"help": "in (0, 1): this part of every batch comes from --replay-mega-batches"}
    )
    train_subset: str = II("dataset.train_subset")
    valid_subset: str = II("dataset.valid_subset")


@register_task("alma_lm", dataclass=AlmaLanguageModelingConfig)
class AlmaLanguageModelingTask(LanguageModelingTask):
    """Trains on any set of mega-batches of a stream folder, validates on its validation set.

    The test set is refused for training and validation; `alma-eval` and `fairseq-eval-lm` read it.
    An epoch's batches are made anew from (seed, epoch), so that a stage killed and resumed in any epoch
    sees the batches it would have seen.
    """

    def __init__(self, args: Namespace, dictionary, output_dictionary=None, targets=None, stream=None):
        super().__init__(args, dictionary, output_dictionary, targets)
        self.stream: StreamFolder = stream
        self._first_valid_ids: list[int] = []
        # Counts of this stage, kept through kill and resume (get_checkpoint_dict).
        self.processed = {kind: {"tokens": 0, "token_pairs": 0} for kind in ("training", "validation")}

    @classmethod
    def setup_task(cls, args: Namespace, **kwargs) -> "AlmaLanguageModelingTask":
        """Open the stream, check the settings against it.

        Raises:
            SettingError: test data asked for in training or validation; mega-batches the stream lacks.
            StreamError: the stream is missing or damaged (see StreamFolder.open).
        """
        for subset in ("train_subset", "valid_subset"):
            for split in str(getattr(args, subset, None) or "").split(","):
                if split.startswith("test"):
                    raise SettingError(
                        f"--{subset.replace('_', '-')} {split}: the test set is kept from training and validation; "
                        f"score it with `alma-eval CHECKPOINT --stream {args.data}` or fairseq-eval-lm"
                    )
        if not args.data:
            raise SettingError("no stream given: fairseq-train STREAM --task alma_lm ...")
        stream = StreamFolder.open(args.data)
        parse_mega_batches(args.mega_batches, stream.num_mega_batches)
        if (args.replay_share > 0) != bool(args.replay_mega_batches):
            raise SettingError("--replay-share and --replay-mega-batches go together")
        if args.sample_break_mode not in (None, "none"):
            raise SettingError(
                f"--sample-break-mode {args.sample_break_mode}: perplexities are defined on blocks of "
                f"tokens_per_sample; leave it at none"
            )
        for name, default in UNUSED_OPTIONS.items():
            if (given := getattr(args, name, default)) not in (default, None):
                raise SettingError(f"--{name.replace('_', '-')} {given} has no meaning for alma_lm: leave it out")
        dictionary, output_dictionary = cls.setup_dictionary(args, **kwargs)
        wanted = stream.description["dictionary_size"]
        if len(dictionary) != wanted:
            raise SettingError(f"{args.data}/dict.txt has {len(dictionary)} types, stream.json says {wanted}")
        return cls(args, dictionary, output_dictionary, targets=["future"], stream=stream)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """`train`: the mega-batches of this stage; `valid`; `test` (evaluation only)."""
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

    def get_batch_iterator(self, dataset, *args, required_batch_size_multiple=1, **kwargs):
        """As fairseq's, except that no block is dropped and that epochs do not inherit batches.

        `--required-batch-size-multiple` (8 by default) makes fairseq drop a last batch of another size:
        validation and test would score fewer tokens than there are. And batches made once, in the first
        epoch of a process, would differ after a resume in a later epoch.
        """
        if dataset is self.datasets.get("train"):
            kwargs["disable_iterator_cache"] = True
            # Each rank gets as many batches: fairseq would fill up with dummies and forget what ran beside them.
            dataset.num_shards = kwargs.get("num_shards", 1)
        iterator = super().get_batch_iterator(dataset, *args, required_batch_size_multiple=1, **kwargs)
        if dataset is self.datasets.get("valid"):
            self._first_valid_ids = [int(i) for i in iterator.frozen_batches[0]]
        return iterator

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        """One forward and backward pass.

        Raises:
            FloatingPointError: the loss is not finite. Checkpoints written before are not touched.
            MemoryError: the device has no room for the batch.
        """
        try:
            loss, sample_size, logging_output = super().train_step(
                sample, model, criterion, optimizer, update_num, ignore_grad
            )
        except RuntimeError as error:
            # On one device fairseq passes over a batch that finds no memory, without end if all do.
            if "out of memory" in str(error):
                raise MemoryError(f"out of memory at update {update_num + 1}: lower --batch-size ({error})") from error
            raise
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} at update {update_num + 1}: lower the learning rate, lengthen the "
                f"warm-up or clip the gradient (--clip-norm). Checkpoints saved before are whole."
            )
        return loss, sample_size, logging_output

    def valid_step(self, sample, model, criterion):
        """One forward pass. A batch that only fills a rank, a copy of the first one, is charged to no expert."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        criterion.charge_experts = rank == 0 or sample["id"].tolist() != self._first_valid_ids
        return super().valid_step(sample, model, criterion)

    def reduce_metrics(self, logging_outputs, criterion) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        processed = self.processed["training" if criterion.training else "validation"]
        for log in logging_outputs:
            processed["tokens"] += int(log.get("processed_tokens", 0))
            processed["token_pairs"] += int(log.get("processed_token_pairs", 0))

    def begin_valid_epoch(self, epoch, model) -> None:
        for mixture in getattr(model, "mixtures", []):
            mixture.reset_validation_loss()

    def post_validate(self, model, stats, agg) -> None:
        """Sum what ranks charged to experts; runs before the checkpoint is written."""
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
        """What a checkpoint keeps of the task: its counts, and which dictionary its words are of."""
        dictionary = self.stream.description["tokenizer"]["dict_sha256"]
        return {type(self).__name__: {"processed": self.processed, "dict_sha256": dictionary}}

    def set_checkpoint_dict(self, state: dict) -> None:
        self.processed = state["processed"]

    def _mega_batch_splits(self, text: str) -> list[str]:
        return [f"mega_batch_{t}" for t in parse_mega_batches(text, self.stream.num_mega_batches)]

    def _blocks(self, splits: list[str], shuffle: bool) -> Blocks:
        """The tokens of the splits, end to end, in non-overlapping blocks of tokens_per_sample."""
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

    def _load(self, split: str):
        return data_utils.load_indexed_dataset(str(self.stream.prefix(split)), self.dictionary, "mmap")

"""The fairseq task alma_lm, language modelling on the mega-batches of a stream folder."""

import copy
import inspect
import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import ConcatDataset, TokenBlockDataset, data_utils
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II
from torch import Tensor

from fairseq_alma.checkpoints import dictionary_of
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.data.blocks import Blocks
from fairseq_alma.data.mega_batch_set import parse_mega_batches
from fairseq_alma.data.replay import ReplayShareDataset
from fairseq_alma.data.sequence_iterator import SequenceIterator
from fairseq_alma.models.any_network import with_targets
from fairseq_alma.tasks.loss_check import LossCheck

logger = logging.getLogger(__name__)

# fairseq's commands that generate text make their batches with np.compat.long, which numpy 2 no longer has.
if not hasattr(np, "compat"):
    np.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]

UNUSED_OPTIONS = {
    "add_bos_token": False,
    "self_target": False,
    "past_target": False,
    "pad_to_fixed_length": False,
    "pad_to_fixed_bsz": False,
    "shorten_method": "none",
    "output_dictionary_size": -1,
}
"""Options of fairseq's task language_modeling that alma_lm does not support, with their default values."""


@dataclass
class AlmaLanguageModelingConfig(LanguageModelingConfig):
    """Options of the task: the options of fairseq's language_modeling, and the mega-batches to train on."""

    data: Optional[str] = field(default=None, metadata={"help": "a stream folder, written by alma-prep"})
    mega_batches: str = field(
        default="1",
        metadata={"help": "mega-batches to train on, in the form 1, 2-4 or 1,3-5; they are concatenated and shuffled"},
    )
    replay_mega_batches: Optional[str] = field(
        default=None,
        metadata={"help": "earlier mega-batches to replay, in the form of --mega-batches; needs --replay-share"},
    )
    replay_share: float = field(
        default=0.0,
        metadata={"help": "share of every batch that comes from --replay-mega-batches, between 0 and 1"},
    )
    train_subset: str = II("dataset.train_subset")
    valid_subset: str = II("dataset.valid_subset")
    restore_file: str = II("checkpoint.restore_file")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")


CHECKED = "ALMA_STREAM_IS_CHECKED"
"""Environment variable of processes that need not check the bytes of a split: alma-lm has checked them for all."""


@register_task("alma_lm", dataclass=AlmaLanguageModelingConfig)
class AlmaLanguageModelingTask(LanguageModelingTask):
    """A task that trains on any set of mega-batches of a stream, and validates on the validation set of the stream.

    The test set cannot be used for training or validation. `alma-eval` and `fairseq-eval-lm` can score it.

    The batches of an epoch depend only on the seed and on the number of the epoch. So a stage that was killed in any
    epoch gets the same batches when it is resumed.

    Args:
        args: options of the task.
        dictionary, output_dictionary: the vocabulary of the inputs and of the outputs, which are equal.
        targets: ["future"], fairseq's name for predicting the next token.
        stream: the stream folder.
    """

    def __init__(
        self, args: Namespace, dictionary: Any, output_dictionary: Any, targets: list[str], stream: StreamFolder
    ):
        super().__init__(args, dictionary, output_dictionary, targets)
        self.stream = stream
        # The ids of the blocks (sequences of tokens) in the first validation batch. fairseq gives some ranks a copy of
        # this batch, and valid_step() recognises such a copy by these ids, so that its losses are not counted twice.
        self._first_valid_ids: list[int] = []
        self._charges_experts = True
        self._training_batches: Any = None
        self._loss_check = LossCheck()
        self._spreads_experts = False
        self._says_padding = True
        self._own_criterion: Any = None
        # The numbers of tokens and of token pairs that this stage has processed, from which the FLOPs are computed. A
        # sequence of L tokens has L^2 token pairs. Checkpoints contain these numbers (get_checkpoint_dict), so a
        # resumed stage continues from them.
        self.processed = {kind: {"tokens": 0, "token_pairs": 0} for kind in ("training", "validation")}

    @classmethod
    def setup_task(cls, args: Namespace, **kwargs: Any) -> "AlmaLanguageModelingTask":
        """Check the options and return the task for the stream folder `args.data`.

        Raises:
            SettingError: if an option is missing or not supported, uses the test set for training or validation, or
                names a mega-batch that the stream does not have; or if the training starts from a checkpoint that was
                trained with another dictionary.
            StreamError: if the stream is missing or damaged (see StreamFolder.open).
        """
        for subset in ("train_subset", "valid_subset"):
            for split in str(getattr(args, subset, None) or "").split(","):
                if split.startswith("test"):
                    raise SettingError(
                        f"--{subset.replace('_', '-')} {split}: the test set may not be used for training or "
                        f"validation; score it with `alma-eval CHECKPOINT --stream {args.data}` or fairseq-eval-lm"
                    )
        if not args.data:
            raise SettingError("no stream given: call fairseq-train STREAM --task alma_lm ...")
        stream = StreamFolder.open(args.data)
        parse_mega_batches(args.mega_batches, stream.num_mega_batches)
        if (args.replay_share > 0) != bool(args.replay_mega_batches):
            raise SettingError("--replay-share and --replay-mega-batches must be given together")
        if args.sample_break_mode not in (None, "none"):
            raise SettingError(
                f"--sample-break-mode {args.sample_break_mode} is not supported, because perplexities are defined on "
                f"blocks of tokens_per_sample tokens: leave it at none"
            )
        for name, default in UNUSED_OPTIONS.items():
            if (given := getattr(args, name, default)) not in (default, None):
                raise SettingError(f"--{name.replace('_', '-')} {given} is not supported by alma_lm: leave it out")
        dictionary, output_dictionary = cls.setup_dictionary(args, **kwargs)
        expected = stream.description["dictionary_size"]
        if len(dictionary) != expected:
            raise SettingError(
                f"the dictionary read from {args.data}/dict.txt has {len(dictionary)} entries, but according to "
                f"stream.json it has {expected}: restore the dict.txt that alma-prep wrote"
            )
        if not kwargs.get("from_checkpoint"):
            _check_start(args, stream)
        return cls(args, dictionary, output_dictionary, targets=["future"], stream=stream)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        """Return a new model.

        With `from_checkpoint`, the model evaluates a checkpoint. Then its experts are not spread over ranks, because
        the ranks of an evaluation do not run at the same pace.
        """
        if from_checkpoint and getattr(args, "expert_parallel", 1) > 1:
            args = copy.deepcopy(args)
            args.expert_parallel = 1
        self._spreads_experts = getattr(args, "expert_parallel", 1) > 1
        model = with_targets(super().build_model(args, from_checkpoint))
        self._says_padding = "has_padding" in inspect.signature(model.forward).parameters
        return model

    def build_generator(self, models: Any, args: Any, *arguments: Any, **keywords: Any) -> Any:
        """Return fairseq's generator. It never chooses symbols that no text has: special and unused ones."""
        generator = super().build_generator(models, args, *arguments, **keywords)
        if isinstance(generator, SequenceGenerator):
            special = [self.dictionary.bos(), self.dictionary.unk()]
            used = self.dictionary.nspecial + self.stream.description.get("vocab_size", len(self.dictionary))
            generator.token_indices_to_suppress = torch.tensor([*special, *range(used, len(self.dictionary))])
        return generator

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load a split and store the dataset in `self.datasets[split]`. `epoch`, `combine` and `kwargs` are ignored.

        The splits are "train" (the mega-batches of this stage), "valid", and "test" (for evaluation only). Raise
        SettingError for others.
        """
        if split == "train":
            dataset = self._blocks(self._mega_batch_splits(self.args.mega_batches), shuffle=True)
            if self.args.replay_share > 0:
                past = self._blocks(self._mega_batch_splits(self.args.replay_mega_batches), shuffle=True)
                dataset = ReplayShareDataset(dataset, past, self.args.replay_share, self.args.seed)
        elif split in ("valid", "test"):
            dataset = self._blocks([split], shuffle=False)
        else:
            raise SettingError(f"there is no split {split!r}: a stream has train (its mega-batches), valid and test")
        self.datasets[split] = dataset

    def get_batch_iterator(self, dataset: Any, *args: Any, required_batch_size_multiple: int = 1, **kwargs: Any) -> Any:
        """Return fairseq's iterator over the batches of a dataset, with five changes.

        - No example (block of tokens) is dropped. fairseq would drop the last batch if its size is not a multiple of
          `--required-batch-size-multiple` (8 by default). Then validation and test would not score all tokens.
        - Every training epoch gets new batches. fairseq uses those of the first epoch of a process again in later
          epochs. So if a stage was resumed in a later epoch, its batches would differ from those of an uninterrupted
          stage.
        - Training that was interrupted can be continued with another number of ranks or batch size (see
          SequenceIterator). This needs `--batch-size`.
        - A block that is too long for the model is an error. fairseq would leave it out.
        - The worker processes of a training epoch end with it. fairseq's iterator refers to itself, so they would exist
          until a garbage collection, which then waits some seconds for each of them.
        """
        kwargs["ignore_invalid_inputs"] = False
        self._charges_experts = dataset is self.datasets.get("valid")
        if dataset is self.datasets.get("train"):
            if (sampler := getattr(self._training_batches, "epoch_batch_sampler", None)) is not None:
                sampler.ordered_batches = None
            kwargs["disable_iterator_cache"] = True
            # Give every rank the same number of batches. Otherwise fairseq adds empty batches to some ranks, and then
            # loses the logging outputs of the other batches in the same update.
            dataset.num_ranks = kwargs.get("num_shards", 1)
        iterator = super().get_batch_iterator(dataset, *args, required_batch_size_multiple=1, **kwargs)
        batch_size = kwargs.get("max_sentences")
        if dataset is self.datasets.get("train"):
            if batch_size is not None:
                iterator = SequenceIterator(iterator, batch_size, self._order(len(dataset)))
            self._training_batches = iterator
        if dataset is self.datasets.get("valid"):
            self._first_valid_ids = [int(i) for i in iterator.frozen_batches[0]]
        return iterator

    def train_step(
        self, sample: dict, model: Any, criterion: Any, optimizer: Any, update_num: int, ignore_grad: bool = False
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Run a forward and a backward pass. Return the loss (summed over tokens), number of tokens and values to log.

        Raises:
            SettingError: if the experts are spread over ranks, and the optimizer does not support this.
            FloatingPointError: if a loss is not finite. On a GPU, the error may be raised a few calls later. Earlier
                checkpoints are not changed.
            MemoryError: if the device does not have enough memory for the batch.
        """
        if self._spreads_experts and not getattr(optimizer, "supports_expert_parallel", False):
            raise SettingError("--expert-parallel needs --optimizer fused_adam, without --zero-sharding")
        # On one device, fairseq catches a RuntimeError and skips the batch. If no batch fits into memory, the training
        # would never end.
        with _memory_error(f"at update {update_num + 1}"):
            loss, sample_size, logging_output = super().train_step(
                sample, model, criterion, optimizer, update_num, ignore_grad
            )
        self.check_finite(loss, update_num + 1, "loss")
        return loss, sample_size, _with_counts(logging_output, sample)

    def check_finite(self, value: Tensor, update: int, name: str) -> None:
        """Raise FloatingPointError if a number is not finite. On a GPU, it may be raised a few calls later.

        Args:
            value: a scalar.
            update: number of the update that computed it, counted from 1.
            name: what the number is, for the error message.
        """
        self._loss_check.add(value, update, name)

    def valid_step(self, sample: dict, model: Any, criterion: Any) -> tuple[Tensor, int, dict[str, Any]]:
        """Run a forward pass for validation. Return the loss (summed over tokens), number of tokens and values to log.

        If the batches cannot be divided evenly among ranks (processes), fairseq gives some ranks a copy of the first
        batch. Its losses are not added to the validation losses of the experts again. Neither are those of another
        subset than "valid". Raise MemoryError if the device does not have enough memory for the batch.
        """
        criterion = self._validation_criterion(criterion)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        is_first = rank == 0 or sample["block_ids"] != self._first_valid_ids
        criterion.charge_experts = self._charges_experts and is_first
        # fairseq catches a RuntimeError and tries the batch again. If experts are spread over ranks, the others would
        # then wait for ever, because they do not try it again.
        with _memory_error("in validation"):
            loss, sample_size, logging_output = super().valid_step(sample, model, criterion)
        return loss, sample_size, _with_counts(logging_output, sample)

    def _validation_criterion(self, criterion: Any) -> Any:
        """Return the criterion for validation: ours, whichever trains, so that perplexities can be compared."""
        own = CRITERION_REGISTRY["switch_lm"]
        if isinstance(criterion, own):
            return criterion
        if self._own_criterion is None:
            self._own_criterion = own(self, balance_loss_weight=0.0, router_z_loss_weight=0.0).eval()
        return self._own_criterion

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Log the metrics of an update or a validation batch, and count what it has processed in `self.processed`."""
        processed = self.processed["training" if criterion.training else "validation"]
        if not criterion.training:
            criterion = self._validation_criterion(criterion)
        super().reduce_metrics(logging_outputs, criterion)
        for log in logging_outputs:
            processed["tokens"] += int(log.get("processed_tokens", 0))
            processed["token_pairs"] += int(log.get("processed_token_pairs", 0))

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        """Set the validation loss of each expert to 0. fairseq calls this method before each validation.

        Raise FloatingPointError if a training loss since the last check of the losses is not finite.
        """
        self._loss_check.finish()
        for mixture in getattr(model, "mixtures", []):
            mixture.reset_validation_loss()

    def post_validate(self, model: Any, stats: Any, agg: Any) -> None:
        """Sum the validation loss of each expert over all ranks, after each validation on the subset "valid"."""
        if not self._charges_experts:
            return
        for layer, mixture in enumerate(getattr(model, "mixtures", []), start=1):
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(mixture.valid_loss_E)
                torch.distributed.all_reduce(mixture.valid_tokens_E)
                torch.distributed.all_reduce(mixture.valid_input_ED)
            logger.info(
                "mixture layer %d, one number per expert: validation tokens %s, summed loss of these tokens in nats %s",
                layer,
                mixture.valid_tokens_E.tolist(),
                [round(loss, 1) for loss in mixture.valid_loss_E.tolist()],
            )

    def get_checkpoint_dict(self) -> dict:
        """Return the task's entry in a checkpoint: token counts (`self.processed`) and the digest of the dictionary.

        Raise FloatingPointError if a training loss since the last check is not finite. Then no checkpoint is written.
        """
        self._loss_check.finish()
        return {type(self).__name__: {"processed": self.processed, "dict_sha256": self.stream.dictionary_digest}}

    def set_checkpoint_dict(self, state: dict) -> None:
        """Set `self.processed` to the value in the task's entry in a checkpoint, which `get_checkpoint_dict` returned.

        Raise SettingError if the checkpoint was trained with another dictionary.
        """
        _check_dictionary(state["dict_sha256"], self.stream, "the checkpoint", ", or another --save-dir")
        self.processed = state["processed"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the task for a checkpoint: with that of fairseq's task, the digest of the dictionary."""
        return {**super().state_dict(), "dict_sha256": self.stream.dictionary_digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state of the task from a checkpoint that a command such as fairseq-eval-lm evaluates.

        Raise SettingError if the checkpoint was trained with another dictionary.
        """
        _check_dictionary(state_dict.get("dict_sha256"), self.stream, "the checkpoint")

    def _order(self, num_blocks: int) -> dict[str, Any]:
        """Return what the order of the training blocks depends on: options, name -> value, and the number of blocks."""
        names = ("mega_batches", "replay_mega_batches", "replay_share", "tokens_per_sample")
        options = {f"--{name.replace('_', '-')}": getattr(self.args, name) for name in names}
        return {**options, "number of blocks": num_blocks}

    def _mega_batch_splits(self, text: str) -> list[str]:
        """Return the names of the splits in the stream folder for a set of mega-batches such as "1,3-5"."""
        return [f"mega_batch_{t}" for t in parse_mega_batches(text, self.stream.num_mega_batches)]

    def _blocks(self, splits: list[str], shuffle: bool) -> Blocks:
        """Return the concatenated tokens of the splits as non-overlapping blocks of tokens_per_sample tokens."""
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
        found = Blocks(blocks, blocks.sizes, self.dictionary, self.dictionary, shuffle=shuffle, targets=["future"])
        found.says_padding = self._says_padding
        return found

    def _load(self, split: str) -> Any:
        """Return the documents of a split as a memory-mapped dataset. Raise StreamError if a file of it has changed."""
        if CHECKED not in os.environ:
            self.stream.verify_bytes([split])
        return data_utils.load_indexed_dataset(str(self.stream.prefix(split)), self.dictionary, "mmap")


def _check_start(args: Namespace, stream: StreamFolder) -> None:
    """Raise SettingError if a checkpoint that the options name as the start was trained with another dictionary.

    The checkpoint that fairseq continues by itself, in --save-dir, is checked in `set_checkpoint_dict`.
    """
    for path in (getattr(args, "restore_file", None), getattr(args, "finetune_from_model", None)):
        if not path or path == "checkpoint_last.pt":
            continue
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception:  # not one of ours; if it is damaged or missing, fairseq says so
            continue
        _check_dictionary(dictionary_of(state), stream, path)


def _check_dictionary(digest: str | None, stream: StreamFolder, what: str, otherwise: str = "") -> None:
    """Raise SettingError if the dictionary of a checkpoint, `what`, is known and not that of the stream."""
    if digest not in (None, stream.dictionary_digest):
        raise SettingError(
            f"{what} was trained with another dictionary than that of {stream.path}: give the stream on which it was "
            f"trained{otherwise}"
        )


def _with_counts(logging_output: dict[str, Any], sample: dict) -> dict[str, Any]:
    """Add to the values to log how many tokens and token pairs a batch has, from which the FLOPs are computed.

    The FLOPs for a sequence of L tokens are a * L + b * L^2, where a and b depend only on the model. So the sum of L
    and the sum of L^2 over all sequences are enough.
    """
    target = sample["target"]
    return {
        **logging_output,
        "processed_tokens": target.numel(),
        "processed_token_pairs": target.numel() * target.size(1),
    }


@contextmanager
def _memory_error(when: str) -> Iterator[None]:
    """Replace torch's RuntimeError about too little memory by a MemoryError, which fairseq does not catch."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise MemoryError(f"out of memory {when}: lower --batch-size ({error})") from error
        raise

"""The checkpoint from which the first stage starts, instead of random weights (the setting `init_from`)."""

from pathlib import Path
from typing import Any

import torch

from fairseq_alma.checkpoints import dictionary_of, read_checkpoint
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.learner_settings import LanguageModelGrowingMixtureSettings
from fairseq_alma.core.predictors import checked_file, read_predictor
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.core.stream_folder import TrainingView
from fairseq_alma.evaluation.members import load_model
from fairseq_alma.evaluation.vocabulary import earlier_vocabularies
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.models.stored import stored_model

SIZES = (
    "decoder_layers", "decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_attention_heads", "learned_positions"
)  # fmt: skip
"""Options of the model that are taken from the checkpoint."""


def initial_sizes(settings: LanguageModelSettings, stream: TrainingView) -> dict[str, int]:
    """Return the sizes of the model in the checkpoint, by option.

    Raise SettingError if the checkpoint is missing or damaged, or does not fit the settings or the stream, and RunError
    if it was given as a folder that is not a run.
    """
    path = _path(settings)
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        raise SettingError(
            f"init_from={path} is not a complete checkpoint: give one of alma-lm, alma-grow or alma-import"
        )
    options = stored_model(checkpoint, path)
    if options.num_experts != settings.experts:
        more = f", or add experts with alma-grow {path}" if options.num_experts < settings.experts else ""
        raise SettingError(
            f"init_from={path} has {options.num_experts} experts in each mixture, but experts={settings.experts}: give "
            f"experts={options.num_experts}{more}"
        )
    own = settings.learner_settings
    if isinstance(own, LanguageModelGrowingMixtureSettings) and own.grow_router == "copy" and own.adds_experts:
        splits = [value for name, value in checkpoint["model"].items() if name.endswith("router.split_E")]
        if any((split_E >= 0).any() for split_E in splits):
            raise SettingError(
                f"init_from={path} has experts that were added with the router tree: give grow_router=tree, or "
                f"grow_experts=0"
            )
    if settings.tokens_per_sample > options.learned_positions:
        raise SettingError(
            f"tokens_per_sample={settings.tokens_per_sample} is more than the {options.learned_positions} positions of "
            f"the model in init_from={path}: lower it"
        )
    if dictionary_of(checkpoint) not in (None, stream.dictionary_digest, *earlier_vocabularies(stream.path)):
        raise SettingError(
            f"init_from={path} was trained with another dictionary than that of {stream.path}: make the stream with "
            f"alma-prep --tokenizer FILE, the tokenizer of this model, or copy its stream with alma-prep grow-vocab"
        )
    return {name: getattr(options, name) for name in SIZES}


def initial_weights(settings: LanguageModelSettings, stream: TrainingView) -> dict[str, Any]:
    """Return the weights in the checkpoint. Raise AlmaError if they cannot be used with the stream."""
    model, _ = load_model(_path(settings), stream, torch.device("cpu"))
    return model.state_dict()


def _path(settings: LanguageModelSettings) -> Path:
    """Return the path of the checkpoint: the copy in the run folder, once there is one."""
    assert settings.init_from is not None
    run, given = RunFolder(Path(settings.out)), Path(settings.init_from)
    copy = run.member(0, 1) / "checkpoint_untrained.pt"
    # A copy of another checkpoint is from a command that ended before its first step.
    is_copied = run.settings.exists() and read_settings(run.path).get("init_from") == str(given.absolute())
    if is_copied and read_checkpoint(copy) is not None:
        return copy
    if not given.is_dir():
        return given
    try:
        checkpoints = read_predictor(given)["checkpoints"]
    except RunError as error:
        raise RunError(f"init_from={given}: {error}") from error
    if len(checkpoints) > 1:
        names = ", ".join(str(given / entry["path"]) for entry in checkpoints)
        raise SettingError(f"init_from={given} is an ensemble: give the checkpoint of one member, {names}")
    return checked_file(given, checkpoints[0])

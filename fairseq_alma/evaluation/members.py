"""The models of a run or of checkpoint files: which they are, and how they are loaded."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch

import fairseq_alma
from data_prep.tokenization.tokenizers import dictionary_size as padded_size
from fairseq_alma.checkpoints import dictionary_of, read_checkpoint
from fairseq_alma.core.errors import SettingError, StreamError
from fairseq_alma.core.predictors import checked_file, read_predictor
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.stream_folder import StreamFolder, TrainingView
from fairseq_alma.evaluation.vocabulary import EMBEDDINGS, earlier_vocabularies, with_new_symbols
from fairseq_alma.stream_tokenizer import StreamTokenizer

Dictionary = StreamFolder | TrainingView | StreamTokenizer
"""A folder with a dict.txt: a stream, or the tokenizer of a stream."""


@dataclass(frozen=True)
class Members:
    """The checkpoints of the models that predict together, and the stream with which they were trained."""

    checkpoints: list[Path]
    stream: Path
    """The stream folder: the one that was given, or the one that the run recorded."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The settings of the run, if its stream is used; otherwise empty."""


def find_members(paths: Sequence[Path], stream: Path | None = None, stage: int | None = None) -> Members:
    """Return the checkpoints and the stream of a run, if `paths` contains only its folder, or those that are given.

    For checkpoint files, `stream` must be given. Raise StreamError if a path does not exist, or if there is no stream,
    and RunError if the run has no finished stage.

    Args:
        paths: a run folder, or the checkpoints of an ensemble.
        stream: the stream folder. By default, the one that the run recorded.
        stage: stage of the run after which its models are used. By default, that of the current predictor.
    """
    if len(paths) == 1 and paths[0].is_dir():
        # `current` of alma-deploy may lead to another folder at any moment: read all files from one.
        run = paths[0].resolve() if paths[0].is_symlink() else paths[0]
        checkpoints = [checked_file(run, entry) for entry in read_predictor(run, stage)["checkpoints"]]
        if not (run / "settings.json").is_file():
            files = ", ".join(str(path) for path in checkpoints)
            raise StreamError(
                f"{run} has no settings.json, so it is not a run folder: give the checkpoint files ({files}) and "
                f"--stream"
            )
        settings = read_settings(run)
        if "stream" not in settings:
            raise StreamError(
                f"{run} is not an alma-lm run, because its settings contain no stream: give a run of a language model"
            )
        if stream is None and (run / "dict.txt").is_file():
            stream = run  # alma-deploy has copied the tokenizer
        if stream is not None:
            return Members(checkpoints, stream)
        recorded = Path(settings["stream"])
        if not recorded.is_dir():
            raise StreamError(
                f"{run / 'settings.json'} names the stream {recorded}, but there is no such folder: if the stream was "
                f"moved, give --stream STREAM"
            )
        return Members(checkpoints, recorded, settings)
    if stage is not None:
        raise StreamError("--stage needs a run folder, not checkpoint files: omit --stage")
    if missing := [f"'{path}'" for path in paths if not path.exists()]:
        raise StreamError(f"there is no run and no checkpoint at {', '.join(missing)}: check the path")
    if folders := [f"'{path}'" for path in paths if path.is_dir()]:
        raise StreamError(f"{', '.join(folders)} is a folder: give one run folder alone, or only checkpoint files")
    if stream is None:
        raise StreamError("give --stream STREAM, the stream folder with which the checkpoints were trained")
    return Members(list(paths), stream)


def load_model(checkpoint: Path, stream: Dictionary, device: torch.device, arch: str | None = None) -> tuple[Any, int]:
    """Load a checkpoint. Return its model, in evaluation mode, and the number of tokens of the blocks of its training.

    The checkpoint may come from somebody else: no code that it names is run (see `fairseq_alma.models.stored`).

    Args:
        checkpoint: a checkpoint of a switch_lm model.
        stream: the stream, or its tokenizer. It must have the dictionary with which the model was trained, or be a copy
            with a larger vocabulary (`alma-prep grow-vocab`), whose new symbols get embeddings (see
            `with_new_symbols`).
        device: device for the model.
        arch: the architecture of the checkpoint, if it is another language model of fairseq, or one of the user.

    Raises:
        StreamError: if the checkpoint is missing or damaged, or has another architecture or dictionary.
        SettingError: if its configuration or its weights are not those of a switch_lm model.
    """
    path = Path(checkpoint)
    state = _whole_checkpoint(path)
    name, options = _checked_options(state, path, arch)
    if (num_old := _earlier_symbols(state, stream, options)) is None:
        _check_dictionary(state, path, stream)
    else:
        state["model"] = with_new_symbols(state["model"], num_old, stream.path)
    from fairseq.data import Dictionary as FairseqDictionary
    from fairseq.models import MODEL_REGISTRY
    from omegaconf import OmegaConf

    from fairseq_alma.models.any_network import with_targets

    options._name = name
    is_ours = hasattr(options, "num_experts")
    if is_ours:
        options.expert_parallel = 1  # this process has all experts
    dictionary = FairseqDictionary.load(str(stream.path / "dict.txt"))
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    build = partial(MODEL_REGISTRY[name].build_model, OmegaConf.structured(options), task)
    try:
        if not is_ours:  # of ours, the sizes are checked already
            _check_shapes(build, state["model"])
        model = with_targets(build())
        model.load_state_dict(state["model"], strict=True)
    except (SettingError, RuntimeError) as error:
        raise SettingError(f"{path} cannot be loaded: {error}") from error
    return model.to(device).eval(), options.tokens_per_sample


def load_member(
    checkpoint: Path, stream: StreamFolder | TrainingView, device: torch.device, arch: str | None = None
) -> tuple[Any, Any]:
    """Load a checkpoint. Return its model, in evaluation mode, and the fairseq task that reads the data of `stream`.

    For the arguments and the errors, see `load_model`.
    """
    model, tokens_per_sample = load_model(checkpoint, stream, device, arch)
    from fairseq_alma.tasks.alma_lm import AlmaLanguageModelingConfig, AlmaLanguageModelingTask

    task_options = AlmaLanguageModelingConfig(data=str(stream.path), tokens_per_sample=tokens_per_sample)
    return model, AlmaLanguageModelingTask.setup_task(task_options)


def _checked_options(state: Mapping[str, Any], path: Path, arch: str | None) -> tuple[str, Any]:
    """Return the name of the model in a checkpoint, and its checked options. See `load_model`."""
    # Import fairseq only here, because the import takes seconds and is not needed to report bad arguments.
    from fairseq.models import (
        ARCH_MODEL_NAME_REGISTRY,
        MODEL_DATACLASS_REGISTRY,
        MODEL_REGISTRY,
        FairseqLanguageModel,
    )

    fairseq_alma.register()
    from fairseq_alma.models.stored import stored_entry, stored_model, stored_options
    from fairseq_alma.models.switch_lm import SwitchLanguageModel

    architecture = stored_entry(state, path, "cfg", "model").get("_name")
    name = ARCH_MODEL_NAME_REGISTRY.get(architecture) if isinstance(architecture, str) else None
    if name is not None and issubclass(MODEL_REGISTRY[name], SwitchLanguageModel):
        return name, stored_model(state, path, MODEL_DATACLASS_REGISTRY[name])
    options = MODEL_DATACLASS_REGISTRY.get(name)
    if (
        name is None
        or architecture != arch
        or options is None
        or not issubclass(MODEL_REGISTRY[name], FairseqLanguageModel)
    ):
        shown = shortened(architecture).strip("'")
        raise StreamError(
            f"{path} is a checkpoint of {shown}, which is not one of our architectures: give --arch {shown} if you "
            f"expect it, and --plugin MODULE if code of yours registers it"
        )
    return name, stored_options(state, path, options)


def _check_shapes(build: Callable[[], Any], weights: Mapping[str, Any]) -> None:
    """Raise SettingError if a model does not have the shapes of these weights. So none larger than the file is made."""
    with torch.device("meta"):  # takes no memory
        model = build()
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in weights.items() if torch.is_tensor(tensor)}
    if differing := sorted(name for name in own.keys() | weights.keys() if own.get(name) != found.get(name)):
        raise SettingError(f"the weights {differing[0]} do not have the shape that its configuration says")


def _whole_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint file. Raise StreamError if the file is missing or damaged."""
    state = read_checkpoint(path)
    if state is None:
        hint = "train a stage first (alma-lm, or fairseq-train)"
        if path.is_file():
            hint = "the file is damaged, or no checkpoint: restore it from a backup, or score another stage (--stage)"
        elif path.is_dir():
            hint = "give a single run folder, or the checkpoint files that are listed in the predictor.json of each run"
        raise StreamError(f"no complete checkpoint at {path}: {hint}")
    return state


def _earlier_symbols(state: Mapping[str, Any], stream: Dictionary, options: Any) -> int | None:
    """Return the number of symbols of the vocabulary of a model, if that of the stream has been grown from it."""
    if not hasattr(options, "num_experts") or (digest := dictionary_of(state)) in (None, stream.dictionary_digest):
        return None
    num_old = earlier_vocabularies(stream.path).get(digest)
    # A file may come from somebody else, so its digest need not be that of its weights.
    return num_old if num_old is not None and len(state["model"][EMBEDDINGS]) == padded_size(num_old) else None


def _check_dictionary(state: Mapping[str, Any], path: Path, stream: Dictionary) -> None:
    """Raise StreamError if the model in a checkpoint was trained with another dictionary than that of the stream."""
    num_words = len(state["model"][EMBEDDINGS])
    if num_words != stream.dictionary_size:
        raise StreamError(
            f"{path} was trained with a dictionary of {num_words} entries, but the dictionary of "
            f"{stream.path} has {stream.dictionary_size}: give the stream with which the model was trained, or a "
            f"stream made with the same tokenizer"
        )
    if dictionary_of(state) not in (None, stream.dictionary_digest):
        raise StreamError(
            f"{path} was trained with another dictionary than {stream.path}/dict.txt: give the stream with which the "
            f"model was trained, or a stream made with the same tokenizer"
        )

"""Predict with the networks of a run: `vision.load` reads them from the run folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_alma.app.plugins import function_name, source_digest
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.predictors import VisionPredictor, checked_file, read_predictor
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder
from vision.checkpoints import read_checkpoint
from vision.image_format import ImageFormat
from vision.networks.architectures import backbone_names, find_architecture
from vision.voting import sum_members

IMAGES_AT_ONCE = 500
"""Number of images in one forward pass."""


class Predictor:
    """The trained networks of a run. `predictor(images)` returns the probability of each class.

    Args:
        modules: the networks, which map vectors [b, i] or images [b, channels, height, width] to logits [b, C].
        takes_vectors: whether the networks take vectors.
        combine: how the networks predict together: "probability", "logit" or "vote" (see `MemberOutputs.combine`), or
            "logit_sum" if the probabilities are those of the sum of the logits.
        image_format: format of the images in training.
        is_bfloat16: whether the networks are computed in bfloat16, as with the setting precision=bfloat16.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        takes_vectors: bool,
        combine: Any,
        image_format: ImageFormat,
        is_bfloat16: bool = False,
    ):
        self.modules = [module.eval() for module in modules]
        self.image_format = image_format
        self._takes_vectors, self._combine, self._is_bfloat16 = takes_vectors, combine, is_bfloat16

    @property
    def class_names(self) -> list[str] | None:
        """Name of each class, in the order of the probabilities. None if the dataset has no names."""
        return self.image_format.class_names

    def __call__(self, images: Any) -> np.ndarray:
        """Return the probability of each class for each image, float32 [n, C].

        If the networks predict by majority vote, a probability is nearly the share of the votes. The mean probability
        counts as half a vote, so that it decides between classes with the same number of votes.

        Args:
            images: array, tensor, image of Pillow, or list of these. The axes are [n, height, width, channels] or
                [n, channels, height, width]. Grey images need no axis for the channel, and one image no axis for n.
                Pixels are uint8, or floats from 0 to 1, as torchvision's ToTensor gives them. If the images in training
                were floats, they are such floats. Images of another size are resized as with the setting `image_size`
                of the run, and without it refused. Flat images as in `Examples.images` are possible, too.

        On a GPU, torch computes convolutions in TF32 by default, and a run with `precision=float32` does not. Set
        `torch.backends.cudnn.allow_tf32 = False` for the same probabilities.

        Raises:
            SettingError: if the images do not fit those in training, or if it is unclear how their shape is meant.
        """
        x = self.image_format.to_tensor(images)
        device = next(self.modules[0].parameters()).device
        parts = [self._probabilities(part.to(device)) for part in x.split(IMAGES_AT_ONCE)]
        return torch.cat(parts).cpu().numpy()

    @torch.no_grad()
    def _probabilities(self, stored: Tensor) -> Tensor:
        """Return the probabilities for images, uint8 or float32 [b, channels * height * width], as a tensor."""
        x = self.image_format.pixels.normalise(stored)
        if not self._takes_vectors:
            x = x.unflatten(1, self.image_format.image_shape)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._is_bfloat16 and not self._takes_vectors):
            logits_NbC = torch.stack([module(x).float() for module in self.modules])
        if self._combine == "logit_sum":
            return logits_NbC.sum(0).softmax(-1)
        return sum_members(logits_NbC, 1, self._combine).probabilities()[0]


def load(
    folder: str | Path,
    stage: int | None = None,
    device: str | torch.device = "cpu",
    backbone: str | Callable[..., Any] | None = None,
) -> Predictor:
    """Return a predictor with the networks of a run after its last finished stage, or after an earlier stage.

    The run may be somebody else's, so no code that the run folder names is imported or called. If a function of yours
    made the networks, give it as `backbone`. If a plugin registered the network, import the plugin before this call.

    Args:
        folder: the run folder of one seed.
        stage: index of a finished stage, from 1. The run needs the setting `keep_stages`. By default the last stage.
        backbone: the setting `backbone` of the run, or the function itself. It is needed only for a function of yours.

    Raises:
        RunError: if the folder contains no trained network, or if a file has changed since the run wrote it.
        StageError: if a file is missing.
        SettingError: if the run has another backbone, or if the module of the function is not found.
    """
    # `current` of alma-deploy may lead to another folder at any moment: read all files from one.
    folder = Path(folder).resolve() if Path(folder).is_symlink() else Path(folder)
    if (folder / "settings.json").is_file() and "stream" in read_settings(folder):
        raise RunError(f"{folder} is not an alma-vision run: load language models with fairseq_alma.load")
    description = read_predictor(folder, stage, VisionPredictor)
    settings, image_format = read_settings(folder), ImageFormat.read(folder)
    if backbone is not None and not isinstance(backbone, str):
        backbone = function_name("backbone", backbone)
    _check_backbone(settings, folder, backbone)
    modules, takes_vectors = [], False
    for checkpoint in description["checkpoints"]:
        path = checked_file(folder, checkpoint)
        # Creating a module draws random initial parameters, but torch's random state must not change.
        with torch.random.fork_rng(devices=[]):
            stack = read_checkpoint(path, torch.device(device), settings.get("backbone") or backbone)
            if not checkpoint["networks"] or max(checkpoint["networks"]) >= len(stack):
                raise RunError(
                    f"{RunFolder(folder).predictor(stage)} names the networks {checkpoint['networks']} of {path}, "
                    f"which has {len(stack)}: restore the file from a backup"
                )
            modules += [stack.to_module(number).to(device) for number in checkpoint["networks"]]
        takes_vectors = len(stack.module_input_shape) == 1
    is_bfloat16 = settings.get("precision") == "bfloat16"
    return Predictor(modules, takes_vectors, description["combine"], image_format, is_bfloat16)


def _check_backbone(settings: Mapping[str, Any], folder: Path, given: str | None) -> None:
    """Check the network of a run, before code of the network is called."""
    recorded = settings.get("backbone")
    if recorded is None:
        return
    if given is None and recorded not in backbone_names():
        how, plugin = f"vision.load(..., backbone={recorded!r})", settings.get("plugin")
        if ":" not in str(recorded):
            how = f"import {plugin!r}, the plugin that registered it, and then call vision.load"
        raise SettingError(
            f"{folder} was made with backbone={recorded!r}, which is code of its author, so it is not run: if you "
            f"trust it, {how}"
        )
    if given not in (None, recorded):
        raise SettingError(
            f"{folder} was made with backbone={recorded!r}, not {given!r}: give that one if you trust it"
        )
    digest = settings.get("backbone_digest")
    if digest and source_digest(find_architecture(recorded).function, "backbone", recorded) != digest:
        raise RunError(
            f"the source code of backbone={recorded} has changed since {folder} was written, so the networks may "
            f"compute something else now: restore the old code, or train a new run"
        )

"""Networks in a file: written whole or not at all, read without trusting it."""

import os
from pathlib import Path

import torch

from fairseq_alma.core.errors import StageError
from vision.networks import MixtureStack, MLPStack, Stack, VGGMixtureStack, VGGStack

KINDS: dict[str, type[Stack]] = {
    "mlp": MLPStack,
    "mixture": MixtureStack,
    "vgg": VGGStack,
    "vgg_mixture": VGGMixtureStack,
}
FORMAT_VERSION = 1


def write_checkpoint(stack: Stack, path: Path) -> None:
    """The networks of a stack, in `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Given a path torch would write its name, and so our process number, into the file: equal networks are equal
        # files, and have one digest.
        with open(temporary, "wb") as file:
            torch.save({"format_version": FORMAT_VERSION, **stack.state()}, file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_checkpoint(path: Path, device: torch.device) -> Stack:
    """The networks that `write_checkpoint` left.

    Raises:
        StageError: the file is gone, damaged, or not of this release.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {state['format_version']}, this release reads {FORMAT_VERSION}")
        return KINDS[state["kind"]].from_state(state, device)
    except FileNotFoundError as error:
        raise StageError(f"{path} is gone: restore it, or start anew in another out=") from error
    except Exception as error:
        # A damaged file fails in many ways: as a zip, as a pickle, by a missing key.
        raise StageError(f"{path} cannot be read ({error!r}): restore it, or start anew in another out=") from error

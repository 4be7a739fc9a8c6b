"""Write networks to a file and read them back.

A file is written completely or not at all. Reading a file executes no code from it.
"""

from pathlib import Path

import torch

from fairseq_alma.core.errors import StageError
from fairseq_alma.core.files import written_aside
from vision.networks import MixtureStack, MLPStack, Stack, VGGMixtureStack, VGGStack

KINDS: dict[str, type[Stack]] = {
    "mlp": MLPStack,
    "mixture": MixtureStack,
    "vgg": VGGStack,
    "vgg_mixture": VGGMixtureStack,
}
"""Class of each kind of stack. The keys are the values of "kind" in the dictionary that `Stack.state` returns. Register
new kinds here."""
FORMAT_VERSION = 1


def write_checkpoint(stack: Stack, path: Path) -> None:
    """Write the networks of a stack to `path`. The parent folders are created."""
    # Do not wait until the disk has stored the file: if a power cut destroys it, the stage can be trained again. Pass
    # torch a file object and not a path, because torch writes the name of a path into the file. The temporary name
    # contains the process id, so files with equal networks would then differ and have different digests.
    with written_aside(path, durable=False) as temporary, temporary.open("wb") as file:
        torch.save({"format_version": FORMAT_VERSION, **stack.state()}, file)


def read_checkpoint(path: Path, device: torch.device) -> Stack:
    """Return the networks in a file that `write_checkpoint` wrote.

    Args:
        path: the file.
        device: device on which the networks are placed.

    Raises:
        StageError: if the file is missing or damaged, or has another format version.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {state['format_version']}, but this release reads {FORMAT_VERSION}")
        return KINDS[state["kind"]].from_state(state, device)
    except FileNotFoundError as error:
        raise StageError(f"{path} is missing: restore it, or start again in another out=") from error
    except Exception as error:
        # A damaged file can raise many kinds of errors: from reading the zip archive or the pickle, or a KeyError.
        raise StageError(f"{path} cannot be read ({error!r}): restore it, or start again in another out=") from error

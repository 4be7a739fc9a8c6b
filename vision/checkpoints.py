"""Networks in a file. A write is complete or leaves nothing, and a read executes no code from the file."""

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
"""The class of each kind of stack, by the name that its `state` records. A new kind of stack is registered here."""
FORMAT_VERSION = 1


def write_checkpoint(stack: Stack, path: Path) -> None:
    """Write the networks of a stack to `path`. The parent folders are created."""
    # Not durable: after a power cut a stage can be trained again. torch gets a file object and not a path, because it
    # writes the name of a path, which contains our process id, into the file. Equal networks must have equal digests.
    with written_aside(path, durable=False) as temporary, temporary.open("wb") as file:
        torch.save({"format_version": FORMAT_VERSION, **stack.state()}, file)


def read_checkpoint(path: Path, device: torch.device) -> Stack:
    """Return the networks that `write_checkpoint` wrote.

    Args:
        path: the file.
        device: where the networks are stored.

    Raises:
        StageError: the file is missing, damaged, or of another format version.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {state['format_version']}, this release reads {FORMAT_VERSION}")
        return KINDS[state["kind"]].from_state(state, device)
    except FileNotFoundError as error:
        raise StageError(f"{path} is missing: restore it, or start again in another out=") from error
    except Exception as error:
        # A damaged file can raise many kinds of errors: as a zip archive, as a pickle, by a missing key.
        raise StageError(f"{path} cannot be read ({error!r}): restore it, or start again in another out=") from error

"""Write networks to a file and read them back. Reading a file does not execute code that the file contains."""

from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch

from fairseq_alma.core.errors import SettingError, StageError
from fairseq_alma.core.files import check_zip, written_aside
from vision.networks import GatedModuleStack, MixtureStack, MLPStack, ModuleStack, Stack
from vision.networks.architectures import backbone_names

KINDS: dict[str, type[Stack]] = {
    "mlp": MLPStack,
    "mixture": MixtureStack,
    "module": ModuleStack,
    "gated_module": GatedModuleStack,
}
"""The classes of network stacks, by their names in checkpoints, where the key is "kind"."""
FORMAT_VERSION = 1
"""Version of the file format. A file with another version is refused."""


def write_checkpoint(stack: Stack, path: Path) -> None:
    """Write the networks of a stack to `path`, completely or not at all. Missing parent folders are created."""
    # durable=False: the disk must have stored the file when the done mark of this save is written, not before.
    # Pass a file object to torch.save, because torch.save writes the name of a path into the file. The name of the
    # temporary file contains the process id, so files with equal networks would have different digests.
    with written_aside(path, durable=False) as temporary, temporary.open("wb") as file:
        torch.save({"format_version": FORMAT_VERSION, **stack.state()}, file)


def read_checkpoint(path: Path, device: torch.device, backbone: str | None = None) -> Stack:
    """Return the networks in a file that `write_checkpoint` wrote.

    The file may come from somebody else, so a function that it names is not imported, unless the caller names it too.

    Args:
        backbone: the setting `backbone` of the run, which the file must have. By default, the file may have any network
            that is registered in this process.

    Raises:
        StageError: if the file is missing or damaged, or has another format version.
        SettingError: if the file names another network, or if the function that returned the network is not found.
    """
    try:
        check_zip(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format_version"] != FORMAT_VERSION:
            raise ValueError(f"the file has format version {state['format_version']}, expected {FORMAT_VERSION}")
        stack_class = KINDS[state["kind"]]
        _check_backbone(state["structure"]["backbone"] if "structure" in state else "mlp", backbone, path)
        for kind in ("parameters", "statistics"):
            for name, value in (state.get(kind) or {}).items():
                # A tensor that repeats a few values would need much more memory than the file once it is copied.
                if value.nbytes > value.untyped_storage().nbytes():
                    raise ValueError(f"the values of {name} are not in the file")
        return stack_class.from_state(state, device)
    except (SettingError, MemoryError, torch.OutOfMemoryError):
        raise
    except FileNotFoundError as error:
        raise StageError(f"{path} is missing: restore it, or start a new run in another folder (out=)") from error
    except Exception as error:  # a damaged file can cause many kinds, such as zip errors, pickle errors, KeyErrors
        raise StageError(
            f"{path} cannot be read ({error!r}): restore it, or start a new run in another folder (out=)"
        ) from error


def _check_backbone(found: Any, expected: str | None, path: Path) -> None:
    """Raise SettingError if the network in a file is not `expected` (None: if it is not registered)."""
    if expected is None and found not in backbone_names():
        raise SettingError(
            f"{path} contains networks of backbone={shortened(found)}, a function that is not called, because a file "
            f"may come from somebody else: if you trust the function, give its name as backbone="
        )
    if expected is not None and found != expected:
        raise SettingError(
            f"{path} contains networks of backbone={shortened(found)}, but backbone={expected} was given: give the "
            f"network of the run, or restore the file"
        )

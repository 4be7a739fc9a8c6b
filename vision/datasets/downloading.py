"""Download the files of datasets."""

from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import SettingError

DOWNLOAD_AGAIN = "remove it, and the next run with an internet connection downloads it again"
"""What the user can do about a damaged file. Every message about a damaged file ends with this text."""


def download(name: str, kind: str, data_root: Path, folder: str, arguments: dict[str, Any]) -> None:
    """Download and unpack the files of a dataset with torchvision.

    Args:
        name: name of the dataset.
        kind: name of the dataset's class in torchvision.datasets.
        data_root: the data folder.
        folder: the dataset's folder in `data_root`. The error message names it.
        arguments: further keyword arguments for the class in torchvision.datasets.

    Raises:
        SettingError: if the download fails.
    """
    # Import torchvision only when it is needed, because the import takes longer than the training of a stage.
    import torchvision

    try:
        getattr(torchvision.datasets, kind)(data_root, download=True, **arguments)
    except Exception as error:
        # Catch every error, because torchvision raises different kinds of errors if there is no internet connection, if
        # an archive is damaged, or if a file is truncated.
        raise SettingError(
            f"dataset={name}: its files are not in {data_root / folder} and could not be downloaded "
            f"({type(error).__name__}: {error}). Set data_root= to the folder that contains {folder}/, or run the "
            f"command once on a machine with an internet connection"
        ) from error

"""Read datasets of the Hugging Face Hub by name: --source hf:NAME[:CONFIG][:SPLIT], such as hf:wikitext:wikitext-2-v1.

The Hub stores each dataset also as Parquet files, in the branch refs/convert/parquet. These files are read through
fsspec. So the library `datasets` is not needed, and no script of a dataset is executed.
"""

from collections.abc import Iterator

from data_prep.errors import PrepError
from data_prep.sources.base import Document, Kind, Part, ReportProgress, Skipped, SourceFile
from data_prep.sources.remote import list_remote
from data_prep.sources.text import TEXT

_DEFAULT_SPLIT = "train"


def list_dataset(path: str) -> list[SourceFile]:
    """Return the Parquet files of a dataset of the Hub, sorted by name.

    Args:
        path: NAME, NAME:CONFIG, NAME::SPLIT or NAME:CONFIG:SPLIT. Without a split, the split train is read. CONFIG can
            be omitted if the dataset has only one.

    Raises:
        PrepError: if there is no such dataset, config or split, or if the Hub stores only its first part as Parquet.
    """
    if path.startswith(("/", ".", "~")):
        raise PrepError(f"source hf:{path}: this is a path, not the name of a dataset of the Hub. Write text:{path}.")
    name, config, split = [*path.split(":"), "", ""][:3]
    split = split or _DEFAULT_SPLIT
    files = list_remote("text", f"hf://datasets/{name}@refs/convert/parquet")
    # The names are CONFIG/SPLIT/0000.parquet, or CONFIG/partial-SPLIT/0000.parquet if only a part was converted.
    folders = sorted({file.name.rpartition("/")[0] for file in files})
    configs = sorted({folder.partition("/")[0] for folder in folders})
    if config not in configs and (config or len(configs) > 1):
        raise PrepError(
            f"source hf:{path}: the dataset has the configs {', '.join(configs)}: write hf:{name}:CONFIG:{split}."
        )
    config = config or configs[0]
    found = [file for file in files if file.name.startswith(f"{config}/{split}/")]
    if found:
        return found
    if f"{config}/partial-{split}" in folders:
        raise PrepError(
            f"source hf:{path}: the Hub stores only the first 5 GB of this split as Parquet. Give the files of the "
            f"dataset itself, for example text:hf://datasets/{name}/FOLDER/*.json.gz."
        )
    splits = [folder.partition("/")[2] for folder in folders if folder.startswith(f"{config}/")]
    raise PrepError(f"source hf:{path}: {config} has no split {split}: use one of {', '.join(splits)}.")


def _read(part: Part, report_progress: ReportProgress) -> Iterator[Document | Skipped]:
    """Yield the documents of a Parquet file."""
    yield from TEXT.read(part, report_progress)


HUGGING_FACE = Kind("Parquet file", lambda root: [], _read, needs=("pyarrow", "huggingface_hub"))

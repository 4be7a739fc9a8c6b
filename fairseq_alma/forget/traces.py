"""What still contains forgotten text or has learned from it: what can be removed, and what cannot be checked."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.tokenization.tokenizers import TOKENIZERS
from fairseq_alma.core.arrivals import read_arrivals
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json, remove, sha256_of
from fairseq_alma.core.recorded_settings import read_settings
from fairseq_alma.core.run_folder import RunFolder, index_of_stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.data.mega_batch_set import format_mega_batches
from fairseq_alma.deploy import current_of
from fairseq_alma.forget.mask import Certificate, in_vocabulary


class Trace(NamedTuple):
    """Something that remembers the text."""

    what: str
    """A file or folder, or a description."""
    why: str
    folders: tuple[Path, ...] = ()
    """What --purge removes; () if it removes nothing."""


def traces(
    stream: StreamFolder,
    certificate: Certificate,
    runs: Collection[Path],
    caches: Collection[Path],
    withdrawn: Sequence[Path],
) -> list[Trace]:
    """Return what still remembers the text of a certificate.

    Args:
        stream: the stream.
        certificate: the certificate.
        runs: the runs that the user has named.
        caches: folders of alma-prep --cache.
        withdrawn: folders of deployed models that have learned from the text.
    """
    return [
        *_of_stream(stream, certificate),
        *_of_caches(certificate, caches),
        *_of_runs(certificate, runs),
        *map(_of_deployed, withdrawn),
        Trace("backups, and copies of this stream and of its runs elsewhere", "this command does not know them"),
        Trace(
            "models that were exported, or copied by other means than alma-deploy, and runs that were not named",
            "this command does not know them: replace them by models that were trained again",
        ),
    ]


def purge(found: Sequence[Trace]) -> list[Trace]:
    """Remove what can be removed. Return the traces that are left."""
    for trace in found:
        for folder in trace.folders:
            remove(folder)
    return [trace for trace in found if not trace.folders]


def _of_stream(stream: StreamFolder, certificate: Certificate) -> Iterator[Trace]:
    tokenizer = stream.description["tokenizer"]
    is_given = tokenizer.get("kind") not in TOKENIZERS
    trained_on = in_vocabulary(stream.description)
    has_read = certificate["splits"].keys() & {f"mega_batch_{t}" for t in trained_on}
    if has_read and not (is_given and not stream.description.get("grown_from")):
        only = len(certificate["only_here"])
        yield Trace(
            tokenizer["file"],
            f"it was trained on text of the mega-batches {format_mega_batches(trained_on)}, which may include the "
            f"forgotten text, so its subwords may depend on that text. In these mega-batches, {only} of its tokens "
            f"occur only in the forgotten text. Another tokenizer would change every token of the stream",
        )
    if (stream.path / "dedup").is_dir():
        yield Trace(
            "dedup", "hashes and signatures of the text, so that --extend leaves it out if it comes again; not its text"
        )
    for name, links in certificate["links"].items():
        yield Trace(name, f"the unmasked file has {links} other name(s) (hard links), outside the stream folder")
    read = [*dict.fromkeys(_sources(stream, certificate["splits"]))]
    for name in read:
        yield Trace(f"source {name}", "the input files of alma-prep are not changed: remove the text there, too")
    made = (stream.description, *stream.description.get("extensions", []))
    all_names = dict.fromkeys(f"{one['kind']}:{one['path']}" for each in made for one in each.get("sources", []))
    if others := [name for name in all_names if name not in read]:
        yield Trace("other sources", f"{', '.join(others)}: they may have copies of the text that alma-prep left out")


def _sources(stream: StreamFolder, splits: Collection[str]) -> Iterator[str]:
    """Yield the sources of the calls of alma-prep that have made one of the splits."""
    parts = {split.partition("/")[0] for split in splits}
    extensions = stream.description.get("extensions", [])
    for extension in extensions:
        first, last = extension["mega_batches"]
        added = {f"mega_batch_{t}" for t in range(first, last + 1)}
        if parts & added:
            yield from (f"{one['kind']}:{one['path']}" for one in extension["sources"])
        parts -= added
    if parts:
        yield from (f"{one['kind']}:{one['path']}" for one in stream.description.get("sources", []))


def _of_caches(certificate: Certificate, caches: Collection[Path]) -> Iterator[Trace]:
    """Find the texts in folders of alma-prep --cache, by the hashes of the documents."""
    if not caches:
        yield Trace("folders of alma-prep --cache", "they were not searched: give --cache if there are any")
    wanted = {bytes.fromhex(name) for name in certificate["documents"]}
    for cache in caches:
        entries = []
        for path in cache.glob("*/documents.npy"):
            hashes = np.ascontiguousarray(np.load(path, mmap_mode="r")["identity"]).view("V16")[::2]
            if wanted & set(map(bytes, hashes)):
                entries.append(path.parent)
        if entries:
            folders = (*entries, cache / "tokens")
            yield Trace(
                f"cache {cache}",
                f"{len(entries)} entries contain the text, and `tokens` may contain its tokens",
                folders,
            )


def _of_runs(certificate: Certificate, runs: Collection[Path]) -> Iterator[Trace]:
    before = {name: one["before"] for name, one in certificate["splits"].items()}
    for run in runs:
        name = str(run)
        if name not in certificate["runs"]:
            continue
        entry = certificate["runs"][name]
        if entry["state"] != "trained again":
            yield Trace(name, f"it is not trained again yet (state: {entry['state']})")
        for folder in sorted((run / "set_aside").glob("*")):
            if aside_has_learned(folder, before):
                yield Trace(str(folder), "stages that a rollback has set aside were trained on the text", (folder,))
        yield from _of_shared(run, forgotten_checkpoints(run, certificate))
        settings = read_settings(run)
        if settings.get("wandb"):
            yield Trace(
                f"W&B project {settings['wandb']}", "it has the curves and scores of the earlier training, but no text"
            )
        if settings.get("init_from"):
            copy = RunFolder(run).member(0, 1) / "checkpoint_untrained.pt"
            yield Trace(
                settings["init_from"],
                f"the run started from it; it may have been trained on the text, and so may the copy {copy}",
            )


def _of_deployed(folder: Path) -> Trace:
    if current_of(folder.parent) == folder:
        why = "it has learned from the text and is in use: alma-deploy RUN TO replaces and removes it"
        return Trace(f"deployed model {folder}", why)
    return Trace(f"deployed model {folder}", "it has learned from the text; it is not deployed again", (folder,))


def aside_has_learned(aside: Path, before: Mapping[str, str]) -> bool:
    """Return True if a run that was set aside has used a mega-batch or the validation set from before the masking."""
    if not RunFolder(aside).arrivals.exists():
        return False
    digests = read_arrivals(aside)["digests"]
    held_out = read_settings(aside).get("evaluated_on", []) if RunFolder(aside).settings.exists() else []
    used = {f"mega_batch_{t}": digest for t, digest in enumerate(digests, start=1)}
    used |= dict(zip(("valid",), held_out, strict=False))
    return any(used.get(name) == digest for name, digest in before.items())


def forgotten_checkpoints(run: Path, certificate: Certificate) -> set[str]:
    """Return the SHA-256 digests of the checkpoints that have learned from the text, also of those set aside."""
    entry, splits = certificate["runs"][str(run)], certificate["splits"]
    first = entry["last_stage_without_the_text"] + 1
    stages = {path: index_of_stage(Path(Path(path).parts[1])) for path in entry["before"]}
    found = {digest for path, digest in entry["before"].items() if stages[path] >= first}
    before = {name: one["before"] for name, one in splits.items()}
    for aside in (run / "set_aside").glob("*"):
        if aside_has_learned(aside, before):
            found |= set(digests_of_stages(aside, first).values())
    # A member that has not read the text is the same after it was trained again.
    return found - set(entry.get("after", {}).values())


def digests_of_stages(run: Path, first: int, last: int | None = None) -> dict[str, str]:
    """Return the SHA-256 digest of each checkpoint of the stages from `first` to `last`, by its path in the run."""
    return {
        path.relative_to(run).as_posix(): sha256_of(path)
        for folder in RunFolder(run).stage_folders()
        if first <= index_of_stage(folder) <= (last if last is not None else math.inf)
        for path in sorted(folder.rglob("*.pt"))
    }


def _of_shared(run: Path, old: Collection[str]) -> Iterator[Trace]:
    """Find the members that the run has shared in the folder of the setting `reuse_from`, by the digests `old`."""
    folder = read_settings(run).get("reuse_from")
    if not folder:
        return
    entries = []
    for mark in Path(folder, "trained").glob("*/entry.json"):
        try:
            files = read_json(mark)["files"]
        except RunError:  # a damaged entry counts as missing
            continue
        if {file["sha256"] for file in files.values()}.intersection(old):
            entries.append(mark.parent)
    if entries:
        why = f"{len(entries)} shared members were trained on the text; other runs may copy them"
        yield Trace(str(Path(folder, "trained")), why, tuple(entries))

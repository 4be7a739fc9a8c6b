"""Mask text in a stream folder in place: its tokens become padding, and no other token moves.

The plan is written before anything is changed, and each of its steps can be repeated. So the same command finishes a
call that was killed. While the plan exists, no other command reads the stream.
"""

import hashlib
import json
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from data_prep.encoding.documents import FOLDER
from data_prep.errors import PrepError
from data_prep.running.stream_folder import MANIFEST, WORK, read_manifest
from data_prep.running.work_folder import lease_held
from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, PAD
from fairseq_alma.core.errors import RunError, StreamError
from fairseq_alma.core.files import read_json, remove, sha256_of, write_json, written_aside
from fairseq_alma.core.settings import Count, NonNegative
from fairseq_alma.core.stream_description import STREAM_FILE
from fairseq_alma.core.stream_folder import UNFINISHED, StreamFolder, split_entry, split_prefix
from fairseq_alma.forget.find import BATCH_TOKENS, Found, read_rows


class MaskedSplit(TypedDict):
    """What is masked in a split."""

    before: str
    """SHA-256 digest of the .bin file before it was masked."""
    after: NotRequired[str]
    rows: list[NonNegative]
    """The sequences, by their indices in the split."""
    spans: list[tuple[NonNegative, Count]]
    """Where the masked tokens start and end (excluded). The </s> after a passage is kept."""
    words: NonNegative
    bytes: NonNegative
    """Words and bytes of the masked text."""


class Certificate(TypedDict):
    """The content of STREAM/forgotten/NUMBER.json, and of the plan."""

    number: Count
    salt: str
    request: str
    """Digest of the salt and of what the command was asked to forget, so that the same command is recognised."""
    documents: dict[str, str]
    """Hash of each document -> how it was found (see `find.Found`)."""
    splits: dict[str, MaskedSplit]
    files: dict[str, dict[str, str]]
    """For each other file of the stream that was changed: its SHA-256 digests, "before" and "after"."""
    links: dict[str, NonNegative]
    """How many other names (hard links) some of these files had: copies of the folder that share its files."""
    only_here: list[NonNegative]
    """The ids of the tokens of the vocabulary that occur in the masked text, and nowhere else in the mega-batches on
    which a tokenizer was trained."""
    runs: dict[str, dict[str, Any]]
    """What was trained again, see `runs`."""
    remembers: NotRequired[list[dict[str, str]]]
    """What still contains the text or has learned from it, see `traces`."""
    removed: NotRequired[list[str]]
    """What --purge has removed."""


def certificates(stream: Path) -> list[Certificate]:
    """Return the certificates of a stream, in order, and last the plan of a call that was interrupted, if any."""
    folder = stream / UNFINISHED.parent
    numbers = sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal())
    paths = [folder / f"{number}.json" for number in numbers]
    found = [read_json(path, Certificate) for path in paths]
    if (plan := unfinished(stream)) is not None:
        found = [one for one in found if one["number"] != plan["number"]] + [plan]
    return found


def unfinished(stream: Path) -> Certificate | None:
    """Return the plan of a call that was killed while it masked the stream; None if there is none."""
    path = stream / UNFINISHED
    return read_json(path, Certificate, advice="restore the file from a backup") if path.exists() else None


def path_of(stream: Path, certificate: Certificate) -> Path:
    """Return the path of a certificate."""
    return stream / UNFINISHED.parent / f"{certificate['number']}.json"


def digest_of_request(salt: str, request: Mapping[str, Any]) -> str:
    """Return the digest of what a command was asked to forget. Without the salt, a short text could be guessed."""
    return hashlib.sha256((salt + json.dumps(request, sort_keys=True)).encode()).hexdigest()


def in_vocabulary(description: Mapping[str, Any]) -> list[int]:
    """Return the mega-batches on which a tokenizer of alma-prep was trained, or from which its symbols were learned."""
    extensions = description.get("extensions", [])
    last = extensions[0]["mega_batches"][0] - 1 if extensions else description["num_mega_batches"]
    first = range(1, 2 if description.get("settings", {}).get("causal") else last + 1)
    learned = {t for one in description.get("grown_from", []) for t in one["learned_from"]}
    return sorted({*first} | learned)


def plan_masks(stream: StreamFolder, found: Found, request: Mapping[str, Any]) -> Certificate:
    """Return what must be masked in a stream. Nothing is written. What was masked before is left out."""
    splits: dict[str, MaskedSplit] = {}
    counts = np.zeros(stream.dictionary_size, np.int64)
    counted = [f"mega_batch_{t}" for t in in_vocabulary(stream.description)]
    for split, chosen in found.places.items():
        rows = read_rows(stream, split)
        which: list[int] = []
        spans: list[tuple[int, int]] = []
        for row in sorted(chosen):
            start, end = int(rows.starts[row]), int(rows.starts[row + 1])
            end -= bool(rows.tokens[end - 1] == EOS)
            if (rows.tokens[start:end] == PAD).all():
                continue
            which.append(row)
            spans.append((start, end))
            if split in counted:
                counts += np.bincount(rows.tokens[start:end], minlength=len(counts))
        if not which:
            continue
        words, num_bytes = (int(rows.table[name].to_numpy()[which].sum(dtype=np.int64)) for name in ("words", "bytes"))
        splits[split] = MaskedSplit(before=stream.digest(split), rows=which, spans=spans, words=words, bytes=num_bytes)
    known = np.zeros_like(counts)
    for split in counted if counts.any() else ():
        tokens = np.memmap(stream.prefix(split).with_suffix(".bin"), stream.description["dtype"], "r")
        for start in range(0, len(tokens), BATCH_TOKENS):
            known += np.bincount(tokens[start : start + BATCH_TOKENS], minlength=len(known))
    salt = secrets.token_hex(16)
    return Certificate(
        number=len(certificates(stream.path)) + 1,
        salt=salt,
        request=digest_of_request(salt, request),
        documents=found.documents,
        splits=splits,
        files={},
        links={name: links - 1 for name in _names(splits) if (links := (stream.path / name).stat().st_nlink) > 1},
        only_here=np.flatnonzero((counts > 0) & (counts >= known) & (np.arange(len(counts)) >= NUM_SPECIAL)).tolist(),
        runs={},
    )


def _names(splits: Collection[str]) -> list[str]:
    """Return the files that change if text of these splits is masked, relative to the stream folder."""
    shards = [f"{split_prefix(Path(), split)}.bin" for split in splits]
    return shards + [f"{FOLDER}/{split}.parquet" for split in splits]


def mask(stream: Path, plan: Certificate) -> None:
    """Carry out a plan, or finish it. At the end, the certificate replaces the plan.

    Raises:
        PrepError: if alma-prep is at work in the folder, if an unfinished extension there contains text, or if the
            stream has changed since the plan was made.
    """
    with lease_held(stream):
        left = [path.name for path in (stream / WORK).iterdir() if not path.name.startswith(("lease", ".lease"))]
        if left:
            raise PrepError(
                f"{stream / WORK} contains the text of an unfinished alma-prep: finish it with the same command, or "
                f"remove this folder; then run alma-forget again"
            )
        description = StreamFolder(stream, _read(stream / STREAM_FILE))
        numbers = [one["number"] for one in description.description.get("forgotten", [])]
        is_old = plan["number"] in numbers or any(
            description.digest(name) != one["before"] for name, one in plan["splits"].items()
        )
        if is_old and not (stream / UNFINISHED).exists():
            raise PrepError(f"{stream} has changed since the text was searched: run the same command again")
        write_json(stream / UNFINISHED, plan)
        manifest = read_manifest(stream)
        for split, masked in plan["splits"].items():
            split_entry(description.description, split)  # a stream without this split is damaged
            path = description.prefix(split).with_suffix(".bin")
            _mask_tokens(path, masked["spans"], description.description["dtype"])
            table = stream / FOLDER / f"{split}.parquet"
            _blank_rows(table, masked["rows"])
            masked["after"] = sha256_of(path)
            for changed in (path, table):
                name = changed.relative_to(stream).as_posix()
                sha256 = sha256_of(changed)
                plan["files"].setdefault(name, {"before": manifest["outputs"][name]["sha256"]})["after"] = sha256
                manifest["outputs"][name] = {"bytes": changed.stat().st_size, "sha256": sha256}
        # A killed call has repeated all steps until here, but not these, which are last.
        if plan["number"] not in numbers:
            write_json(stream / UNFINISHED, plan)
            write_json(stream / MANIFEST, manifest)
            write_json(stream / STREAM_FILE, _described(description, plan), indent=1)
        write_json(path_of(stream, plan), plan)
        remove(stream / UNFINISHED)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, RunError) as error:
        raise StreamError(f"{path} cannot be read ({error}): restore it from a backup") from error


def _mask_tokens(path: Path, spans: Sequence[Sequence[int]], dtype: str) -> None:
    """Replace the tokens of some spans by padding. The file is replaced by a changed copy."""
    with written_aside(path) as temporary:
        shutil.copyfile(path, temporary)
        tokens = np.memmap(temporary, dtype, "r+")
        for start, end in spans:
            tokens[start:end] = PAD
        tokens.flush()
        del tokens


def _blank_rows(path: Path, rows: Sequence[int]) -> None:
    """Remove the ids, dates, words and bytes of some rows of documents/SPLIT.parquet. Their hashes stay."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    is_masked = np.zeros(len(table), bool)
    is_masked[list(rows)] = True
    for name, blank in (("id", None), ("date", None), ("words", 0), ("bytes", 0)):
        field = table.schema.field(name)
        values = pyarrow.compute.if_else(pyarrow.array(is_masked), pyarrow.scalar(blank, field.type), table[name])
        table = table.set_column(table.schema.get_field_index(name), field, values)
    with written_aside(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")


def _described(stream: StreamFolder, plan: Certificate) -> dict[str, Any]:
    """Return the content of stream.json after a plan was carried out."""
    described = json.loads(json.dumps(stream.description))
    for split, masked in plan["splits"].items():
        entry = split_entry(described, split)
        assert isinstance(entry, dict)
        table = read_rows(stream, split).table
        left = table.filter(table["words"].to_numpy() > 0)  # the first rows of passages that are not masked
        entry |= {
            "documents": len(left["document"].unique()),
            "passages": len(left),
            "words": entry["words"] - masked["words"],
            "bytes": entry["bytes"] - masked["bytes"],
            "sha256": masked["after"],
            "masked": sorted([*entry.get("masked", []), *(list(span) for span in masked["spans"])]),
        }
    whole = sorted(name for name, how in plan["documents"].items() if how != "contains a copy")
    one = {"number": plan["number"], "documents": whole}
    return {**described, "forgotten": [*described.get("forgotten", []), one]}

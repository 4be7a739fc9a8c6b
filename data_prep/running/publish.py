"""Move the shards of a stream that is complete from the work folder into the stream folder."""

import json
import os
from pathlib import Path

from data_prep.running.stream_folder import MANIFEST
from data_prep.running.work_folder import WorkFolder
from fairseq_alma.core.files import sync, sync_folder, write_json, write_whole
from fairseq_alma.core.stream_description import STREAM_FILE


def publish(out: Path, work: WorkFolder, stream: dict, manifest: dict) -> None:
    """Move the finished shards from the work folder into `out`, then manifest.json, and then stream.json.

    stream.json is moved last, because `out` counts as a finished stream (or extension) as soon as it contains the new
    stream.json. If this process is killed earlier, the next call of alma-prep continues.

    Args:
        out: the stream folder.
        work: the work folder. The digests of all shards must be known (see `WorkFolder.add_digests`).
        stream: the content of stream.json.
        manifest: the content of manifest.json. This function adds the size and SHA-256 digest of every shard to the
            entry "outputs".
    """
    shards, digests = work.shards(), work.digests()
    for path in shards:
        name = path.relative_to(work.stream).as_posix()
        manifest["outputs"][name] = digests[name]
    sync(work.stream)
    # Move the folder to the place of this process first. If the lease was lost, this fails, or the moves below do.
    source = (work.place or work.folder) / "publish"
    os.replace(work.stream, source)
    for path in shards:
        target = out / path.relative_to(work.stream)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / path.relative_to(work.stream), target)
    for folder in {(out / name).parent for name in manifest["outputs"]}:
        if folder.is_dir():
            sync_folder(folder)
    sync_folder(out)
    write_json(out / MANIFEST, manifest)
    text = json.dumps(stream, indent=1, ensure_ascii=False) + "\n"
    # If a path contains bytes that are not valid UTF-8, Python represents them as characters that UTF-8 cannot encode
    # (lone surrogates). Therefore write these characters as escapes.
    write_whole(out / STREAM_FILE, text.encode("utf-8", "backslashreplace").decode("utf-8"))

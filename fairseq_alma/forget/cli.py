"""alma-forget: remove a document from a stream, and train the models again that were trained on it.

alma-forget STREAM --document ID --runs RUNS           show what would be masked, and what it costs to train again
alma-forget STREAM --document ID --runs RUNS --yes     do it

The tokens of the document become padding, in files of the same size, so that no other token moves. Its near copies are
masked, too. Each run is taken back to the stage before the first use of the text, and is trained again from there. The
certificate STREAM/forgotten/NUMBER.json says what was done, with digests, and what still remembers the text. After an
interruption, the same command continues.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import read_text, write_json
from fairseq_alma.core.printing import hide_messages_of_libraries, say
from fairseq_alma.core.program import Parser, command
from fairseq_alma.core.stream_description import read_description
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.forget.find import find
from fairseq_alma.forget.mask import (
    Certificate,
    certificates,
    digest_of_request,
    mask,
    path_of,
    plan_masks,
    unfinished,
)
from fairseq_alma.forget.traces import purge, traces

SHOWN = 5
"""Number of unknown ids that a message names."""


@command("alma-forget", "run the same command again to continue")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-forget and return its exit status: 2 after an error, 1 if a run is still to be trained."""
    parser = Parser(prog="alma-forget", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", type=Path, metavar="STREAM", help="the stream folder")
    what = parser.add_argument_group("what to forget; each may be repeated")
    what.add_argument(
        "--document", action="append", default=[], metavar="ID",
        help="a document, by its name in the source or the hash of its text (see STREAM/documents/*.parquet)",
    )  # fmt: skip
    what.add_argument("--match", action="append", default=[], metavar="TEXT", help="each document that contains TEXT")
    what.add_argument(
        "--file", action="append", default=[], type=Path, metavar="LIST", help="a file with an ID per line"
    )
    runs = parser.add_mutually_exclusive_group(required=True)
    runs.add_argument(
        "--runs", nargs="+", type=Path, metavar="FOLDER",
        help="train again the runs in these folders, at any depth, that have used the text",
    )  # fmt: skip
    runs.add_argument("--no-runs", action="store_true", help="only mask the stream: no model was trained on it")
    parser.add_argument("--cache", nargs="+", type=Path, default=[], help="folders of alma-prep --cache to search")
    parser.add_argument(
        "--purge", action="store_true",
        help="also remove what was found that still remembers the text: stages that were set aside, cached text, and "
        "shared members",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="do it; without this option, nothing is changed")
    arguments = parser.parse_args(argv)
    return _forget(arguments)


def _forget(arguments: argparse.Namespace) -> int:
    path = arguments.stream.absolute()
    ids = sorted({*arguments.document, *(one for file in arguments.file for one in _lines(file))})
    if not ids and not arguments.match:
        raise SettingError("no document is named: give --document ID, --match TEXT or --file LIST")
    if "" in arguments.match:
        raise SettingError("--match '' is in every document: give a text")
    for cache in arguments.cache:
        if not cache.is_dir():
            raise SettingError(f"--cache {cache} is no folder: give the folders of alma-prep --cache")
    request = {"documents": ids, "match": sorted(arguments.match)}
    known = certificates(path)
    plan = unfinished(path)
    if plan is not None and not _is_of(plan, request):
        raise SettingError(
            f"another alma-forget was interrupted in {path}: run its command again (its documents: "
            f"{', '.join(list(plan['documents'])[:SHOWN])})"
        )
    certificate = next((one for one in known if _is_of(one, request)), None)
    # While the plan is there, `StreamFolder.open` refuses the stream.
    stream = StreamFolder.open(path) if plan is None else StreamFolder(path, read_description(path))
    if certificate is None:
        certificate = _find(stream, ids, request)
    is_new = certificate["number"] not in [one["number"] for one in stream.description.get("forgotten", [])]
    _show(certificate, is_new)
    # The first import of torch and fairseq takes seconds.
    from fairseq_alma.forget.runs import price_of, runs_in, train_again, withdraw_deployed

    hide_messages_of_libraries()
    masked = defaultdict(list)
    for one in [*known, certificate]:
        for split, entry in one["splits"].items():
            masked[split].append(entry["before"])
    # Somebody else may have written a certificate, so only runs that the user names are changed.
    runs = runs_in(arguments.runs or [])
    prices = [price for run in runs if (price := price_of(run, masked)) is not None]
    for price in prices:
        _show_price(price)
    if len(prices) > 1:
        total = sum(price.spent.train_flops for price in prices)
        say(f"total: {total:.3g} FLOPs")
    if not arguments.yes:
        say("nothing was changed: add --yes to do this")
        return 0
    if is_new or plan is not None:
        mask(path, certificate)
    stream = StreamFolder.open(path)
    by_run = {price.run: price for price in prices}
    for run in runs:
        started = certificate["runs"].get(str(run))
        if run in by_run or (started is not None and started["state"] != "trained again"):
            train_again(run, by_run.get(run), stream, certificate)
    left = traces(stream, certificate, runs, arguments.cache, withdraw_deployed(certificate, runs))
    if arguments.purge:
        certificate["removed"] = certificate.get("removed", []) + [str(path) for one in left for path in one.folders]
        left = purge(left)
    certificate["remembers"] = [{"what": one.what, "why": one.why} for one in left]
    write_json(path_of(path, certificate), certificate)
    return _report(path, certificate, [one.what for one in left if one.folders])


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in read_text(file, f"--file {file}").split("\n") if line.strip()]


def _is_of(certificate: Certificate, request: dict[str, Any]) -> bool:
    return certificate["request"] == digest_of_request(certificate["salt"], request)


def _find(stream: StreamFolder, ids: Sequence[str], request: dict[str, Any]) -> Certificate:
    found = find(stream, ids, request["match"])
    if not found.documents:
        raise SettingError(
            f"no document of {stream.path} has this name or contains this text. documents/*.parquet lists the names; "
            f"--match finds text as the tokenizer decodes it, within a passage"
        )
    if found.unknown:
        names = ", ".join(found.unknown[:SHOWN]) + (" ..." if len(found.unknown) > SHOWN else "")
        say(f"warning: {len(found.unknown):,} of {len(ids):,} names are not in the stream: {names}", sys.stderr)
    return plan_masks(stream, found, request)


def _show(certificate: Certificate, is_new: bool) -> None:
    """Print what is masked."""
    say(f"{'to be masked' if is_new else 'masked'} in the stream:")
    for how in ("asked for", "near copy", "contains a copy"):
        if names := [name for name, found in certificate["documents"].items() if found == how]:
            say(f"  {how}: {len(names):,} ({', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''})")
    for split, masked in certificate["splits"].items():
        tokens = sum(end - start for start, end in masked["spans"])
        say(f"  {split}: {len(masked['rows']):,} sequences, {masked['words']:,} words, {tokens:,} tokens")
    if not certificate["splits"]:
        say("  nothing, because an earlier call has masked all of it")


def _show_price(price: Any) -> None:
    """Print what it costs to train a run again."""
    used = ", ".join([*(f"mega-batch {t}" for t in price.mega_batches), *price.held_out])
    if (
        not price.stages
        and price.to_stage == price.wanted_stage
        and price.held_out == ["test"]
        and not price.mega_batches
    ):
        say(f"{price.run} was scored on the text ({used}), but has not learned from it: nothing is trained again")
        return
    why = ""
    if price.to_stage < price.wanted_stage:
        why = f" (no training state is left of stages {price.to_stage + 1} to {price.wanted_stage}, see keep_states=)"
    elif "valid" in price.held_out:
        why = " (the validation set has chosen the checkpoints of all stages)"
    stages = f"stages {price.stages[0]} to {price.stages[-1]} are" if len(price.stages) > 1 else "one stage is"
    if not price.stages:
        stages = "no finished stage is"
    say(
        f"{price.run} has used {used}: {stages} trained again from stage {price.to_stage}{why}: "
        f"{price.spent.train_flops:.3g} FLOPs, {price.spent.num_updates:,} updates; the first time, the training "
        f"took {price.spent.train_seconds:.0f} s and the scores {price.score_seconds:.0f} s"
    )


def _report(stream: Path, certificate: Certificate, removable: Sequence[str]) -> int:
    """Print the end of a call. Return its exit status."""
    open_runs = []
    for run, entry in certificate["runs"].items():
        if entry["state"] == "trained again":
            say(
                f"{run}: stages {', '.join(map(str, entry['stages'])) or 'none'} trained again, "
                f"{entry['train_flops']:.3g} FLOPs (predicted: {entry['predicted_train_flops']:.3g})"
            )
        else:
            open_runs.append(run)
            say(f"{run}: run its own command, and then this one again: {entry.get('command')}")
    for one in certificate.get("remembers", []):
        say(f"still remembers: {one['what']}: {one['why']}")
    if removable:
        say(f"--purge removes {', '.join(removable)}")
    say(f"certificate: {path_of(stream, certificate)}")
    return 1 if open_runs else 0


if __name__ == "__main__":
    sys.exit(main())

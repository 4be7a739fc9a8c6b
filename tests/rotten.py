"""Damage one file of a folder at a time, and look at what the commands say.

A case is right if the commands name the file or its folder in an error of ours, or if their results do not change. A
traceback and other results are defects.
"""

import contextlib
import gc
import io
import json
import logging
import multiprocessing
import shutil
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import AlmaError

NOT_OBJECTS = ("{}", "[]", "null", "NaN", '"x"', "[" * 100_000)
WRONG_VALUES = (None, -1, "x", float("nan"))
DIVERGING = ("loss", "perplexity", "bits_per_byte", "final", "final_validation", "after_first_stage")
"""Ends of the names of scores that are NaN if the training has diverged."""


def damaged(content: bytes, name: str, with_fields: bool) -> Iterator[tuple[str, bytes]]:
    """Yield damaged contents of a file, each with the name of the damage.

    Args:
        content: the content of the file.
        name: the name of the file. JSON files are damaged in more ways than others.
        with_fields: whether also to replace each value in an object by others.
    """
    middle = max(0, len(content) // 2 - 32)
    yield "empty", b""
    yield "cut", content[: len(content) // 2]
    yield "zeroed", bytes(len(content))
    flipped = bytes(255 - byte for byte in content[middle : middle + 64])
    yield "flipped", content[:middle] + flipped + content[middle + 64 :]
    if not name.endswith((".json", ".jsonl")):
        return
    # Of a file with one object per line, damage the line in the middle.
    lines = content.splitlines(keepends=True) if name.endswith(".jsonl") else [content]
    number = len(lines) // 2
    before, line, after = b"".join(lines[:number]), lines[number], b"".join(lines[number + 1 :])
    value = json.loads(line)
    texts = [(text[:5], text) for text in NOT_OBJECTS]
    if isinstance(value, dict) and value:
        key = json.dumps(next(iter(value)))
        texts.append(("a key twice", line.decode().replace("{", f"{{{key}: null, ", 1)))
    for place in places(value) if with_fields else ():
        for wrong in WRONG_VALUES:
            if wrong != wrong and str(place[-1]).endswith(DIVERGING):
                continue  # the NaN of a training that has diverged
            texts.append((f"{'.'.join(map(str, place))} {wrong}", json.dumps(replaced(value, place, wrong))))
    for damage, text in texts:
        yield damage, before + text.encode().rstrip(b"\n") + b"\n" + after


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of the values in a JSON value: those of an object, and the first one of a list.

    Of several objects with the same keys, such as the splits of a stream, only the first one counts.
    """
    parts, known = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:1], []
    for key, part in parts:
        if isinstance(part, dict) and part.keys() in known:
            continue
        known.append(part.keys() if isinstance(part, dict) else None)
        yield (key,)
        if isinstance(part, dict | list):
            yield from ((key, *rest) for rest in places(part))


def replaced(value: Any, place: tuple[str | int, ...], wrong: Any) -> Any:
    """Return a copy of a JSON value with another part at a place."""
    copy = json.loads(json.dumps(value))
    *outer, last = place
    inner = copy
    for key in outer:
        inner = inner[key]
    inner[last] = wrong
    return copy


Command = Callable[[Path], Any]
"""Does something with a folder, and returns a result that can be compared and pickled."""


Outcome = tuple[str, Any]
"""How a command ended, and what it returned or said. The end is "done", "refused" (an error that the user can fix) or
"broken"."""


def outcomes(folder: Path, commands: Mapping[str, Command]) -> dict[str, Outcome]:
    """Call commands one after another, in a fork of this process, and return how each of them ended."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        gc.freeze()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for command in commands.values():
                sender.send(_outcome(folder, command))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    sender.close()
    found = {}
    try:
        for name in commands:
            found[name] = receiver.recv() if receiver.poll(120) else ("broken", "no end within 120 s")
    except EOFError:
        process.join()
        found[name] = ("broken", f"exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()
    return found


class _Warnings(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _outcome(folder: Path, command: Command) -> Outcome:
    """Return how a command ends. A result with a warning that names the folder counts as refused."""
    logging.root.addHandler(warnings := _Warnings())
    try:
        result = command(folder)
        text = "\n".join(text for text in warnings.texts if str(folder) in text)
        return ("refused", text) if text else ("done", result)
    except AlmaError as error:
        return "refused", str(error)
    except BaseException:
        return "broken", traceback.format_exc()[-3000:]


def defects(
    whole: Path,
    folder: Path,
    commands: Mapping[str, Command],
    files: Callable[[Path], bool],
    with_fields: bool,
    plausible: Collection[tuple[str, str]] = (),
) -> tuple[int, list[str]]:
    """Return the number of damages that were tried on the files of a folder, and a line for each defect.

    Args:
        whole: the undamaged folder.
        folder: where it is copied to for each damage.
        commands: what is done with the damaged folder, in this order.
        files: which files are damaged.
        with_fields: see `damaged`.
        plausible: files and damages, such as another number in the possible range, that nobody could notice.
    """
    _restore(whole, folder)
    expected = outcomes(folder, commands)
    assert all(end == "done" for end, _ in expected.values()), expected
    found, count = [], 0
    for path in sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and files(path)):
        content = (whole / path).read_bytes()
        for damage, bad in damaged(content, path.name, with_fields):
            if bad == content or (path.name, damage) in plausible:
                continue
            count += 1
            _restore(whole, folder)
            # A new file, and not the old one with other content, whose state could be known to this process.
            (folder / path).unlink()
            (folder / path).write_bytes(bad)
            for name, (end, said) in outcomes(folder, commands).items():
                is_named = end == "refused" and (path.name in said or str(folder) in said)
                if not is_named and (end, said) != expected[name]:
                    found.append(f"{path}, {damage}: {name}: {'silent' if end == 'done' else f'{end}: {said[-400:]}'}")
                    print(found[-1], flush=True)
                    break
    return count, found


def _restore(whole: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)

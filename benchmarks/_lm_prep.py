"""Part (c) of lm_quick.py: compare alma-prep with an alternative, tokenizing to text and fairseq-preprocess."""

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from _common import cpu_seconds_of, ratio_columns, table, tree_cpu_seconds, verdict
from _lm_stream import prefix_of

from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL

PREP_MEGA_BATCHES, PREP_VOCABULARY = 4, 50_000
PREP_SPLITS = ("mega_batch_1", "valid", "mega_batch_2", "mega_batch_3", "mega_batch_4", "test")
SMALLEST_TEXT_BYTES = 10_000_000
TARGET = 0.5
"""Largest ratio of CPU times (alma-prep / alternative) that passes."""


def measure_prep(repeats: int, scratch: Path) -> list[str]:
    """Measure alma-prep and the alternative, and return the lines of part (c) of the report.

    Args:
        repeats: number of rounds.
        scratch: folder for temporary files.
    """
    books, text_label = find_text(scratch)
    texts = scratch / "prep_texts"
    steps: list[dict[str, float]] = []
    alternative_steps: list[dict[str, float]] = []
    alternative: list[float] = []
    alternative_work: list[float] = []
    """CPU seconds of the alternative in each round, without the start-up of its two commands."""
    for repeat in range(repeats):
        stream = scratch / f"prep_stream_{repeat}"
        steps.append(seconds_of_alma_prep(books, stream))
        if repeat == 0:
            write_texts(stream, texts)
        out = scratch / f"prep_alternative_{repeat}"
        alternative_steps.append(seconds_of_alternative(stream, texts, out))
        alternative.append(sum(alternative_steps[-1].values()))
        alternative_work.append(sum(seconds for name, seconds in alternative_steps[-1].items() if "start" not in name))
        check_same_bytes(stream, out)
    total = [sum(step.values()) for step in steps]
    training = [step["train byte-bpe"] for step in steps]
    no_training = [a - b for a, b in zip(total, training, strict=True)]
    compared = {
        "text files to `.bin/.idx`: all of `alma-prep` except training; alternative: both commands": (
            no_training,
            alternative,
        ),
        "encode step alone; alternative: both commands without their start": (
            [step["encode"] for step in steps],
            alternative_work,
        ),
        "all of `alma-prep`; alternative: the same seconds of training added": (
            total,
            [a + b for a, b in zip(alternative, training, strict=True)],
        ),
    }
    rows = _rows_of(compared)
    stream_json = json.loads((scratch / "prep_stream_0" / "stream.json").read_text())
    tokens = sum(split["tokens"] for split in stream_json["splits"].values())
    header = ("CPU seconds", "alternative", "alma-prep", "ratio of minima", "ratio, median", "spread of ratios")
    return [
        "## (c) `alma-prep` against tokenizing to text and `fairseq-preprocess`",
        "",
        f"{text_label}, {tokens:,} tokens, byte-level BPE with {stream_json['vocab_size']:,} symbols, "
        f"{PREP_MEGA_BATCHES} mega-batches, `--workers 1`; {repeats} rounds in turn. The alternative is given the "
        "passages of each split in order and the trained tokenizer. It runs encode_batch_fast to a file of symbols "
        "with one thread, then one `fairseq-preprocess --only-source --dataset-impl mmap --srcdict dict.txt --workers "
        "1` for all six splits. Both write the same .bin and .idx, byte for byte (checked in each round). alma-prep "
        "also reads and copies the sources, partitions them, counts, computes digests and syncs to disk. Its encoder "
        "caches words that it has encoded; the cache is empty at the start of each run. The cache saves part of the "
        "time, the rest is saved because alma-prep does not write and read text. Training the tokenizer costs both the "
        "same.",
        "",
        *table([*header, f"at most {TARGET}"], rows),
        "",
        f"By step, median CPU seconds. `alma-prep`: {_by_step(steps)}. Alternative: {_by_step(alternative_steps)}.",
    ]


def _rows_of(compared: dict[str, tuple[list[float], list[float]]]) -> list[list[str]]:
    """Return the rows of the table.

    Args:
        compared: name of a row -> (CPU seconds of alma-prep, CPU seconds of the alternative), a number for each round.
    """
    rows = []
    for name, (ours, theirs) in compared.items():
        best, median, spread = ratio_columns(ours, theirs)
        result = verdict(median, TARGET, at_most=True) if name.startswith("text files") else "(no target)"
        columns = [name, f"{statistics.median(theirs):.1f}", f"{statistics.median(ours):.1f}"]
        rows.append([*columns, f"{best:.2f}", f"{median:.2f}", f"{spread:.2f}", result])
    return rows


def _by_step(steps: Sequence[dict[str, float]]) -> str:
    """Return a text with the median over all rounds of the seconds of each step."""
    return ", ".join(f"{name} {statistics.median(step[name] for step in steps):.1f}" for name in steps[0])


def find_text(scratch: Path) -> tuple[Path, str]:
    """Return a folder with text files, and a description of the text for the report.

    The folder is $ALMA_DATA/books. If there is no such folder, the text consists of copies of Python docstrings, in all
    at least SMALLEST_TEXT_BYTES.
    """
    data = os.environ.get("ALMA_DATA")
    if data and (Path(data) / "books").is_dir():
        books = Path(data) / "books"
        files = [path for path in books.rglob("*") if path.suffix in (".txt", ".md")]
        size = sum(path.stat().st_size for path in files)
        return books, f"{len(files)} books ($ALMA_DATA/books), {size / 1e6:.1f} MB"
    from data_prep.sources import python_docs

    documents = list(filter(None, (_docstrings(path) for path in python_docs.module_files())))
    copies = -(-SMALLEST_TEXT_BYTES // sum(len(text.encode()) for text in documents))
    folder = scratch / "python_docs"
    folder.mkdir()
    for copy in range(copies):
        (folder / f"{copy}.txt").write_text(f"{copy}\n\n" + "\n\n".join(documents), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return folder, f"{copies} copies of python-docs (repetition favours a cache of words), {size / 1e6:.1f} MB"


def _docstrings(path: Path) -> str:
    """Return the docstrings of a Python module, or an empty text if they cannot be parsed or encoded."""
    from data_prep.sources import python_docs

    try:
        text = python_docs.docstrings(path.read_bytes())
        text.encode("utf-8")
    except (SyntaxError, ValueError):
        return ""
    return text


def seconds_of_alma_prep(books: Path, out: Path) -> dict[str, float]:
    """Run alma-prep and return its CPU seconds by step. A step ends when alma-prep prints the line about this step."""
    command = [sys.executable, "-m", "data_prep", out, "--source", f"books:{books}", "--seed", 0]
    command += [
        "--mega-batches",
        PREP_MEGA_BATCHES,
        "--vocab-size",
        PREP_VOCABULARY,
        "--workers",
        1,
        "--duplicates",
        "keep",
    ]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    steps: dict[str, float] = {}
    before, lines = 0.0, []
    for line in process.stderr:
        lines.append(line)
        if match := re.match(r"(read sources|cut long documents|train byte-bpe|encode): ", line):
            now = tree_cpu_seconds(process.pid)
            steps[match[1]], before = now - before, now
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode or len(steps) != 4:
        raise RuntimeError(
            f"alma-prep ended with status {process.returncode} after the steps {list(steps)}:\n{''.join(lines)}"
        )
    return {**steps, "end": usage.ru_utime + usage.ru_stime - before}


def write_texts(stream: Path, out: Path) -> None:
    """Write the passages of every split as text to one file per split. A NUL character follows each passage.

    The passages are decoded from the tokens. This gives the original text, because a byte-level BPE is lossless.
    """
    from tokenizers import Tokenizer

    out.mkdir()
    tokenizer = Tokenizer.from_file(str(stream / "tokenizer.json"))
    for split in PREP_SPLITS:
        tokens = np.fromfile(f"{prefix_of(stream, split)}.bin", np.uint16).astype(np.int64)
        sequences = np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]
        ids = [(sequence[:-1] - NUM_SPECIAL).tolist() for sequence in sequences]
        texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
        (out / split).write_bytes("".join(f"{text}\0" for text in texts).encode())


def seconds_of_alternative(stream: Path, texts: Path, out: Path) -> dict[str, float]:
    """Return the CPU seconds of tokenizing to text and of fairseq-preprocess. Start-up times are separate entries.

    Args:
        stream: stream folder that alma-prep wrote. It contains the tokenizer and the dictionary.
        texts: folder of texts that `write_texts` wrote.
        out: folder for the output of fairseq-preprocess.
    """
    symbols = out.with_name(out.name + "_symbols")
    symbols.mkdir()
    script = Path(__file__).with_name("_tokenize_to_text.py")
    command = [sys.executable, script, stream / "tokenizer.json", symbols, *(texts / split for split in PREP_SPLITS)]
    one_thread = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    tokenizing, output = cpu_seconds_of(list(map(str, command)), one_thread)
    encoding = float(output.split()[-1])
    train, *valid, test = (symbols / split for split in PREP_SPLITS)
    preprocess = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source", "--dataset-impl", "mmap"]
    preprocess += ["--srcdict", str(stream / "dict.txt"), "--workers", "1"]
    inputs = ["--trainpref", str(train), "--validpref", ",".join(map(str, valid)), "--testpref", str(test)]
    preprocessing, _ = cpu_seconds_of([*preprocess, *inputs, "--destdir", str(out)], one_thread)
    empty = symbols / "empty"
    empty.write_text("")
    start, _ = cpu_seconds_of([*preprocess, "--trainpref", str(empty), "--destdir", f"{symbols}/start"], one_thread)
    return {
        "start of tokenizing": tokenizing - encoding,
        "tokenize to text": encoding,
        "start of fairseq-preprocess": start,
        "fairseq-preprocess": preprocessing - start,
    }


def check_same_bytes(stream: Path, alternative: Path) -> None:
    """Check that alma-prep and the alternative wrote equal files. Only then can their times be compared.

    Raises:
        RuntimeError: if two files differ.
    """
    names = ["train", *(f"valid{number or ''}" for number in range(PREP_MEGA_BATCHES)), "test"]
    for split, name in zip(PREP_SPLITS, names, strict=True):
        for suffix in ("bin", "idx"):
            ours, theirs = Path(f"{prefix_of(stream, split)}.{suffix}"), alternative / f"{name}.{suffix}"
            if ours.read_bytes() != theirs.read_bytes():
                raise RuntimeError(f"{ours} and {theirs} differ, so the times of the two programs cannot be compared")

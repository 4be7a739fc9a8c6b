"""The alternative to alma-prep in part `encoding` of prep.py: tokenizing to text and fairseq-preprocess."""

import sys
from pathlib import Path

import numpy as np
from _common import cpu_seconds_of
from _lm_stream import prefix_of
from _prep_run import MEGA_BATCHES

from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL

PREP_SPLITS = ("mega_batch_1", "valid", "mega_batch_2", "mega_batch_3", "mega_batch_4", "test")


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
    names = ["train", *(f"valid{number or ''}" for number in range(MEGA_BATCHES)), "test"]
    for split, name in zip(PREP_SPLITS, names, strict=True):
        for suffix in ("bin", "idx"):
            ours, theirs = Path(f"{prefix_of(stream, split)}.{suffix}"), alternative / f"{name}.{suffix}"
            if ours.read_bytes() != theirs.read_bytes():
                raise RuntimeError(f"{ours} and {theirs} differ, so the times of the two programs cannot be compared")

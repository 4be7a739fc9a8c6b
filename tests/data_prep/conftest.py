"""Tiny corpora with known word counts, and one finished stream that several tests look at."""

import os
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from data_prep.cli import main
from data_prep.running import workers
from tests.data_prep.conserved import check_conserved

# All workers of these tests are forks of one server. So that not each of them imports datatrove, which takes a second,
# and tokenizers, the server does.
workers._PRELOADED += ["datatrove.pipeline.filters", "datatrove.utils.word_tokenizers", "tokenizers"]

SENTENCE = (
    "the stream of mega-batches arrives and a small learner waits, naïve café größe слово 単語 don't 1984 3.14 (see)"
)
WORDS = SENTENCE.split()


@pytest.fixture(autouse=True)
def every_stream_is_conserved(request):
    """After each test, check that no text was lost in the streams that it made. See `conserved`."""
    # Ask for the folder first, so that it still exists afterwards.
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is not None and not request.node.get_closest_marker("damages_streams"):
        for path in folder.rglob("manifest.json"):
            check_conserved(path.parent)


@pytest.fixture(scope="session")
def write_corpus():
    """write_corpus(folder, num_files, seed): books of paragraphs and lines, 1200 words in each file."""

    def write(folder: Path, num_files: int, seed: int = 0) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        rng = random.Random(seed)
        for number in range(num_files):
            paragraphs = []
            for _ in range(30):
                lines = [" ".join(rng.choices(WORDS, k=10)) for _ in range(4)]
                paragraphs.append("\n".join(lines))
            (folder / f"book_{number:03d}.txt").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def books(tmp_path_factory, write_corpus):
    """12 books, 14 400 words."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "books", num_files=12)


@pytest.fixture(scope="session")
def alma_prep():
    """alma_prep(out, source, ..., B=.., V=..): run the command in this process; its exit code."""

    def run(out, *sources, num_mega_batches=3, vocab_size=300, workers=1, more=()):
        argv = [
            str(out),
            "--mega-batches",
            str(num_mega_batches),
            "--vocab-size",
            str(vocab_size),
            "--seed",
            "1",
        ]
        for source in sources:
            argv += ["--source", str(source)]
        return main([*argv, "--workers", str(workers), *map(str, more)])

    return run


@pytest.fixture(scope="session", params=["byte-bpe", "sentencepiece"])
def stream_folder(request, tmp_path_factory, books, alma_prep):
    """A finished stream of each tokenizer: three mega-batches out of the 12 books."""
    out = tmp_path_factory.mktemp("streams") / request.param
    assert alma_prep(out, f"books:{books}", vocab_size=341, more=["--tokenizer", request.param]) == 0
    check_conserved(out)
    return out


@pytest.fixture(scope="session")
def folder_bytes():
    """folder_bytes(out): the content of every file but stream.json and manifest.json, which name paths.

    With named=False also without names of documents and sources, and dates, which may depend on paths.
    """

    def read(out: Path, named: bool = True) -> dict[str, bytes]:
        files = [
            path for path in out.rglob("*") if path.is_file() and path.name not in ("stream.json", "manifest.json")
        ]
        found = {path.relative_to(out).as_posix(): path.read_bytes() for path in files}
        for name in found:
            if name.endswith(".parquet") and not named:
                table = pyarrow.parquet.read_table(out / name)
                found[name] = repr(table.drop_columns(["id", "date", "source"]).to_pylist()).encode()
        return found

    return read


@pytest.fixture(scope="session")
def read_passages():
    """read_passages(prefix, dtype): the token ids of each passage without its eos, straight from the `.bin`."""

    def read(prefix: Path, dtype: str = "uint16") -> list[np.ndarray]:
        tokens = np.fromfile(f"{prefix}.bin", dtype=dtype)
        passages = np.split(tokens, np.flatnonzero(tokens == 2) + 1)
        assert len(passages.pop()) == 0, "the last token must be eos"
        return [passage[:-1] for passage in passages]

    return read


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text, which lies outside the project."""
    folder = os.environ.get("ALMA_DATA")
    if not folder:
        pytest.skip("ALMA_DATA does not name the folder of real data")
    return Path(folder)

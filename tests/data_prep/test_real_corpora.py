"""The real archives, dumps and books together: one stream, the same bytes however it is made, and a trained stage."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_alma.core.ledger import Ledger

pytest.importorskip("fastwarc", reason="needs the extra `corpora`")
pytestmark = pytest.mark.slow

SETTINGS = ["--mega-batches", "3", "--vocab-size", "2000", "--language", "en", "--max-bad", "0.2", "--seed", "0"]
DAMAGED = {"ccnet-sample.wet.txt", "resiliparse-clipped.warc.gz", "warcio-bad.arc", "warcio-example-trunc.warc"}


def command(out, sources, workers):
    argv = [sys.executable, "-m", "data_prep", str(out), *SETTINGS, "--workers", str(workers)]
    return [*argv, *(word for source in sources for word in ("--source", source))]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory, shared_data):
    """Three books, all archives, all dumps."""
    root = tmp_path_factory.mktemp("corpora")
    shutil.copytree(shared_data / "warc", root / "warc")
    shutil.copytree(shared_data / "wikipedia", root / "wikipedia")
    (root / "books").mkdir()
    for name in ("jane_austen_emma.md", "herman_melville_moby_dick.md", "gitenberg_moby_dick_2701-0.txt"):
        shutil.copy(shared_data / "books" / name, root / "books")
    return root


def sources_of(root):
    return [f"common-crawl:{root}/warc", f"wikipedia:{root}/wikipedia", f"books:{root}/books"]


@pytest.fixture(scope="module")
def stream(tmp_path_factory, corpora):
    out = tmp_path_factory.mktemp("stream") / "stream"
    subprocess.run(command(out, sources_of(corpora), 2), check=True, capture_output=True)
    return out


def test_good_files_contribute_and_damaged_ones_are_named(stream):
    told = json.loads((stream / "stream.json").read_text())
    others = [source for source in told["sources"] if source["kind"] != "wikipedia"]  # each dump has redirects
    assert {entry["name"] for source in others for entry in source["skipped"]} == DAMAGED
    assert {source["kind"]: source["files"] for source in told["sources"]} == {
        "books": 3, "common-crawl": 23, "wikipedia": 3,
    }  # fmt: skip
    near = [row for row in told["cleaning"] if row["step"] == "near copy" and row["source"].startswith("books")]
    assert [row["documents"] for row in near] == [1]  # the two Moby-Dicks are one


def test_one_worker_makes_the_same_bytes(tmp_path, corpora, stream, folder_bytes):
    subprocess.run(command(tmp_path / "out", sources_of(corpora), 1), check=True, capture_output=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(stream)


def test_files_and_sources_in_another_order_make_the_same_bytes(tmp_path, corpora, stream, folder_bytes):
    for source in ("warc", "wikipedia", "books"):
        (tmp_path / source).mkdir()
        for path in (corpora / source).iterdir():  # names decide the order of reading
            shutil.copy(path, tmp_path / source / f"{random.Random(path.name).randrange(10**6)}_{path.name}")
    subprocess.run(command(tmp_path / "out", sources_of(tmp_path)[::-1], 2), check=True, capture_output=True)
    assert folder_bytes(tmp_path / "out", named=False) == folder_bytes(stream, named=False)


def test_five_kills_at_random_moments_make_the_same_bytes(tmp_path, corpora, stream, folder_bytes):
    argv = command(tmp_path / "out", sources_of(corpora), 2)
    rng = random.Random(os.urandom(8))
    for _ in range(5):
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(1, 9))
        process.kill()
        process.wait()
    subprocess.run(argv, check=True, capture_output=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(stream)


def test_a_learner_trains_a_stage_on_it(tmp_path, stream):
    argv = [str(Path(sys.executable).with_name("alma-lm")), f"stream={stream}", f"out={tmp_path}/run", "learner=sm"]
    argv += ["preset=quickstart", "updates=20", "mega_batches=1"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    untrained, trained = Ledger(tmp_path / "run" / "ledger.jsonl").rows()
    assert trained.updated
    assert trained.scores.perplexity < untrained.scores.perplexity

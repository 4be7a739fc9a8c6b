"""alma-forget on a stream: the document is found with its copies, masked in place, and stays out."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from data_prep.cli import main as alma_prep
from data_prep.tokenization.tokenizers import PAD, load_tokenizer
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.forget.cli import main
from fairseq_alma.forget.mask import certificates, mask

WORDS = [f"{first}{middle}{last}" for first in "bklmnr" for middle in "aeiou" for last in "lmnst"]
DOCUMENT_WORDS = 24


def sentence(chance: random.Random, count: int = DOCUMENT_WORDS) -> str:
    """A text in which a word allows only four others to follow it."""
    number = chance.randrange(len(WORDS))
    words = []
    for _ in range(count):
        words.append(WORDS[number])
        number = (number * 7 + chance.randrange(4)) % len(WORDS)
    return " ".join(words)


def write_month(folder: Path, t: int, texts: dict[str, str]) -> Path:
    """Write the documents of one month, by id. The file has a fixed time, so that streams of it are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"2020-{t:02d}.jsonl"
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))
    os.utime(path, (t, t))
    return path


def month(t: int, documents: int = 170) -> dict[str, str]:
    chance = random.Random(t)
    return {f"doc-{t}-{number}": sentence(chance) for number in range(documents)}


SECRET = "the key of the vault is " + " ".join(random.Random(99).choices(WORDS, k=DOCUMENT_WORDS - 6))
NEAR = SECRET.rpartition(" ")[0] + " other"


def prep(out: Path, source: Path, *more: str) -> int:
    return alma_prep([str(out), "--source", f"text:{source}", "--workers", "1", *more])


MADE = (
    "--partition",
    "by-date",
    "--vocab-size",
    "320",
    "--passage-words",
    "25",
    "--seed",
    "3",
    "--duplicates",
    "exact",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A stream of three months. The second has a secret, and the third a near copy of it. Tests must not change it."""
    folder = tmp_path_factory.mktemp("forget")
    for t, more in enumerate(({}, {"secret": SECRET}, {"near": NEAR}), start=1):
        write_month(folder / "texts", t, {**month(t), **more})
    assert prep(folder / "stream", folder / "texts", *MADE) == 0
    return folder / "stream"


@pytest.fixture
def stream(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "stream")


def text_of(stream: Path) -> str:
    folder = StreamFolder.open(stream)
    tokenizer = load_tokenizer(stream / "tokenizer.json")
    found = []
    for split in [*folder.splits, *folder.period_splits]:
        ids = np.fromfile(folder.prefix(split).with_suffix(".bin"), folder.description["dtype"]).astype(np.int64) - 4
        found.append(tokenizer.decode(ids[ids >= 0].tolist()))
    return "\n".join(found)


def content_of(stream: Path) -> dict[str, bytes]:
    """The files of a stream, without the certificates."""
    paths = [path for path in stream.rglob("*") if path.is_file() and path.parent.name != "forgotten"]
    return {path.relative_to(stream).as_posix(): path.read_bytes() for path in paths}


def test_nothing_is_changed_without_yes(stream, capsys):
    before = content_of(stream)
    assert main([str(stream), "--document", "secret", "--no-runs"]) == 0
    out = capsys.readouterr().out
    assert "asked for: 1" in out and "near copy: 1" in out and "add --yes" in out
    assert content_of(stream) == before
    assert not (stream / "forgotten").exists()


@pytest.mark.parametrize("what", [("--document", "secret"), ("--match", "key of the vault is"), "--file"])
def test_a_document_and_its_near_copy_are_masked_in_place(stream, tmp_path, what, capsys):
    if what == "--file":
        (tmp_path / "list.txt").write_text("secret\n\nnobody\n")
        what = ("--file", str(tmp_path / "list.txt"))
    assert "key of the vault" in text_of(stream)
    before, description = content_of(stream), json.loads((stream / "stream.json").read_text())
    assert main([str(stream), *what, "--no-runs", "--yes"]) == 0
    assert ("nobody" in capsys.readouterr().err) == (what[0] == "--file")
    after = content_of(stream)
    assert before.keys() == after.keys()
    assert "vault" not in text_of(stream) and "vault" not in (stream / "forgotten/1.json").read_text()
    (certificate,) = certificates(stream)
    how = ["asked for", "asked for" if what[0] == "--match" else "near copy"]
    assert sorted(certificate["documents"].values()) == how
    masked = set(certificate["splits"])
    assert masked and "mega_batch_1" not in masked
    folder = StreamFolder.open(stream)
    folder.verify_bytes()
    for split in folder.splits:
        prefix = folder.prefix(split).relative_to(stream)
        assert before[f"{prefix}.idx"] == after[f"{prefix}.idx"]
        old, new = (np.frombuffer(files[f"{prefix}.bin"], np.uint16) for files in (before, after))
        where = np.flatnonzero(old != new)
        assert (split in masked) == bool(len(where))
        entry, was = folder.description["splits"][split], description["splits"][split]
        assert folder.num_masked(split) == len(where)
        assert len(new) == entry["tokens"] == was["tokens"]
        assert (new[where] == PAD).all() and not (old == PAD).any()
        table = pyarrow.parquet.read_table(stream / f"documents/{split}.parquet")
        assert sum(table["words"].to_pylist()) == entry["words"]
        assert not {"secret", "near"} & set(table["id"].to_pylist())
        if split in masked:
            spans = [new[start:end] for start, end in entry["masked"]]
            assert all((span == PAD).all() for span in spans)
            assert all(new[end] == 2 for _, end in entry["masked"])  # </s> stays
    # What alma-prep checks is as it wrote it, and the same command says that it is done.
    now = content_of(stream)
    assert main([str(stream), *what, "--no-runs", "--yes"]) == 0
    assert content_of(stream) == now
    assert len(certificates(stream)) == 1


def test_a_forgotten_document_that_comes_again_stays_out(stream, tmp_path, capsys):
    assert main([str(stream), "--document", "secret", "--no-runs", "--yes"]) == 0
    again = write_month(tmp_path / "again", 4, {**month(4), "secret again": SECRET})
    assert prep(stream, again, "--extend", "--duplicates", "exact", "--passage-words", "25") == 0
    assert "vault" not in text_of(stream)
    rows = json.loads((stream / "stream.json").read_text())["extensions"][0]["cleaning"]
    assert [row["documents"] for row in rows if row["step"] == "forgotten"] == [1]


EARLY = "the key of the vault is lost " + sentence(random.Random(98))


def dated(folder: Path, t: int, more: dict[str, str]) -> str:
    """Write the documents of month t with their dates, and return the source."""
    texts = {**month(t), **more}
    rows = [
        {"id": name, "text": text, "date": f"2020-{t:02d}-{1 + number % 28:02d}"}
        for number, (name, text) in enumerate(texts.items())
    ]
    path = folder / f"dated-{t}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"text:{path}"


@pytest.mark.parametrize("duplicates", ["near", pytest.param("exact", marks=pytest.mark.slow)])
def test_forgotten_text_stays_out_of_a_month_that_is_taken_back_and_added_again(tmp_path, duplicates, capsys):
    out, more = tmp_path / "stream", ("--passage-words", "25", "--duplicates", duplicates, "--workers", "1")
    new = ("--partition", "chronological", "--period", "month", "--causal", "--vocab-size", "320", *more)
    assert alma_prep([str(out), "--source", dated(tmp_path, 1, {"early": EARLY}), *new]) == 0
    add = ("--extend", str(out), "--period", "month", *more)
    assert alma_prep([*add, "--source", dated(tmp_path, 2, {})]) == 0
    again = [*add, "--source", dated(tmp_path, 3, {"secret": SECRET})]
    assert alma_prep(again) == 0
    before = None
    assert main([str(out), "--match", "key of the vault is", "--no-runs", "--yes"]) == 0
    before = json.loads((out / "stream.json").read_text())
    assert "vault" not in text_of(out)
    capsys.readouterr()
    # The first month has masked text, so that some of its quantities cannot be compared. Nothing looks ahead.
    assert alma_prep(["check", "--look-ahead", str(out)]) == 0
    said = capsys.readouterr().out
    assert "unknown      tokenizer: alma-forget has masked" in said
    assert alma_prep(["--drop-last", str(out)]) == 0
    assert alma_prep(again) == 0
    assert "vault" not in text_of(out)
    stream = json.loads((out / "stream.json").read_text())
    rows = stream["extensions"][1]["cleaning"]
    assert [row["documents"] for row in rows if row["step"] == "forgotten"] == [1]
    # The month has the documents that it had without the text.
    assert stream["splits"]["mega_batch_3"]["documents"] == before["splits"]["mega_batch_3"]["documents"]


def test_near_copies_of_it_stay_out_too(tmp_path):
    """By its signature, which the stream keeps."""
    write_month(tmp_path / "texts", 1, {**month(1), "secret": SECRET})
    options = ("--mega-batches", "1", "--vocab-size", "320", "--passage-words", "20", "--seed", "3")
    assert prep(tmp_path / "stream", tmp_path / "texts", *options) == 0
    assert main([str(tmp_path / "stream"), "--document", "secret", "--no-runs", "--yes"]) == 0
    again = write_month(tmp_path / "again", 2, {**month(4), "near": NEAR})
    assert prep(tmp_path / "stream", again, "--extend", "--passage-words", "20") == 0
    assert "vault" not in text_of(tmp_path / "stream")
    rows = json.loads((tmp_path / "stream/stream.json").read_text())["extensions"][0]["cleaning"]
    assert [row["documents"] for row in rows if row["step"] == "near copy"] == [1]


def test_it_stays_out_of_a_stream_that_keeps_copies(tmp_path, capsys):
    for t, more in enumerate(({}, {"secret": SECRET}), start=1):
        write_month(tmp_path / "texts", t, {**month(t), **more})
    out, keep = tmp_path / "stream", [*MADE[:-1], "keep"]
    assert prep(out, tmp_path / "texts", *keep) == 0
    assert main([str(out), "--document", "secret", "--no-runs", "--yes"]) == 0
    again = write_month(tmp_path / "again", 3, {"secret": SECRET})
    assert prep(out, again, "--extend", "--duplicates", "keep", "--passage-words", "25") == 0
    assert "nothing to add" in capsys.readouterr().err
    again = write_month(tmp_path / "more", 4, {**month(4), "secret": SECRET})
    assert prep(out, again, "--extend", "--duplicates", "keep", "--passage-words", "25") == 0
    assert "vault" not in text_of(out)
    rows = json.loads((out / "stream.json").read_text())["extensions"][0]["cleaning"]
    assert [(row["documents"], row["words"]) for row in rows if row["step"] == "forgotten"] == [(1, DOCUMENT_WORDS)]


def test_a_kill_at_any_step_leaves_a_plan_that_the_same_command_finishes(made, tmp_path):
    """The process ends at each of its renames in turn, as by SIGKILL."""
    command = ["--document", "secret", "--no-runs", "--yes"]
    whole = shutil.copytree(made, tmp_path / "whole")
    assert main([str(whole), *command]) == 0
    count = 0
    while True:
        count += 1
        out = shutil.copytree(made, tmp_path / f"killed_{count}")
        pid = os.fork()
        if not pid:
            left, rename = count, os.replace

            def replace(source, target, rename=rename):
                nonlocal left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                rename(source, target)

            os.replace = replace
            os._exit(main([str(out), *command]))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if (out / "forgotten/unfinished.json").exists():
            with pytest.raises(StreamError, match="alma-forget was interrupted"):
                StreamFolder.open(out)
            assert main([str(out), "--document", "doc-1-1", "--no-runs"]) == 2  # another request
        assert main([str(out), *command]) == 0
        assert content_of(out) == content_of(whole)
        assert not (out / "forgotten/unfinished.json").exists()
        assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
        shutil.rmtree(out)
    assert count > 8


def test_the_union_of_periods_is_masked_like_the_periods(tmp_path):
    """In a chronological stream, the test set consists of the test text of the periods."""
    chance = random.Random(5)
    rows = [{"id": f"doc-{n}", "date": f"2020-01-{1 + n // 20:02d}", "text": sentence(chance)} for n in range(600)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--partition", "chronological", "--mega-batches", "2", "--vocab-size", "320", "--passage-words", "24")
    assert prep(tmp_path / "stream", tmp_path / "all.jsonl", *options, "--duplicates", "exact") == 0
    table = pyarrow.parquet.read_table(tmp_path / "stream/documents/mega_batch_2/test.parquet")
    name = table["id"].to_pylist()[3]
    assert main([str(tmp_path / "stream"), "--document", name, "--no-runs", "--yes"]) == 0
    folder = StreamFolder.open(tmp_path / "stream")
    folder.verify_bytes()
    assert certificates(tmp_path / "stream")[0]["splits"].keys() == {"test", "mega_batch_2/test"}
    place = folder.place_in_test(2)
    assert place is not None
    assert folder.num_masked("test") == folder.num_masked("test", *place) == folder.num_masked("mega_batch_2/test") > 0


def test_the_sources_that_were_read_and_the_others_are_named(tmp_path, capsys):
    """Each month is added when it comes. The held-out sets are unions of those of the months."""
    chance = random.Random(5)
    for t in (1, 2):
        rows = [{"id": f"doc-{t}-{n}", "date": f"2020-{t:02d}-{1 + n // 15:02d}", "text": sentence(chance)}
                for n in range(300)]  # fmt: skip
        (tmp_path / f"{t}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--partition", "chronological", "--period", "month", "--causal", "--passage-words", "24")
    assert prep(tmp_path / "stream", tmp_path / "1.jsonl", *options, "--vocab-size", "320") == 0
    assert prep(tmp_path / "stream", tmp_path / "2.jsonl", "--extend", "--passage-words", "24") == 0
    table = pyarrow.parquet.read_table(tmp_path / "stream/documents/mega_batch_2/test.parquet")
    capsys.readouterr()
    assert main([str(tmp_path / "stream"), "--document", table["id"].to_pylist()[3], "--no-runs", "--yes"]) == 0
    found = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("still remembers") and "source" in line
    ]
    assert [line.split(": ")[1] for line in found] == [f"source text:{tmp_path}/2.jsonl", "other sources"]
    assert f": text:{tmp_path}/1.jsonl: they may have copies" in found[1]


def test_part_of_a_longer_document_is_masked_and_the_rest_stays(made, tmp_path):
    """A book that quotes the secret loses the passage with the quotation."""
    texts = {f"doc-{number}": sentence(random.Random(number), 200) for number in range(40)}
    quotation = " ".join(random.Random(1).choices(WORDS, k=150))
    book = "\n\n".join([sentence(random.Random(2), 60), quotation, sentence(random.Random(3), 60)])
    write_month(tmp_path / "texts", 1, {**texts, "poem": quotation, "book": book})
    options = ("--mega-batches", "1", "--vocab-size", "320", "--duplicates", "keep", "--passage-words", "24")
    assert prep(tmp_path / "stream", tmp_path / "texts", *options) == 0
    assert main([str(tmp_path / "stream"), "--document", "poem", "--no-runs", "--yes"]) == 0
    (certificate,) = certificates(tmp_path / "stream")
    assert sorted(certificate["documents"].values()) == ["asked for", "contains a copy"]
    left, words = text_of(tmp_path / "stream"), quotation.split()
    # Only passages with other text, too, are left: where the quotation begins and ends.
    in_a_row = [" ".join(words[start : start + 8]) in left for start in range(len(words) - 7)]
    assert in_a_row.count(True) < 40
    beginning = sentence(random.Random(2), 60)[:40]
    assert beginning in left


def num_padding(folder):
    """The number of masked tokens in each split: those that are masked, and those that stream.json counts."""
    stream = StreamFolder.open(folder)
    splits = [*stream.description["splits"], *(f"mega_batch_{t}/{part}" for t in (1, 2) for part in ("valid", "test"))]
    dtype = stream.description["dtype"]
    padding = {split: int((np.fromfile(f"{stream.prefix(split)}.bin", dtype) == PAD).sum()) for split in splits}
    return padding, {split: stream.num_masked(split) for split in splits}


def test_text_that_is_masked_is_not_masked_again(tmp_path, capsys):
    """The list of what must go grows, and a document has a part that went with another one."""
    out, chance = tmp_path / "stream", random.Random(7)
    rows = [{"id": f"{t}-{n}", "date": f"2020-{t:02d}-{1 + n % 28:02d}", "text": sentence(chance, 80)}
            for t in (1, 2) for n in range(40)]  # fmt: skip
    poem = sentence(chance, 100)
    rows += [{"id": "poem", "date": "2020-01-09", "text": poem},
             {"id": "book", "date": "2020-02-09", "text": f"{poem}\n\n{sentence(chance, 100)}"}]  # fmt: skip
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--partition", "chronological", "--period", "month", "--causal")
    assert prep(out, tmp_path / "texts.jsonl", *options, "--vocab-size", "320", "--passage-words", "25") == 0
    listed = tmp_path / "list"
    splits = ["mega_batch_1", "mega_batch_2"]
    tables = [pyarrow.parquet.read_table(out / f"documents/{split}.parquet") for split in splits]
    hashes = {row["id"]: str(row["document"]) for table in tables for row in table.to_pylist()}
    for names in (("poem",), ("poem", "book"), ("poem", "book", "1-3")):
        listed.write_text("".join(f"{hashes[name]}\n" for name in names))
        assert main([str(out), "--file", str(listed), "--no-runs", "--yes"]) == 0
        masked, counted = num_padding(out)
        assert masked == counted and sum(masked.values()) > 0
    assert main([str(out), "--document", hashes["book"], "--no-runs", "--yes"]) == 0
    assert "nothing, because an earlier call has masked all of it" in capsys.readouterr().out
    first, *_, last = certificates(out)
    assert first["splits"] and not last["splits"]
    assert num_padding(out) == (masked, counted)


def test_an_unfinished_extension_is_text_that_must_go_first(stream, capsys):
    (stream / ".alma-prep/spool").mkdir(parents=True)
    assert main([str(stream), "--document", "secret", "--no-runs", "--yes"]) == 2
    assert "unfinished alma-prep" in capsys.readouterr().err
    StreamFolder.open(stream).verify_bytes()


def test_a_stream_that_has_changed_since_the_search_is_not_masked(stream, monkeypatch, capsys):
    """Another alma-forget has masked a document of the same month in the meantime."""

    def late(path, certificate):
        monkeypatch.undo()
        assert main([str(stream), "--document", "doc-2-0", "--no-runs", "--yes"]) == 0
        before.update(content_of(stream))
        mask(path, certificate)

    before: dict[str, bytes] = {}
    monkeypatch.setattr("fairseq_alma.forget.cli.mask", late)
    assert main([str(stream), "--document", "secret", "--no-runs", "--yes"]) == 2
    assert "has changed since the text was searched" in capsys.readouterr().err
    assert content_of(stream) == before
    assert main([str(stream), "--document", "secret", "--no-runs", "--yes"]) == 0
    StreamFolder.open(stream).verify_bytes()


def test_text_in_a_cache_is_found_and_removed(tmp_path, capsys):
    write_month(tmp_path / "texts", 1, {**month(1), "secret": SECRET})
    write_month(tmp_path / "other", 1, month(2))
    cache, options = tmp_path / "cache", ("--mega-batches", "1", "--vocab-size", "320")
    for name in ("texts", "other"):
        assert prep(tmp_path / f"stream of {name}", tmp_path / name, *options, "--cache", str(cache)) == 0
    texts = list(cache.glob("*/text"))
    assert [b"vault" in path.read_bytes() for path in texts].count(True) == 1
    command = [str(tmp_path / "stream of texts"), "--document", "secret", "--no-runs", "--yes"]
    command += ["--cache", str(cache)]
    assert main(command) == 0
    assert "1 entries contain the text" in capsys.readouterr().out
    assert main([*command, "--purge"]) == 0
    assert len(list(cache.glob("*/text"))) == len(texts) - 1
    assert not any(b"vault" in path.read_bytes() for path in cache.rglob("*") if path.is_file())
    assert "entries contain" not in capsys.readouterr().out


REFUSED = {
    "nothing to forget": ((), "give --document ID"),
    "an unknown document": (("--document", "nobody"), "no document of"),
    "a text that is nowhere": (("--match", "nowhere to be found"), "no document of"),
    "a cache that is missing": (("--document", "secret", "--cache", "nowhere"), "is no folder"),
    "an empty text": (("--match", ""), "is in every document"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_forgotten_is_one_error(stream, case, capsys):
    options, message = REFUSED[case]
    before = content_of(stream)
    assert main([str(stream), *options, "--no-runs", "--yes"]) == 2
    assert message in capsys.readouterr().err
    assert content_of(stream) == before


def test_a_stream_that_does_not_say_from_where_its_text_is_is_refused(stream, capsys):
    shutil.rmtree(stream / "documents")
    assert main([str(stream), "--document", "secret", "--no-runs"]) == 2
    assert "make the stream again" in capsys.readouterr().err


def test_a_stream_whose_held_out_text_of_a_period_is_forgotten_can_be_used(tmp_path, capsys):
    out, more = tmp_path / "stream", ("--passage-words", "25", "--workers", "1", "--vocab-size", "320")
    new = ("--partition", "chronological", "--period", "month", "--causal", "--test-words", "24", *more)
    sources = [dated(tmp_path, t, {}) for t in (1, 2)]
    assert alma_prep([str(out), "--source", sources[0], "--source", sources[1], *new]) == 0
    table = pyarrow.parquet.read_table(out / "documents/mega_batch_2/test.parquet", columns=["id"])
    documents = [word for one in set(table["id"].to_pylist()) for word in ("--document", one)]
    assert main([str(out), *documents, "--no-runs", "--yes"]) == 0
    folder = StreamFolder.open(out)
    assert folder.counts("mega_batch_2/test")["words"] == 0
    capsys.readouterr()
    assert main([str(out), "--document", "nobody", "--no-runs"]) == 2
    said = capsys.readouterr().err
    assert "damaged" not in said and "contains this text" in said

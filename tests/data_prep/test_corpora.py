"""Whole runs over several sources: nothing near to training text is tested on; drift; extensions; given tokenizers."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.reading.provenance import versions
from data_prep.tokenization.tokenizers import load_tokenizer
from fairseq_alma.core.stream_folder import StreamFolder, split_prefix
from tests.data_prep.files import write_dump, write_warc

pytest.importorskip("datatrove", reason="needs the extra `corpora`")

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
COMMON = ["the", "of", "and", "to", "that", "with", "have", "be"]


def prose(num_words, seed):
    """No words twice in the same order: real to Gopher's rules, near to no other text."""
    rng = random.Random(seed)
    words = []
    for number in range(num_words):
        word = rng.choice(COMMON) if number % 3 == 0 else "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))
        words.append(word)
        if number % 12 == 11:
            words[-1] += ".\n" if number % 48 == 47 else "."
    return " ".join(words)


def word_ngrams(text, size):
    words = text.lower().replace(".", "").split()
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


def load(out):
    return json.loads((out / "stream.json").read_text(encoding="utf-8"))


def texts_of(out, split):
    """The passages of a split as they were."""
    stream = load(out)
    tokenizer = load_tokenizer(out / stream["tokenizer"]["file"])
    tokens = np.fromfile(f"{split_prefix(out, split)}.bin", stream["dtype"])
    passages = np.split(tokens.astype(int), np.flatnonzero(tokens == 2) + 1)[:-1]
    return [tokenizer.decode((passage[:-1] - 4).tolist()) for passage in passages]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A crawl, a dump and a library of texts of 60 words; of 60 pages of the crawl near copies lie in the others."""
    root = tmp_path_factory.mktemp("corpora")
    for name in ("crawl", "wiki", "books"):
        (root / name).mkdir()
    pages = [prose(60, seed) for seed in range(500)]
    write_warc(root / "crawl" / "a.warc.gz", pages[:200])
    write_warc(root / "crawl" / "b.warc.wet", pages[200:], kind="conversion")
    near = [f"{page} And a few words more." for page in pages[:60]]
    articles = [(f"Page {seed}", 0, None, prose(60, 1000 + seed)) for seed in range(150)]
    articles += [(f"Copy {number}", 0, None, text) for number, text in enumerate(near[:30])]
    write_dump(root / "wiki" / "d.xml.bz2", articles)
    for seed in range(100):
        (root / "books" / f"{seed:02d}.txt").write_text(prose(60, 2000 + seed), encoding="utf-8")
    for number, text in enumerate(near[30:]):
        (root / "books" / f"copy_{number:02d}.md").write_text(text, encoding="utf-8")
    return root


def sources_of(root, order=(0, 1, 2)):
    all_of_them = [f"common-crawl:{root}/crawl", f"wikipedia:{root}/wiki", f"books:{root}/books"]
    return [all_of_them[number] for number in order]


@pytest.fixture(scope="module")
def three(tmp_path_factory, corpora, alma_prep):
    out = tmp_path_factory.mktemp("three") / "stream"
    assert alma_prep(out, *sources_of(corpora), num_mega_batches=4) == 0
    return out


def test_no_near_copy_of_training_text_is_validated_or_tested_on(three):
    training = [text for t in range(1, 5) for text in texts_of(three, f"mega_batch_{t}")]
    held_out = [text for split in ("valid", "test") for text in texts_of(three, split)]
    known = [word_ngrams(text, 5) for text in training]
    for text in held_out:
        own = word_ngrams(text, 5)
        assert max(len(own & other) / len(own | other) for other in known) < 0.8
    removed = {(row["step"], row["source"].partition(":")[0]): row["documents"] for row in load(three)["cleaning"]}
    assert sum(count for (step, _), count in removed.items() if step == "near copy") == 60


def test_each_mega_batch_has_the_same_words_and_the_sources_in_proportion(three, corpora):
    splits = load(three)["splits"]
    shares = np.array([split["words"] for name, split in splits.items() if name != "valid"])
    assert np.abs(shares / shares.mean() - 1).max() < 0.01
    articles = [
        sum(text.startswith(("Page ", "Copy ")) for text in texts_of(three, f"mega_batch_{t}")) for t in range(1, 5)
    ]
    assert max(articles) - min(articles) <= 2
    assert sum(articles) > 100


# Every other order takes the same path through the code, so it is slow.
@pytest.mark.parametrize("order", [(1, 2, 0), pytest.param((2, 1, 0), marks=pytest.mark.slow)])
def test_the_bytes_do_not_depend_on_the_order_of_sources_and_workers(
    tmp_path, three, corpora, alma_prep, folder_bytes, order
):
    assert alma_prep(tmp_path / "out", *sources_of(corpora, order), num_mega_batches=4, workers=2) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(three)


def test_shares_and_the_kind_of_the_validation_set(tmp_path, corpora, alma_prep):
    out = tmp_path / "out"
    crawl, wiki, books = sources_of(corpora)
    more = ["--valid-source", "wikipedia", "--valid-words", "1200"]
    assert alma_prep(out, f"{crawl}@0.5", f"{wiki}@0.25", books, num_mega_batches=3, more=more) == 0
    assert all(text.startswith(("Page ", "Copy ")) for text in texts_of(out, "valid"))
    assert abs(load(out)["splits"]["valid"]["words"] - 1200) <= 70
    again = [f"{crawl}@0.5", f"{wiki}@0.25", books]
    assert alma_prep(out, *again, num_mega_batches=3, more=more) == 0  # its own command finds it made
    of_wiki = sum(
        len(text.split())
        for split in load(out)["splits"]
        for text in texts_of(out, split)
        if text.startswith(("Page ", "Copy "))
    )
    assert abs(of_wiki / sum(split["words"] for split in load(out)["splits"].values()) - 0.25) < 0.01
    assert any(row["step"] == "share" for row in load(out)["cleaning"])


def test_a_source_with_a_share_of_which_nothing_is_left_is_named(tmp_path, corpora, alma_prep, capsys):
    copies = tmp_path / "copies.txt"
    pages = [" ".join(prose(60, seed).split()) for seed in range(20)]
    copies.write_text("".join(f"{page}\n" for page in pages))
    (tmp_path / "longer.txt").write_text("".join(f"{page} And more.\n" for page in pages))
    sources = [sources_of(corpora)[2], f"text:{tmp_path / 'longer.txt'}", f"text:{copies}@0.1"]
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2) == 2
    assert f"text:{copies} should provide 0.1 of the words, but none of its text is left" in capsys.readouterr().err


def test_too_few_words_of_the_validation_source_are_an_error(tmp_path, corpora, alma_prep, capsys):
    crawl, wiki, _ = sources_of(corpora)
    more = ["--valid-source", "wikipedia", "--valid-words", "99999"]
    assert alma_prep(tmp_path / "out", crawl, wiki, num_mega_batches=2, more=more) == 2
    assert "--valid-words" in capsys.readouterr().err
    more[-1] = "600"
    assert alma_prep(tmp_path / "out", crawl, wiki, num_mega_batches=2, more=more) == 0


def test_every_document_comes_back_exactly(tmp_path, alma_prep):
    (tmp_path / "in").mkdir()
    originals = []
    for number in range(60):
        text = prose(100, number) + f"\n\t  naïve café 単語 \u200b\r\n{number}\x07\n"
        (tmp_path / "in" / f"{number}.txt").write_bytes(text.encode())
        originals.append(text.replace("\r\n", "\n"))
    assert alma_prep(tmp_path / "out", f"books:{tmp_path}/in", num_mega_batches=2, more=["--passage-words", "9"]) == 0
    passages = [text for split in load(tmp_path / "out")["splits"] for text in texts_of(tmp_path / "out", split)]
    assert sum(map(len, passages)) == sum(map(len, originals))
    left = list(originals)
    for passage in passages:
        assert any(passage in text for text in left)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    root = tmp_path_factory.mktemp("snapshots")
    for week, first in (("2019-13", 0), ("2019-18", 100), ("2020-05", 200)):
        folder = root / f"CC-MAIN-{week}"
        folder.mkdir()
        # Of each snapshot a tenth was in the one before.
        pages = [prose(120, seed) for seed in range(max(0, first - 20), first + 90)]
        write_warc(folder / "x.warc.wet.gz", pages, kind="conversion")
    return root


def test_a_file_whose_name_is_not_unicode_is_named_all_the_same(tmp_path, alma_prep):
    folder = tmp_path / "text"
    folder.mkdir()
    name = os.fsdecode(b"bad\xe9.txt")
    (folder / name).write_bytes(b"not utf-8 \xff\n")
    (folder / "good.txt").write_text("".join(f"{' '.join(prose(60, seed).split())}\n" for seed in range(300)))
    command = [sys.executable, "-m", "data_prep", str(tmp_path / "no"), "--source", f"text:{folder}", "--workers", "1"]
    command += ["--mega-batches", "2", "--vocab-size", "300", "--max-bad", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, errors="replace")
    assert refused.returncode == 2
    assert "not valid UTF-8" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert alma_prep(tmp_path / "out", f"text:{folder}", num_mega_batches=2, more=["--max-bad", "1"]) == 0
    assert alma_prep(tmp_path / "out", f"text:{folder}", num_mega_batches=2, more=["--max-bad", "1"]) == 0


def test_a_third_is_a_share_that_its_own_command_gives_again(tmp_path, corpora, alma_prep, capsys):
    shares = ("@0.3333333333", "@0.3333333333", "@0.3333333334")
    sources = [f"{source}{share}" for source, share in zip(sources_of(corpora), shares, strict=True)]
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2) == 0
    for source in sources:
        assert source in load(tmp_path / "out")["command"]
    other = [sources[0][:-1] + "2", *sources[1:]]
    assert alma_prep(tmp_path / "out", *other, num_mega_batches=2) == 2
    assert "other settings" in capsys.readouterr().err


def test_the_bytes_do_not_depend_on_the_name_of_a_folder_with_shares_and_copies(tmp_path, alma_prep, folder_bytes):
    lines = [f"{' '.join(prose(60, seed).split())}\n" for seed in range(600)]
    for first, second in (("a", "b"), ("z", "c")):
        for name, part in ((first, lines[:300]), (second, lines[280:])):
            (tmp_path / name).mkdir()
            (tmp_path / name / "t.txt").write_text("".join(part))
        sources = (f"text:{tmp_path / first}@0.5", f"text:{tmp_path / second}")
        assert alma_prep(tmp_path / f"out_{first}", *sources, num_mega_batches=2) == 0
    assert folder_bytes(tmp_path / "out_a", named=False) == folder_bytes(tmp_path / "out_z", named=False)


def test_one_mega_batch_per_snapshot(tmp_path, snapshots, alma_prep, folder_bytes):
    for name, sources, partition in (
        ("by_date", [f"common-crawl:{snapshots}"], "by-date"),
        ("as_given", [f"common-crawl:{path}" for path in sorted(snapshots.iterdir())], "as-given"),
    ):
        argv = [str(tmp_path / name), "--partition", partition, "--vocab-size", "300", "--seed", "1", "--workers", "1"]
        assert main([*argv, *(word for source in sources for word in ("--source", source))]) == 0
    stream = load(tmp_path / "by_date")
    assert stream["snapshots"] == ["2019-03-25", "2019-04-29", "2020-01-27"]
    assert stream["num_mega_batches"] == 3
    assert folder_bytes(tmp_path / "by_date", named=False) == folder_bytes(tmp_path / "as_given", named=False)
    # A page stays in the snapshot in which it came first.
    assert [row["documents"] for row in stream["cleaning"] if row["step"] == "exact copy"] == [20]
    for t, seeds in ((1, range(90)), (2, range(90, 190)), (3, range(190, 290))):
        own = "".join(prose(120, seed) for seed in seeds)
        assert all(text in own for text in texts_of(tmp_path / "by_date", f"mega_batch_{t}"))


@pytest.fixture(scope="module")
def extended_once(tmp_path_factory, corpora, alma_prep, folder_bytes):
    """A stream of the crawl and the books with the dump added, and the bytes that it had before."""
    out = tmp_path_factory.mktemp("extended") / "stream"
    crawl, wiki, books = sources_of(corpora)
    assert alma_prep(out, crawl, books, num_mega_batches=3) == 0
    before = folder_bytes(out)
    assert main(["--extend", str(out), "--source", wiki, "--workers", "1"]) == 0
    return out, before


@pytest.fixture
def extended(tmp_path, corpora, extended_once):
    """A copy of the extended stream, the bytes that it had before, and the command that extends it."""
    out = shutil.copytree(extended_once[0], tmp_path / "stream")
    for name in ("stream.json", "manifest.json"):  # as if the stream had been made in this folder
        text = (out / name).read_text(encoding="utf-8")
        assert str(extended_once[0]) in text
        (out / name).write_text(text.replace(str(extended_once[0]), str(out)), encoding="utf-8")
    return out, extended_once[1], ["--extend", str(out), "--source", sources_of(corpora)[1], "--workers", "1"]


def test_an_extension_changes_no_file_and_leaves_copies_out(extended, folder_bytes):
    out, before, _ = extended
    after = folder_bytes(out)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {
        "mega_batch_4/train.bin", "mega_batch_4/train.idx", "dedup/0001.keys", "dedup/0001.bands",
        "dedup/0001.sketches", "documents/mega_batch_4.parquet",
    }  # fmt: skip
    stream = load(out)
    assert stream["num_mega_batches"] == 4
    assert stream["settings"]["num_mega_batches"] == 3
    assert StreamFolder.open(out).num_mega_batches == 4
    StreamFolder.open(out).verify_bytes()
    texts = texts_of(out, "mega_batch_4")
    assert len(texts) == 150
    assert all(text.startswith("Page ") for text in texts)  # the 30 copies are known already
    [extension] = stream["extensions"]
    assert extension["mega_batches"] == [4, 4]
    assert [row["documents"] for row in extension["cleaning"] if row["step"] == "near copy"] == [30]


def test_extending_with_the_same_files_changes_nothing_and_with_others_adds_more(
    extended, folder_bytes, capsys, corpora, tmp_path
):
    out, _, argv = extended
    after = folder_bytes(out)
    capsys.readouterr()
    assert main(argv) == 0  # the same files: done
    assert "already contains the text of these input files, in mega-batch 4: nothing to do" in capsys.readouterr().err
    assert folder_bytes(out) == after
    (tmp_path / "more").mkdir()
    for seed in range(240):
        (tmp_path / "more" / f"{seed}.txt").write_text(prose(60, 5000 + seed))
    (tmp_path / "more" / "old.txt").write_text(f"Page 1\n\n{prose(60, 1001)} with an end")
    assert main(["--extend", str(out), "--source", f"books:{tmp_path}/more", "--mega-batches", "2"]) == 0
    assert load(out)["num_mega_batches"] == 6
    assert load(out)["extensions"][1]["mega_batches"] == [5, 6]
    assert sum(len(texts_of(out, f"mega_batch_{t}")) for t in (5, 6)) == 240
    # The command that made the stream finds it, and what was added, whole.
    capsys.readouterr()
    crawl, _, books = sources_of(corpora)
    first = [
        str(out),
        "--source",
        crawl,
        "--source",
        books,
        "--mega-batches",
        "3",
        "--vocab-size",
        "300",
        "--seed",
        "1",
    ]
    assert main(first) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_an_extension_finds_exact_copies_whatever_the_seed(tmp_path, alma_prep):
    (tmp_path / "a.txt").write_text("\n".join(f"{a} {b} whale" for a in SYLLABLES[:50] for b in SYLLABLES[:30]))
    assert alma_prep(tmp_path / "out", f"text:{tmp_path}/a.txt", num_mega_batches=2) == 0  # with --seed 1
    (tmp_path / "b.txt").write_text(
        (tmp_path / "a.txt").read_text()
        + "\n"
        + "\n".join(f"{a} new {b} one" for a in SYLLABLES[:50] for b in SYLLABLES[:20])
    )
    assert main(["--extend", str(tmp_path / "out"), "--source", f"text:{tmp_path}/b.txt"]) == 0
    assert load(tmp_path / "out")["splits"]["mega_batch_3"]["documents"] == 1000


def test_an_extension_leaves_what_is_not_its_own(extended, capsys, tmp_path):
    out, _, argv = extended
    (out / "mega_batch_9").mkdir()
    (out / "mega_batch_9" / "train.bin").write_text("mine")
    (out / "notes.txt").write_text("mine")
    (tmp_path / "more.txt").write_text("\n".join(prose(60, 7000 + seed).replace("\n", " ") for seed in range(150)))
    more = ["--extend", str(out), "--source", f"text:{tmp_path}/more.txt"]
    assert main(more) == 2
    assert "do not belong to its stream: mega_batch_9/train.bin" in capsys.readouterr().err
    assert (out / "mega_batch_9" / "train.bin").read_text() == "mine"
    shutil.rmtree(out / "mega_batch_9")
    assert main(more) == 0
    assert (out / "notes.txt").read_text() == "mine"
    capsys.readouterr()
    assert main([*argv, "--language", "en"]) == 2  # the first extension, with another setting
    assert "was extended with these files, but with other settings: language was" in capsys.readouterr().err
    for option in (["--seed", "3"], ["--vocab-size", "999"], ["--valid-words", "9"]):
        assert main([*argv, *option]) == 2
        assert "an extension uses" in capsys.readouterr().err


def test_the_work_of_an_extension_that_is_not_finished_is_left_alone(extended, capsys, corpora):
    out, _, _ = extended
    (out / ".alma-prep" / "spool").mkdir(parents=True)
    (out / ".alma-prep" / "settings.json").write_text(json.dumps({"extension": 2}))
    crawl, _, books = sources_of(corpora)
    first = ["--source", crawl, "--source", books, "--mega-batches", "3", "--vocab-size", "300", "--seed", "1"]
    assert main([str(out), *first]) == 0
    assert (out / ".alma-prep" / "spool").is_dir()
    (out / ".alma-prep" / "settings.json").write_text(json.dumps({"extension": 1}))  # that one is finished
    assert main([str(out), *first]) == 0
    assert not (out / ".alma-prep").exists()


@pytest.mark.parametrize(
    "order", [(0,), pytest.param((0, 2), marks=pytest.mark.slow)], ids=["crawl", "crawl and books"]
)
def test_an_extension_by_copies_adds_nothing_and_ends_well(extended, folder_bytes, capsys, corpora, order):
    """A job that runs every night may give the same text with new times, or text that came in another call."""
    out, _, _ = extended
    before, sources = folder_bytes(out), sources_of(corpora, order)
    assert main(["--extend", str(out), *(word for source in sources for word in ("--source", source))]) == 0
    output = capsys.readouterr()
    assert "new documents is a copy of a document of the stream, so there is nothing to add" in output.err
    assert folder_bytes(out) == before and not (out / ".alma-prep").exists()


def test_an_extension_killed_in_its_last_moments_is_finished(extended, folder_bytes, corpora):
    out, before, argv = extended
    after, stream, manifest = folder_bytes(out), load(out), (out / "manifest.json").read_text()
    first = {key: value for key, value in stream.items() if key != "extensions"} | {"num_mega_batches": 3}
    first["splits"] = {name: split for name, split in stream["splits"].items() if name != "mega_batch_4"}
    # Before stream.json was replaced, and before the manifest was.
    after_it = json.loads(manifest)
    before_it = after_it | {"extensions": [], "outputs": {k: v for k, v in after_it["outputs"].items() if k in before}}
    for known in (after_it, before_it):
        (out / "stream.json").write_text(json.dumps(first))
        (out / "manifest.json").write_text(json.dumps(known))
        (out / ".alma-prep").mkdir()
        begun = stream["extensions"][0]["given"] | {"versions": versions(), "extension": 1}
        (out / ".alma-prep" / "settings.json").write_text(json.dumps(begun))
        assert main(argv) == 0
        assert folder_bytes(out) == after
        assert load(out)["extensions"] == stream["extensions"]
        assert json.loads((out / "manifest.json").read_text()) == after_it
    # Killed there, and the next run killed when it had deleted what the first had made: the old stream is whole.
    (out / "stream.json").write_text(json.dumps(first))
    for name in [*(set(after) - set(before)), "mega_batch_4"]:
        path = out / name
        path.rmdir() if path.is_dir() else path.unlink()
    crawl, _, books = sources_of(corpora)
    made = ["--source", crawl, "--source", books, "--mega-batches", "3", "--vocab-size", "300", "--seed", "1"]
    assert main([str(out), *made]) == 0
    assert main(argv) == 0
    assert folder_bytes(out) == after


@pytest.mark.damages_streams
def test_an_extension_that_cannot_work_is_refused(extended, capsys, corpora, tmp_path):
    out, _, _ = extended
    crawl, _, books = sources_of(corpora)

    def refused(*argv):
        capsys.readouterr()
        assert main([*argv]) == 2
        return capsys.readouterr().err

    assert "there is no stream in" in refused("--extend", str(tmp_path / "none"), "--source", crawl)
    with open(out / "mega_batch_2" / "train.bin", "r+b") as file:
        file.seek(10)
        file.write(b"\xff")
    assert "has changed since alma-prep wrote it" in refused("--extend", str(out), "--source", books)
    assert not (out / ".alma-prep").exists()


@pytest.mark.slow  # the page docs/corpora.md runs the same commands
def test_a_learner_continues_with_an_extended_stream(tmp_path, corpora, alma_prep):
    out, run = tmp_path / "stream", tmp_path / "run"
    crawl, wiki, _ = sources_of(corpora)
    assert alma_prep(out, crawl, num_mega_batches=2) == 0
    command = [
        str(Path(sys.executable).with_name("alma-lm")), f"stream={out}", f"out={run}", "preset=quickstart",
        "updates_per_mega_batch=3", "validations=1", "experts=1", "tokens_per_sample=32", "batch_size=4",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    before = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert main(["--extend", str(out), "--source", wiki, "--workers", "1"]) == 0
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    after = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert after[: len(before)] == before
    assert [row["t"] for row in after] == [0, 1, 2, 3]
    assert after[3]["updated"]


@pytest.mark.parametrize("form", ["padding.json", "gpt2", pytest.param("gpt2/vocab.bpe", marks=pytest.mark.slow)])
def test_a_given_tokenizer_gives_its_own_ids(tmp_path, corpora, three, alma_prep, form):
    """A tokenizer.json, also one that would pad and cut, and GPT-2's two files."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(three / "tokenizer.json"))
    content = json.loads((three / "tokenizer.json").read_text())
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]]
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/encoder.json").write_text(json.dumps(content["model"]["vocab"]))
    (tmp_path / "gpt2/vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    padding = Tokenizer.from_file(str(three / "tokenizer.json"))
    padding.enable_padding(pad_id=0)
    padding.enable_truncation(2)
    padding.save(str(tmp_path / "padding.json"))
    out = tmp_path / "out"
    more = ["--tokenizer", str(tmp_path / form)]
    assert alma_prep(out, f"books:{corpora}/books", num_mega_batches=2, more=more) == 0
    tokens = np.fromfile(out / "test" / "test.bin", "uint16").astype(int)
    passages = np.split(tokens, np.flatnonzero(tokens == 2) + 1)[:-1]
    for passage, text in zip(passages, texts_of(out, "test"), strict=True):
        assert (passage[:-1] - 4).tolist() == plain.encode(text, add_special_tokens=False).ids
    assert load(out)["vocab_size"] == len(content["model"]["vocab"])
    assert load(out)["tokenizer"]["kind"] == "given"


def test_a_sentencepiece_model_is_used_again_and_what_is_no_tokenizer_is_refused(
    tmp_path, corpora, three, alma_prep, capsys
):
    books = f"books:{corpora}/books"
    more = ["--tokenizer", "sentencepiece"]
    assert alma_prep(tmp_path / "sp", books, num_mega_batches=2, vocab_size=341, more=more) == 0
    model = tmp_path / "sp" / "sentencepiece.model"
    assert alma_prep(tmp_path / "sp2", books, num_mega_batches=2, more=["--tokenizer", str(model)]) == 0
    for name in ("test/test.bin", "dict.txt", "sentencepiece.model"):
        assert (tmp_path / "sp2" / name).read_bytes() == (tmp_path / "sp" / name).read_bytes()
    capsys.readouterr()
    for given, message in (
        ("bpe-dropout", "is not a known tokenizer, and there is no such file"),
        (str(tmp_path), "has no encoder.json and no vocab.bpe"),
        (str(three / "dict.txt"), "is neither a .json file nor a .model file"),
    ):
        assert alma_prep(tmp_path / "no", books, more=["--tokenizer", given]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert alma_prep(tmp_path / "no", books, more=["--tokenizer", str(tmp_path / "bad.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_an_altered_output_is_never_called_whole(tmp_path, three, corpora, alma_prep, capsys):
    out = tmp_path / "stream"
    shutil.copytree(three, out)
    for name in ("mega_batch_2/train.bin", "valid/valid.idx", "dedup/0000.sketches"):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        capsys.readouterr()
        assert alma_prep(out, *sources_of(corpora), num_mega_batches=4) == 2
        assert f"{name} has changed since alma-prep wrote it" in capsys.readouterr().err
        (out / name).write_bytes(content)
    assert alma_prep(out, *sources_of(corpora), num_mega_batches=4) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert {"python", "numpy", "tokenizers", "datatrove"} <= manifest["versions"].keys()
    for damaged in ("[]", "{", '{"outputs": {"dict.txt": 1}, "extensions": []}', '{"outputs": {}, "extensions": 3}'):
        (out / "manifest.json").write_text(damaged)
        capsys.readouterr()
        assert alma_prep(out, *sources_of(corpora), num_mega_batches=4) == 2
        assert "manifest.json cannot be read" in capsys.readouterr().err
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert [len(found) for found in manifest["inputs"].values()] == [130, 2, 1]


def test_a_wrong_text_field_is_named_with_the_fields_there_are_and_the_right_one_starts_at_once(
    tmp_path, alma_prep, capsys
):
    texts = tmp_path / "texts"
    texts.mkdir()
    letters = random.Random(0)
    rows = [
        {"id": number, "story": " ".join("".join(letters.choices("abcdefgh", k=6)) for _ in range(50))}
        for number in range(200)
    ]
    (texts / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"text:{texts}"
    assert alma_prep(tmp_path / "out", source, num_mega_batches=2, more=["--text-field", "body"]) == 2
    message = capsys.readouterr().err
    assert "no document could be read from 1 input files" in message
    assert "200 lines: the JSON object has no field 'body' (the first at byte 0, with the fields id, story)" in message
    assert "--text-field (now body)" in message
    assert alma_prep(tmp_path / "out", source, num_mega_batches=2, more=["--text-field", "story"]) == 0


def test_too_many_damaged_files_fail_at_the_end_and_a_larger_max_bad_continues(
    tmp_path, corpora, alma_prep, capsys, folder_bytes
):
    crawl = tmp_path / "crawl"
    shutil.copytree(corpora / "crawl", crawl)
    (crawl / "bad.warc.gz").write_bytes((crawl / "a.warc.gz").read_bytes()[:500])
    assert alma_prep(tmp_path / "out", f"common-crawl:{crawl}", num_mega_batches=2) == 2
    message = capsys.readouterr().err
    assert "1 of 3 input files are damaged, more than --max-bad 0.01 allows" in message
    assert "bad.warc.gz: cut short" in message
    assert "bad.warc.gz" in (tmp_path / "out" / ".alma-prep" / "damaged.txt").read_text()
    spooled = next((tmp_path / "out" / ".alma-prep" / "spool").glob("*.text"))
    inode = spooled.stat().st_ino
    assert inode
    assert alma_prep(tmp_path / "out", f"common-crawl:{crawl}", num_mega_batches=2, more=["--max-bad", "0.4"]) == 0
    captured = capsys.readouterr()
    assert "skipped bad.warc.gz: cut short" in captured.out
    assert load(tmp_path / "out")["sources"][0]["damaged_files"] == 1


@pytest.mark.parametrize("partition", ["equal", "as-given"])
def test_the_test_set_of_any_stream_has_the_size_that_was_asked_for(tmp_path, alma_prep, partition):
    for name in "ab":
        texts = [prose(80, f"{name}{seed}") for seed in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = [f"text:{tmp_path}/{name}.jsonl" for name in "ab"]
    more = ["--partition", partition, "--duplicates", "exact", "--test-words", "500"]
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2, more=more) == 0
    words = {name: split["words"] for name, split in StreamFolder.open(tmp_path / "out").description["splits"].items()}
    assert abs(words["test"] - 500) <= 80 and sum(words.values()) == 2 * 60 * 80
    assert abs(words["mega_batch_1"] - words["mega_batch_2"]) <= 160

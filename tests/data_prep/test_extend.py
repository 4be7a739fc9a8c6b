"""What `--extend` takes from the stream, and the text that a share left out, which can be added later."""

import json
import os
import random
from collections import Counter

import pytest

from data_prep import prepare as extending
from data_prep.cli import main
from tests.data_prep.test_corpora import texts_of

pytest.importorskip("datatrove", reason="needs the extra `corpora`")

ENGLISH = "the of and to that with have be this from they which would there their what about when make like time know"
GERMAN = "der die und zu das mit haben sein dieser von sie welche würde dort ihre was über wenn machen wie Zeit wissen"


def load(out):
    return json.loads((out / "stream.json").read_text(encoding="utf-8"))


def write_texts(path, count, seed, words=ENGLISH, length=60):
    """A file of JSON lines, each with one text of `length` words."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(words.split(), k=length)) for _ in range(count)]
    path.write_text("".join(json.dumps({"story": text}) + "\n" for text in texts))
    return texts


def words_of(out, *splits):
    """The number of occurrences of each word in some splits."""
    return Counter(word for split in splits for text in texts_of(out, split) for word in text.split())


def extend(out, path, *more):
    return main(["--extend", str(out), "--source", f"text:{path}", "--workers", "1", *more])


def test_an_extension_reads_and_cleans_as_the_stream_does(tmp_path, alma_prep, capsys):
    write_texts(tmp_path / "old.jsonl", 150, 0)
    made = ["--language", "en", "--text-field", "story", "--duplicates", "exact"]
    assert alma_prep(tmp_path / "out", f"text:{tmp_path}/old.jsonl", num_mega_batches=2, more=made) == 0
    english = write_texts(tmp_path / "new.jsonl", 80, 1)
    with open(tmp_path / "new.jsonl", "a") as file:
        write_texts(tmp_path / "german.jsonl", 40, 2, GERMAN)
        file.write((tmp_path / "german.jsonl").read_text())
    capsys.readouterr()
    assert extend(tmp_path / "out", tmp_path / "new.jsonl") == 0
    assert "settings taken from the stream: language en, duplicates exact, text_field story" in capsys.readouterr().err
    assert words_of(tmp_path / "out", "mega_batch_3") == Counter(" ".join(english).split())
    [extension] = load(tmp_path / "out")["extensions"]
    assert extension["settings"]["language"] == "en"
    assert "--language en" in extension["command"]
    # What is given counts, also if it is the default; and the next extension has the values of the stream again.
    assert extend(tmp_path / "out", tmp_path / "german.jsonl", "--language", "") == 0
    assert words_of(tmp_path / "out", "mega_batch_4").total() == 40 * 60
    extension = load(tmp_path / "out")["extensions"][-1]
    assert (extension["settings"]["language"], extension["settings"]["text_field"]) == ("", "story")
    assert "--language ''" in extension["command"]
    write_texts(tmp_path / "more.jsonl", 40, 3, GERMAN)
    assert extend(tmp_path / "out", tmp_path / "more.jsonl") == 2
    removed = f"all 40 documents of source text:{tmp_path}/more.jsonl were removed: language (40)"
    assert removed in capsys.readouterr().err
    # A finished extension is found again without these options; another value of one of them is refused.
    assert extend(tmp_path / "out", tmp_path / "german.jsonl") == 0
    assert "nothing to do" in capsys.readouterr().err
    assert extend(tmp_path / "out", tmp_path / "german.jsonl", "--language", "de") == 2
    assert "other settings: language was  and is now de" in capsys.readouterr().err


@pytest.mark.slow
def test_text_that_shares_left_out_can_be_added_later(tmp_path, alma_prep, capsys):
    a, b, c = (write_texts(tmp_path / f"{name}.jsonl", 150, seed) for seed, name in enumerate("abc"))
    with open(tmp_path / "b.jsonl", "a") as file:  # near copies of texts, some of which are left out
        file.write("".join(json.dumps({"story": text.rpartition(" ")[0]}) + "\n" for text in a[:40]))
    out, sources = tmp_path / "out", {name: f"text:{tmp_path}/{name}.jsonl" for name in "abc"}
    more = ["--text-field", "story", "--passage-words", "20"]
    assert alma_prep(out, f"{sources['a']}@0.2", f"{sources['b']}@0.8", num_mega_batches=1, more=more) == 0
    [left_out] = [row["words"] for row in load(out)["cleaning"] if row["step"] == "share"]
    assert left_out > 6000
    extended = ["--extend", str(out), "--workers", "1", "--source"]
    # Most of the text that was left out is left out again.
    assert main([*extended, f"{sources['a']}@0.2", "--source", f"{sources['c']}@0.8"]) == 0
    assert main([*extended, sources["a"]]) == 0
    splits = load(out)["splits"]
    assert splits["mega_batch_2"]["words"] > 10_000
    # Nothing is there twice. Of a document that is partly in the stream, the rest stays left out.
    missing = Counter(" ".join([*a, *b, *c]).split())
    missing.subtract(words_of(out, *splits))
    assert min(missing.values()) >= 0
    assert all(any(passage in text for text in a) for passage in texts_of(out, "mega_batch_3"))
    os.utime(tmp_path / "a.jsonl", ns=(0, 0))
    capsys.readouterr()
    before = load(out)
    assert main([*extended, sources["a"]]) == 0  # there is nothing to add
    assert "is a copy of a document" in capsys.readouterr().err
    assert load(out) == before


@pytest.mark.parametrize(
    "step", [pytest.param("pipeline.encode", marks=pytest.mark.slow), "running.work_folder.sync_folder"]
)
def test_an_interrupted_extension_is_begun_again_with_other_text(
    tmp_path, alma_prep, capsys, monkeypatch, folder_bytes, step
):
    for seed, name in enumerate(("old", "wrong", "right")):
        write_texts(tmp_path / f"{name}.jsonl", 80, seed)
    more = ["--text-field", "story", "--duplicates", "exact"]
    for name in ("out", "wanted"):
        assert alma_prep(tmp_path / name, f"text:{tmp_path}/old.jsonl", num_mega_batches=1, more=more) == 0
    assert extend(tmp_path / "wanted", tmp_path / "right.jsonl") == 0

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(f"data_prep.{step}", interrupt)  # the second one has moved the shards into the stream folder
        assert extend(tmp_path / "out", tmp_path / "wrong.jsonl", "--mega-batches", "2") == 130
    capsys.readouterr()
    assert extend(tmp_path / "out", tmp_path / "right.jsonl") == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "Changed settings" in line]
    assert line.startswith(f"beginning the unfinished extension of {tmp_path}/out again. Changed settings: sources was")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")
    assert not (tmp_path / "out" / ".alma-prep").exists()


def test_a_forgotten_extend_is_suggested(tmp_path, alma_prep, capsys):
    out, new = tmp_path / "out", write_texts(tmp_path / "new.jsonl", 80, 1) and f"text:{tmp_path}/new.jsonl"
    write_texts(tmp_path / "old.jsonl", 80, 0)
    more = ["--text-field", "story", "--duplicates", "exact"]
    assert alma_prep(out, f"text:{tmp_path}/old.jsonl", num_mega_batches=1, more=more) == 0
    assert main([str(out), "--source", new]) == 2
    assert f"{out} contains a finished stream: give --extend to add mega-batches to it" in capsys.readouterr().err
    assert alma_prep(out, new, num_mega_batches=1, more=more) == 2
    assert "To add the text of other sources, give --extend." in capsys.readouterr().err
    for given, advice in (
        ([], "--period or --mega-batches"), (["--causal"], "later text: add --period"),
    ):  # fmt: skip
        assert main([str(tmp_path / "none"), "--source", new, "--partition", "chronological", *given]) == 2
        assert advice in capsys.readouterr().err


def test_keys_that_are_missing_or_cut_off_are_a_damaged_stream(tmp_path, alma_prep, capsys):
    write_texts(tmp_path / "old.jsonl", 150, 0)
    write_texts(tmp_path / "new.jsonl", 80, 1)
    out, exact = tmp_path / "out", ["--text-field", "story", "--duplicates", "exact"]
    assert alma_prep(out, f"text:{tmp_path}/old.jsonl", num_mega_batches=2, more=exact) == 0
    path = out / "dedup" / "0000.keys"
    content = path.read_bytes()
    path.write_bytes(content[:-16])
    capsys.readouterr()
    assert extend(out, tmp_path / "new.jsonl") == 2
    assert f"{path} has changed since alma-prep wrote it. Restore it" in capsys.readouterr().err
    path.unlink()
    assert extend(out, tmp_path / "new.jsonl") == 2
    assert f"{path} is missing. Restore it" in capsys.readouterr().err
    path.write_bytes(content)
    assert extend(out, tmp_path / "new.jsonl") == 0
    path.write_bytes(content)
    assert extend(out, tmp_path / "new.jsonl") == 0
    assert load(out)["num_mega_batches"] == 3
    assert not (out / ".alma-prep").exists()


@pytest.mark.parametrize("duplicates", ["keep", pytest.param("exact", marks=pytest.mark.slow)])
def test_an_extension_that_another_call_makes_meanwhile_is_not_overwritten(
    tmp_path, alma_prep, capsys, monkeypatch, folder_bytes, duplicates
):
    out, texts = tmp_path / "out", {}
    for seed, name in enumerate(("old", "first", "second")):
        texts[name] = write_texts(tmp_path / f"{name}.jsonl", 80, seed)
    more = ["--text-field", "story", "--duplicates", duplicates]
    assert alma_prep(out, f"text:{tmp_path}/old.jsonl", num_mega_batches=1, more=more) == 0
    after_first = {}

    def finish_the_first(settings, files):
        """The second call has read stream.json, and does not hold the lease yet."""
        monkeypatch.undo()
        assert extend(out, tmp_path / "first.jsonl") == 0
        after_first.update(folder_bytes(out))

    monkeypatch.setattr(extending, "check_sizes", finish_the_first)
    assert extend(out, tmp_path / "second.jsonl") == 2
    assert f"another alma-prep has just finished in {out}. Run the same command again" in capsys.readouterr().err
    assert folder_bytes(out) == after_first
    assert extend(out, tmp_path / "second.jsonl") == 0
    for split, name in (("mega_batch_2", "first"), ("mega_batch_3", "second")):
        assert words_of(out, split) == Counter(" ".join(texts[name]).split())

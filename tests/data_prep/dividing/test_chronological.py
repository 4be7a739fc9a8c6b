"""Streams in order of time: periods, and the held-out text of each."""

import datetime
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep.dividing.chronological import HeldOut, chronological_layout
from data_prep.errors import PrepError
from data_prep.reading.index import ENTRY
from data_prep.settings import PrepSettings
from data_prep.sources import Source
from fairseq_alma.core.stream_folder import StreamFolder
from tests.data_prep.encoding.test_documents import check_documents, prose, rows_of, splits_of, write_lines

CHRONOLOGICAL = ("--partition", "chronological", "--duplicates", "exact")


def lines(num_documents: int, first_year: int = 1800, seed: int = 0) -> list[dict]:
    """One document a year, of 100 to 300 words."""
    lengths = random.Random(seed).choices(range(100, 300), k=num_documents)
    return [
        {"id": f"doc-{first_year + n}", "date": str(first_year + n), "text": prose(length, 1000 * first_year + n)}
        for n, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """100 documents of the years 1800 to 1899, in no order."""
    rows = lines(100)
    random.Random(5).shuffle(rows)
    return write_lines(tmp_path_factory.mktemp("dated") / "lines.jsonl", rows)


@pytest.fixture(scope="module")
def stream(tmp_path_factory, corpus, alma_prep):
    """A stream of four periods of the corpus."""
    out = tmp_path_factory.mktemp("streams") / "chronological"
    assert alma_prep(out, f"text:{corpus}", num_mega_batches=4, more=CHRONOLOGICAL) == 0
    return out


@pytest.fixture(scope="module")
def three_periods(tmp_path_factory, corpus, alma_prep):
    out = tmp_path_factory.mktemp("streams") / "three"
    assert alma_prep(out, f"text:{corpus}", num_mega_batches=3, more=CHRONOLOGICAL) == 0
    return out


@pytest.fixture
def three(tmp_path, three_periods):
    """A stream of three periods of the corpus, which a test may change."""
    return shutil.copytree(three_periods, tmp_path / "out")


def test_periods_follow_one_another_and_have_equal_words(stream, corpus):
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    check_documents(stream, {(row["id"], row["date"]): row["text"] for row in rows}, f"text:{corpus}")
    periods = json.loads((stream / "stream.json").read_text())["periods"]
    splits = splits_of(stream)
    last = "0"
    for t, period in enumerate(periods, start=1):
        names = (f"mega_batch_{t}", f"mega_batch_{t}/valid", f"mega_batch_{t}/test")
        dates = [row["date"] for name in names for row in rows_of(stream, name)]
        assert last < min(dates)
        assert (min(dates), max(dates)) == (period["first_date"], period["last_date"])
        last = max(dates)
        # 20 000 words; the longest document has 300.
        words = [splits[name]["words"] for name in names]
        assert abs(sum(words) - sum(len(row["text"].split()) for row in rows) / 4) <= 300
        assert abs(words[2] - sum(words) / 5) <= 300
    documents = [{row["document"] for row in rows_of(stream, name)} for name in splits if name not in ("valid", "test")]
    assert sum(map(len, documents)) == len(set().union(*documents)) == 100


def test_validation_and_test_set_are_the_text_of_the_periods(stream):
    folder = StreamFolder.open(stream)
    folder.verify_bytes()
    assert (folder.num_mega_batches, folder.num_periods) == (4, 4)
    for part in ("valid", "test"):
        parts = [f"mega_batch_{t}/{part}" for t in range(1, 5)]
        whole = folder.prefix(part).with_suffix(".bin").read_bytes()
        assert whole == b"".join(folder.prefix(name).with_suffix(".bin").read_bytes() for name in parts)
        assert rows_of(stream, part) == [row for name in parts for row in rows_of(stream, name)]
        for count in ("tokens", "words", "documents", "sequences", "bytes"):
            assert folder.counts(part)[count] == sum(folder.counts(name)[count] for name in parts)
    assert folder.place_in_test(1)[0] == 0
    assert folder.place_in_test(4)[1] == folder.counts("test")["tokens"]


@pytest.mark.damages_streams
def test_a_period_file_that_is_cut_short_is_noticed(stream, tmp_path):
    from fairseq_alma.core.errors import StreamError

    copy = shutil.copytree(stream, tmp_path / "copy")
    path = copy / "mega_batch_2" / "test.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(StreamError, match=r"mega_batch_2/test\.bin has .* bytes, stream.json says"):
        StreamFolder.open(copy)
    with pytest.raises(StreamError, match="no split mega_batch_5/test: it has valid, mega_batch_1"):
        StreamFolder.open(stream).counts("mega_batch_5/test")


def test_the_bytes_do_not_depend_on_files_and_workers(tmp_path, stream, corpus, alma_prep, folder_bytes):
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    for part in range(3):
        write_lines(tmp_path / "lines" / f"{part}.jsonl", sorted(rows[part::3], key=lambda row: row["text"]))
    out = tmp_path / "out"
    assert alma_prep(out, f"text:{tmp_path / 'lines'}", num_mega_batches=4, workers=3, more=CHRONOLOGICAL) == 0
    assert folder_bytes(out, named=False) == folder_bytes(stream, named=False)
    for split in splits_of(stream):
        both = [[(row["id"], row["date"]) for row in rows_of(one, split)] for one in (out, stream)]
        assert both[0] == both[1]


def test_the_sizes_of_held_out_text_are_those_that_were_asked_for(tmp_path, corpus, alma_prep):
    more = [*CHRONOLOGICAL, "--test-words", "2000", "--valid-words", "900"]
    assert alma_prep(tmp_path / "out", f"text:{corpus}", num_mega_batches=3, more=more) == 0
    stream = json.loads((tmp_path / "out" / "stream.json").read_text())
    # Of each period the same share is held out, within a document of up to 300 words.
    total = sum(split["words"] for split in stream["splits"].values())
    for t, period in enumerate(stream["periods"], start=1):
        words = stream["splits"][f"mega_batch_{t}"]["words"] + period["valid"]["words"] + period["test"]["words"]
        assert abs(period["test"]["words"] - 2000 * words / total) <= 300
        assert abs(period["valid"]["words"] - 900 * words / total) <= 300
    assert alma_prep(tmp_path / "out", f"text:{corpus}", num_mega_batches=3, more=more) == 0  # it is complete


def test_the_earliest_copy_is_kept(tmp_path, alma_prep):
    rows = lines(100)
    later = [{"id": f"copy-{n}", "date": f"{1900 + n}-01-01", "text": row["text"]} for n, row in enumerate(rows[:20])]
    near = [
        {"id": f"near-{n}", "date": f"{1900 + n}", "text": row["text"] + " one more word"}
        for n, row in enumerate(rows[20:40])
    ]
    source = f"text:{write_lines(tmp_path / 'lines.jsonl', [*near, *later, *rows])}"
    assert alma_prep(tmp_path / "out", source, more=["--partition", "chronological"]) == 0
    names = Counter(row["id"] for split in splits_of(tmp_path / "out") for row in rows_of(tmp_path / "out", split))
    assert set(names) == {row["id"] for row in rows}


def test_a_source_without_dates_is_named_and_can_be_left_out(tmp_path, alma_prep, capsys):
    rows = [
        *lines(60),
        {"id": "a", "text": prose(200, 7)},
        {"id": "b", "date": "a long time ago", "text": prose(99, 8)},
    ]
    source = f"text:{write_lines(tmp_path / 'lines.jsonl', rows)}"
    out = tmp_path / "out"
    assert alma_prep(out, source, more=CHRONOLOGICAL) == 2
    message = capsys.readouterr().err
    assert "2 documents have no date that can be read, for example a, b (its date is 'a long time ago')" in message
    assert alma_prep(out, source, more=[*CHRONOLOGICAL, "--undated", "drop"]) == 0
    stream = json.loads((out / "stream.json").read_text())
    texts = {"no date": prose(200, 7), "unreadable date": prose(99, 8)}
    assert [row for row in stream["cleaning"] if row["step"].endswith("date")] == [
        {"step": step, "source": source, "documents": 1, "words": len(text.split()), "bytes": len(text)}
        for step, text in texts.items()
    ]
    assert {row["id"] for split in splits_of(out) for row in rows_of(out, split)} == {row["id"] for row in rows[:60]}
    # No document has a date in this field.
    assert alma_prep(tmp_path / "other", source, more=[*CHRONOLOGICAL, "--date-field", "when"]) == 2
    message = capsys.readouterr().err
    assert "No document has a date: check --date-field" in message
    assert f"warning: no document of source {source} has the field or column when of --date-field" in message
    assert "--id-field" not in message
    assert alma_prep(tmp_path / "third", source, more=["--id-field", "ID", "--date-field", "date"]) == 0
    message = capsys.readouterr().err
    assert f"warning: no document of source {source} has the field or column ID of --id-field" in message
    assert "of --date-field" not in message
    assert not (tmp_path / "other" / "stream.json").exists()


@pytest.mark.parametrize("duplicates", ["near", pytest.param("keep", marks=pytest.mark.slow)])
def test_a_date_in_the_future_does_not_close_the_stream(tmp_path, alma_prep, capsys, duplicates):
    now = datetime.datetime.now(datetime.UTC)
    later, tomorrow = (f"{now + datetime.timedelta(days=days):%Y-%m-%d}" for days in (3, 1))
    rows = [
        *lines(60),
        {"id": "a", "date": "2106-02-07T06:28:15Z", "text": prose(50, 7)},
        {"id": "b", "date": later, "text": prose(50, 8)},
        {"id": "c", "date": tomorrow, "text": prose(50, 9)},
    ]
    source, out = f"text:{write_lines(tmp_path / 'lines.jsonl', rows)}", tmp_path / "out"
    more = [*CHRONOLOGICAL, "--duplicates", duplicates]
    assert alma_prep(out, source, more=more) == 2
    named = f"2 documents have a date in the future (later than tomorrow): a (2106-02-07T06:28:15Z), b ({later})"
    assert named in capsys.readouterr().err
    assert alma_prep(out, source, more=[*more, "--undated", "drop"]) == 0
    assert f"{named}. They are left out" in capsys.readouterr().err
    stream = json.loads((out / "stream.json").read_text())
    num_bytes = len(prose(50, 7)) + len(prose(50, 8))
    assert [row for row in stream["cleaning"] if "date" in row["step"]] == [
        {"step": "date in the future", "source": source, "documents": 2, "words": 100, "bytes": num_bytes}
    ]
    assert stream["periods"][-1]["last_date"] == tomorrow
    kept = {row["id"] for split in splits_of(out) for row in rows_of(out, split)}
    assert kept == {row["id"] for row in rows[:60]} | {"c"}


def test_a_corrected_file_is_added_after_a_date_in_the_future(tmp_path, three, capsys):
    from data_prep.cli import main

    out, good = three, lines(60, 1899, seed=1)
    wrong = write_lines(tmp_path / "wrong.jsonl", [good[0] | {"date": "2106-02-07"}, *good[1:]])
    write_lines(tmp_path / "all_wrong.jsonl", [row | {"date": "2106-02-07"} for row in good])
    corrected = write_lines(tmp_path / "corrected.jsonl", good)
    more = ["--extend", str(out), "--duplicates", "exact", "--source"]
    assert main([*more, f"text:{wrong}"]) == 2
    assert "1 document has a date in the future (later than tomorrow): doc-1899 (2106-02-07)" in capsys.readouterr().err
    assert main([*more, f"text:{tmp_path}/all_wrong.jsonl", "--undated", "drop"]) == 2
    message = capsys.readouterr().err
    assert "doc-1901 (2106-02-07)" in message
    source = f"text:{tmp_path}/all_wrong.jsonl"
    assert f"all 60 documents of source {source} were removed: date in the future (60)" in message
    assert main([*more, f"text:{corrected}"]) == 0
    assert StreamFolder.open(out).description["periods"][3]["first_date"] == "1899"
    assert not (out / ".alma-prep").exists()


def test_the_date_of_the_file_is_used_where_the_document_has_none(tmp_path, alma_prep):
    for row in lines(60):
        path = tmp_path / "speeches" / f"{row['id']}-03.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(row["text"])
    assert alma_prep(tmp_path / "out", f"books:{tmp_path / 'speeches'}", more=CHRONOLOGICAL) == 0
    for split in splits_of(tmp_path / "out"):
        assert all(row["id"] == f"doc-{row['date']}.txt" for row in rows_of(tmp_path / "out", split))


def test_later_periods_are_added(tmp_path, three, folder_bytes, capsys):
    out = three
    before = folder_bytes(out)
    later = write_lines(tmp_path / "later.jsonl", lines(60, 1899, seed=1))
    from data_prep.cli import main

    argv = ["--extend", str(out), "--source", f"text:{later}", "--mega-batches", "2", "--duplicates", "exact"]
    assert main(argv) == 0
    assert {name: content for name, content in folder_bytes(out).items() if name in before} == before
    folder = StreamFolder.open(out)
    assert (folder.num_mega_batches, folder.num_periods, folder.place_in_test(4)) == (5, 5, None)
    dates = [(period["first_date"], period["last_date"]) for period in folder.description["periods"][3:]]
    assert dates[0][0] == "1899" and dates[0][1] < dates[1][0] and dates[1][1] == "1958"
    rows = lines(60, 1899, seed=1)
    found = {row["id"] for split in splits_of(out) if split[11:12] in ("4", "5") for row in rows_of(out, split)}
    assert found == {row["id"] for row in rows}
    assert all(folder.counts(f"mega_batch_{t}/{part}")["words"] for t in (4, 5) for part in ("valid", "test"))
    assert main(argv) == 0
    assert "already contains the text of these input files" in capsys.readouterr().err
    earlier = write_lines(tmp_path / "earlier.jsonl", lines(30, 1950, seed=2))
    assert main(["--extend", str(out), "--source", f"text:{earlier}", "--duplicates", "exact"]) == 2
    message = capsys.readouterr().err
    assert "8 of the new documents are earlier than 1958, the last date in the stream: doc-1950 (1950)" in message
    assert "--late drop" in message


def test_the_held_out_text_of_added_periods_is_compared_with_their_mega_batches(tmp_path, three, capsys):
    out = three
    rows = lines(60, 1900, seed=1)
    for row in rows:
        row["text"] = f"{row['text']} {prose(20, 7)}"  # the same end, which the documents of `corpus` do not have
    later = write_lines(tmp_path / "later.jsonl", rows)
    from data_prep.cli import main

    argv = ["--extend", str(out), "--source", f"text:{later}", "--mega-batches", "2", "--duplicates", "exact"]
    assert main(argv) == 0
    splits = splits_of(out)
    [extension] = json.loads((out / "stream.json").read_text())["extensions"]
    for name in ("valid", "test"):
        assert extension["leakage"][name]["overlapping_words"] == 0
        counts, of_periods = extension["leakage"][f"new_{name}"], [splits[f"mega_batch_{t}/{name}"] for t in (4, 5)]
        assert counts["words"] == sum(split["words"] for split in of_periods)
        assert counts["documents"] == counts["overlapping_documents"] == sum(split["documents"] for split in of_periods)
        # It is less where a passage is cut, and more where the words before the end are equal by chance.
        assert 13 <= counts["overlapping_words"] / counts["documents"] <= 24
    leakage = [extension["leakage"][name] for name in ("valid", "test", "new_valid", "new_test")]
    num_new, num_all = (sum(counts["documents"] for counts in some) for some in (leakage[2:], leakage))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "words in a row" in line and "held-out" in line]
    assert line == (
        f"{num_new} of {num_all} held-out texts have 13 words in a row in common "
        'with the new mega-batches (see "leakage" of the last extension in stream.json)'
    )


@pytest.mark.parametrize("decontaminates", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_extension_is_compared_with_the_held_out_text_of_all_periods(tmp_path, corpus, alma_prep, decontaminates):
    """The second extension quotes test documents of the period that the first one has added."""
    from data_prep.cli import main

    out, more = tmp_path / "out", ("--decontaminate", "13") if decontaminates else ()
    assert alma_prep(out, f"text:{corpus}", num_mega_batches=2, more=(*CHRONOLOGICAL, *more)) == 0
    second, third = lines(60, 1900, seed=1), lines(60, 1960, seed=2)

    def extend(name, rows):
        source = f"text:{write_lines(tmp_path / name, rows)}"
        assert main(["--extend", str(out), "--source", source, "--mega-batches", "1", "--duplicates", "exact"]) == 0
        return json.loads((out / "stream.json").read_text())["extensions"][-1]

    extend("second.jsonl", second)
    held_out = {row["id"] for row in rows_of(out, "mega_batch_3/test")}
    quoted = [" ".join(row["text"].split()[:60]) for row in second if row["id"] in held_out]
    for row, text in zip(third, quoted, strict=False):
        row["text"] += f" {text}"
    extension = extend("third.jsonl", third)
    overlapping = extension["leakage"]["added_test"]["overlapping_words"]
    assert extension["leakage"]["added_test"]["words"] == splits_of(out)["mega_batch_3/test"]["words"]
    assert (overlapping == 0) == decontaminates
    removed = [row["words"] for row in extension["cleaning"] if "13-gram overlap" in row["step"]]
    assert bool(removed) == decontaminates


def test_shares_keep_whole_documents_so_that_no_held_out_document_is_trained_on(tmp_path, alma_prep):
    """What shares leave out can be added later. Of a held-out document, it must be all or nothing."""
    rows = [{**row, "text": f"{row['text']}\n\n{prose(400, 7000 + n)}"} for n, row in enumerate(lines(100))]
    sources = [
        f"text:{write_lines(tmp_path / name, part)}@0.5"
        for name, part in (("a.jsonl", rows[::2]), ("b.jsonl", [*rows[1::2], *lines(100, 1700, seed=3)]))
    ]
    more = (*CHRONOLOGICAL, "--passage-words", "60")
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2, more=more) == 0
    words = {row["id"]: len(row["text"].split()) for row in [*rows, *lines(100, 1700, seed=3)]}
    found = Counter()
    for split in splits_of(tmp_path / "out").keys() - {"valid", "test"}:  # these repeat the text of the periods
        for row in rows_of(tmp_path / "out", split):
            found[row["id"]] += row["words"]
    assert 0 < len(found) < len(words)
    assert all(found[name] == words[name] for name in found)


def test_too_few_documents_in_a_period_are_an_error(tmp_path, alma_prep, capsys):
    rows = [{"id": str(n), "date": str(1800 + n), "text": prose(3000, n)} for n in range(6)]
    source = f"text:{write_lines(tmp_path / 'lines.jsonl', rows)}"
    assert alma_prep(tmp_path / "out", source, num_mega_batches=3, more=CHRONOLOGICAL) == 2
    assert "the period of mega_batch_1 (1800 to 1801) has too few documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"partition": "chronological"}, "the number of mega-batches is missing"),
        ({"num_mega_batches": 2, "undated": "drop"}, "add --partition chronological"),
    ],
)
def test_settings_of_periods_are_checked(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        PrepSettings(tmp_path, (Source("python-docs"),), **more)


def test_documents_of_one_date_are_in_the_order_of_their_text():
    """Nothing but text and dates decides which period a document is in."""
    rng = np.random.default_rng(1)
    passages = np.zeros(400, ENTRY)
    passages["num_words"] = 50
    passages["document"] = passages["key"] = [rng.bytes(16) for _ in range(400)]
    dates = np.repeat([18000000000000, 18010000000000], 200)
    layouts = []
    for order in (np.arange(400), rng.permutation(400)):
        found, periods = chronological_layout(passages[order], dates[order], np.array([0]), HeldOut(0.02, 0.1), 4)
        assert [period["first_date"] for period in periods] == ["1800", "1800", "1801", "1801"]
        assert found.splits[4:8] == ["mega_batch_1", "mega_batch_2", "mega_batch_3", "mega_batch_4"]
        assert np.diff(found.cuts).tolist() == [2] * 4 + [88] * 4 + [10] * 4
        layouts.append(passages[order][found.order]["key"].tolist())
    assert layouts[0] == layouts[1]
    with pytest.raises(PrepError, match="mega_batch_1 contains no document"):
        chronological_layout(passages[:1], dates[:1], np.array([0]), HeldOut(0.1, 0.1), 3)


# Without --causal, late documents take the same path, so this is slow.
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_late_documents_are_named_and_left_out_or_count_as_new(tmp_path, alma_prep, capsys, causal):
    """They are compared after copies were removed, so a file to which text is added each month can be given again."""
    from data_prep.cli import main

    old, new = lines(40, 1800), lines(30, 1900, seed=1)
    late = [{"id": f"late-{n}", "date": str(1810 + n), "text": prose(150, 50 + n)} for n in range(12)]
    write_lines(tmp_path / "old.jsonl", old)
    source = f"text:{write_lines(tmp_path / 'new.jsonl', [*old, *late, *new])}"
    more = ["--partition", "chronological", "--vocab-size", "300", "--workers", "1"]
    more += ["--period", "1900", "--causal"] if causal else ["--mega-batches", "1", "--test-words", "900"]
    for name in ("drop", "as-new"):
        out = tmp_path / name
        assert main([str(out), "--source", f"text:{tmp_path}/old.jsonl", *more]) == 0
        argv = ["--extend", str(out), "--source", source, "--workers", "1", *(["--period", "1950"] if causal else [])]
        capsys.readouterr()
        assert main(argv) == 2
        message = capsys.readouterr().err
        assert "12 of the new documents are earlier than 1839, the last date in the stream: late-0 (1810)" in message
        assert "late-9 (1819) and 2 more. " in message and "--late as-new" in message
        assert main([*argv, "--late", name]) == 0
        assert "late-9 (1819) and 2 more. They" in capsys.readouterr().err
        parts = [f"mega_batch_2{part}" for part in ("", "/valid", "/test")]
        found = {row["id"] for part in parts for row in rows_of(out, part)}
        assert found == {row["id"] for row in (new if name == "drop" else [*late, *new])}
        stream = json.loads((out / "stream.json").read_text())
        assert [stream["periods"][1][which] for which in ("first_date", "last_date")] == ["1900", "1929"]
        removed = [row["documents"] for row in stream["extensions"][0]["cleaning"] if "earlier" in row["step"]]
        assert removed == ([12] if name == "drop" else [])
    # What was left out is not a copy when it comes again.
    again = write_lines(tmp_path / "again.jsonl", [*late, *lines(30, 1960, seed=4)])
    out = tmp_path / "drop"
    argv = ["--extend", str(out), "--source", f"text:{again}", "--workers", "1", "--late", "as-new"]
    assert main([*argv, *(["--period", "2000"] if causal else [])]) == 0
    assert {row["id"] for row in rows_of(out, "mega_batch_3")} & {row["id"] for row in late}
    # An extension with nothing but late text adds nothing.
    more_late = write_lines(tmp_path / "more.jsonl", [{"id": "x", "date": "1801", "text": prose(150, 99)}])
    capsys.readouterr()
    assert main(["--extend", str(out), "--source", f"text:{more_late}", "--workers", "1", "--late", "drop"]) == 0
    assert "there is nothing to add" in capsys.readouterr().err


def test_no_text_is_removed_in_favour_of_late_text_that_is_left_out(tmp_path, stream):
    """Texts are published again, some with a few more words, and the file has the late versions, too."""
    from data_prep.cli import main

    out, rows = shutil.copytree(stream, tmp_path / "out"), lines(30, 1900, seed=1)
    again = [*rows[:10]] + [row | {"text": row["text"] + " and more"} for row in rows[10:12]]
    late = [row | {"id": f"late-{n}", "date": "1810"} for n, row in enumerate(again)]
    source = write_lines(tmp_path / "new.jsonl", [*late, *rows])
    assert main(["--extend", str(out), "--source", f"text:{source}", "--workers", "1", "--late", "drop"]) == 0
    parts = [f"mega_batch_5{part}" for part in ("", "/valid", "/test")]
    found = {row["id"] for part in parts for row in rows_of(out, part)}
    assert found == {row["id"] for row in rows}


def test_a_period_with_too_little_text_of_valid_source_is_refused(tmp_path, corpus, alma_prep, capsys):
    book = tmp_path / "books" / "1850.txt"
    book.parent.mkdir()
    book.write_text(prose(300, 7), encoding="utf-8")
    more = [*CHRONOLOGICAL, "--source", f"books:{book.parent}", "--valid-source", "books", "--valid-words", "1000"]
    assert alma_prep(tmp_path / "out", f"text:{corpus}", num_mega_batches=2, more=more) == 2
    message = capsys.readouterr().err
    assert "the period of mega_batch_1 (1800 to 18" in message
    assert "the kind given by --valid-source have only 0 words, but 500 are held out" in message


def test_an_extension_without_text_of_valid_source_says_so(tmp_path, alma_prep, capsys, corpus):
    from data_prep.cli import main

    out, books = tmp_path / "out", tmp_path / "books"
    assert alma_prep(out, f"text:{corpus}", num_mega_batches=2, more=[*CHRONOLOGICAL, "--valid-source", "text"]) == 0
    books.mkdir()
    for year in range(1900, 1920):
        (books / f"{year}.txt").write_text(prose(200, year), encoding="utf-8")
    capsys.readouterr()
    assert main(["--extend", str(out), "--source", f"books:{books}", "--workers", "1"]) == 0
    assert "none is of the kind text, which --valid-source names" in capsys.readouterr().err


def test_an_undated_document_has_the_date_of_the_given_path_and_of_no_folder_above(tmp_path, alma_prep, monkeypatch):
    rows = [{key: row[key] for key in ("id", "text")} for row in lines(20)]
    (tmp_path / "2021-03-05" / "crawl 2019-03").mkdir(parents=True)
    write_lines(tmp_path / "2021-03-05" / "crawl 2019-03" / "lines.jsonl", rows)
    monkeypatch.chdir(tmp_path / "2021-03-05")
    for given, date in (("crawl 2019-03", "2019-03"), ("crawl 2019-03/lines.jsonl", "2019-03")):
        out = tmp_path / date / Path(given).name
        assert alma_prep(out, f"text:{given}", num_mega_batches=1, more=["--duplicates", "exact"]) == 0
        assert {row["date"] for row in rows_of(out, "mega_batch_1")} == {date}
    monkeypatch.chdir(tmp_path / "2021-03-05" / "crawl 2019-03")
    assert alma_prep(tmp_path / "out", "text:lines.jsonl", num_mega_batches=1, more=["--duplicates", "exact"]) == 0
    assert {row["date"] for row in rows_of(tmp_path / "out", "mega_batch_1")} == {None}


def test_late_is_refused_where_no_text_is_late(tmp_path, corpus, alma_prep, capsys):
    assert alma_prep(tmp_path / "out", f"text:{corpus}", more=[*CHRONOLOGICAL, "--late", "drop"]) == 2
    assert "add --extend" in capsys.readouterr().err
    assert alma_prep(tmp_path / "out", f"text:{corpus}", num_mega_batches=1, more=["--duplicates", "exact"]) == 0
    from data_prep.cli import main

    assert main(["--extend", str(tmp_path / "out"), "--source", f"text:{corpus}", "--late", "drop"]) == 2
    assert "it is not chronological: omit --late" in capsys.readouterr().err


def test_a_small_validation_set_cuts_no_document(tmp_path, alma_prep):
    """Whole documents are held out, so shorter passages would make no held-out set more exact."""
    corpus, more = write_lines(tmp_path / "lines.jsonl", lines(400, 1500)), (*CHRONOLOGICAL, "--valid-words")
    passages = []
    for size in ("60", "3000"):
        assert alma_prep(tmp_path / size, f"text:{corpus}", num_mega_batches=2, more=(*more, size)) == 0
        splits = json.loads((tmp_path / size / "stream.json").read_text())["splits"].values()
        assert sum(split["documents"] for split in splits) == 400
        passages.append(sum(split["passages"] for split in splits))
    assert passages[0] == pytest.approx(passages[1], rel=0.2)  # 1% of a mega-batch is a little less

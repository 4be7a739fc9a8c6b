"""Causal streams: nothing in them depends on later text."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from data_prep import pipeline
from data_prep.accounts import removed_rows
from data_prep.cli import main
from data_prep.copies.deduplication import remove_copies
from data_prep.copies.near_copies import Duplicates
from data_prep.reading.index import Index
from data_prep.sources.dates import period_of
from fairseq_alma.checkpoints import read_checkpoint
from tests.commands import RUN, run_command
from tests.data_prep.encoding.test_documents import prose, rows_of, splits_of, write_lines
from tests.fairseq_alma.killing import rows_without_seconds

CAUSAL = ("--partition", "chronological", "--period", "month", "--causal")
MONTHS = range(1, 5)


def month(number: int, seed: int = 0, count: int = 25) -> list[dict]:
    """Documents of a month, of 100 to 300 words, among them copies of each other and of documents of earlier months."""
    lengths = random.Random(100 * seed + number).choices(range(100, 300), k=count)
    rows = [
        {
            "id": f"{number}-{n}-{seed}",
            "date": f"2001-{number:02d}-{1 + n:02d}",
            "text": prose(length, 10**6 * seed + 1000 * number + n),
        }
        for n, length in enumerate(lengths)
    ]
    copies = [(rows[3], 5), (rows[5], 6)]
    if number > 1:
        earlier = month(number - 1)
        copies += [(earlier[7], 9), (earlier[11], 12)]
    for copy, (row, day) in enumerate(copies):
        longer = " and these are some words more than before" * (copy % 2)
        rows.append(
            {"id": f"{number}-copy-{copy}", "date": f"2001-{number:02d}-{day:02d}", "text": row["text"] + longer}
        )
    return rows


def write_month(folder: Path, number: int, rows: list[dict]) -> Path:
    return write_lines(folder / f"2001-{number:02d}.jsonl", rows)


def write_months(folder: Path, months: list[list[dict]]) -> Path:
    for number, rows in enumerate(months, start=1):
        write_month(folder, number, rows)
    return folder


def prepare(out: Path, *sources: str, more: tuple = ()) -> Path:
    argv = [str(out), "--vocab-size", "300", "--seed", "1", "--workers", "1", *CAUSAL, *more]
    for source in sources:
        argv += ["--source", source]
    assert main(argv) == 0
    return out


def extend(out: Path, source: str, *more: str) -> None:
    assert main(["--extend", str(out), "--workers", "1", "--source", source, *more]) == 0


def files_until(out: Path, last: int | None = None) -> dict[str, object]:
    """The content of all files, or of those of the first periods and of what all periods share.

    Not that of stream.json and manifest.json, nor the name of the source.
    """
    found: dict[str, object] = {}
    for path in out.rglob("*"):
        name = path.relative_to(out).as_posix()
        numbers = [int(part) for part in name.replace("/", "_").replace(".", "_").split("_") if part.isdecimal()]
        number = numbers[0] + name.startswith("dedup/") if numbers else 0
        if path.is_dir() or name in ("stream.json", "manifest.json") or number > (last or number):
            continue
        is_table = name.endswith(".parquet")
        found[name] = (
            pyarrow.parquet.read_table(path).drop_columns(["source"]).to_pylist() if is_table else path.read_bytes()
        )
    return found


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """A causal stream of four months from one folder."""
    folder = tmp_path_factory.mktemp("causal")
    source = write_months(folder / "months", [month(number) for number in MONTHS])
    return prepare(folder / "stream", f"text:{source}")


def test_each_month_is_a_mega_batch_and_what_is_fixed_is_of_the_first(stream):
    description = json.loads((stream / "stream.json").read_text())
    assert description["num_mega_batches"] == 4 and description["periods_in_test"] == 1
    for t, period in enumerate(description["periods"], start=1):
        assert period["first_date"].startswith(f"2001-{t:02d}") and period["last_date"].startswith(f"2001-{t:02d}")
    for part in ("valid", "test"):
        assert rows_of(stream, part) == rows_of(stream, f"mega_batch_1/{part}")
        assert splits_of(stream)[part] == splits_of(stream)[f"mega_batch_1/{part}"]
    assert {row["date"][:7] for row in rows_of(stream, "valid")} == {"2001-01"}
    words = {name: split["words"] for name, split in splits_of(stream).items()}
    total = words["mega_batch_2"] + words["mega_batch_2/valid"] + words["mega_batch_2/test"]
    assert words["mega_batch_2/test"] == pytest.approx(total / 10, abs=300)
    # Of copies, the earlier one is in the stream, and of copies of one day the longer one.
    names = {row["id"] for split in splits_of(stream) for row in rows_of(stream, split)}
    expected = {row["id"] for number in MONTHS for row in month(number) if "copy" not in row["id"]}
    longer = {f"{number}-5-0": f"{number}-copy-1" for number in MONTHS}
    assert names == expected - longer.keys() | set(longer.values())


@pytest.mark.parametrize("change", [
        "other text", "more text",
        *(pytest.param(change, marks=pytest.mark.slow) for change in ("less text", "an earlier month ends")),
    ])  # fmt: skip
def test_later_text_changes_no_earlier_byte(tmp_path, stream, change):
    """Months 1 and 2 are the same; later documents differ, and the sizes of the files."""
    if change == "other text":
        later = [month(3, seed=1), month(4, seed=2)]
    elif change == "more text":
        # Copies of text of the first months, longer and shorter, and a long document.
        copies = [{**row, "date": "2001-03-28", "text": f"new {row['text']} new"} for row in month(1)]
        copies += [{**row, "date": "2001-03-28"} for row in month(2)]
        long = {"id": "long", "date": "2001-03-02", "text": prose(9000, 77)}
        later = [[*month(3), *copies, long], month(4), month(5), month(6)]
    else:
        later = [month(3)[:18]] if change == "less text" else []
    source = write_months(tmp_path / "months", [month(1), month(2), *later])
    found = files_until(prepare(tmp_path / "out", f"text:{source}"), last=2)
    expected = files_until(stream, last=2)
    assert found.keys() == expected.keys() and len(expected) > 20
    assert [name for name in found if found[name] != expected[name]] == []
    # The test can fail: what belongs to later months differs.
    if later:
        assert (
            files_until(tmp_path / "out", last=3)["mega_batch_3/train.bin"]
            != (files_until(stream)["mega_batch_3/train.bin"])
        )


def test_a_stream_that_is_extended_month_by_month_is_the_one_made_at_once(tmp_path, stream):
    paths = [write_month(tmp_path, number, month(number)) for number in MONTHS]
    out = prepare(tmp_path / "out", f"text:{paths[0]}")
    extend(out, f"text:{paths[1]}")
    later = write_months(tmp_path / "later", [])
    for number in (3, 4):
        write_month(later, number, month(number))
    extend(out, f"text:{later}")
    found, expected = files_until(out), files_until(stream)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    ours, at_once = (json.loads((each / "stream.json").read_text()) for each in (out, stream))
    for key in ("num_mega_batches", "splits", "periods", "periods_in_test", "held_out", "tokenizer", "dictionary_size"):
        assert ours[key] == at_once[key]


def test_late_text_in_a_file_that_has_grown_counts_as_text_of_the_next_month(tmp_path, capsys):
    """The file also has the old documents, one of them of the last day of the stream."""
    first, late = [*month(1), *month(2)], [row | {"id": f"late-{row['id']}"} for row in month(1, seed=7)]
    out = prepare(tmp_path / "stream", f"text:{write_month(tmp_path, 2, first)}")
    grown = write_month(tmp_path, 3, [*first, *late, *month(3)])
    extend(out, f"text:{grown}", "--late", "as-new")
    description = json.loads((out / "stream.json").read_text())
    assert description["num_mega_batches"] == 3 and description["periods"][2]["first_date"] == "2001-03-01"
    parts = [f"mega_batch_3{part}" for part in ("", "/valid", "/test")]
    assert {row["id"] for part in parts for row in rows_of(out, part)} & {row["id"] for row in late}
    assert looked_ahead(out, capsys) == (0, {})  # it was not there when the first month was made


def test_a_call_that_was_interrupted_in_a_later_period_continues(tmp_path, stream, monkeypatch):
    source = write_months(tmp_path / "months", [month(number) for number in MONTHS])
    argv = [str(tmp_path / "out"), "--source", f"text:{source}", "--vocab-size", "300", "--seed", "1", *CAUSAL]
    record = pipeline.record_documents

    def interrupt(folder, number, *arguments):
        if number == 2:
            raise KeyboardInterrupt
        record(folder, number, *arguments)

    with monkeypatch.context() as context:
        context.setattr(pipeline, "record_documents", interrupt)
        assert main([*argv, "--workers", "1"]) == 130
    assert main([*argv, "--workers", "2"]) == 0
    assert files_until(tmp_path / "out") == files_until(stream)


def test_decontamination_looks_only_at_held_out_text_of_the_past(tmp_path):
    """The third month quotes all documents of the first, and all later ones are quoted by none of the earlier ones."""
    more = ("--decontaminate", "13", "--passage-words", "40")
    quotes = [" ".join(row["text"].split()[:80]) for row in month(1)]
    third = month(3, seed=1)
    for row, quote in zip(third, quotes, strict=False):
        row["text"] += f"\n\n{quote}"
    streams = {}
    for name, months in (("short", [month(1), month(2)]), ("long", [month(1), month(2), third])):
        source = write_months(tmp_path / name / "months", months)
        streams[name] = prepare(tmp_path / name / "out", f"text:{source}", more=more)
    assert files_until(streams["long"], last=2) == files_until(streams["short"], last=2)
    removed = [
        sum(
            row["words"]
            for row in json.loads((out / "stream.json").read_text())["cleaning"]
            if "overlap" in row["step"]
        )
        for out in streams.values()
    ]
    assert removed[0] == 0 and 40 <= removed[1] < 1000


def test_periods_that_cannot_be_made_are_refused(tmp_path, capsys):
    rows = [*month(1), {"id": "vague", "date": "2001", "text": prose(100, 5)}]
    argv = ["--source", f"text:{write_month(tmp_path, 1, rows)}", "--workers", "1"]
    assert main([str(tmp_path / "out"), *argv, *CAUSAL]) == 2
    assert (
        "documents whose date has no month: 1, for example one of 2001. Give --period year" in capsys.readouterr().err
    )
    for more, message in (
        (["--causal", "--partition", "chronological", "--mega-batches", "2"], "add --period"),
        ([*CAUSAL, "--mega-batches", "2"], "omit --mega-batches"),
        ([*CAUSAL, "--duplicates", "keep"], "omit --duplicates keep"),
        (["--period", "1900,1850", "--partition", "chronological"], "nor dates in ascending order"),
        (["--period", "year", "--mega-batches", "2"], "omit --mega-batches"),
        (["--period", "year"], "add --partition chronological"),
    ):
        assert main([str(tmp_path / "out"), *argv, *more]) == 2
        assert message in capsys.readouterr().err, more


def test_later_text_changes_no_earlier_model_decision_or_score(tmp_path):
    """Two runs that grow and choose their waits, on streams that differ from the third month on."""
    runs = []
    for name, later in (("a", [month(3)]), ("b", [month(3, seed=1), month(4, seed=2)])):
        # The paths are equal while a stream is made and trained on, because checkpoints record them.
        source = write_months(tmp_path / "months", [month(1), month(2), *later])
        stream = prepare(tmp_path / "stream", f"text:{source}")
        settings = (*RUN, "dropout=0.1", "updates=3", "validations=1", "wait=auto", "learner=gmoe", "experts=2")
        done = run_command("alma-lm", f"stream={stream}", f"out={tmp_path / 'run'}", *settings, "grow_experts=2")
        assert done.returncode == 0, done.stderr[-3000:]
        folder = tmp_path / name
        folder.mkdir()
        runs.append((tmp_path / "run").rename(folder / "run"))
        for path in (source, stream):
            path.rename(folder / path.name)
    rows = [rows_without_seconds(run) for run in runs]
    assert [len(each) for each in rows] == [4, 5]
    for t in range(3):
        # Scores on the test text of later periods look ahead by their nature, and decide nothing.
        of_later = [row[t].pop("period_perplexities") or [] for row in rows]
        assert of_later[0][:2] == of_later[1][:2]
        assert rows[0][t] == rows[1][t]
    assert rows[0][3] != rows[1][3]
    decisions = [(run / "decisions.jsonl").read_text().splitlines() for run in runs]
    assert decisions[0][:2] == decisions[1][:2]
    names = [path.relative_to(runs[0]) for k in (1, 2) for path in runs[0].glob(f"stages/stage_00{k}/**/*.pt")]
    assert len(names) >= 3
    for name in names:
        first, second = (read_checkpoint(run / name)["model"] for run in runs)
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[key]) for key, value in first.items()), name


def looked_ahead(out: Path, capsys) -> tuple[int, dict[str, str]]:
    """The exit code of the check, and what it says of each quantity that looks ahead."""
    capsys.readouterr()
    code = main(["check", "--look-ahead", str(out)])
    lines = capsys.readouterr().out.splitlines()
    found = [line.removeprefix("looks ahead").strip() for line in lines if line.startswith("looks ahead")]
    return code, dict(line.split(": ", 1) for line in found)


def test_the_check_finds_nothing_in_a_causal_stream(tmp_path, stream, capsys):
    assert looked_ahead(stream, capsys) == (0, {})
    assert main(["check", str(stream)]) == 0
    assert "complete and undamaged" in capsys.readouterr().out
    assert main(["check", str(tmp_path)]) == 2
    # A stream that was extended month by month is causal without the option.
    first = write_month(tmp_path, 1, month(1))
    argv = [
        "--mega-batches",
        "1",
        "--test-words",
        "800",
        "--partition",
        "chronological",
        "--vocab-size",
        "300",
        "--workers",
        "1",
    ]
    assert main([str(tmp_path / "out"), "--source", f"text:{first}", *argv]) == 0
    extend(tmp_path / "out", f"text:{write_month(tmp_path, 2, month(2))}")
    assert looked_ahead(tmp_path / "out", capsys) == (0, {})


def test_the_check_names_all_that_looks_ahead_in_a_stream_that_is_not_causal(tmp_path, capsys):
    source = f"text:{write_months(tmp_path / 'months', [month(number) for number in MONTHS])}"
    argv = ["--source", source, "--partition", "chronological", "--vocab-size", "300", "--workers", "1"]
    by_share, by_date = tmp_path / "by_share", tmp_path / "by_date"
    assert main([str(by_share), *argv, "--mega-batches", "4", "--decontaminate", "13"]) == 0
    code, found = looked_ahead(by_share, capsys)
    both = {"validation set", "test set", "tokenizer", "held-out shares"}
    both |= {f"{name} mega-batches 1 to 4" for name in ("passages of", "near copies in")}
    assert (code, set(found)) == (
        1,
        both | {f"{name} mega-batches 1 to 4" for name in ("limits of", "decontamination of")},
    )
    assert "it has text of up to 2001-04-2" in found["validation set"]
    assert main([str(by_date), *argv, "--period", "month"]) == 0
    assert set(looked_ahead(by_date, capsys)[1]) == both
    assert main([str(tmp_path / "equal"), "--source", source, "--mega-batches", "2", "--vocab-size", "300"]) == 0
    assert set(looked_ahead(tmp_path / "equal", capsys)[1]) == {
        "mega-batches", "validation set", "tokenizer and dictionary", "copies",
    }  # fmt: skip


def later_copies_first(spooled, keys, signatures, work, cache, which, dates):
    """Of near copies in the text of all periods, keep the longest, whatever its date."""
    every = spooled._replace(dates=np.zeros_like(spooled.dates))
    _, found, _ = remove_copies(every, np.empty(0, "V16"), [], work, cache)
    documents, found = spooled.documents[which], Duplicates(*(each[which] for each in found))
    is_removed = found.exact | found.near
    return documents[~is_removed], found, removed_rows("near copy", spooled.names, documents[is_removed])


@pytest.mark.damages_streams
@pytest.mark.parametrize("leak", [
        "tokenizer", "copies",
        *(pytest.param(leak, marks=pytest.mark.slow) for leak in ("validation", "limits", "dates")),
    ])  # fmt: skip
def test_the_check_finds_a_leak_in_a_stream_that_says_that_it_is_causal(tmp_path, capsys, monkeypatch, leak):
    months = [month(number) for number in MONTHS]
    if leak == "tokenizer":
        training = Index.training
        monkeypatch.setattr(Index, "training", lambda self, only_first=False: training(self))
        expected = {"tokenizer"}
    elif leak == "validation":
        join = pipeline.joined_periods
        of_all = [f"mega_batch_{t}/valid" for t in MONTHS]

        def with_validation_of_all(parts, starts):
            periods = join(parts, starts)
            return periods._replace(unions=periods.unions | {"valid": of_all})

        monkeypatch.setattr(pipeline, "joined_periods", with_validation_of_all)
        expected = {"validation set"}
    elif leak == "limits":
        limits = [20010120000000, 20010214000000, 20010312000000]
        monkeypatch.setattr(pipeline, "period_of", lambda period, dates: np.searchsorted(limits, dates, "right"))
        expected = {"limits of mega-batches 1 to 4"}
    elif leak == "dates":  # the last days of March are in the first mega-batch
        late = 20010321000000

        def with_late_text(period, dates):
            return np.where((dates > late) & (dates < 20010400000000), 200101, period_of(period, dates))

        monkeypatch.setattr(pipeline, "period_of", with_late_text)
        monkeypatch.setattr(pipeline, "without_late", lambda settings, documents, *more: (documents, []))
        expected = {"mega-batch 1", "limits of mega-batches 1 to 4"}
    else:
        copies = [{**row, "date": "2001-02-27", "text": f"{row['text']} and more"} for row in month(1)[:8]]
        months[1] += copies
        monkeypatch.setattr(pipeline, "remove_copies", later_copies_first)
        expected = {"near copies"}
    out = prepare(tmp_path / "out", f"text:{write_months(tmp_path / 'months', months)}")
    code, found = looked_ahead(out, capsys)
    assert (code, set(found)) == (1, expected)

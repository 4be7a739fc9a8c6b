"""alma-prep inspect: the text and the page show what the stream contains."""

import shutil

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.inspecting.inspection import inspect
from fairseq_alma.core.stream_folder import split_prefix


def rows_of(report, title):
    return next({name: list(rest) for name, rest in table.rows} for table in report.tables if title in table.title)


def test_samples_and_histograms_are_those_of_the_files(stream_folder, books, read_passages):
    report = inspect(stream_folder, "2", num_samples=4, seed=3)
    passages = read_passages(split_prefix(stream_folder, "mega_batch_2"))
    lengths = rows_of(report, "Length")
    sizes = np.array([len(passage) + 1 for passage in passages])
    assert lengths == {
        f"{low} to {2 * low - 1}": [((sizes >= low) & (sizes < 2 * low)).sum()]
        for low in (2**bits for bits in range(int(np.log2(sizes.min())), int(np.log2(sizes.max())) + 1))
    }
    text = " ".join(path.read_text(encoding="utf-8") for path in books.iterdir())
    assert len(report.samples) == 4
    for heading, sample in report.samples:
        assert heading.startswith("mega_batch_2, passage ")
        assert sample
        assert sample in text
    assert rows_of(report, "What was read")[f"books:{books}"][:2] == [12, 14_400]
    assert list(rows_of(report, "Splits")) == ["mega_batch_2"]
    assert inspect(stream_folder, num_samples=4, seed=3) == inspect(stream_folder, num_samples=4, seed=3)


def write_documents(stream_folder, out, sources):
    """A copy of the stream with documents/SPLIT.parquet; of three passages, the first comes from sources[1]."""
    pytest.importorskip("pyarrow", reason="needs the extra `corpora`")
    import pyarrow
    from pyarrow import parquet

    shutil.copytree(stream_folder, out)
    for split in ("mega_batch_1", "mega_batch_2", "mega_batch_3", "valid", "test"):
        sizes = inspect(out, split.removeprefix("mega_batch_"), num_samples=0)
        count = rows_of(sizes, "Splits")[split][1]
        names = [sources[number % 3 == 0] for number in range(count)]
        table = pyarrow.table({"source": names, "words": pyarrow.array([7] * count, pyarrow.int32())})
        parquet.write_table(table, out / "documents" / f"{split}.parquet", row_group_size=100)


@pytest.mark.damages_streams
def test_one_source_alone_and_the_page(stream_folder, books, tmp_path, capsys):
    source, page = f"books:{books}", tmp_path / "page.html"
    write_documents(stream_folder, tmp_path / "out", ["other", source])
    assert main(["inspect", str(tmp_path / "out"), "--mega-batch", "1", "--source", source, "--page", str(page)]) == 0
    text = capsys.readouterr().out
    report = inspect(tmp_path / "out", "1", source)
    all_passages = rows_of(report, "Splits")["mega_batch_1"][1]
    count = -(-all_passages // 3)
    assert rows_of(report, "Words of each source") == {source: [7 * count, count]}
    assert sum(rest[0] for rest in rows_of(report, "Length").values()) == count
    assert all(int(heading.split()[2].replace(",", "")) % 3 == 1 for heading, _ in report.samples)
    content = page.read_text(encoding="utf-8")
    for heading, sample in report.samples:
        assert heading in text
        assert heading in content
        assert "&#x27;" in content or "'" not in sample
    assert "src=" not in content
    assert "href=" not in content
    assert main(["inspect", str(tmp_path / "out"), "--source", "books:no"]) == 2
    assert f"use one of {source}" in capsys.readouterr().err


@pytest.mark.damages_streams
def test_what_is_missing_is_named(stream_folder, books, tmp_path, capsys):
    old = tmp_path / "of an earlier release"
    shutil.copytree(stream_folder, old, ignore=shutil.ignore_patterns("documents"))
    wrong = {
        "has no split 4: use a number from 1 to 3": [str(stream_folder), "--mega-batch", "4"],
        "--source needs": [str(old), "--source", f"books:{books}"],
        "there is no finished stream": [str(tmp_path)],
    }
    for message, argv in wrong.items():
        assert main(["inspect", *argv]) == 2
        assert message in capsys.readouterr().err

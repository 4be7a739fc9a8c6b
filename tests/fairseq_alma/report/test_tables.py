import csv
import io
from dataclasses import replace

import pytest

from fairseq_alma.report import paper
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.reading import read_runs
from fairseq_alma.report.tables import UNTRAINED, Table, duration, summary, table1, table2, tables_of
from tests.fairseq_alma.report.ledgers import only_comparison, text_rows, write_run, write_text, write_vision


def compare(folder):
    [comparison] = read_runs([folder]).comparisons
    return comparison, all_numbers(comparison)


def cells(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_summary_of_vision_runs(tmp_path):
    for seed, last in ((0, 0.2), (1, 0.4)):
        write_vision(
            tmp_path / f"a{seed}", [0.9, 0.5, last], seed=seed, flops=5_000_000_000, params=1234,
            validations=[0, 0.25, 0.5], wall_seconds=100 + seed,
        )  # fmt: skip
    write_vision(tmp_path / "b", [0.9, 0.9, 0.05], wait=2, validations=[0, 0, 0.5], wall_seconds=4000)
    write_vision(tmp_path / "c", [0.9, 0.4], wait=1, width=8, mega_batches=2)
    table = summary(*compare(tmp_path))
    first, unfinished, waited = sorted(cells(table), key=lambda row: row["wait"] if "wait" in row else row["run"])[0:3]
    assert first == {
        "run": "SM, wait 1, width 4", "by validation": "best", "seeds": "2", "CER": "0.80 ± 0.10",
        "error after first stage, %": "40.00 ± 5.00",
        "final error, %": "30.00 ± 10.00", "final validation, %": "50.00 ± 0.00", "params, last": "1,234",
        "Mem": "3702", "Comp, TFLOP": "0.01", "wall time": "1 min 40 s", "state": "finished",
    }  # fmt: skip
    assert (unfinished["CER"], unfinished["state"]) == ("", "stopped, 1 of 2")
    # 0.9 of the untrained learner and 0.5: worse than 0.75, whatever its test error.
    assert (waited["by validation"], waited["CER"], waited["wall time"]) == ("", "0.95", "1 h 07 min")
    assert table.note.startswith(
        "Best by average validation error (37.50 %), never by test data: SM, wait 1, width 4. Here "
    )


def test_the_summary_of_language_models(tmp_path):
    write_text(tmp_path / "a", [900.0, 900.0, 50.0], wait=2, validations=[800.0, 800.0, 60.0], flops=10**12)
    [row] = cells(summary(*compare(tmp_path)))
    # The geometric mean of 900 and 50, and their arithmetic mean, which is the paper's.
    assert row["geometric mean perplexity"] == "212.13"
    assert row["average perplexity"] == "475.00"
    assert row["geometric mean after first stage"] == "50.00"
    assert (row["final perplexity"], row["final validation"]) == ("50.00", "60.00")
    assert (row["params, last"], row["Mem"], row["Comp, TFLOP"]) == ("1,000", "3000", "2")
    assert "final bits per byte" not in row  # the stream does not say how many bytes its text has


def test_the_summary_has_bits_per_byte_if_the_ledger_has_them(tmp_path):
    for seed, bits in enumerate((1.25, 1.75)):
        rows = text_rows([900.0, 50.0])
        last = replace(rows[1], scores=replace(rows[1].scores, bits_per_byte=bits))
        write_run(tmp_path / f"a{seed}", [rows[0], last], seed=seed, mega_batches=1)
    [row] = cells(summary(*compare(tmp_path)))
    assert row["final bits per byte"] == "1.500 ± 0.250"


def test_table_1_compares_a_sequence_with_iid_at_equal_compute(tmp_path):
    write_text(tmp_path / "w1", [900.0, 50.0, 45.0, 40.0], flops=100)
    write_text(
        tmp_path / "w3 of 3x steps", [900.0, 900.0, 900.0, 30.0], wait=3, updates=None, updates_per_mega_batch=100
    )
    write_text(tmp_path / "w3", [900.0, 900.0, 900.0, 35.0], wait=3, flops=33)  # a third of the compute: no pair
    write_text(tmp_path / "other", [900.0, 900.0, 900.0, 31.0], wait=3, lr=0.1)
    [row] = cells(table1(compare(tmp_path)[0]))
    assert row == {
        "run": "SM, lr 0.001", "k": "3", "perplexity in sequence": "40.00", "perplexity i.i.d.": "30.00",
        "in sequence - i.i.d.": "+10.00",
    }  # fmt: skip


def test_table_1_has_the_papers_values_if_the_paper_has_both_settings(tmp_path):
    ens = {"learner": "ens", "members": 2, "row_members": 2}
    for seed, end in ((0, 24.0), (1, 26.0)):
        write_text(tmp_path / f"a{seed}", [900.0, 50.0, 45.0, 30.0, end], seed=seed, **ens)
    write_text(
        tmp_path / "b", [900.0, 900.0, 900.0, 900.0, 20.0], wait=4, updates=None, updates_per_mega_batch=9, **ens
    )
    [row] = cells(table1(compare(tmp_path)[0]))
    assert row["perplexity in sequence"] == "25.00 ± 1.00"
    assert row["in sequence - i.i.d."] == "+4.00"  # of seed 0, which both have
    assert row["paper, base"] == "24.35 against 24.13"
    assert row["paper, large"] == "18.92 against 17.84"


def test_table_1_of_vision_is_in_percent(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4])
    write_vision(tmp_path / "b", [0.9, 0.9, 0.25], wait=2)
    write_vision(tmp_path / "c", [0.9, 0.9, 0.2], wait="auto")  # its first stage need not have two mega-batches
    [row] = cells(table1(compare(tmp_path)[0]))
    assert (row["k"], row["error, % in sequence"], row["error, % i.i.d."]) == ("2", "40.00", "25.00")
    assert table2(compare(tmp_path)[0]) is None


def test_table_2_has_the_rows_of_the_paper_beside_ours(tmp_path):
    write_text(
        tmp_path / "gmoe", [900.0, 50.0, 45.0, 40.0, 35.0], learner="gmoe", grow_experts=[2, 2, 4],
        row_experts=[4, 4, 6, 8, 12], params=[65_000_000, 65_000_000, 78_000_000, 91_000_000, 116_000_000],
    )  # fmt: skip
    write_text(tmp_path / "sm_w3", [900.0, 900.0, 900.0, 44.0, 44.0], wait=3, experts=8, row_experts=8)
    write_text(
        tmp_path / "gens", [900.0, 50.0, 45.0, 40.0, 38.0], learner="gens", row_members=[1, 1, 2, 3, 4], mega_batches=4
    )
    write_text(tmp_path / "auto", [900.0, 52.0, 47.0, 42.0, 36.0], wait="auto", experts=6, row_experts=6)
    write_text(tmp_path / "mine", [900.0, 51.0, 46.0, 41.0], experts=5, row_experts=5, mega_batches=4)
    table = table2(compare(tmp_path)[0])
    rows = {row["setting"] + row["experts"]: row for row in cells(table)}
    gmoe = rows["gMoE_w14, 6, 8, 12"]
    assert [gmoe[f"t = {t}"] for t in range(1, 5)] == ["50.00", "45.00", "40.00", "35.00"]
    assert gmoe["params, last"] == "116.00M"
    assert gmoe["paper, base"] == "28.57, 26.46, 25.66, 25.28"
    assert gmoe["paper, large"] == "22.47, 21.22, 20.39, 20.15"
    waited = rows["SM_w38"]
    assert [waited[f"t = {t}"] for t in range(1, 5)] == ["*", "*", "44.00", "44.00"]
    assert waited["paper, base"] == "*, *, 25.18, *"
    assert rows["gEns_w14@1..4"]["paper, base"] == "28.57, 26.27, 25.41, 25.01"
    assert rows["SM_auto6"]["paper, base"] == ""  # the paper has no waits that change
    mine = rows["SM_w15"]
    assert (mine["t = 4"], mine["paper, base"]) == ("", "")
    assert "its own corpus" in table.note


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (28.57, 27.45, 26.91, 26.53)),
        ({"replay": "all"}, None),
        ({"updates": None, "updates_per_mega_batch": 5}, (28.57, 27.45, 26.91, 26.53)),  # at wait 1 both are the same
        ({"experts": 6, "row_experts": 6}, None),
        ({"learner": "ens", "members": 2, "row_members": 2}, (26.20, 25.12, 24.57, 24.35)),
        ({"learner": "ens", "members": 3, "row_members": 3}, None),
        ({"average": "power:8"}, None),
        ({"schedule": "constant", "optimizer_state": "keep"}, None),
        ({"from_scratch": True}, None),
        ({"average": None, "schedule": "per_stage", "from_scratch": False}, (28.57, 27.45, 26.91, 26.53)),
    ],
)
def test_a_run_has_the_row_of_the_paper_with_its_settings(tmp_path, settings, expected):
    write_text(tmp_path / "a", [900.0, 50.0, 45.0, 40.0, 35.0], **settings)
    comparison, _ = compare(tmp_path)
    row = paper.row_of(comparison.groups[0])
    assert (row.base if row else None) == expected


def test_formats():
    table = Table("t", "Title: 50% & more", ("run", "x"), (("a|b <i> & c_d", "1.0 ± 0.1"), ("best", "2")), "Note.")
    assert list(csv.reader(io.StringIO(table.csv()))) == [["run", "x"], ["a|b <i> & c_d", "1.0 ± 0.1"], ["best", "2"]]
    assert table.markdown().splitlines() == [
        "**Title: 50% & more**", "", "| run | x |", "|:---|---:|", r"| a\|b &lt;i> & c_d | 1.0 ± 0.1 |", "| best | 2 |",
        "", "Note.",
    ]  # fmt: skip
    latex = table.latex()
    assert r"a|b \ensuremath{<}i\ensuremath{>} \& c\_d" in latex
    assert r"1.0 $\pm$ 0.1" in latex
    assert latex.startswith("% Title: 50% & more\n% Note.\n\\begin{tabular}{lr}")


def test_durations():
    assert [duration(seconds) for seconds in (None, 0.04, 59.7, 61, 3599, 3600, 100_000)] == [
        "", "0.0 s", "1 min 00 s", "1 min 01 s", "59 min 59 s", "1 h 00 min", "27 h 47 min",
    ]  # fmt: skip


def test_all_tables_of_a_comparison(tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0])
    assert [table.name for table in tables_of(*compare(tmp_path))] == ["summary", "table2"]


@pytest.mark.parametrize("start", ["=", "@", "+", "-", "\t", "\r"])
def test_a_learner_of_a_foreign_run_cannot_begin_a_formula(start):
    """A spreadsheet computes cells that begin with these characters."""
    cells = (f'{start}HYPERLINK("http://a.example")', "-0.25", "+1.50 ± 0.10", "-1e+05", "-")
    csv_text = Table("name", "title", ("run", "a", "b", "c", "d"), (cells,)).csv()
    ((first, *others),) = list(csv.reader(io.StringIO(csv_text, newline="")))[1:]
    assert first == f"'{cells[0]}"
    assert others == ["-0.25", "+1.50 ± 0.10", "-1e+05", "'-"]


def test_a_foreign_run_adds_no_link_to_a_table_in_markdown():
    assert r"\[a](http://a.example)" in Table("name", "title", ("run",), (("[a](http://a.example)",),)).markdown()


def test_seeds_that_have_not_all_been_trained_have_no_final_score(tmp_path):
    for seed, perplexities in enumerate(([9000.0, 9000.0, 50.0, 50.0], [9000.0, 9000.0])):
        rows = text_rows(perplexities, wait=2)
        rows[-1] = replace(rows[-1], stage=(len(rows) - 1) // 2, updated=False)  # not at the last of four arrivals
        write_run(tmp_path / str(seed), rows, seed=seed, wait=2, mega_batches=4)
    [row] = summary(*(lambda one: (one, all_numbers(one)))(only_comparison(tmp_path))).rows
    assert UNTRAINED in row and not any("9000" in cell for cell in row)

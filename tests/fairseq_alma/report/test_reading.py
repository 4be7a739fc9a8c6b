import gzip
import json
import os

import pytest

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.holder import Holder
from fairseq_alma.core.lease import Lease, holder_of
from fairseq_alma.report.reading import read_runs
from tests.fairseq_alma.report.ledgers import only_comparison, write_text, write_vision

ERRORS = [0.9, 0.5, 0.4, 0.3, 0.2]


def test_an_unfinished_run_is_read_up_to_its_last_whole_line(tmp_path):
    folder = write_vision(tmp_path / "a", ERRORS[:3], mega_batches=4)
    with open(folder / "ledger.jsonl", "a") as file:
        file.write('{"t": 3, "stage": 3, "upd')
    with Lease(folder):
        assert holder_of(folder)
        [group] = only_comparison(tmp_path).groups
        assert (group.last_t, group.num_arrivals, group.is_finished, group.is_running) == (2, 4, False, True)
    assert not only_comparison(tmp_path).groups[0].is_running


def test_several_seeds_are_running_while_the_folder_above_them_is_held(tmp_path):
    write_vision(tmp_path / "a/seed_0", ERRORS[:3], mega_batches=4)
    with Lease(tmp_path / "a"):
        assert only_comparison(tmp_path).groups[0].is_running


def test_a_lease_whose_holder_is_gone_holds_nothing(tmp_path):
    gone = {**Holder.this_process().to_json(), "pid": 2**22 + 1}
    (tmp_path / "lease.json").write_text(json.dumps(gone))
    assert not holder_of(tmp_path)
    (tmp_path / "lease.json").write_text(json.dumps(gone | {"host": "another", "boot_id": "another"}))
    assert holder_of(tmp_path)
    os.utime(tmp_path / "lease.json", (1, 1))
    assert not holder_of(tmp_path)


def test_a_held_run_without_an_arrival_counts_as_running(tmp_path):
    write_vision(tmp_path / "a", ERRORS)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/settings.json").write_text("{}")
    with Lease(tmp_path / "b"):
        assert read_runs([tmp_path]).is_any_running
    assert not read_runs([tmp_path]).is_any_running


def test_the_number_of_arrivals_is_that_of_the_stream(tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0], mega_batches=None, digests=["1", "2", "3"])
    [group] = only_comparison(tmp_path).groups
    assert (group.num_arrivals, group.last_t) == (3, 1)


def test_a_gzipped_ledger_is_read(tmp_path):
    folder = write_vision(tmp_path / "a", ERRORS)
    content = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").unlink()
    (folder / "ledger.jsonl.gz").write_bytes(gzip.compress(content))
    assert only_comparison(tmp_path).groups[0].mean_column("quality").tolist() == ERRORS
    (folder / "ledger.jsonl.gz").write_bytes(gzip.compress(content)[:-20])
    with pytest.raises(RunError, match=r"ledger\.jsonl\.gz is damaged"):
        read_runs([tmp_path])
    (folder / "ledger.jsonl.gz").write_bytes(gzip.compress(b" " * (20 << 20)))
    with pytest.raises(RunError, match=r"ledger\.jsonl\.gz decompresses to more than [\d,]+ bytes"):
        read_runs([tmp_path])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"t": 2, "stage"', "line 3 is damaged"),
        ("[]", "line 3 is damaged"),
        ("\udce9", "line 3 is damaged"),
        (
            '{"t": 7, "stage": 1, "updated": true, "num_params": 1, "forward_flops": 1, "error_rate": 1}',
            "line 3 contains",
        ),
        (
            '{"t": 2, "stage": 2, "updated": true, "num_params": 1, "forward_flops": 1, "error_rate": "low"}',
            "line 3 is damaged (error_rate is 'low', expected a number",
        ),
        (
            '{"t": 2, "stage": 2, "updated": true, "num_params": 1, "forward_flops": 1, "perplexity": 5.0}',
            "line 3: error_rate is None, expected a number",
        ),
    ],
)
def test_a_run_with_a_damaged_line_is_skipped_and_the_message_names_file_and_line(tmp_path, line, message):
    write_vision(tmp_path / "good", ERRORS)
    ledger = write_vision(tmp_path / "bad", ERRORS, wait=2) / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines()
    lines[2] = line.encode(errors="surrogateescape")
    ledger.write_bytes(b"\n".join(lines) + b"\n")
    assert len(only_comparison(tmp_path).groups) == 1
    [error] = read_runs([tmp_path]).errors
    assert error.startswith(f"{ledger}, {message}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stage": float("inf")}, "line 2 is damaged"),
        ({"num_params": float("nan")}, "line 2 is damaged (num_params is nan, expected a finite number"),
        ({"num_params": 10**400}, "num_params contains a number that is too large for float64"),
        ({"expert_load": [0.5, 0.5]}, "line 2 is damaged (expert_load[0] is 0.5, expected a list"),
        ({"expert_load": [["a"]]}, "line 2 is damaged (expert_load[0][0] is 'a', expected a number"),
    ],
)
def test_a_run_with_impossible_values_is_skipped_and_the_others_are_read(tmp_path, values, message):
    write_vision(tmp_path / "good", ERRORS)
    ledger = write_vision(tmp_path / "bad", ERRORS, wait=1, width=8) / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | values)
    ledger.write_text("\n".join(lines) + "\n")
    assert len(only_comparison(tmp_path).groups) == 1
    [error] = read_runs([tmp_path]).errors
    assert str(ledger) in error and message in error


def test_settings_of_unexpected_types_do_not_stop_the_report(tmp_path):
    write_vision(tmp_path / "a", ERRORS, learner=["sm"])
    write_vision(tmp_path / "b", ERRORS, knob={"x": [1, {"y": 2}]})
    write_vision(tmp_path / "c", ERRORS, knob=[1], dataset="d" * 300)
    write_vision(tmp_path / "d", ERRORS, dataset="emnist", split=["a"])
    (write_vision(tmp_path / "e", ERRORS) / "settings.json").write_text("{}")
    data = read_runs([tmp_path])
    wrong, missing = data.errors
    assert "learner is ['sm'], expected a string" in wrong
    assert "settings.json is damaged (learner is missing)" in missing
    assert len(data.comparisons) == 3
    assert all(len(comparison.slug) < 100 for comparison in data.comparisons)


def test_files_that_a_report_can_do_without_may_be_damaged(tmp_path):
    folder = write_vision(tmp_path / "a", ERRORS, wall_seconds=float("nan"))
    (folder / "provenance.json").write_text("{")
    [group] = only_comparison(tmp_path).groups
    assert group.command == []
    assert "wall_seconds" not in group.runs[0].summary


@pytest.mark.parametrize("ledger", ["ledger.jsonl", "ledger.jsonl.gz"])
def test_a_run_without_settings_is_skipped_and_named(tmp_path, ledger):
    write_vision(tmp_path / "good", ERRORS)
    bad = write_vision(tmp_path / "bad/seed_0", ERRORS, wait=2)
    (bad / "settings.json").unlink()
    (bad / "ledger.jsonl").rename(bad / ledger)
    assert len(only_comparison(tmp_path).groups) == 1
    message = f"{bad} has a ledger, but no settings.json: restore the file from a backup"
    assert read_runs([tmp_path]).errors == [message]
    with pytest.raises(RunError, match="has a ledger, but no settings"):
        read_runs([bad])


def test_damaged_settings_are_named(tmp_path):
    write_vision(tmp_path / "good", ERRORS)
    for name, content in (("b", "{"), ("c", "[1]"), ("d", "\x00")):
        (write_vision(tmp_path / name, ERRORS) / "settings.json").write_text(content)
    errors = read_runs([tmp_path]).errors
    named = [str(tmp_path / name / "settings.json") in error for name, error in zip("bcd", errors, strict=True)]
    assert named == [True, True, True]


def test_if_there_is_nothing_to_report_on_the_message_says_why(tmp_path):
    with pytest.raises(RunError, match=r"nowhere is not a folder: give run folders"):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty contains no run: there is no settings\.json in it"):
        read_runs([tmp_path / "empty"])
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/settings.json").write_text("{}")
    with pytest.raises(RunError, match="begun has no arrival yet"):
        read_runs([tmp_path / "begun"])
    write_vision(tmp_path / "good", ERRORS)
    data = read_runs([tmp_path / "empty", tmp_path / "good"])
    assert "empty contains no run" in data.errors[0]
    assert len(data.comparisons) == 1
